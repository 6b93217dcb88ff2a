"""What users pass, checked: settings of a kernel, and starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_repulsion.adaptation import Learned, Preconditioner, first_scale
from numpyro_repulsion.dynamics import Dynamics, Overdamped
from numpyro_repulsion.gradients import ControlVariates, FullData, FunctionTarget, Gradient, Subsampled, Target
from numpyro_repulsion.interactions import Interaction
from numpyro_repulsion.moves import Archive
from numpyro_repulsion.schedules import BiasBudget, Cyclical, Schedule, as_schedule

__all__ = [
    "check_ensembles",
    "check_groups",
    "check_init_params",
    "check_jumps",
    "check_moves",
    "choose_gradient",
    "count",
    "first_preconditioner",
    "preconditioner_scale",
    "require_instance",
    "step_schedule",
]


def count(name: str, value: Any) -> int:
    """A positive integer."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise ValueError(f"`{name}` must be an integer, 1 or more; got {value!r}.")
    return int(value)


def require_instance(name: str, value: Any, kind: type, example: str) -> None:
    """Refuses anything that is not an instance of a kind of part."""
    if not isinstance(value, kind):
        called = f"; call it, `{value.__name__}()`" if isinstance(value, type) else ""
        raise TypeError(f"`{name}` must be an instance such as {example}; got {value!r}{called}.")


def step_schedule(step_size: float | Callable | BiasBudget, num_steps: int) -> Schedule | None:
    """The step size as a schedule that fits the updates between draws, or ``None`` where it is measured."""
    if isinstance(step_size, BiasBudget):
        return None
    schedule = as_schedule(step_size)
    if isinstance(schedule, Cyclical):
        schedule.check(num_steps)
    return schedule


def preconditioner_scale(value: Any) -> str | np.ndarray | None:
    """How the scales are learned, the scale S given by ``P = S Sᵀ``, or ``None`` for the identity."""
    if value is None:
        return None
    if isinstance(value, str):
        if value not in ("auto", "diagonal", "dense"):
            raise ValueError(f"`preconditioner` must be 'auto', 'diagonal', 'dense', None or an array; got {value!r}.")
        return value
    matrix = np.asarray(value)
    if matrix.dtype.kind not in "fiu" or matrix.ndim not in (1, 2) or not np.isfinite(matrix).all():
        raise ValueError(f"`preconditioner` must be a finite array of shape (d,) or (d, d); got {value!r}.")
    if matrix.ndim == 1:
        if (matrix <= 0).any():
            raise ValueError(f"A diagonal `preconditioner` holds variances and must be positive; got {value!r}.")
        return np.sqrt(matrix)
    if matrix.shape[0] != matrix.shape[1] or not np.allclose(matrix, matrix.T):
        raise ValueError(f"A dense `preconditioner` must be square and symmetric; got shape {matrix.shape}.")
    try:
        return np.linalg.cholesky(matrix)
    except np.linalg.LinAlgError as error:
        raise ValueError("A dense `preconditioner` must be positive definite, as a covariance is.") from error


def first_preconditioner(
    scale: str | np.ndarray | None, learned: Learned | None, flat: jax.Array, gradient: jax.Array
) -> Preconditioner:
    """The change of variables to begin with, for starts ``(L, d)`` and the gradients there.

    :param scale: what :func:`preconditioner_scale` made of the setting.
    :param learned: what the warmup will learn, if there is one.
    """
    if learned is not None and learned.scale is not None:
        return first_scale(flat, gradient, learned.scale == "dense")
    if scale is None or isinstance(scale, str):
        return Preconditioner()
    if scale.shape[0] != flat.shape[1]:
        raise ValueError(
            f"`preconditioner` has shape {scale.shape}, but a particle has {flat.shape[1]} unconstrained parameters; "
            f"expected ({flat.shape[1]},) or ({flat.shape[1]}, {flat.shape[1]})."
        )
    return Preconditioner(jnp.asarray(scale, flat.dtype))


def choose_gradient(gradient: Gradient | None, target: Target) -> Gradient:
    """The gradient that was given, if it fits the target, or the one that fits it best."""
    if gradient is None:
        if not target.plates:
            return FullData()
        return Subsampled() if target.is_random else ControlVariates()
    if isinstance(gradient, Subsampled) and not target.plates:
        raise ValueError(
            f"gradient={gradient!r} needs a model with a subsampled plate, `numpyro.plate(name, size, "
            "subsample_size=...)` with subsample_size < size; this one has none. Drop `gradient`."
        )
    if isinstance(gradient, ControlVariates) and target.is_random:
        raise ValueError(
            "Control variates need a full gradient to hold on to, and the likelihood of this model is random "
            "(numpyro.prng_key): use gradient=Subsampled(), its default."
        )
    return gradient


def check_ensembles(interaction: Interaction, num_ensembles: int) -> None:
    """Refuses a single ensemble where they are balanced against each other."""
    if interaction.balances_ensembles and num_ensembles == 1:
        raise ValueError(
            f"{interaction!r} balances ensembles against each other; set num_ensembles=2 or more, or leave out "
            "`Balanced` for a single one."
        )


def check_groups(size: int, num_ensembles: int, interacts: bool) -> None:
    """Refuses chains that do not make equal groups of two or more."""
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


def check_moves(moves: Archive, interaction: Interaction, dynamics: Dynamics) -> None:
    """Refuses jumps with dynamics whose stationary law they do not leave alone."""
    require_instance("moves", moves, Archive, "Archive()")
    if not dynamics.is_sampler:
        raise ValueError(f"`moves` are jumps of a sampler, and {dynamics!r} is none: drop `moves`.")
    if interaction.interacts and isinstance(dynamics, Overdamped) and dynamics.integrator == "lm":
        raise ValueError(
            "Jumps cannot be combined with noise that is averaged over two updates and correlated by K: use "
            "dynamics=Overdamped('euler'), or an interaction with K = I, such as Balanced()."
        )


def check_jumps(moves: Archive, gradient: Gradient, target: Target, num_warmup: int, size: int) -> None:
    """Refuses runs in which jumps could not learn, or not be exact."""
    if target.is_random:
        raise ValueError(
            f"moves={moves!r} accepts jumps by the exact potential energy, and the likelihood of this model is random "
            "(numpyro.prng_key): drop `moves`."
        )
    if gradient.is_noisy(target):
        raise ValueError(
            f"moves={moves!r} accepts jumps by the potential energy of all data, and gradient={gradient!r} estimates "
            "it from the rows of subsampled plates: use gradient=FullData(), or drop `moves`."
        )
    if num_warmup == 0:
        raise ValueError(f"moves={moves!r} learns its archive in warmup; set num_warmup, 100 or more.")
    if size == 1:
        raise ValueError(
            f'moves={moves!r} needs two particles or more: MCMC(kernel, num_chains=20, chain_method="vectorized", ...).'
        )


def check_init_params(init_params: Any, target: Any, size: int) -> None:
    """Refuses starts that are not one for each of ``size`` chains and every latent site."""
    shapes = jax.tree.map(jnp.shape, init_params)
    for leaf in jax.tree.leaves(init_params):
        if jnp.shape(leaf)[:1] != (size,):
            raise ValueError(f"`init_params` must lead with the {size} chains; got shapes {shapes}.")
    if isinstance(target, FunctionTarget):
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
