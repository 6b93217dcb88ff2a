"""The `Rows` among the arguments of a model."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from numpyro_repulsion.layout import ROWS, num_devices
from numpyro_repulsion.rows.contents import Contents, lost
from numpyro_repulsion.rows.host import Rows

__all__ = ["count_nan", "host_rows", "losses", "share_rows"]


def host_rows(tree) -> list[Rows]:
    """Return the `Rows` in a pytree."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda leaf: isinstance(leaf, Rows))
    return [leaf for leaf in leaves if isinstance(leaf, Rows)]


def share_rows(rows: list[Rows], block_size: int) -> None:
    """Put `Rows` on the devices of the mesh of ``jax.set_mesh``, each its share, if the mesh has an axis of rows."""
    if not rows or num_devices(ROWS) == 1:
        return
    try:
        mesh = jax.sharding.get_mesh()
    except ValueError:
        return  # While a program is traced, they are there already.
    for one in rows:
        one.share(mesh, block_size)


def count_nan(array: Any) -> int:
    """Return how many numbers of an array or of `Rows` are NaN."""
    return (array.contents() if isinstance(array, Rows) else Contents.of(array)).num_nan


def losses(array: Any) -> str:
    """Return, in words, what JAX would lose of an array or of `Rows` in silence; empty if nothing but digits."""
    return array.contents().losses(np.dtype(array.source.dtype)) if isinstance(array, Rows) else lost(array)
