"""A directory for a run of several processes: the first writes it, and all read it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from numpyro_repulsion.checkpointing.directory import DRAWS, Directory
from numpyro_repulsion.checkpointing.draws import DrawFile
from numpyro_repulsion.checkpointing.stored import pack, unpack
from numpyro_repulsion.processes import broadcast, by_the_first

__all__ = ["SharedDirectory"]


class SharedDirectory:
    """A :class:`Directory` of which each process reads the draws, and the first of them does all else.

    Its errors are raised in all processes, so that none waits for another.

    :param path: the directory, on a file system that all processes share.
    :param num_iterations: number of iterations of the run, warmup included.
    """

    is_lasting = True

    def __init__(self, path: str | os.PathLike, num_iterations: int):
        self.path = Path(path)
        self._files: list[DrawFile] = []
        self._own: Any = by_the_first(lambda: Directory(path, num_iterations))

    def open(self, identity: dict[str, Any], files: list[DrawFile], densities, is_opaque: bool) -> None:
        # Of data that are spread over processes, all compute the densities.
        found, self._files = densities(), files
        by_the_first(lambda: self._own.open(identity, files, lambda: found, is_opaque))

    def restore(self, like: Any) -> tuple[int, Any] | None:
        found = by_the_first(lambda: self._own.restore(like))
        data = broadcast(b"" if found is None else pack(found[1], {"iteration": found[0]}))
        if not data:
            return None
        states, note = unpack(data, like)
        return note["iteration"], states

    def save(self, iteration: int, states: Any, first_row: int, draws: list[np.ndarray]) -> None:
        by_the_first(lambda: self._own.save(iteration, states, first_row, draws))

    def draws(self) -> list[np.ndarray]:
        """Return all draws, ``(chains, draws, ...)``, mapped from disk, in the order of the files."""
        try:
            return [file.map(self.path / DRAWS) for file in self._files]
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"This process does not see the run in {self.path.absolute()}. Give a directory on a file system that "
                "all processes share."
            ) from error

    def close(self) -> None:
        if self._own is not None:
            self._own.close()
