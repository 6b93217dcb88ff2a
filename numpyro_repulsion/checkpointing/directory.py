"""A run on disk: its draws in one ``.npy`` file per site, its identity, and the state from which it continues."""

from __future__ import annotations

from collections.abc import Callable
import errno
import itertools
import json
import os
from pathlib import Path
from typing import Any, NamedTuple
import warnings

import numpy as np

from numpyro_repulsion.checkpointing.draws import DrawFile, checksum, make_room
from numpyro_repulsion.checkpointing.identity import PROGRAMS, compare_densities, differences, makers
from numpyro_repulsion.checkpointing.stored import Torn, pack, replace, unpack

__all__ = ["DRAWS", "Directory", "Draws", "load_draws"]

_NOTHING: dict[str, Any] = {"iteration": 0, "rows": [0, 0]}
_RUN, DRAWS, _STATES = "run.json", "draws", ("state-0.npz", "state-1.npz")


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
        raise FileNotFoundError(f"{path} holds no run: run_in_pieces(..., directory=...) writes {_RUN} there.")
    run = json.loads((path / _RUN).read_text())
    notes = [note for _, note, _ in _whole_states(path)]
    note = max(notes, key=lambda note: note["iteration"], default=_NOTHING)
    samples: dict[str, np.ndarray] = {}
    extra_fields: dict[str, np.ndarray] = {}
    for file in itertools.starmap(DrawFile, run["files"]):
        group = samples if file.is_sample else extra_fields
        group[file.name] = file.map(path / DRAWS)[:, : note["rows"][1]]
    return Draws(samples, extra_fields, note["iteration"], note["iteration"] == run["num_iterations"])


class Directory:
    """A directory that one run at a time may write to.

    :param path: the directory, made if it does not exist.
    :param num_iterations: number of iterations of the run, warmup included.
    :raises OSError: if the directory cannot be written to.
    :raises RuntimeError: if another process is writing to it.
    """

    #: Whether a later process may find what is saved.
    is_lasting = True

    def __init__(self, path: str | os.PathLike, num_iterations: int):
        self.path = Path(path)
        self.num_iterations = num_iterations
        self._next_slot = 0
        self._draws: list[DrawFile] = []
        self._files: list[int] = []
        self._lock: int | None = None
        self._run: dict[str, Any] = {}
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _explained(error, f"The directory {self.path} cannot be made") from error
        if not os.access(self.path, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, f"The directory {self.path} cannot be written to.")
        self._take_lock()

    def open(
        self,
        identity: dict[str, Any],
        files: list[DrawFile],
        densities: Callable[[], dict[str, list]] = dict,
        is_opaque: bool = False,
    ) -> None:
        """Reserve room for all draws, or find those of the same run.

        :param identity: of :func:`~numpyro_repulsion.checkpointing.identity.identify`.
        :param files: of :func:`~numpyro_repulsion.checkpointing.draws.plan`.
        :param densities: returns the densities of the model's sites, compared if programs cannot be.
        :param is_opaque: whether programs call back into Python, which digests do not cover.
        :raises ValueError: if the directory holds another run, something else, or damaged files.
        """
        path = self.path / _RUN
        if path.exists():
            self._run = json.loads(path.read_text())
            others = [name for name, value in makers().items() if self._run["makers"].get(name) != value]
            self._require_same(identity, densities, bool(others), is_opaque)
            if others:
                warnings.warn(
                    f"The run in {self.path} began with a different {' and '.join(others)}. It continues, but may "
                    "round differently.",
                    stacklevel=4,
                )
        else:
            strange = {x.name for x in self.path.iterdir() if not x.name.startswith(".")} - {DRAWS, f"{_RUN}.part"}
            if strange:
                raise ValueError(
                    f"{self.path} contains other files ({', '.join(sorted(strange)[:3])}) and no run; give a new or "
                    "empty directory."
                )
            size = sum(file.num_bytes for file in files) / 2**20
            self._saving(lambda: make_room(self.path / DRAWS, files), f"there is no room for {size:.1f} MiB of draws")
            self._run = {
                "identity": identity,
                "densities": densities(),
                "makers": makers(),
                "num_iterations": self.num_iterations,
                "files": files,
            }
            self._saving(lambda: replace(path, json.dumps(self._run, indent=1).encode()), "the run cannot be begun")
        self._draws = [DrawFile(*file) for file in self._run["files"]]
        for file in self._draws:
            name = self.path / DRAWS / file.file
            size = name.stat().st_size if name.exists() else 0
            if size != file.file_size:
                raise ValueError(
                    f"{name} has {size} bytes, not {file.file_size}: draws were lost. Delete {self.path} to begin "
                    "again."
                )
            self._files.append(file.open(self.path / DRAWS))

    def _require_same(self, identity, densities, has_other_makers, is_opaque):
        saved = self._run["identity"]
        if "densities" not in self._run:
            raise ValueError(
                f"{self.path} holds a run that an earlier version of this package began. That version did not record "
                "what the model computes, so the runs cannot be compared. Give another directory (load_draws reads the "
                "draws of this one)."
            )
        found = differences(saved, identity)
        if has_other_makers:
            # Other versions make other programs from the same functions.
            found = [sentence for sentence in found if not sentence.startswith(PROGRAMS)]
        if found or has_other_makers or is_opaque:
            found += compare_densities(self._run["densities"], densities())
        if found:
            raise ValueError(
                f"{self.path} holds another run: {'; '.join(found)}. Give another directory, or delete this one."
            )

    def restore(self, like: Any) -> tuple[int, Any] | None:
        """Return the iteration to continue from and the states there, or ``None`` before the first piece.

        :param like: the structure of the states, with shapes and types.
        :raises ValueError: if no saved state is intact.
        """
        found = sorted(_whole_states(self.path, like), key=lambda state: -state[1]["iteration"])
        for states, note, slot in found:
            first, stop = note["rows"]
            if note["checksum"] == checksum([array[:, first:stop] for array in self.draws()]):
                if len(found) < sum((self.path / name).exists() for name in _STATES) or states is not found[0][0]:
                    warnings.warn(
                        f"A saved file in {self.path} is damaged; the run continues from iteration "
                        f"{note['iteration']}, where all are intact.",
                        stacklevel=4,
                    )
                self._next_slot = 1 - slot
                return note["iteration"], states
        if any((self.path / name).exists() for name in _STATES):
            raise ValueError(f"No saved state in {self.path} is intact. Delete the directory to begin again.")
        return None

    def save(self, iteration: int, states: Any, first_row: int, draws: list[np.ndarray]) -> None:
        """Save the draws of a piece and, once these are on disk, the states after it.

        :param iteration: number of iterations done.
        :param first_row: number of the first draw of the piece.
        :param draws: in the order of the files, each ``(chains, draws of the piece, ...)``.
        """
        rows = [first_row, first_row + draws[0].shape[1]]
        note = {"iteration": iteration, "rows": rows, "checksum": checksum(draws)}

        def save():
            for file, place, array in zip(self._files, self._draws, draws, strict=True):
                place.put(file, first_row, array)
            replace(self.path / _STATES[self._next_slot], pack(states, note))

        after = ". What was saved before is intact: the same call continues from there."
        self._saving(save, f"iterations up to {iteration} cannot be saved", after)
        self._next_slot = 1 - self._next_slot

    def draws(self) -> list[np.ndarray]:
        """Return all draws, ``(chains, draws, ...)``, mapped from disk, in the order of the files."""
        return [file.map(self.path / DRAWS) for file in self._draws]

    def close(self) -> None:
        """Close the files and releases the lock on the directory."""
        for file in (*self._files, *(() if self._lock is None else (self._lock,))):
            os.close(file)
        self._files, self._lock = [], None

    def _saving(self, save, failure, after=""):
        try:
            save()
        except OSError as error:
            for part in self.path.glob("*.part"):
                part.unlink(missing_ok=True)
            raise _explained(error, f"{self.path}: {failure}", after) from error

    def _take_lock(self):
        try:
            import fcntl
        except ImportError:  # not on Windows
            return
        self._lock = os.open(self.path, os.O_RDONLY)
        try:
            # The lock ends with the process, however that ends.
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise RuntimeError(f"Another run is writing to {self.path}; wait for it, or stop it.") from None
        except OSError:  # a file system without locks
            pass


def _whole_states(path, like=None):
    """Return ``(states, note, slot)`` of each intact state file."""
    found = []
    for slot, name in enumerate(_STATES):
        try:
            states, note = unpack((path / name).read_bytes(), like)
            found.append((states, note, slot))
        except (FileNotFoundError, Torn):
            continue
    return found


def _explained(error, text, after=""):
    return type(error)(error.errno, f"{text} ({error.strerror or error}){after}")
