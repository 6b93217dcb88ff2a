"""The state that a kernel carries from one iteration to the next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax import random
import jax.numpy as jnp
import numpy as np

from numpyro.infer import MCMC

from numpyro_repulsion.digests import digest, words
from numpyro_repulsion.dynamics import Cloud
from numpyro_repulsion.gradients import Gradient, ModelTarget, Particle, Target, ravel_cloud
from numpyro_repulsion.kernels.bound import BoundSampler, Settings
from numpyro_repulsion.warmup import WarmupState

__all__ = [
    "Origin",
    "ParticleState",
    "check_chains",
    "check_state",
    "last_word",
    "map_particles",
    "per_particle",
    "row_seed",
    "sampler_positions",
    "whitened_cloud",
    "with_data",
]

_ANEW = (
    "to start again from its positions, set mcmc.post_warmup_state = None and call mcmc.run(key, ..., "
    "init_params=state.z)"
)


@jax.tree_util.register_static
@dataclass(frozen=True)
class Origin:
    """The settings of the kernel that made a state, by name, in words; static."""

    settings: tuple[tuple[str, str], ...]

    @staticmethod
    def of(kernel: Settings, gradient: Gradient) -> Origin:
        """Return the origin of a state that a kernel starts; ``num_steps`` may change."""
        names = ("step_size", "dynamics", "interaction", "moves", "reparam", "num_ensembles")
        found = {"kernel": type(kernel).__name__} | {name: words(getattr(kernel, name)) for name in names}
        found |= {"gradient": words(gradient), "preconditioner": str(digest(kernel.preconditioner))}
        return Origin(tuple(found.items()))


def check_state(
    kernel: Settings, origin: Origin, z: Particle, warmup: WarmupState, target: Target, gradient: Gradient
) -> None:
    """Raise ``ValueError`` if a state is that of another kernel, model or precision.

    It looks only at shapes, types and static settings.

    :param z: the particles of the state, each leaf with a leading axis of them.
    """
    _check_precision(warmup, target)
    if isinstance(target, ModelTarget):
        size = len(jax.tree.leaves(z)[0])
        expected = {name: (size, *site.shape) for name, site in target.prototype.items()}
        found = jax.tree.map(jnp.shape, z)
        if found != expected:
            raise ValueError(
                f"The state has the sites {found}, and this model has {expected}. Run the model of the state, or set "
                "mcmc.post_warmup_state = None and start again."
            )
    if (centering := warmup.scales.centering) is not None:
        found = len(centering.powers), len(centering.bases)
        if not isinstance(target, ModelTarget) or found != (target.num_products, target.num_groups):
            raise ValueError(
                "The state centers hierarchical sites of the model that made it, and this kernel's model has others. "
                f"Run the model of the state; or, {_ANEW}."
            )
    pairs = zip(origin.settings, Origin.of(kernel, gradient).settings, strict=True)
    if changed := [f"{name}={old} and is now {name}={new}" for (name, old), (_, new) in pairs if old != new]:
        raise ValueError(
            f"The state was made with {', '.join(changed)}: continue with the kernel that made it; or, {_ANEW}."
        )


def check_chains(number: int, warmup: WarmupState, mcmc: MCMC) -> bool:
    """Return whether a stored state has several chains; raise ``ValueError`` if it does not fit the run.

    :param number: of chains in the state.
    """
    if number != mcmc.num_chains or (number > 1 and mcmc.chain_method != "vectorized"):
        raise ValueError(
            f"`post_warmup_state` is a state of {number} chain{'s' * (number > 1)} that moved together, and this MCMC "
            f"has num_chains={mcmc.num_chains} by {mcmc.chain_method!r}. Use MCMC(..., num_chains={number}, "
            'chain_method="vectorized"), or set mcmc.post_warmup_state = None and start again.'
        )
    done, num_warmup = int(warmup.iteration), int(warmup.num_warmup)
    if done < num_warmup:
        raise ValueError(
            f"`post_warmup_state` is a state after {done} of {num_warmup} iterations of warmup, so the next draws "
            "would be draws of warmup. Set mcmc.post_warmup_state = None and start again."
        )
    return number > 1


def _check_precision(warmup, target):
    """Raise ``ValueError`` for another precision: a model determines its own, and a function only rules out float64."""
    found = warmup.step.size.dtype
    expected = found if jax.dtypes.canonicalize_dtype(found) == found else np.dtype("float32")
    if isinstance(target, ModelTarget):
        expected = jnp.result_type(*(site.dtype for site in target.prototype.values()))
    if found != expected:
        raise ValueError(
            f"The state is in {found}, and this run in {expected}: set jax.config.update('jax_enable_x64', "
            f"{found == 'float64'}), as in the run that made the state; or, {_ANEW}."
        )


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
    - **num_flagged_updates** - how many updates of single particles were rejected, turned back or had a clipped
      gradient: since the end of warmup, or since the start if step and scales were given.
    - **rng_key** - the PRNG key of the next iteration.
    - **coordinates** - where hierarchical sites are centered partly, the positions in the coordinates of the sampler,
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
    num_flagged_updates: jax.Array
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
