"""Partial centering: hierarchical sites in coordinates between their centered and non-centered forms."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer

from numpyro_repulsion.gradients.arrow import Units
from numpyro_repulsion.gradients.posterior import ModelTarget, likelihood_gradients
from numpyro_repulsion.gradients.target import Indices, Particle, Target, Wrapped
from numpyro_repulsion.rounding import AnyArray


class Centering(NamedTuple):
    """How the entries of a particle are centered.

    - **share** - c for each entry, ``(d,)``; 1 for all that cannot be centered partly.
    - **powers** - for each product of an effect and a scale in the model, the power of the scale, ``(p,)``; 0 before it
      is known.
    - **bases** - for each group of effects, the entry that their mean is added to, ``(g,)``; -1 for none.
    """

    share: Float[AnyArray, " d"]
    powers: Float[AnyArray, " _"]
    bases: Integer[AnyArray, ...]

    @staticmethod
    def none(target: Target, dimension: int, dtype: jnp.dtype) -> Centering:
        """Return that of a model's own coordinates."""
        bases = jnp.full(target.num_groups, -1, jnp.int32)
        return Centering(jnp.ones(dimension, dtype), jnp.zeros(target.num_products, dtype), bases)

    def undone(self) -> Centering:
        """Return that of the model's own coordinates."""
        return Centering(jnp.ones_like(self.share), jnp.zeros_like(self.powers), jnp.full_like(self.bases, -1))


class Recovered(NamedTuple):
    """Particles in the coordinates of the model, and the location and scale of each of its entries; all ``(..., d)``.

    - **z** - the unconstrained position, flat.
    - **location**, **scale** - m and s of x; 0 and 1 for sites that cannot be centered partly.
    - **log_scale** - ``log dx/dz``, of each entry.
    """

    z: Float[AnyArray, "*particles d"]
    location: Float[AnyArray, "*particles d"]
    scale: Float[AnyArray, "*particles d"]
    log_scale: Float[AnyArray, "*particles d"]

    @property
    def centered(self) -> Float[AnyArray, "*particles d"]:
        """x, z in centered form: ``s z`` for effects that the model multiplies by s, else z."""
        return self.z * jnp.exp(self.log_scale)


class CenteredTarget(Wrapped):
    r"""A posterior in coordinates y in which a site x with location m and scale s is centered by a share c.

    .. math::
        x = m + s^{1-c} (y - c\,m)

    With c = 1 this is the site in centered form, and with c = 0 its standardized, non-centered form. The change of
    variables is that of :class:`numpyro.infer.reparam.LocScaleReparam`, so the posterior of x is the same for any c.
    It also holds for a site z of the model if ``x = s z``, with m = 0: then ``z = s^{-c} y``. The mean of effects that
    are added to another coefficient has coordinates of its own; see `Translations`.

    :param centering: how the entries of a particle are centered.
    :param unravel: the function from flat particles to those of the sites.

    **References:**

    1. *A General Framework for the Parametrization of Hierarchical Models*, O. Papaspiliopoulos, G. O. Roberts and
       M. Sköld, Statistical Science 22 (2007)
    2. *Automatic Reparameterisation of Probabilistic Programs*, M. I. Gorinova, D. Moore and M. D. Hoffman,
       https://arxiv.org/abs/1906.03028
    """

    _target: ModelTarget

    def __init__(self, target: ModelTarget, centering: Centering, unravel: Callable):
        super().__init__(target)
        self._centering, self._unravel = centering, unravel

    def _shares(self):
        shares = self._unravel(self._centering.share)
        return {name: shares[name] for name in self._target.location_scale}

    def potential_energy(self, z: Particle, indices: Indices, key: jax.Array) -> Float[Array, ""]:
        z, volume = self._standardized(z)
        if not self._target.location_scale:
            return self._target.potential_energy(z, indices, key) - volume
        return self._target.centered_energy(z, indices, key, self._shares()) - volume

    def _standardized(self, y):
        """Return a particle with the effects of products as the model has them, and the log volume of the change."""
        products = self._target.products.log_scales(y, self._centering.powers)
        y, volume = self._translated(y, products)
        shares, z = self._unravel(self._centering.share), dict(y)
        for name, log_scale in products.items():
            z[name] = y[name] * jnp.exp(-shares[name] * log_scale)
            volume -= jnp.sum(shares[name] * log_scale)
        return z, volume

    def _translated(self, y, products):
        """Return a particle with the means of its groups as the bases of the model need them, and the log volume."""
        # Site by site, because flat particles are slow to compile.
        volume = jnp.zeros(())
        if not self._target.num_groups:
            return y, volume
        translations, bases, y = self._target.translations, self._centering.bases, dict(y)
        priors, shares, shifts = self._priors(y, products), self._unravel(self._centering.share), []
        for name, base in zip(translations.groups, bases, strict=True):
            location, log_scale = priors[name]
            log_weights = (1.0 - shares[name]) * log_scale
            weights, log_mean_scale = jnp.exp(log_weights), jnp.mean(log_scale)
            total = jnp.sum(weights)
            mean = jnp.sum(weights * (y[name] - shares[name] * location)) / total
            mean = jnp.where(base >= 0, mean, 0.0)
            shift = jnp.exp(log_mean_scale) * mean
            y[name] = y[name] - mean + shift / weights
            volume += jnp.where(base >= 0, log_mean_scale - jnp.log(total / weights.size), 0.0)
            shifts.append(shift)
        for name, place in translations.places.items():
            for shift, base in zip(shifts, bases, strict=True):
                y[name] = y[name] - jnp.where(place == base, shift, 0.0)
        return y, volume

    def _priors(self, y, products):
        """Return the location and log scale of each site that can be centered partly, at a particle y."""
        priors = {name: (jnp.zeros_like(log_scale), log_scale) for name, log_scale in products.items()}
        if self._target.location_scale:
            own = self._target.recovered(y, self._shares())[1]
            priors |= {name: (location, jnp.log(scale)) for name, (location, scale) in own.items()}
        return priors

    @property
    def base(self):
        if not self._target.num_products:
            return self._target
        # Of effects that the model multiplies by their scale, rows know the products.
        share, powers, bases = self._centering
        centered = Centering(jnp.ones_like(share), powers, jnp.full_like(bases, -1))
        return CenteredTarget(self._target, centered, self._unravel)

    def to_base(self, y):
        found = self.recover(y)
        volume = self.log_volume(found)
        if not self._target.num_products:
            return found.z, volume
        return found.centered, volume + jnp.sum(found.log_scale)

    def prior_energy(self, z):
        z, volume = self._standardized(z)
        return self._target.prior_energy(z) - volume

    def recover(self, y: Float[Array, " d"]) -> Recovered:
        """Return a flat particle y, ``(d,)``, in the coordinates of the model."""
        z, _ = self._standardized(self._unravel(y))
        products = self._target.products.log_scales(z, self._centering.powers)
        priors, nothing = self._priors(z, products), jax.tree.map(jnp.zeros_like, z)
        if self._target.location_scale:
            z = self._target.recovered(z, self._shares())[0]

        def flat(values):
            return ravel_pytree(nothing | values)[0].astype(y.dtype)

        location, log_scale = (flat({name: prior[i] for name, prior in priors.items()}) for i in (0, 1))
        return Recovered(flat(z), location, jnp.exp(log_scale), flat(products))

    def to_coordinates(self, found: Recovered) -> Float[Array, "*particles d"]:
        """Return y for particles ``(..., d)`` recovered in the coordinates of the model."""
        share, _, bases = self._centering
        deviation = found.centered - found.location
        if self._target.num_groups:
            translations = self._target.translations
            mean = jnp.where(bases >= 0, translations.means(deviation), 0.0)
            deviation = deviation - translations.to_entries(mean)
        y = share * found.location + deviation * found.scale ** (share - 1.0)
        if self._target.num_groups:
            y = y + translations.to_entries(mean / jnp.exp(translations.means(jnp.log(found.scale))))
            y = y.at[..., bases].add(mean)
        return y

    def log_volume(self, found: Recovered) -> Float[Array, "*particles"]:
        """Return the logarithm of the determinant of dz/dy, which is the difference of U in the two coordinates."""
        share, _, bases = self._centering
        log_weights = (1.0 - share) * jnp.log(found.scale)
        volume = jnp.sum(log_weights - found.log_scale, -1)
        if self._target.num_groups:
            translations = self._target.translations
            means = translations.means(jnp.log(found.scale)) - jnp.log(translations.means(jnp.exp(log_weights)))
            volume = volume + jnp.sum(jnp.where(bases >= 0, means, 0.0), -1)
        return volume

    def structure_at(
        self, found: Recovered, smallest_sd: float, units: Units | None = None
    ) -> tuple[Centering, Recovered]:
        """Return the centering with powers and bases estimated from gradients, and the particles with these powers.

        What is known stays.

        :param found: particles in the coordinates of the model, ``(n, d)``.
        :param smallest_sd: the smallest standard deviation of log s for which the mean of a group gets its own base.
        :param units: those of an arrow, which get none: their mean depends on all of them, so that the Hessian would
            not be an arrow.
        """
        target, centering = self._target, self._centering
        if not (target.num_products or target.num_groups):
            return centering, found
        without = [target.products.sites] * bool(target.num_products) + [set(target.latent)] * bool(target.num_groups)
        slopes = likelihood_gradients(target, jax.vmap(self._unravel)(found.z), without)
        if target.num_products:
            powers = target.products.powers(jax.vmap(self._unravel)(found.z), slopes[0]).astype(found.z.dtype)
            centering = centering._replace(powers=jnp.where(centering.powers == 0, powers, centering.powers))
            found = self._with_powers(centering.powers, found)
        if target.num_groups:
            slope = jax.vmap(lambda x: ravel_pytree(x)[0])(slopes[-1]) / jnp.exp(found.log_scale)
            bases = target.translations.bases(slope, found.scale, smallest_sd)
            starts = [start for start, *_ in units.sites] if units is not None else []
            bases = jnp.where(target.translations.members[:, starts].any(-1), -1, bases)
            centering = centering._replace(bases=jnp.where(centering.bases < 0, bases, centering.bases))
        return centering, found

    def _with_powers(self, powers, found):
        """Return particles, ``(n, d)``, with the scales of products by these powers."""

        def log_scale(z):
            z = self._unravel(z)
            found = jax.tree.map(jnp.zeros_like, z) | self._target.products.log_scales(z, powers)
            return ravel_pytree(found)[0]

        volume = jax.vmap(log_scale)(found.z).astype(found.z.dtype)
        scale = jnp.where(volume == 0, found.scale, jnp.exp(volume))
        return Recovered(found.z, found.location, scale, volume)
