"""A run on disk: its draws in one ``.npy`` file per site, what it is, and the state from which it goes on."""

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

__all__ = ["Directory", "Draws", "load_draws"]

_NOTHING: dict[str, Any] = {"iteration": 0, "rows": [0, 0]}
_RUN, _DRAWS, _STATES = "run.json", "draws", ("state-0.npz", "state-1.npz")


class Draws(NamedTuple):
    """Draws in a directory of :func:`~numpyro_repulsion.run_in_pieces`: arrays on disk, read when they are looked at.

    - **samples** - by site, each ``(num_chains, draws saved so far, ...)``.
    - **extra_fields** - the same for the fields of the state.
    - **num_iterations** - iterations saved, warmup included.
    - **is_complete** - whether these are all.
    """

    samples: dict[str, np.ndarray]
    extra_fields: dict[str, np.ndarray]
    num_iterations: int
    is_complete: bool


def load_draws(directory: str | os.PathLike) -> Draws:
    """The draws in a directory of :func:`~numpyro_repulsion.run_in_pieces`, of a run that goes on or is done.

    It needs no model. Arrays are mapped from disk, read-only: of a run larger than memory only what is looked at is
    read.

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
        group[file.name] = file.map(path / _DRAWS)[:, : note["rows"][1]]
    return Draws(samples, extra_fields, note["iteration"], note["iteration"] == run["num_iterations"])


class Directory:
    """A directory that one run at a time may write to.

    :param path: made if it is not there.
    :param num_iterations: of the run, warmup included.
    :raises ValueError: for a directory with something else in it.
    :raises OSError: for one that cannot be written to.
    :raises RuntimeError: for one in which another process is running.
    """

    #: Whether what is saved may be found again.
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
        """Makes room for all draws, or finds those of the same run.

        :param identity: what makes the run the run it is.
        :param files: of :func:`~numpyro_repulsion.checkpointing.draws.plan`.
        :param densities: tells those of the model's sites, which are compared where programs cannot be.
        :param is_opaque: whether programs do not tell all.
        """
        path = self.path / _RUN
        if path.exists():
            self._run = json.loads(path.read_text())
            others = [name for name, value in makers().items() if self._run["makers"].get(name) != value]
            self._require_same(identity, densities, bool(others), is_opaque)
            if others:
                warnings.warn(
                    f"{self.path} was begun with another {' and '.join(others)}: the run goes on, and may round "
                    "differently from one that was not interrupted.",
                    stacklevel=4,
                )
        else:
            strange = {x.name for x in self.path.iterdir() if not x.name.startswith(".")} - {_DRAWS, f"{_RUN}.part"}
            if strange:
                raise ValueError(
                    f"{self.path} is not empty and holds no run ({', '.join(sorted(strange)[:3])}): give a new one."
                )
            size = sum(file.num_bytes for file in files) / 2**20
            self._saving(lambda: make_room(self.path / _DRAWS, files), f"there is no room for {size:.1f} MiB of draws")
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
            name = self.path / _DRAWS / file.file
            size = name.stat().st_size if name.exists() else 0
            if size != file.file_size:
                raise ValueError(
                    f"{name} has {size} bytes, not {file.file_size}: draws were lost. Delete {self.path} to begin "
                    "again."
                )
            self._files.append(file.open(self.path / _DRAWS))

    def _require_same(self, identity, densities, has_other_makers, is_opaque):
        saved = self._run["identity"]
        if "densities" not in self._run:
            raise ValueError(
                f"{self.path} holds a run that an earlier version of this package began, which did not write down what "
                "the model computes: whether this is the same run cannot be told. Give another directory (load_draws "
                "reads the draws of this one)."
            )
        found = differences(saved, identity)
        if has_other_makers:
            # Other versions make other programs of the same functions.
            found = [sentence for sentence in found if not sentence.startswith(PROGRAMS)]
        if found or has_other_makers or is_opaque:
            found += compare_densities(self._run["densities"], densities())
        if found:
            raise ValueError(
                f"{self.path} holds another run: {'; '.join(found)}. Give another directory, or delete this one."
            )

    def restore(self, like: Any) -> tuple[int, Any] | None:
        """The iteration to go on from and the states there, or ``None`` before the first piece.

        :param like: the structure of the states, with shapes and types.
        :raises ValueError: where nothing that was saved is whole.
        """
        found = sorted(_whole_states(self.path, like), key=lambda state: -state[1]["iteration"])
        for states, note, slot in found:
            first, stop = note["rows"]
            if note["checksum"] == checksum([array[:, first:stop] for array in self.draws()]):
                if len(found) < sum((self.path / name).exists() for name in _STATES) or states is not found[0][0]:
                    warnings.warn(
                        f"Something saved in {self.path} is torn; going on from iteration {note['iteration']}, where "
                        "all is whole.",
                        stacklevel=4,
                    )
                self._next_slot = 1 - slot
                return note["iteration"], states
        if any((self.path / name).exists() for name in _STATES):
            raise ValueError(f"Nothing that was saved in {self.path} is whole. Delete it to begin again.")
        return None

    def save(self, iteration: int, states: Any, first_row: int, draws: list[np.ndarray]) -> None:
        """Saves a piece: its draws, and only when they are safe the states after it.

        :param iteration: how many iterations are done.
        :param first_row: the draw with which the piece begins.
        :param draws: in the order of the files, each ``(chains, draws of the piece, ...)``.
        """
        rows = [first_row, first_row + draws[0].shape[1]]
        note = {"iteration": iteration, "rows": rows, "checksum": checksum(draws)}

        def save():
            for file, place, array in zip(self._files, self._draws, draws, strict=True):
                place.put(file, first_row, array)
            replace(self.path / _STATES[self._next_slot], pack(states, note))

        after = ". What was saved before is whole: the same call goes on from there."
        self._saving(save, f"iterations up to {iteration} cannot be saved", after)
        self._next_slot = 1 - self._next_slot

    def draws(self) -> list[np.ndarray]:
        """All draws, ``(chains, draws, ...)``, mapped from disk, in the order of the files."""
        return [file.map(self.path / _DRAWS) for file in self._draws]

    def close(self) -> None:
        """Lets go of the files, and others have the directory."""
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
            # It ends with the process, however that ends.
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise RuntimeError(f"Another run is writing to {self.path}; wait for it, or stop it.") from None
        except OSError:  # a file system without locks
            pass


def _whole_states(path, like=None):
    """``(states, note, slot)`` of each state file that is whole."""
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
