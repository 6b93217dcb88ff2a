"""What a run is given, in words and digests, on which the processes of a run on several hosts must agree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from numpyro.infer import MCMC

from numpyro_repulsion.digests import digest, words
from numpyro_repulsion.kernels.bound import Settings
from numpyro_repulsion.processes import agree, are_several, is_spread
from numpyro_repulsion.rows import Rows

__all__ = ["described", "require_agreement"]

#: Counts of updates at which schedules are evaluated.
_COUNTS = (0, 1, 10, 100, 1000, 10_000, 100_000)


def described(kernel: Settings, args: tuple, kwargs: dict) -> dict[str, Any]:
    """Return the settings of a kernel and the arguments of its model, by name, in a form that JSON can hold."""
    found = {
        "kernel": type(kernel).__name__,
        "step_size": _schedule(kernel.step_size),
        "preconditioner": kernel.preconditioner if _is_word(kernel.preconditioner) else digest(kernel.preconditioner),
    }
    for name in ("interaction", "dynamics", "gradient", "moves", "init_strategy"):
        found[name] = words(getattr(kernel, name))
    weight = getattr(kernel.interaction, "weight", None)
    if callable(weight):
        found["weight of the interaction"] = _schedule(weight)
    for name in ("num_steps", "num_ensembles", "reparam"):
        found[name] = getattr(kernel, name)
    given = {"args": args, "kwargs": kwargs}
    for path, leaf in jax.tree.leaves_with_path(given, is_leaf=lambda leaf: isinstance(leaf, Rows)):
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

    :param start: the positions of particles, or a state.
    :param more: what else decides which programs run; without it, the progress bar does.
    """
    # While a program is traced, all values are; run_in_pieces then has asked before.
    if not are_several() or isinstance(jnp.zeros(()), jax.core.Tracer):
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


def _is_word(value):
    return value is None or isinstance(value, str)


def _schedule(schedule: Callable | Any) -> str:
    if not callable(schedule):
        return words(schedule)
    # Schedules of optax are functions, which do not show their settings.
    return f"{words(schedule)}: {[float(schedule(jnp.asarray(n))) for n in _COUNTS]}"
