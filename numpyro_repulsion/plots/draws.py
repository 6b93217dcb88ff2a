"""What plots share: draws read from arrays, a NumPyro run, or ArviZ's data; axes, colors and functions of points."""

from __future__ import annotations

from collections.abc import Callable
import itertools
from typing import Any, NamedTuple

import jax
from jax import lax
import numpy as np

from numpyro.infer import MCMC

from numpyro_repulsion.checks import integer
from numpyro_repulsion.diagnostics import num_independent
from numpyro_repulsion.inference_data import named_draws
from numpyro_repulsion.kernels import ParticleKernel
from numpyro_repulsion.kernels.runs import coupling_of, require_draws

#: Those of Okabe and Ito's colors, which color-blind readers can tell apart, that are legible on white.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")


def require_pyplot() -> Any:
    """Return ``matplotlib.pyplot``, or raise an ``ImportError`` that says how to install it."""
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError(
            'Plots need matplotlib: install it, or this package with its extra "plots", '
            'pip install "numpyro-repulsion[plots]".'
        ) from error
    return plt


def check_axes(ax: Any) -> None:
    """Raise ``TypeError`` for anything but axes or ``None``, and ``ImportError`` without matplotlib."""
    plt = require_pyplot()
    if ax is not None and not isinstance(ax, plt.Axes):
        raise TypeError(f"`ax` must be axes of matplotlib, such as from plt.subplots(); got {type(ax).__name__}.")


def axes(ax: Any, size: tuple[float, float]) -> Any:
    """Return the user's axes, or new ones in a figure of this size in inches."""
    if ax is not None:
        return ax
    ax = require_pyplot().subplots(figsize=size, layout="constrained")[1]
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def numbers(value: Any) -> np.ndarray:
    """Return an array of floats, an empty one if the user's value is none."""
    try:
        return np.asarray(value, float)
    except (TypeError, ValueError):
        return np.empty(0)


def evaluate(name: str, function: Callable, points: Any, point: str) -> np.ndarray:
    """Return a function's scalars at points, arrays with a leading axis; its name and what it gets are for messages."""
    found = jax.eval_shape(function, jax.tree.map(lambda x: x[0], points))
    if getattr(found, "shape", None) != ():
        raise ValueError(f"`{name}` must return a scalar for {point}; got {found}.")
    # The likelihood of many rows at all points at once would not fit into memory.
    return np.asarray(jax.jit(lambda points: lax.map(function, points, batch_size=256))(points), float)


class Draws(NamedTuple):
    """Draws and facts about the particles.

    - **values** - arrays ``(particles, draws, ...)`` by name.
    - **coordinates** - the labels along each axis of a variable, by name.
    - **num_ensembles** - number of equal groups of particles, in their order.
    - **num_independent** - number of independent groups for standard errors: ensembles that are balanced against each
      other are one.
    - **is_sampler** - whether the draws are from a distribution, and not the path of an optimizer.
    - **is_array** - whether they came as a bare array.
    """

    values: dict[str, np.ndarray]
    coordinates: dict[str, list[list[str]]]
    num_ensembles: int
    num_independent: int
    thinning: int = 1
    is_sampler: bool = True
    is_array: bool = False

    @property
    def num_particles(self) -> int:
        return next(iter(self.values.values())).shape[0]

    @property
    def num_draws(self) -> int:
        return next(iter(self.values.values())).shape[1]

    def labels(self) -> list[str]:
        """Return the name of every coordinate, as ArviZ writes it: ``"tau"``, ``"beta[0]"``."""
        places = [(name, place) for name, axes in self.coordinates.items() for place in itertools.product(*axes)]
        return [f"{name}[{', '.join(place)}]" if place else name for name, place in places]

    def pick(self, label: str | int) -> tuple[np.ndarray, str]:
        """Return a coordinate ``(particles, draws)`` and its label, chosen by label, or of one variable by number."""
        labels = self.labels()
        if isinstance(label, str):
            # The name of a variable is enough if it has one coordinate.
            own = [one for one in labels if one == label or one.startswith(f"{label}[")]
            if len(own) != 1:
                variable = [one for one in labels if one.startswith(label.split("[")[0] + "[")]
                raise ValueError(f"There is no coordinate {label!r}; name one, such as {listed(variable or labels)}.")
            number = labels.index(own[0])
        elif isinstance(label, int | np.integer) and not isinstance(label, bool):
            if len(self.values) > 1:
                raise ValueError(
                    f"With several variables a coordinate is named by a label; got {label}. Write one of "
                    f"{listed(labels)}."
                )
            if not -len(labels) <= label < len(labels):
                raise ValueError(f"There is no coordinate {label}: the draws have {len(labels)}, counted from 0.")
            number = int(label) % len(labels)
            label = labels[number]
        else:
            raise TypeError(
                f"A coordinate is named by a label such as 'beta[0]' or, if there is one variable, by its number; "
                f"got {label!r}."
            )
        name, place = [(name, i) for name, value in self.values.items() for i in range(value[0, 0].size)][number]
        return self.values[name].reshape(self.num_particles, self.num_draws, -1)[..., place], label


def read_draws(source: Any, num_ensembles: int | None = None) -> Draws:
    """Read draws from an array ``(particles, draws, ...)``, a dictionary of such, an ``MCMC``, or inference data."""
    if isinstance(source, MCMC):
        draws = _of_run(source)
    else:
        data = getattr(source, "posterior", source)
        data = getattr(data, "dataset", data)
        is_array = not isinstance(data, dict)
        if hasattr(data, "data_vars"):
            draws = _of_inference_data(data)
        else:
            draws = _checked({"z": data} if is_array else data, 1, 1)._replace(is_array=is_array)
    if num_ensembles is not None:
        num_ensembles = integer("`num_ensembles`", num_ensembles)
        draws = draws._replace(num_ensembles=num_ensembles, num_independent=num_ensembles)
    if draws.num_particles % draws.num_ensembles:
        raise ValueError(
            f"`num_ensembles` must divide the number of particles; got {draws.num_ensembles} for "
            f"{draws.num_particles} particles."
        )
    return draws


def _of_run(mcmc):
    require_draws(mcmc)
    samples, kernel = mcmc.get_samples(group_by_chain=True), mcmc.sampler
    # Each chain of another kernel is an ensemble.
    count = independent = mcmc.num_chains
    is_sampler = True
    if isinstance(kernel, ParticleKernel):
        is_sampler, count = kernel.dynamics.is_sampler, kernel.num_ensembles
        _, independent = coupling_of(mcmc)
    draws = _checked(named_draws(samples), count, independent)
    is_array = not isinstance(samples, dict) and draws.values.keys() == {"z"}
    return draws._replace(thinning=mcmc.thinning, is_sampler=is_sampler, is_array=is_array)


def _of_inference_data(data):
    names = list(data.data_vars)
    if wrong := [name for name in names if tuple(data[name].dims[:2]) != ("chain", "draw")]:
        raise ValueError(f"Draws must have the dimensions chain and draw first; {listed(wrong)} has others.")
    attributes = data.attrs
    # An optimizer has only its last cloud: one chain, whose draws are the particles.
    is_sampler = attributes.get("is_sampler", "true") == "true"
    values = {name: data[name].values if is_sampler else np.swapaxes(data[name].values, 0, 1) for name in names}
    count = int(attributes.get("num_ensembles", 1))
    found = _checked(values, count, num_independent(attributes, data.sizes["chain"] if is_sampler else count))
    for name in names:
        dims = data[name].dims[2:]
        # Dimensions without coordinates get numbers.
        found.coordinates[name][:] = [
            [str(x) for x in (data[dim].values if dim in data.coords else range(data.sizes[dim]))] for dim in dims
        ]
    return found._replace(thinning=int(attributes.get("thinning", 1)), is_sampler=is_sampler)


def _checked(values, num_ensembles, num_independent):
    kinds = "an array (particles, draws, ...), a dictionary of such, an MCMC that has run, or its inference data"
    if not values:
        raise ValueError(f"There are no variables among the draws; expected {kinds}.")
    found = {}
    for name, value in values.items():
        try:
            found[str(name)] = array = np.asarray(value)
        except ValueError as error:  # ragged lists
            raise TypeError(f"Draws must be {kinds}; got {type(value).__name__}.") from error
        if array.dtype.kind not in "biuf":
            raise TypeError(f"Draws must be {kinds}; got {type(value).__name__} with values of type {array.dtype}.")
        if array.ndim < 2 or 0 in array.shape:
            raise ValueError(
                f"Draws must be of shape (particles, draws, ...) and not empty; got {array.shape} for {name!r}. For "
                "one set of particles x of shape (particles, d) pass x[:, None]."
            )
    if len({array.shape[:2] for array in found.values()}) > 1:
        shapes = {name: array.shape for name, array in found.items()}
        raise ValueError(f"All variables must have the same number of particles and of draws; got {shapes}.")
    labels = {name: [[str(i) for i in range(size)] for size in array.shape[2:]] for name, array in found.items()}
    return Draws(found, labels, num_ensembles, num_independent)


def listed(names: Any, most: int = 8) -> str:
    """Return the first few names as text for a message."""
    names = [repr(name) for name in names]
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
