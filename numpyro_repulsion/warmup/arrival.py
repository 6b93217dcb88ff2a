"""Arrival: move particles from their starts to the posterior, whatever its scale."""

from __future__ import annotations

import math
from typing import TypeVar

import jax
from jax import lax
import jax.numpy as jnp
from jax.scipy.special import ndtr
import numpy as np

from numpyro_repulsion.dynamics import Cloud, EnergyAndGrad, acceptance, select
from numpyro_repulsion.noise import hashed, normal, signs
from numpyro_repulsion.shapes import Flag, Flags, Number, Numbers
from numpyro_repulsion.warmup.adam import Position
from numpyro_repulsion.warmup.learning import Sampler
from numpyro_repulsion.warmup.state import WarmupState
from numpyro_repulsion.warmup.windows import FIRST_WHITENED, Stage

__all__ = ["arrive", "left_behind", "rescue", "spread_of_energies", "update_arrival"]

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
    step_size: Numbers,
    energy_and_grad: EnergyAndGrad,
) -> tuple[Position, Numbers]:
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


def spread_of_energies(dimension: int, noise: Number = 0.0) -> Number:
    """Return by how much energies of exact draws rarely differ.

    Exact energies differ by about ``sqrt(d)``, and those from minibatches by ``sqrt(V d)`` more.

    :param noise: V, the variance of the gradient noise in whitened coordinates.
    """
    return 10.0 + 5.0 * jnp.sqrt(dimension * (1.0 + noise))


def left_behind(energy: Numbers, dimension: int, noise: Number = 0.0, in_basins: Flag | bool = False) -> Flags:
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


def rescue(key: jax.Array, particles: Tree, lost: Flags) -> Tree:
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
        # Before the hierarchical sites are centred otherwise, coordinates are those of the model.
        is_halfway = stage.done == stage.at(FIRST_WHITENED)
        z = warmup.scales.preconditioner.to_positions(cloud.z)
        arrival = arrival._replace(halfway=jnp.where(is_halfway & ~arrival.is_prolonged, z, arrival.halfway))
    arrival = arrival._replace(step_size=steps, lost=is_lost, surroundings=surroundings, adam=adam)
    return warmup._replace(arrival=arrival), cloud
