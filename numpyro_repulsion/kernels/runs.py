"""Runs by kernels of this package, told from others."""

from __future__ import annotations

from typing import Any

from numpyro.infer import MCMC

from numpyro_repulsion.kernels.base import ParticleKernel

__all__ = ["kernel_of", "require_draws"]


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
    """Refuses an ``MCMC`` that has not run, by a ``ValueError``."""
    if mcmc._states is None:
        raise ValueError("This MCMC has no draws yet; call mcmc.run(key, ...) first.")
