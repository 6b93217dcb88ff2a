"""How the cloud moves: the blocks D and Q of the complete recipe, and one update.

A dynamics is a pair of pure functions on a cloud of particles: :meth:`Dynamics.init` and :meth:`Dynamics.step`. It
sees the target through a force, ``force(z) -> (U, ∇U)``, and the other particles through a coupling.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from numpyro_repulsion.interactions import Coupling

__all__ = ["Cloud", "Dynamics", "Overdamped", "hold", "select"]

Force = Callable[[jax.Array], tuple[jax.Array, jax.Array]]
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

    **Example**

    .. doctest::

        >>> from jax import random
        >>> import jax.numpy as jnp
        >>> from numpyro_repulsion import Dynamics, Independent
        >>> from numpyro_repulsion.dynamics import Cloud

        >>> class Descent(Dynamics):  # D = 0
        ...     is_sampler = False
        ...     def init(self, key, z, force, couple):
        ...         return Cloud(z, *force(z))
        ...     def step(self, key, cloud, force, couple, step_size):
        ...         z = cloud.z - step_size * couple(cloud.z).apply(cloud.gradient)
        ...         return Cloud(z, *force(z))

        >>> force, couple = lambda z: (0.5 * jnp.sum(z**2, -1), z), Independent().couple
        >>> cloud = Descent().init(random.key(0), jnp.ones((2, 1)), force, couple)
        >>> Descent().step(random.key(1), cloud, force, couple, 0.5).z.tolist()
        [[0.5], [0.5]]
    """

    #: Whether successive clouds are draws; if not, the result of a run is its last cloud.
    is_sampler: bool = True

    def order(self, coupling: Coupling) -> int:
        """The order in ε of the bias of the stationary law: 1, or 2 for better integrators."""
        del coupling
        return 1

    def init(self, key: jax.Array, z: jax.Array, force: Force, couple: Couple) -> Cloud:
        """The cloud at rest at positions ``z`` of shape ``(..., L, d)``."""
        raise NotImplementedError(f"{type(self).__name__} does not implement `init`.")

    def step(self, key: jax.Array, cloud: Cloud, force: Force, couple: Couple, step_size: jax.Array | float) -> Cloud:
        """One update of all particles at once; ends with one evaluation of the force, at the new positions."""
        raise NotImplementedError(f"{type(self).__name__} does not implement `step`.")


@dataclass(frozen=True)
class Overdamped(Dynamics):
    r"""Langevin dynamics of the positions alone: SGLD, SGLD with repulsion, and SVGD.

    .. math::
        Z \leftarrow Z + \epsilon\,(-K \nabla U(Z) + T\,\Gamma) + \sqrt{2 \epsilon T}\; C \xi,
        \qquad C C^\top = K

    ``D = K(Z) ⊗ I``, ``Q = 0``, ``Γ_i = Σ_j ∇_{z_j} K_ij``. As ε → 0 the stationary law is
    ``∏_i exp(−U(z_i) / T)``; for ``T = 1`` that is L independent draws from the posterior
    (:class:`~numpyro_repulsion.Balanced` noise keeps each particle's law and gives up the product). With ``K = I``
    this is parallel SGLD. There is no factor ``1/L``: the paper's step is ``L`` times ours.

    :param integrator: ``"euler"`` is the equation above. ``"lm"`` (Leimkuhler & Matthews) replaces the noise
        ``C_t ξ_t`` by ``(C_t ξ_t + C_{t−1} ξ_{t−1}) / 2``, at no cost. For ``K = I`` that makes the bias of the
        stationary law second order in ε. For other K the law is right as ε → 0 too (the noise that an update adds
        does not depend on the K it was drawn with beyond the past, as Itô's rule asks), with a bias of first order
        that is smaller: see the table. ``None`` is ``"lm"`` where ``K = I`` and ``"euler"`` elsewhere.

        Twenty particles on N(0, I), the RBF kernel at the bandwidth that warmup would choose, ε = 0.1 (the exact
        answers are 1 and 1; standard errors 0.001):

        ======  ============  ===========  ===============  ==============
        d       euler,        lm,          euler, 20 ×      lm, 20 ×
                variance      variance     variance of      variance of
                                           the mean         the mean
        ======  ============  ===========  ===============  ==============
        2       1.033         1.015        1.59             1.01
        5       1.030         1.014        1.47             1.01
        10      1.037         1.015        1.38             1.01
        ======  ============  ===========  ===============  ==============

    :param temperature: T >= 0. Anything but 1 is no longer the posterior: below 1 it is a "cold" one, and 0 is
        gradient descent with coupled gradients.
    :param noise: ``False`` drops the noise but keeps Γ. With a repulsive interaction that is Stein variational
        gradient descent: an optimizer of the cloud, whose spread comes out too small, not a sampler.
    :raises ValueError: for an unknown integrator, or a temperature that is negative or not finite.

    **References:**

    1. *A Complete Recipe for Stochastic Gradient MCMC*, Y.-A. Ma, T. Chen and E. Fox,
       https://arxiv.org/abs/1506.04696
    2. *Rational Construction of Stochastic Numerical Methods for Molecular Sampling*, B. Leimkuhler and
       C. Matthews, https://arxiv.org/abs/1203.5428

    **Example**

    .. doctest::

        >>> from jax import random
        >>> import jax.numpy as jnp
        >>> from numpyro_repulsion import Overdamped, RBF
        >>> def force(z):
        ...     return 0.5 * jnp.sum(z**2, -1), z
        >>> z = random.normal(random.key(0), (6, 2))
        >>> dynamics, couple = Overdamped(), RBF(bandwidth=2.0).couple
        >>> cloud = dynamics.init(random.key(1), z, force, couple)
        >>> dynamics.step(random.key(2), cloud, force, couple, 0.1).z.shape
        (6, 2)
    """

    integrator: str | None = None
    temperature: float = 1.0
    noise: bool = True

    def __post_init__(self):
        if self.integrator not in (None, "euler", "lm"):
            raise ValueError(f"Overdamped: `integrator` must be None, 'euler' or 'lm'; got {self.integrator!r}.")
        if not (isinstance(self.temperature, Real) and 0.0 <= self.temperature < float("inf")):
            raise ValueError(
                f"Overdamped: `temperature` must be a finite number, 0 or above; got {self.temperature!r}."
            )
        # A NumPy scalar would carry its precision into the particles'.
        object.__setattr__(self, "temperature", float(self.temperature))

    @property
    def is_sampler(self):
        return self.noise and self.temperature > 0.0

    def averages_noise(self, is_identity: bool) -> bool:
        """Whether the noise is averaged over two updates, given whether ``K = I``."""
        if not self.noise or self.integrator == "euler":
            return False
        return is_identity or self.integrator == "lm"

    def order(self, coupling):
        return 2 if coupling.is_identity and self.averages_noise(True) else 1

    def init(self, key, z, force, couple):
        coupling = couple(z)
        memory = (coupling.draw(key),) if self.averages_noise(coupling.is_identity) else ()
        return Cloud(z, *force(z), memory)

    def step(self, key, cloud, force, couple, step_size):
        coupling = couple(cloud.z)
        drift = self._thermal(coupling.repulsion) - coupling.apply(cloud.gradient)
        z, memory = cloud.z + step_size * drift, cloud.memory
        if self.noise:
            noise = drawn = coupling.draw(key)
            if memory:
                noise, memory = (drawn + memory[0]) / 2, (drawn,)
            z = z + jnp.sqrt(2.0 * step_size * self.temperature) * noise
        return Cloud(z, *force(z), memory)

    def _thermal(self, repulsion):
        return repulsion if self.temperature == 1.0 else self.temperature * repulsion


def hold(cloud: Cloud, proposal: Cloud) -> tuple[Cloud, jax.Array]:
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
