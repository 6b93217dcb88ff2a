"""What NumPyro's ``MCMC`` keeps to itself and this package needs. Nothing else reads its private attributes."""

from __future__ import annotations

from collections.abc import Callable
import sys
from typing import Any

import jax

from numpyro.infer import MCMC

__all__ = [
    "arguments",
    "calling_mcmc",
    "collected_fields",
    "compiled_functions",
    "draws",
    "jits_arguments",
    "set_arguments",
    "set_results",
]


def arguments(mcmc: MCMC) -> tuple[tuple, dict]:
    """The model's ``args`` and ``kwargs`` of the last run."""
    return mcmc._args, mcmc._kwargs


def set_arguments(mcmc: MCMC, args: tuple, kwargs: dict) -> None:
    """Set the model's arguments, as ``MCMC.run`` does."""
    mcmc._args, mcmc._kwargs = args, kwargs


def draws(mcmc: MCMC) -> dict[str, Any] | None:
    """The collected fields, ``(chains, draws, ...)``, or ``None`` before a run."""
    return mcmc._states


def set_results(mcmc: MCMC, states: dict[str, Any], last_state: Any) -> None:
    """Store collected fields, ``(chains, draws, ...)``, and the last state, as ``MCMC.run`` does."""
    mcmc._states = states
    # NumPyro would make them arrays on the device.
    mcmc._states_flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), states)
    mcmc._last_state = last_state


def collected_fields(mcmc: MCMC) -> tuple[str, tuple[str, ...]]:
    """The field of the state that holds the sample, and the fields that are collected by default."""
    return mcmc._sample_field, tuple(mcmc._default_fields)


def compiled_functions(mcmc: MCMC) -> tuple[Callable, Callable]:
    """The functions for one iteration and for postprocessing that NumPyro keeps for the arguments of the last run."""
    return mcmc._get_cached_fns()


def jits_arguments(mcmc: MCMC) -> bool:
    """Whether the model's arguments are inputs of the compiled program."""
    return mcmc._jit_model_args


def calling_mcmc() -> MCMC | None:
    """The ``MCMC`` whose method called the function that calls this one; NumPyro tells kernels in no other way."""
    mcmc = sys._getframe(2).f_locals.get("self")
    return mcmc if isinstance(mcmc, MCMC) else None
