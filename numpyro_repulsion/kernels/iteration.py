"""One MCMC iteration of a cloud: its updates, and at the ends of warmup's windows what is learned from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax import lax, random
import jax.numpy as jnp
import numpy as np

from numpyro_repulsion.adaptation import LEARNERS, Learned, Learner, Stage, Tuning, arrive, warmup_update
from numpyro_repulsion.dynamics import Cloud, Dynamics, hold, select
from numpyro_repulsion.gradients import Anchor, anchored, fingerprint
from numpyro_repulsion.interactions import Interaction
from numpyro_repulsion.kernels.bound import BoundSampler
from numpyro_repulsion.moves import jump_between_basins, learn_basins
from numpyro_repulsion.schedules import Cyclical

__all__ = ["Iteration", "Progress"]

#: A gradient longer than this many times what whitened coordinates lead one to expect is cut, and the particle flagged.
GRADIENT_LIMIT = 20.0
#: A number that no count of updates reaches: keys of what happens once in an iteration.
ONCE = np.uint32(2**32 - 1)


class Progress(NamedTuple):
    """What updates change.

    - **cloud** - the particles.
    - **num_updates** - how many were done.
    - **flagged** - in how many updates of the iteration each particle was held or its gradient cut, ``(G, L)``.
    - **arrival** - the step sizes of the particles while they arrive, ``(G, L)``.
    - **reference** - the references of control variates, where they are renewed between updates, or ``None``.
    - **tally** - how many jumps there were, and the sum of their acceptances, or ``None``.
    """

    cloud: Cloud
    num_updates: jax.Array
    flagged: jax.Array
    arrival: jax.Array
    reference: Anchor | None
    tally: tuple[jax.Array, jax.Array] | None


@dataclass(frozen=True, eq=False)
class Iteration:
    """A bound sampler, joined to a state to move a cloud of shape ``(G, L, d)`` in whitened coordinates.

    - **bound** - the kernel and the posterior.
    - **learned** - what its warmup learns.
    - **unravel** - from flat positions to those of the sites.
    - **schedule** - of step sizes, or ``None`` where these are measured.
    """

    bound: BoundSampler
    learned: Learned
    unravel: Callable
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

    def force(self, tuning: Tuning) -> Callable:
        """``(key, u) -> (U, ∇U)``, and with a third argument whether control variates are in use."""
        change, reference = tuning.preconditioner, tuning.anchor
        if reference is not None:
            reference = reference._replace(in_use=reference.in_use & ~reference.is_stale)

        def force(key, u, corrected=None):
            used = reference if reference is None or corrected is None else reference._replace(in_use=corrected)
            energy, slope = self.bound.gradient.force(key, self.bound.target, self.unravel, change.colour(u), used)
            return energy, change.pull(slope)

        return force

    def score(self, tuning: Tuning, u: jax.Array) -> jax.Array:
        """U at the particles on the same rows, by the same randomness, ``(G, L)``."""
        one = jnp.vectorize(lambda z: fingerprint(self.bound.target, self.unravel, z), signature="(d)->()")
        return one(tuning.preconditioner.colour(u))

    def evaluate_reference(self, key: jax.Array, reference: Anchor, cloud: Cloud) -> Anchor:
        """The reference with U and ∇U over all rows at its position."""
        return anchored(key, self.bound.target, self.unravel, reference, cloud.potential_energy.size)

    def step_size(self, tuning: Tuning, num_updates: jax.Array) -> jax.Array:
        """ε of the next update."""
        value = tuning.step_size if self.schedule is None else self.schedule(num_updates)
        return jnp.asarray(value, tuning.step_size.dtype)

    @property
    def _cycle(self):
        return self.schedule if isinstance(self.schedule, Cyclical) else None

    @property
    def _renews_within(self):
        """Whether references are renewed between updates: the iteration with the hot part of a cycle may be longer
        than an epoch."""
        return self._cycle is not None and self.learned.epoch is not None

    def move(self, key: jax.Array, stage: Stage, cloud: Cloud, tuning: Tuning, num_updates: jax.Array):
        """``num_steps`` updates, and before them the hot part of a cycle where one begins.

        :param num_updates: how many were done before.
        :return: what became of the particles, the tuning, and the step sizes last used, ``(G, L)``.
        """
        self._check_jumps(tuning)
        start = Progress(
            cloud,
            num_updates,
            jnp.zeros(tuning.arrival.shape, int),
            tuning.arrival,
            tuning.anchor if self._renews_within else None,
            tuning.jumps.tally if self.bound.kernel.moves is not None else None,
        )

        def approach():
            now = self._repeat(key, num_updates, start, lambda key, now: self._approach(key, now, tuning))
            return now, tuning.basins, now.arrival

        def travel():
            now, basins = self._jump_between_basins(random.fold_in(key, ONCE), start, tuning)
            now = self._repeat(key, num_updates, now, lambda key, now: self._update(key, now, tuning))
            in_use = jnp.broadcast_to(self.step_size(tuning, now.num_updates - 1), now.flagged.shape)
            return now, basins, in_use

        if self.learned.arrives and tuning.moments is not None:
            now, basins, in_use = lax.cond(stage.is_arriving, approach, travel)
        else:
            now, basins, in_use = travel()
        tuning = tuning._replace(arrival=now.arrival, basins=basins)
        if now.tally is not None:
            tuning = tuning._replace(jumps=tuning.jumps._replace(tally=now.tally))
        if now.reference is not None:
            tuning = tuning._replace(anchor=now.reference)
        elif tuning.anchor is not None and self.learned.epoch is not None:
            tuning = tuning._replace(anchor=tuning.anchor._replace(age=tuning.anchor.age + self.num_steps))
        return now, tuning, in_use

    def _check_jumps(self, tuning):
        """A kernel without moves may go on from the state of one with them, but not the other way round."""
        if (moves := self.bound.kernel.moves) is not None and tuning.jumps is None:
            raise ValueError(
                f"moves={moves!r} jumps by an archive of warmup, and this state is of a kernel without `moves`: "
                "warm up with them, or drop them."
            )

    def _repeat(self, key, num_updates, progress, update):
        """As many updates as belong to the iteration."""
        if self._cycle is None:
            keys = random.split(key, self.num_steps)
            return lax.scan(lambda now, key: (update(key, now), None), progress, keys)[0]
        # Hot and cold updates in one loop, so that they are compiled once.
        done = num_updates + self.num_steps + self._cycle.num_ahead(num_updates, self.num_steps)
        return lax.fori_loop(num_updates, done, lambda i, now: update(random.fold_in(key, i), now), progress)

    def _approach(self, key, now, tuning):
        """An update of particles that arrive, each by itself."""
        move_key, force_key = random.split(key)
        force = self.force(tuning)
        position, steps = arrive(
            move_key, now.cloud[:3], now.arrival, lambda u: force(force_key, u), self.learned.noise
        )
        cloud = Cloud(*position, now.cloud.memory)
        return now._replace(cloud=cloud, arrival=steps, num_updates=now.num_updates + 1)

    def _update(self, key, now, tuning):
        """An update by the dynamics, or by a jump where its turn has come."""
        if self._renews_within:
            due = now.reference.in_use & (now.reference.age >= self.learned.epoch)
            own = self._renew(due, now.cloud, tuning, now.reference, jnp.zeros((), bool))
            tuning = tuning._replace(anchor=own)
            now = now._replace(reference=own._replace(age=own.age + 1))
        interaction_key = None
        if self.interaction.is_redrawn:
            key, interaction_key = random.split(key)
        interaction = self.interaction.at(interaction_key, now.num_updates)
        noise_key, force_key = random.split(key)
        force = self.force(tuning)

        def step(now):
            cloud, is_cut = self._cut(now.cloud, tuning)
            proposal = self.dynamics.step(
                noise_key,
                cloud,
                lambda u: force(force_key, u),
                lambda u: interaction.couple(u, tuning.bandwidth),
                self.step_size(tuning, now.num_updates),
            )
            cloud, is_held = hold(cloud, proposal)
            return now._replace(cloud=cloud, flagged=now.flagged + (is_held | is_cut))

        moves: Any = self.bound.kernel.moves

        def jump(now):
            moved, jumped, probability = moves.jump(
                noise_key,
                now.cloud,
                tuning.jumps,
                lambda u: force(force_key, u),
                self.dynamics.temperature,
                not (self.interaction.interacts or self.dynamics.interacts),
            )
            number, total = now.tally
            tally = number + 1, total + probability.mean()
            return now._replace(cloud=self.dynamics.jumped(moved, jumped), tally=tally)

        if now.tally is None:
            now = step(now)
        else:
            now = lax.cond((tuning.jumps.kind > 0) & (now.num_updates % 2 == 1), jump, step, now)
        return now._replace(num_updates=now.num_updates + 1)

    def _jump_between_basins(self, key, now, tuning):
        """Jumps where warmup found several basins, and what jumps have learned."""
        # Of a state that another kernel has made, energies may be of minibatches now.
        if tuning.basins is None or not self.learned.basins:
            return now, tuning.basins

        def jump():
            jump_key, force_key = random.split(key)
            force = self.force(tuning)
            moved, jumped, basins = jump_between_basins(
                jump_key, now.cloud, tuning.basins, lambda u: force(force_key, u), self.dynamics.temperature
            )
            return now._replace(cloud=self.dynamics.jumped(moved, jumped)), basins

        return lax.cond(tuning.basins.is_on, jump, lambda: (now, tuning.basins))

    def recognize(self, stage: Stage, cloud: Cloud, tuning: Tuning) -> Tuning:
        """The tuning, its reference marked by the data, or noted as stale where it was made on others.

        References of each particle's own are renewed here, where an epoch is over or the data are others.
        """
        reference = tuning.anchor
        if reference is None:
            return tuning
        found = fingerprint(self.bound.target, self.unravel, reference.position.reshape(-1, cloud.z.shape[-1])[0])
        # Other programs may round differently.
        tolerance = 100 * jnp.finfo(found.dtype).eps * (1.0 + jnp.abs(found))
        is_new = jnp.isinf(reference.fingerprint)
        is_other = ~is_new & (jnp.abs(found - reference.fingerprint) > tolerance)
        if self.learned.epoch is None:
            mark = jnp.where(is_new, found, reference.fingerprint)
            return tuning._replace(anchor=reference._replace(fingerprint=mark, is_stale=is_other))
        is_needed, is_middle = reference.in_use, jnp.zeros((), bool)
        if tuning.moments is not None:
            # Warmup asks at the end of each window whether references help, be they in use or not.
            is_needed |= stage.is_warmup
            is_needed &= ~(stage.is_arriving & self.learned.arrives)
            # It is to see their noise at its average: half an epoch after they were renewed.
            is_middle = stage.until_end == (self.learned.epoch // self.num_steps + 1) // 2
        is_stale = is_new | is_other
        due = is_needed & (is_stale | is_middle | (reference.age >= self.learned.epoch))
        return tuning._replace(anchor=self._renew(due, cloud, tuning, reference, is_stale))

    def _renew(self, due, cloud, tuning, reference, is_stale):
        """Each particle's reference where it is now, if that is due."""

        def renew():
            here = reference._replace(position=tuning.preconditioner.colour(cloud.z))
            # Only random likelihoods would use the key, and they are refused.
            new = self.evaluate_reference(random.key(0), here, cloud)
            # An old reference is as right as a new one, and a gradient that is not finite would hold the particle.
            usable = (jnp.isfinite(new.potential_energy) & jnp.isfinite(new.gradient).all(-1)) | is_stale
            mark = jnp.where(usable[0, 0], new.fingerprint, reference.fingerprint)
            position, energy, gradient = select(usable, new[:3], reference[:3])
            return new._replace(position=position, potential_energy=energy, gradient=gradient, fingerprint=mark)

        return lax.cond(due, renew, lambda: reference)

    def learn(self, key: jax.Array, stage: Stage, cloud: Cloud, tuning: Tuning) -> tuple[Cloud, Tuning]:
        """What the iteration teaches, and counts it."""
        if tuning.moments is None:
            return cloud, tuning._replace(iteration=stage.done)
        learners: tuple[Learner, ...] = (*LEARNERS, _update_jumps, _update_basins)
        tuning, cloud = warmup_update(key, stage, tuning, cloud, self, learners)
        return cloud, tuning

    def _cut(self, cloud, tuning):
        """The cloud with gradients cut that are far longer than any in the bulk of the posterior."""
        if self.learned.scale is None or not self.learned.measures or tuning.measurements is None:
            return cloud, jnp.zeros(cloud.potential_energy.shape, bool)
        # Whitened positions and gradients vary alike: by one for a Gaussian, by far more where modes lie apart.
        expected = jnp.fmax(tuning.moments.variances(), 1.0) + tuning.noise
        limit = GRADIENT_LIMIT * jnp.sqrt(jnp.sum(jnp.broadcast_to(expected, cloud.z.shape[-1:])))
        length = jnp.linalg.norm(cloud.gradient, axis=-1)
        is_cut = length > limit
        factor = jnp.where(is_cut, limit / length, 1.0)[..., None]
        return cloud._replace(gradient=factor * cloud.gradient), is_cut


def _update_jumps(key, stage, tuning, cloud, sampler):
    """What jumps by an archive learn."""
    del key
    if (moves := sampler.bound.kernel.moves) is None:
        return tuning, cloud
    jumps = moves.learn(stage, tuning.jumps, tuning, cloud, sampler.dynamics.temperature)
    return tuning._replace(jumps=jumps), cloud


def _update_basins(key, stage, tuning, cloud, sampler):
    """What jumps between basins learn that switch themselves on."""
    del key
    if tuning.basins is None or not sampler.learned.basins:
        return tuning, cloud
    basins = learn_basins(stage, tuning.basins, tuning, cloud, sampler.dynamics.temperature)
    return tuning._replace(basins=basins), cloud
