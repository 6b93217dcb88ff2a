"""Checks of user-supplied numbers, which are stored as plain Python numbers, and of the release of jaxlib."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import metadata
import math
from numbers import Real
import os
from typing import Any
import warnings

import jax
import jax.numpy as jnp
import numpy as np


@cache
def check_jaxlib() -> None:
    """Warn, once, of releases of JAX that fail on CPUs."""
    version = metadata.version("jaxlib")
    if version.startswith("0.10.") and jax.default_backend() == "cpu":
        wrong = ", and it computes some programs wrong (jax-ml/jax, issue 39103)" * (version == "0.10.2")
        warnings.warn(
            f"On CPUs jaxlib {version} may hang if chains solve triangular systems, as for MultivariateNormal{wrong}. "
            "Install an earlier or a later version of jax and jaxlib.",
            RuntimeWarning,
            stacklevel=4,
        )


def is_auto(value: Any) -> bool:
    """Return whether a setting is ``"auto"``, the automatic choice."""
    return isinstance(value, str) and value == "auto"


def integer(what: str, value: Any, least: int = 1, expected: str | None = None) -> int:
    """Return an integer of Python, NumPy or JAX as a plain ``int``; raise ``ValueError`` for all else, such as 20.0.

    :param what: how the message names the setting, such as "`num_steps`".
    :param expected: what the message says was expected; by default an integer of ``least`` or more.
    """
    found = plain(value)
    if isinstance(found, bool) or not isinstance(found, int) or found < least:
        raise ValueError(f"{what} must be {expected or f'an integer, {least} or more'}; got {value!r}.")
    return found


def number(what: str, value: Any, expected: str, accepts: Callable[[float], bool]) -> float:
    """Return a finite real number as a plain ``float``: other types would carry their precision into results.

    :param expected: what the message says was expected, for numbers that are not accepted and for anything else.
    """
    found = plain(value)
    if isinstance(found, Real) and not isinstance(found, bool) and np.isfinite(float(found)) and accepts(float(found)):
        return float(found)
    raise ValueError(f"{what} must be {expected}; got {value!r}.")


def positive(what: str, value: Any, or_zero: bool = False) -> float:
    """Return a positive, finite number (or 0 if ``or_zero``) as a plain ``float``; otherwise raise ``ValueError``."""
    if or_zero:
        return number(what, value, "a finite number, 0 or above", lambda x: x >= 0.0)
    return number(what, value, "a positive, finite number", lambda x: x > 0.0)


def boolean(what: str, value: Any) -> bool:
    """Return a truth value of Python, NumPy or JAX as a plain ``bool``; otherwise raise ``ValueError``."""
    found = plain(value)
    if not isinstance(found, bool):
        raise ValueError(f"{what} must be True or False; got {value!r}.")
    return found


def keep(part: Any, name: str, check: Callable, **options: Any) -> None:
    """Check the setting ``name`` of a part, which may be a frozen dataclass, and replace it by the plain value."""
    object.__setattr__(part, name, check(f"{type(part).__name__}: `{name}`", getattr(part, name), **options))


def plain(value: Any) -> Any:
    """Return a scalar of NumPy or JAX, or an array without axes, as a Python scalar; anything else unchanged."""
    is_array = isinstance(value, np.generic | np.ndarray | jax.Array) and not isinstance(value, jax.core.Tracer)
    if is_array and value.ndim == 0 and not jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return np.asarray(value).item()
    return value


def device_memory() -> float:
    """Return the bytes of memory of the first device; on a CPU those of the machine; infinite if unknown."""
    statistics = jax.local_devices()[0].memory_stats() or {}
    if limit := statistics.get("bytes_limit"):
        return limit
    ask = getattr(os, "sysconf", None)  # Windows has none.
    return math.inf if ask is None else ask("SC_PAGE_SIZE") * ask("SC_PHYS_PAGES")
