"""What every dynamics answers, and the cloud that it moves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from numpyro_repulsion.dynamics.step_error import StepError, UnknownError
from numpyro_repulsion.interactions import Coupling

__all__ = ["Cloud", "Couple", "Dynamics", "EnergyAndGrad", "reject_nonfinite", "select"]

EnergyAndGrad = Callable[[jax.Array], tuple[jax.Array, jax.Array]]
Couple = Callable[[jax.Array], Coupling]


class Cloud(NamedTuple):
    """The particles and what moves them; every array leads with the particle axes ``(..., L)``.

    - **z** - positions, ``(..., L, d)``.
    - **potential_energy** - U at the positions, ``(..., L)``.
    - **gradient** - ∇U at the positions, ``(..., L, d)``.
    - **memory** - what else the dynamics carries: a tuple of arrays ``(..., L, d)``.
    """

    z: jax.Array
    potential_energy: jax.Array
    gradient: jax.Array
    memory: tuple[jax.Array, ...] = ()


class Dynamics:
    """Base class: a discretization of ``dX = [−(D + Q)∇H + Γ] dt + sqrt(2D) dW`` (Ma, Chen & Fox, 2015).

    A subclass defines `init` and `step`. Nothing is then known of the bias of its steps, so ``step_size`` must be
    given. A subclass that also defines `step_error` lets warmup measure it.

    **Example**

    .. doctest::

        >>> from jax import random
        >>> import jax.numpy as jnp
        >>> from numpyro_repulsion import Dynamics, Independent
        >>> from numpyro_repulsion.dynamics import Cloud

        >>> class Flow(Dynamics):  # D = 0
        ...     is_sampler = False
        ...     def init(self, key, z, force, couple):
        ...         return Cloud(z, *force(z))
        ...     def step(self, key, cloud, force, couple, step_size):
        ...         z = cloud.z - step_size * couple(cloud.z).apply(cloud.gradient)
        ...         return Cloud(z, *force(z))

        >>> force, couple = lambda z: (0.5 * jnp.sum(z**2, -1), z), Independent().couple
        >>> cloud = Flow().init(random.key(0), jnp.ones((2, 1)), force, couple)
        >>> Flow().step(random.key(1), cloud, force, couple, 0.5).z.tolist()
        [[0.5], [0.5]]
    """

    #: T: the stationary law is ``∏_i exp(−U(z_i) / T)``.
    temperature: float = 1.0
    #: Whether D and Q couple the particles by themselves, without an interaction.
    interacts: ClassVar[bool] = False

    @property
    def is_sampler(self) -> bool:
        """Whether successive clouds are draws; if not, the result of a run is its last cloud."""
        return True

    def step_error(self, coupling: Coupling) -> StepError:
        """How much a step distorts the stationary distribution, given an interaction; by default unknown."""
        return UnknownError(
            f"{type(self).__name__} does not define `step_error`, so warmup cannot measure how long its steps may be: "
            "give `step_size`, or return a StepError from `step_error`."
        )

    @property
    def carries(self) -> str:
        """What the memory of a cloud holds, in words. A state goes on with dynamics that carry the same."""
        return f"the memory of {type(self).__name__}"

    def check(self, cloud: Cloud) -> None:
        """Refuses, by a ``ValueError``, starts ``(G, L, d)`` that this dynamics cannot move."""

    def jumped(self, cloud: Cloud, which: jax.Array) -> Cloud:
        """The cloud after particles, ``(..., L)``, have jumped: a move that leaves the law of z, and memory, alone."""
        del which
        return cloud

    def init(self, key: jax.Array, z: jax.Array, energy_and_grad: EnergyAndGrad, couple: Couple) -> Cloud:
        """The cloud at rest at positions ``z`` of shape ``(..., L, d)``."""
        raise NotImplementedError(f"{type(self).__name__} does not implement `init`.")

    def step(
        self, key: jax.Array, cloud: Cloud, energy_and_grad: EnergyAndGrad, couple: Couple, step_size: jax.Array | float
    ) -> Cloud:
        """One update of all particles at once; ends with one evaluation of the force, at the new positions."""
        raise NotImplementedError(f"{type(self).__name__} does not implement `step`.")


def reject_nonfinite(cloud: Cloud, proposal: Cloud) -> tuple[Cloud, jax.Array]:
    """The proposal, but with the particles for which anything in it is not finite left where they were.

    :return: the new cloud, and which particles were held, ``(..., L)``.
    """
    finite = jnp.isfinite(proposal.potential_energy)
    for array in (proposal.z, proposal.gradient, *proposal.memory):
        finite &= jnp.isfinite(array).all(-1)
    return select(finite, proposal, cloud), ~finite


def select(which: jax.Array, new: Any, old: Any) -> Any:
    """Of two pytrees the first where ``which``, ``(..., L)``, is true; every array leads with these axes."""

    def choose(a, b):
        return jnp.where(which.reshape(*which.shape, *[1] * (a.ndim - which.ndim)), a, b)

    return jax.tree.map(choose, new, old)
