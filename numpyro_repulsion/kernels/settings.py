"""Checks and conversions of what users pass: settings of a kernel, and starts."""

from __future__ import annotations

from collections.abc import Callable
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from numpyro.infer import MCMC

from numpyro_repulsion.checks import device_memory
from numpyro_repulsion.dynamics import Dynamics
from numpyro_repulsion.gradients import (
    ControlVariates,
    FullData,
    Gradient,
    ModelTarget,
    Particle,
    Subsampled,
    Sweeps,
    Target,
)
from numpyro_repulsion.interactions import Interaction
from numpyro_repulsion.layout import PARTICLES, check_mesh, num_devices
from numpyro_repulsion.moves import Move
from numpyro_repulsion.schedules import BiasBudget, Cyclical, Schedule, as_schedule
from numpyro_repulsion.warmup import LAST_ADAPTED, NUM_HESSIANS, Preconditioner, WarmupPlan, first_scale

__all__ = [
    "Fixed",
    "can_jump",
    "check_ensembles",
    "check_groups",
    "check_init_params",
    "check_jumps",
    "check_moves",
    "check_reparam",
    "check_room",
    "check_sweeps",
    "choose_gradient",
    "dense_limit",
    "first_preconditioner",
    "preconditioner_scale",
    "require_instance",
    "step_schedule",
    "warn_of_short_warmup",
]

#: Bounds on the default limit of dense scales: above it, products with them take longer than most gradients.
DENSE_LIMITS = (64, 512)

#: With fewer iterations, warmup has too few draws to learn from.
MIN_WARMUP = 50


class Fixed:
    """An object whose settings, the attributes without a leading underscore, can be set only once.

    Compiled programs contain the settings, and would ignore a change.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if not name.startswith("_") and name in self.__dict__:
            kind = type(self).__name__
            raise AttributeError(
                "The settings of a kernel cannot change, because compiled programs contain them. Make a new kernel, "
                f"{kind}(..., {name}={value!r}); to continue a run with it, set mcmc.post_warmup_state = state."
            )
        super().__setattr__(name, value)


def require_instance(name: str, value: object, kind: type, example: str) -> None:
    """Raise ``TypeError`` if a value is not an instance of a kind of part."""
    if not isinstance(value, kind):
        called = f"; call it, `{value.__name__}()`" if isinstance(value, type) else ""
        raise TypeError(f"`{name}` must be an instance such as {example}; got {value!r}{called}.")


def step_schedule(step_size: float | Callable | BiasBudget, num_steps: int) -> Schedule | None:
    """Return the step size as a schedule, checked against ``num_steps``, or ``None`` if warmup measures it."""
    if isinstance(step_size, BiasBudget):
        return None
    schedule = as_schedule(step_size)
    if isinstance(schedule, Cyclical):
        schedule.check(num_steps)
    return schedule


def preconditioner_scale(value: ArrayLike | None) -> str | np.ndarray | None:
    """Return how to learn the scales, or S with ``P = S Sᵀ`` for a given P, or ``None`` for the identity."""
    if value is None:
        return None
    if isinstance(value, str):
        if value not in ("auto", "diagonal", "dense", "low_rank"):
            raise ValueError(
                f"`preconditioner` must be 'auto', 'diagonal', 'dense', 'low_rank', None or an array; got {value!r}."
            )
        return value
    matrix = np.asarray(value)
    if matrix.dtype.kind not in "fiu" or matrix.ndim not in (1, 2) or not np.isfinite(matrix).all():
        raise ValueError(f"`preconditioner` must be a finite array of shape (d,) or (d, d); got {value!r}.")
    if matrix.ndim == 1:
        if (matrix <= 0).any():
            raise ValueError(f"A diagonal `preconditioner` holds variances and must be positive; got {value!r}.")
        return np.sqrt(matrix)
    if matrix.shape[0] != matrix.shape[1]:
        raise ValueError(f"A dense `preconditioner` must be of shape (d, d); got shape {matrix.shape}.")
    if not np.allclose(matrix, matrix.T):
        gap = np.abs(matrix - matrix.T).max()
        raise ValueError(
            f"A dense `preconditioner` P must be symmetric; P - P.T has entries up to {gap:.2g}. Give (P + P.T) / 2."
        )
    try:
        return np.linalg.cholesky(matrix)
    except np.linalg.LinAlgError as error:
        smallest = np.linalg.eigvalsh(matrix)[0]
        raise ValueError(
            f"A dense `preconditioner` must be positive definite; its smallest eigenvalue is {smallest:.2g}."
        ) from error


def dense_limit(size: int, num_warmup: int, num_steps: int, is_noisy: bool) -> int:
    """Return up to how many parameters ``preconditioner="auto"`` learns correlations.

    With exact gradients, this is the number of positions of ``size`` particles in the last window that adapts scales,
    because as many gradients and positions together give the covariance of a Gaussian exactly. With minibatches, it is
    the number at which measuring the curvature takes as many gradients as warmup takes updates.
    """
    learned = num_warmup * num_steps / NUM_HESSIANS / 2 if is_noisy else size * num_warmup * LAST_ADAPTED
    return int(np.clip(round(learned), *DENSE_LIMITS))


def first_preconditioner(
    scale: str | np.ndarray | None, plan: WarmupPlan | None, flat: jax.Array, gradient: jax.Array
) -> Preconditioner:
    """Return the first change of variables, for starts ``(L, d)`` and the gradients there.

    :param scale: the result of :func:`preconditioner_scale`.
    :param plan: what the warmup will learn, or ``None`` without a warmup.
    """
    if plan is not None and plan.scale is not None:
        return first_scale(flat, gradient, plan.scale)
    if scale is None or isinstance(scale, str):
        return Preconditioner()
    if scale.shape[0] != flat.shape[1]:
        raise ValueError(
            f"`preconditioner` has shape {scale.shape}, but a particle has {flat.shape[1]} unconstrained parameters; "
            f"expected ({flat.shape[1]},) or ({flat.shape[1]}, {flat.shape[1]})."
        )
    return Preconditioner(jnp.asarray(scale, flat.dtype))


def choose_gradient(gradient: Gradient | None, target: Target) -> Gradient:
    """Return the given gradient, or the default one of the target; raise ``ValueError`` if they do not fit."""
    if gradient is None:
        if not target.plates:
            return FullData()
        return Subsampled() if target.is_random or target.rows_outside else ControlVariates()
    gradient.check_rows(target)
    if isinstance(gradient, Subsampled) and not target.plates:
        raise ValueError(
            f"gradient={gradient!r} needs a model with a subsampled plate, `numpyro.plate(name, size, "
            "subsample_size=...)` with subsample_size < size; this one has none. Drop `gradient`."
        )
    if gradient.has_reference and target.is_random:
        raise ValueError(
            "Control variates need a full gradient as a reference, and the likelihood of this model is random "
            "(numpyro.prng_key): use gradient=Subsampled(), its default, or Sweeps(control_variates=False)."
        )
    return gradient


def warn_of_short_warmup(num_warmup: int) -> None:
    """Warn of a warmup that is too short to learn from."""
    if 0 < num_warmup < MIN_WARMUP:
        warnings.warn(
            f"num_warmup={num_warmup} is too short to learn step size and scales well; use num_warmup=1000, and at "
            f"least {MIN_WARMUP}.",
            stacklevel=3,
        )


def check_ensembles(interaction: Interaction, num_ensembles: int) -> None:
    """Raise ``ValueError`` for a single ensemble with an interaction that balances ensembles."""
    if interaction.balances_ensembles and num_ensembles == 1:
        raise ValueError(
            f"{interaction!r} balances ensembles against each other; set num_ensembles=2 or more, or drop "
            "`Balanced` for a single ensemble."
        )


def check_groups(size: int, num_ensembles: int, interacts: bool) -> None:
    """Raise ``ValueError`` if the chains do not make equal groups of two or more, or equal parts for devices."""
    if size % num_ensembles:
        multiple = num_ensembles * (size // num_ensembles + 1)
        raise ValueError(
            f"num_chains must be a multiple of num_ensembles; got num_chains={size} and "
            f"num_ensembles={num_ensembles}. Use num_chains={multiple}."
        )
    if size == num_ensembles and (num_ensembles > 1 or interacts):
        raise ValueError(
            f"num_chains={size} with num_ensembles={num_ensembles} leaves one particle in each ensemble; "
            f"use num_chains={2 * num_ensembles} or more, or fewer ensembles."
        )
    check_mesh(size, num_ensembles)


def check_room(target: ModelTarget, mcmc: MCMC | None, size: int) -> None:
    """Raise ``ValueError`` for draws that exceed the memory of the device, where ``MCMC.run`` keeps all of them.

    :param size: the number of particles.
    """
    if mcmc is None:
        return
    kept = jax.eval_shape(target.constrain, target.prototype)
    each = sum(site.size * site.dtype.itemsize for site in jax.tree.leaves(kept))
    count = mcmc.num_samples // mcmc.thinning
    # Each device of a mesh has the draws of its particles; those of a CPU share their memory.
    memory = device_memory() * (1 if jax.default_backend() == "cpu" else num_devices(PARTICLES))
    if each * size * count > memory:
        raise ValueError(
            f"{count} draws of {size} particles would take {each * size * count / 2**30:.1f} GiB, and the device has "
            f"{memory / 2**30:.1f} GiB. Use run_in_pieces(mcmc, ..., directory=...), which keeps them on disk, or a "
            "larger `thinning`."
        )


def can_jump(interaction: Interaction, dynamics: Dynamics) -> bool:
    """Return whether jumps preserve the stationary distribution."""
    return dynamics.allows_jumps(interaction.interacts)


def check_moves(moves: object, interaction: Interaction, dynamics: Dynamics) -> None:
    """Raise ``ValueError`` if jumps do not preserve the stationary distribution of the dynamics."""
    require_instance("moves", moves, Move, "Archive()")
    if not dynamics.is_sampler:
        raise ValueError(f"`moves` need a sampler, and {dynamics!r} is not one: drop `moves`.")
    if not can_jump(interaction, dynamics):
        raise ValueError(
            "`moves` cannot be combined with noise that is averaged over two updates and correlated by K: use "
            "dynamics=Overdamped('euler'), or an interaction with K = I, such as Balanced()."
        )


def check_reparam(value: str | None) -> str | None:
    """Return how to reparametrize hierarchical sites; raise ``ValueError`` for anything but ``"auto"`` and ``None``."""
    if value is None or value == "auto":
        return value
    raise ValueError(
        f"`reparam` must be 'auto' or None; got {value!r}. To choose the form of a site yourself, wrap the model: "
        "numpyro.handlers.reparam(model, config={'site': LocScaleReparam(0)})."
    )


def check_sweeps(gradient: Gradient | None, dynamics: Dynamics) -> None:
    """Raise ``ValueError`` for sweeps with dynamics that would count their correlated noise as heat."""
    if isinstance(gradient, Sweeps) and not dynamics.allows_sweeps:
        raise ValueError(
            f"gradient={gradient!r} has noise that cancels over a sweep, and {type(dynamics).__name__} would count "
            "it as heat and make the draws too narrow: use SGLD, SGHMC or their kernels with repulsion, or "
            "gradient=ControlVariates() or Subsampled()."
        )


def check_jumps(moves: Move, gradient: Gradient, target: Target, num_warmup: int, size: int) -> None:
    """Raise ``ValueError`` for runs in which jumps could not learn or would not be exact."""
    if target.is_random:
        raise ValueError(
            f"moves={moves!r} accepts jumps by the exact potential energy, and the likelihood of this model is random "
            "(numpyro.prng_key): drop `moves`."
        )
    if target.rows_outside:
        raise ValueError(
            f"moves={moves!r} accepts jumps by the potential energy of all data, and the sites "
            f"{sorted(target.rows_outside)} use rows of subsampled plates outside of these plates, scaled by hand "
            "for minibatches: put them into the plates, or drop `moves`."
        )
    if gradient.is_noisy(target):
        raise ValueError(
            f"moves={moves!r} accepts jumps by the potential energy of all data, and gradient={gradient!r} estimates "
            "it from the rows of subsampled plates: use gradient=FullData(), or drop `moves`."
        )
    if num_warmup == 0:
        raise ValueError(f"moves={moves!r} learns in warmup; set num_warmup, 100 or more.")
    if size < moves.min_particles:
        raise ValueError(
            f"moves={moves!r} needs {moves.min_particles} particles or more: "
            'MCMC(kernel, num_chains=20, chain_method="vectorized", ...).'
        )


def check_init_params(init_params: Particle | None, target: Target, size: int) -> None:
    """Raise ``ValueError`` or ``TypeError`` unless there is one start for each of ``size`` chains and latent site."""
    if init_params is None:
        if not isinstance(target, ModelTarget):
            raise ValueError(
                "A kernel made from a `potential_fn` needs `init_params`, one start per chain: "
                f"mcmc.run(key, init_params=...) with a leading axis of {size}."
            )
        return
    shapes = jax.tree.map(jnp.shape, init_params)
    for leaf in jax.tree.leaves(init_params):
        if jnp.shape(leaf)[:1] != (size,):
            raise ValueError(
                f"`init_params` must have one start for each chain, a leading axis of {size}; got shapes {shapes}."
            )
    if not isinstance(target, ModelTarget):
        if not all(jnp.issubdtype(jnp.result_type(leaf), jnp.floating) for leaf in jax.tree.leaves(init_params)):
            raise TypeError(f"`init_params` must be floating point; got {jax.tree.map(jnp.result_type, init_params)}.")
        return
    expected = {name: (size, *site.shape) for name, site in target.prototype.items()}
    if not isinstance(init_params, dict) or set(init_params) != set(expected):
        got = sorted(init_params) if isinstance(init_params, dict) else type(init_params).__name__
        raise ValueError(
            f"`init_params` must be a dictionary with the latent sites {sorted(expected)} (unconstrained values); got "
            f"{got}."
        )
    if shapes != expected:
        raise ValueError(f"`init_params` are unconstrained values of shapes {expected}, chains first; got {shapes}.")
