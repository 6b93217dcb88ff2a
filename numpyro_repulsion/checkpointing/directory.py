"""A run on disk: its draws in one ``.npy`` file per site, its identity, and the state from which it continues.

Every file found there is complete: draws have their full length from the start, and other files are replaced at once.
"""

from __future__ import annotations

from collections.abc import Sequence
import errno
import functools
import io
import itertools
import json
import os
from pathlib import Path
import re
from typing import Any, NamedTuple
import warnings
import zipfile
import zlib

import jax
from jax import random
import jax.numpy as jnp
import numpy as np

from numpyro_repulsion.checkpointing.identity import differences, makers, shapes_of
from numpyro_repulsion.processes import are_several, broadcast, by_the_first

_RUN, _DRAWS, _STATES = "run.json", "draws", ("state-0.npz", "state-1.npz")
_WRITE = os.O_WRONLY | getattr(os, "O_BINARY", 0)


class Draws(NamedTuple):
    """Draws in a directory of :func:`~numpyro_repulsion.run_in_pieces`: arrays on disk, read on access.

    - **samples** - arrays ``(num_chains, draws saved so far, ...)`` by site.
    - **extra_fields** - the same for the fields of the state.
    - **num_iterations** - number of saved iterations, warmup included.
    - **is_complete** - whether these are all.
    """

    samples: dict[str, np.ndarray]
    extra_fields: dict[str, np.ndarray]
    num_iterations: int
    is_complete: bool


def load_draws(directory: str | os.PathLike) -> Draws:
    """Return the draws in a directory of :func:`~numpyro_repulsion.run_in_pieces`, also while the run is in progress.

    It needs no model. Arrays are mapped from disk, read-only, and only accessed parts are read, so a run may be larger
    than memory.

    :param directory: as given to :func:`~numpyro_repulsion.run_in_pieces`.
    :raises FileNotFoundError: for a directory without a run.

    **Example**

    .. doctest::

        >>> import tempfile
        >>> from jax import random
        >>> import jax.numpy as jnp
        >>> from numpyro.infer import MCMC
        >>> from numpyro_repulsion import SGLDR, load_draws, run_in_pieces
        >>> directory = tempfile.mkdtemp()
        >>> mcmc = MCMC(SGLDR(potential_fn=lambda z: z**2 / 2, step_size=0.1), num_warmup=10, num_samples=20,
        ...             num_chains=4, chain_method="vectorized", progress_bar=False)
        >>> run_in_pieces(mcmc, random.key(0), init_params=jnp.arange(4.0), directory=directory)
        >>> draws = load_draws(directory)
        >>> draws.samples["z"].shape, draws.extra_fields["diverging"].shape, draws.is_complete
        ((4, 20), (4, 20), True)
    """
    path = Path(directory)
    if not (path / _RUN).exists():
        raise FileNotFoundError(f"{path} contains no run: run_in_pieces(..., directory=...) writes {_RUN} there.")
    run = json.loads((path / _RUN).read_text())
    saved = [(note["iteration"], note["rows"][1]) for _, note, _ in _whole_states(path)]
    iteration, num_rows = max(saved, default=(0, 0))
    found: tuple[dict, dict] = {}, {}
    for file in itertools.starmap(DrawFile, run["files"]):
        found[not file.is_sample][file.name] = file.map(path / _DRAWS)[:, :num_rows]
    return Draws(*found, iteration, iteration == run["num_iterations"])


class Directory:
    """A directory that one run at a time may write to.

    Of several processes, the first does all but read draws. Its errors are raised in all, so that none waits for it.

    :param path: the directory, made if it does not exist, on a file system that all processes share.
    :param num_iterations: number of iterations of the run, warmup included.
    """

    def __init__(self, path: str | os.PathLike, num_iterations: int):
        self.path = Path(path)
        self.num_iterations = num_iterations
        self._next_slot = 0
        self._draws: list[DrawFile] = []
        self._open_files: list[int] = []
        by_the_first(self._take)

    def _take(self):
        """Make the directory, and take its lock."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _explained(error, f"The directory {self.path} cannot be made") from error
        if not os.access(self.path, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, f"The directory {self.path} cannot be written to.")
        try:
            import fcntl
        except ImportError:  # not on Windows
            return
        self._open_files.append(os.open(self.path, os.O_RDONLY))
        try:
            # The lock ends with the process, however that ends.
            fcntl.flock(self._open_files[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise RuntimeError(f"Another run is writing to {self.path}; wait for it, or stop it.") from None
        except OSError:  # a file system without locks
            pass

    def open(self, identity: dict[str, Any], files: list[DrawFile]) -> None:
        """Reserve room for all draws, or find those of the same run.

        :raises ValueError: if the directory holds another run, something else, or damaged files.
        """
        self._draws = files
        by_the_first(lambda: self._open(identity))

    def _open(self, identity):
        path = self.path / _RUN
        if path.exists():
            self._require_same(json.loads(path.read_text()), identity)
        else:
            self._begin(path, identity)
        for file in self._draws:
            name = self.path / _DRAWS / file.file
            size = name.stat().st_size if name.exists() else 0
            if size != file.file_size:
                raise ValueError(
                    f"{name} has {size} bytes, not {file.file_size}: draws were lost. Delete {self.path} to begin "
                    "again."
                )
            self._open_files.append(os.open(name, _WRITE))

    def _begin(self, path, identity):
        strange = {x.name for x in self.path.iterdir() if not x.name.startswith(".")} - {_DRAWS, f"{_RUN}.part"}
        if strange:
            raise ValueError(
                f"{self.path} contains other files ({', '.join(sorted(strange)[:3])}) and no run; give a new or "
                "empty directory."
            )
        size = sum(file.num_bytes for file in self._draws) / 2**20
        run = {"identity": identity, "makers": makers(), "num_iterations": self.num_iterations, "files": self._draws}
        self._saving(
            lambda: _make_room(self.path / _DRAWS, self._draws), f"there is no room for {size:.1f} MiB of draws"
        )
        self._saving(lambda: _replace(path, json.dumps(run, indent=1).encode()), "the run cannot begin")

    def _require_same(self, run, identity):
        others = [name for name, value in makers().items() if run["makers"].get(name) != value]
        if found := differences(run["identity"], identity, has_other_programs=bool(others)):
            raise ValueError(
                f"{self.path} contains another run: {'; '.join(found)}. Give another directory, or delete this one."
            )
        if others:
            warnings.warn(
                f"The run in {self.path} began with a different {' and '.join(others)}. It continues, but may round "
                "differently.",
                stacklevel=6,
            )

    def restore(self, *likes: Any) -> tuple[int, Any] | None:
        """Return the iteration to continue from and the states there, with one of these structures, or ``None``."""
        found = by_the_first(lambda: self._restore(likes))
        if not are_several():
            return found
        data = broadcast(b"" if found is None else _pack(found[1], {"iteration": found[0]}))
        if not data:
            return None
        states, note = _unpack(data, likes)
        return note["iteration"], states

    def _restore(self, likes):
        found = sorted(_whole_states(self.path, likes), key=lambda state: -state[1]["iteration"])
        for states, note, slot in found:
            first, stop = note["rows"]
            if note["checksum"] == _checksum([array[:, first:stop] for array in self.draws()]):
                if len(found) < sum((self.path / name).exists() for name in _STATES) or states is not found[0][0]:
                    warnings.warn(
                        f"A saved file in {self.path} is damaged. The run continues from iteration "
                        f"{note['iteration']}, the last one whose files are intact.",
                        stacklevel=6,
                    )
                self._next_slot = 1 - slot
                return note["iteration"], states
        if any((self.path / name).exists() for name in _STATES):
            raise ValueError(f"No saved state in {self.path} is intact. Delete the directory to begin again.")
        return None

    def save(self, iteration: int, states: Any, first_row: int, draws: list[np.ndarray]) -> None:
        """Save the draws of a piece, in the order of the files, and, once these are on disk, the states after it."""

        def save():
            for file, place, array in zip(self._open_files[-len(draws) :], self._draws, draws, strict=True):
                place.put(file, first_row, array)
            rows = [first_row, first_row + draws[0].shape[1]]
            note = {"iteration": iteration, "rows": rows, "checksum": _checksum(draws)}
            _replace(self.path / _STATES[self._next_slot], _pack(states, note))

        after = ". What was saved before is intact: the same call continues from there."
        by_the_first(lambda: self._saving(save, f"iterations up to {iteration} cannot be saved", after))
        self._next_slot = 1 - self._next_slot

    def draws(self) -> list[np.ndarray]:
        """Return all draws, ``(chains, draws, ...)``, mapped from disk, in the order of the files."""
        try:
            return [file.map(self.path / _DRAWS) for file in self._draws]
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"This process does not see the run in {self.path.absolute()}. Give a directory on a file system that "
                "all processes share."
            ) from error

    def close(self) -> None:
        """Close the files and release the lock on the directory."""
        for file in self._open_files:
            os.close(file)
        self._open_files = []

    def _saving(self, save, failure, after=""):
        try:
            save()
        except OSError as error:
            for part in self.path.glob("*.part"):
                part.unlink(missing_ok=True)
            raise _explained(error, f"{self.path}: {failure}", after) from error


def _whole_states(path, likes=()):
    """Return ``(states, note, slot)`` of each intact state file."""
    found = []
    for slot, name in enumerate(_STATES):
        try:
            states, note = _unpack((path / name).read_bytes(), likes)
            found.append((states, note, slot))
        except (FileNotFoundError, _Torn):
            continue
    return found


def _explained(error, text, after=""):
    return type(error)(error.errno, f"{text} ({error.strerror or error}){after}")


class DrawFile(NamedTuple):
    """One file of draws."""

    file: str  # its name
    name: str  # of the site or field
    is_sample: bool  # whether it is a site
    dtype: str
    shape: tuple[int, ...]  # of the whole array, ``(chains, draws, ...)``

    @property
    def header(self) -> bytes:
        file, dtype = io.BytesIO(), np.dtype(self.dtype)
        # NumPy does not know all types, such as bfloat16.
        kind = dtype if dtype.kind != "V" else np.dtype(f"V{dtype.itemsize}")
        description = {"descr": np.lib.format.dtype_to_descr(kind), "fortran_order": False, "shape": tuple(self.shape)}
        np.lib.format.write_array_header_1_0(file, description)
        return file.getvalue()

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize

    @property
    def file_size(self) -> int:
        return len(self.header) + self.num_bytes

    def map(self, folder: Path) -> np.ndarray:
        """Return the array, mapped read-only."""
        found = np.load(folder / self.file, mmap_mode="r" if self.num_bytes else None)
        return np.asarray(found).view(self.dtype)

    def put(self, file: int, first_row: int, rows: np.ndarray) -> None:
        """Write rows ``(chains, rows, ...)`` to their places in the file."""
        if not rows.size:
            return
        rows = np.ascontiguousarray(rows)
        stride, start = rows[0, 0].nbytes, len(self.header)
        for chain, own in enumerate(rows):
            _write(file, _bytes(own), start + (chain * self.shape[1] + first_row) * stride)
        os.fsync(file)


def plan(collected: dict[str, Any], sample_field: str, num_chains: int, num_rows: int) -> list[DrawFile]:
    """Return the files for the collected draws, in the order of the leaves, named after sites and fields."""
    files: list[DrawFile] = []
    taken = set()
    leaves = jax.tree.leaves_with_path(collected)
    paths = [path for (field, *path), _ in leaves if field.key == sample_field]
    has_sites = all(len(path) == 1 and isinstance(path[0], jax.tree_util.DictKey) for path in paths)
    for (field, *path), leaf in leaves:
        is_sample = field.key == sample_field
        name = field.key + jax.tree_util.keystr(tuple(path)).replace("'", "")
        if is_sample and has_sites:
            name = str(path[0].key)
        stem = re.sub(r"[^\w.-]", "_", name)[:100].strip(".") or "_"
        while stem.lower() in taken:  # Some file systems ignore case.
            stem += f"_{len(files)}"
        taken.add(stem.lower())
        shape = (num_chains, num_rows, *leaf.shape[1:])
        files.append(DrawFile(f"{stem}.npy", name, is_sample, str(leaf.dtype), shape))
    return files


def _make_room(folder: Path, files: list[DrawFile]) -> None:
    """Make files of full length, or none, so that a disk that is too small fails before anything is computed."""
    try:
        folder.mkdir(exist_ok=True)
        for one in files:
            _create(folder / one.file, one.header, one.file_size)
        _sync_folder(folder)
    except OSError:
        for one in files:
            (folder / one.file).unlink(missing_ok=True)
        raise


def _checksum(arrays):
    return functools.reduce(lambda found, array: zlib.crc32(_bytes(array), found), arrays, 0)


def _bytes(array):
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _reserve(file, size):
    if hasattr(os, "posix_fallocate"):
        try:
            return os.posix_fallocate(file, 0, size)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
    os.ftruncate(file, size)


class _Torn(Exception):
    """Raised if a file does not hold what was written."""


def _write(file: int, data: Any, offset: int) -> None:
    """Write all of a contiguous array, or bytes, at an offset of an open file."""
    rest = memoryview(data).cast("B")
    os.lseek(file, offset, os.SEEK_SET)
    while rest:
        rest = rest[os.write(file, rest) :]


def _create(path: Path, data: bytes, size: int | None = None) -> None:
    """Make a file that begins with some bytes, on request longer than these."""
    file = os.open(path, _WRITE | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        _write(file, data, 0)
        if size is not None:
            _reserve(file, size)
        os.fsync(file)
    finally:
        os.close(file)


def _replace(path: Path, data: bytes) -> None:
    """Replace a file atomically: a reader sees the old one or the new one, also after a crash."""
    part = path.with_name(path.name + ".part")
    _create(part, data)
    os.replace(part, path)
    _sync_folder(path.parent)


def _sync_folder(path: Path) -> None:
    """Make the names of files in a folder durable, on systems where folders can be opened."""
    if os.name == "posix":
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)


def _pack(tree: Any, note: dict[str, Any]) -> bytes:
    """Return a pytree of arrays and keys of either style, with a note, as an ``.npz`` file, which has checksums."""
    leaves = jax.tree.leaves(tree)
    are_keys = [jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in leaves]
    kinds = [str(random.key_impl(leaf)) if is_key else None for leaf, is_key in zip(leaves, are_keys, strict=True)]
    note = note | {"keys": kinds, "leaves": shapes_of(tree)}
    arrays = {str(i): np.asarray(random.key_data(x) if are_keys[i] else x) for i, x in enumerate(leaves)}
    file = io.BytesIO()
    np.savez(file, **arrays, note=np.frombuffer(json.dumps(note).encode(), np.uint8))  # type: ignore[arg-type]
    return file.getvalue()


def _unpack(data: bytes, likes: Sequence[Any] = ()) -> tuple[Any, dict[str, Any]]:
    """Return the pytree, which has one of these structures, and the note that `_pack` packed; without a structure, only
    the note. Raise `_Torn` for a torn file."""
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as file:
            arrays = dict(file)
        note = json.loads(arrays.pop("note").tobytes())
        leaves = [arrays[str(i)] for i in range(len(arrays))]
    except (zipfile.BadZipFile, zlib.error, ValueError, KeyError, EOFError, OSError, NotImplementedError) as error:
        raise _Torn(str(error)) from error
    if not likes:
        return None, note
    others = [differences(note["leaves"], shapes_of(like)) for like in likes]
    like, other = min(zip(likes, others, strict=True), key=lambda pair: len(pair[1]))
    if other:
        raise ValueError(
            f"The saved state does not belong to this run: {'; '.join(other)}. An update of the package can cause "
            "this. Give another directory; load_draws reads the saved draws."
        )
    found = []
    for shape, leaf, key in zip(jax.tree.leaves(like), leaves, note["keys"], strict=True):
        if leaf.dtype.kind == "V":  # types that are not NumPy's own, such as bfloat16
            leaf = leaf.view(shape.dtype)
        found.append(jnp.asarray(leaf) if key is None else random.wrap_key_data(jnp.asarray(leaf), impl=key))
    return jax.tree.unflatten(jax.tree.structure(like), found), note
