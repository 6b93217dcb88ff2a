"""The state that a kernel carries from one iteration to the next."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
from jax import random
import jax.numpy as jnp

from numpyro_repulsion.dynamics import Cloud
from numpyro_repulsion.gradients import Particle, ravel_cloud
from numpyro_repulsion.kernels.bound import BoundSampler
from numpyro_repulsion.kernels.origin import Origin
from numpyro_repulsion.warmup import WarmupState

__all__ = [
    "ParticleState",
    "map_particles",
    "last_word",
    "per_particle",
    "row_seed",
    "sampler_positions",
    "whitened_cloud",
    "with_data",
]

_PARTICLE_FIELDS = ("z", "potential_energy", "step_size", "bandwidth", "diverging", "gradient", "memory", "coordinates")


class ParticleState(NamedTuple):
    """The state of all particles. With a single plain chain, per-particle fields lack the axis L.

    ``MCMC.run(..., extra_fields=...)`` can collect fields with the axis L, such as ``gradient`` and ``z.site``.

    - **z** - unconstrained positions: the sites, each ``(L, ...)``.
    - **potential_energy** - U at z, ``(L,)``; a minibatch estimate if the gradient is one.
    - **step_size** - ε of the last update, ``(L,)``.
    - **bandwidth** - h in use, ``(L,)``; 0 if the interaction has none.
    - **diverging** - whether, in the last iteration, an update of the particle was rejected as non-finite, turned back,
      or had its gradient clipped, ``(L,)``.
    - **gradient** - the gradient in the whitened coordinates of the sampler, ``(L, d)``.
    - **memory** - what the dynamics carries, a tuple of ``(L, d)``.
    - **warmup** - the state of warmup, see :class:`~numpyro_repulsion.warmup.WarmupState`.
    - **num_updates** - how many updates are done, including warmup; schedules count these.
    - **num_divergences** - how many updates of single particles were rejected, turned back or had a clipped
      gradient: since the end of warmup, or since the start if step and scales were given.
    - **rng_key** - the PRNG key of the next iteration.
    - **coordinates** - where hierarchical sites are centred partly, the positions in the coordinates of the sampler,
      ``(L, d)``, and U there, ``(L,)``; else ``None``.
    - **row_seed** - the seed of the orders in which particles pass through rows, with ``Sweeps``; and the last word of
      ``rng_key``, which shows whether the run has a new key and needs other orders, ``(2,)``.
    - **origin** - what the state was made for, static; a kernel that would misread the memory raises ``ValueError``.
    """

    z: Particle
    potential_energy: jax.Array
    step_size: jax.Array
    bandwidth: jax.Array
    diverging: jax.Array
    gradient: jax.Array
    memory: tuple[jax.Array, ...]
    warmup: WarmupState
    num_updates: jax.Array
    num_divergences: jax.Array
    rng_key: jax.Array
    row_seed: jax.Array
    coordinates: tuple[jax.Array, jax.Array] | None
    origin: Origin


def per_particle(cloud: Cloud, warmup: WarmupState, step_size: jax.Array) -> dict[str, Any]:
    """Return the per-particle fields of a state, except ``z`` and ``diverging``."""
    size = cloud.potential_energy.size
    return {
        "potential_energy": cloud.potential_energy.reshape(size),
        "step_size": jnp.broadcast_to(step_size, cloud.potential_energy.shape).reshape(size),
        "bandwidth": jnp.broadcast_to(warmup.bandwidth, (size,)),
        "gradient": cloud.gradient.reshape(size, -1),
        "memory": tuple(x.reshape(size, -1) for x in cloud.memory),
    }


def last_word(key: jax.Array) -> jax.Array:
    """Return the last 32 bits of a PRNG key."""
    return random.key_data(key).ravel()[-1]


def row_seed(state: ParticleState) -> jax.Array:
    """Return the seed of the orders of rows: that of the state, or a new one if the run has a key of its own."""
    seed, known = state.row_seed
    word = last_word(state.rng_key)
    return jnp.where(word == known, seed, word)


def sampler_positions(state: ParticleState) -> tuple[jax.Array, jax.Array]:
    """Return the positions in the coordinates of the sampler, before whitening, ``(L, d)``, and U there, ``(L,)``."""
    return (ravel_cloud(state.z)[0], state.potential_energy) if state.coordinates is None else state.coordinates


def whitened_cloud(state: ParticleState, num_groups: int) -> Cloud:
    """Return the particles in whitened coordinates, ``(G, L, d)``."""
    flat, energy = sampler_positions(state)
    cloud = Cloud(state.warmup.scales.preconditioner.whiten(flat), energy, state.gradient, state.memory)
    return jax.tree.map(lambda x: x.reshape(num_groups, -1, *x.shape[1:]), cloud)


def with_data(state: ParticleState, bound: BoundSampler) -> ParticleState:
    """Return a state, of one or of several chains, for a program to which data are inputs without values."""
    reference = state.warmup.reference
    data = bound.data()
    if reference is None or data is None:
        return state
    known = reference.data
    is_other = jnp.any(known != data, -1) & known.any(-1)
    reference = reference._replace(
        data=jnp.where(is_other[..., None], data, known), is_stale=reference.is_stale | is_other
    )
    return state._replace(warmup=state.warmup._replace(reference=reference))


def map_particles(fn, state: ParticleState) -> ParticleState:
    """Apply a function to every array of a state that leads with the particles."""
    return state._replace(**{name: jax.tree.map(fn, getattr(state, name)) for name in _PARTICLE_FIELDS})
