"""Location-scale sites in coordinates between their centred and non-centred forms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import jax
from jax import random
from jax.extend.core import Literal
import jax.numpy as jnp

import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.handlers import reparam
from numpyro.infer.reparam import LocScaleReparam
from numpyro.infer.util import constrain_fn, potential_energy

from numpyro_repulsion.gradients.structure import any_number_of_rows
from numpyro_repulsion.gradients.target import Indices, Particle, SitesTarget

__all__ = ["Causes", "candidates", "centred_energy", "depend", "location_scale_sites", "recovered"]

#: Families with a location and a scale, and their other parameters.
FAMILIES: dict[type, tuple[str, ...]] = {
    dist.Normal: (),
    dist.StudentT: ("df",),
    dist.Cauchy: (),
    dist.Laplace: (),
    dist.Logistic: (),
    dist.Gumbel: (),
}


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
        fn = sites[name]["fn"]
        if sites[name]["scale"] is not None:
            continue
        while isinstance(fn, dist.Independent | dist.ExpandedDistribution):
            fn = fn.base_dist
        if type(fn) in FAMILIES and fn.support is constraints.real and isinstance(fn.scale, jax.core.Tracer):
            found.append(name)
    return found if len(latent) > 1 else []


class _Partly(LocScaleReparam):
    """Centre a site by a share, and note the location and scale of its prior."""

    def __init__(self, share, found):
        super().__init__(share)
        self.found = found

    def __call__(self, name, fn, obs):
        if obs is not None:  # a site inside `scan`, which has its value already
            return fn, obs
        base, _, _ = self._unwrap(fn)
        self.shape_params = FAMILIES[type(base)]
        self.found[name] = tuple(jnp.broadcast_to(x, fn.shape()) for x in (base.loc, base.scale))
        return super().__call__(name, fn, obs)


def location_scale_sites(target: SitesTarget, sites: Mapping[str, dict]) -> dict[str, Causes]:
    """Return the latent sites of a model with a location, and a scale that depends on other latent sites.

    :param target: the posterior of the model, without discrete sites.
    :param sites: its sites.
    """
    if target.discrete or not (names := candidates(sites, target.latent)):
        return {}
    centred = {name: jnp.ones(target.prototype[name].shape) for name in names}

    def priors(z):
        return {(name, i): prior[i] for name, prior in recovered(target, z, centred)[1].items() for i in (0, 1)}

    with suppress(AssertionError, KeyError, TypeError, ValueError):  # Such a model keeps its own coordinates.
        causes = depend(priors, target.prototype)
        found = {name: Causes(causes[name, 0], causes[name, 1]) for name, i in causes if i}
        return {name: found[name] for name in sorted(found) if found[name].scale}
    return {}


def centred_energy(target: SitesTarget, y: Particle, indices: Indices, key: jax.Array, shares: Mapping[str, jax.Array]):
    """Return U in coordinates in which some sites are partly centred, by the given share for each of their entries."""
    model = reparam(target.bind(indices, key), config={name: _Partly(share, {}) for name, share in shares.items()})
    with any_number_of_rows():
        return potential_energy(model, target.args, target.kwargs, _renamed(y, shares))


def recovered(target: SitesTarget, y: Particle, shares: Mapping[str, jax.Array]) -> tuple[Particle, dict[str, tuple]]:
    """Return a particle in the coordinates of the model, and the location and scale of each partly centred site."""
    priors: dict = {}
    model = target.bind(target.first_rows, random.key(0))
    model = reparam(model, config={name: _Partly(share, priors) for name, share in shares.items()})
    with any_number_of_rows():
        values = constrain_fn(model, target.args, target.kwargs, _renamed(y, shares), return_deterministic=True)
    return y | {name: values[name] for name in priors}, priors


def _renamed(y, shares):
    """Return values of a particle under the names that they have in the model with partly centred sites."""
    return {f"{name}_decentered" if name in shares else name: value for name, value in y.items()}


def depend(function: Callable, argument: Mapping[str, Any]) -> dict[Any, frozenset[str]]:
    """Return for each result of a function, a dictionary, the entries of its argument that it depends on."""
    shapes: dict = {}

    def flat(leaves):
        shapes.update(function(dict(zip(argument, leaves, strict=True))))
        return list(shapes.values())

    jaxpr = jax.make_jaxpr(flat)(list(argument.values())).jaxpr
    found = {}
    for name, result in zip(shapes, jaxpr.outvars, strict=True):
        needed = set() if isinstance(result, Literal) else {result}
        for equation in reversed(jaxpr.eqns):
            if needed & set(equation.outvars):
                needed |= {x for x in equation.invars if not isinstance(x, Literal)}
        found[name] = frozenset(site for site, x in zip(argument, jaxpr.invars, strict=True) if x in needed)
    return found
