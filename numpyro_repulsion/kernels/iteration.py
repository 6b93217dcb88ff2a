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

import jax
from jax import lax, random
import jax.numpy as jnp

from numpyro_repulsion.dynamics import Cloud, reject_nonfinite, select, turn_back
from numpyro_repulsion.interactions import Interaction
from numpyro_repulsion.kernels.clipping import clip, clip_coordinates
from numpyro_repulsion.kernels.evaluation import Evaluation
from numpyro_repulsion.kernels.learners import ALL_LEARNERS, BASINS, counted, keys_of_learners
from numpyro_repulsion.kernels.progress import Keys, Progress
from numpyro_repulsion.shapes import Count
from numpyro_repulsion.warmup import (
    Stage,
    WarmupState,
    arrive,
    descend,
    svgd_direction,
    warmup_update,
)

__all__ = ["Iteration"]


@dataclass(frozen=True, eq=False)
class Iteration(Evaluation):
    """A bound sampler that moves a cloud ``(G, L, d)`` in whitened coordinates.

    - **schedule** - the schedule of step sizes, or ``None`` if the step size is measured.
    """

    schedule: Callable | None

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
            warmup = warmup._replace(scales=warmup.scales._replace(centring=None))
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
        own = keys_of_learners(keys.learners, warmup.scales.centring is not None)
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
