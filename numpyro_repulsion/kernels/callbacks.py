"""Warnings that a kernel emits while it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
import warnings

import jax
from jax import lax
import numpy as np

from numpyro_repulsion.findings import MAX_FLAGGED, Diagnosis, Finding, flagged_updates
from numpyro_repulsion.kernels.mcmc import shows_states
from numpyro_repulsion.warmup import WarmupDiagnosis

__all__ = ["enable_live_warnings", "silenced", "warn_after_warmup", "warn_of_divergences", "warn_on_host"]

_live_warnings = True


def enable_live_warnings(enabled: bool = True) -> None:
    """Switch on or off the warnings that kernels give while they run; they are on by default.

    A kernel warns at the end of warmup, and when more updates diverge than one in a thousand of those of warmup. With a
    progress bar, and in ``run_in_pieces``, the host warns between iterations. Otherwise the compiled program calls back
    into Python, and JAX does not store such a program in its persistent compilation cache: if that matters, keep the
    progress bar, or switch the warnings off before ``MCMC.run``. The counts stay in the results.

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


def warn_of_divergences(before: jax.Array, after: jax.Array, num_planned: jax.Array, remedy: str) -> None:
    """Warn, from the compiled program, when the count of flagged updates first is large.

    :param before: the count before this iteration.
    :param after: the count after it.
    :param num_planned: how many updates a run as long as its warmup makes.
    """

    def warn(before, after, num_planned):
        # A batched `cond` runs both branches, so check again. Use NumPy, because a JAX computation in a callback
        # would wait for the program that called it.
        if _become_many(*map(np.asarray, (before, after, num_planned))):
            _warn_of_divergences(int(np.asarray(after)), remedy)

    if _in_program():
        values = before, after, num_planned
        lax.cond(_become_many(*values), lambda: jax.debug.callback(warn, *values), lambda: None)


def _become_many(before, after, num_planned):
    """Return whether flagged updates become more than one in a thousand of a run, or the first without a warmup."""
    many = MAX_FLAGGED * num_planned
    return (after > many) & (before <= many)


def warn_after_warmup(is_final: jax.Array, diagnose_warmup: Callable[[], WarmupDiagnosis]) -> None:
    """Warn of the problems found at the end of warmup, from the compiled program."""

    def warn(is_final, diagnosis):
        if np.asarray(is_final):
            _warn_of_warmup(jax.tree.map(np.asarray, diagnosis).findings())

    if _in_program():
        lax.cond(is_final, lambda: jax.debug.callback(warn, is_final, diagnose_warmup()), lambda: None)


def warn_on_host(
    before: int, after: int, num_planned: int, remedy: str, findings: Callable[[], list[Finding]] | None
) -> None:
    """Give the same warnings as the compiled program, from the host between two calls.

    :param before: the count of flagged updates before the last call.
    :param after: the count after it.
    :param num_planned: how many updates a run as long as its warmup makes.
    :param remedy: what makes steps shorter.
    :param findings: returns the problems found at the end of warmup, if the last call completed it.
    """
    if not _live_warnings:
        return
    if _become_many(before, after, num_planned):
        _warn_of_divergences(after, remedy)
    if findings is not None:
        _warn_of_warmup(findings())


def _warn_of_divergences(count, remedy):
    warnings.warn(
        "Updates were flagged `diverging` (this warning comes once; `diagnose` has the final count):\n"
        f"{Diagnosis([flagged_updates(count, 0.0, remedy)])}",
        RuntimeWarning,
        stacklevel=3,
    )


def _warn_of_warmup(findings):
    if found := Diagnosis(findings):
        warnings.warn(f"Warmup found problems:\n{found}", RuntimeWarning, stacklevel=3)
