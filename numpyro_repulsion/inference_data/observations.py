"""Observed values over all rows, and which of their entries count."""

from __future__ import annotations

from typing import NamedTuple
import warnings

import jax
import jax.numpy as jnp
import numpy as np

from numpyro.distributions import Distribution, ExpandedDistribution, Independent, MaskedDistribution

from numpyro_repulsion.gradients import ModelTarget, compiled, influenced

__all__ = ["Observations", "observe", "visible"]


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
        fn = sites[name]["fn"]
        if (seen := visible(fn, values[name])) is not None:
            events = jnp.shape(values[name])[jnp.ndim(values[name]) - fn.event_dim :]
            masks[name], values[name] = seen, jnp.broadcast_to(values[name], (*seen.shape, *events))
    return values, masks


def visible(fn: Distribution, value: jax.Array | np.ndarray, in_events: bool = False) -> jax.Array | None:
    """Return which entries of an observed site's batch are not hidden by a mask; ``None`` without a mask.

    :param in_events: whether to tell the numbers of an event apart. Otherwise one that is hidden in part counts whole.
    """
    if (mask := _mask(fn)) is None:
        return None
    split, own = jnp.ndim(value) - fn.event_dim, len(fn.batch_shape)
    batch, events = jnp.broadcast_shapes(fn.batch_shape, jnp.shape(value)[:split]), jnp.shape(value)[split:]
    if not in_events:
        return jnp.broadcast_to(mask.any(tuple(range(own, mask.ndim))), batch)
    return jnp.broadcast_to(jnp.expand_dims(mask, range(mask.ndim, own + len(events))), (*batch, *events))


def _mask(fn):
    """Return which entries of a distribution have a density: of its batch, and of the event axes that masks tell apart;
    ``None`` if all have."""
    if not isinstance(fn, MaskedDistribution | ExpandedDistribution | Independent):
        return None
    inner, own = _mask(fn.base_dist), len(fn.base_dist.batch_shape)
    if isinstance(fn, MaskedDistribution):
        mask = jnp.broadcast_to(jnp.asarray(fn._mask), fn.batch_shape)
        return mask if inner is None else jnp.expand_dims(mask, range(own, inner.ndim)) & inner
    if isinstance(fn, ExpandedDistribution) and inner is not None:
        return jnp.broadcast_to(inner, (*fn.batch_shape, *inner.shape[own:]))
    return inner


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
