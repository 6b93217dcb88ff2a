"""Rows in equal shares on the devices of a mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np

from numpyro_repulsion.layout import ROWS


class Shards:
    """The shares of the devices, each of consecutive rows, and some more of the next share for blocks of rows.

    Of R devices, device k owns the rows from ``floor(k N / R)`` to ``floor((k + 1) N / R)``. If R divides B, these are
    exactly ``B / R`` rows of a minibatch with one row from each of B strata.

    :param total: the number of all rows.
    :param mesh: the mesh on whose devices they lie.
    :param block_size: how long blocks may be.

    - **array** - all shares, ``(R * length, ...)``, each on its device.
    """

    array: Any

    def __init__(self, total: int, mesh: jax.sharding.Mesh, block_size: int):
        count = mesh.shape[ROWS]
        self.mesh, self.block_size, self._total = mesh, block_size, total
        self._first = np.array([k * total // count for k in range(count)])
        self._end = np.append(self._first[1:], total)
        # The last stratum of a share reaches into the next share, where R does not divide N, and so does a block.
        self._length = -(-total // count) + block_size

    @staticmethod
    def read(read: Callable, shape: tuple[int, ...], mesh: jax.sharding.Mesh, block_size: int) -> Shards:
        """Return the shares of rows on the host.

        :param read: ``rows -> array``.
        :param shape: that of all rows.
        """
        found = Shards(shape[0], mesh, block_size)
        length, shares = found._length, {}

        def share(index):
            start = int(found._first[(index[0].start or 0) // length])
            if start not in shares:  # Devices for other particles have the same.
                shares[start] = read((start + np.arange(length)) % shape[0])
            return shares[start]

        whole = mesh.shape[ROWS] * length, *shape[1:]
        found.array = jax.make_array_from_callback(whole, NamedSharding(mesh, PartitionSpec(ROWS)), share)
        return found

    @staticmethod
    def of_array(array: jax.Array, shape: tuple[int, ...], mesh: jax.sharding.Mesh, block_size: int) -> Shards:
        """Return the shares of an array whose rows lie on the devices of several processes.

        :raises ValueError: if the devices cannot have equally many rows each.
        """
        count, found = mesh.shape[ROWS], Shards(shape[0], mesh, block_size)
        if shape[0] % count:
            raise ValueError(
                f"The {shape[0]} rows of an array cannot be shared equally by {count} devices. Give a multiple of "
                f"{count} rows, or Rows of a file that all processes read."
            )

        def extended(own):
            # The first rows of the next share.
            places = [((k + 1) % count, k) for k in range(count)]
            return jnp.concatenate([own, lax.ppermute(own[:block_size], ROWS, places)])

        specs = PartitionSpec(ROWS)
        extend = jax.shard_map(extended, mesh=mesh, in_specs=specs, out_specs=specs, check_vma=False)
        found.array = jax.jit(extend)(array)
        return found

    def local(self, array: Any, rows: Any) -> jax.Array:
        """Return rows of the part of a minibatch that lies in the share of the device; inside of ``shard_map``.

        :param array: the share of the device.
        """
        start = jnp.asarray(self._first, jnp.int32)[lax.axis_index(ROWS)]
        place = jnp.asarray(rows, jnp.int32) - start
        return array[jnp.where(place < 0, place + self._total, place)]

    def gathered(self, array: Any, rows: Any) -> jax.Array:
        """Return any rows by their numbers, other ones on each device; inside of ``shard_map``.

        :param array: the share of the device.
        """
        device = lax.axis_index(ROWS)
        return self._summed(array, lax.all_gather(jnp.asarray(rows, jnp.int32), ROWS))[device]

    def take(self, rows: jax.Array) -> jax.Array:
        """Return any rows by their numbers; outside of ``shard_map``."""
        specs = PartitionSpec(ROWS), PartitionSpec()
        summed = jax.shard_map(self._summed, in_specs=specs, out_specs=PartitionSpec(), check_vma=False)
        return summed(self.array, jnp.asarray(rows, jnp.int32))

    def _summed(self, array, rows):
        """Return rows, the same on all devices; those that own them send them to the others."""
        # As in arrays on a device, negative numbers count from the end, and too large ones mean the last row.
        rows = jnp.clip(jnp.where(rows < 0, rows + self._total, rows), 0, self._total - 1)
        device = lax.axis_index(ROWS)
        first, end = jnp.asarray(self._first, jnp.int32)[device], jnp.asarray(self._end, jnp.int32)[device]
        found = self.local(array, jnp.clip(rows, first, end - 1))
        is_own = ((rows >= first) & (rows < end)).reshape(*rows.shape, *(1,) * (found.ndim - rows.ndim))
        # A sum of one number and zeros.
        sent = jnp.where(is_own, found, jnp.zeros_like(found))
        if sent.dtype == bool:
            return lax.psum(sent.astype(jnp.int32), ROWS).astype(bool)
        return lax.psum(sent, ROWS)
