"""One MCMC iteration of a cloud: its updates, and at the ends of warmup's windows what is learned from them."""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax import lax, random
import jax.numpy as jnp
import numpy as np

from numpyro_repulsion.adaptation import Learned, Tuning, adapt, arrive, is_arriving, until_due
from numpyro_repulsion.dynamics import Cloud, Dynamics, hold, select
from numpyro_repulsion.gradients import Anchor, Gradient, Target, anchored, fingerprint
from numpyro_repulsion.interactions import Interaction
from numpyro_repulsion.moves import Archive, jump_between_basins, learn_basins
from numpyro_repulsion.schedules import Cyclical

__all__ = ["Iteration"]

#: A gradient longer than this many times what whitened coordinates lead one to expect is cut, and the particle flagged.
GRADIENT_LIMIT = 20.0


class Iteration:
    """The parts of a kernel and its target, joined to move a cloud of shape ``(G, L, d)`` in whitened coordinates."""

    def __init__(
        self,
        target: Target,
        unravel: Callable,
        gradient: Gradient,
        dynamics: Dynamics,
        interaction: Interaction,
        moves: Archive | None,
        schedule: Callable | None,
        learned: Learned,
        num_steps: int,
    ):
        self.target = target
        self.unravel = unravel
        self.gradient = gradient
        self.dynamics = dynamics
        self.interaction = interaction
        self.moves = moves
        self.schedule = schedule
        self.learned = learned
        self.num_steps = num_steps

    def force(self, tuning: Tuning) -> Callable:
        """``(key, u) -> (U, ∇U)``, and with a third argument whether control variates are in use."""
        change, anchor = tuning.preconditioner, tuning.anchor

        def force(key, u, corrected=None):
            reference = anchor if anchor is None or corrected is None else anchor._replace(in_use=corrected)
            energy, slope = self.gradient.force(key, self.target, self.unravel, change.colour(u), reference)
            return energy, change.pull(slope)

        return force

    def score(self, tuning: Tuning, u: jax.Array) -> jax.Array:
        """U at the particles on the same rows, by the same randomness, ``(G, L)``."""
        one = jnp.vectorize(lambda z: fingerprint(self.target, self.unravel, z), signature="(d)->()")
        return one(tuning.preconditioner.colour(u))

    def step_size(self, tuning: Tuning, num_updates: jax.Array) -> jax.Array:
        """ε of the next update."""
        value = tuning.step_size if self.schedule is None else self.schedule(num_updates)
        return jnp.asarray(value, tuning.step_size.dtype)

    def move(self, key: jax.Array, cloud: Cloud, tuning: Tuning, num_updates: jax.Array, is_other: jax.Array):
        """``num_steps`` updates, and before them the hot part of a cycle where one begins.

        :param num_updates: how many were done before.
        :param is_other: whether the anchor was made on other data, and is not to be used.
        :return: the cloud, the tuning with the steps of arriving particles, the step sizes last used, ``(G, L)``, in
            how many updates each particle was held or its gradient cut, ``(G, L)``, and how many updates are done.
        """
        # A number that no count of updates reaches; so that where nothing jumps nothing changes.
        jump_key = random.fold_in(key, np.uint32(2**32 - 1))
        cycle = self.schedule if isinstance(self.schedule, Cyclical) else None
        done = num_updates + self.num_steps
        if cycle is not None:
            done += cycle.num_ahead(num_updates, self.num_steps)

        def repeat(update, carry):
            if cycle is None:
                keys = random.split(key, self.num_steps)
                return lax.scan(lambda carry, key: (update(key, carry), None), carry, keys)[0]
            # Hot and cold updates in one loop, so that they are compiled once.
            return lax.fori_loop(num_updates, done, lambda i, carry: update(random.fold_in(key, i), carry), carry)

        anchor = tuning.anchor
        if anchor is not None:
            anchor = anchor._replace(in_use=anchor.in_use & ~is_other)
        force = self.force(tuning._replace(anchor=anchor))
        epoch = self.learned.epoch
        # The iteration with the hot part of a cycle may be longer than an epoch.
        renews_within = cycle is not None and epoch is not None
        # A kernel without moves may go on from the state of one with them.
        jumps = None if self.moves is None else tuning.jumps
        if self.moves is not None and jumps is None:
            raise ValueError(
                f"moves={self.moves!r} jumps by an archive of warmup, and this state is of a kernel without `moves`: "
                "warm up with them, or drop them."
            )
        tally_before = None if jumps is None else jumps.tally

        def update(key, carry):
            cloud, count, troubles, tally, own = carry
            felt = force
            if renews_within:
                due = own.in_use & (own.age >= epoch)
                own = self._renew(due, cloud, tuning, own, jnp.zeros((), bool))
                felt = self.force(tuning._replace(anchor=own))
                own = own._replace(age=own.age + 1)
            interaction_key = None
            if self.interaction.is_redrawn:
                key, interaction_key = random.split(key)
            interaction = self.interaction.at(interaction_key, count)

            def couple(u):
                return interaction.couple(u, tuning.bandwidth)

            noise_key, force_key = random.split(key)

            def step(cloud):
                cloud, cut = self._cut(cloud, tuning)
                step_size = self.step_size(tuning, count)
                proposal = self.dynamics.step(noise_key, cloud, lambda u: felt(force_key, u), couple, step_size)
                cloud, held = hold(cloud, proposal)
                return cloud, troubles + (held | cut), tally

            def jump(cloud):
                moved, jumped, probability = self.moves.jump(
                    noise_key,
                    cloud,
                    jumps,
                    lambda u: felt(force_key, u),
                    self.dynamics.temperature,
                    not (self.interaction.interacts or self.dynamics.interacts),
                )
                moved = self.dynamics.jumped(moved, jumped)
                return moved, troubles, (tally[0] + 1, tally[1] + probability.mean())

            if jumps is None:
                cloud, troubles, tally = step(cloud)
            else:
                cloud, troubles, tally = lax.cond((jumps.kind > 0) & (count % 2 == 1), jump, step, cloud)
            return cloud, count + 1, troubles, tally, own

        def approach(key, carry):
            move_key, force_key = random.split(key)
            return arrive(move_key, *carry, lambda u: force(force_key, u), self.learned.noise)

        def run():
            nothing = jnp.zeros(tuning.arrival.shape, int)
            own = anchor if renews_within else None
            start, basins = self._jump_between_basins(jump_key, cloud, tuning, force)
            moved, _, troubled, tally, own = repeat(update, (start, num_updates, nothing, tally_before, own))
            step_size = self.step_size(tuning, done - 1)
            in_use = jnp.broadcast_to(step_size, tuning.arrival.shape)
            return moved, tuning.arrival, in_use, troubled, tally, own, basins

        def run_arrival():
            position, arrival = repeat(approach, (cloud[:3], tuning.arrival))
            troubled = jnp.zeros(arrival.shape, int)
            own = anchor if renews_within else None
            return Cloud(*position, cloud.memory), arrival, arrival, troubled, tally_before, own, tuning.basins

        if self.learned.arrives and tuning.moments is not None:
            found = lax.cond(is_arriving(tuning), run_arrival, run)
        else:
            found = run()
        cloud, arrival, in_use, troubled, tally, own, basins = found
        tuning = tuning._replace(basins=basins)
        if anchor is not None and epoch is not None:
            tuning = tuning._replace(anchor=own if renews_within else anchor._replace(age=anchor.age + self.num_steps))
        if jumps is not None:
            tuning = tuning._replace(jumps=jumps._replace(tally=tally))
        return cloud, tuning._replace(arrival=arrival), in_use, troubled, done

    def _jump_between_basins(self, key, cloud, tuning, force):
        """The cloud after jumps, where warmup found several basins, and what jumps have learned."""
        # Of a state that another kernel has made, energies may be of minibatches now.
        if tuning.basins is None or not self.learned.basins:
            return cloud, tuning.basins

        def jump():
            jump_key, force_key = random.split(key)
            moved, jumped, basins = jump_between_basins(
                jump_key, cloud, tuning.basins, lambda u: force(force_key, u), self.dynamics.temperature
            )
            return self.dynamics.jumped(moved, jumped), basins

        return lax.cond(tuning.basins.is_on, jump, lambda: (cloud, tuning.basins))

    def recognize(self, cloud: Cloud, tuning: Tuning) -> tuple[Tuning, jax.Array]:
        """The tuning, its anchor marked by the data; and whether that was made on other data than these.

        References of each particle's own are renewed here, where an epoch is over or the data are others.
        """
        anchor = tuning.anchor
        if anchor is None:
            return tuning, jnp.zeros((), bool)
        found = fingerprint(self.target, self.unravel, anchor.position.reshape(-1, cloud.z.shape[-1])[0])
        # Other programs may round differently.
        tolerance = 100 * jnp.finfo(found.dtype).eps * (1.0 + jnp.abs(found))
        is_new = jnp.isinf(anchor.fingerprint)
        is_other = ~is_new & (jnp.abs(found - anchor.fingerprint) > tolerance)
        if self.learned.epoch is None:
            anchor = anchor._replace(fingerprint=jnp.where(is_new, found, anchor.fingerprint))
            return tuning._replace(anchor=anchor), is_other
        is_needed, is_middle = anchor.in_use, jnp.zeros((), bool)
        if tuning.moments is not None:
            # Warmup asks at the end of each window whether references help, be they in use or not.
            is_needed |= tuning.iteration < tuning.num_warmup
            is_needed &= ~(is_arriving(tuning) & self.learned.arrives)
            # It is to see their noise at its average: half an epoch after they were renewed.
            is_middle = until_due(tuning) == (self.learned.epoch // self.num_steps + 1) // 2
        is_stale = is_new | is_other
        due = is_needed & (is_stale | is_middle | (anchor.age >= self.learned.epoch))
        anchor = self._renew(due, cloud, tuning, anchor, is_stale)
        return tuning._replace(anchor=anchor), jnp.zeros((), bool)

    def _renew(self, due, cloud, tuning, anchor, is_stale):
        """The anchor with each particle's reference where it is now, if that is due."""

        def renew():
            here = anchor._replace(position=tuning.preconditioner.colour(cloud.z))
            # Only random likelihoods would use the key, and they are refused.
            new = anchored(random.key(0), self.target, self.unravel, here, cloud.potential_energy.size)
            # An old reference is as right as a new one, and a gradient that is not finite would hold the particle.
            usable = (jnp.isfinite(new.potential_energy) & jnp.isfinite(new.gradient).all(-1)) | is_stale
            mark = jnp.where(usable[0, 0], new.fingerprint, anchor.fingerprint)
            return Anchor(*select(usable, new[:3], anchor[:3]), anchor.in_use, mark, new.age)

        return lax.cond(due, renew, lambda: anchor)

    def learn(self, key: jax.Array, cloud: Cloud, tuning: Tuning, is_other: jax.Array) -> tuple[Cloud, Tuning]:
        """What the iteration teaches, and counts it."""
        if tuning.moments is None:
            return cloud, tuning._replace(iteration=tuning.iteration + 1)
        key, reference_key = random.split(key)

        def reference(anchor):
            return anchored(reference_key, self.target, self.unravel, anchor, cloud.potential_energy.size)

        tuning, cloud = adapt(
            key,
            tuning,
            cloud,
            self.learned,
            self.force,
            self.score,
            reference,
            is_other,
            self.interaction,
            self.dynamics,
            self.num_steps,
            self.gradient.shared,
        )
        if self.moves is not None:
            jumps = self.moves.learn(tuning.jumps, tuning, cloud, self.dynamics.temperature)
            tuning = tuning._replace(jumps=jumps)
        if tuning.basins is not None and self.learned.basins:
            basins = learn_basins(tuning.basins, tuning, cloud, self.dynamics.temperature)
            tuning = tuning._replace(basins=basins)
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
