"""Programs of a warmup: iterations that move the cloud, measurements that learners ask for, and its end.

While particles arrive, one iteration (`arriving`) makes ``num_steps`` updates of each particle by itself, of
Metropolis, or of noisy Adam with minibatches. If the arrival is prolonged, particles descend together, along the
direction of SVGD.

Afterwards, one iteration (`sampling`)

1. renews each particle's own reference (``SVRG``), if its epoch is over or a measurement is near,
2. makes a jump, if there are jumps, and the updates of the sampler (``iteration.py``), with what is learned so far,
3. sets the bandwidth by its rule while scales are adapted; afterwards it adds to the sums of the symptoms instead.

Both add to the moments of the window and to what the moves record, and count the iteration. ``warmup_host.py`` calls
these programs, window by window.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import jax
from jax import lax, random
import jax.numpy as jnp
from jaxtyping import Bool, Float, Integer
import numpy as np

from numpyro_repulsion.dynamics import Cloud
from numpyro_repulsion.gradients import (
    Arrow,
    Centering,
    ModelTarget,
    Particle,
    Recovered,
    Reference,
    fingerprint,
    likelihood_energies,
    ravel_cloud,
)
from numpyro_repulsion.kernels.bound import BoundSampler
from numpyro_repulsion.kernels.iteration import CloudMover, coordinate_limit, length_limit
from numpyro_repulsion.kernels.state import Origin, ParticleState, map_particles
from numpyro_repulsion.layout import place_everywhere
from numpyro_repulsion.rounding import AnyArray
from numpyro_repulsion.warmup import Coordinates, Learned, WarmupState
from numpyro_repulsion.warmup.adam import descend, svgd_direction
from numpyro_repulsion.warmup.arrival import arrive
from numpyro_repulsion.warmup.bandwidth import best_bandwidth as _best_bandwidth, measure_steepness


class WarmupRun(NamedTuple):
    """A warmup under way: the cloud, its keys, and what is learned so far. At its end it becomes a `ParticleState`."""

    cloud: Cloud  # the particles in whitened coordinates, ``(G, L, d)``
    warmup: WarmupState  # what is learned so far
    num_updates: jax.Array
    rng_key: jax.Array  # of the next iteration
    row_seed: jax.Array | None  # of the orders of rows, if the gradient depends on the number of the update
    prototype: Particle  # the sites of one particle at its start, each ``(1, ...)``, which tell their shapes


class WindowInfo(NamedTuple):
    """What an iteration needs to know of its window; arrays, so that one program serves all windows."""

    ends: Integer[AnyArray, ""]  # after so many iterations
    arrived: Integer[AnyArray, ""]  # after how many iterations particles have arrived
    half: tuple[Integer[AnyArray, ""], Integer[AnyArray, ""]]  # where the present half of the arrival begins and ends
    is_adapting: Bool[AnyArray, ""]  # whether scales are still adapted
    extreme_noise: Float[AnyArray, ""]  # as in `NoiseFigures`, so far; 0 if unknown


class WarmupMover(CloudMover):
    """A bound sampler in its warmup."""

    def arrival_iteration(self, state: WarmupRun, window: WindowInfo) -> WarmupRun:
        """Make one iteration in which particles arrive."""
        cloud, warmup = state.cloud, state.warmup
        keys = random.split(state.rng_key, 1 + self.num_steps)
        begins, ends = window.half
        share_done = (warmup.iteration - begins) / jnp.maximum(ends - begins, 1)

        def update(carry, key):
            return self._arrival_update(key, share_done, carry, warmup), None

        (position, arrival), _ = lax.scan(update, (cloud[:3], warmup.arrival), keys[1:])
        cloud = Cloud(*position, cloud.memory)
        if arrival.surroundings is not None:
            seen = arrival.surroundings.add(cloud.potential_energy, cloud.gradient)
            arrival = arrival._replace(surroundings=seen)
        return self._counted(state._replace(rng_key=keys[0]), window, cloud, warmup._replace(arrival=arrival))

    def sampler_iteration(self, state: WarmupRun, window: WindowInfo) -> WarmupRun:
        """Make one iteration of the sampler."""
        warmup = self._with_window_references(window, state.cloud, state.warmup)
        learned = self.for_updates(warmup, window.extreme_noise)
        # A key is split for jumps even where there are none, so that switching them on changes no other key.
        rng_key, progress, learned = self.move(state.rng_key, state.cloud, learned, state.num_updates, True)
        cloud, bandwidth, symptoms = progress.cloud, warmup.bandwidth, warmup.symptoms
        warmup = warmup._replace(jumps=learned.jumps, reference=learned.reference)
        if self.plan.learns_bandwidth:
            rule = self.interaction.learn_bandwidth
            bandwidth = lax.cond(window.is_adapting, rule, lambda _: warmup.bandwidth, cloud.z)
        if symptoms is not None:
            u, gradient = (x.reshape(-1, x.shape[-1]) for x in (cloud.z, cloud.gradient))
            symptoms = lax.cond(
                window.is_adapting,
                lambda: warmup.symptoms,
                lambda: warmup.symptoms.add(u, gradient, warmup.preconditioner),
            )
        warmup = warmup._replace(bandwidth=bandwidth, symptoms=symptoms)
        return self._counted(state._replace(rng_key=rng_key), window, cloud, warmup)

    def _counted(self, state, window, cloud, warmup):
        """Return the state after one more iteration, with its moments and what the moves record."""
        moments = warmup.moments.add(*(x.reshape(-1, x.shape[-1]) for x in (cloud.z, cloud.gradient)))
        iteration, jumps = warmup.iteration + 1, warmup.jumps
        if (moves := self.bound.moves) is not None and jumps is not None:
            jumps = moves.record(jumps, warmup.preconditioner, cloud, iteration - window.arrived)
        return state._replace(
            cloud=cloud,
            warmup=warmup._replace(iteration=iteration, moments=moments, jumps=jumps),
            num_updates=state.num_updates + self.num_steps,
        )

    def for_updates(self, warmup: WarmupState, extreme: Float[AnyArray, ""] | None) -> Learned:
        """Return what is learned so far, for updates of the sampler.

        :param extreme: of gradients, or of their noise while particles may be far from the posterior, as in
            `NoiseFigures`; ``None`` if nothing is clipped. Of exact gradients, only this counts.
        """
        limit, now = None, warmup
        if extreme is not None and self.plan.kind is not None and self.plan.measures:
            root = now.preconditioner.root
            # Whitened positions and gradients have equal variances: 1 for a Gaussian, far more if modes lie apart.
            limit = (
                coordinate_limit(extreme, None if root is None else root.units)
                if self.plan.is_noisy
                else length_limit(jnp.fmax(now.moments.variances(), 1.0))
            )
        found = Learned(now.preconditioner, now.centering, now.step_size, now.bandwidth, limit, now.reference)
        return found._replace(jumps=now.jumps, gradient_noise=now.gradient_noise)

    def _arrival_update(self, key, share_done, carry, warmup):
        """Make one update of arriving particles, each by itself unless their arrival is prolonged."""
        position, arrival = carry
        move_key, gradient_key = self.noise_and_gradient_keys(key)
        # References are found when particles have arrived.
        warmup = warmup._replace(reference=None)
        if not self.plan.can_prolong:
            # Until particles have arrived, they are in the coordinates of the model, whose gradient compiles faster.
            warmup = warmup._replace(centering=None)
        evaluate = self.energy_and_grad(warmup)

        def energy_and_grad(u):
            return evaluate(gradient_key, u)

        if arrival.adam is None:
            position, steps = arrive(move_key, position, arrival.step_size, energy_and_grad)
            return position, arrival._replace(step_size=steps)
        u, _, slope = position
        if self.plan.can_prolong:
            slope = lax.cond(arrival.is_prolonged, svgd_direction, lambda u, gradient: gradient, u, slope)
        rate, temperature = arrival.step_size, arrival.temperature
        position, adam, rates = descend(
            move_key, position, slope, arrival.adam, rate, share_done.astype(u.dtype), temperature, energy_and_grad
        )
        return position, arrival._replace(step_size=rates, adam=adam)

    def _with_window_references(self, window, cloud, warmup):
        """Renew each particle's own reference, if its epoch is over or a measurement is near."""
        reference = warmup.reference
        if reference is None or self.plan.epoch is None:
            return warmup
        # At the end of each window, warmup tests whether references help, even if they are not in use. Renew them half
        # an epoch before that, so that warmup measures their average noise.
        is_middle = window.ends - warmup.iteration == (self.plan.epoch // self.num_steps + 1) // 2
        is_new = ~reference.posterior_id.any()
        due = is_new | is_middle | (reference.age >= self.plan.epoch)
        return warmup._replace(reference=self.renewed(due, cloud, warmup, is_new))


def _at(bound, where, prototype=None, row_seed=None, posterior_id=None):
    """Return what moves a cloud by what warmup has learned; for measurements, without a seed and an identity."""
    bound = bound.behind_barrier()
    plan = bound.plan(where.preconditioner.kind)
    _, unravel = ravel_cloud(where.prototype if prototype is None else prototype)
    return WarmupMover(bound, plan, unravel, row_seed, posterior_id, bound.kernel.schedule)


def _mover(bound, state):
    # The identity of a reference that was never evaluated is 0, so that of the data is not.
    known = state.warmup.posterior_id
    known = None if known is None else jnp.maximum(known, 1)
    return _at(bound, state.warmup, state.prototype, state.row_seed, known)


def _iterate(bound, step, state, number):
    state = place_everywhere(state)
    mover = _mover(bound, state)
    cloud = mover.layout(state.cloud.z).place(state.cloud)
    return lax.fori_loop(0, number, lambda _, state: step(mover, state), state._replace(cloud=cloud))


def arriving(bound: BoundSampler, _: None, state: WarmupRun, window: WindowInfo, number: jax.Array | int) -> WarmupRun:
    """Make a number of iterations in which particles arrive."""
    return _iterate(bound, lambda mover, state: mover.arrival_iteration(state, window), state, number)


def sampling(bound: BoundSampler, _: None, state: WarmupRun, window: WindowInfo, number: jax.Array | int) -> WarmupRun:
    """Make a number of iterations of the sampler, within one window."""
    return _iterate(bound, lambda mover, state: mover.sampler_iteration(state, window), state, number)


def gradients(bound: BoundSampler, _: None, where: Coordinates, key, seeds, points, orders, count) -> Any:
    """Return U and ∇U, ``(n, G, L)`` and ``(n, G, L, d)``, at the first ones of some points, by the seeds of their
    minibatches and the orders of control variates."""
    energy_and_grad = _at(bound, where).energy_and_grad(where)

    def evaluate(i, found):
        new = energy_and_grad(random.fold_in(key, seeds[i]), points[i], orders[i])
        return jax.tree.map(lambda x, y: x.at[i].set(y), found, new)

    # A loop, so that the gradient is compiled once.
    return lax.fori_loop(0, count, evaluate, (jnp.zeros_like(points[..., 0]), jnp.zeros_like(points)))


def energy_on_common_rows(bound: BoundSampler, _: None, where: Coordinates, u) -> Any:
    """Return U at all particles on the same rows, with the same randomness, ``(G, L)``."""
    mover = _at(bound, where)
    target, unravel = mover.target(where), mover.unravel
    one = jnp.vectorize(lambda z: fingerprint(target, unravel, z), signature="(d)->()")
    return one(where.preconditioner.to_positions(u))


def log_volume_gained(bound: BoundSampler, _: None, where: Coordinates, u) -> Any:
    """Return by how much the logarithm of the volume is larger, and U lower, in these coordinates than where all
    hierarchical sites are standardized, ``(G, L)``."""
    mover, target = _at(bound, where), bound.target
    own = Centering.none(target, u.shape[-1], u.dtype) if where.centering is None else where.centering
    found = mover.recover(where._replace(centering=own), u)
    standardized = own._replace(share=jnp.zeros_like(own.share))
    return mover.centered(standardized).log_volume(found) - mover.centered(own).log_volume(found)


def energy_to_compare(bound: BoundSampler, _: None, where: Coordinates, y) -> Any:
    """Return energies of the likelihood alone, on the same rows for all, of particles in these coordinates."""
    mover = _at(bound, where)
    # In the coordinates of the model, because others have Jacobians.
    z = mover.recover(where, y).z
    energies = likelihood_energies(cast(ModelTarget, bound.target), jax.vmap(mover.unravel)(z.reshape(-1, z.shape[-1])))
    return energies.reshape(y.shape[:-1]).astype(y.dtype)


def evaluate_reference(
    bound: BoundSampler, settings: tuple[int, bool], where: Coordinates, reference: Reference, u, key, seed
) -> Any:
    """Return the reference at whitened positions, with U and ∇U over all rows."""
    mover, key = _at(bound, where), random.fold_in(key, seed)
    moved = reference._replace(position=mover.reference_position(where, u))
    return mover.evaluate_reference(key, where, moved, *settings)


def mean_curvature(bound: BoundSampler, _: None, where: Coordinates, u) -> Arrow:
    """Return the curvature in diagonally whitened coordinates: the mean over the particles of that of the prior, and
    that of the likelihood over all rows at the reference; NaN where centered coordinates leave no arrow of it."""
    mover = _at(bound, where)
    reference: Any = where.reference
    target, unravel, change = mover.target(where), mover.unravel, where.preconditioner
    units, u = reference.hessian.units, u.reshape(-1, u.shape[-1])

    def prior(x):
        return target.base.prior_energy(unravel(x)).astype(x.dtype)

    slope, bend = jax.linearize(jax.grad(prior), reference.position)

    def of_prior(u):
        x, volume = target.to_base(change.to_positions(u))
        return prior(x) - volume

    def of_likelihood(u):
        offset = target.to_base(change.to_positions(u))[0] - reference.position
        return jnp.sum((reference.gradient - slope + (reference.hessian.times(offset) - bend(offset)) / 2.0) * offset)

    is_centered = target.base is not target
    _, of_cloud = jax.linearize(lambda v: jax.vmap(jax.grad(of_prior))(u + v).mean(0), jnp.zeros_like(u[0]))
    if is_centered:
        # The expansion of the likelihood about the reference, in coordinates about the mean of the particles.
        _, of_rows = jax.linearize(jax.grad(of_likelihood), u.mean(0))

    def product(i):
        v = units.probe(i).astype(u.dtype)
        return of_cloud(v) + (of_rows(v) if is_centered else -bend(v * change.scale) * change.scale)

    probes = jnp.arange(units.num_probes if is_centered else units.num_globals + units.size)
    products = lax.map(product, probes, batch_size=min(16, len(probes)))
    if is_centered:
        return Arrow.checked(units, products)
    # In coordinates of the model it is one, as its analysis has shown.
    return jax.tree.map(jnp.add, Arrow.of_products(units, products), reference.hessian.scaled(change.scale))


def recover_and_center(bound: BoundSampler, smallest_sd: float | None, where: Coordinates, u) -> Any:
    """Return the centering, on request with estimated powers and bases, and particles in those of the model."""
    mover, centering = _at(bound, where), where.centering
    found = mover.recover(where, u)
    if smallest_sd is not None and centering is not None:
        hessian = None if where.reference is None else where.reference.hessian
        flat = jax.tree.map(lambda x: x.reshape(-1, u.shape[-1]), found)
        units = None if hessian is None else hessian.units
        centering, flat = mover.centered(centering).structure_at(flat, smallest_sd, units)
        found = jax.tree.map(lambda x: x.reshape(u.shape), flat)
    return centering, found


def to_coordinates(bound: BoundSampler, _: None, where: Coordinates, centering: Centering, found: Recovered) -> Any:
    """Return recovered particles in coordinates of another centering."""
    return _at(bound, where).centered(centering).to_coordinates(found)


class Coupled(NamedTuple):
    """Figures of K and Γ for a cloud, as in `Coupling`."""

    bandwidth: Float[AnyArray, ""]
    bound: Float[AnyArray, ""]
    diagonal: AnyArray
    steepness: Float[AnyArray, ""]  # how fast Γ changes along random directions
    is_identity: bool


def couple(bound: BoundSampler, _: None, u, bandwidth, is_new, key, seed) -> Coupled:
    """Return the figures at a bandwidth, or if it ``is_new`` at that of the rule, with random directions of a seed."""
    interaction = bound.kernel.interaction
    if interaction.learns_bandwidth:
        bandwidth = lax.cond(is_new, interaction.learn_bandwidth, lambda _: bandwidth, u)
    coupling = interaction.couple(u, bandwidth)
    steepness = measure_steepness(random.fold_in(key, seed), interaction, u, bandwidth)
    return Coupled(bandwidth, coupling.bound, coupling.diagonal, steepness, coupling.is_identity)


def best_bandwidth(bound: BoundSampler, tolerance: float, u, rule) -> Any:
    """Return the bandwidth, a multiple of the rule's, that gains most."""
    return _best_bandwidth(bound.kernel.interaction, u, rule, tolerance)


def settled(bound: BoundSampler, _: None, cloud: Cloud, step_size, noise) -> Any:
    """Return the cloud whose memory suits a new step size."""
    return bound.kernel.dynamics.settled(cloud, step_size, noise)


def relabeled(state: WarmupRun, posterior_id: np.ndarray | None) -> WarmupRun:
    """Return the state of a warmup of the same run whose data and model have another identity, as by another JAX."""
    warmup, reference = state.warmup, state.warmup.reference
    if posterior_id is None or warmup.posterior_id is None:
        return state
    if reference is not None:
        known = jnp.where(reference.posterior_id.any(), posterior_id, reference.posterior_id)
        reference = reference._replace(posterior_id=known)
    return state._replace(warmup=warmup._replace(posterior_id=jnp.asarray(posterior_id), reference=reference))


def what_is_on(bound: BoundSampler, warmup: WarmupState) -> tuple[int, bool]:
    """Return the order of the control variates that warmup left in use, and whether particles jump."""
    moves, jumps = bound.moves, warmup.jumps
    return warmup.order, moves is not None and jumps is not None and bool(moves.is_on(jumps))


class Frozen(NamedTuple):
    """How a state is made of a warmup; static."""

    on: tuple[int, bool]  # the order of the control variates in use, and whether particles jump
    skips_warmup: bool  # as in the state's `Origin`
    iteration: int  # how many count as done
    is_single: bool  # whether the state is that of a single plain chain


class Judged(NamedTuple):
    """What the host says of a warmup at its end."""

    extreme_gradient: Float[AnyArray, ""]  # as in `NoiseFigures`
    packed: Float[AnyArray, " _"] | None  # as in `Learned`


def freeze(bound: BoundSampler, how: Frozen, state: WarmupRun, judged: Judged | None) -> ParticleState:
    """Return the state from which draws are made, with all that warmup learned, if there was one."""
    mover, warmup, (order, has_jumps) = _mover(bound, state), state.warmup, how.on
    extreme_gradient, packed = judged or (None, None)
    learned, reference = mover.for_updates(warmup, extreme_gradient), warmup.reference
    if reference is not None:
        hessian = reference.hessian if order == 2 else None
        reference = reference._replace(order=None, hessian=hessian) if order else None
    start = warmup.data_fingerprint
    # What is off is absent from the programs.
    learned = learned._replace(
        reference=reference,
        jumps=learned.jumps if has_jumps else None,
        gradient_noise=learned.gradient_noise if order == 2 else None,
        packed=packed,
        posterior_id=warmup.posterior_id,
        data_fingerprint=None if start is None else jnp.append(*start),
    )
    cloud = place_everywhere(state.cloud)
    found = ParticleState.of(
        mover,
        cloud,
        learned,
        mover.step_size(learned, jnp.maximum(state.num_updates - 1, 0)),
        jnp.zeros(cloud.potential_energy.shape, int),
        state.rng_key,
        state.row_seed,
        iteration=jnp.asarray(how.iteration, jnp.int32),
        num_warmup=warmup.num_warmup,
        num_updates=state.num_updates,
        num_flagged_updates=jnp.zeros((), jnp.int32),
        cut_off=jnp.zeros((), cloud.z.dtype),
        origin=Origin.of(bound.kernel, bound.gradient, judged is not None, how.skips_warmup),
    )
    return map_particles(lambda x: x[0], found) if how.is_single else found
