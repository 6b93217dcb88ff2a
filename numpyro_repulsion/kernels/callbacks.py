"""Warnings emitted while a kernel runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
import warnings

import jax
from jax import lax
import numpy as np

from numpyro_repulsion.findings import Diagnosis, flagged_updates
from numpyro_repulsion.warmup import WarmupDiagnosis

__all__ = ["enable_live_warnings", "silenced", "warn_at_first_divergence", "warn_by_verdict"]

_live_warnings = True


def enable_live_warnings(enabled: bool = True) -> None:
    """Whether kernels warn while they run: at warmup's end, and at the first particle that diverges. On by default.

    A compiled program that can warn calls back into Python and is not stored in JAX's persistent compilation cache.
    Switch the warnings off, before ``MCMC.run``, where that cache matters; the counts stay in the results.

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
    """Programs made within do not warn, whatever :func:`enable_live_warnings` was set to."""
    before = _live_warnings
    enable_live_warnings(False)
    try:
        yield
    finally:
        enable_live_warnings(before)


def warn_at_first_divergence(before: jax.Array, after: jax.Array, remedy: str) -> None:
    """Warns, once, when the count of flagged updates leaves 0."""

    def warn(before, after):
        # Where `cond` is batched both its branches run, so look again. In NumPy, for a callback that waits for a
        # computation of JAX's waits for the program that called it.
        if np.asarray(before) == 0 and (count := int(np.asarray(after))) > 0:
            found = Diagnosis([flagged_updates(count, 0.0, remedy)])
            warnings.warn(
                "A particle's update was flagged `diverging` (warned once; `diagnose` has the final count):\n"
                f"{found}\nIf the run has other data than its warmup, warm up on these.",
                RuntimeWarning,
                stacklevel=2,
            )

    if _live_warnings:
        lax.cond((before == 0) & (after > 0), lambda: jax.debug.callback(warn, before, after), lambda: None)


def warn_by_verdict(is_final: jax.Array, diagnose_warmup: Callable[[], WarmupDiagnosis]) -> None:
    """Warns of what the end of warmup found wrong."""

    def warn(is_final, verdict):
        if np.asarray(is_final) and (found := Diagnosis(jax.tree.map(np.asarray, verdict).findings())):
            warnings.warn(f"Warmup expects trouble:\n{found}", RuntimeWarning, stacklevel=2)

    if _live_warnings:
        lax.cond(is_final, lambda: jax.debug.callback(warn, is_final, diagnose_warmup()), lambda: None)
