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
    """How many numbers are NaN, how many a mask of ``numpy.ma`` hides, and the range of the finite ones and of 0."""

    num_nan: int = 0
    num_masked: int = 0
    least: Any = 0
    greatest: Any = 0

    @staticmethod
    def of(array: Any) -> Contents:
        """Return the contents of an array in memory, without the range unless its type is wide."""
        is_inexact, is_wide = jnp.issubdtype(array.dtype, jnp.inexact), array.dtype.name in WIDE
        if is_spread(array):
            with jax.ensure_compile_time_eval():
                return Contents(int(jnp.isnan(array).sum()) if is_inexact else 0)
        num_masked = int(np.sum(np.ma.getmask(array)))
        array = np.asarray(array) if is_inexact or is_wide else np.zeros(0)
        array = np.abs(array) if array.dtype.kind == "c" else array
        counts = int(np.isnan(array).sum()) if is_inexact else 0, num_masked
        if not is_wide:
            return Contents(*counts)
        finite = np.isfinite(array) if is_inexact else True
        return Contents(*counts, array.min(initial=0, where=finite).item(), array.max(initial=0, where=finite).item())

    def join(self, other: Contents) -> Contents:
        """Return the contents of two blocks."""
        counts = self.num_nan + other.num_nan, self.num_masked + other.num_masked
        return Contents(*counts, min(self.least, other.least), max(self.greatest, other.greatest))

    def losses(self, dtype: np.dtype) -> str:
        """Return, in words, what JAX would lose of numbers of this type in silence; empty if nothing but digits."""
        if self.num_masked:
            return (
                f"has {self.num_masked} masked entries of numpy.ma, and without their mask they would count as data. "
                "Remove these rows; or pass x.filled(0), and the mask as another argument, for numpyro.handlers.mask."
            )
        narrow = jax.dtypes.canonicalize_dtype(dtype.newbyteorder("=")) if dtype.name in WIDE else dtype
        if narrow.itemsize == dtype.itemsize:
            return ""
        limits: Any = np.iinfo(narrow) if narrow.kind in "iu" else np.finfo(narrow)
        first, last = (x if isinstance(x, int) else x.item() for x in (limits.min, limits.max))
        value, limit = (self.greatest, last) if self.greatest > last else (self.least, first)
        if first <= value <= last:
            return ""
        return (
            f"has the value {value}, and JAX turns {dtype} into {narrow}, which ends at {limit}: it would compute with "
            "another number and not say so. Number ids from 0, np.unique(x, return_inverse=True)[1]; measure in "
            'another unit; or enable double precision first, jax.config.update("jax_enable_x64", True).'
        )


def lost(array: Any) -> str:
    """Return `Contents.losses` of an array in memory, at which it looks only if there may be some."""
    may_be = isinstance(array, np.ma.MaskedArray) or (array.dtype.name in WIDE and jnp.result_type(float).itemsize < 8)
    return Contents.of(array).losses(array.dtype) if may_be else ""
