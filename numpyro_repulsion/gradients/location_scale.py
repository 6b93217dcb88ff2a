"""Location-scale sites in coordinates between their centred and non-centred forms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NamedTuple

import jax
from jax import random
import jax.numpy as jnp

import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.handlers import substitute
from numpyro.infer.util import constrain_fn, potential_energy
from numpyro.ops.provenance import eval_provenance

from numpyro_repulsion.gradients.structure import any_number_of_rows
from numpyro_repulsion.gradients.target import Indices, Particle, SitesTarget

__all__ = ["Causes", "candidates", "centred_energy", "location_scale_sites", "recovered"]

#: Families with a location and a scale.
FAMILIES = (dist.Normal, dist.StudentT, dist.Cauchy, dist.Laplace, dist.Logistic, dist.Gumbel)


class Causes(NamedTuple):
    """The latent sites that the location and the scale of a site's prior depend on."""

    location: frozenset[str]
    scale: frozenset[str]


def candidates(sites: Mapping[str, dict], latent: list[str]) -> list[str]:
    """Return the latent location-scale sites whose scale may depend on other sites.

    A site with a weight, by ``numpyro.handlers.scale``, is left out: the volume of its coordinates has none.
    """
    found = []
    for name in latent:
        if sites[name]["scale"] is not None:
            continue
        fn = _base(sites[name]["fn"])
        if type(fn) in FAMILIES and fn.support is constraints.real and isinstance(fn.scale, jax.core.Tracer):
            found.append(name)
    return found if len(latent) > 1 else []


class _Partly:
    """Give sites the values that belong to coordinates in which they are partly centred.

    A site is met with the name and the prior that it has outside of all handlers, so these do not matter.

    - **found** - by site, its value, and the location and scale of its prior.
    """

    def __init__(self, y: Particle, shares: Mapping[str, jax.Array]):
        self.y, self.shares = y, shares
        self.found: dict[str, tuple[jax.Array, ...]] = {}

    def __call__(self, site=None):
        name, fn = site["name"], site["fn"]
        if name not in self.shares or site["type"] != "sample":
            return None
        shape, base = fn.shape(site["kwargs"]["sample_shape"]), _base(fn)
        if shape != self.y[name].shape:
            return None  # A site inside `scan` is shown for one step.
        location, scale = (jnp.broadcast_to(x, shape) for x in (base.loc, base.scale))
        share = self.shares[name]
        value = location + scale ** (1.0 - share) * (self.y[name] - share * location)
        self.found[name] = value, location, scale
        return value

    def apply(self, function: Callable, target: SitesTarget, indices: Indices, key: jax.Array, **settings):
        """Return a function of the model with these values, and of the values of the other sites."""
        model, others = substitute(target.bind(indices, key), substitute_fn=self), dict(self.y)
        for name in self.shares:
            del others[name]
        with any_number_of_rows():
            return function(model, target.args, target.kwargs, others, **settings)


def _base(fn):
    while isinstance(fn, dist.Independent | dist.ExpandedDistribution):
        fn = fn.base_dist
    return fn


def location_scale_sites(target: SitesTarget, sites: Mapping[str, dict]) -> dict[str, Causes]:
    """Return the latent sites of a model with a location, and a scale that depends on other latent sites.

    :param target: the posterior of the model, without discrete sites.
    :param sites: its sites.
    """
    if target.discrete or not (names := candidates(sites, target.latent)):
        return {}
    centred = {name: jnp.ones(target.prototype[name].shape) for name in names}

    def priors(**z):
        return recovered(target, {name[1:]: x for name, x in z.items()}, centred)[1]

    with suppress(AssertionError, KeyError, TypeError, ValueError):  # Such a model keeps its own coordinates.
        # A site may have the name of a parameter of `eval_provenance`.
        causes = eval_provenance(priors, **{f"_{name}": x for name, x in target.prototype.items()})
        found = {name: Causes(*(frozenset(x[1:] for x in own) for own in both)) for name, both in causes.items()}
        return {name: found[name] for name in sorted(found) if found[name].scale}
    return {}


def centred_energy(target: SitesTarget, y: Particle, indices: Indices, key: jax.Array, shares: Mapping[str, jax.Array]):
    """Return U in coordinates in which some sites are partly centred, by the given share for each of their entries."""
    partly = _Partly(y, shares)
    energy = partly.apply(potential_energy, target, indices, key)
    return energy - sum(jnp.sum((1.0 - shares[k]) * jnp.log(scale)) for k, (_, _, scale) in partly.found.items())


def recovered(target: SitesTarget, y: Particle, shares: Mapping[str, jax.Array]) -> tuple[Particle, dict[str, tuple]]:
    """Return a particle in the coordinates of the model, and the location and scale of each partly centred site."""
    partly = _Partly(y, shares)
    # NumPyro ends a run of the model there that sees all sites.
    partly.apply(constrain_fn, target, target.first_rows, random.key(0))
    found = partly.found.items()
    return y | {name: value for name, (value, *_) in found}, {name: tuple(prior) for name, (_, *prior) in found}
