"""The base class of dynamics, and the cloud that they move."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Shaped

from numpyro_repulsion.dynamics.step_error import StepError, UnknownError
from numpyro_repulsion.interactions import Coupling
from numpyro_repulsion.rounding import AnyArray

EnergyAndGrad = Callable[
    [Float[Array, "*particles d"]], tuple[Float[Array, "*particles"], Float[Array, "*particles d"]]
]
Couple = Callable[[Float[Array, "*particles d"]], Coupling]

#: A pytree of arrays.
Tree = TypeVar("Tree")


class Cloud(NamedTuple):
    """The particles and their gradients; the first axes of every array are the particle axes ``(..., L)``.

    - **z** - positions, ``(..., L, d)``: within kernels and warmup the whitened ones, u.
    - **potential_energy** - U at the positions, ``(..., L)``.
    - **gradient** - ∇U at the positions, ``(..., L, d)``.
    - **memory** - further variables of the dynamics: a tuple of arrays ``(..., L, m)``, with any m.
    """

    z: Float[AnyArray, "*particles d"]
    potential_energy: Float[AnyArray, "*particles"]
    gradient: Float[AnyArray, "*particles d"]
    memory: tuple[Shaped[AnyArray, "*particles _"], ...] = ()


class Dynamics:
    """Base class: a discretization of ``dX = [−(D + Q)∇H + Γ] dt + sqrt(2D) dW`` (Ma, Chen & Fox, 2015).

    A subclass defines `init` and `step`. The bias of its steps is then unknown, so ``step_size`` must be given. If the
    subclass also defines `step_error`, warmup can measure the step.

    **Example**

    .. doctest::

        >>> from numpyro_repulsion import SVGD
        >>> from numpyro_repulsion.dynamics import Cloud, Dynamics
        >>> class Flow(Dynamics):  # D = 0
        ...     is_sampler = False
        ...     def init(self, key, z, energy_and_grad, couple):
        ...         return Cloud(z, *energy_and_grad(z))
        ...     def step(self, key, cloud, energy_and_grad, couple, step_size):
        ...         z = cloud.z - step_size * couple(cloud.z).apply(cloud.gradient)
        ...         return Cloud(z, *energy_and_grad(z))
        >>> kernel = SVGD(potential_fn=lambda z: z**2 / 2, dynamics=Flow(), step_size=0.1)
    """

    #: T: the stationary distribution is ``∏_i exp(−U(z_i) / T)``.
    temperature: float = 1.0
    #: Whether successive clouds are draws. If not, the result of a run is its last cloud.
    is_sampler: bool = True
    #: Whether D and Q couple the particles without an interaction.
    interacts: ClassVar[bool] = False
    #: Whether the noise of successive gradients may be correlated, as in :class:`~numpyro_repulsion.Sweeps`.
    allows_sweeps: ClassVar[bool] = True
    #: Whether momenta give off the heat of gradient noise, if it is alike in all directions.
    absorbs_noise: ClassVar[bool] = False
    #: The step size of an optimizer, unless it is given: its steps have no bias that warmup could measure.
    default_step: ClassVar[float | None] = None

    @property
    def unit_of_energy(self) -> float:
        """T, of which variances and differences of energy are multiples; 1 for T = 0."""
        return self.temperature or 1.0

    def step_error(self, coupling: Coupling) -> StepError:
        """Return how much a step distorts the stationary distribution, given a coupling; unknown by default."""
        return UnknownError(
            f"{type(self).__name__} does not define `step_error`, so warmup cannot adapt its step size: "
            "give `step_size`, or return a StepError from `step_error`."
        )

    def check(self, cloud: Cloud) -> None:
        """Raise ``ValueError`` for starts ``(G, L, d)`` that this dynamics cannot move."""

    def allows_jumps(self, interacts: bool) -> bool:
        """Whether jumps of single particles between updates leave the stationary distribution as it is, given whether
        K depends on the particles."""
        return self.is_sampler

    def jumped(self, cloud: Cloud, which: Bool[Array, "*particles"]) -> Cloud:
        """Return the cloud with its memory adapted to jumps of the particles ``which``; unchanged by default."""
        return cloud

    def settled(self, cloud: Cloud, step_size: Float[Array, ""], noise: Float[Array, ""]) -> Cloud:
        """Return the cloud with its memory adapted to another step and to other scales; unchanged by default. The noise
        is the mean variance of the gradient over all directions."""
        return cloud

    def heat(self, step_size: Float[AnyArray, ""], noise: Float[AnyArray, " d"]) -> Float[AnyArray, " d"] | None:
        """Return how much gradient noise of a variance, along each coordinate, adds to the injected noise, as a share
        of it, if ``K = I``; ``None`` where that is not known."""
        return None

    def hamiltonian(self, cloud: Cloud) -> Float[Array, "*particles"] | None:
        """Return H, the potential energy with that of the momenta, ``(..., L)``; ``None`` without momenta."""
        return None

    def kinetic_temperature(self, memory: tuple[Shaped[Array, "*particles _"], ...]) -> Float[Array, ""] | None:
        """Return the temperature that momenta have, about T in equilibrium; ``None`` if it is not known."""
        return None

    def turned(self, cloud: Cloud) -> Cloud:
        """Return the cloud with all momenta reversed."""
        return cloud

    def init(
        self, key: jax.Array, z: Float[Array, "*particles d"], energy_and_grad: EnergyAndGrad, couple: Couple
    ) -> Cloud:
        """Return a new cloud at positions ``z`` of shape ``(..., L, d)``."""
        raise NotImplementedError(f"{type(self).__name__} does not implement `init`.")

    def step(
        self,
        key: jax.Array,
        cloud: Cloud,
        energy_and_grad: EnergyAndGrad,
        couple: Couple,
        step_size: Float[Array, ""] | float,
    ) -> Cloud:
        """Update all particles at once; the last operation is one gradient evaluation at the new positions."""
        raise NotImplementedError(f"{type(self).__name__} does not implement `step`.")


def reject_nonfinite(cloud: Cloud, proposal: Cloud) -> tuple[Cloud, Bool[Array, "*particles"]]:
    """Return the proposal, except for particles with a value in it that is not finite: these keep their old values.

    :return: the new cloud, and which particles were rejected, ``(..., L)``.
    """
    finite = jnp.isfinite(proposal.potential_energy)
    for array in (proposal.z, proposal.gradient, *proposal.memory):
        finite &= jnp.isfinite(array).all(-1)
    return select(finite, proposal, cloud), ~finite


def most_gained(dimension: int, dynamics: Dynamics) -> float:
    """Return how much energy a particle with momenta may gain in one update."""
    # Noise alone adds energy with a standard deviation of up to the square root of the dimension.
    return (20.0 + 5.0 * dimension**0.5) * dynamics.unit_of_energy


def turn_back(
    cloud: Cloud, proposal: Cloud, dynamics: Dynamics, has_turned: Bool[Array, "*particles"]
) -> tuple[Cloud, Bool[Array, "*particles"]]:
    """Return the proposal, except for particles that gain far more energy than friction and noise give them.

    In a place that is too stiff for the step, momenta grow without bound. Such a particle stays, with its momentum
    reversed, and goes back about the way it came. In equilibrium one update gains so much energy with a probability
    of about one in a million or less, so the stationary distribution is the same to within that.

    Those that were turned back in the update before, ``(..., L)``, go on now: where every update gains energy they
    could never leave, and the energy stored with a particle may be that of other data. Which turn is returned too.
    """
    before, after = dynamics.hamiltonian(cloud), dynamics.hamiltonian(proposal)
    if before is None or after is None:
        return proposal, jnp.zeros(proposal.potential_energy.shape, bool)
    gains = (after - before > most_gained(cloud.z.shape[-1], dynamics)) & ~has_turned
    return select(gains, dynamics.turned(cloud), proposal), gains


def acceptance(
    log_ratio: Float[Array, "*particles"], is_usable: Bool[Array, "*particles"]
) -> Float[Array, "*particles"]:
    """Return the probability to accept a proposal with this log Metropolis-Hastings ratio: 0 where it is not usable."""
    is_usable = is_usable & jnp.isfinite(log_ratio)
    return jnp.where(is_usable, jnp.exp(jnp.minimum(jnp.where(is_usable, log_ratio, 0.0), 0.0)), 0.0)


def thermal_drift(
    coupling: Coupling, gradient: Float[Array, "*particles d"], temperature: float
) -> Float[Array, "*particles d"]:
    """Return ``−K ∇U + T Γ``."""
    repulsion = coupling.repulsion
    return (repulsion if temperature == 1.0 else temperature * repulsion) - coupling.apply(gradient)


def select(which: Bool[Array, "*particles"], new: Tree, old: Tree) -> Tree:
    """Return ``new`` where ``which``, ``(..., L)``, is true, else ``old``: pytrees of arrays with these first axes."""

    def choose(a, b):
        return jnp.where(which.reshape(*which.shape, *[1] * (a.ndim - which.ndim)), a, b)

    return jax.tree.map(choose, new, old)
