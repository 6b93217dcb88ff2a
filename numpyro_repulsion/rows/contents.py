"""What a look at all numbers of an array finds: NaN, and what JAX would change in silence."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_repulsion.processes import is_spread

__all__ = ["Contents", "lost"]

#: Types that JAX narrows to 32 bits, unless it has 64 enabled.
WIDE = ("int64", "uint64", "float64", "complex128")


class Contents(NamedTuple):
    """The contents of an array, or of several blocks of one.

    - **dtype** - its type.
    - **num_nan** - how many numbers are NaN.
    - **num_masked** - how many a mask of ``numpy.ma`` hides.
    - **least**, **greatest** - the range of finite numbers of 64 bits, and 0.
    """

    dtype: np.dtype
    num_nan: int = 0
    num_masked: int = 0
    least: Any = 0
    greatest: Any = 0

    @staticmethod
    def of(array: Any) -> Contents:
        """Return the contents of an array in memory."""
        num_masked = int(np.ma.count_masked(array)) if isinstance(array, np.ma.MaskedArray) else 0
        if not (jnp.issubdtype(array.dtype, jnp.inexact) or array.dtype.name in WIDE):
            return Contents(array.dtype, 0, num_masked)
        if is_spread(array):
            with jax.ensure_compile_time_eval():
                return Contents(array.dtype, int(jnp.isnan(array).sum()))
        array = np.asarray(array)
        is_exact = array.dtype.kind in "iu"
        num_nan = 0 if is_exact else int(np.isnan(array).sum())
        if array.dtype.name not in WIDE:
            return Contents(array.dtype, num_nan, num_masked)
        parts = (array.real, array.imag) if array.dtype.kind == "c" else (array,)
        finite = [True if is_exact else np.isfinite(part) for part in parts]
        least = min(part.min(initial=0, where=mask).item() for part, mask in zip(parts, finite, strict=True))
        greatest = max(part.max(initial=0, where=mask).item() for part, mask in zip(parts, finite, strict=True))
        return Contents(array.dtype, num_nan, num_masked, least, greatest)

    def join(self, other: Contents) -> Contents:
        """Return the contents of two blocks."""
        counts = self.num_nan + other.num_nan, self.num_masked + other.num_masked
        return Contents(self.dtype, *counts, min(self.least, other.least), max(self.greatest, other.greatest))

    @property
    def lost(self) -> str:
        """What JAX would lose in silence, in words; empty if nothing but digits."""
        if self.num_masked:
            return (
                f"has {self.num_masked} masked entries, and JAX drops masks of numpy.ma: the numbers behind them would "
                "count as data. Remove these rows; or pass x.filled(0), and the mask as another argument, for "
                "numpyro.handlers.mask."
            )
        narrow = jax.dtypes.canonicalize_dtype(self.dtype.newbyteorder("=")) if self.dtype.name in WIDE else self.dtype
        if narrow.itemsize == self.dtype.itemsize:
            return ""
        limits: Any = np.iinfo(narrow) if narrow.kind in "iu" else np.finfo(narrow)
        first, last = (x if isinstance(x, int) else x.item() for x in (limits.min, limits.max))
        outside = [x for x in (self.greatest, self.least) if not first <= x <= last]
        if not outside:
            return ""
        largest = max(outside, key=abs)
        return (
            f"has the value {largest}, and JAX turns {self.dtype} into {narrow}, which ends at "
            f"{last if largest > 0 else first}: it would compute with another number and not say so. "
            "Number ids from 0, np.unique(x, return_inverse=True)[1]; measure in another unit; or enable double "
            'precision first, jax.config.update("jax_enable_x64", True).'
        )


def lost(array: Any) -> str:
    """Return, in words, what JAX would lose of an array in memory in silence; empty if nothing but digits."""
    is_narrowed = array.dtype.name in WIDE and not jax.config.jax_enable_x64  # type: ignore[attr-defined]
    return Contents.of(array).lost if is_narrowed or isinstance(array, np.ma.MaskedArray) else ""
