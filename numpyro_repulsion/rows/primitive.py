"""The primitive by which a compiled program takes rows of the host."""

from __future__ import annotations

from typing import Protocol

import jax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
import jax.numpy as jnp
import numpy as np

__all__ = ["TAKE_ROWS"]


class Source(Protocol):
    """Rows on the host."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype: ...

    def read(self, rows: np.ndarray) -> np.ndarray: ...


def _taken(rows, source: Source):
    return jax.core.ShapedArray((*rows.shape, *source.shape[1:]), source.dtype)


def _from_host(rows, source: Source):
    output = jax.ShapeDtypeStruct((*rows.shape, *source.shape[1:]), source.dtype)
    found = jax.pure_callback(lambda rows: source.read(np.asarray(rows)), output, rows)
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty and set(mesh.axis_types) == {jax.sharding.AxisType.Auto}:
        # One device calls back; the result of a program may not stay with it alone.
        found = jax.lax.with_sharding_constraint(found, jax.sharding.PartitionSpec())
    return found


def _batched(arguments, axes, source: Source):
    return TAKE_ROWS.bind(jnp.moveaxis(arguments[0], axes[0], 0), source=source), 0


#: ``rows -> source[rows]``: to the analysis of models it is what `gather` is for arrays.
TAKE_ROWS = Primitive("take_rows")
TAKE_ROWS.def_impl(lambda rows, source: jnp.asarray(source.read(np.asarray(rows))))
TAKE_ROWS.def_abstract_eval(_taken)
batching.primitive_batchers[TAKE_ROWS] = _batched
mlir.register_lowering(TAKE_ROWS, mlir.lower_fun(_from_host, multiple_results=False))
