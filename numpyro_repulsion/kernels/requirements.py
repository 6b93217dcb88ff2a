"""Requirements: what a run must fulfill, checked before it starts."""

from __future__ import annotations

from typing import Any
import warnings

import jax
import jax.numpy as jnp
import numpy as np

from numpyro.infer import MCMC
from numpyro.util import not_jax_tracer

from numpyro_repulsion.checks import device_memory
from numpyro_repulsion.digests import digest, words
from numpyro_repulsion.dynamics import Dynamics
from numpyro_repulsion.gradients import Gradient, ModelTarget, Particle, Sweeps, Target, is_traced
from numpyro_repulsion.gradients.minibatch import check_rows
from numpyro_repulsion.interactions import Interaction
from numpyro_repulsion.kernels.bound import Settings, schedules_in_words
from numpyro_repulsion.kernels.mcmc import jits_arguments
from numpyro_repulsion.layout import PARTICLES, check_mesh, num_devices
from numpyro_repulsion.moves import Move
from numpyro_repulsion.processes import agree, are_several, is_spread
from numpyro_repulsion.rows import Rows
from numpyro_repulsion.warmup.learned import DIAGNOSIS


def described(kernel: Settings, args: tuple, kwargs: dict) -> dict[str, Any]:
    """Return the settings of a kernel and the arguments of its model, by name, in a form that JSON can hold."""
    given = kernel.preconditioner
    found = {
        "kernel": type(kernel).__name__,
        **schedules_in_words(kernel),
        "preconditioner": given if isinstance(given, str) else digest(given),
    }
    for name in ("interaction", "dynamics", "gradient", "moves", "init_strategy"):
        found[name] = words(getattr(kernel, name))
    for name in ("num_steps", "num_ensembles", "reparam"):
        found[name] = getattr(kernel, name)
    arguments = {"args": args, "kwargs": kwargs}
    for path, leaf in jax.tree.leaves_with_path(arguments, is_leaf=lambda leaf: isinstance(leaf, Rows)):
        value = f"digest {leaf.digest()}" if isinstance(leaf, Rows) else digest(leaf)
        found[f"the model's {path[0].key}{jax.tree_util.keystr(path[1:])}"] = value
    return found


def require_agreement(
    kernel: Settings,
    mcmc: MCMC | None,
    rng_key: jax.Array | None,
    num_warmup: int,
    start: Any,
    args: tuple,
    kwargs: dict | None,
    **more: Any,
) -> None:
    """Raise ``ValueError``, in all processes of a run, if one of them was given something else.

    :param more: what else decides which programs run; without it, the progress bar does.
    """
    # While a program is traced, all values are; run_in_pieces then has asked before.
    if not are_several() or is_traced():
        return
    # First what decides which values are compared, and how: a checksum of parts needs all processes.
    leaves = jax.tree.leaves_with_path((args, kwargs or {}), is_leaf=lambda leaf: isinstance(leaf, Rows))
    names = [(jax.tree_util.keystr(path), is_spread(getattr(leaf, "source", leaf))) for path, leaf in leaves]
    agree({"the kernel or the names of the arguments": f"{type(kernel).__name__} {words(kernel.interaction)} {names}"})
    given = described(kernel, args, kwargs or {})
    given |= {"the key": digest(rng_key), "num_warmup": num_warmup, "the starts": digest(start)}
    given["the mesh"] = dict(jax.sharding.get_abstract_mesh().shape)
    settings = ("num_samples", "thinning", "num_chains", "chain_method", *(() if more else ("progress_bar",)))
    given |= {name: words(getattr(mcmc, name, None)) for name in settings} | more
    agree({name: str(value) for name, value in given.items()})


#: How often programs may hold the arguments of a model, most of them while they are compiled: of 1 GB, 6.2 times on a
#: CPU (findings of the study `scale`), and more often if the model needs their values.
MAX_COPIES = 7


def require_instance(name: str, value: object, kind: type, example: str) -> None:
    if not isinstance(value, kind):
        called = f"; call it, `{value.__name__}()`" if isinstance(value, type) else ""
        raise TypeError(f"`{name}` must be an instance such as {example}; got {value!r}{called}.")


def warn_of_short_warmup(num_warmup: int) -> None:
    """Warn of a warmup that is too short to learn from."""
    if 0 < num_warmup < DIAGNOSIS.warmup:
        warnings.warn(
            f"num_warmup={num_warmup} is too short to adapt the step size and the preconditioner well; use "
            f"num_warmup=1000, and at least {DIAGNOSIS.warmup}.",
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


def check_data(target: Target, gradient: Gradient, mcmc: MCMC | None, size: int, left_out: tuple[str, ...]) -> None:
    """Put rows on the devices of a mesh. Raise ``ValueError`` for `Rows` that each update would read whole, and for
    draws, but for the sites that are left out, that exceed memory."""
    gradient.share(target)
    if not isinstance(target, ModelTarget):
        return
    if target.summed_out:
        warnings.warn(
            f"The deterministic sites {target.summed_out} depend on discrete sites that are summed over, so the "
            "draws leave them out; numpyro.infer.Predictive(model, samples, infer_discrete=True) draws them.",
            stacklevel=4,
        )
    if mcmc is not None:
        _check_room(target, mcmc, size, left_out)
        _warn_of_copies(target, mcmc)
    batches = gradient.batches(target)
    if all(batches[name] == size for name, (size, _) in target.plates.items()):
        check_rows(target.args, target.kwargs)


def _check_room(target, mcmc, size, left_out):
    """Raise ``ValueError`` for draws that exceed the memory of the device, where ``MCMC.run`` keeps all of them."""
    kept = jax.eval_shape(target.constrain, target.prototype)
    kept = {name: site for name, site in kept.items() if name not in left_out}
    each = sum(site.size * site.dtype.itemsize for site in jax.tree.leaves(kept))
    count = mcmc.num_samples // mcmc.thinning
    # Each device of a mesh has the draws of its particles, or all draws if processes are several; those of a CPU share
    # their memory.
    memory, is_cpu = device_memory(), jax.default_backend() == "cpu"
    if are_several():
        memory /= jax.local_device_count() if is_cpu else 1
    else:
        memory *= 1 if is_cpu else num_devices(PARTICLES)
    if each * size * count > memory:
        raise ValueError(
            f"{count} draws of {size} particles would take {each * size * count / 2**30:.1f} GiB, and the device has "
            f"{memory / 2**30:.1f} GiB. Use run_in_pieces(mcmc, ..., directory=...), which keeps them on disk, a "
            'larger `thinning`, or leave sites out, as by mcmc.run(..., extra_fields=("~z.weights",)).'
        )


def _warn_of_copies(target, mcmc):
    """Warn of arguments of which the copies in programs would exceed the memory of the machine."""
    if jits_arguments(mcmc) or jax.default_backend() != "cpu":
        return

    def enters_programs(leaf):
        if isinstance(leaf, np.ndarray):
            return leaf.dtype.kind in "biufc"
        return isinstance(leaf, jax.Array) and not_jax_tracer(leaf)

    size, memory = sum(leaf.nbytes for leaf in target.leaves if enters_programs(leaf)), device_memory()
    if MAX_COPIES * size <= memory:
        return
    warnings.warn(
        f"The arguments of the model take {size / 2**30:.1f} GiB, the machine has {memory / 2**30:.1f} GiB, and "
        f"compiled programs may hold {MAX_COPIES} copies. Pass numpyro_repulsion.Rows(numpy.asarray(x)) for what a "
        "plate takes by rows, or set MCMC(..., jit_model_args=True, progress_bar=False).",
        stacklevel=6,
    )


def check_moves(moves: object, interaction: Interaction, dynamics: Dynamics) -> None:
    """Raise ``ValueError`` if jumps do not preserve the stationary distribution of the dynamics."""
    require_instance("moves", moves, Move, "Archive()")
    if not dynamics.is_sampler:
        raise ValueError(f"`moves` need a sampler, and {dynamics!r} is not one: drop `moves`.")
    if not dynamics.allows_jumps(interaction.interacts):
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


def check_sweeps(gradient: Gradient | str, dynamics: Dynamics) -> None:
    """Raise ``ValueError`` for sweeps with dynamics that would count their correlated noise as heat."""
    if isinstance(gradient, Sweeps) and not dynamics.allows_sweeps:
        raise ValueError(
            f"The noise of gradient={gradient!r} is autocorrelated; {type(dynamics).__name__} would misread it as "
            "temperature, and the draws would be too narrow. Use SGLD, SGHMC or their kernels with repulsion, or "
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
        raise ValueError(f"moves={moves!r} adapts in warmup; set num_warmup=100 or more.")
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
