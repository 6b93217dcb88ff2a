"""Rows of an array of NumPy, read by several threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
import functools
import itertools
import os

import numpy as np

__all__ = ["gather"]

#: Each thread reads this many bytes or more, because to hand out work takes as long as to read some of them ...
PART_BYTES = 1 << 18
#: ... and no more threads read, because they share the memory or the disk.
MAX_PARTS = 16


def gather(source: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return ``source[rows]`` of rows that exist.

    Threads share the work where it is worth it: NumPy holds no lock while it reads.
    """
    row_bytes = max(1, source[:1].nbytes)
    count = min(_num_cores(), MAX_PARTS, rows.size * row_bytes // PART_BYTES)
    if count < 2:
        return np.take(source, rows, 0)
    flat = rows.reshape(-1)
    found = np.empty((flat.size, *source.shape[1:]), source.dtype)
    ends = np.linspace(0, flat.size, count + 1).astype(int)

    def read(first, end):
        # All rows exist. If NumPy had to check that, it would read into a buffer first.
        np.take(source, flat[first:end], 0, found[first:end], "wrap")

    own, *others = itertools.pairwise(ends)
    pending = [_threads().submit(read, *part) for part in others]
    read(*own)
    for part in pending:
        part.result()
    return found.reshape(*rows.shape, *source.shape[1:])


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(MAX_PARTS - 1, "numpyro_repulsion.rows")


if hasattr(os, "register_at_fork"):
    # A child process has none of the threads of its parent.
    os.register_at_fork(after_in_child=_threads.cache_clear)
