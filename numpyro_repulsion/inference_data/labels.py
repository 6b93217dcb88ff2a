"""Names of variables and dimensions, and coordinates, that make groups of arrays datasets of xarray."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
import warnings

import jax
import numpy as np

from numpyro_repulsion.gradients import ModelTarget
from numpyro_repulsion.inference_data.rows import Observations

__all__ = ["Labels", "named_draws", "safe_names"]

_LEADING = ("chain", "draw")


def named_draws(samples: Any) -> dict[str, Any]:
    """Return arrays by name: site names, or for the pytree of a ``potential_fn`` the path of each leaf."""
    if isinstance(samples, dict) and all(isinstance(value, jax.Array | np.ndarray) for value in samples.values()):
        return dict(samples)
    leaves = jax.tree.leaves_with_path(samples)
    return {("z" + jax.tree_util.keystr(path)).replace("'", ""): leaf for path, leaf in leaves}


class Labels:
    """Names of variables and of the axes of their arrays.

    :param target: the model, if there is one.
    :param observations: the observed sites; masked ones get their own axis.
    :param names: safe names by original name, from :func:`safe_names`.
    :param coords: coordinate values by dimension, from the user.
    :param dims: names of dimensions by variable, from the user.
    """

    def __init__(
        self,
        target: ModelTarget | None,
        observations: Observations,
        names: Mapping[str, str],
        coords: Mapping[str, Any] | None = None,
        dims: Mapping[str, Iterable[str]] | None = None,
    ):
        self.target, self.entries, self.names = target, observations.entries, names
        self.coords = {names.get(name, name): values for name, values in (coords or {}).items()}
        self.dims = {names.get(name, name): list(listed) for name, listed in (dims or {}).items()}

    def dataset(self, group: str, arrays: Mapping[str, Any], of_chains: Mapping[str, np.ndarray]):
        """Return an ``xarray.Dataset`` in which every axis has a name and coordinates.

        :param group: the name of the group, which determines the leading axes.
        :param arrays: arrays by name.
        :param of_chains: further coordinates of the chains, by name.
        :raises ValueError: if names or coordinates from the user do not fit.
        """
        import xarray

        leading = () if group.endswith("_data") else _LEADING
        variables: dict[str, tuple] = {}
        coords: dict[str, Any] = {}
        for name, value in arrays.items():
            # JAX arrays are copied so that users may write to them; NumPy arrays may lie on disk and stay there.
            value = value if isinstance(value, np.ndarray) else np.array(value)
            shape = value.shape[len(leading) :]
            axes = self._axes(name, shape, group)
            for i, size in enumerate(shape):
                axis = axes[i]
                # A plate may have two lengths if new rows are predicted.
                if axis is None or (axis not in self.dims.get(self.names[name], ()) and _differs(coords, axis, size)):
                    axes[i] = axis = f"{self.names[name]}_dim_{i}"
                if _differs(coords, axis, size):
                    raise ValueError(
                        f"Dimension '{axis}' has size {len(coords[axis])}, and would have {size} for '{name}'; give "
                        "the two different names in `dims`."
                    )
                coords.setdefault(axis, self._coordinate(name, axis, size, group))
            coords |= {axis: np.arange(size) for axis, size in zip(leading, value.shape, strict=False)}
            safe = self.names[name]
            variables[safe] = ([*leading, *axes], value, {} if safe == name else {"site": name})
        taken = {*variables, *coords}
        coords |= {name: ("chain", values) for name, values in of_chains.items() if name not in taken}
        return xarray.Dataset(variables, coords)

    def _axes(self, name, shape, group):
        """Return the names of axes, ``None`` for those without."""
        given = self.dims.get(self.names[name])
        if name in self.entries and group != "predictions" and shape[:1] == self.entries[name][1].shape:
            behind = [] if given is None else given[len(self.entries[name][0]) :]
            given = [self._entry(name), *behind]
        if given is not None:
            if len(given) > len(shape) and group != "log_likelihood":
                raise ValueError(
                    f"`dims['{name}']` must have at most {len(shape)} names, one for each dimension; got {given}."
                )
            # Log likelihoods have no event axes.
            return [*given, *[None] * len(shape)][: len(shape)]
        return self._plates(name, shape, group)

    def _plates(self, name, shape, group):
        axes: list[str | None] = [None] * len(shape)
        if self.target is None:
            return axes
        plates = self.target.dims.get(name, {})
        event, event_names = self.target.events.get(name, (None, ()))
        pointwise = group == "log_likelihood"
        depth = max((-dim for dim in plates.values()), default=0)
        if event is None:
            # Deterministic sites do not say where their batch ends.
            splits = range(depth, len(shape) + 1)
        else:
            splits = range(len(shape) - (0 if pointwise else event), len(shape) + 1)[:1]
        sizes = self.target.plate_sizes
        for split in splits:
            if split >= depth and all(
                group == "predictions" or shape[split + dim] == sizes[plate] for plate, dim in plates.items()
            ):
                for plate, dim in plates.items():
                    axes[split + dim] = self.names[plate]
                break
        if event and not pointwise and len(event_names) == event:
            axes[-event:] = event_names
        return axes

    def _entry(self, name):
        return f"{self.names[name]}_entry"

    def _coordinate(self, name, axis, size, group):
        if name in self.entries and axis == self._entry(name):
            return self.entries[name][1]
        values = self.coords.get(axis)
        if values is None or (group.startswith("predictions") and len(values) != size):
            return np.arange(size)
        if len(values) != size:
            raise ValueError(f"coords['{axis}'] must have {size} values, one for each entry; got {len(values)}.")
        return np.asarray(values)


def _differs(coords, axis, size):
    return axis in coords and len(coords[axis]) != size


def safe_names(variables: Iterable[str], plates: Iterable[str]) -> dict[str, str]:
    """Return unique names for ArviZ, in which "." replaces "/", which separates netCDF groups."""
    safe: dict[str, str] = {}
    taken = set(_LEADING)
    # Names that may stay as they are come first.
    for name in sorted(dict.fromkeys([*variables, *plates]), key=lambda name: "/" in name):
        found = name.replace("/", ".")
        while found in taken:
            found += "_"
        if found.rstrip("_") != name.replace("/", ".").rstrip("_") or len(found) != len(name):
            warnings.warn(
                f"'{name}' is called '{found}' here, because '{name.replace('/', '.')}' is taken.", stacklevel=3
            )
        taken.add(found)
        safe[name] = found
    return safe
