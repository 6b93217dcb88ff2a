"""A stream of batches as shuffled arrays on disk, through files of random parts of the rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
import os
from os import PathLike
from pathlib import Path
import shutil
import tempfile
from typing import Any

import numpy as np
from tqdm import tqdm

__all__ = ["convert", "opened"]

#: Rows are dealt to this many files at random, and each is shuffled in memory: data of 64 GB need 2 GB.
NUM_PARTS = 64
#: The file that says which columns a directory has.
COLUMNS = "columns.txt"


def convert(batches: Iterable[Mapping[str, Any]], directory: str | PathLike, seed: int, progress_bar: bool) -> None:
    """Write the columns of batches as shuffled arrays; see :meth:`~numpyro_repulsion.Rows.convert`."""
    directory = Path(directory)
    if directory.exists():
        raise ValueError(
            f"{str(directory)!r} exists. Open what it holds by Rows.open({str(directory)!r}), or delete it to convert "
            "again."
        )
    directory.parent.mkdir(parents=True, exist_ok=True)
    # On the same disk, so that the finished directory can be renamed.
    temporary = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        rng = np.random.default_rng(seed)
        kind, counts = _deal(batches, temporary, rng, progress_bar)
        _write(temporary, kind, counts, rng, progress_bar)
        temporary.chmod(0o777 & ~_umask())
        temporary.rename(directory)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def opened(directory: str | PathLike) -> dict[str, np.ndarray]:
    """Return the arrays of a converted directory, as they lie on disk."""
    directory = Path(directory)
    if not (directory / COLUMNS).is_file():
        raise ValueError(
            f"{str(directory)!r} is no directory that Rows.convert wrote. For single files, write "
            'Rows(np.load("x.npy", mmap_mode="r")).'
        )
    names = (directory / COLUMNS).read_text().splitlines()
    return {name: np.load(directory / f"{name}.npy", mmap_mode="r") for name in names}


def _deal(batches, directory, rng, progress_bar):
    """Append each row to one of the parts at random; return the type of a row, and the number of rows in each part."""
    kind, counts = None, np.zeros(NUM_PARTS, int)
    with ExitStack() as stack:
        parts = [stack.enter_context((directory / f"part-{i}").open("wb")) for i in range(NUM_PARTS)]
        bar = stack.enter_context(tqdm(desc="reading", unit=" rows", disable=not progress_bar))
        for batch in batches:
            columns = _columns(batch)
            found = np.dtype([(name, column.dtype, column.shape[1:]) for name, column in columns.items()])
            kind = kind or found
            if found != kind:
                raise ValueError(f"Rows.convert: all batches must have the same columns; got {found} after {kind}.")
            rows = np.empty(len(next(iter(columns.values()))), kind)
            for name, column in columns.items():
                rows[name] = column
            chosen = rng.integers(NUM_PARTS, size=len(rows))
            for i in np.unique(chosen):
                rows[chosen == i].tofile(parts[i])
            counts += np.bincount(chosen, minlength=NUM_PARTS)
            bar.update(len(rows))
    if not counts.sum():
        raise ValueError("Rows.convert: the batches have no rows.")
    return kind, counts


def _write(directory, kind, counts, rng, progress_bar):
    """Write the parts one after another as columns, each part shuffled, and delete them."""
    arrays = {
        name: np.lib.format.open_memmap(
            directory / f"{name}.npy", mode="w+", dtype=kind[name].base, shape=(int(counts.sum()), *kind[name].shape)
        )
        for name in kind.names
    }
    first = 0
    with tqdm(desc="writing", unit=" rows", total=int(counts.sum()), disable=not progress_bar) as bar:
        for i, count in enumerate(counts):
            rows = rng.permutation(np.fromfile(directory / f"part-{i}", kind))
            for name, array in arrays.items():
                array[first : first + count] = rows[name]
            (directory / f"part-{i}").unlink()
            first += count
            bar.update(int(count))
    for array in arrays.values():
        array.flush()
    (directory / COLUMNS).write_text("\n".join(kind.names))


def _columns(batch) -> dict[str, np.ndarray]:
    """Return the columns of a batch as arrays, checked."""
    if not isinstance(batch, Mapping):
        raise TypeError(f"Rows.convert takes batches of the form {{column: array}}; got a {type(batch).__name__}.")
    if not batch:
        raise ValueError("Rows.convert: a batch has no columns.")
    columns = {}
    for name, values in batch.items():
        if (
            not isinstance(name, str)
            or not name
            or name != os.path.basename(name)
            or name.startswith("part-")
            or "\n" in name
        ):
            raise ValueError(f"Rows.convert: columns are names of files; got {name!r}. Give it another name.")
        try:
            columns[name] = column = np.asarray(values)
        except ValueError as error:  # Rows of different shapes.
            raise TypeError(f"Rows.convert: the column {name!r} is no array of numbers ({error}).") from error
        if column.dtype.kind not in "biufc":
            raise TypeError(
                f"Rows.convert takes numbers; the column {name!r} has dtype {column.dtype}. Encode categories as "
                "integers, fill in missing values, or leave it out."
            )
        if not column.ndim:
            raise ValueError(f"Rows.convert: the column {name!r} has no axis of rows; got the number {values!r}.")
    if len({len(column) for column in columns.values()}) > 1:
        lengths = {name: len(column) for name, column in columns.items()}
        raise ValueError(f"Rows.convert: the columns of a batch must have equally many rows; got {lengths}.")
    return columns


def _umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask
