"""Data on disk as arguments of a model: ``numpyro.subsample`` of `Rows`, and checks of sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float
import numpy as np

import numpyro
from numpyro.primitives import _PYRO_STACK, Messenger

from numpyro_repulsion.checks import device_memory
from numpyro_repulsion.gradients.target import Indices, Target
from numpyro_repulsion.layout import ROWS, Layout, num_devices
from numpyro_repulsion.rows import Rows, Shards, host_rows


class TakesRows(Messenger):
    """Let ``numpyro.subsample`` take rows of the plates around it from `Rows`, which NumPyro itself cannot index."""

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


@jax.tree_util.register_pytree_node_class
class Share(Rows):
    """The rows of one device, which to the model are all rows."""

    def __init__(self, rows: Rows, shards: Shards, array: jax.Array):
        self.source, self.is_on_host = rows.source, False
        self._whole, self._of_device, self._array = rows, shards, array

    def _take(self, rows):
        # Only parts of minibatches lie in the share of the device; all else that a model takes, such as a table that is
        # indexed by a column, may be anywhere. Rows of a plate are known by identity: not what is computed from them.
        handlers = [handler for handler in _PYRO_STACK if isinstance(handler, TakesRows)]
        if any(rows is own and at.sizes[name] == len(self) for at in handlers for name, own in at.rows.items()):
            return self._of_device.local(self._array, rows)
        return self._of_device.gathered(self._array, rows)

    def tree_flatten(self):
        return (self._array,), (self._whole, self._of_device)

    @classmethod
    def tree_unflatten(cls, whole, children):
        rows, shards = whole
        return cls(rows, shards, children[0])


def shares_rows() -> bool:
    """Whether the mesh of ``jax.set_mesh`` has several devices for rows."""
    return num_devices(ROWS) > 1


def share(target: Target, batches: Mapping[str, int] | None, block_size: int) -> None:
    """Put the `Rows` of a model on the devices for rows of the mesh of ``jax.set_mesh``, each its share.

    :param batches: the number of rows in a minibatch of each plate, if the devices share these too.
    :param block_size: the number of consecutive rows drawn together.
    :raises ValueError: for minibatches that the devices cannot share equally, and sites whose terms would be missing.
    """
    found = host_rows((target.args, target.kwargs))
    try:
        mesh = jax.sharding.get_mesh()
    except ValueError:
        found = []  # While a program is traced, they are there already.
    for rows in found:
        rows.share(mesh, block_size)
    if batches is None:
        return
    for group in target.crossed_plates():
        if len(group) > 1:
            raise ValueError(
                f"The plates {group} meet in a site, and devices that share their rows would leave pairs out. Use a "
                f"mesh without the axis '{ROWS}', or subsample one of the plates only."
            )
    if target.rows_outside:
        raise ValueError(
            f"The sites {list(target.rows_outside)} use rows of a subsampled plate outside of it, scaled by hand for "
            f"whole minibatches. Put them into the plate, or use a mesh without the axis '{ROWS}'."
        )
    count = num_devices(ROWS)
    for name, batch in batches.items():
        is_all = batch == target.plates[name][0]
        per = count * (1 if is_all else block_size)
        if batch % per:
            remedy = f"a mesh without the axis '{ROWS}', or minibatches"
            if not is_all:
                remedy = f"a multiple of {per}, as in subsample_size={max(1, batch // per) * per}"
            raise ValueError(
                f"The {batch} rows in a minibatch of the plate {name!r} cannot be shared equally by the {count} "
                f"devices of the axis '{ROWS}'. Use {remedy}."
            )


def on_shares(
    evaluate: Callable, target: Target, z: Float[Array, "*particles d"], indices: Indices, axes: int, keys: jax.Array
) -> tuple[Float[Array, "*particles"], Float[Array, "*particles d"]]:
    """Return ``(U, ∇U)`` as the mean over the devices for rows, of which each uses its part of each minibatch.

    A minibatch has a row, or a block of rows, from each of strata in order, so that equal parts of it lie in the shares
    of the devices; the estimates of parts have the mean of that of the whole.

    :param evaluate: ``(target, z, indices, keys) -> (U, ∇U)``.
    :param axes: how many axes of the cloud ``(G, L, d)`` each array of indices begins with.
    :param keys: one for each particle, ``(G, L)``, or a single one.
    """
    size, count, dimension = z.shape
    spec = Layout.of((size, count, dimension), interacts=False).particles or ()
    group, particle = (*spec, None, None)[:2]
    where = PartitionSpec(group, particle)
    of_rows = PartitionSpec(*(group, particle)[:axes], ROWS)
    leaves, structure = jax.tree.flatten((target.args, target.kwargs), is_leaf=lambda leaf: isinstance(leaf, Rows))
    if any(isinstance(leaf, Rows) and leaf.is_on_host and leaf.shards() is None for leaf in leaves):
        raise ValueError(
            "Rows of the data are not on the devices of this mesh. Start the run, or go on with a stored state, by "
            "mcmc.run or run_in_pieces inside of `with jax.set_mesh(mesh):`."
        )
    shards = {i: found for i, leaf in enumerate(leaves) if isinstance(leaf, Rows) and (found := leaf.shards())}
    arrays = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)}
    arrays |= {i: found.array for i, found in shards.items()}
    specs = {i: PartitionSpec(ROWS) if i in shards else PartitionSpec() for i in arrays}

    def evaluate_share(z, indices, keys, arrays):
        own = {i: Share(leaves[i], shards[i], array) if i in shards else array for i, array in arrays.items()}
        here = [own.get(i, leaf) for i, leaf in enumerate(leaves)]
        args, kwargs = jax.tree.unflatten(structure, here)
        return lax.pmean(evaluate(target.with_arguments(args, kwargs), z, indices, keys), ROWS)

    inputs = where, of_rows, where if keys.ndim > 1 else PartitionSpec(), specs
    return jax.shard_map(evaluate_share, in_specs=inputs, out_specs=(where, where), check_vma=False)(
        z, indices, keys, arrays
    )
