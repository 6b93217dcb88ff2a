"""Warmup of a kernel: iterations that move the cloud and learn, in programs of their own.

`ParticleKernel.init` starts the particles, makes all iterations of warmup, and freezes what they learned. One
iteration does this:

1. Compute the stage of warmup. Each particle's own reference (``SVRG``) is renewed if its epoch is over.
2. While particles arrive: ``num_steps`` updates of each particle by itself, of Metropolis, or of noisy Adam with
   minibatches. If the arrival is prolonged, particles descend together, along the direction of SVGD.
3. Otherwise: the updates of the sampler (``iteration.py``), with what is learned so far.
4. Every learner sees the new cloud, and the count of iterations grows.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
from jax import lax, random
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer
import numpy as np

from numpyro_repulsion.dynamics import Cloud
from numpyro_repulsion.gradients import (
    Particle,
    Sweeps,
    fingerprint,
    likelihood_energies,
    ravel_cloud,
    rows_to_compare,
)
from numpyro_repulsion.kernels.bound import BoundSampler, Settings
from numpyro_repulsion.kernels.iteration import BASINS, Iteration, Keys, coordinate_limit, length_limit
from numpyro_repulsion.kernels.state import Origin, ParticleState, map_particles
from numpyro_repulsion.layout import place_everywhere
from numpyro_repulsion.warmup import (
    LEARNERS,
    Learned,
    Learner,
    Measured,
    Stage,
    WarmupState,
    arrive,
    descend,
    diagnose_warmup,
    svgd_direction,
    update_centering,
    update_prolongation,
    warmup_update,
)

__all__ = [
    "ALL_LEARNERS",
    "NUM_KEYS",
    "Frozen",
    "Warming",
    "WarmupIteration",
    "freeze",
    "keys_of_learners",
    "relabeled",
    "warm",
    "what_is_on",
]


class Warming(NamedTuple):
    """The state of a warmup.

    - **cloud** - the particles in whitened coordinates, ``(G, L, d)``.
    - **warmup** - what is learned so far.
    - **num_updates** - how many updates are done.
    - **rng_key** - the key of the next iteration.
    - **row_seed** - the seed of the orders of rows; ``None`` unless the gradient depends on the number of the update.
    - **start** - the sites of one particle at its start, each ``(1, ...)``, which tell their shapes.
    """

    cloud: Cloud
    warmup: WarmupState
    num_updates: jax.Array
    rng_key: jax.Array
    row_seed: jax.Array | None
    start: Particle


def _update_jumps(key, stage, warmup, cloud, sampler):
    """Update what the kernel's ``moves`` have learned."""
    del key
    if (moves := sampler.bound.kernel.moves) is None:
        return warmup, cloud
    jumps = moves.learn(stage, warmup.jumps, warmup, cloud, sampler.dynamics.temperature)
    return warmup._replace(jumps=jumps), cloud


def _update_basins(key, stage, warmup, cloud, sampler):
    """Update what the jumps between basins have learned."""
    del key
    if warmup.basins is None:
        return warmup, cloud
    basins = BASINS.learn(stage, warmup.basins, warmup, cloud, sampler.dynamics.temperature)
    return warmup._replace(basins=basins), cloud


#: In calling order.
ALL_LEARNERS: tuple[Learner, ...] = (*LEARNERS, _update_jumps, _update_basins)

#: How many of them have a key of their own. That of centering derives from another one, for the models that need it,
#: and that of the prolongation is not used.
NUM_KEYS = len(ALL_LEARNERS) - 2


def keys_of_learners(keys: jax.Array, centers: bool) -> list[jax.Array]:
    """Return a key for each learner, from ``NUM_KEYS`` keys.

    :param centers: whether the learner of centering needs one.
    """
    own = iter(keys)
    others = dict.fromkeys((update_centering, update_prolongation), keys[0])
    if centers:
        others[update_centering] = random.fold_in(keys[0], 1)
    return [others[learner] if learner in others else next(own) for learner in ALL_LEARNERS]


class WarmupIteration(Iteration):
    """A bound sampler in its warmup; what learners use is :class:`~numpyro_repulsion.warmup.Sampler`."""

    @property
    def minibatch_size(self) -> int:
        """The number of rows in a minibatch, of the plate with the fewest."""
        return min((batch for _, batch in self.bound.target.plates.values()), default=1)

    def iterate(self, state: Warming) -> Warming:
        """Make one iteration of warmup."""
        cloud, warmup = state.cloud, state.warmup
        rng_key, keys = Keys.of(state.rng_key, self.num_steps, 1 + NUM_KEYS)
        stage = Stage.of(warmup.iteration, warmup.num_warmup, warmup.arrival.is_prolonged, self.plan.late)
        warmup = self._with_references(stage, cloud, warmup)

        def approach():
            def update(carry, key):
                return self._approach(key, stage, carry, warmup), None

            (position, arrival), _ = lax.scan(update, (cloud[:3], warmup.arrival), keys.updates)
            return Cloud(*position, cloud.memory), warmup._replace(arrival=arrival)

        def travel():
            now, learned = self.move(keys, cloud, self.learned(warmup), state.num_updates)
            moved = warmup._replace(jumps=learned.jumps, basins=learned.basins, reference=learned.reference)
            return now.cloud, moved

        if self.plan.arrives:
            cloud, warmup = lax.cond(stage.is_arriving, approach, travel)
        else:
            cloud, warmup = travel()
        own = keys_of_learners(keys.others[1:], warmup.centering is not None)
        warmup, cloud = warmup_update(own, stage, warmup, cloud, self, ALL_LEARNERS)
        return state._replace(
            cloud=cloud,
            warmup=warmup,
            num_updates=state.num_updates + self.num_steps,
            rng_key=rng_key,
        )

    def learned(self, warmup: WarmupState, is_warmup: bool = True) -> Learned:
        """Return what is learned so far, for updates of the sampler."""
        return Learned.of(warmup, self._gradient_limit(warmup, is_warmup))

    def _gradient_limit(self, warmup, is_warmup) -> Float[Array, ""] | None:
        """Return from where gradients are clipped, if warmup measures their usual size."""
        if self.plan.scale is None or not self.plan.measures or warmup.scales.moments is None:
            return None
        if self.plan.noise:
            # Whitened by the curvature, exact gradients have a variance of 1 at most.
            return coordinate_limit(1.0 + warmup.noise, warmup.moments.position.shape[-1], is_warmup)
        # Whitened positions and gradients have equal variances: 1 for a Gaussian, far more if modes lie apart.
        return length_limit(jnp.fmax(warmup.moments.variances(), 1.0))

    def _approach(self, key, stage, carry, warmup):
        """Make one update of arriving particles, each by itself unless their arrival is prolonged."""
        position, arrival = carry
        move_key, gradient_key = self.noise_and_gradient_keys(key)
        if arrival.is_prolonged is None:
            # Until particles have arrived, they are in the coordinates of the model, whose gradient compiles faster.
            warmup = warmup._replace(scales=warmup.scales._replace(centering=None))
        evaluate = self.energy_and_grad(warmup)

        def energy_and_grad(u):
            return evaluate(gradient_key, u)

        if arrival.adam is None:
            position, steps = arrive(move_key, position, arrival.step_size, energy_and_grad)
            return position, arrival._replace(step_size=steps)
        share_done = stage.share_of_approach.astype(position[0].dtype)
        u, _, slope = position
        if arrival.is_prolonged is not None:
            slope = lax.cond(arrival.is_prolonged, svgd_direction, lambda u, gradient: gradient, u, slope)
        rate, temperature = arrival.step_size, arrival.temperature
        position, adam, rates = descend(
            move_key, position, slope, arrival.adam, rate, share_done, temperature, energy_and_grad
        )
        return position, arrival._replace(step_size=rates, adam=adam)

    def _with_references(self, stage, cloud, warmup):
        """Renew each particle's own reference, if its epoch is over or a measurement is near."""
        reference = warmup.reference
        if reference is None or self.plan.epoch is None:
            return warmup
        # At the end of each window, warmup tests whether references help, even if they are not in use.
        is_needed = ~(stage.is_arriving & self.plan.arrives)
        # Renew them half an epoch before that, so that warmup measures their average noise.
        is_middle = stage.until_end == (self.plan.epoch // self.num_steps + 1) // 2
        is_new = ~reference.data.any()
        due = is_needed & (is_new | is_middle | (reference.age >= self.plan.epoch))
        return warmup._replace(reference=self.renewed(due, cloud, warmup, reference, is_new))

    def energy_on_common_rows(self, warmup: WarmupState, u: Float[Array, "*particles d"]) -> Float[Array, "*particles"]:
        """Return U at all particles on the same rows, with the same randomness, ``(G, L)``."""
        target = self.target(warmup)
        one = jnp.vectorize(lambda z: fingerprint(target, self.unravel, z), signature="(d)->()")
        return one(warmup.preconditioner.to_positions(u))

    def energies_to_compare(self, *places: tuple[WarmupState, Cloud]) -> list[Float[Array, "*particles"]]:
        """Return energies of the likelihood alone, on the same rows for all; or U, where all rows are used."""
        if not self.bound.target.plates:
            return [cloud.potential_energy for _, cloud in places]
        rows = rows_to_compare(self.bound.target)

        def energies(place):
            centering, z = place
            target = self.bound.target if centering is None else self.centered(centering)
            particles = jax.vmap(self.unravel)(z.reshape(-1, z.shape[-1]))
            return likelihood_energies(target, particles, rows).reshape(z.shape[:-1]).astype(z.dtype)

        own = [(state.centering, state.preconditioner.to_positions(cloud.z)) for state, cloud in places]
        # A loop, so that the model is compiled once.
        return list(lax.map(energies, jax.tree.map(lambda *x: jnp.stack(x), *own)))


def _iteration(bound: BoundSampler, state: Warming) -> WarmupIteration:
    """Return the iteration of a warmup."""
    bound = bound.within(state.num_updates)
    plan, data = bound.plan(state.warmup.preconditioner.kind), state.warmup.data
    unravel = ravel_cloud(state.start)[1]
    data = None if data is None else jnp.maximum(data, 1)
    return WarmupIteration(bound, plan, unravel, state.row_seed, data, bound.kernel.schedule)


def warm(bound: BoundSampler, _: None, state: Warming, number: Integer[Array, ""] | int) -> Warming:
    """Make a number of iterations of warmup."""
    state = place_everywhere(state)
    iteration = _iteration(bound, state)
    cloud = iteration.layout(state.cloud.z).place(state.cloud)
    state = lax.fori_loop(0, number, lambda _, state: iteration.iterate(state), state._replace(cloud=cloud))
    return place_everywhere(state)


def relabeled(state: Warming, data: np.ndarray | None) -> Warming:
    """Return the state of a warmup of the same run whose data and model have another identity, as by another JAX."""
    warmup, reference = state.warmup, state.warmup.reference
    if data is None or warmup.data is None:
        return state
    if reference is not None:
        reference = reference._replace(data=jnp.where(reference.data.any(), data, reference.data))
    return state._replace(warmup=warmup._replace(data=jnp.asarray(data), reference=reference))


def what_is_on(kernel: Settings, warmup: WarmupState) -> tuple[bool, bool, bool]:
    """Return whether warmup left the reference, the jumps and the basins in use, as numbers of the host."""
    reference, moves, basins = warmup.reference, kernel.moves, warmup.basins
    return (
        reference is not None and bool(reference.in_use),
        moves is not None and bool(moves.is_on(warmup.jumps)),
        basins is not None and bool(basins.is_on),
    )


class Frozen(NamedTuple):
    """How a state is made of a warmup; static.

    - **on** - whether the reference, the jumps and the basins are in use.
    - **has_warmed**, **passes** - those of the state's :class:`Origin`.
    - **iteration** - how many iterations count as done.
    - **is_single** - whether the state is that of a single plain chain.
    """

    on: tuple[bool, bool, bool]
    has_warmed: bool
    passes: bool
    iteration: int
    is_single: bool


def freeze(bound: BoundSampler, how: Frozen, state: Warming) -> ParticleState:
    """Return the state from which draws are made, with all that warmup learned."""
    iteration, kernel, warmup = _iteration(bound, state), bound.kernel, state.warmup
    plan, measured, problems = iteration.plan, None, None
    if how.has_warmed and (plan.measures or plan.jumps):
        is_jumping = None if kernel.moves is None else jnp.asarray(how.on[1])
        measured = Measured.of(warmup, kernel.dynamics)
        needs_reference = not isinstance(kernel.gradient, Sweeps)
        problems = diagnose_warmup(warmup, plan.step_size, kernel.dynamics, is_jumping, needs_reference)
    limited = iteration.learned(warmup, is_warmup=False) if how.has_warmed else Learned.of(warmup, None)
    cloud = place_everywhere(state.cloud)
    found = ParticleState.of(
        iteration,
        cloud,
        limited.completed(warmup, measured, problems, how.on),
        iteration.step_size(limited, jnp.maximum(state.num_updates - 1, 0)),
        jnp.zeros(cloud.potential_energy.shape, int),
        state.rng_key,
        state.row_seed,
        iteration=jnp.asarray(how.iteration, jnp.int32),
        num_warmup=warmup.num_warmup,
        num_updates=state.num_updates,
        num_flagged_updates=jnp.zeros((), jnp.int32),
        origin=Origin.of(kernel, bound.gradient, how.has_warmed, how.passes),
    )
    return place_everywhere(map_particles(lambda x: x[0], found) if how.is_single else found)
