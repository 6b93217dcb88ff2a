"""A function of one draw mapped over all draws, in chunks that fit into memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from numpyro.util import soft_vmap

from numpyro_repulsion.rounding import unrounded

__all__ = ["map_draws"]

#: Results of more bytes raise `ValueError`.
MAX_BYTES = 2**31
#: The largest intermediate array of a chunk has at most about this many bytes, unless a single draw has more.
CHUNK_BYTES = 2**27
#: Most draws computed at once.
CHUNK_SIZE = 100


@unrounded()
def map_draws(fn: Callable, draws: Any, shape: tuple[int, ...], what: str, remedy: str) -> dict[str, jax.Array]:
    """Return ``fn`` of each draw: a dictionary of arrays with leading axes ``shape``.

    :param fn: takes one draw, returns arrays by name.
    :param draws: a pytree of arrays with leading axes ``shape``.
    :param shape: the axes to map over.
    :param what: what is computed, for the message.
    :param remedy: what to write instead, for the message.
    :raises ValueError: if the results would exceed 2 GiB.
    """
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[len(shape) :], x.dtype), draws)
    program, results = jax.make_jaxpr(fn, return_shape=True)(one)
    count = int(np.prod(shape))
    size = count * sum(_bytes(x) for x in results.values())
    if size > MAX_BYTES:
        raise ValueError(
            f"{what} {sorted(results)} over all rows would take {size / 2**30:.1f} GiB for {count} draws. {remedy}, "
            "or keep fewer draws (MCMC(..., thinning=...))."
        )
    if not results or not count:
        return {}
    leaves, structure = jax.tree.flatten(draws)
    # NumPyro cannot split arrays without entries into chunks.
    empty = {i: x[(0,) * len(shape)] for i, x in enumerate(leaves) if not x.size}

    def of_filled(filled):
        rest = iter(filled)
        return fn(jax.tree.unflatten(structure, [empty[i] if i in empty else next(rest) for i in range(len(leaves))]))

    # At least two chunks, so that the program is compiled as one.
    chunk = min(CHUNK_SIZE, CHUNK_BYTES // max(_largest(program.jaxpr), 1), -(-count // 2))
    filled = [x for x in leaves if x.size]
    return soft_vmap(of_filled, filled, batch_ndims=len(shape), chunk_size=max(chunk, 1))


def _largest(jaxpr):
    """Return the size in bytes of the largest intermediate array of a program."""
    largest = 0
    for equation in jaxpr.eqns:
        sizes = [_bytes(variable.aval) for variable in equation.outvars if hasattr(variable.aval, "shape")]
        inner = [getattr(value, "jaxpr", value) for value in equation.params.values()]
        sizes += [_largest(value) for value in inner if hasattr(value, "eqns")]
        largest = max([largest, *sizes])
    return largest


def _bytes(array):
    return int(np.prod(array.shape)) * getattr(array.dtype, "itemsize", 0)
