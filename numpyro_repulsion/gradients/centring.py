"""Partial centring: hierarchical sites in coordinates between their centred and non-centred forms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import jax
from jax import random
from jax.extend.core import Literal
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp

import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.handlers import reparam
from numpyro.infer.reparam import LocScaleReparam
from numpyro.infer.util import constrain_fn, potential_energy

from numpyro_repulsion.gradients.structure import any_number_of_rows
from numpyro_repulsion.gradients.target import Indices, Particle, Target

__all__ = [
    "CentredTarget",
    "Recovered",
    "candidates",
    "centred_energy",
    "depend",
    "location_scale_sites",
    "log_volume",
    "recovered",
    "to_coordinates",
]

#: Families with a location and a scale, and their other parameters.
FAMILIES: dict[type, tuple[str, ...]] = {
    dist.Normal: (),
    dist.StudentT: ("df",),
    dist.Cauchy: (),
    dist.Laplace: (),
    dist.Logistic: (),
    dist.Gumbel: (),
}


class Recovered(NamedTuple):
    """A particle in the coordinates of the model, and the location and scale of each of its entries.

    - **z** - the unconstrained position, flat, ``(d,)``.
    - **location**, **scale** - those of the prior; 0 and 1 for sites that cannot be centred partly, ``(d,)``.
    """

    z: jax.Array
    location: jax.Array
    scale: jax.Array


class CentredTarget(Target):
    r"""A posterior in coordinates y in which a site x with location m and scale s is centred by a share c.

    .. math::
        x = m + s^{1-c} (y - c\,m)

    With c = 1 this is the site as the model has it, and with c = 0 its standardized, non-centred form. The change of
    variables is that of :class:`numpyro.infer.reparam.LocScaleReparam`, so the posterior of x is the same for any c.

    :param target: the posterior of a model, a ``ModelTarget``.
    :param share: c for each entry of a particle, flat, ``(d,)``; 1 for all sites that cannot be centred partly.
    :param unravel: the function from flat particles to those of the sites.

    **References:**

    1. *A General Framework for the Parametrization of Hierarchical Models*, O. Papaspiliopoulos, G. O. Roberts and
       M. Sköld, Statistical Science 22 (2007)
    2. *Automatic Reparameterisation of Probabilistic Programs*, M. I. Gorinova, D. Moore and M. D. Hoffman,
       https://arxiv.org/abs/1906.03028
    """

    def __init__(self, target: Any, share: jax.Array, unravel: Callable):
        self._target, self._share, self._unravel = target, share, unravel
        self.plates, self.rows_outside, self.is_random = target.plates, target.rows_outside, target.is_random

    def _shares(self):
        shares = self._unravel(self._share)
        return {name: shares[name] for name in self._target.location_scale}

    def potential_energy(self, z: Particle, indices: Indices, key: jax.Array) -> jax.Array:
        return self._target.centred_energy(z, indices, key, self._shares())

    def crossed_plates(self):
        return self._target.crossed_plates()

    def recover(self, y: jax.Array) -> Recovered:
        """Return a flat particle y, ``(d,)``, in the coordinates of the model."""
        z, priors = self._target.recovered(self._unravel(y), self._shares())
        other = {name: (jnp.zeros_like(value), jnp.ones_like(value)) for name, value in z.items()} | priors
        flat = (z, *({name: pair[i] for name, pair in other.items()} for i in (0, 1)))
        return Recovered(*(ravel_pytree(x)[0].astype(y.dtype) for x in flat))


def to_coordinates(found: Recovered, share: jax.Array) -> jax.Array:
    """Return y for particles recovered in the coordinates of the model, in which entries are centred by ``share``."""
    deviation = found.z - found.location
    return share * found.location + deviation * found.scale ** (share - 1.0)


def log_volume(found: Recovered, share: jax.Array) -> jax.Array:
    """Return the logarithm of the determinant of dz/dy, which is the difference of U in the two coordinates."""
    return jnp.sum((1.0 - share) * jnp.log(found.scale), -1)


def candidates(sites: Mapping[str, dict], latent: list[str]) -> list[str]:
    """Return the latent sites with a location and a scale, of which the scale may depend on others.

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


def location_scale_sites(target: Any, sites: Mapping[str, dict]) -> list[str]:
    """Return the latent sites of a model with a location, and a scale that depends on other latent sites.

    :param target: the posterior of the model, without discrete sites.
    :param sites: its sites.
    """
    if target.discrete or not (names := candidates(sites, target.latent)):
        return []
    centred = {name: jnp.ones(target.prototype[name].shape) for name in names}

    def scales(z):
        return {name: scale for name, (_, scale) in recovered(target, z, centred)[1].items()}

    with suppress(AssertionError, KeyError, TypeError, ValueError):  # Such a model keeps its own coordinates.
        return sorted(depend(scales, target.prototype))
    return []


def centred_energy(target: Any, y: Particle, indices: Indices, key: jax.Array, shares: Mapping[str, jax.Array]):
    """Return U in coordinates in which some sites are partly centred, by the given share for each of their entries."""
    model = reparam(target.bind(indices, key), config={name: _Partly(share, {}) for name, share in shares.items()})
    with any_number_of_rows():
        return potential_energy(model, target.args, target.kwargs, _renamed(y, shares))


def recovered(target: Any, y: Particle, shares: Mapping[str, jax.Array]) -> tuple[Particle, dict[str, tuple]]:
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


def depend(function: Callable, argument: Mapping[str, jax.Array]) -> set[str]:
    """Return the names of the results of a function, a dictionary, that depend on its argument."""
    shapes: dict = {}

    def flat(argument):
        shapes.update(function(argument))
        return list(shapes.values())

    jaxpr = jax.make_jaxpr(flat)(argument).jaxpr
    found = set()
    for name, result in zip(shapes, jaxpr.outvars, strict=True):
        needed = set() if isinstance(result, Literal) else {result}
        for equation in reversed(jaxpr.eqns):
            if needed & set(equation.outvars):
                needed |= {x for x in equation.invars if not isinstance(x, Literal)}
        if needed & set(jaxpr.invars):
            found.add(name)
    return found
