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
from numpyro_repulsion.gradients import Gradient, ModelTarget, Particle, Target
from numpyro_repulsion.kernels.bound import Settings, schedules_in_words
from numpyro_repulsion.kernels.iteration import CloudMover
from numpyro_repulsion.layout import place_particles
from numpyro_repulsion.warmup import Learned

_ANEW = (
    "to start again from its positions, set mcmc.post_warmup_state = None and call mcmc.run(key, ..., "
    "init_params=state.z)"
)


@jax.tree_util.register_static
@dataclass(frozen=True)
class Origin:
    """How a state was made; static."""

    settings: tuple[tuple[str, str], ...]  # of its kernel, by name, in words
    #: Whether `init` made a warmup. If there was nothing to learn, NumPyro's iterations of warmup are like all others.
    has_warmed: bool = False
    #: Whether NumPyro's iterations of warmup pass without an update, because `init` made the warmup.
    skips_warmup: bool = False

    @staticmethod
    def of(kernel: Settings, gradient: Gradient, has_warmed: bool = False, skips_warmup: bool = False) -> Origin:
        """Return the origin of a state that a kernel starts; ``num_steps`` may change."""
        names = ("dynamics", "interaction", "moves", "reparam", "num_ensembles")
        found = {"kernel": type(kernel).__name__} | schedules_in_words(kernel)
        found |= {name: words(getattr(kernel, name)) for name in names}
        found |= {"gradient": words(gradient), "preconditioner": str(digest(kernel.preconditioner))}
        return Origin(tuple(found.items()), has_warmed, skips_warmup)


def check_state(state: ParticleState, kernel: Settings, target: Target, gradient: Gradient) -> None:
    """Raise ``ValueError`` if a state with the axis L is, by shapes, types and settings, of another kernel or model."""
    learned, precision = state.learned, state.learned.step_size.dtype
    # A model determines its own precision, and a function only rules out float64.
    other = precision if jax.dtypes.canonicalize_dtype(precision) == precision else np.dtype("float32")
    if isinstance(target, ModelTarget):
        other = jnp.result_type(*(site.dtype for site in target.prototype.values()))
    if precision != other:
        raise ValueError(
            f"The state is in {precision}, and this run in {other}: set jax.config.update('jax_enable_x64', "
            f"{precision == 'float64'}), as in the run that made the state; or, {_ANEW}."
        )
    if isinstance(target, ModelTarget):
        size = state.potential_energy.size
        expected = {name: (size, *site.shape) for name, site in target.prototype.items()}
        found = jax.tree.map(jnp.shape, state.z)
        if found != expected:
            raise ValueError(
                f"The state has the sites {found}, and this model has {expected}. Run the model of the state, or set "
                "mcmc.post_warmup_state = None and start again."
            )
    if (centering := learned.centering) is not None:
        found = len(centering.powers), len(centering.bases)
        if not isinstance(target, ModelTarget) or found != (target.num_products, target.num_groups):
            raise ValueError(
                "The state centers hierarchical sites of the model that made it, and this kernel's model has others. "
                f"Run the model of the state; or, {_ANEW}."
            )
    old, new = dict(state.origin.settings), dict(Origin.of(kernel, gradient).settings)
    names = (name for name in old | new if old.get(name) != new.get(name))
    if changed := [f"{name}={old.get(name)} and is now {name}={new.get(name)}" for name in names]:
        raise ValueError(
            f"The state was made with {', '.join(changed)}: continue with the kernel that made it; or, {_ANEW}."
        )


def check_chains(state: ParticleState, mcmc: MCMC) -> bool:
    """Return whether a stored state has several chains; raise ``ValueError`` if it does not fit the run."""
    number = np.size(state.potential_energy)
    if number != mcmc.num_chains or (number > 1 and mcmc.chain_method != "vectorized"):
        raise ValueError(
            f"`post_warmup_state` is a state of {number} chain{'s' * (number > 1)} that moved together, and this MCMC "
            f"has num_chains={mcmc.num_chains} by {mcmc.chain_method!r}. Use MCMC(..., num_chains={number}, "
            'chain_method="vectorized"), or set mcmc.post_warmup_state = None and start again.'
        )
    done, num_warmup = int(state.iteration), int(state.num_warmup)
    if done < num_warmup and not state.origin.has_warmed:
        raise ValueError(
            f"`post_warmup_state` is a state after {done} of {num_warmup} iterations of warmup, so the next draws "
            "would be draws of warmup. Set mcmc.post_warmup_state = None and start again."
        )
    return number > 1


_PARTICLE_FIELDS = ("z", "potential_energy", "step_size", "bandwidth", "diverging", "gradient", "memory", "coordinates")


class ParticleState(NamedTuple):
    """The state of all particles. With a single plain chain, per-particle fields lack the axis L.

    ``MCMC.run(..., extra_fields=...)`` can collect fields with the axis L, such as ``gradient`` and ``z.site``.

    - **z** - unconstrained positions: the sites, each ``(L, ...)``.
    - **potential_energy** - U at z, ``(L,)``; a minibatch estimate if the gradient is one.
    - **step_size** - ε of the last update, ``(L,)``.
    - **bandwidth** - h in use, ``(L,)``; 0 if the interaction has none.
    - **diverging** - whether, in the last iteration, an update of the particle was rejected as non-finite or turned
      back, ``(L,)``.
    - **gradient** - the gradient in the whitened coordinates of the sampler, ``(L, d)``.
    - **memory** - what the dynamics carries, a tuple of ``(L, d)``.
    - **learned** - what warmup learned, see :class:`~numpyro_repulsion.warmup.Learned`.
    - **iteration** - how many iterations are done, including warmup.
    - **num_warmup** - how many of them are warmup.
    - **num_updates** - how many updates are done, including warmup; schedules count these.
    - **num_flagged_updates** - how many updates of single particles were rejected or turned back: since the end of
      warmup, or since the start if there was nothing to learn.
    - **cut_off** - by how much clipping shortened the gradients of these updates, in sum over updates and particles, in
      whitened coordinates.
    - **rng_key** - the PRNG key of the next iteration.
    - **coordinates** - where hierarchical sites are centered partly, the positions in the coordinates of the sampler,
      ``(L, d)``, and U there, ``(L,)``; else ``None``.
    - **row_seed** - with ``Sweeps``, the seed of the orders in which particles pass through rows, and the last word of
      ``rng_key``, which shows whether the run has a new key and needs other orders, ``(2,)``; else ``None``.
    - **origin** - how the state was made, static; another kernel raises ``ValueError``.
    """

    z: Particle
    potential_energy: jax.Array
    step_size: jax.Array
    bandwidth: jax.Array
    diverging: jax.Array
    gradient: jax.Array
    memory: tuple[jax.Array, ...]
    learned: Learned
    iteration: jax.Array
    num_warmup: jax.Array
    num_updates: jax.Array
    num_flagged_updates: jax.Array
    cut_off: jax.Array
    rng_key: jax.Array
    row_seed: jax.Array | None
    coordinates: tuple[jax.Array, jax.Array] | None
    origin: Origin

    @property
    def is_single(self) -> bool:
        """Whether this is the state of a single plain chain, without the axis L."""
        return jnp.ndim(self.potential_energy) == 0

    def with_particle_axis(self) -> ParticleState:
        """Return the state with the axis L, also of a single plain chain."""
        return map_particles(lambda x: x[None], self) if self.is_single else self

    @staticmethod
    def of(
        mover: CloudMover,
        cloud: Cloud,
        learned: Learned,
        step_size: jax.Array,
        flagged: jax.Array,
        rng_key: jax.Array,
        row_seed: jax.Array | None,
        **others: Any,
    ) -> ParticleState:
        """Return the state of a cloud in whitened coordinates, ``(G, L, d)``, that a mover moved.

        :param flagged: how many updates of the last iteration were flagged, ``(G, L)``.
        :param others: the remaining fields.
        """
        size, recovered, coordinates = cloud.potential_energy.size, mover.recover(learned, cloud.z), None
        energy = cloud.potential_energy
        if learned.centering is not None:
            y = learned.preconditioner.to_positions(cloud.z)
            coordinates = y.reshape(size, -1), energy.reshape(size)
            energy = energy + mover.centered(learned.centering).log_volume(recovered)
        return ParticleState(
            z=place_particles(jax.vmap(mover.unravel)(recovered.z.reshape(size, -1))),
            potential_energy=energy.reshape(size),
            step_size=jnp.broadcast_to(step_size, (size,)),
            bandwidth=jnp.broadcast_to(learned.bandwidth, (size,)),
            diverging=(flagged > 0).reshape(size),
            gradient=cloud.gradient.reshape(size, -1),
            memory=tuple(x.reshape(size, -1) for x in cloud.memory),
            learned=learned,
            rng_key=rng_key,
            row_seed=None if row_seed is None else jnp.stack([row_seed, last_word(rng_key)]),
            coordinates=coordinates,
            **others,
        )


def last_word(key: jax.Array) -> jax.Array:
    return random.key_data(key).ravel()[-1]


def row_seed(state: ParticleState) -> jax.Array | None:
    """Return the seed of the orders of rows: that of the state, or a new one if the run has a key of its own."""
    if state.row_seed is None:
        return None
    seed, known = state.row_seed
    word = last_word(state.rng_key)
    return jnp.where(word == known, seed, word)


def map_particles(fn, state: ParticleState) -> ParticleState:
    """Apply a function to every array of a state that leads with the particles."""
    return state._replace(**{name: jax.tree.map(fn, getattr(state, name)) for name in _PARTICLE_FIELDS})
