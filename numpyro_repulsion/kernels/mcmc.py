"""Access to private attributes of NumPyro's ``MCMC``; no other module reads them."""

from __future__ import annotations

from collections.abc import Callable
import sys
from typing import Any

import jax

from numpyro.infer import MCMC

from numpyro_repulsion.processes import IN_ALL, are_several, here, is_spread
from numpyro_repulsion.rows import Rows


def arguments(mcmc: MCMC) -> tuple[tuple, dict]:
    """Return the model's ``args`` and ``kwargs`` of the last run."""
    return mcmc._args, mcmc._kwargs


def set_arguments(mcmc: MCMC, args: tuple, kwargs: dict) -> None:
    """Set the model's arguments, as ``MCMC.run`` does."""
    mcmc._args, mcmc._kwargs = args, kwargs


def draws(mcmc: MCMC) -> dict[str, Any] | None:
    """Return the collected fields, ``(chains, draws, ...)``, or ``None`` before a run."""
    return mcmc._states


def bring_here(mcmc: MCMC) -> None:
    """Replace results that lie on the devices of several processes by those of this process.

    :raises ValueError: outside of the mesh, if results depend on data of which each process has a part.
    """
    if not are_several() or mcmc._states is None:
        return
    if (
        any(is_spread(getattr(leaf, "source", leaf)) for leaf in _argument_leaves(mcmc))
        and jax.sharding.get_abstract_mesh().empty
    ):
        raise ValueError(f"The data of this run are divided among several processes. {IN_ALL}")
    set_results(mcmc, here(mcmc._states), here(mcmc._last_state))


def _argument_leaves(mcmc):
    return jax.tree.leaves((mcmc._args, mcmc._kwargs), is_leaf=lambda leaf: isinstance(leaf, Rows))


def set_results(mcmc: MCMC, states: dict[str, Any], last_state: Any) -> None:
    """Store collected fields, ``(chains, draws, ...)``, and the last state, as ``MCMC.run`` does."""
    mcmc._states = states
    # NumPyro itself would move them to the device.
    mcmc._states_flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), states)
    mcmc._last_state = last_state


def collected_fields(mcmc: MCMC) -> tuple[str, tuple[str, ...]]:
    """Return the field of the state that holds the sample, and the fields that are collected by default."""
    return mcmc._sample_field, tuple(mcmc._default_fields)


def compiled_functions(mcmc: MCMC) -> tuple[Callable, Callable]:
    """Return NumPyro's cached functions for one iteration and for postprocessing, for the arguments of the last run."""
    return mcmc._get_cached_fns()


def collects_warmup(mcmc: MCMC) -> bool:
    """Return whether ``MCMC.warmup(collect_warmup=True)`` is running."""
    return mcmc._collection_params["lower"] == 0 and mcmc.num_warmup > 0


def jits_arguments(mcmc: MCMC) -> bool:
    """Return whether the model's arguments are inputs of the compiled program."""
    return mcmc._jit_model_args


def jit_spread_arguments(mcmc: MCMC) -> None:
    """Make the model's arguments inputs of the compiled program if no process has the whole of some of them: JAX allows
    such arrays nowhere else."""
    if are_several() and any(is_spread(leaf) or isinstance(leaf, Rows) for leaf in _argument_leaves(mcmc)):
        mcmc._jit_model_args = True


def calling_mcmc(method: str | None = None) -> tuple[MCMC | None, tuple[str, ...]]:
    """Return the ``MCMC`` whose method called the caller of this function, and the sites of which it keeps no draws
    (``extra_fields=("~z.site",)``); NumPyro offers kernels no other way.

    Call it directly in what NumPyro calls. Arguments that are spread over processes become inputs of its programs.

    :param method: the name of the method; ``None`` for any.
    """
    frame = sys._getframe(2)
    found, mcmc = frame.f_locals, frame.f_locals.get("self")
    if not isinstance(mcmc, MCMC) or method not in (None, frame.f_code.co_name):
        return None, ()
    jit_spread_arguments(mcmc)
    return mcmc, tuple(found.get("remove_sites", ()))
