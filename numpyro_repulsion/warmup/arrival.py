"""Arrival: move particles from their starts to the posterior, whatever its scale."""

from __future__ import annotations

from collections.abc import Mapping
import math
from typing import TypeVar

import jax
from jax import lax
import jax.numpy as jnp
from jax.scipy.special import ndtr
from jaxtyping import Array, Bool, Float
import numpy as np

from numpyro_repulsion.dynamics import Cloud, EnergyAndGrad, acceptance, select
from numpyro_repulsion.noise import hashed, normal, signs
from numpyro_repulsion.warmup.adam import Position
from numpyro_repulsion.warmup.preconditioner import Preconditioner
from numpyro_repulsion.warmup.state import Sampler, WarmupState
from numpyro_repulsion.warmup.windows import ARRIVED, FIRST_WHITENED, Stage

__all__ = [
    "arrive",
    "left_behind",
    "most_late_iterations",
    "rescue",
    "spread_of_energies",
    "update_arrival",
    "update_prolongation",
]

#: Bounds on the step sizes of arriving particles, once the scales have been learned.
ARRIVAL_STEPS = (math.exp(-12.0), 1.0)
#: How far from another particle a lost one continues after the arrival, in units of the scales.
JITTER = 0.1
#: How many median absolute deviations above the median a network is lost.
NUM_DEVIATIONS = 10.0

#: A pytree of arrays.
Tree = TypeVar("Tree")


def arrive(
    key: jax.Array,
    position: Position,
    step_size: Float[Array, "*particles"],
    energy_and_grad: EnergyAndGrad,
) -> tuple[Position, Float[Array, "*particles"]]:
    """Move each particle by one Metropolis-adjusted Langevin update and adapt its step to an acceptance of 0.6.

    The update need not be exact; it only brings the particles to the posterior, whatever its scale. It needs exact
    gradients; with minibatches particles arrive by :func:`~numpyro_repulsion.warmup.adam.descend`.

    :param position: ``(u, U, ∇U)`` of shapes ``(G, L, d)``, ``(G, L)`` and ``(G, L, d)``.
    :param step_size: ``(G, L)``.
    :param energy_and_grad: ``u -> (U, ∇U)``.
    :return: the new position and the new step sizes.
    """
    u = position[0]
    step = step_size[..., None]
    # One draw, because each generator takes a tenth of a second to compile.
    white = normal(key, (u.size + step_size.size,), u.dtype)
    noise = jnp.sqrt(2.0 * step) * white[: u.size].reshape(u.shape)
    threshold = ndtr(white[u.size :]).reshape(step_size.shape)
    proposal = u - step * position[2] + noise
    energy, gradient = energy_and_grad(proposal)
    forward = jnp.sum(noise**2, -1)
    backward = jnp.sum((u - proposal + step * gradient) ** 2, -1)
    log_ratio = position[1] - energy + (forward - backward) / (4.0 * step_size)
    probability = acceptance(log_ratio, jnp.isfinite(gradient).all(-1))
    moved = select(threshold < probability, (proposal, energy, gradient), position)
    return moved, step_size * jnp.exp(0.5 * (probability - 0.6))


def spread_of_energies(dimension: int, noise: Float[Array, ""] | float = 0.0) -> Float[Array, ""] | float:
    """Return by how much energies of exact draws rarely differ.

    Exact energies differ by about ``sqrt(d)``, and those from minibatches by ``sqrt(V d)`` more.

    :param noise: V, the variance of the gradient noise in whitened coordinates.
    """
    return 10.0 + 5.0 * jnp.sqrt(dimension * (1.0 + noise))


def left_behind(
    energy: Float[Array, "*particles"],
    dimension: int,
    noise: Float[Array, ""] | float = 0.0,
    in_basins: Bool[Array, ""] | bool = False,
) -> Bool[Array, "*particles"]:
    """Return which particles, ``(G, L)``, have an energy far above the median; exact draws rarely do.

    The limit is :func:`spread_of_energies` above it. It is also ``NUM_DEVIATIONS`` median absolute deviations if
    particles are in basins of different depth, as networks are.

    :param energy: comparable potential energies, ``(G, L)``.
    :param noise: V, the variance of the gradient noise in whitened coordinates.
    :param in_basins: whether particles are in basins of different depth.
    """
    middle = jnp.nanmedian(energy)
    limit = spread_of_energies(dimension, noise)
    if in_basins is not False:
        apart = NUM_DEVIATIONS * jnp.nanmedian(jnp.abs(energy - middle))
        limit = jnp.where(in_basins & (apart > limit), apart, limit)
    # Negated, so that NaN counts as left behind too.
    return ~(energy <= middle + limit)


def rescue(key: jax.Array, particles: Tree, lost: Bool[Array, "*particles"]) -> Tree:
    """Move each lost particle to the position of a random other one, with all that belongs to it.

    :param particles: a pytree of arrays ``(G, L, ...)``.
    :param lost: ``(G, L)``; if all are lost, none moves.
    """
    lost = lost.ravel() & ~lost.all()
    places = hashed(key, (lost.size, lost.size)) | np.uint32(1)
    chosen = jnp.where(lost, jnp.argmax(jnp.where(lost, np.uint32(0), places), 1), jnp.arange(lost.size))
    return jax.tree.map(lambda x: x.reshape(lost.size, *x.shape[2:])[chosen].reshape(x.shape), particles)


def update_arrival(
    key: jax.Array, stage: Stage, warmup: WarmupState, cloud: Cloud, sampler: Sampler
) -> tuple[WarmupState, Cloud]:
    """Adapt the arrival: sum up surroundings and, at the ends of windows, move lost particles to others."""
    if not sampler.plan.arrives:
        return warmup, cloud
    arrival = warmup.arrival
    steps, surroundings, adam = arrival.step_size, arrival.surroundings, arrival.adam
    if surroundings is not None:

        def look_around():
            fresh = jax.tree.map(lambda x: jnp.where(stage.window_starts, 0.0, x), arrival.surroundings)
            return fresh.add(cloud.potential_energy, cloud.gradient)

        surroundings = lax.cond(stage.is_arriving, look_around, lambda: arrival.surroundings)

    def lost():
        if surroundings is not None:
            return surroundings.is_lost()
        # Minibatch noise hides curvature, and energies on different minibatches are not comparable unless control
        # variates correct them.
        energy = sampler.energy_on_common_rows(warmup, cloud.z)
        if warmup.reference is not None:
            energy = jnp.where(warmup.reference.in_use, cloud.potential_energy, energy)
        in_basins = False if arrival.is_prolonged is None else arrival.is_prolonged
        return left_behind(energy, cloud.z.shape[-1], warmup.noise, in_basins)

    # The count and the unit of Adam belong to all particles.
    momenta = None if adam is None else (adam.mean, adam.square, adam.growth)
    particles = cloud, steps, momenta

    def rescued():
        is_lost = lost()
        moved, *others = rescue(key, particles, is_lost & stage.may_rescue)
        # Copies that coincide would not repel each other.
        jitter = jnp.where(stage.is_arriving, 0.0, JITTER) * signs(key, cloud.z.shape, cloud.z.dtype, 1)
        jitter = jnp.where((moved.z != cloud.z).any(-1, keepdims=True), jitter, 0.0)
        return (moved._replace(z=moved.z + jitter), *others), is_lost & ~stage.may_rescue

    # After the arrival, particles can be recognized as lost only if the gradient noise has been measured.
    knows_noise = sampler.plan.noise and sampler.plan.measures
    due = stage.window_ends & stage.finds_lost & (stage.is_arriving | knows_noise)
    (cloud, steps, momenta), is_lost = lax.cond(due, rescued, lambda: (particles, arrival.lost))
    if adam is not None:
        mean, square, growth = momenta
        adam = adam._replace(mean=mean, square=square, growth=growth)
    elif sampler.plan.scale is not None:
        steps = jnp.where(stage.window_ends, jnp.clip(steps, *ARRIVAL_STEPS), steps)
    if arrival.halfway is not None and arrival.is_prolonged is not None:
        # Before the hierarchical sites are centered otherwise, coordinates are those of the model.
        is_halfway = stage.done == stage.at(FIRST_WHITENED)
        z = warmup.scales.preconditioner.to_positions(cloud.z)
        arrival = arrival._replace(halfway=jnp.where(is_halfway & ~arrival.is_prolonged, z, arrival.halfway))
    arrival = arrival._replace(step_size=steps, lost=is_lost, surroundings=surroundings, adam=adam)
    return warmup._replace(arrival=arrival), cloud


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
    scales, centering = warmup.scales._replace(preconditioner=Preconditioner()), warmup.scales.centering
    plainly = warmup._replace(scales=scales if centering is None else scales._replace(centering=centering.undone()))

    def prolong():
        found, unit = sampler.recover(plainly, halfway), spread
        y, recentered = found.z, centering
        if centering is not None:
            recentered = centering._replace(share=jnp.zeros_like(centering.share))
            y = sampler.centered(recentered).to_coordinates(found)
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
            centering=recentered,
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
