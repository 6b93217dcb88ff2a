"""Data on disk as arguments of a model: ``numpyro.subsample`` of `Rows`, and checks of sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

import numpyro
from numpyro.primitives import _PYRO_STACK, Messenger

from numpyro_repulsion.checks import device_memory
from numpyro_repulsion.rows import Rows, host_rows

__all__ = ["TakesRows", "are_of_a_plate", "check_rows", "check_sizes"]


def are_of_a_plate(rows: jax.Array, size: int) -> bool:
    """Whether these are the rows of a plate of this size as the running model got them, and not computed from them."""
    handlers = [handler for handler in _PYRO_STACK if isinstance(handler, TakesRows)]
    return any(rows is own and at.sizes[name] == size for at in handlers for name, own in at.rows.items())


class TakesRows(Messenger):
    """Let ``numpyro.subsample`` take rows of the plates around it from `Rows`, which NumPyro itself cannot index.

    :param rows: the rows of the subsampled plates.
    :param sizes: the sizes of the plates.
    """

    def __init__(self, fn: Callable, rows: Mapping[str, jax.Array], sizes: Mapping[str, int]):
        super().__init__(fn)
        self.rows, self.sizes = rows, sizes

    def postprocess_message(self, msg):
        # The outermost handler sees a message last on its way out, but first on its way back, before the plates do.
        if msg["type"] != "subsample" or not isinstance(msg["value"], Rows):
            return
        value, event_dim = msg["value"], msg["kwargs"]["event_dim"]
        plates = [plate for plate in _PYRO_STACK if isinstance(plate, numpyro.plate)]
        axes = {value.ndim + plate.dim - event_dim: plate for plate in plates}
        if 0 not in axes:
            return
        for axis, plate in axes.items():
            if axis >= 0 and value.shape[axis] not in (1, plate.size):
                raise ValueError(
                    f"The plate '{plate.name}' has {plate.size} rows, and axis {axis} of {value!r} has "
                    f"{value.shape[axis]} in numpyro.subsample(..., event_dim={event_dim})."
                )
        found = value[axes.pop(0)._indices]
        for axis, plate in axes.items():
            if axis > 0 and value.shape[axis] > 1:
                found = jnp.take(found, plate._indices, axis)
        # Without `event_dim` the plates leave it as it is.
        msg["value"], msg["kwargs"] = found, {}


def check_sizes(args: tuple, kwargs: Mapping) -> None:
    """Raise ``ValueError`` for an array on disk that would be copied to the device and take a quarter of its memory."""
    for leaf in jax.tree.leaves((args, dict(kwargs))):
        if isinstance(leaf, np.memmap) and leaf.nbytes > (memory := device_memory()) / 4:
            raise ValueError(
                f"An argument of the model is an array on disk of {_gigabytes(leaf)}, and would be copied to a device "
                f"with {memory / 2**30:.1f} GiB. Pass numpyro_repulsion.Rows(array) to leave it on disk."
            )


def check_rows(args: tuple, kwargs: Mapping) -> None:
    """Raise ``ValueError`` for `Rows` that each update would read whole and that take a quarter of the device."""
    for rows in host_rows((args, dict(kwargs))):
        if rows.nbytes > (memory := device_memory()) / 4:
            raise ValueError(
                f"Each update would read all of {rows!r}, {_gigabytes(rows)}, to a device with {memory / 2**30:.1f} "
                "GiB. Give the plate a `subsample_size`, such as 500, and do not use gradient=FullData()."
            )


def _gigabytes(array):
    return f"{array.nbytes / 2**30:.1f} GiB"
