"""Arrival: move particles from their starts to the posterior, whatever its scale."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
import math
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.scipy.special import ndtr
from jaxtyping import Array, Float
import numpy as np
from numpy.random import Generator

from numpyro_repulsion.dynamics import Cloud, EnergyAndGrad, acceptance, select
from numpyro_repulsion.gradients import Reference
from numpyro_repulsion.noise import normal
from numpyro_repulsion.warmup.adam import Position
from numpyro_repulsion.warmup.curvature import Gradients
from numpyro_repulsion.warmup.preconditioner import Preconditioner
from numpyro_repulsion.warmup.state import Found, Sampler, WarmupState
from numpyro_repulsion.warmup.windows import ARRIVED, FIRST_WHITENED, Window

#: A pytree of arrays.
Tree = TypeVar("Tree")


@dataclass(frozen=True)
class ArrivalConstants:
    """Constants of the arrival, chosen by measurement."""

    #: The acceptance to which each step adapts, and the change of its log for each unit of acceptance.
    acceptance: float = 0.6
    gain: float = 0.5
    #: A particle is lost if its energy is above the median by more than the sum of these, the second times √d: that of
    #: exact draws varies by √d. A network is lost from so many median absolute deviations above the median on.
    gap: float = 10.0
    gap_by_dimension: float = 5.0
    deviations: float = 10.0
    #: How far copies of a particle are moved apart, in units of the scales.
    jitter: float = 0.1


@dataclass(frozen=True)
class ProlongationConstants:
    """Constants of the prolongation of the arrival, chosen by measurement."""

    #: The share of the variance of minibatch gradients that control variates leave where particles have to arrive yet.
    stays_noisy: float = 0.5
    #: The smallest noise that matters, in whitened coordinates, where the variance of exact gradients is 1. Networks on
    #: a few hundred rows have about 1; a local posterior at a low inverse temperature has 0.01. Less matters too where
    #: U differs between particles by far more than between draws: the curvature around a few sets the scales of all.
    noise: float = 0.1
    #: The share of pairs of particles between which U is convex if they are on their way to one mode: all of them in a
    #: regression with heavy tails, at most half in networks.
    convex: float = 0.75
    #: How many times the second half of a prolonged arrival passes through the rows, at most: validation rows of one
    #: set, which a network predicted with far too much certainty after 4,000 passes, gave this limit.
    passes: int = 500


ARRIVAL = ArrivalConstants()
PROLONGATION = ProlongationConstants()


def arrive(
    key: jax.Array, position: Position, step_size: Float[Array, "*particles"], energy_and_grad: EnergyAndGrad
) -> tuple[Position, Float[Array, "*particles"]]:
    """Move each particle by one Metropolis-adjusted Langevin update and adapt its step to its acceptance.

    Gradients are exact; with minibatches particles arrive by :func:`~numpyro_repulsion.warmup.adam.descend`.
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
    return moved, step_size * jnp.exp(ARRIVAL.gain * (probability - ARRIVAL.acceptance))


def spread_of_energies(dimension: int, noise: float = 0.0) -> float:
    """Return by how much energies of exact draws rarely differ, given the variance of the whitened gradient noise."""
    # Exact energies differ by about sqrt(d), and those from minibatches by sqrt(V d) more.
    return ARRIVAL.gap + ARRIVAL.gap_by_dimension * np.sqrt(dimension * (1.0 + noise))


def left_behind(energy: np.ndarray, dimension: int, noise: float = 0.0, in_basins: bool = False) -> np.ndarray:
    """Return which particles, ``(G, L)``, have an energy far above the median; exact draws rarely do.

    :param energy: comparable potential energies, ``(G, L)``.
    :param noise: V, the variance of the gradient noise in whitened coordinates.
    :param in_basins: whether particles are in basins of different depth, as networks are.
    """
    middle = np.nanmedian(energy)
    limit = spread_of_energies(dimension, noise)
    if in_basins:
        limit = np.fmax(limit, ARRIVAL.deviations * np.nanmedian(np.abs(energy - middle)))
    # Negated, so that NaN counts as left behind too.
    return ~(energy <= middle + limit)


def replace_lost(rng: Generator, particles: Tree, lost: np.ndarray) -> Tree:
    """Put each lost particle in the place of a random other one, with all that belongs to it.

    Measurements use it to leave lost particles out.

    :param particles: a pytree of arrays ``(G, L, ...)``.
    :param lost: ``(G, L)``; if all are lost, none moves.
    """
    if lost.all() or not lost.any():
        return particles
    chosen = np.arange(lost.size)
    chosen[lost.ravel()] = rng.choice(np.flatnonzero(~lost), lost.sum())
    return jax.tree.map(lambda x: x.reshape(lost.size, *x.shape[2:])[chosen].reshape(x.shape), particles)


def own_references(reference: Reference | None) -> dict[str, Any]:
    """Return the fields of references that each particle has for itself; none of a common reference."""
    if reference is None or reference.age is None:
        return {}
    return {name: getattr(reference, name) for name in ("position", "potential_energy", "gradient")}


def without_lost(rng: Generator, u: np.ndarray, warmup: WarmupState, sampler: Sampler) -> tuple[np.ndarray, Gradients]:
    """Return particles ``(G, L, d)`` with others, and with their references, in place of the lost ones; and gradients
    there."""
    u, own = replace_lost(rng, (u, own_references(warmup.reference)), warmup.arrival.lost)
    reference: Any = warmup.reference
    if own:
        warmup = warmup._replace(reference=reference._replace(**own))
    return u, sampler.gradients(warmup)


def update_arrival(rng: Generator, window: Window, warmup: WarmupState, cloud: Cloud, sampler: Sampler) -> Found:
    """Move lost particles to others; halfway through the arrival, remember positions; limit Metropolis steps."""
    plan, arrival = sampler.plan, warmup.arrival
    if not plan.arrives:
        return warmup, cloud
    # After the arrival, particles can be recognized as lost only if the gradient noise has been measured.
    if window.finds_lost and (window.was_arrival or (plan.is_noisy and plan.measures)):
        lost = _lost(warmup, cloud, sampler)
        # At the end of the arrival they stay, and measurements leave them out. Later windows look again, and move them,
        # only if gradients are noisy.
        if window.may_replace:
            warmup, cloud = _replaced(rng, window, warmup, cloud, lost)
        arrival = warmup.arrival._replace(lost=lost & (not window.may_replace))
    if window.is_at(FIRST_WHITENED) and arrival.halfway is not None and not window.is_prolonged:
        positions = warmup.preconditioner.to_positions(cloud.z)
        if warmup.centering is not None:
            positions = sampler.recover_and_center(warmup, cloud.z, learns=False)[1].z
        arrival = arrival._replace(halfway=positions)
    if arrival.adam is None and plan.kind is not None:
        # In the scales just learned, variances are about 1, and no Metropolis step should be longer. A particle that is
        # stuck recovers from e^-12 within 60 accepted updates.
        arrival = arrival._replace(step_size=np.clip(arrival.step_size, math.exp(-12.0), 1.0))
    return warmup._replace(arrival=arrival), cloud


def _lost(warmup, cloud, sampler):
    """Return which particles have almost no posterior mass around them."""
    arrival = warmup.arrival
    # Energies of a hot cloud differ by more, in proportion to its temperature, and matter less.
    hotness = max(sampler.dynamics.temperature, 1.0)
    if arrival.surroundings is not None:
        return arrival.surroundings.is_lost(hotness)
    # Minibatch noise hides curvature, and energies on different minibatches are not comparable unless control
    # variates correct them.
    is_corrected = warmup.reference is not None and bool(warmup.reference.order)
    energy = cloud.potential_energy if is_corrected else sampler.energy_on_common_rows(warmup, cloud.z)
    # Where the scale of a thousand effects is by a factor e smaller, U is a thousand nats lower, and so is the log of
    # the volume: all others would move to the particles in the neck.
    energy = energy - sampler.log_volume_gained(warmup, cloud.z)
    return left_behind(energy / hotness, cloud.z.shape[-1], warmup.noise.largest, bool(arrival.is_prolonged))


def _replaced(rng, window, warmup, cloud, lost):
    """Return the state and the cloud after lost particles have moved to others."""
    # The count and the unit of Adam belong to all particles.
    arrival, adam = warmup.arrival, warmup.arrival.adam
    momenta = () if adam is None else adam[1:5]
    moved, steps, momenta, own = replace_lost(
        rng, (cloud, arrival.step_size, momenta, own_references(warmup.reference)), lost
    )
    if adam is not None:
        adam = type(adam)(adam.number, *momenta, adam.unit)
    if not window.was_arrival and moved is not cloud:
        # Copies that coincide would not repel each other.
        jitter = ARRIVAL.jitter * rng.choice((-1.0, 1.0), moved.z.shape)
        has_moved = (moved.z != cloud.z).any(-1, keepdims=True)
        moved = moved._replace(z=moved.z + np.where(has_moved, jitter, 0.0).astype(moved.z.dtype))
    arrival = arrival._replace(step_size=steps, adam=adam)
    reference = warmup.reference._replace(**own) if own else warmup.reference
    return warmup._replace(arrival=arrival, reference=reference), moved


def most_late_iterations(plates: Mapping[str, tuple[int, int]], num_steps: int) -> int | None:
    """Return how many iterations the second half of a prolonged arrival has at most.

    :param plates: the number of rows and of those in a minibatch, for each subsampled plate.
    """
    passes = max((size / batch for size, batch in plates.values()), default=None)
    return None if passes is None else math.ceil(PROLONGATION.passes * passes / num_steps)


def update_prolongation(rng: Generator, window: Window, warmup: WarmupState, cloud: Cloud, sampler: Sampler) -> Found:
    """At the end of the arrival, begin its second half again if gradients of particles and of their mean differ much.

    Near a posterior that the data determine, gradients on the same rows hardly differ between particles, and control
    variates remove their noise. The particles of a network are different functions instead, each of which can still
    improve, and an update by Adam improves it more than one by the sampler (see ``docs/warmup.md``).

    Particles return to where that half began: the mean curvature over different networks, in whose scales they moved,
    suits none of them, and may have sent all of them far away. Particles that then repel each other and share their
    gradients predict better than as many alone, most of all in networks with many rows.
    """
    arrival = warmup.arrival
    if arrival.start_sds is None or arrival.halfway is None or window.is_prolonged or not window.is_at(ARRIVED):
        return warmup, cloud
    # The coordinates of the model.
    centering = warmup.centering
    undone = None if centering is None else centering.undone()
    plainly = warmup._replace(preconditioner=Preconditioner(), centering=undone)
    if not _differ(warmup, plainly, cloud, sampler):
        return warmup, cloud
    y, unit, recentered = arrival.halfway, arrival.start_sds, centering
    if centering is not None:
        recentered = centering._replace(share=np.zeros_like(centering.share))
        _, found = sampler.recover_and_center(plainly, y, learns=False)
        y = sampler.to_coordinates(recentered, found)
        # Standardized sites have a prior of unit scale.
        unit = np.where(((found.scale != 1.0) | (found.location != 0.0)).any((0, 1)), 1.0, unit)
    change = warmup.preconditioner.along_coordinates(unit, y.mean((0, 1)))
    # With a gradient of 0, the first update follows the repulsion alone, and evaluates the gradient here.
    moved = cloud._replace(z=change.whiten(y), gradient=np.zeros_like(cloud.gradient))
    warmup = warmup._replace(
        arrival=arrival.prolonged(moved.z),
        preconditioner=change,
        moments=jax.tree.map(np.zeros_like, warmup.moments),
        noise_shrinkage=1.0,
        reference=jax.tree.map(np.zeros_like, warmup.reference),
        centering=recentered,
    )
    return warmup, moved


def _differ(warmup, plainly, cloud, sampler):
    """Return whether gradients stay noisy and what lies between two particles fits worse than they do, or whether the
    second half has sent them away."""
    plain, corrected = warmup.measurements.mean_noise.mean[:2]
    dimension = cloud.z.shape[-1]
    z = cloud.z.reshape(-1, dimension)
    middle = ((z + np.roll(z, 1, 0)) / 2.0).reshape(cloud.z.shape)
    # Where they were is not expressed in the new scales, which single precision may not invert.
    to_positions, centering = warmup.preconditioner.to_positions, warmup.centering
    places = (
        (centering, to_positions(cloud.z)),
        (centering, to_positions(middle)),
        (plainly.centering, warmup.arrival.halfway),
    )
    fits, between, before = (sampler.energy_to_compare(*place).ravel() for place in places)
    rarely = spread_of_energies(dimension)
    apart, before_apart = (np.nanmedian(np.abs(x - np.nanmedian(x))) for x in (fits, before))
    matters = plain > PROLONGATION.noise or apart > rarely
    is_convex = np.mean(between < (fits + np.roll(fits, 1)) / 2.0) >= PROLONGATION.convex
    # Draws lie d / 2 above a mode on average, and on some of the rows energies differ by noise as well, as much as
    # between where the particles were. Negated, so that NaN of all counts as far away too; there, noise may be too
    # large to be measured.
    limit = dimension + np.maximum(rarely, ARRIVAL.deviations * before_apart)
    have_left = not np.nanmedian(fits) <= np.nanmedian(before) + limit
    return (corrected > PROLONGATION.stays_noisy * plain and matters and not is_convex) or have_left
