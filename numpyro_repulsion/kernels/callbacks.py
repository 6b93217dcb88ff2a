"""Warnings that a kernel emits while it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
import warnings

import jax
from jax import lax
import numpy as np

from numpyro_repulsion.findings import Diagnosis, Finding, flagged_updates
from numpyro_repulsion.kernels.mcmc import shows_states
from numpyro_repulsion.warmup import WarmupDiagnosis

__all__ = ["enable_live_warnings", "silenced", "warn_at_first_divergence", "warn_after_warmup", "warn_on_host"]

_live_warnings = True


def enable_live_warnings(enabled: bool = True) -> None:
    """Switch on or off the warnings that kernels give while they run; they are on by default.

    A kernel warns at the end of warmup and at its first divergence. With a progress bar, and in ``run_in_pieces``, the
    host warns between iterations. Otherwise the compiled program calls back into Python, and JAX does not store such a
    program in its persistent compilation cache: if that matters, keep the progress bar, or switch the warnings off
    before ``MCMC.run``. The counts stay in the results.

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


def _in_program() -> bool:
    """Return whether the program that is traced must warn by itself."""
    return _live_warnings and not shows_states()


def warn_at_first_divergence(before: jax.Array, after: jax.Array, remedy: str) -> None:
    """Warn, from the compiled program, when the count of flagged updates first exceeds 0."""

    def warn(before, after):
        # A batched `cond` runs both branches, so check again. Use NumPy, because a JAX computation in a callback
        # would wait for the program that called it.
        if np.asarray(before) == 0:
            _warn_of_divergences(int(np.asarray(after)), remedy)

    if _in_program():
        lax.cond((before == 0) & (after > 0), lambda: jax.debug.callback(warn, before, after), lambda: None)


def warn_after_warmup(is_final: jax.Array, diagnose_warmup: Callable[[], WarmupDiagnosis]) -> None:
    """Warn of the problems found at the end of warmup, from the compiled program."""

    def warn(is_final, diagnosis):
        if np.asarray(is_final):
            _warn_of_warmup(jax.tree.map(np.asarray, diagnosis).findings())

    if _in_program():
        lax.cond(is_final, lambda: jax.debug.callback(warn, is_final, diagnose_warmup()), lambda: None)


def warn_on_host(
    before: int, after: int, remedy: str, has_warmed_up: bool, findings: Callable[[], list[Finding]]
) -> None:
    """Give the same warnings as the compiled program, from the host between two calls.

    :param before: the count of flagged updates before the last call.
    :param after: the count after it.
    :param remedy: what makes steps shorter.
    :param has_warmed_up: whether the last call completed the warmup.
    :param findings: returns the problems found at the end of warmup.
    """
    if not _live_warnings:
        return
    if before == 0:
        _warn_of_divergences(after, remedy)
    if has_warmed_up:
        _warn_of_warmup(findings())


def _warn_of_divergences(count, remedy):
    if count > 0:
        warnings.warn(
            "A particle's update was flagged `diverging` (this warning comes once; `diagnose` has the final count):\n"
            f"{Diagnosis([flagged_updates(count, 0.0, remedy)])}\n"
            "If the data changed since warmup, warm up again on the new data.",
            RuntimeWarning,
            stacklevel=3,
        )


def _warn_of_warmup(findings):
    if found := Diagnosis(findings):
        warnings.warn(f"Warmup found problems:\n{found}", RuntimeWarning, stacklevel=3)
