"""Warnings that a kernel emits while it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
import warnings

import jax
from jax import lax
import numpy as np

from numpyro_repulsion.findings import Diagnosis, flagged_updates
from numpyro_repulsion.warmup import WarmupDiagnosis

__all__ = ["enable_live_warnings", "silenced", "warn_at_first_divergence", "warn_after_warmup"]

_live_warnings = True


def enable_live_warnings(enabled: bool = True) -> None:
    """Switch on or off the warnings that kernels give while they run; they are on by default.

    A kernel warns at the end of warmup and at its first divergence. A compiled program that can warn calls back into
    Python, and JAX does not store it in its persistent compilation cache. If that cache matters, switch the warnings
    off before ``MCMC.run``; the counts stay in the results.

    :param enabled: ``False`` switches them off.

    **Example**

    .. doctest::

        >>> from numpyro_repulsion import enable_live_warnings
        >>> enable_live_warnings(False)
        >>> enable_live_warnings()
    """
    global _live_warnings
    _live_warnings = enabled


@contextmanager
def silenced() -> Iterator[None]:
    """Switch the warnings off for programs compiled within, whatever :func:`enable_live_warnings` was set to."""
    before = _live_warnings
    enable_live_warnings(False)
    try:
        yield
    finally:
        enable_live_warnings(before)


def warn_at_first_divergence(before: jax.Array, after: jax.Array, remedy: str) -> None:
    """Warn once, when the count of flagged updates leaves 0."""

    def warn(before, after):
        # A batched `cond` runs both branches, so check again. Use NumPy, because a JAX computation in a callback
        # would wait for the program that called it.
        if np.asarray(before) == 0 and (count := int(np.asarray(after))) > 0:
            found = Diagnosis([flagged_updates(count, 0.0, remedy)])
            warnings.warn(
                "A particle's update was flagged `diverging` (warned once; `diagnose` has the final count):\n"
                f"{found}\nIf the data changed since warmup, warm up again on the new data.",
                RuntimeWarning,
                stacklevel=2,
            )

    if _live_warnings:
        lax.cond((before == 0) & (after > 0), lambda: jax.debug.callback(warn, before, after), lambda: None)


def warn_after_warmup(is_final: jax.Array, diagnose_warmup: Callable[[], WarmupDiagnosis]) -> None:
    """Warn of the problems found at the end of warmup."""

    def warn(is_final, diagnosis):
        if np.asarray(is_final) and (found := Diagnosis(jax.tree.map(np.asarray, diagnosis).findings())):
            warnings.warn(f"Warmup found problems:\n{found}", RuntimeWarning, stacklevel=2)

    if _live_warnings:
        lax.cond(is_final, lambda: jax.debug.callback(warn, is_final, diagnose_warmup()), lambda: None)
