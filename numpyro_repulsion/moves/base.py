"""What every move does: propose, accept, and count."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import jax
from jax import random
import jax.numpy as jnp

from numpyro_repulsion.dynamics import Cloud, EnergyAndGrad, select
from numpyro_repulsion.noise import uniform
from numpyro_repulsion.warmup import Stage, WarmupState

__all__ = ["Jumped", "Move", "Proposal"]


class Proposal(NamedTuple):
    """Where each particle may jump.

    - **position**, **potential_energy**, **gradient** - u, U and ∇U there, ``(G, L, d)``, ``(G, L)``, ``(G, L, d)``.
    - **log_ratio** - the log density of proposing the way back, less that of proposing the way there, ``(G, L)``.
    - **threshold** - uniform random numbers below which a jump is accepted, ``(G, L)``; ``None`` where the base class
      draws them.
    """

    position: jax.Array
    potential_energy: jax.Array
    gradient: jax.Array
    log_ratio: jax.Array
    threshold: jax.Array | None = None


class Jumped(NamedTuple):
    """What one jump of every particle did.

    - **cloud** - the particles.
    - **accepted** - which particles have jumped, ``(G, L)``.
    - **probability** - the acceptance probabilities, ``(G, L)``.
    """

    cloud: Cloud
    accepted: jax.Array
    probability: jax.Array


class Move:
    """Base class: Metropolis-Hastings steps of single particles, between updates of the dynamics.

    A subclass defines `start`, `learn` and `propose`. Its state is a ``NamedTuple`` of arrays with a field ``tally``,
    the number of jumps and the sum of their mean acceptance probabilities, which the sampler keeps. The base class
    accepts a proposal y with probability ``min(1, π(y) q(x|y) / (π(x) q(y|x)))``, ``π = exp(−U / T)``, so that the
    stationary distribution of each particle stays the same if a proposal depends on nothing but the particle and the
    state, and the state stays the same after warmup.

    With ``SGLD(model, moves=MyMove())`` every second update is a jump where `is_on` says so.

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

        >>> class Reflection(Move):  # of a posterior that is almost symmetric
        ...     def start(self, cloud, iterations, dense):
        ...         return Nothing((jnp.zeros(()), jnp.zeros(())))
        ...     def learn(self, stage, state, warmup, cloud, temperature):
        ...         return state
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

    #: Fewer particles have nothing to learn from.
    min_particles: ClassVar[int] = 2
    #: Whether the base class draws the thresholds of acceptance; if not, `propose` returns them.
    draws_threshold: ClassVar[bool] = True

    def start(self, cloud: Cloud, iterations: int, dense: bool) -> Any:
        """The state before warmup.

        :param iterations: of the warmup.
        :param dense: whether scales are matrices.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement `start`.")

    def learn(self, stage: Stage, state: Any, warmup: WarmupState, cloud: Cloud, temperature: float) -> Any:
        """The state after one more iteration; constant after warmup, but for the tally."""
        raise NotImplementedError(f"{type(self).__name__} does not implement `learn`.")

    def propose(
        self,
        key: jax.Array,
        state: Any,
        cloud: Cloud,
        energy_and_grad: EnergyAndGrad,
        temperature: float,
        stratified: bool,
    ) -> Proposal:
        """A proposal for every particle.

        :param cloud: the particles, whitened.
        :param stratified: whether particles of an ensemble are independent of each other, so that they may share out
            what they are offered.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement `propose`.")

    def is_on(self, state: Any) -> jax.Array:
        """Whether particles jump; a scalar, always true by default."""
        del state
        return jnp.ones((), bool)

    def jump(
        self,
        key: jax.Array,
        cloud: Cloud,
        state: Any,
        energy_and_grad: EnergyAndGrad,
        temperature: float,
        stratified: bool,
    ) -> Jumped:
        """One jump of every particle, each accepted or rejected by itself."""
        propose_key = accept_key = key
        if self.draws_threshold:
            propose_key, accept_key = random.split(key)
        proposal = self.propose(propose_key, state, cloud, energy_and_grad, temperature, stratified)
        log_ratio = (cloud.potential_energy - proposal.potential_energy) / temperature + proposal.log_ratio
        usable = jnp.isfinite(log_ratio) & jnp.isfinite(proposal.gradient).all(-1)
        probability = jnp.where(usable, jnp.exp(jnp.minimum(jnp.where(usable, log_ratio, 0.0), 0.0)), 0.0)
        if proposal.threshold is None:
            threshold = uniform(accept_key, probability.shape, probability.dtype)
        else:
            threshold = proposal.threshold
        accepted = threshold < probability
        z, energy, gradient = select(accepted, tuple(proposal[:3]), tuple(cloud[:3]))
        return Jumped(Cloud(z, energy, gradient, cloud.memory), accepted, probability)
