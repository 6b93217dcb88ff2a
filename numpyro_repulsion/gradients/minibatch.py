"""Which rows of the subsampled plates a particle uses, how models and devices take them, and the gradient on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
import math
from typing import NamedTuple

import jax
from jax import lax, random
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Integer
import numpy as np

import numpyro
from numpyro.primitives import _PYRO_STACK, Messenger

from numpyro_repulsion.checks import boolean, device_memory, integer, keep
from numpyro_repulsion.gradients.arrow import Arrow, Units
from numpyro_repulsion.gradients.target import Indices, Particle, Target
from numpyro_repulsion.layout import ROWS, Layout, num_devices
from numpyro_repulsion.noise import integers_below
from numpyro_repulsion.rounding import AnyArray, unrounded
from numpyro_repulsion.rows import Rows, Shards, host_rows


class Reference(NamedTuple):
    """The reference point of control variates, one for all particles or one for each.

    - **position** - ẑ, flat and unconstrained, in the coordinates of `Target.base`, ``(d,)`` or ``(G, L, d)``.
    - **potential_energy** - U(ẑ) over all rows, a scalar or ``(G, L)``.
    - **gradient** - ∇U(ẑ) over all rows, ``(d,)`` or ``(G, L, d)``.
    - **posterior_id** - the identity of the data and the model that it was computed from, four words; zeros if
      there is no reference yet.
    - **order** - that of the correction of gradients: 0 for none, 1 or 2; ``None`` after warmup, if the highest that is
      known.
    - **hessian** - ∇²U(ẑ) over all rows; ``None`` if there are no corrections of second order.
    - **age** - the number of updates since the last renewal; ``None`` for a common reference, which is not renewed.
    """

    position: Float[AnyArray, "*references d"]
    potential_energy: Float[AnyArray, "*references"]
    gradient: Float[AnyArray, "*references d"]
    posterior_id: Integer[AnyArray, 4]
    order: Integer[AnyArray, ""] = None
    age: Integer[AnyArray, ""] = None
    hessian: Arrow | None = None

    @staticmethod
    def none(shape: int | tuple[int, ...], dtype, order: int = 0, units: Units | None = None) -> Reference:
        """Return an empty reference for positions of a shape ``(d,)`` or ``(G, L, d)``.

        :param units: those of the Hessian, if it has one.
        """
        zero = jnp.zeros(shape, dtype)
        age = jnp.zeros((), jnp.int32) if zero.ndim == 3 else None
        hessian = None if units is None else Arrow.zeros(units, dtype)
        unknown = jnp.zeros(4, jnp.uint32)
        return Reference(zero, zero[..., 0], zero, unknown, jnp.asarray(order, jnp.int32), age, hessian)


class Gradient:
    """Base class: chooses the rows of the subsampled plates that each particle uses in each update."""

    #: Whether the particles of a group share their rows: where `rows` returns fewer than 2 axes.
    shared: bool = False
    #: How many consecutive rows are drawn together.
    block_size: int = 1
    #: Of how many particles gradients are evaluated at a time; ``None`` for all.
    chunk_size: int | None = None
    #: Whether all its minibatches have exactly ``subsample_size`` rows.
    keeps_subsample_size: bool = False
    #: Whether it corrects gradients at reference points, with gradients over all rows there.
    has_reference: bool = False

    def __post_init__(self) -> None:
        if self.chunk_size is not None:
            keep(self, "chunk_size", integer, expected="None or a number of particles, an integer of 1 or more")

    def is_noisy(self, target: Target) -> bool:
        """Whether U and ∇U are estimates that differ from update to update; true unless a subclass knows better."""
        return True

    @property
    def splits(self) -> bool:
        """Whether equal parts of a minibatch come from equal parts of the plate, so that devices can share its rows."""
        return type(self).rows in (FullData.rows, Subsampled.rows)  # Other rows may come from anywhere.

    def hessian_units(self, target: Target, dimension: int) -> Units | None:
        """Return the units of the Hessian over all rows at a reference point, for so many parameters; ``None`` if it
        does not correct gradients by it."""
        return None

    def at(self, num_updates: Integer[Array, ""], seed: Integer[Array, ""]) -> Gradient:
        """Return the gradient to use in one update; the same unless successive minibatches depend on each other.

        :param num_updates: how many updates were done before.
        :param seed: an unsigned integer that the run drew once.
        """
        return self

    def sweep_length(self, target: Target) -> int | None:
        """Return the number of updates that pass through all rows once; ``None`` for independent minibatches."""
        return None

    def check_rows(self, target: Target) -> None:
        """Raise ``ValueError`` for models of which this gradient would sample another posterior: here with a site that
        uses rows of a subsampled plate from outside, scaled by hand for minibatches of ``subsample_size`` rows."""
        if target.rows_outside and not self.keeps_subsample_size:
            name, plates = next(iter(target.rows_outside.items()))
            raise ValueError(
                f"The site '{name}' uses rows of the subsampled plate '{plates[0]}' outside of that plate, with a log "
                f"density for minibatches of `subsample_size` rows, but {self!r} also uses other numbers of rows. "
                "Put the site into the plate, scale it for any number of rows, `with numpyro.handlers.scale("
                "scale=N / len(i)): ...`, or use gradient=Subsampled(), the default for such models."
            )

    def batches(self, target: Target) -> dict[str, int]:
        """Return the number of rows in a minibatch of each plate."""
        return {name: batch for name, (_, batch) in target.plates.items()}

    def share(self, target: Target) -> None:
        """Put the `Rows` of a model on the devices for rows of the mesh of ``jax.set_mesh``, if any, each its share.

        :raises ValueError: for minibatches that the devices cannot share.
        """
        count = num_devices(ROWS)
        if count == 1:
            return
        found = host_rows((target.args, target.kwargs))
        try:
            mesh = jax.sharding.get_mesh()
        except ValueError:
            found = []  # While a program is traced, they are there already.
        for rows in found:
            rows.share(mesh, self.block_size)
        if not self.splits:
            return
        for group in target.crossed_plates():
            if len(group) > 1:
                raise ValueError(
                    f"A site uses rows of all the plates {group}, so devices that divide these rows would omit pairs "
                    f"of rows. Use a mesh without the axis '{ROWS}', or subsample only one of the plates."
                )
        if target.rows_outside:
            raise ValueError(
                f"The sites {list(target.rows_outside)} use rows of a subsampled plate outside of it, scaled by hand "
                f"for whole minibatches. Put them into the plate, or use a mesh without the axis '{ROWS}'."
            )
        for name, batch in self.batches(target).items():
            is_all = batch == target.plates[name][0]
            per = count * (1 if is_all else self.block_size)
            if batch % per:
                remedy = f"a mesh without the axis '{ROWS}', or minibatches"
                if not is_all:
                    remedy = f"a multiple of {per}, as in subsample_size={max(1, batch // per) * per}"
                raise ValueError(
                    f"The {batch} rows in a minibatch of the plate {name!r} cannot be shared equally by the {count} "
                    f"devices of the axis '{ROWS}'. Use {remedy}."
                )

    def epoch_length(self, target: Target, num_steps: int) -> int | None:
        """Return the number of updates, in whole iterations of ``num_steps``, after which each particle renews its
        reference; ``None`` if particles have no references."""
        return None

    def rows(self, key: jax.Array, target: Target, shape: tuple[int, ...]) -> tuple[Indices, int]:
        """Return row indices for a cloud of ``shape = (G, L)`` particles.

        :return: ``{plate: indices}``, and how many axes of the cloud each array begins with: 2 if each particle has its
            rows, 1 if each group has its rows, 0 for the same rows everywhere.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement `rows`.")

    def energy_and_grad(
        self,
        key: jax.Array,
        target: Target,
        unravel: Callable,
        z: Float[Array, "*particles d"],
        reference: Reference | None = None,
    ) -> tuple[Float[Array, "*particles"], Float[Array, "*particles d"]]:
        """Return ``(U, ∇U)`` of shapes ``(G, L)`` and ``(G, L, d)`` at the particles ``z`` of shape ``(G, L, d)``.

        :param reference: the reference points, for gradients with control variates.
        """
        # Each split takes a tenth of a second to compile.
        rows_key, model_key = random.split(key) if target.is_random else (key, key)
        indices, axes = self.rows(rows_key, target, z.shape[:2])
        are_all = all(indices[name].shape[-1] == size for name, (size, _) in target.plates.items())
        if axes < 2 and not (self.shared or are_all) and z.shape[1] > 1:
            raise ValueError(
                f"{type(self).__name__}.rows returns rows that particles share ({axes} axes), but its `shared` is "
                "False: set shared = True in the class, or return rows for each particle, with 2 axes."
            )
        keys = random.split(model_key, z.shape[:2]) if target.is_random else model_key
        if self.splits and target.plates and num_devices(ROWS) > 1:
            evaluate = partial(self._evaluate, unravel=unravel, axes=axes)
            return _on_shares(evaluate, target, z, indices, axes, keys)
        return self._evaluate(target, z, indices, keys, unravel, axes)

    @unrounded()
    def _evaluate(self, target, z, indices, keys, unravel, axes):
        """Return ``(U, ∇U)`` on given rows, with a key for each particle where likelihoods are random."""

        def energy(flat, rows, key):
            return target.potential_energy(unravel(flat), rows, key).astype(flat.dtype)

        energy_and_grad, over = jax.value_and_grad(energy), 0 if target.is_random else None
        if axes == 1 and z.shape[0] > 1:
            of_group = partial(_over_particles, energy_and_grad, self.chunk_size, (0, None, over))
            return jax.vmap(of_group, (0, 0, over))(z, indices, keys)
        # One flat axis of particles if the rows allow it, because an axis of length one slows matrix products down.
        count = z.shape[0] * z.shape[1]
        if axes:
            indices = jax.tree.map(lambda rows: rows[0] if axes == 1 else rows.reshape(count, *rows.shape[2:]), indices)
        keys = keys.reshape(count, *keys.shape[2:]) if target.is_random else keys
        in_axes = 0, 0 if axes == 2 else None, over
        value, gradient = _over_particles(
            energy_and_grad, self.chunk_size, in_axes, z.reshape(count, -1), indices, keys
        )
        return value.reshape(z.shape[:2]), gradient.reshape(z.shape)


def _over_particles(function, chunk_size, in_axes, *given):
    """Return what a function returns for all particles, of which so many are evaluated at a time."""
    if (chunk_size or len(given[0])) >= len(given[0]):
        return jax.vmap(function, in_axes)(*given)
    own = {k: x for k, (x, axis) in enumerate(zip(given, in_axes, strict=True)) if axis == 0}
    return lax.map(lambda x: function(*(x.get(k, y) for k, y in enumerate(given))), own, batch_size=chunk_size)


@dataclass(frozen=True)
class FullData(Gradient):
    """All rows in every update, including those of subsampled plates.

    :param chunk_size: as for :class:`~numpyro_repulsion.Subsampled`.

    **Example**

    .. doctest::

        >>> from numpyro_repulsion import FullData, SGLDR
        >>> kernel = SGLDR(potential_fn=lambda z: z**2 / 2, step_size=0.1, gradient=FullData())
    """

    chunk_size: int | None = field(default=None, kw_only=True, repr=False)

    def batches(self, target):
        return {name: size for name, (size, _) in target.plates.items()}

    def is_noisy(self, target):
        return target.is_random

    def rows(self, key, target, shape):
        return {name: jnp.arange(size) for name, (size, _) in target.plates.items()}, 0


@dataclass(frozen=True)
class Subsampled(Gradient):
    """A new minibatch in every update, with each plate's ``subsample_size`` rows.

    One row is drawn from each of ``subsample_size`` strata of equal size. All rows are equally likely, so the gradient
    is unbiased. Its variance is at most that of draws with replacement, the cost does not grow with the size of the
    plate, and a batch of all rows has every row once.

    :param shared: whether the particles of an ensemble share a minibatch. By default each has its own: a shared
        minibatch gives all particles the same gradient noise, which averaging over particles does not remove, and which
        repulsion accumulates over neighbors (:ref:`measured <whose-minibatch>`). It is cheaper: one gather and one
        matrix product for all particles.
    :param block_size: the number of consecutive rows drawn together; it must divide each ``subsample_size``. Of many
        rows, long blocks are fetched several times faster. Gradients are unbiased for any order of the rows, but
        similar neighbors add to the noise, so shuffle the rows once; in sorted data steps are far shorter.
    :param chunk_size: the number of particles whose gradients are evaluated at a time: memory holds the intermediate
        values of so many copies of the model. ``None`` evaluates all together, which is fastest for small models. Draws
        depend on it by rounding only.
    :raises ValueError: unless ``block_size`` and ``chunk_size`` are integers of 1 or more.

    **Example**

    .. doctest::

        >>> from numpyro_repulsion import Subsampled
        >>> Subsampled(shared=True)
        Subsampled(shared=True, block_size=1)
    """

    shared: bool = False
    block_size: int = field(default=1, kw_only=True)
    chunk_size: int | None = field(default=None, kw_only=True, repr=False)

    def __post_init__(self):
        super().__post_init__()
        keep(self, "shared", boolean)
        keep(self, "block_size", integer, expected="a number of rows, an integer of 1 or more")

    # A reference uses all rows, in pieces that fit into memory.
    keeps_subsample_size = property(lambda self: not self.has_reference)

    def rows(self, key, target, shape):
        shape = shape[:1] if self.shared else shape
        return draw_indices(key, target.plates, shape, self.block_size), len(shape)


def draw_indices(
    key: jax.Array, plates: Mapping[str, tuple[int, int]], shape: tuple[int, ...] = (), block_size: int = 1
) -> Indices:
    """Return minibatches: for each plate, one row or block of rows from each stratum, with strata of equal size.

    :param plates: ``{name: (size, subsample_size)}``.
    :param shape: the number of independent minibatches.
    :param block_size: the number of consecutive rows drawn together, where the first row follows the last.
    :return: ``{name: indices of shape (*shape, subsample_size)}``, ascending for single rows.
    :raises ValueError: if ``block_size`` does not divide a minibatch.
    """
    indices = {}
    keys = random.split(key, len(plates)) if len(plates) > 1 else [key]
    for name, plate_key in zip(plates, keys, strict=False):
        size, batch = plates[name]
        # With all rows, blocks make no difference.
        block = 1 if batch == size else block_size
        if batch % block:
            raise ValueError(
                f"`block_size` must divide the rows of a minibatch; got {block} for plate {name!r} with "
                f"subsample_size={batch}. Use block_size={math.gcd(batch, block)}."
            )
        count = batch // block
        # floor((j·size + r) / count) for r uniform on 0..size-1: over all (j, r) each row occurs `count` times, so rows
        # are equally likely even if `count` does not divide `size`. It is split so that no number exceeds size + count,
        # which fits unsigned integers for all plates.
        start = np.arange(count, dtype=np.int64) * size
        drawn = integers_below(plate_key, (*shape, count), size)
        # Not `//`, because its sign handling would be repeated for every number that these indices gather.
        beyond = lax.div(drawn + jnp.asarray(start % count, jnp.uint32), jnp.asarray(count, jnp.uint32))
        first = jnp.asarray(start // count, jnp.int32) + beyond.astype(jnp.int32)
        if block > 1:
            within = jnp.arange(block, dtype=first.dtype)
            # Compared before it is added, because a sum can exceed 32 bits.
            left, first = size - within, first[..., None]
            first = jnp.where(first >= left, first - left, first + within).reshape(*shape, batch)
        indices[name] = first
    return indices


def ravel_cloud(z: Particle) -> tuple[Float[Array, "L d"], Callable]:
    """Return a pytree of arrays ``(L, ...)`` as an array ``(L, d)``, and the inverse for one particle ``(d,)``."""
    _, unravel = ravel_pytree(jax.tree.map(lambda x: x[0], z))
    return jax.vmap(lambda particle: ravel_pytree(particle)[0])(z), unravel


# --- Data that are no arrays in memory, or that several devices share. ---


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
                f"An argument of the model is an array on disk of {leaf.nbytes / 2**30:.1f} GiB, and would be copied "
                f"to a device with {memory / 2**30:.1f} GiB. Pass numpyro_repulsion.Rows(array) to leave it on disk."
            )


def check_rows(args: tuple, kwargs: Mapping) -> None:
    """Raise ``ValueError`` for `Rows` that each update would read whole and that take a quarter of the device."""
    for rows in host_rows((args, dict(kwargs))):
        if rows.nbytes > (memory := device_memory()) / 4:
            raise ValueError(
                f"Each update would read all of {rows!r}, {rows.nbytes / 2**30:.1f} GiB, to a device with "
                f"{memory / 2**30:.1f} GiB. Give the plate a `subsample_size`, such as 500, and do not use "
                "gradient=FullData()."
            )


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
        return cls(*whole, *children)


def _on_shares(
    evaluate: Callable, target: Target, z: Float[Array, "*particles d"], indices: Indices, axes: int, keys: jax.Array
) -> tuple[Float[Array, "*particles"], Float[Array, "*particles d"]]:
    """Return ``(U, ∇U)`` as the mean over the devices for rows, of which each uses its part of each minibatch.

    A minibatch has a row, or a block of rows, from each of strata in order, so that equal parts of it lie in the shares
    of the devices; the estimates of parts have the mean of that of the whole.
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
