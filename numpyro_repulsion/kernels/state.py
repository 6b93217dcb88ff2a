"""What a kernel carries from one iteration to the next."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from numpyro_repulsion.dynamics import Cloud
from numpyro_repulsion.kernels.origin import Origin
from numpyro_repulsion.warmup import WarmupState

__all__ = ["ParticleState", "map_particles", "per_particle"]

_PARTICLE_FIELDS = ("z", "potential_energy", "step_size", "bandwidth", "diverging", "gradient", "memory")


class ParticleState(NamedTuple):
    """The state of all particles. With a single plain chain, per-particle fields lack the axis L.

    Fields with the axis L can be collected by ``MCMC.run(..., extra_fields=...)``: ``gradient``, ``z.site``.

    - **z** - unconstrained positions: the sites, each ``(L, ...)``.
    - **potential_energy** - U at z, ``(L,)``; an estimate from a minibatch where the gradient is one.
    - **step_size** - ε of the last update, ``(L,)``.
    - **bandwidth** - h in use, ``(L,)``; 0 where the interaction has none.
    - **diverging** - whether a particle became non-finite in the last iteration and was held, or had a gradient so
      long that it was cut, ``(L,)``.
    - **gradient** - the (preconditioned) gradient at z, ``(L, d)``.
    - **memory** - what the dynamics carries, a tuple of ``(L, d)``.
    - **warmup** - what warmup learns, see :class:`~numpyro_repulsion.warmup.WarmupState`.
    - **num_updates** - updates done so far, warmup included: what schedules count.
    - **num_divergences** - how often a particle was held or its gradient cut: since warmup ended, or with a given step
      and scales since the start.
    - **rng_key** - the PRNG key of the next iteration.
    - **origin** - what the state was made for, static: a kernel with dynamics that would take the memory for something
      else raises a ``ValueError``.
    """

    z: Any
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
    origin: Origin


def per_particle(cloud: Cloud, warmup: WarmupState, step_size: jax.Array) -> dict[str, Any]:
    """The fields that lead with the particles, but for those that count divergences and for z, of a cloud."""
    size = cloud.potential_energy.size
    return {
        "potential_energy": cloud.potential_energy.reshape(size),
        "step_size": jnp.broadcast_to(step_size, cloud.potential_energy.shape).reshape(size),
        "bandwidth": jnp.broadcast_to(warmup.bandwidth, (size,)),
        "gradient": cloud.gradient.reshape(size, -1),
        "memory": tuple(x.reshape(size, -1) for x in cloud.memory),
    }


def map_particles(fn, state: ParticleState) -> ParticleState:
    """The state with a function applied to every array that leads with the particles."""
    return state._replace(**{name: jax.tree.map(fn, getattr(state, name)) for name in _PARTICLE_FIELDS})
