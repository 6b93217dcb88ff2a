"""One MCMC iteration of a cloud: its updates, and what warmup learns from it.

`ParticleKernel.sample` makes one iteration in this order:

1. Check the state, whiten the positions, split the random key, and compute the stage of warmup.
2. `recognize_data`: compare the data with those of the reference point, so that a reference on other data is evaluated
   again. Each particle's own reference (``SVRG``) is renewed here if its epoch is over.
3. `move`, while particles arrive: ``num_steps`` updates of each particle by itself, of Metropolis, or of noisy Adam
   with minibatches. If the arrival is prolonged, particles descend together, along the direction of SVGD.
4. `move`, otherwise: if warmup found several basins, one jump between them. Then ``num_steps`` updates. With ``moves``
   switched on, every second update is a jump. Each remaining update

   a. flags particles whose gradient had to be clipped because it was far too long,
   b. steps by the dynamics, with a new minibatch,
   c. turns particles back that gain far too much energy, if they have momenta and exact gradients, and flags them,
   d. rejects a proposal that is not finite: the particle stays where it was, and is flagged.

5. Count the flagged updates (not those of a warmup that has an arrival).
6. `learn`: every learner of warmup sees the new cloud, and the count of iterations grows. After warmup the learners
   change nothing, except a common reference that has to be evaluated on other data.
7. Return the new state, with positions in the coordinates of the model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
import math
from typing import NamedTuple, cast

import jax
from jax import lax, random
import jax.numpy as jnp
import numpy as np

from numpyro_repulsion.dynamics import Cloud, Dynamics, reject_nonfinite, select, turn_back
from numpyro_repulsion.gradients import (
    CenteredTarget,
    Centering,
    ModelTarget,
    Recovered,
    Reference,
    Target,
    evaluate_reference,
    fingerprint,
    likelihood_energies,
    rows_to_compare,
)
from numpyro_repulsion.interactions import Interaction
from numpyro_repulsion.kernels.bound import BoundSampler
from numpyro_repulsion.layout import Layout
from numpyro_repulsion.moves import Basins
from numpyro_repulsion.shapes import Count, Counts, Flag, Flags, Numbers, Scalar, Vector, Vectors
from numpyro_repulsion.warmup import (
    LEARNERS,
    ArrivalState,
    Learner,
    Stage,
    WarmupPlan,
    WarmupState,
    arrive,
    descend,
    svgd_direction,
    update_centering,
    update_prolongation,
    warmup_update,
)

__all__ = [
    "ALL_LEARNERS",
    "BASINS",
    "NUM_KEYS",
    "Iteration",
    "Keys",
    "Progress",
    "clip",
    "clip_coordinates",
    "counted",
    "keys_of_learners",
]


class Keys(NamedTuple):
    """The random keys of an iteration, all from one split, because each split takes a tenth of a second to compile.

    - **basins** - the key for jumps that switch themselves on.
    - **learners** - one key for each learner but those of centering and of the prolongation, ``(n,)``.
    - **updates** - one key for each update, ``(num_steps,)``.
    """

    basins: jax.Array
    learners: jax.Array
    updates: jax.Array

    @staticmethod
    def of(key: jax.Array, num_steps: int, num_learners: int) -> tuple[jax.Array, Keys]:
        """Return the key of the next iteration, and the keys of this one."""
        number = 2 + num_learners
        keys = random.split(key, number + num_steps)
        return keys[0], Keys(keys[1], keys[2:number], keys[number:])


class Progress(NamedTuple):
    """The quantities that updates change.

    - **cloud** - the particles.
    - **num_updates** - how many updates are done.
    - **flagged** - how many updates of the iteration were rejected, turned back or had a clipped gradient, ``(G, L)``.
    - **has_turned** - which particles were turned back in the last update, ``(G, L)``.
    - **arrival** - how particles arrive.
    - **tally** - the number of jumps and the sum of their acceptance probabilities, or ``None``.
    """

    cloud: Cloud
    num_updates: Count
    flagged: Counts
    has_turned: Flags
    arrival: ArrivalState
    tally: tuple[Scalar, Scalar] | None


#: Jumps that switch themselves on if warmup finds several basins.
BASINS = Basins()


def counted(tally, jumped):
    """Return the tally with one more jump: the number of jumps and the sum of their acceptance probabilities."""
    number, total = tally
    return number + 1, total + jumped.probability.mean()


def _update_jumps(key, stage, warmup, cloud, sampler):
    """Update what the kernel's ``moves`` have learned."""
    del key
    if (moves := sampler.bound.kernel.moves) is None:
        return warmup, cloud
    state = warmup.jumps
    jumps = lax.cond(
        stage.is_warmup,
        lambda: moves.learn(stage, state, warmup, cloud, sampler.dynamics.temperature),
        lambda: state,
    )
    return warmup._replace(jumps=jumps), cloud


def _update_basins(key, stage, warmup, cloud, sampler):
    """Update what the jumps between basins have learned."""
    del key
    if warmup.basins is None or not sampler.plan.basins:
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


#: Gradients longer than this many times their expected length in whitened coordinates are clipped.
GRADIENT_LIMIT = 20.0
#: With minibatches, so is each coordinate longer than this many times its expected size: in warmup, whose steps are
#: longer; and after it, for up to eight coordinates and for each further doubling of their number. Noise of parameters
#: that few rows inform has exponential tails: of 1,000 random intercepts, one exceeds 10 in 6 % of the updates, but 20
#: in 0.06 % (tests/kernels/test_clipping.py); and more often where the expected size, which is measured on a few
#: minibatches, is too small. For half of it the factor per doubling is twice that of the tails.
WARMUP_LIMIT, COORDINATE_LIMIT, LIMIT_PER_DOUBLING = 6.0, 10.0, 2.8
#: A clipped gradient is recognized by reaching the limit, but for rounding.
AT_LIMIT = 1.0 - 1e-4


def clip(gradient: Vectors, variances: Vector | Scalar) -> tuple[Vectors, Flags]:
    """Return gradients clipped by their length, and which of them reach the limit.

    :param gradient: in whitened coordinates, ``(G, L, d)``.
    :param variances: those expected of the gradient, ``(d,)``.
    :return: gradients, and flags ``(G, L)``.
    """
    limit = GRADIENT_LIMIT * jnp.sqrt(jnp.sum(jnp.broadcast_to(variances, gradient.shape[-1:])))
    length = jnp.linalg.norm(gradient, axis=-1)
    is_clipped = length > AT_LIMIT * limit
    return gradient * jnp.minimum(limit / jnp.where(length > 0, length, 1.0), 1.0)[..., None], is_clipped


def clip_coordinates(gradient: Vectors, variance: Scalar, is_warmup: Flag) -> tuple[Vectors, Flags]:
    """Return gradients clipped by coordinate, and which of them reach the limit.

    One long coordinate, as in the neck of a funnel, would send a particle off.

    :param variance: that expected of a coordinate, a scalar; see also :func:`clip`.
    """
    usual = COORDINATE_LIMIT + LIMIT_PER_DOUBLING * max(0.0, math.log2(gradient.shape[-1] / 8))
    limit = jnp.where(is_warmup, WARMUP_LIMIT, usual) * jnp.sqrt(variance)
    return jnp.clip(gradient, -limit, limit), (jnp.abs(gradient) > AT_LIMIT * limit).any(-1)


@dataclass(frozen=True, eq=False)
class Iteration:
    """A bound sampler that moves a cloud ``(G, L, d)`` in whitened coordinates.

    - **bound** - the kernel and the posterior.
    - **plan** - what its warmup learns.
    - **unravel** - the function from flat positions to those of the sites.
    - **row_seed** - the seed of the orders of rows, for gradients that depend on the number of the update.
    - **data** - the identity of the posterior; ``None`` without references, and where the data have no values.
    - **schedule** - the schedule of step sizes, or ``None`` if the step size is measured.
    """

    bound: BoundSampler
    plan: WarmupPlan
    unravel: Callable
    row_seed: Count
    data: np.ndarray | None
    schedule: Callable | None

    @property
    def dynamics(self) -> Dynamics:
        return self.bound.kernel.dynamics

    @property
    def interaction(self) -> Interaction:
        return self.bound.kernel.interaction

    @property
    def num_steps(self) -> int:
        return self.bound.kernel.num_steps

    @property
    def shares_minibatches(self) -> bool:
        return self.bound.gradient.shared

    @property
    def minibatch_size(self) -> int:
        """The number of rows in a minibatch, of the plate with the fewest."""
        return min((batch for _, batch in self.bound.target.plates.values()), default=1)

    def target(self, warmup: WarmupState) -> Target:
        """Return the posterior in the coordinates that the preconditioner whitens."""
        centering, target = warmup.scales.centering, self.bound.target
        return target if centering is None else self.centered(centering)

    def layout(self, u: Vectors) -> Layout:
        """Return how a cloud lies on the devices."""
        shape = u.shape[0], u.shape[1], u.shape[2]
        return Layout.of(shape, self.interaction.interacts or self.dynamics.interacts)

    def recover(self, warmup: WarmupState, u: Vectors) -> Recovered:
        """Return the particles ``(..., d)`` in the coordinates of the model."""
        y = warmup.scales.preconditioner.to_positions(u)
        target = self.target(warmup)
        if not isinstance(target, CenteredTarget):
            return Recovered.of(y, jnp.zeros_like(y), jnp.ones_like(y), jnp.zeros_like(y))
        return jax.tree.map(lambda x: x.reshape(y.shape), jax.vmap(target.recover)(y.reshape(-1, y.shape[-1])))

    def centered(self, centering: Centering) -> CenteredTarget:
        """Return the posterior in coordinates of another centering."""
        # Only models have sites that can be centered.
        return CenteredTarget(cast(ModelTarget, self.bound.target), centering, self.unravel)

    def energy_and_grad(self, warmup: WarmupState, num_updates: Count | None = None) -> Callable:
        """Return ``(key, u) -> (U, ∇U)``; an optional third argument says whether to use control variates.

        :param num_updates: how many updates were done before; ``None`` for rows that no update depends on.
        """
        gradient, target = self.bound.gradient, self.target(warmup)
        if num_updates is not None:
            gradient = gradient.at(num_updates, self.row_seed)
        change, reference = warmup.scales.preconditioner, warmup.reference
        if reference is not None:
            reference = reference._replace(in_use=reference.in_use & ~reference.is_stale)

        def energy_and_grad(key, u, corrected=None):
            used = reference if reference is None or corrected is None else reference._replace(in_use=corrected)
            layout = self.layout(u)
            z = layout.place_particles(change.to_positions(u))
            found = layout.place_particles(gradient.energy_and_grad(key, target, self.unravel, z, used))
            energy, slope = layout.place(found)
            return energy, change.whiten_gradient(slope)

        return energy_and_grad

    def energy_on_common_rows(self, warmup: WarmupState, u: Vectors) -> Numbers:
        """Return U at all particles on the same rows, with the same randomness, ``(G, L)``."""
        target = self.target(warmup)
        one = jnp.vectorize(lambda z: fingerprint(target, self.unravel, z), signature="(d)->()")
        return one(warmup.scales.preconditioner.to_positions(u))

    def energies_to_compare(self, *places: tuple[WarmupState, Cloud]) -> list[Numbers]:
        """Return energies of the likelihood alone, on the same rows for all; or U, where all rows are used."""
        if not self.bound.target.plates:
            return [cloud.potential_energy for _, cloud in places]
        rows = rows_to_compare(self.bound.target)

        def energies(place):
            centering, z = place
            target = self.bound.target if centering is None else self.centered(centering)
            particles = jax.vmap(self.unravel)(z.reshape(-1, z.shape[-1]))
            return likelihood_energies(target, particles, rows).reshape(z.shape[:-1]).astype(z.dtype)

        own = [(state.scales.centering, state.scales.preconditioner.to_positions(cloud.z)) for state, cloud in places]
        # A loop, so that the model is compiled once.
        return list(lax.map(energies, jax.tree.map(lambda *x: jnp.stack(x), *own)))

    def evaluate_reference(self, key: jax.Array, warmup: WarmupState, reference: Reference, cloud: Cloud) -> Reference:
        """Return the reference with U and ∇U over all rows at its position."""
        new = evaluate_reference(key, self.target(warmup), self.unravel, reference, cloud.potential_energy.size)
        if self.data is not None:
            return new._replace(data=jnp.asarray(self.data, jnp.uint32))
        # What the host said last. Any words say that there is a reference.
        first = 1 if warmup.data is None else jnp.maximum(warmup.data, 1)
        return new._replace(data=jnp.asarray(jnp.where(reference.data.any(), reference.data, first), jnp.uint32))

    def step_size(self, warmup: WarmupState, num_updates: jax.Array) -> jax.Array:
        """Return ε of the next update."""
        value = warmup.step.size if self.schedule is None else self.schedule(num_updates)
        return jnp.asarray(value, warmup.step.size.dtype)

    def begin(self, cloud: Cloud, num_updates: Count, warmup: WarmupState) -> Progress:
        """Return the quantities that updates change, before the first update of an iteration."""
        return Progress(
            cloud,
            num_updates,
            jnp.zeros(warmup.arrival.step_size.shape, int),
            jnp.zeros(warmup.arrival.step_size.shape, bool),
            warmup.arrival,
            warmup.jumps.tally if self.bound.kernel.moves is not None and warmup.jumps is not None else None,
        )

    def ended(self, now: Progress, warmup: WarmupState, num_steps: int | None = None) -> WarmupState:
        """Return the warmup state after the last update of an iteration.

        :param num_steps: how many updates it made; ``None`` for those of the kernel.
        """
        if now.tally is not None and warmup.jumps is not None:
            warmup = warmup._replace(jumps=warmup.jumps._replace(tally=now.tally))
        if warmup.reference is not None and self.plan.epoch is not None:
            age = warmup.reference.age + (self.num_steps if num_steps is None else num_steps)
            return warmup._replace(reference=warmup.reference._replace(age=age))
        return warmup

    def move(self, keys: Keys, stage: Stage, cloud: Cloud, warmup: WarmupState, num_updates: jax.Array):
        """Make ``num_steps`` updates.

        :param num_updates: how many updates were done before.
        :return: the progress, the new warmup state, and the step sizes last used, ``(G, L)``.
        """
        start = self.begin(cloud, num_updates, warmup)

        def approach():
            now, _ = lax.scan(lambda now, key: (self._approach(key, stage, now, warmup), None), start, keys.updates)
            return now, warmup.basins, now.arrival.step_size

        def travel():
            now, basins = self.jump_between_basins(keys.basins, start, warmup)
            now, _ = lax.scan(lambda now, key: (self._update(key, now, warmup), None), now, keys.updates)
            in_use = jnp.broadcast_to(self.step_size(warmup, now.num_updates - 1), now.flagged.shape)
            return now, basins, in_use

        if self.plan.arrives and warmup.scales.moments is not None:
            now, basins, in_use = lax.cond(stage.is_arriving, approach, travel)
        else:
            now, basins, in_use = travel()
        return now, self.ended(now, warmup._replace(arrival=now.arrival, basins=basins)), in_use

    def _noise_and_gradient_keys(self, key):
        """Return keys for noise and gradient; the same if the gradient is not random, because a split takes a tenth of
        a second to compile."""
        return random.split(key) if self.plan.noise else (key, key)

    def _approach(self, key, stage, now, warmup):
        """Make one update of arriving particles, each by itself unless their arrival is prolonged."""
        move_key, gradient_key = self._noise_and_gradient_keys(key)
        if warmup.arrival.is_prolonged is None:
            # Until particles have arrived, they are in the coordinates of the model, whose gradient compiles faster.
            warmup = warmup._replace(scales=warmup.scales._replace(centering=None))
        evaluate = self.energy_and_grad(warmup)
        arrival, position = now.arrival, now.cloud[:3]

        def energy_and_grad(u):
            return evaluate(gradient_key, u)

        if arrival.adam is None:
            position, steps = arrive(move_key, position, arrival.step_size, energy_and_grad)
            arrival = arrival._replace(step_size=steps)
        else:
            share_done = stage.share_of_approach.astype(position[0].dtype)
            u, _, slope = position
            if arrival.is_prolonged is not None:
                slope = lax.cond(arrival.is_prolonged, svgd_direction, lambda u, gradient: gradient, u, slope)
            position, adam, rates = descend(
                move_key,
                position,
                slope,
                arrival.adam,
                arrival.step_size,
                share_done,
                arrival.temperature,
                energy_and_grad,
            )
            arrival = arrival._replace(step_size=rates, adam=adam)
        cloud = Cloud(*position, now.cloud.memory)
        return now._replace(cloud=cloud, arrival=arrival, num_updates=now.num_updates + 1)

    def _update(self, key, now, warmup):
        """Make one update by the dynamics, or by a jump if ``moves`` are on and the update is odd."""
        interaction_key = None
        if self.interaction.is_redrawn:
            key, interaction_key = random.split(key)
        interaction = self.interaction.at(interaction_key, now.num_updates)
        noise_key, gradient_key = self._noise_and_gradient_keys(key)
        return self.advance(noise_key, gradient_key, interaction, now, warmup)

    def advance(
        self,
        noise_key: jax.Array,
        gradient_key: jax.Array,
        interaction: Interaction,
        now: Progress,
        warmup: WarmupState,
    ) -> Progress:
        """Make one update with the interaction of this update, or a jump."""
        energy_and_grad = self.energy_and_grad(warmup, now.num_updates)

        def step(now):
            # Once more, because scales and other data change the limits.
            gradient, is_clipped = self._clipped(now.cloud.gradient, warmup)
            cloud = now.cloud._replace(gradient=gradient)

            def clipped(u):
                energy, gradient = energy_and_grad(gradient_key, u)
                return energy, self._clipped(gradient, warmup)[0]

            proposal = self.dynamics.step(
                noise_key,
                cloud,
                clipped,
                lambda u: interaction.couple(u, warmup.bandwidth),
                self.step_size(warmup, now.num_updates),
            )
            turns = jnp.zeros_like(is_clipped)
            if not self.plan.noise:
                proposal, turns = turn_back(cloud, proposal, self.dynamics, now.has_turned)
            cloud, is_rejected = reject_nonfinite(cloud, self.layout(cloud.z).place(proposal))
            flagged = now.flagged + (is_rejected | turns | is_clipped)
            return now._replace(cloud=cloud, flagged=flagged, has_turned=turns)

        moves = self.bound.kernel.moves

        def jump(now):
            jumped = self._jump(moves, noise_key, gradient_key, now.cloud, warmup.jumps, warmup)
            return now._replace(
                cloud=self.dynamics.jumped(jumped.cloud, jumped.accepted), tally=counted(now.tally, jumped)
            )

        if now.tally is None or moves is None:
            now = step(now)
        else:
            now = lax.cond(moves.is_on(warmup.jumps) & (now.num_updates % 2 == 1), jump, step, now)
        return now._replace(num_updates=now.num_updates + 1)

    def jump_between_basins(self, key, now, warmup):
        """Jump between basins if warmup found several; return the progress and the state of these jumps."""
        state = warmup.basins
        # A state from another kernel may have basins, although this kernel's energies come from minibatches.
        if state is None or not self.plan.basins:
            return now, state

        def jump():
            # Particles jump only by gradients of all rows, which need no key.
            jumped = self._jump(BASINS, key, key, now.cloud, state, warmup)
            basins = state._replace(tally=counted(state.tally, jumped))
            return now._replace(cloud=self.dynamics.jumped(jumped.cloud, jumped.accepted)), basins

        return lax.cond(BASINS.is_on(state), jump, lambda: (now, state))

    def _jump(self, moves, key, gradient_key, cloud, state, warmup):
        """Propose a jump for every particle, and accept or reject it."""
        energy_and_grad = self.energy_and_grad(warmup)
        is_stratified = not (self.interaction.interacts or self.dynamics.interacts)
        return moves.jump(
            key, cloud, state, lambda u: energy_and_grad(gradient_key, u), self.dynamics.temperature, is_stratified
        )

    def recognize_data(self, stage: Stage, cloud: Cloud, warmup: WarmupState) -> WarmupState:
        """Mark a common reference as stale if the data are others than those it was computed from.

        Each particle's own reference is renewed here, if its epoch is over or the data changed.
        """
        reference = warmup.reference
        if reference is None:
            return warmup
        is_new = ~reference.data.any()
        is_other = reference.is_stale
        if self.data is not None:
            is_other |= ~is_new & (reference.data != self.data).any()
        if self.plan.epoch is None:
            return warmup._replace(reference=reference._replace(is_stale=is_other))
        is_needed, is_middle = reference.in_use, jnp.zeros((), bool)
        if warmup.scales.moments is not None:
            # At the end of each window, warmup tests whether references help, even if they are not in use.
            is_needed |= stage.is_warmup
            is_needed &= ~(stage.is_arriving & self.plan.arrives)
            # Renew them half an epoch before that, so that warmup measures their average noise.
            is_middle = stage.until_end == (self.plan.epoch // self.num_steps + 1) // 2
        is_stale = is_new | is_other
        due = is_needed & (is_stale | is_middle | (reference.age >= self.plan.epoch))
        return warmup._replace(reference=self._renew(due, cloud, warmup, reference, is_stale))

    def _renew(self, due, cloud, warmup, reference, is_stale):
        """Move each particle's reference to its current position, if that is due."""

        def renew():
            here = reference._replace(position=warmup.scales.preconditioner.to_positions(cloud.z))
            # Only random likelihoods would use the key, and `choose_gradient` rejects them.
            new = self.evaluate_reference(random.key(0), warmup, here, cloud)
            # An old reference is as valid as a new one, and with a non-finite one all updates would be rejected.
            usable = (jnp.isfinite(new.potential_energy) & jnp.isfinite(new.gradient).all(-1)) | is_stale
            position, energy, gradient = select(usable, new[:3], reference[:3])
            return new._replace(position=position, potential_energy=energy, gradient=gradient)

        return lax.cond(due, renew, lambda: reference)

    def learn(self, keys: Keys, stage: Stage, cloud: Cloud, warmup: WarmupState) -> tuple[Cloud, WarmupState]:
        """Count the iteration, and update the warmup state and the cloud by all learners."""
        if warmup.scales.moments is None:
            return cloud, warmup._replace(iteration=stage.done)
        own = keys_of_learners(keys.learners, warmup.scales.centering is not None)
        warmup, cloud = warmup_update(own, stage, warmup, cloud, self, ALL_LEARNERS)
        return cloud, warmup

    def _clipped(self, gradient, warmup):
        """Clip gradients that are far too long, if their expected length is known; also return which ones."""
        if self.plan.scale is None or not self.plan.measures or warmup.step.measurements is None:
            return gradient, jnp.zeros(gradient.shape[:-1], bool)
        if self.plan.noise:
            # Whitened by the curvature, exact gradients have a variance of 1 at most.
            return clip_coordinates(gradient, 1.0 + warmup.noise, warmup.iteration < warmup.num_warmup)
        # Whitened positions and gradients have equal variances: 1 for a Gaussian, far more if modes lie apart.
        return clip(gradient, jnp.fmax(warmup.scales.moments.variances(), 1.0))
