"""The base class of moves, which propose, accept and count jumps."""

from __future__ import annotations

from typing import ClassVar, Generic, NamedTuple, TypeVar

import jax
from jax import random
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Integer

from numpyro_repulsion.dynamics import Cloud, EnergyAndGrad, acceptance, select
from numpyro_repulsion.noise import uniform
from numpyro_repulsion.warmup import JumpsState, Preconditioner, WarmupState, Window

__all__ = ["Jumped", "Move", "Proposal"]


#: The type of the state of a move.
State = TypeVar("State", bound=JumpsState)


class Proposal(NamedTuple):
    """The proposed jump of each particle.

    - **position**, **potential_energy**, **gradient** - u, U and ∇U at it, ``(G, L, d)``, ``(G, L)``, ``(G, L, d)``.
    - **log_ratio** - the log proposal density of the reverse jump minus that of the jump, ``(G, L)``.
    - **threshold** - uniform random numbers, ``(G, L)``; a jump with a larger acceptance probability is accepted.
      ``None`` if the base class draws them.
    """

    position: Float[Array, "*particles d"]
    potential_energy: Float[Array, "*particles"]
    gradient: Float[Array, "*particles d"]
    log_ratio: Float[Array, "*particles"]
    threshold: Float[Array, "*particles"] | None = None


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
    """Base class: Metropolis-Hastings steps of single particles, between updates of the dynamics.

    A subclass defines `start` and `propose`, and, if it learns, `record` and `learn`. Its state is a ``NamedTuple`` of
    arrays with a field ``tally``, the number of jumps and the sum of their mean acceptance probabilities, which the
    sampler updates. The base class accepts a proposal y with probability ``min(1, π(y) q(x|y) / (π(x) q(y|x)))``,
    ``π = exp(−U / T)``. This preserves the stationary distribution of each particle if a proposal depends only on the
    particle and the state, and the state does not change after warmup.

    With ``SGLD(model, moves=MyMove())`` every second update is a jump if `is_on` is true.

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
    #: Whether the base class draws the thresholds of acceptance; if not, `propose` returns them.
    draws_threshold: ClassVar[bool] = True

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
        del positions, cloud, age
        return state

    def learn(self, window: Window, state: State, warmup: WarmupState, cloud: Cloud, temperature: float) -> State:
        """Return the state at the end of a window of warmup, from arrays of the host; unchanged by default."""
        del window, warmup, cloud, temperature
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
        del state
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
        propose_key = accept_key = key
        if self.draws_threshold:
            propose_key, accept_key = random.split(key)
        proposal = self.propose(propose_key, state, cloud, energy_and_grad, temperature, stratified)
        log_ratio = (cloud.potential_energy - proposal.potential_energy) / temperature + proposal.log_ratio
        probability = acceptance(log_ratio, jnp.isfinite(proposal.gradient).all(-1))
        threshold = proposal.threshold
        if (threshold is None) != self.draws_threshold:
            raise ValueError(
                f"{type(self).__name__}.propose must return a `threshold` if, and only if, `draws_threshold` is False."
            )
        if threshold is None:
            threshold = uniform(accept_key, probability.shape, probability.dtype)
        accepted = threshold < probability
        z, energy, gradient = select(accepted, tuple(proposal[:3]), tuple(cloud[:3]))
        return Jumped(Cloud(z, energy, gradient, cloud.memory), accepted, probability)
