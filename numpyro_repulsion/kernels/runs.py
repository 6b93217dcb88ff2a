"""Runs by kernels of this package, told from others."""

from __future__ import annotations

from typing import Any

import numpy as np

from numpyro.infer import MCMC

from numpyro_repulsion.kernels.base import ParticleKernel

__all__ = ["is_warmup", "kernel_of", "require_draws"]


def kernel_of(mcmc: Any, who: str, instead: str = "") -> ParticleKernel:
    """The kernel of an ``MCMC``.

    :param who: what was called with it, for the message.
    :param instead: what to do with others, a sentence.
    :raises TypeError: for anything but an ``MCMC`` with a kernel of this package.
    """
    kernel = getattr(mcmc, "sampler", None)
    if not isinstance(mcmc, MCMC) or not isinstance(kernel, ParticleKernel):
        raise TypeError(
            f"{who} takes a numpyro.infer.MCMC with a kernel of this package, such as SGLDR(model); got "
            f"{type(mcmc).__name__}{f' with {type(kernel).__name__}' if kernel is not None else ''}.{instead}"
        )
    return kernel


def require_draws(mcmc: MCMC) -> None:
    """Refuses an ``MCMC`` that has no draws, by a ``ValueError``."""
    if mcmc._states is None:
        raise ValueError("This MCMC has no draws yet; call mcmc.run(key, ...) first.")
    # NumPyro leaves zeros after a warmup that collects nothing.
    is_ours = isinstance(mcmc.sampler, ParticleKernel)
    if is_ours and is_warmup(mcmc) and not np.any(mcmc.get_extra_fields()["step_size"]):
        raise ValueError(
            "This MCMC has only warmed up and kept no draws; call mcmc.run(key, ...), or mcmc.warmup(..., "
            "collect_warmup=True) for those of warmup."
        )


def is_warmup(mcmc: MCMC) -> bool:
    """Whether the draws that an ``MCMC`` with a kernel of this package holds are those of its warmup."""
    tuning = mcmc.last_state.tuning
    return bool(np.max(tuning.iteration) <= np.max(tuning.num_warmup))
