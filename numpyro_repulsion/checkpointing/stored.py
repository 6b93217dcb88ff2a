"""Arrays on disk, written so that every file found there is complete: a file is replaced at once, or not at all."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any
import zipfile
import zlib

import jax
from jax import random
import jax.numpy as jnp
import numpy as np

__all__ = ["Torn", "array_header", "pack", "replace", "sync_folder", "unpack", "write"]

#: What ends a message about a saved state that does not fit.
_UPDATED = "as after an update of the package. Give another directory; load_draws reads the saved draws."

_KEYS = jax.dtypes.prng_key


class Torn(Exception):
    """Raised if a file does not hold what was written."""


def write(file: int, data: Any, offset: int) -> None:
    """Write all of a contiguous array, or bytes, at an offset of an open file."""
    rest = memoryview(data).cast("B")
    os.lseek(file, offset, os.SEEK_SET)
    while rest:
        rest = rest[os.write(file, rest) :]


def replace(path: Path, data: bytes) -> None:
    """Replace a file atomically: a reader sees the old one or the new one, also after a crash."""
    part = path.with_name(path.name + ".part")
    file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_BINARY", 0), 0o666)
    try:
        write(file, data, 0)
        os.fsync(file)
    finally:
        os.close(file)
    os.replace(part, path)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make the names of files in a folder durable, on systems where folders can be opened."""
    if os.name == "posix":
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)


def pack(tree: Any, note: dict[str, Any]) -> bytes:
    """Return a pytree of arrays and keys of either style, with a note, as an ``.npz`` file, which has checksums."""
    arrays: dict[str, Any] = {}
    implementations = []
    leaves = jax.tree.leaves_with_path(tree)
    for i, (_, leaf) in enumerate(leaves):
        is_key = jnp.issubdtype(leaf.dtype, _KEYS)
        implementations.append(str(random.key_impl(leaf)) if is_key else None)
        arrays[str(i)] = np.asarray(random.key_data(leaf) if is_key else leaf)
    note = note | {"keys": implementations, "paths": [jax.tree_util.keystr(path) for path, _ in leaves]}
    arrays["note"] = np.frombuffer(json.dumps(note).encode(), np.uint8)
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def unpack(data: bytes, like: Any = None) -> tuple[Any, dict[str, Any]]:
    """Return the pytree and the note that :func:`pack` packed.

    :param like: a pytree of the same structure with shapes and types; without it, only the note is read.
    :raises Torn: if ``data`` is not a complete file by :func:`pack`.
    :raises ValueError: for another structure.
    """
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as file:
            arrays = dict(file)
        note = json.loads(arrays.pop("note").tobytes())
        leaves = [arrays[str(i)] for i in range(len(arrays))]
    except (zipfile.BadZipFile, zlib.error, ValueError, KeyError, EOFError, OSError, NotImplementedError) as error:
        raise Torn(str(error)) from error
    if like is None:
        return None, note
    expected = jax.tree.leaves_with_path(like)
    if (paths := [jax.tree_util.keystr(path) for path, _ in expected]) != note["paths"]:
        other = sorted(set(paths) ^ set(note["paths"]))
        raise ValueError(f"The saved state and this run differ in {', '.join(other)}, {_UPDATED}")
    found = []
    for path, (_, shape), leaf, key in zip(paths, expected, leaves, note["keys"], strict=True):
        if leaf.dtype.kind == "V":  # types that are not NumPy's own, such as bfloat16
            leaf = leaf.view(shape.dtype)
        value = jnp.asarray(leaf) if key is None else random.wrap_key_data(jnp.asarray(leaf), impl=key)
        if (value.shape, value.dtype) != (shape.shape, shape.dtype):
            raise ValueError(
                f"The saved state has {path} as {value.dtype}{list(value.shape)}, but this run has it as "
                f"{shape.dtype}{list(shape.shape)}, {_UPDATED}"
            )
        found.append(value)
    return jax.tree.unflatten(jax.tree.structure(like), found), note


def array_header(shape: tuple[int, ...], dtype: Any) -> bytes:
    """Return the header of an ``.npy`` file."""
    file = io.BytesIO()
    dtype = np.dtype(dtype)
    kind = dtype if dtype.kind != "V" else np.dtype(f"V{dtype.itemsize}")
    description = {"descr": np.lib.format.dtype_to_descr(kind), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, description)
    return file.getvalue()
