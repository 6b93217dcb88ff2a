"""Draws on disk: one ``.npy`` file per site and field, with full length from the start."""

from __future__ import annotations

import errno
import os
from pathlib import Path
import re
from typing import Any, NamedTuple
import zlib

import jax
import numpy as np

from numpyro_repulsion.checkpointing.stored import array_header, sync_folder, write

__all__ = ["DrawFile", "checksum", "make_room", "plan"]

_FLAGS = os.O_WRONLY | getattr(os, "O_BINARY", 0)


class DrawFile(NamedTuple):
    """One file of draws.

    - **file** - the name of the file.
    - **name** - the name of the site or field.
    - **is_sample** - whether it is a site.
    - **dtype**, **shape** - those of the whole array, ``(chains, draws, ...)``.
    """

    file: str
    name: str
    is_sample: bool
    dtype: str
    shape: tuple[int, ...]

    @property
    def header(self) -> bytes:
        """The header of the file."""
        return array_header(tuple(self.shape), self.dtype)

    @property
    def num_bytes(self) -> int:
        """The size of the array in bytes."""
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize

    @property
    def file_size(self) -> int:
        """The size of the file in bytes."""
        return len(self.header) + self.num_bytes

    def open(self, folder: Path, flags: int = 0) -> int:
        """Open the file for writing."""
        return os.open(folder / self.file, _FLAGS | flags, 0o666)

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
            write(file, _bytes(own), start + (chain * self.shape[1] + first_row) * stride)
        os.fsync(file)


def plan(collected: dict[str, Any], sample_field: str, num_chains: int, num_rows: int) -> list[DrawFile]:
    """Return the files for the collected draws, in the order of the leaves, named after sites and fields.

    :param collected: shapes of one draw of one chain, by field.
    """
    files: list[DrawFile] = []
    taken = set()
    leaves = jax.tree.leaves_with_path(collected)
    paths = [path for (field, *path), _ in leaves if field.key == sample_field]
    has_sites = all(len(path) == 1 and isinstance(path[0], jax.tree_util.DictKey) for path in paths)
    for (field, *path), leaf in leaves:
        is_sample = field.key == sample_field
        name = (
            str(path[0].key)
            if is_sample and has_sites
            else field.key + jax.tree_util.keystr(tuple(path)).replace("'", "")
        )
        stem = re.sub(r"[^\w.-]", "_", name)[:100].strip(".") or "_"
        while stem.lower() in taken:  # Some file systems ignore case.
            stem += f"_{len(files)}"
        taken.add(stem.lower())
        shape = (num_chains, num_rows, *leaf.shape)
        files.append(DrawFile(f"{stem}.npy", name, is_sample, str(leaf.dtype), shape))
    return files


def make_room(folder: Path, files: list[DrawFile]) -> None:
    """Make files of full length, so that a disk that is too small fails before anything is computed.

    :raises OSError: if the disk is too small; the files are removed.
    """
    try:
        folder.mkdir(exist_ok=True)
        for one in files:
            file = one.open(folder, os.O_CREAT | os.O_TRUNC)
            try:
                write(file, one.header, 0)
                _reserve(file, one.file_size)
                os.fsync(file)
            finally:
                os.close(file)
        sync_folder(folder)
    except OSError:
        for one in files:
            (folder / one.file).unlink(missing_ok=True)
        raise


def checksum(arrays: list[np.ndarray]) -> int:
    """Return a checksum over the values of arrays."""
    found = 0
    for array in arrays:
        found = zlib.crc32(_bytes(array), found)
    return found


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
