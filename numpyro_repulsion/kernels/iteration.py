"""One MCMC iteration of a cloud: ``num_steps`` updates with what warmup learned.

`ParticleKernel.sample` makes one iteration in this order:

1. Check the state and whiten the positions (`ParticleKernel.parts`).
2. Renew each particle's own reference (``SVRG``), if its epoch is over (`with_references`). Split the random key.
3. With ``moves``, or if warmup found several basins, one jump (`begin`).
4. ``num_steps`` updates (`move`). Each update (`advance`)

   a. steps by the dynamics, along the gradient at the end of the update before; at the new positions it evaluates the
      next one, on a new minibatch, clips it, and adds up what was cut off,
   b. turns particles back that gain far too much energy, if they have momenta and hardly noisy gradients, and flags
      them,
   c. rejects a proposal that is not finite: the particle stays where it was, and is flagged.

5. Return the new state, with positions in the coordinates of the model (`ParticleState.of`).

Positions have three names: u whitened, ``y = c + S u`` in the coordinates of a centering, and z in those of the model.

Nothing here learns: warmup (``warmup_programs.py``) is over when the first state is made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, cast

import jax
from jax import lax, random
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Integer
import numpy as np

from numpyro_repulsion.dynamics import Cloud, Dynamics, reject_nonfinite, select
from numpyro_repulsion.dynamics.base import turn_back
from numpyro_repulsion.gradients import (
    CenteredTarget,
    Centering,
    ModelTarget,
    Recovered,
    Reference,
    Target,
    Units,
    evaluate_reference,
)
from numpyro_repulsion.interactions import Interaction
from numpyro_repulsion.kernels.bound import BoundSampler
from numpyro_repulsion.layout import Layout
from numpyro_repulsion.rounding import AnyArray
from numpyro_repulsion.warmup import Coordinates, Learned, WarmupPlan, WarmupState

#: What has a preconditioner, a centering and a reference.
Where: TypeAlias = Learned | WarmupState | Coordinates


class Progress(NamedTuple):
    """The quantities that updates change."""

    cloud: Cloud
    num_updates: Integer[Array, ""]
    flagged: Integer[Array, ...]  # how many updates were rejected or turned back, ``(G, L)``
    cut_off: Float[Array, ...]  # by how much clipping shortened gradients, in sum, ``(G, L)``
    has_turned: Bool[Array, "*particles"]  # which were turned back in the last update of this iteration


@dataclass(frozen=True)
class ClippingConstants:
    """From where on gradients are clipped."""

    #: The length of gradients of all rows, in units of that expected.
    length: float = 20.0
    #: The smallest limit of single coordinates of others: where there is hardly any noise, as with control variates of
    #: second order, or it is unknown, a gradient of 10 is that of the neck of a funnel.
    coordinate: float = 10.0
    #: Their limit, in units of what one gradient in ten exceeds. Noise of parameters that few rows inform has long
    #: tails: of 1,000 random intercepts, one exceeds 10 times its expected size in 6 % of the updates, and 20 times in
    #: 0.06 % (tests/kernels/test_clipping.py). They must not be cut off: the gradient of a row that is drawn is long
    #: because it makes up for all minibatches without it.
    extremes: float = 3.0
    #: The same for the units of an arrow, none of which has the neck of a funnel by itself. With control variates of
    #: second order their tails are longer: of 4,000 intercepts one exceeds 3 times what one gradient in ten does in
    #: 0.8 % of the updates.
    extremes_of_units: float = 10.0


CLIPPING = ClippingConstants()


def length_limit(variances: Float[Array, " d"]) -> Float[Array, ""]:
    """Return the length at which gradients are clipped, for the variances expected of their whitened coordinates."""
    return CLIPPING.length * jnp.sqrt(jnp.sum(variances))


def coordinate_limit(extreme: Float[AnyArray, ""], units: Units | None = None) -> Float[AnyArray, ...]:
    """Return the size at which single coordinates of whitened gradients are clipped: one for all, or with an arrow of
    each, ``(d,)``.

    :param extreme: the largest coordinate that one gradient in ten exceeds, or its noise; 0 if unknown.
    """
    factors = CLIPPING.extremes, CLIPPING.extremes_of_units
    limit, of_units = (jnp.maximum(CLIPPING.coordinate, factor * extreme) for factor in factors)
    if units is None:
        return limit
    return units.join(jnp.full(units.num_globals, limit), jnp.full((units.number, units.size), of_units))


def clip(gradient: Float[Array, "*particles d"], limit: Float[Array, ""]) -> Float[Array, "*particles d"]:
    """Return gradients ``(G, L, d)`` clipped by their length."""
    length = jnp.linalg.norm(gradient, axis=-1, keepdims=True)
    return gradient * jnp.minimum(limit / jnp.where(length > 0, length, 1.0), 1.0)


def clip_coordinates(gradient: Float[Array, "*particles d"], limit: Float[Array, ...]) -> Float[Array, "*particles d"]:
    """Return gradients clipped by coordinate: a long one, as in the neck of a funnel, would send a particle off."""
    # An infinite one is rejected, as of other clipping.
    return jnp.where(jnp.isfinite(gradient), jnp.clip(gradient, -limit, limit), jnp.nan)


@dataclass(frozen=True, eq=False)
class CloudMover:
    """A bound sampler that moves a cloud ``(G, L, d)`` in whitened coordinates."""

    bound: BoundSampler
    plan: WarmupPlan  # what its warmup learns
    unravel: Callable  # from flat positions to those of the sites
    row_seed: Integer[Array, ""] | None  # of the orders of rows, for gradients that depend on the number of the update
    posterior_id: np.ndarray | jax.Array | None  # not without references, or values of the data
    schedule: Callable | None  # of step sizes, unless they are measured

    @property
    def dynamics(self) -> Dynamics:
        return self.bound.kernel.dynamics

    @property
    def interaction(self) -> Interaction:
        return self.bound.kernel.interaction

    @property
    def num_steps(self) -> int:
        return self.bound.kernel.num_steps

    def target(self, learned: Where) -> Target:
        """Return the posterior in the coordinates that the preconditioner whitens."""
        return self.bound.target if learned.centering is None else self.centered(learned.centering)

    def layout(self, u: Float[Array, "*particles d"]) -> Layout:
        """Return how a cloud lies on the devices."""
        return Layout.of(u.shape, self.interaction.interacts or self.dynamics.interacts)

    def recover(self, learned: Where, u: Float[Array, "*particles d"]) -> Recovered:
        """Return the particles ``(..., d)`` in the coordinates of the model."""
        y = learned.preconditioner.to_positions(u)
        target = self.target(learned)
        if not isinstance(target, CenteredTarget):
            return Recovered(y, jnp.zeros_like(y), jnp.ones_like(y), jnp.zeros_like(y))
        return jax.tree.map(lambda x: x.reshape(y.shape), jax.vmap(target.recover)(y.reshape(-1, y.shape[-1])))

    def centered(self, centering: Centering) -> CenteredTarget:
        """Return the posterior in coordinates of another centering."""
        # Only models have sites that can be centered.
        return CenteredTarget(cast(ModelTarget, self.bound.target), centering, self.unravel)

    def energy_and_grad(self, learned: Where, num_updates: Integer[Array, ""] | None = None) -> Callable:
        """Return ``(key, u) -> (U, ∇U)``, with an optional third argument, the order of control variates; without a
        number of updates, on rows that no update depends on."""
        gradient, target = self.bound.gradient, self.target(learned)
        if num_updates is not None and self.row_seed is not None:
            gradient = gradient.at(num_updates, self.row_seed)
        change, reference = learned.preconditioner, learned.reference

        def energy_and_grad(key, u, order=None):
            used = reference if reference is None or order is None else reference._replace(order=order)
            layout = self.layout(u)
            y = layout.place_particles(change.to_positions(u))
            found = layout.place_particles(gradient.energy_and_grad(key, target, self.unravel, y, used))
            energy, slope = layout.place(found)
            return energy, change.whiten_gradient(slope)

        return energy_and_grad

    def reference_position(self, learned: Where, u: Float[Array, "*particles d"]) -> Float[Array, "*particles d"]:
        """Return whitened particles in the coordinates of references."""
        to_base = jnp.vectorize(self.target(learned).to_base, signature="(d)->(d),()")
        return to_base(learned.preconditioner.to_positions(u))[0]

    def evaluate_reference(
        self, key: jax.Array, learned: Where, reference: Reference, num_particles: int, with_hessian: bool = True
    ) -> Reference:
        """Return the reference with U and ∇U over all rows at its position, and ∇²U if it has one."""
        target = self.target(learned).base
        new = evaluate_reference(key, target, self.unravel, reference, num_particles, with_hessian)
        # Where the host said nothing of the data, any words say that there is a reference.
        known = jnp.maximum(reference.posterior_id, 1) if self.posterior_id is None else self.posterior_id
        return new._replace(posterior_id=jnp.asarray(known, jnp.uint32))

    def step_size(self, learned: Learned, num_updates: jax.Array) -> jax.Array:
        value = learned.step_size if self.schedule is None else self.schedule(num_updates)
        return jnp.asarray(value, learned.step_size.dtype)

    def begin(
        self, key: jax.Array | None, cloud: Cloud, num_updates: Integer[Array, ""], learned: Learned
    ) -> tuple[Progress, Learned]:
        """Return what updates change, before the first one of an iteration, after one jump if there are jumps; and what
        was learned, with the jump counted."""
        moves, state = self.bound.moves, learned.jumps
        # Of the same kernel with another model, the energies may be noisy.
        if state is not None and moves is not None and key is not None:
            energy_and_grad = self.energy_and_grad(learned)
            is_stratified = self.plan.has_given_moves and not (self.interaction.interacts or self.dynamics.interacts)

            def jump():
                # Particles jump only by gradients of all rows, which need no key.
                jumped = moves.jump(
                    key, cloud, state, lambda u: energy_and_grad(key, u), self.dynamics.temperature, is_stratified
                )
                number, total = state.tally
                jumps = state._replace(tally=(number + 1, total + jumped.probability.mean()))
                return self.dynamics.jumped(jumped.cloud, jumped.accepted), jumps

            cloud, jumps = lax.cond(moves.is_on(state), jump, lambda: (cloud, state))
            learned = learned._replace(jumps=jumps)
        # Jumps, new scales and other data change which gradients are long.
        gradient = self._clipped(cloud.gradient, learned)
        cut_off, shape = jnp.linalg.norm(cloud.gradient - gradient, axis=-1), cloud.potential_energy.shape
        cloud = cloud._replace(gradient=gradient)
        return Progress(cloud, num_updates, jnp.zeros(shape, int), cut_off, jnp.zeros(shape, bool)), learned

    def move(
        self, key: jax.Array, cloud: Cloud, learned: Learned, num_updates: Integer[Array, ""], splits_jump_key: bool
    ) -> tuple[jax.Array, Progress, Learned]:
        """Make ``num_steps`` updates, after one jump if there are jumps; `halved_series` does so with two clouds.

        :return: the key of the next iteration, what has changed, and what was learned.
        """
        # All keys from one split, because each split takes a tenth of a second to compile.
        keys = random.split(key, 1 + splits_jump_key + self.num_steps)
        now, learned = self.begin(keys[1] if splits_jump_key else None, cloud, num_updates, learned)
        now, _ = lax.scan(lambda now, key: (self._update(key, now, learned), None), now, keys[1 + splits_jump_key :])
        return keys[0], now, self.ended(learned)

    def ended(self, learned: Learned, num_steps: int | None = None) -> Learned:
        """Return what was learned, with references older, after the last update of an iteration."""
        if learned.reference is not None and self.plan.epoch is not None:
            age = learned.reference.age + (self.num_steps if num_steps is None else num_steps)
            return learned._replace(reference=learned.reference._replace(age=age))
        return learned

    def noise_and_gradient_keys(self, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return keys for noise and gradient; the same if the gradient is not random, because a split takes a tenth of
        a second to compile."""
        first, second = random.split(key) if self.plan.is_noisy else (key, key)
        return first, second

    def _update(self, key, now, learned):
        interaction_key = None
        if self.interaction.is_redrawn:
            key, interaction_key = random.split(key)
        interaction = self.interaction.at(interaction_key, now.num_updates)
        return self.advance(*self.noise_and_gradient_keys(key), interaction, now, learned)

    def advance(
        self, noise_key: jax.Array, gradient_key: jax.Array, interaction: Interaction, now: Progress, learned: Learned
    ) -> Progress:
        """Make one update with the interaction of this update."""
        energy_and_grad = self.energy_and_grad(learned, now.num_updates)
        reference = learned.reference
        # Second order leaves hardly any noise in energies. After warmup, a Hessian means that it is in use.
        has_hessian = reference is not None and reference.hessian is not None
        # Of the one gradient that a step evaluates, outside of loops.
        cloud, cut_off = now.cloud, [jnp.zeros_like(now.cut_off)]
        step_size = self.step_size(learned, now.num_updates)

        def clipped(u):
            energy, gradient = energy_and_grad(gradient_key, u)
            short = self._clipped(gradient, learned)
            if short is not gradient:
                cut_off.append(jnp.linalg.norm(gradient - short, axis=-1))
            return energy, short

        proposal = self.dynamics.step(
            noise_key,
            cloud,
            clipped,
            lambda u: self._coupling(interaction, u, learned, step_size),
            step_size,
        )
        turns = jnp.zeros_like(now.has_turned)
        if not self.plan.is_noisy or has_hessian:
            goes_on = now.has_turned if reference is None or reference.order is None else reference.order < 2
            proposal, turns = turn_back(cloud, proposal, self.dynamics, now.has_turned | goes_on)
        cloud, is_rejected = reject_nonfinite(cloud, self.layout(cloud.z).place(proposal))
        total = now.cut_off + jnp.where(is_rejected | turns, 0.0, cut_off[-1])
        return Progress(cloud, now.num_updates + 1, now.flagged + (is_rejected | turns), total, turns)

    def _coupling(self, interaction, u, learned, step_size):
        """Return the coupling of the cloud, whose noise leaves room for that of the gradient where it is known."""
        coupling, noise = interaction.couple(u, learned.bandwidth), learned.gradient_noise
        heat = None if noise is None else self.dynamics.heat(step_size, noise)
        return coupling if heat is None or not coupling.is_identity else coupling.with_less_noise(heat, u)

    def with_references(self, cloud: Cloud, learned: Learned) -> Learned:
        """Renew each particle's own reference, if its epoch is over or the data changed; reject a common one
        of other data.

        A common reference is evaluated on other data before their run, by `ParticleKernel.resumed`. Where that was left
        out, and the data are constants of the program, its energy becomes NaN: every update is rejected, instead of
        sampling another posterior. Data that are inputs of a program have no identity there.
        """
        reference = learned.reference
        if reference is None:
            return learned
        is_other = (
            jnp.zeros((), bool) if self.posterior_id is None else (reference.posterior_id != self.posterior_id).any()
        )
        if self.plan.epoch is None:
            if self.posterior_id is None:
                return learned
            energy = jnp.where(is_other, jnp.nan, reference.potential_energy)
            return learned._replace(reference=reference._replace(potential_energy=energy))
        is_stale = ~reference.posterior_id.any() | is_other | (reference.age < 0)
        due = is_stale | (reference.age >= self.plan.epoch)
        return learned._replace(reference=self.renewed(due, cloud, learned, is_stale))

    def renewed(self, due: Bool[Array, ""], cloud: Cloud, learned: Where, is_stale: Bool[Array, ""]) -> Reference:
        """Move each particle's reference to its current position, if that is due."""
        reference: Any = learned.reference

        def renew():
            here = reference._replace(position=self.reference_position(learned, cloud.z))
            # Only random likelihoods would use the key, and `choose_gradient` rejects them.
            new = self.evaluate_reference(random.key(0), learned, here, cloud.potential_energy.size)
            # An old reference is as valid as a new one, and with a non-finite one all updates would be rejected.
            usable = (jnp.isfinite(new.potential_energy) & jnp.isfinite(new.gradient).all(-1)) | is_stale
            position, energy, gradient = select(usable, new[:3], reference[:3])
            return new._replace(position=position, potential_energy=energy, gradient=gradient)

        return lax.cond(due, renew, lambda: reference)

    def _clipped(self, gradient, learned):
        """Clip gradients that are far too long, if their expected length is known."""
        limit = learned.gradient_limit
        if limit is None:
            return gradient
        return clip_coordinates(gradient, limit) if self.plan.is_noisy else clip(gradient, limit)
