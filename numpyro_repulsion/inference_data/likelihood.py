"""Pointwise log likelihoods over all rows."""

from __future__ import annotations

from collections.abc import Sequence
import math
import warnings

import jax
from jax import random
import numpy as np

from numpyro_repulsion.gradients import ModelTarget, influenced
from numpyro_repulsion.inference_data.chunks import map_draws

__all__ = ["pointwise"]


def pointwise(target: ModelTarget, draws: dict, which: bool | Sequence[str]) -> dict[str, jax.Array]:
    """Return the log likelihood of every entry of the observed sites over all rows, without subsampling or scaling.

    :param target: the model and its data.
    :param draws: latent sites in their supports, ``(chain, draw, ...)``.
    :param which: names of observed sites or factors, or ``True`` for all observed sites.
    :raises ValueError: for unknown names, and for models whose draws do not determine the likelihood.
    """
    names = _names(target, which)
    if not names:
        raise ValueError(
            "There is no log likelihood, because the model observes nothing"
            f"{f' but the factors {target.factors}; name those that are likelihoods' if target.factors else ''}."
        )
    if target.discrete:
        raise ValueError(
            f"The discrete latent sites {target.discrete} are summed over, so the draws do not determine the "
            "likelihood of single observations. Leave log_likelihood=False, or marginalize by hand "
            "(numpyro.distributions.MixtureSameFamily)."
        )
    if outside := [name for name in names if name in target.factors and name in target.rows_outside]:
        raise ValueError(
            f"The factors {outside} use rows of subsampled plates outside of these plates, scaled by hand for "
            "minibatches of `subsample_size` rows: over all rows they are not a log likelihood. Put them into the "
            "plates, or leave them out of log_likelihood."
        )
    if (left := [name for name in target.factors if name not in names]) and which is True:
        warnings.warn(
            f"The factors {left} are left out of log_likelihood. Name those that are likelihoods: "
            f"log_likelihood={[*names, *left]}.",
            stacklevel=3,
        )
    scaled: list[str] = []

    def likelihoods(values, key=None):
        sites = target.sites(values, key)
        scaled[:] = [name for name in names if not _is_one(_scale(target, name, sites[name]["scale"]))]
        return {name: sites[name]["fn"].log_prob(sites[name]["value"]) for name in names}

    # Modules ask for a key too, for initial values that the draws replace.
    first = {name: x[0, 0] for name, x in draws.items()}
    if target.is_random and any(influenced(lambda key: likelihoods(first, key), random.key(0))):
        raise ValueError(
            "The likelihood is random (numpyro.prng_key): the log likelihood of a draw is only an estimate, and "
            "importance weights from estimates are wrong. Leave log_likelihood=False."
        )
    shape = next(iter(draws.values())).shape[:2]
    found = map_draws(likelihoods, draws, shape, "The log likelihood of", "Pass log_likelihood=False or fewer names")
    if scaled:
        warnings.warn(
            f"A handler weights the sites {scaled} in the posterior but not in "
            "log_likelihood, so leave-one-out estimates from it are for another posterior.",
            stacklevel=3,
        )
    return found


def _names(target, which):
    if isinstance(which, bool):
        return list(target.observed)
    if isinstance(which, str) or not all(isinstance(name, str) for name in which):
        raise TypeError(f"`log_likelihood` must be True, False or a list of names of observed sites; got {which!r}.")
    if unknown := [name for name in which if name not in (*target.observed, *target.factors)]:
        raise ValueError(
            f"`log_likelihood` names {unknown}, which the model does not observe. It observes {target.observed}"
            f"{f', and has the factors {target.factors}' if target.factors else ''}."
        )
    return list(which)


def _scale(target, name, scale):
    """Return the scale of a site without the factor that compensates for rows left out of a minibatch."""
    if scale is None or isinstance(scale, jax.core.Tracer):
        return scale
    sizes = [target.plates[plate] for plate in target.rows_outside.get(name, ())]
    return np.asarray(scale) / math.prod(size / batch for size, batch in sizes)


def _is_one(scale):
    # Traced scales count as weights.
    return scale is None or (not isinstance(scale, jax.core.Tracer) and bool(np.allclose(scale, 1)))
