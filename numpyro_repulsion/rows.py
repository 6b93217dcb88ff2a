"""Data that stay on the host, on disk or on many devices, of which a compiled program takes rows."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from functools import reduce
import hashlib
import mmap
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np

from numpyro_repulsion.digests import digest, has_parts
from numpyro_repulsion.layout import ROWS
from numpyro_repulsion.processes import IN_ALL, are_several, is_spread

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
            f"has the value {value}, which JAX would silently change: it converts {dtype} to {narrow}, whose limit is "
            f"{limit}. Number ids from 0, np.unique(x, return_inverse=True)[1]; use another unit; or enable double "
            'precision first, jax.config.update("jax_enable_x64", True).'
        )


def _from_host(rows, source):
    output = jax.ShapeDtypeStruct((*rows.shape, *source.shape[1:]), source.dtype)
    found = jax.pure_callback(lambda rows: source.read(np.asarray(rows)), output, rows)
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty and set(mesh.axis_types) == {jax.sharding.AxisType.Auto}:
        # One device calls back; the result of a program may not stay with it alone.
        found = lax.with_sharding_constraint(found, PartitionSpec())
    return found


def _batched(arguments, axes, source):
    return TAKE_ROWS.bind(jnp.moveaxis(arguments[0], axes[0], 0), source=source), 0


#: ``rows -> source[rows]``: to the analysis of models it is what `gather` is for arrays.
TAKE_ROWS = Primitive("take_rows")
TAKE_ROWS.def_impl(lambda rows, source: jnp.asarray(source.read(np.asarray(rows))))
TAKE_ROWS.def_abstract_eval(lambda rows, source: jax.core.ShapedArray((*rows.shape, *source.shape[1:]), source.dtype))
batching.primitive_batchers[TAKE_ROWS] = _batched
mlir.register_lowering(TAKE_ROWS, mlir.lower_fun(_from_host, multiple_results=False))


class Shards:
    """The shares of the devices, each of consecutive rows, and some more of the next share for blocks of rows.

    Of R devices, device k owns the rows from ``floor(k N / R)`` to ``floor((k + 1) N / R)``. If R divides B, these are
    exactly ``B / R`` rows of a minibatch with one row from each of B strata.

    - **array** - all shares, ``(R * length, ...)``, each on its device.
    """

    def __init__(self, rows: Rows, mesh: jax.sharding.Mesh, block_size: int):
        self._total, self._count = len(rows), mesh.shape[ROWS]
        self.mesh, self.block_size = mesh, block_size
        self._first = np.array([k * self._total // self._count for k in range(self._count)])
        self._end = np.append(self._first[1:], self._total)
        self.array: Any = self._read(rows) if rows.is_on_host else self._extended(rows.source)

    def _read(self, rows):
        """Return the shares of rows on the host."""
        # The last stratum of a share reaches into the next share, where R does not divide N, and so does a block.
        length, shares = -(-self._total // self._count) + self.block_size, {}

        def share(index):
            start = int(self._first[(index[0].start or 0) // length])
            if start not in shares:  # Devices for other particles have the same.
                shares[start] = rows.fetch((start + np.arange(length)) % self._total)
            return shares[start]

        whole = self._count * length, *rows.shape[1:]
        return jax.make_array_from_callback(whole, NamedSharding(self.mesh, PartitionSpec(ROWS)), share)

    def _extended(self, array):
        """Return the shares of an array whose rows lie on the devices of several processes."""
        if self._total % self._count:
            raise ValueError(
                f"The {self._total} rows of an array cannot be shared equally by {self._count} devices. Give a "
                f"multiple of {self._count} rows, or Rows of a file that all processes read."
            )

        def extended(own):
            # The first rows of the next share.
            places = [((k + 1) % self._count, k) for k in range(self._count)]
            return jnp.concatenate([own, lax.ppermute(own[: self.block_size], ROWS, places)])

        specs = PartitionSpec(ROWS)
        return jax.jit(jax.shard_map(extended, mesh=self.mesh, in_specs=specs, out_specs=specs, check_vma=False))(array)

    def local(self, array: Any, rows: Any) -> jax.Array:
        """Return rows of the part of a minibatch that lies in the share of the device; inside of ``shard_map``."""
        start = jnp.asarray(self._first, jnp.int32)[lax.axis_index(ROWS)]
        place = jnp.asarray(rows, jnp.int32) - start
        return array[jnp.where(place < 0, place + self._total, place)]

    def gathered(self, array: Any, rows: Any) -> jax.Array:
        """Return any rows by their numbers, other ones on each device; inside of ``shard_map``."""
        return self._summed(array, lax.all_gather(jnp.asarray(rows, jnp.int32), ROWS))[lax.axis_index(ROWS)]

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


#: Passes over all rows read about this many bytes at once.
BLOCK_BYTES = 1 << 26
#: Of more bytes than this, a digest covers about as many, in evenly spread blocks of rows.
DIGEST_BYTES = 1 << 28


@jax.tree_util.register_pytree_node_class
class Rows:
    """Data that a model takes by rows, and that need not fit into memory.

    A model uses it like an array in a plate, and only so: ``x.shape``, ``len(x)``, ``x[i]`` with the rows ``i`` of the
    plate, and ``numpyro.subsample(x, event_dim)``. An update then reads its minibatch, and nothing else. Draws are
    those of a run on arrays in memory, up to rounding.

    .. code-block:: python

        x, y = Rows(np.load("x.npy", mmap_mode="r")), Rows(np.load("y.npy", mmap_mode="r"))
        mcmc.run(random.key(0), x, y)

    A run reads all rows when it starts, to look for those without a density, and in warmup, for control variates.
    Single rows at random places of a disk are about a hundred times slower than blocks of a hundred. If the data exceed
    memory, shuffle them once, and read blocks: ``gradient=ControlVariates(block_size=100)``. The page on large data has
    a recipe. A program that reads rows of the host is not kept in JAX's persistent compilation cache.

    :param source: an array on disk (``np.load(..., mmap_mode="r")``, HDF5, Zarr), or in memory (NumPy or JAX; the
        latter stays on its device). It needs ``shape``, ``dtype`` and rows by an array of integers. It must not change
        while in use.
    :raises TypeError: for anything else, and for data that are not numbers.
    :raises ValueError: for data without axes or without rows.

    **Example**

    .. doctest::

        >>> import numpy as np
        >>> from numpyro_repulsion import Rows
        >>> x = Rows(np.arange(12.0).reshape(4, 3))
        >>> x
        Rows(shape=(4, 3), dtype=float32)
        >>> x[np.array([0, 2])]
        Array([[0., 1., 2.],
               [6., 7., 8.]], dtype=float32)
    """

    __iter__ = None
    failure: Exception | None = None
    _last: tuple[np.ndarray, np.ndarray] | None = None
    _contents: Contents | None = None
    _shards: Shards | None = None

    def __init__(self, source: Any):
        if type(source).__module__.split(".")[0] in ("pandas", "polars"):
            source = source.to_numpy()  # These are indexed by labels.
        needed = ("shape", "dtype", "__getitem__")
        if isinstance(source, Rows) or not all(hasattr(source, name) for name in needed):
            raise TypeError(
                f"Rows takes an array or a file that is indexed like one; got {type(source).__name__}. Lists need "
                "np.asarray(...); write tables and streams as arrays once, by np.lib.format.open_memmap."
            )
        if not (jnp.issubdtype(source.dtype, jnp.number) or source.dtype == bool):
            raise TypeError(f"Rows takes numbers; got dtype {source.dtype}. Encode categories as integers.")
        if not source.shape or not source.shape[0]:
            raise ValueError(f"Rows takes an array with rows; got shape {tuple(source.shape)}.")
        self.source = source
        self.is_on_host = not isinstance(source, jax.Array)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(int, self.source.shape))

    @property
    def ndim(self) -> int:
        return len(self.source.shape)

    @property
    def dtype(self) -> np.dtype:
        """The type that the model sees, of 32 bits unless JAX has 64 enabled."""
        return jax.dtypes.canonicalize_dtype(np.dtype(self.source.dtype).newbyteorder("="))

    @property
    def nbytes(self) -> int:
        """The number of bytes of all rows."""
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.source.dtype).itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"Rows(shape={self.shape}, dtype={self.dtype})"

    def __getitem__(self, index) -> jax.Array:
        """Return rows by an integer or an array of integers, which may be traced, as an array.

        :raises TypeError: for slices and masks.
        :raises IndexError: for rows that do not exist, where that is known.
        """
        rows, *rest = index if isinstance(index, tuple) else (index,)
        if not jnp.issubdtype(getattr(rows, "dtype", np.result_type(type(rows))), np.integer):
            raise TypeError(f"Rows are taken by integers, as in x[i] with the rows i of a plate; got {index!r}.")
        # The rows of a plate themselves: the devices that share rows know them by identity.
        rows = rows if isinstance(rows, jax.Array) else jnp.asarray(rows)
        if not isinstance(rows, jax.core.Tracer):
            self._check(np.asarray(rows))
        found = self._take(rows)
        return found[(*(slice(None),) * rows.ndim, *rest)] if rest else found

    def _take(self, rows):
        if (shards := self.shards()) is not None:
            return shards.take(rows)
        if is_spread(self.source) and jax.sharding.get_abstract_mesh().empty:
            raise ValueError(f"{self!r} is divided among several processes. {IN_ALL}")
        return TAKE_ROWS.bind(rows, source=self) if self.is_on_host else self.source[rows]

    def _refuse(self, *_, **__):
        raise TypeError(
            f"{self!r} is not in memory and cannot be converted to an array. Take rows inside the plate, `x[i]` or "
            "`numpyro.subsample(x, ...)`; outside of a model use `rows.source`, the array or file that you gave."
        )

    # What JAX and NumPy call to make an array.
    __array__ = __jax_array__ = _refuse

    def read(self, rows: np.ndarray) -> np.ndarray:
        """Return rows by an array of integers, on the host."""
        last = self._last
        # The two gradients of control variates take the same rows.
        if last is not None and last[0].shape == rows.shape and (last[0] == rows).all():
            return last[1].astype(self.dtype, copy=False)
        try:
            found = self.fetch(rows)
        except (IndexError, ValueError) as error:
            self.failure = error  # To which JAX adds a traceback through itself.
            raise
        # A copy, because what a program hands over may be its own memory.
        self._last = (np.array(rows), found) if found.nbytes <= BLOCK_BYTES else None
        return found

    def fetch(self, rows: np.ndarray) -> np.ndarray:
        """Return rows by an array of integers, on the host, without a memory of those read last."""
        self._check(rows)
        if isinstance(self.source, np.ndarray):
            found = np.take(self.source, rows, 0)
        elif (blocks := _blocks(rows)) is not None:
            parts = [self.source[first:end] for first, end in blocks]
            found = (np.ma if isinstance(parts[0], np.ma.MaskedArray) else np).concatenate(parts)
            found = found.reshape(*rows.shape, *self.shape[1:])
        else:
            # Files of HDF5 want each row once, in order.
            unique, places = np.unique(rows, return_inverse=True)
            found = np.asanyarray(self.source[unique])[places.reshape(rows.shape)]
        if words := losses(found):
            raise ValueError(f"{self!r} {words}")
        return np.asarray(found, self.dtype)

    def _check(self, rows):
        if rows.size and not -len(self) <= rows.min() <= rows.max() < len(self):
            raise IndexError(
                f"{self!r} has no row {rows.max() if rows.max() >= len(self) else rows.min()}. Make plates as long as "
                "the data, `numpyro.plate(name, len(x), ...)`."
            )

    def blocks(self) -> Iterator[np.ndarray]:
        """Yield all rows in order, as consecutive blocks."""
        step = max(1, BLOCK_BYTES * len(self) // max(1, self.nbytes))
        for first in range(0, len(self), step):
            yield np.asanyarray(self.source[first : first + step])

    def share(self, mesh: jax.sharding.Mesh, block_size: int) -> None:
        """Put the rows on the devices of a mesh, each its share."""
        if not self.is_on_host and len(self.source.sharding.device_set) == 1:
            raise ValueError(
                f"{self!r} is a JAX array on one device; to divide its rows among the devices of the mesh, write "
                "Rows(numpy.asarray(array))."
            )
        known = self._shards
        if known is None or known.mesh != mesh or known.block_size < block_size:
            self._shards = Shards(self, mesh, block_size)

    def shards(self) -> Shards | None:
        """Return the shares on the devices of the mesh in use, if there are any."""
        known = self._shards
        return None if known is None or known.mesh.abstract_mesh != jax.sharding.get_abstract_mesh() else known

    def contents(self) -> Contents:
        """Return what a look at all rows finds; they are read once, unless their type tells."""
        if self._contents is None:
            dtype = np.dtype(self.source.dtype)
            is_plain = dtype.kind in "biu" and dtype.itemsize < 8 and not isinstance(self.source, np.ma.MaskedArray)
            blocks = () if is_plain else [self.source] if is_spread(self.source) else self.blocks()
            self._contents = reduce(Contents.join, map(Contents.of, blocks), Contents())
        return self._contents

    def digest(self) -> str:
        """Return a digest of shape, type and values, of more than 256 MB those of evenly spread blocks of rows."""
        if has_parts(self.source):
            return digest(self.source) or ""
        found = hashlib.blake2b(f"{self.shape} {self.source.dtype}".encode(), digest_size=16)
        blocks = self.blocks()
        if self.nbytes > DIGEST_BYTES:
            count = min(1000, len(self))
            size = max(1, DIGEST_BYTES * len(self) // (self.nbytes * count))
            starts = np.linspace(0, len(self) - size, count).astype(int)
            blocks = (np.asarray(self.source[first : first + size]) for first in starts)
        for block in blocks:
            found.update(np.ascontiguousarray(block).reshape(-1).view(np.uint8).data)
        return found.hexdigest()

    # Programs are compiled for the source itself, so the same array may be wrapped again.
    def __eq__(self, other) -> bool:
        if not isinstance(other, Rows):
            return False
        # NumPyro compares arrays of a run by their bytes, which it puts in place of a source.
        return self.source is other.source or (isinstance(self.source, bytes) and self.source == other.source)

    def __hash__(self) -> int:
        return hash(self.source) if isinstance(self.source, bytes) else id(self.source)

    def __reduce__(self):
        # A mapped file is opened again by its name, and not stored. A part of it knows no offset of its own.
        source = self.source
        if isinstance(source, np.memmap) and isinstance(source.base, mmap.mmap) and source.flags.c_contiguous:
            return _reopened, (str(source.filename), source.dtype.str, source.shape, source.offset)
        return Rows, (source,)

    def tree_flatten(self):
        if self._shards is not None and (are_several() or not self.is_on_host):
            # No process has all shares, so they must be inputs of a program; and they stand for an array of JAX.
            return (self._shards.array,), self
        return ((), self) if self.is_on_host else ((self.source,), None)

    @classmethod
    def tree_unflatten(cls, whole, children):
        if not children:
            return whole
        found = object.__new__(cls)
        if whole is None:
            found.source, found.is_on_host = children[0], False
        else:
            # Not by `copy`, which would open a file again.
            found.__dict__.update(whole.__dict__)
            found._shards = copy(whole._shards)
            found._shards.array = children[0]
        return found


def _reopened(path, dtype, shape, offset):
    return Rows(np.memmap(path, dtype, "r", offset, shape))


def _blocks(rows: np.ndarray) -> list[tuple[int, int]] | None:
    """Return the first row of each of the consecutive blocks, and the one after its last; ``None`` for short ones."""
    flat = rows.reshape(-1)
    ends = np.append(np.flatnonzero(np.diff(flat) != 1) + 1, len(flat))
    if len(flat) < 4 * len(ends) or (flat < 0).any():
        return None
    first = flat[np.append(0, ends[:-1])]
    return list(zip(first.tolist(), (flat[ends - 1] + 1).tolist(), strict=True))


def host_rows(tree) -> list[Rows]:
    """Return the `Rows` in a pytree."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda leaf: isinstance(leaf, Rows))
    return [leaf for leaf in leaves if isinstance(leaf, Rows)]


def count_nan(array: Any) -> int:
    """Return how many numbers of an array or of `Rows` are NaN."""
    return (array.contents() if isinstance(array, Rows) else Contents.of(array)).num_nan


def losses(array: Any) -> str:
    """Return, in words, what JAX would lose of an array or of `Rows` in silence; empty if nothing but digits."""
    if isinstance(array, Rows):
        return array.contents().losses(np.dtype(array.source.dtype))
    may_be = isinstance(array, np.ma.MaskedArray) or (array.dtype.name in WIDE and jnp.result_type(float).itemsize < 8)
    return Contents.of(array).losses(array.dtype) if may_be else ""
