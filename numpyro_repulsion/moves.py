"""Jumps between updates: Metropolis steps with proposals frozen after warmup, for posteriors with several modes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Generic, NamedTuple, TypeVar

import jax
from jax import lax, random
import jax.numpy as jnp
from jax.scipy.special import logsumexp
from jaxtyping import Array, Bool, Float, Integer
import numpy as np

from numpyro_repulsion.checks import integer, keep
from numpyro_repulsion.dynamics import Cloud, EnergyAndGrad, acceptance, select
from numpyro_repulsion.noise import normal, uniform
from numpyro_repulsion.rounding import matmul
from numpyro_repulsion.warmup import Preconditioner, WarmupState, Window
from numpyro_repulsion.warmup.preconditioner import inverse_root, shrink
from numpyro_repulsion.warmup.windows import ARRIVED, FREEZE

#: The type of the state of a move.
State = TypeVar("State")


class Proposal(NamedTuple):
    """The proposed jump of each particle.

    - **position**, **potential_energy**, **gradient** - u, U and ∇U at it, ``(G, L, d)``, ``(G, L)``, ``(G, L, d)``.
    - **log_ratio** - the log proposal density of the reverse jump minus that of the jump, ``(G, L)``.
    """

    position: Float[Array, "*particles d"]
    potential_energy: Float[Array, "*particles"]
    gradient: Float[Array, "*particles d"]
    log_ratio: Float[Array, "*particles"]


class Jumped(NamedTuple):
    """The result of one jump of every particle.

    - **cloud** - the particles.
    - **accepted** - which particles jumped, ``(G, L)``.
    - **probability** - the acceptance probabilities, ``(G, L)``.
    """

    cloud: Cloud
    accepted: Bool[Array, "*particles"]
    probability: Float[Array, "*particles"]


class Move(Generic[State]):
    """Base class: Metropolis-Hastings steps of single particles, one before the updates of each iteration.

    A subclass defines `start` and `propose`, and, if it learns, `record` and `learn`. Its state is a ``NamedTuple`` of
    arrays with a field ``tally``, the number of jumps and the sum of their mean acceptance probabilities, which the
    sampler updates. The base class accepts a proposal y with probability ``min(1, π(y) q(x|y) / (π(x) q(y|x)))``,
    ``π = exp(−U / T)``. This preserves the stationary distribution of each particle if a proposal depends only on the
    particle and the state, and the state does not change after warmup.

    With ``SGLD(model, moves=MyMove())`` each iteration begins with a jump if `is_on` is true.

    **Example**

    .. doctest::

        >>> from typing import NamedTuple
        >>> import jax
        >>> from jax import random
        >>> import jax.numpy as jnp
        >>> from numpyro.infer import MCMC
        >>> from numpyro_repulsion import SGLD
        >>> from numpyro_repulsion.moves import Move, Proposal

        >>> class Nothing(NamedTuple):
        ...     tally: tuple[jax.Array, jax.Array]

        >>> class Reflection(Move):  # for an almost symmetric posterior
        ...     def start(self, cloud, iterations, dense):
        ...         return Nothing((jnp.zeros(()), jnp.zeros(())))
        ...     def propose(self, key, state, cloud, energy_and_grad, temperature, stratified):
        ...         return Proposal(-cloud.z, *energy_and_grad(-cloud.z), jnp.zeros(cloud.z.shape[:2]))

        >>> def two_modes(z):
        ...     return -jnp.logaddexp(-jnp.sum((z - 4) ** 2) / 2, -jnp.sum((z + 4) ** 2) / 2)
        >>> mcmc = MCMC(SGLD(potential_fn=two_modes, moves=Reflection(), preconditioner=None), num_warmup=200,
        ...             num_samples=200, num_chains=10, chain_method="vectorized", progress_bar=False)
        >>> mcmc.run(random.key(0), init_params=4.0 + random.normal(random.key(1), (10, 1)))
        >>> abs(float((mcmc.get_samples() > 0).mean()) - 0.5) < 0.1
        True
    """

    #: The smallest number of particles from which the move can learn.
    min_particles: ClassVar[int] = 2

    def start(self, cloud: Cloud, iterations: int, dense: bool) -> State:
        """Return the state before warmup.

        :param iterations: the number of warmup iterations.
        :param dense: whether scales are matrices.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement `start`.")

    def record(self, state: State, positions: Preconditioner, cloud: Cloud, age: Integer[Array, ""]) -> State:
        """Return the state after one more iteration of warmup, in its program; unchanged by default.

        :param positions: the change of variables from whitened to unconstrained coordinates.
        :param age: how many iterations particles have been where they belong; negative while they arrive.
        """
        return state

    def learn(self, window: Window, state: State, warmup: WarmupState, cloud: Cloud, temperature: float) -> State:
        """Return the state at the end of a window of warmup, from arrays of the host; unchanged by default."""
        return state

    def propose(
        self,
        key: jax.Array,
        state: State,
        cloud: Cloud,
        energy_and_grad: EnergyAndGrad,
        temperature: float,
        stratified: bool,
    ) -> Proposal:
        """Return a proposal for every particle.

        :param cloud: the particles, whitened.
        :param stratified: whether the particles of an ensemble are independent, so that proposals may be stratified
            over them.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement `propose`.")

    def is_on(self, state: State) -> Bool[Array, ""]:
        """Return whether particles jump; a scalar, always true by default."""
        return jnp.ones((), bool)

    def jump(
        self,
        key: jax.Array,
        cloud: Cloud,
        state: State,
        energy_and_grad: EnergyAndGrad,
        temperature: float,
        stratified: bool,
    ) -> Jumped:
        """Propose one jump for every particle, and accept or reject each one separately."""
        propose_key, accept_key = random.split(key)
        proposal = self.propose(propose_key, state, cloud, energy_and_grad, temperature, stratified)
        log_ratio = (cloud.potential_energy - proposal.potential_energy) / temperature + proposal.log_ratio
        probability = acceptance(log_ratio, jnp.isfinite(proposal.gradient).all(-1))
        accepted = uniform(accept_key, probability.shape, probability.dtype) < probability
        z, energy, gradient = select(accepted, tuple(proposal[:3]), tuple(cloud[:3]))
        return Jumped(Cloud(z, energy, gradient, cloud.memory), accepted, probability)


#: How particles jump.
NONE, DIFFERENCES, DENSITY = 0, 1, 2


@dataclass(frozen=True)
class JumpConstants:
    """Constants of the learner of jumps, chosen by measurement."""

    #: Below these acceptances, differences replace the density if they do better, and jumps are switched off.
    least_of_density: float = 0.1
    least: float = 0.02
    #: Candidate variances of the density's kernels, in units of T: the smallest, the largest, and their number.
    variances: tuple[float, float, int] = (1e-3, 4.0, 20)
    #: Candidate descents of their centers along the gradient, and the number of points at which these are compared.
    descents: tuple[float, ...] = (0.0, 0.5, 0.75, 1.0)
    queries: int = 256


JUMPS = JumpConstants()


class ArchiveState(NamedTuple):
    """The learned state of jumps; after warmup only the tally changes.

    - **recorded** - unconstrained positions from warmup and the gradients there, ``(C, d)`` each, of which the first
      ``number`` are filled.
    - **number** - the number of filled positions.
    - **source** - the index of each position among all particles of all recorded iterations, ``(C,)``.
    - **scale** - S, with ``S Sᵀ`` about the covariance within a mode over T, ``(d, d)`` or ``(d,)``.
    - **components** - the archive in use, ``S⁻¹ a_c``, ordered so that neighbors in space are adjacent, ``(C, d)``.
    - **variance** - s², the variance of the density's kernels about the components.
    - **kind** - how particles jump: 0 not at all, 1 by relaxed differences, 2 from the density.
    - **acceptance** - the acceptance of each kind, in the last window of warmup that used it, ``(3,)``.
    - **tally** - the number of jumps since a window began, and the sum of their acceptances.
    """

    recorded: tuple[jax.Array, jax.Array]
    number: jax.Array
    source: jax.Array
    scale: jax.Array
    components: jax.Array
    variance: jax.Array
    kind: jax.Array
    acceptance: jax.Array
    tally: tuple[jax.Array, jax.Array]


@dataclass(frozen=True)
class Archive(Move[ArchiveState]):
    r"""Jumps to all regions that warmup visited, for posteriors with several modes.

    Warmup records the positions of particles. Afterwards each iteration begins with a Metropolis-Hastings step, exact
    for any fixed archive :math:`a_1, \dots, a_C`. There are two kinds of proposal:

    - from the archive's *density* :math:`q = \frac{1}{C} \sum_c N(a_c, s^2 S S^\top)`: a proposal y is accepted with
      probability :math:`\min\bigl(1, \frac{\pi(y)\, q(x)}{\pi(x)\, q(y)}\bigr)`. If K = I, the components offered to
      the particles of an ensemble are stratified, one from each part of space, which spreads the ensemble over the
      modes (all components are equally likely for each particle, so its distribution does not change);
    - by *relaxed differences*, if few of these are accepted, as in many dimensions: a particle is shifted to
      :math:`w = x + a_b - a_c` and relaxes there, :math:`y = w - S S^\top \nabla U(w) + \sqrt{T} S \xi`. The acceptance
      ratio uses the reverse jump from y with the opposite shift. This takes three gradients instead of one.

    The :math:`a_c` are positions from warmup, moved all or part of the way down to their mode by
    :math:`-S S^\top \nabla U`.

    Warmup learns the kind of proposal, S and s², and freezes them with the archive. S comes from the covariance of the
    gradients, whose inverse is the covariance within a mode, whatever the distance between modes. s² maximizes the
    likelihood of each particle's part of the archive under the other parts. Particles also jump during warmup, first by
    differences, then from the density, with the positions recorded so far. An archive cannot contain a mode that warmup
    did not visit.

    Jumps preserve the distribution ``exp(−U / T)`` of each particle and do not change momenta, so the sampler's
    stationary distribution stays the same. They need the potential energy of all data, a warmup, and at least two
    particles.

    :param size: the largest C, a power of two. A jump from the density takes ``2 L C d`` multiplications.
    :raises ValueError: for a size that is not a power of two, 16 or more.

    **References:**

    1. *A Markov Chain Monte Carlo version of the genetic algorithm Differential Evolution*, C. J. F. ter Braak,
       Statistics and Computing 16, 2006

    **Example**

    .. doctest::

        >>> from jax import random
        >>> import jax.numpy as jnp
        >>> import numpyro
        >>> import numpyro.distributions as dist
        >>> from numpyro.infer import MCMC, init_to_uniform
        >>> from numpyro_repulsion import Archive, SGLD
        >>> def model():
        ...     modes = dist.Normal(jnp.array([-5.0, 5.0]), 1.0)
        ...     numpyro.sample("z", dist.MixtureSameFamily(dist.Categorical(jnp.array([0.3, 0.7])), modes))
        >>> mcmc = MCMC(SGLD(model, moves=Archive(), init_strategy=init_to_uniform), num_warmup=50,
        ...             num_samples=50, num_chains=20, chain_method="vectorized", progress_bar=False)
        >>> mcmc.run(random.key(0))
        >>> int(mcmc.last_state.learned.jumps.kind)
        2
    """

    size: int = 1024
    #: From which part of warmup on positions are recorded, and up to which.
    span: ClassVar[tuple[float, float]] = ARRIVED, 1.0
    #: How many numbers the recorded positions may have, if these are more than 32.
    most_numbers: ClassVar[int] = 2**40
    #: Whether particles may also jump by relaxed differences.
    has_differences: ClassVar[bool] = True

    def __post_init__(self):
        keep(self, "size", integer, least=16, expected="a power of two, 16 or more")
        if self.size.bit_count() > 1:
            raise ValueError(f"Archive: `size` must be a power of two, 16 or more; got {self.size!r}.")

    def start(self, cloud: Cloud, iterations: int, dense: bool) -> ArchiveState:
        groups, particles, dimension = cloud.z.shape
        begin, end = (int(iterations * (part - ARRIVED)) * groups * particles for part in self.span)
        total = max(1, min(end - begin, np.iinfo(np.int32).max))
        # A power of two divides space evenly; the iterations must fill it.
        size = min(self.size, 1 << max(total.bit_length() - 1, 4))
        size = min(size, 1 << max((self.most_numbers // dimension).bit_length() - 1, 5))
        # Stratum indices up to L C must fit 32 bits.
        size = min(size, 1 << max(31 - particles.bit_length(), 4))
        dtype = cloud.z.dtype
        return ArchiveState(
            recorded=(jnp.zeros((size, dimension), dtype),) * 2,
            number=jnp.zeros((), jnp.int32),
            source=jnp.asarray(begin + np.arange(size, dtype=np.int64) * total // size, jnp.int32),
            components=jnp.zeros((size, dimension), dtype),
            variance=jnp.ones((), dtype),
            scale=jnp.eye(dimension, dtype=dtype) if dense else jnp.ones(dimension, dtype),
            kind=jnp.zeros((), jnp.int32),
            acceptance=jnp.zeros(3, dtype),
            tally=(jnp.zeros((), dtype),) * 2,
        )

    def record(self, jumps, positions, cloud, age):
        z, gradient = (
            x.reshape(-1, x.shape[-1])
            for x in (positions.to_positions(cloud.z), positions.unwhiten_gradient(cloud.gradient))
        )
        row = jumps.source - age * len(z)
        here = (row >= 0) & (row < len(z))
        recorded = tuple(
            jnp.where(here[:, None], new[jnp.clip(row, 0, len(z) - 1)], old)
            for new, old in zip((z, gradient), jumps.recorded, strict=True)
        )
        return jumps._replace(recorded=recorded, number=jumps.number + here.sum(dtype=jnp.int32))

    def learn(self, window, jumps, warmup, cloud, temperature):
        if not window.has_arrived:
            return jumps
        tried = DENSITY if window.ends >= window.timetable.at(FREEZE) else DIFFERENCES
        return self._fitted(self._choose(jumps, None if window.is_last else tried), warmup, cloud, temperature)

    def _fitted(self, jumps, warmup, cloud, temperature):
        """Return the archive with all that is recorded, and S and s² fitted to it."""
        # Until the archive is full, it repeats its positions.
        filled = np.arange(len(jumps.source)) % max(int(jumps.number), 1)
        change = warmup.preconditioner
        z, gradient = (x[filled] for x in jumps.recorded)
        gradient = change.whiten_gradient(gradient)
        within = _within(gradient, jumps, temperature)
        v, slope = within.whiten(change.whiten(z)), within.whiten_gradient(gradient)
        particles = cloud.z.shape[0] * cloud.z.shape[1]
        components, variance = _likeliest(v, slope, jumps.source[filled] % particles, temperature)
        return jumps._replace(components=components, variance=variance, scale=within.scale)

    def _choose(self, jumps, kind):
        """Store the window's acceptance and begin another window with this kind of jump; ``None`` is the better one."""
        count, total = jumps.tally
        acceptance = jumps.acceptance.copy()
        if count > 0:
            acceptance[int(jumps.kind)] = total / count
        if kind is None:
            differences, density = acceptance[DIFFERENCES], acceptance[DENSITY]
            kind = DENSITY if density >= JUMPS.least_of_density or density >= differences else DIFFERENCES
            kind = kind if acceptance[kind] >= JUMPS.least else NONE
        kind = np.asarray(kind, np.int32)
        return jumps._replace(kind=kind, acceptance=acceptance, tally=(np.zeros_like(count),) * 2)

    def is_on(self, state):
        return state.kind > NONE

    def propose(self, key, state, cloud, energy_and_grad, temperature, stratified):
        within, components = Preconditioner(state.scale), state.components
        start = within.whiten(cloud.z)

        def visit(v):
            u = within.to_positions(v)
            return (u, *energy_and_grad(u))

        from_density = partial(_from_density, start, state.variance, components, visit, stratified)
        if self.has_differences:
            by_differences = partial(_by_differences, start, components, visit, within.whiten_gradient, temperature)
            found = lax.cond(state.kind == DENSITY, from_density, by_differences, key)
        else:
            found = from_density(key)
        (position, energy, gradient), log_forth, log_back = found
        return Proposal(position, energy, gradient, log_back - log_forth)


class Basins(Archive):
    """Jumps from an archive's density that switch themselves on if warmup leaves particles in several basins.

    The archive holds positions from 70 % to 95 % of warmup, when particles settle in their basins. Of many parameters
    it holds fewer, so that it takes little memory. Components are independent, whatever K is.
    """

    min_particles = 4  # Fewer do not distinguish basins from chance.
    span = 0.7, 0.95
    most_numbers = 2**20
    has_differences = False

    def learn(self, window, jumps, warmup, cloud, temperature):
        if not (window.is_at(self.span[1]) and warmup.has_basins):
            return jumps
        return self._fitted(jumps, warmup, cloud, temperature)._replace(kind=np.asarray(DENSITY, np.int32))


def _from_density(start, variance, components, visit, stratified, key):
    """Return ``(u, U, ∇U)`` at a proposal, and the log proposal densities of the jump and of the reverse jump."""
    index_key, noise_key = random.split(key)
    index = _indices(index_key, start.shape[:2], len(components), stratified)
    end = components[index] + jnp.sqrt(variance) * normal(noise_key, start.shape, start.dtype)

    def log_density(v):
        return logsumexp(-_squared_distances(v, components) / (2.0 * variance), -1)

    return visit(end), log_density(end), log_density(start)


def _by_differences(start, components, visit, whiten_gradient, temperature, key):
    """Return the same for a relaxed difference; shifts in both directions are equally likely."""
    index_key, noise_key = random.split(key)
    first, second = random.randint(index_key, (2, *start.shape[:2]), 0, len(components))
    shift = components[second] - components[first]
    noise = temperature**0.5 * normal(noise_key, start.shape, start.dtype)

    def walk(v, turn):
        # At w, at the proposal, and at the proposal minus the shift; a loop, so that the gradient is compiled once.
        u, energy, gradient = visit(v)
        slope = whiten_gradient(gradient)
        return jnp.where(turn == 0, v - slope + noise, v - shift), (v, slope, (u, energy, gradient))

    _, (points, slopes, visits) = lax.scan(walk, start + shift, jnp.arange(3))
    returning = start - points[2] + slopes[2]

    def log_density(noise):
        return -jnp.sum(noise**2, -1) / (2.0 * temperature)

    return jax.tree.map(lambda x: x[1], visits), log_density(noise), log_density(returning)


def _indices(key, shape, size, stratified):
    """Return equally likely component indices for a cloud of shape ``(G, L)``."""
    if not stratified:
        return random.randint(key, shape, 0, size)
    order_key, offset_key = random.split(key)
    stratum = jax.vmap(lambda key: random.permutation(key, shape[1]))(random.split(order_key, shape[0]))
    # Over all strata j and offsets r, floor((j·C + r) / L) takes each value equally often.
    return (stratum * size + random.randint(offset_key, shape, 0, size)) // shape[1]


def _squared_distances(u, components):
    """Return the squared distances ``(..., C)`` of points ``(..., d)`` from components ``(C, d)``.

    They are summed one coordinate at a time. Modes may be thousands of widths apart, where rounding ruins an expanded
    square from a matrix product: the density would differ from that of the proposals, and jumps would not be exact.
    """

    def add(total, coordinate):
        of_points, of_components = coordinate
        return total + (of_points[..., None] - of_components) ** 2, None

    nothing = jnp.zeros((*u.shape[:-1], len(components)), u.dtype)
    return lax.scan(add, nothing, (jnp.moveaxis(u, -1, 0), components.T))[0]


def _order_in_space(u):
    """Return an order of points ``(C, d)`` by repeated halving of space, each time across the widest coordinate."""
    size = len(u)
    depth = size.bit_length() - 1

    def halve(level, order):
        cell = jnp.arange(size) >> (depth - level)
        points = u[order]

        def means(x):
            return jax.ops.segment_sum(x, cell, size) / (size >> level)

        widest = jnp.argmax(means((points - means(points)[cell]) ** 2), -1)[cell]
        value = jnp.take_along_axis(points, widest[:, None], 1)[:, 0]
        return order[jnp.lexsort((value, cell))]

    return lax.fori_loop(0, depth, halve, jnp.arange(size))


def _within(gradient, jumps, temperature):
    """Return the change of variables that gives gradients ``(C, d)`` the covariance T I, and each mode about the same.

    Gradients are used because the covariance of positions would be that of all modes together.
    """
    deviation = gradient - gradient.mean(0)
    if jumps.scale.ndim == 1:
        return Preconditioner(inverse_root(np.mean(deviation**2, 0) / temperature))
    covariance = matmul(deviation.T, deviation) / len(deviation) / temperature
    return Preconditioner(inverse_root(shrink(covariance, float(jumps.number))))


@jax.jit
def _likeliest(v, slope, owner, temperature):
    """Return components and a variance that maximize the likelihood of each owner's positions under the others' parts.

    Components are positions moved down the gradient, all the way to the mode or a part of it, in their order in space.
    """
    stride = max(1, len(v) // JUMPS.queries)
    others = owner[::stride, None] != owner

    def log_likelihood(descent):
        squared = jnp.where(others, _squared_distances(v[::stride], v - descent * slope), jnp.inf)

        def of(variance):
            kernel = logsumexp(-squared / (2.0 * variance), -1)
            kernel = jnp.where(jnp.isfinite(kernel), kernel, -(jnp.finfo(v.dtype).max ** 0.5))
            return jnp.mean(kernel) - v.shape[-1] / 2.0 * jnp.log(variance)

        return lax.map(of, variances)

    descents = jnp.asarray(JUMPS.descents, v.dtype)
    variances = temperature * np.geomspace(*JUMPS.variances).astype(v.dtype)
    best = jnp.argmax(lax.map(log_likelihood, descents))
    components = v - descents[best // len(variances)] * slope
    return components[_order_in_space(components)], variances[best % len(variances)]
