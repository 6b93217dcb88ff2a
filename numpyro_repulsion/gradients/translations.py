"""Translations: groups of effects whose mean the data cannot separate from another coefficient."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
import math

import jax
import jax.numpy as jnp
import numpy as np

from numpyro.distributions import constraints

from numpyro_repulsion.gradients.products import base_support
from numpyro_repulsion.gradients.target import SitesTarget
from numpyro_repulsion.rounding import matmul

__all__ = ["Translations"]

#: The largest part of a gradient that may differ, to allow for rounding.
MAX_RESIDUAL = 0.01


class Translations:
    r"""Groups of effects that a model adds to another coefficient, their base, such as random effects and an intercept.

    If the likelihood depends on the base a and on the effects x of a group through ``a + x_j`` alone, then
    ``∂L/∂a = Σ_j ∂L/∂x_j``, so the base of each group can be found from gradients at some particles. The data then say
    nothing about the mean of x, which varies as much as the scale s of the effects allows. So the mean is left
    non-centred, and ``a + mean(x)``, which the data do determine, takes the place of a:

    .. math::
        x_j = s_j^{1-c_j} (y_j - \bar y) + \bar s\, \bar y, \qquad a = y_a - \bar s\, \bar y,

    with weights ``s_j^{1-c_j}`` in the mean ȳ, the geometric mean s̄ of the scales, and the share c by which each effect
    is centred. This is a change of variables for any a, so the posterior never depends on it.

    :param target: the posterior of the model.
    :param sites: its sites.
    :param pairs: its products of effects and scales, by name.

    - **groups** - the names of the sites of effects, which have one axis.
    - **members** - which entries of a flat particle belong to each group, ``(g, d)``; 1 or 0.
    - **sizes** - the number of effects in each group, ``(g,)``.
    - **places** - for each site that can be a base, the places of its entries in a flat particle.

    **References:**

    1. *Efficient Parametrisations for Normal Linear Mixed Models*, A. E. Gelfand, S. K. Sahu and B. P. Carlin,
       Biometrika 82 (1995)
    """

    def __init__(self, target: SitesTarget, sites: Mapping[str, dict], pairs: list[tuple[str, str]]):
        shapes = {name: site.shape for name, site in target.prototype.items()}
        scales = {name: causes.scale for name, causes in target.location_scale.items() if not causes.location}
        for effect, scale in pairs:
            scales[effect] = scales.get(effect, frozenset()) | {scale}
        # A scale must not depend on effects that move with their mean, nor on the base.
        taken = frozenset().union(*scales.values())
        groups = sorted(name for name in scales.keys() - taken if len(shapes[name]) == 1 and shapes[name][0] > 1)
        taken |= frozenset(target.location_scale)
        bases = {name for name in target.latent if name not in taken and _is_real(sites[name])}
        self.groups = groups if bases - set(groups) else []

        def flat(values):
            parts = [np.broadcast_to(values.get(name, 0.0), shapes[name]).ravel() for name in sorted(shapes)]
            return np.concatenate(parts)

        self.members = np.stack([flat({name: 1.0}) for name in groups]) if self.groups else np.zeros((0, 0))
        self.sizes = self.members.sum(1)
        ends = np.cumsum([math.prod(shapes[name]) for name in sorted(shapes)])
        starts = dict(zip(sorted(shapes), [0, *ends[:-1]], strict=True))
        self.places = {
            name: starts[name] + np.arange(math.prod(shapes[name]), dtype=np.int32).reshape(shapes[name])
            for name in sorted(bases)
        }
        self._variance = flat({name: _variance(sites[name]["fn"]) for name in bases}) if self.groups else np.zeros(0)

    def bases(self, gradient: jax.Array, scale: jax.Array, min_spread: float) -> jax.Array:
        """Return the entry that is the base of each group, ``(g,)``; -1 for a group without one.

        Where the scale is known well, the coordinates of the model do as well. An entry with a prior narrower than that
        of the mean of the effects would not let this mean vary.

        :param gradient: ∇U without priors at some particles, with respect to their centred form, ``(n, d)``.
        :param scale: the scale of each entry there; 1 for what is no effect.
        :param min_spread: the smallest standard deviation of log s for which a group gets a base.
        """
        total, log_scale = self.sums(gradient), self.means(jnp.log(scale))
        residual = jnp.sum((gradient[:, None] - total[:, :, None]) ** 2, 0)
        size = jnp.sum(total**2, 0)[:, None]
        variance = (jnp.mean(jnp.exp(2.0 * log_scale), 0) / self.sizes)[:, None]
        can_be = (scale == 1.0).all(0) & (jnp.asarray(self._variance, scale.dtype) > variance) & (size > 0)
        error = jnp.where(can_be, residual / jnp.where(size > 0, size, 1.0), jnp.inf)
        found = (jnp.min(error, 1) < MAX_RESIDUAL**2) & (jnp.std(log_scale, 0) > min_spread)
        return jnp.where(found, jnp.argmin(error, 1), -1).astype(jnp.int32)

    def sums(self, x: jax.Array) -> jax.Array:
        """Return the sum of x, ``(..., d)``, over each group, ``(..., g)``."""
        return matmul(x, jnp.asarray(self.members, x.dtype).T)

    def means(self, x: jax.Array) -> jax.Array:
        """Return the mean of x over each group."""
        return self.sums(x) / self.sizes.astype(x.dtype)

    def spread(self, x: jax.Array) -> jax.Array:
        """Return the value x of each group, ``(..., g)``, at each of its entries, ``(..., d)``; 0 elsewhere."""
        return matmul(x, jnp.asarray(self.members, x.dtype))


def _is_real(site):
    return base_support(site["fn"].support) is constraints.real


def _variance(fn):
    """Return the variance of a prior; infinite where it is unknown."""
    if not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(fn)):
        with suppress(AttributeError, NotImplementedError, TypeError):
            return np.nan_to_num(np.asarray(fn.variance), nan=np.inf, posinf=np.inf)
    return np.inf
