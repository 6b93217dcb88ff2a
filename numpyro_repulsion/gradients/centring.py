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
    """A particle in the coordinates of the model, and the location and scale of each of its entries; all ``(d,)``.

    - **z** - the unconstrained position, flat.
    - **centred** - x, the same in centred form: ``s z`` for effects that the model multiplies by s, else z.
    - **location**, **scale** - m and s of x; 0 and 1 for sites that cannot be centred partly.
    - **log_volume** - ``log dx/dz``.
    """

    z: jax.Array
    centred: jax.Array
    location: jax.Array
    scale: jax.Array
    log_volume: jax.Array

    @staticmethod
    def of(z: jax.Array, location: jax.Array, scale: jax.Array, log_volume: jax.Array) -> Recovered:
        """Return the particle z with its centred form."""
        return Recovered(z, z * jnp.exp(log_volume), location, scale, log_volume)


class CentredTarget(Target):
    r"""A posterior in coordinates y in which a site x with location m and scale s is centred by a share c.

    .. math::
        x = m + s^{1-c} (y - c\,m)

    With c = 1 this is the site in centred form, and with c = 0 its standardized, non-centred form. The change of
    variables is that of :class:`numpyro.infer.reparam.LocScaleReparam`, so the posterior of x is the same for any c.
    It also holds for a site z of the model if ``x = s z``, with m = 0: then ``z = s^{-c} y``.

    :param target: the posterior of a model, a ``ModelTarget``.
    :param share: c for each entry of a particle, flat, ``(d,)``; 1 for all sites that cannot be centred partly.
    :param powers: for each product of the model, the power of its scale in s.
    :param unravel: the function from flat particles to those of the sites.

    **References:**

    1. *A General Framework for the Parametrization of Hierarchical Models*, O. Papaspiliopoulos, G. O. Roberts and
       M. Sköld, Statistical Science 22 (2007)
    2. *Automatic Reparameterisation of Probabilistic Programs*, M. I. Gorinova, D. Moore and M. D. Hoffman,
       https://arxiv.org/abs/1906.03028
    """

    def __init__(self, target: Any, share: jax.Array, powers: jax.Array, unravel: Callable):
        self._target, self._share, self._powers, self._unravel = target, share, powers, unravel
        self.plates, self.rows_outside, self.is_random = target.plates, target.rows_outside, target.is_random

    def _shares(self):
        shares = self._unravel(self._share)
        return {name: shares[name] for name in self._target.location_scale}

    def potential_energy(self, z: Particle, indices: Indices, key: jax.Array) -> jax.Array:
        z, volume = self._standardized(z)
        if not self._target.location_scale:
            return self._target.potential_energy(z, indices, key) - volume
        return self._target.centred_energy(z, indices, key, self._shares()) - volume

    def _standardized(self, y):
        """Return a particle with the effects of products as the model has them, and the log volume of the change."""
        shares, volume, z = self._unravel(self._share), jnp.zeros(()), dict(y)
        for name, log_scale in self._target.products.log_scales(y, self._powers).items():
            z[name] = y[name] * jnp.exp(-shares[name] * log_scale)
            volume -= jnp.sum(shares[name] * log_scale)
        return z, volume

    def crossed_plates(self):
        return self._target.crossed_plates()

    def recover(self, y: jax.Array) -> Recovered:
        """Return a flat particle y, ``(d,)``, in the coordinates of the model."""
        z, _ = self._standardized(self._unravel(y))
        priors: dict = {}
        if self._target.location_scale:
            z, priors = self._target.recovered(z, self._shares())
        nothing = jax.tree.map(jnp.zeros_like, z)
        log_scales = self._target.products.log_scales(z, self._powers)
        location = nothing | {name: prior[0] for name, prior in priors.items()}
        scale = jax.tree.map(jnp.exp, nothing | log_scales) | {name: prior[1] for name, prior in priors.items()}
        flat = (ravel_pytree(x)[0].astype(y.dtype) for x in (z, location, scale, nothing | log_scales))
        return Recovered.of(*flat)

    def powers(self, z: jax.Array) -> jax.Array:
        """Return the power of each product that the gradients at particles z, ``(n, d)``, tell; see `Products`."""
        return self._target.products.powers(self._target, jax.vmap(self._unravel)(z)).astype(z.dtype)

    def with_powers(self, powers: jax.Array, found: Recovered) -> Recovered:
        """Return particles, ``(..., d)``, with the scales of products by these powers."""

        def log_scale(z):
            z = self._unravel(z)
            found = jax.tree.map(jnp.zeros_like, z) | self._target.products.log_scales(z, powers)
            return ravel_pytree(found)[0]

        flat = found.z.reshape(-1, found.z.shape[-1])
        volume = jax.vmap(log_scale)(flat).reshape(found.z.shape).astype(found.z.dtype)
        scale = jnp.where(volume == 0, found.scale, jnp.exp(volume))
        return Recovered.of(found.z, found.location, scale, volume)


def to_coordinates(found: Recovered, share: jax.Array) -> jax.Array:
    """Return y for particles recovered in the coordinates of the model, in which entries are centred by ``share``."""
    deviation = found.centred - found.location
    return share * found.location + deviation * found.scale ** (share - 1.0)


def log_volume(found: Recovered, share: jax.Array) -> jax.Array:
    """Return the logarithm of the determinant of dz/dy, which is the difference of U in the two coordinates."""
    return jnp.sum((1.0 - share) * jnp.log(found.scale) - found.log_volume, -1)


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
