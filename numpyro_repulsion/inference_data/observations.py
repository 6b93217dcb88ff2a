"""Observed values over all rows, and which of their entries count."""

from __future__ import annotations

from typing import NamedTuple
import warnings

import jax
import jax.numpy as jnp
import numpy as np

from numpyro.distributions import ExpandedDistribution, Independent, MaskedDistribution

from numpyro_repulsion.gradients import ModelTarget, compiled, influenced

__all__ = ["Observations", "observe"]


class Observations(NamedTuple):
    """The observed sites of a model, over all rows.

    - **values** - whole arrays by name.
    - **entries** - for sites that a mask hides in part: the shape of the site's batch, and the positions in the
      flattened batch that the mask does not hide.
    - **failure** - why there are no values, if the model cannot run over all rows.
    """

    values: dict[str, np.ndarray]
    entries: dict[str, tuple[tuple[int, ...], np.ndarray]]
    failure: str = ""

    def counting(self, group: dict, lead: int) -> dict:
        """Return a group without hidden entries, the others on one flat axis after ``lead`` leading ones."""
        return {name: self._counting(name, value, lead) for name, value in group.items()}

    def _counting(self, name, value, lead):
        if name not in self.entries:
            return value
        shape, entries = self.entries[name]
        value = np.asarray(value)
        # Event axes follow the batch axes; log likelihoods have none.
        event = np.shape(self.values[name])[len(shape) :] if value.ndim > lead + len(shape) else ()
        if value.shape[lead:] != (*shape, *event):
            return value
        return value.reshape(*value.shape[:lead], -1, *event)[(slice(None),) * lead + (entries,)]


def observe(target: ModelTarget | None) -> Observations:
    """Run the model over all rows and returns what it observes; warns of observed sites that are not data."""
    if target is None or not target.observed:
        return Observations({}, {})
    try:
        values, masks = compiled(lambda target: _observed(target.sites({}), target.observed), target)()
        moved = _moved(target)
    except (TypeError, ValueError) as error:
        if not target.plates:
            raise
        failure = f"the model fails when it is given all rows of {sorted(target.plates)} "
        return Observations({}, {}, f"{failure}({type(error).__name__}: {str(error).splitlines()[0]}).")
    if transformed := [name for name in values if name in moved[0]]:
        warnings.warn(
            f"The values of the observed sites {transformed} depend on latent sites, so they are not data and are left "
            "out of observed_data.",
            stacklevel=3,
        )
    entries = {}
    for name, mask in masks.items():
        # A mask that depends on latent sites is part of the model and hides other entries for each draw.
        if name not in moved[1] and not np.all(mask):
            entries[name] = (np.shape(mask), np.flatnonzero(mask))
    kept = {name: np.asarray(value) for name, value in values.items() if name not in moved[0]}
    return Observations(kept, {name: entry for name, entry in entries.items() if name in kept})


def _observed(sites, names):
    """Return the values of observed sites, and the masks of those that have one."""
    values = {name: sites[name]["value"] for name in names}
    masks = {}
    for name in names:
        fn, value = sites[name]["fn"], jnp.asarray(values[name])
        mask = _mask(fn)
        if mask is not True:
            split = value.ndim - fn.event_dim
            batch = jnp.broadcast_shapes(fn.batch_shape, value.shape[:split])
            masks[name] = jnp.broadcast_to(jnp.asarray(mask), batch)
            values[name] = jnp.broadcast_to(value, (*batch, *value.shape[split:]))
    return values, masks


def _mask(fn):
    """Return which entries of a distribution's batch have a density, ``True`` if all have."""
    if isinstance(fn, MaskedDistribution):
        inner = _mask(fn.base_dist)
        return fn._mask if inner is True else jnp.logical_and(fn._mask, inner)
    if isinstance(fn, ExpandedDistribution):
        inner = _mask(fn.base_dist)
        return inner if inner is True else jnp.broadcast_to(inner, fn.batch_shape)
    if isinstance(fn, Independent):
        inner = _mask(fn.base_dist)
        if inner is True:
            return True
        # An event that is hidden in part counts with the rest.
        axes = tuple(range(-fn.reinterpreted_batch_ndims, 0))
        return jnp.broadcast_to(inner, fn.base_dist.batch_shape).any(axes)
    return True


def _moved(target):
    """Return the observed sites whose values, and those whose masks, depend on latent sites."""
    latent = jax.eval_shape(lambda: {name: target.sites({})[name]["value"] for name in target.latent})
    names: list[list[str]] = []

    def parts(latent):
        values, masks = _observed(target.sites(latent), target.observed)
        names[:] = [list(values), list(masks)]
        return [*values.values(), *masks.values()]

    depends = iter(influenced(parts, latent))
    return [{name for name in group if next(depends)} for group in names]
