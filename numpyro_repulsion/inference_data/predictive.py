"""Prior and posterior predictive draws over all rows, computed here or passed in by the user."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
import warnings

import jax
from jax import random
import jax.numpy as jnp
import numpy as np

from numpyro.util import is_prng_key

from numpyro_repulsion.gradients import ModelTarget, influenced
from numpyro_repulsion.inference_data.chunks import map_draws

__all__ = ["NUM_PRIOR", "by_draw", "from_posterior", "from_prior", "is_key"]

#: Number of draws from the prior.
NUM_PRIOR = 1000


def is_key(name: str, given: Any) -> bool:
    """Return whether the user passed a PRNG key; otherwise it must be draws by name.

    :raises TypeError: for anything else.
    """
    if isinstance(given, Mapping):
        return False
    if not isinstance(given, bool) and hasattr(given, "dtype") and is_prng_key(given):
        return True
    raise TypeError(
        f"`{name}` must be a PRNG key such as random.key(1), or draws by name as numpyro.infer.Predictive returns "
        f"them; got {given!r}."
    )


def from_posterior(target: ModelTarget, key: jax.Array, draws: dict) -> dict[str, jax.Array]:
    """Return one replicate per draw of the observed sites over all rows, and of deterministic sites made from them.

    :param draws: latent sites in their supports, ``(chain, draw, ...)``.
    """
    _require_drawable(target, "posterior_predictive")
    if target.discrete:
        raise ValueError(
            f"The discrete latent sites {target.discrete} are summed over, and replicates need their values. Pass the "
            "draws of numpyro.infer.Predictive(model, samples, infer_discrete=True) as `posterior_predictive`."
        )
    names = [*target.observed, *_statistics(target)]

    def replicate(draw):
        number, values = draw
        sites = target.sites(values, random.fold_in(key, number), observed=False)
        return {name: sites[name]["value"] for name in names}

    shape = next(iter(draws.values())).shape[:2]
    numbered = jnp.arange(int(np.prod(shape))).reshape(shape), draws
    return map_draws(replicate, numbered, shape, "posterior_predictive for", "Leave posterior_predictive=None")


def from_prior(target: ModelTarget, key: jax.Array, deterministic: bool) -> tuple[dict, dict]:
    """Return ``(prior, prior_predictive)`` over all rows, of shape ``(1, draw, ...)``."""
    _require_drawable(target, "prior")
    if target.factors:
        warnings.warn(f"Draws from the prior ignore the factors {target.factors}.", stacklevel=3)
    statistics = _statistics(target)
    names = [*target.latent, *target.discrete, *target.deterministic, *(target.minibatched if deterministic else ())]
    predicted = [*target.observed, *statistics]

    def draw(number):
        sites = target.sites({}, random.fold_in(key, number), observed=False)
        return {name: sites[name]["value"] for name in {*names, *predicted}}

    numbers = jnp.arange(NUM_PRIOR)[None]
    try:
        found = map_draws(draw, numbers, (1, NUM_PRIOR), "Draws from the prior of", "Leave prior=None")
    except NotImplementedError as error:
        reason = str(error) or "a site has no sampler"
        raise ValueError(f"The prior of this model cannot be drawn from: {reason}. Leave prior=None.") from error
    return (
        {name: found[name] for name in names if name not in statistics},
        {name: found[name] for name in predicted},
    )


def by_draw(name: str, given: Mapping, shape: tuple[int, ...], is_sampler: bool = True) -> dict[str, np.ndarray]:
    """Return draws that the user passed in, with the leading axes chain and draw.

    :param shape: ``(chains, draws)``.
    :param is_sampler: whether all draws count, or only the last of each chain.
    """
    found = {}
    for site, value in given.items():
        value = np.asarray(value)
        if value.shape[:2] != shape:
            if value.shape[:1] != (int(np.prod(shape)),):
                raise ValueError(
                    f"`{name}` needs one value of '{site}' for each of the {shape[0]} × {shape[1]} draws, of shape "
                    f"({int(np.prod(shape))}, ...) or ({shape[0]}, {shape[1]}, ...); got {value.shape}."
                )
            value = value.reshape(*shape, *value.shape[1:])
        found[site] = value if is_sampler else value[:, -1:]
    return found


def _require_drawable(target, name):
    """Raise ``ValueError`` for a model whose observed sites cannot be drawn."""
    sites: dict = {}
    jax.eval_shape(lambda: sites.update(target.sites({})) or 0)
    if inside := [site for site in target.observed if sites[site].get("_control_flow_done")]:
        raise ValueError(
            f"The sites {inside} are observed inside a `scan` or `cond`, where observations cannot be removed. Run "
            f"numpyro.infer.Predictive on the model without observations, and pass its draws as `{name}`."
        )


def _statistics(target):
    """Return the deterministic sites that depend on observed values."""
    names = [*target.deterministic, *target.minibatched]
    if not names or not target.observed:
        return []
    values = jax.eval_shape(lambda: {name: target.sites({})[name]["value"] for name in target.observed})

    def deterministic(values):
        sites = target.sites(values)
        return [sites[name]["value"] for name in names]

    return [name for name, yes in zip(names, influenced(deterministic, values), strict=True) if yes]
