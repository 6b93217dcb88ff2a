"""The learner that prolongs the arrival, if gradients stay as noisy as they were far from the posterior."""

from __future__ import annotations

from collections.abc import Mapping
import math

import jax
from jax import lax
import jax.numpy as jnp

from numpyro_repulsion.dynamics import Cloud
from numpyro_repulsion.warmup.arrival import NUM_DEVIATIONS, spread_of_energies
from numpyro_repulsion.warmup.learning import Sampler
from numpyro_repulsion.warmup.preconditioner import Preconditioner
from numpyro_repulsion.warmup.state import WarmupState
from numpyro_repulsion.warmup.windows import ARRIVED, Stage

__all__ = ["most_late_iterations", "update_prolongation"]

#: The share of the variance of minibatch gradients that control variates leave where particles still have to arrive.
STAYS_NOISY = 0.5
#: The smallest noise that matters, in whitened coordinates, where the variance of exact gradients is 1. Networks on a
#: few hundred rows have about 1; a local posterior at a low inverse temperature has 0.01. Networks that have not
#: arrived may have 0.02, because the curvature around a few of them sets the scales of all; so less noise matters too
#: where U differs between particles by far more than between draws.
MIN_NOISE = 0.1
#: The share of pairs of particles between which U is convex if they are on their way to one mode: all of them in a
#: regression with heavy tails, at most half in networks.
CONVEX = 0.75
#: How many times the second half of a prolonged arrival passes through the rows, at most. After 4,000 passes a network
#: with a learned variance predicted rows of one set with far too much certainty; its validation rows gave this limit.
MAX_PASSES = 500
#: The share by which hierarchical sites are centred meanwhile: not at all.
SHARE = 0.0


def most_late_iterations(plates: Mapping[str, tuple[int, int]], num_steps: int) -> int | None:
    """Return how many iterations the second half of a prolonged arrival has at most.

    :param plates: the number of rows and of those in a minibatch, for each subsampled plate.
    """
    passes = max((size / batch for size, batch in plates.values()), default=None)
    return None if passes is None else math.ceil(MAX_PASSES * passes / num_steps)


def update_prolongation(
    key: jax.Array, stage: Stage, warmup: WarmupState, cloud: Cloud, sampler: Sampler
) -> tuple[WarmupState, Cloud]:
    """At the end of the arrival, begin its second half again if gradients of particles and of their mean differ much.

    Near a posterior that the data determine, gradients on the same rows hardly differ between particles, and control
    variates remove their noise. The particles of a network are different functions instead, each of which can still
    improve, and an update by Adam improves it more than one by the sampler. So the arrival takes up to 80 % of warmup
    instead of 25 %. Halfway between two networks is no good one. If it is in most pairs, particles are on their way to
    one mode, and warmup goes on as usual.

    Particles return to where that half began: the mean curvature over different networks, in whose scales they moved,
    suits none of them, and may have sent all of them far away. Where it has, U may well be convex between them, and the
    arrival is prolonged without that test.

    Meanwhile particles move in the direction of SVGD, without noise and in units of the spread of the starts. Particles
    that repel each other and share their gradients predict better than as many alone, most of all in networks with many
    rows. Hierarchical sites are standardized then, because the density of weights ``N(0, 1/λ)`` and of λ is highest
    where all weights are 0 and λ is in the thousands; that of the standardized weights is not.
    """
    del key
    arrival, reference = warmup.arrival, warmup.reference
    spread, halfway, is_prolonged = arrival.spread, arrival.halfway, arrival.is_prolonged
    if spread is None or halfway is None or is_prolonged is None or reference is None:
        return warmup, cloud
    plain, corrected = warmup.measurements.mean_isotropic_noise
    due = stage.window_ends & (stage.done == stage.at(ARRIVED)) & ~is_prolonged

    # The coordinates of the model.
    scales, centring = warmup.scales._replace(preconditioner=Preconditioner()), warmup.scales.centring
    plainly = warmup._replace(scales=scales if centring is None else scales._replace(centring=centring.undone()))

    def prolong():
        found, unit = sampler.recover(plainly, halfway), spread
        y, recentred = found.z, centring
        if centring is not None:
            recentred = centring._replace(share=jnp.full_like(centring.share, SHARE))
            y = sampler.centred(recentred).to_coordinates(found)
            # Standardized sites have a prior of unit scale.
            is_standardized = ((found.scale != 1.0) | (found.location != 0.0)).any((0, 1))
            unit = jnp.where(is_standardized, 1.0, unit)
        old = warmup.scales.preconditioner
        stretch = None if old.stretch is None else jnp.zeros_like(old.stretch)
        scale = jnp.diag(unit) if old.kind == "dense" else unit
        change = Preconditioner(scale, jnp.mean(y, (0, 1)), old.vectors, stretch)
        scales = warmup.scales._replace(
            preconditioner=change,
            moments=jax.tree.map(jnp.zeros_like, warmup.moments),
            noise_shrinkage=jnp.ones_like(warmup.scales.noise_shrinkage),
            centring=recentred,
        )
        # With a gradient of 0, the first update only evaluates the gradient in the new coordinates.
        moved = cloud._replace(z=change.whiten(y), gradient=jnp.zeros_like(cloud.gradient))
        unknown = type(reference).none(reference.position.shape, reference.position.dtype)
        return warmup._replace(arrival=arrival.prolonged(moved.z), scales=scales, reference=unknown), moved

    def differ():
        """Whether gradients stay noisy and particles are different functions, so that what lies between two of them
        fits worse than they do; or whether the second half has sent them away."""
        dimension = cloud.z.shape[-1]
        z = cloud.z.reshape(-1, dimension)
        middle = ((z + jnp.roll(z, 1, 0)) / 2.0).reshape(cloud.z.shape)
        # Where they were is not expressed in the new scales, which single precision may not invert.
        places = ((warmup, cloud.z), (warmup, middle), (plainly, halfway))
        found = sampler.energies_to_compare(*((state, cloud._replace(z=place)) for state, place in places))
        fits, between, before = (energies.ravel() for energies in found)
        rarely = spread_of_energies(dimension)
        apart, before_apart = (jnp.nanmedian(jnp.abs(x - jnp.nanmedian(x))) for x in (fits, before))
        matters = (plain > MIN_NOISE) | (apart > rarely)
        is_convex = jnp.mean(between < (fits + jnp.roll(fits, 1)) / 2.0) >= CONVEX
        # Draws lie d / 2 above a mode on average, and on some of the rows energies differ by noise as well, as much as
        # between where the particles were. Negated, so that NaN of all counts as far away too; there, noise may be too
        # large to be measured.
        limit = dimension + jnp.maximum(rarely, NUM_DEVIATIONS * before_apart)
        have_left = ~(jnp.nanmedian(fits) <= jnp.nanmedian(before) + limit)
        return ((corrected > STAYS_NOISY * plain) & matters & ~is_convex) | have_left

    is_needed = lax.cond(due, differ, lambda: jnp.zeros((), bool))
    return lax.cond(is_needed, prolong, lambda: (warmup, cloud))
