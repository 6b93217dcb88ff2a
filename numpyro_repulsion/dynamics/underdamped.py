"""Dynamics with momenta: friction, constant or adaptive, and noise act on them, repulsion through the curl matrix Q."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import jax
from jax import random
import jax.numpy as jnp
from jaxtyping import Array, Float

from numpyro_repulsion.checks import keep, positive
from numpyro_repulsion.dynamics.base import Cloud, Dynamics, thermal_drift
from numpyro_repulsion.dynamics.step_error import MomentumError, ThermostatError, UnknownError
from numpyro_repulsion.noise import normal
from numpyro_repulsion.rounding import xp


class _Momenta(Dynamics):
    """Base class of dynamics with momenta: how K enters, and the error of a step."""

    friction: float

    def hamiltonian(self, cloud):
        return cloud.potential_energy + jnp.sum(cloud.memory[0] ** 2, -1) / 2

    def kinetic_temperature(self, memory):
        return jnp.mean(memory[0] ** 2)

    def turned(self, cloud):
        return cloud._replace(memory=(-cloud.memory[0], *cloud.memory[1:]))

    def _splits(self, coupling):
        """Whether an update is symmetric and so second order."""
        return coupling.is_identity

    def step_error(self, coupling):
        if jnp.ndim(coupling.diagonal):
            # The drift by K m then distorts volumes, a first-order bias without a known bound.
            return UnknownError(
                f"{type(self).__name__} cannot adapt its step size for an interaction whose K_ii depends on the "
                "particles, such as Laplacian(); give `step_size`, use SGLDR, or, for your own kernel with constant "
                "k(x, x), set `diagonal_varies = False` in its class."
            )
        return MomentumError(coupling, self.friction, self._splits(coupling))


@dataclass(frozen=True)
class Relativistic:
    r"""The kinetic energy :math:`\sum_k c^2 \sqrt{1 + m_k^2 / c^2}`, with velocities below a speed of light c.

    However steep the potential, no coordinate moves more than ``εc`` in an update (with ``K = I``).

    :param speed: c, in units of the (whitened) positions per unit of time.
    :raises ValueError: unless ``speed`` is a positive number.

    **References:**

    1. *Relativistic Monte Carlo*, X. Lu, V. Perrone, L. Hasenclever, Y. W. Teh and S. J. Vollmer,
       https://arxiv.org/abs/1609.04388

    **Example**

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from numpyro_repulsion.dynamics import Relativistic
        >>> [f"{v:.2f}" for v in Relativistic(speed=2.0).velocity(jnp.array([0.1, 100.0]))]
        ['0.10', '2.00']
    """

    speed: float = 1.0

    def __post_init__(self):
        keep(self, "speed", positive)

    def energy(self, m: Float[Array, "*particles d"]) -> Float[Array, "*particles"]:
        """Return the energy of momenta ``(..., d)``, of shape ``(...)``."""
        return self.speed**2 * jnp.sum(jnp.sqrt(1.0 + (m / self.speed) ** 2), -1)

    def velocity(self, m: Float[Array, "*particles d"]) -> Float[Array, "*particles d"]:
        """Return the gradient of the energy."""
        return m / jnp.sqrt(1.0 + (m / self.speed) ** 2)

    def momenta(self, white: Float[Array, "*particles d"], temperature: float) -> Float[Array, "*particles d"]:
        """Map standard normal variables to momenta from ``exp(−energy / T)``, through its distribution function."""
        width = temperature**0.5 + temperature / self.speed
        grid = jnp.linspace(-12.0 * width, 12.0 * width, 4001)
        log_density = -self.energy(grid[:, None]) / temperature
        distribution = jnp.cumsum(jnp.exp(log_density - log_density.max()))
        distribution = (distribution - distribution[0]) / (distribution[-1] - distribution[0])
        # In the lower tail, because the upper one rounds to 1 in single precision.
        size = -jnp.interp(jax.scipy.stats.norm.cdf(-jnp.abs(white)), distribution, grid)
        return jnp.copysign(size, white).astype(white.dtype)


@dataclass(frozen=True)
class Underdamped(_Momenta):
    r"""Langevin dynamics with momenta m: SGHMC, and SGHMC with repulsion.

    .. math::
        dz = K(z)\, m\, dt, \qquad
        dm = \bigl(-K(z) \nabla U + T\,\Gamma(z) - C\, m\bigr)\, dt + \sqrt{2 C T}\; dW

    With the energy ``H = U(z) + ‖m‖²/2`` this is ``D = diag(0, C I)`` and ``Q = [[0, −K], [K, 0]]`` in the complete
    recipe. Γ, the divergence of K as in :class:`~numpyro_repulsion.dynamics.Overdamped`, corrects the momenta only. As
    ε → 0 the stationary distribution is ``∏_i exp(−U(z_i) / T) × N(m_i; 0, T I)``. The noise is white for any K, so no
    Cholesky factor is needed. With ``K = I`` this is SGHMC.

    If ``K = I``, an update is BAOAB (half a kick, half a drift, friction and noise, half a drift, half a kick), with a
    bias of second order in ε. Otherwise it is half a kick, friction and noise, half a kick, and a drift by ``K m``, of
    first order if K depends on the positions. Friction and noise are exact for any ε. Minibatch noise of variance V
    heats the momenta by ``εV / (2C)`` of T, for long steps by more, times the mean diagonal of K². Where
    warmup knows V, the injected noise is as much smaller (``docs/minibatch-noise.md``).

    ``step_size`` is a time step: ε moves a particle about as far as a step ``ε²/2`` of
    :class:`~numpyro_repulsion.dynamics.Overdamped`.

    :param friction: C > 0, in the units of the (whitened) positions; 2 is critical for a direction of unit scale.
    :param temperature: T >= 0; values other than 1 do not sample the posterior (see
        :class:`~numpyro_repulsion.dynamics.Overdamped`). 0 is gradient descent with momentum.
    :param kinetic: ``None`` is ``‖m‖²/2``. :class:`~numpyro_repulsion.dynamics.Relativistic` limits velocities: ``K m``
        and ``C m`` become ``K ∇H_m`` and ``C ∇H_m``, momenta have the distribution ``exp(−energy / T)``, and the
        integrator is first order.
    :raises ValueError: for a friction that is not positive, or a temperature that is negative or not finite.

    **References:**

    1. *Stochastic Gradient Hamiltonian Monte Carlo*, T. Chen, E. B. Fox and C. Guestrin,
       https://arxiv.org/abs/1402.4102
    2. *Robust and efficient configurational molecular sampling via Langevin dynamics*, B. Leimkuhler and
       C. Matthews, https://arxiv.org/abs/1304.3269

    **Example**

    .. doctest::

        >>> from numpyro_repulsion import SGHMC
        >>> from numpyro_repulsion.dynamics import Underdamped
        >>> kernel = SGHMC(potential_fn=lambda z: z**2 / 2, dynamics=Underdamped(friction=2.0))
    """

    friction: float = 1.0
    temperature: float = 1.0
    kinetic: Relativistic | None = None

    def __post_init__(self):
        keep(self, "friction", positive)
        keep(self, "temperature", positive, or_zero=True)
        if self.kinetic is not None and not isinstance(self.kinetic, Relativistic):
            raise TypeError(f"Underdamped: `kinetic` must be None or Relativistic(speed=...); got {self.kinetic!r}.")

    is_sampler = property(lambda self: self.temperature > 0.0)

    def hamiltonian(self, cloud):
        if self.kinetic is None:
            return super().hamiltonian(cloud)
        return cloud.potential_energy + self.kinetic.energy(cloud.memory[0])

    def kinetic_temperature(self, memory):
        return super().kinetic_temperature(memory) if self.kinetic is None else None

    def heat(self, step_size, noise):
        if self.kinetic is not None or not self.is_sampler:
            return None
        # By how far an impulse sends a particle before friction stops it: a kick acts half a drift before the noise.
        return step_size**2 * noise / (4.0 * self.temperature) / xp.tanh(self.friction * step_size / 2.0)

    def init(self, key, z, energy_and_grad, couple):
        white = couple(z).white_noise(key, z)
        if self.kinetic is None or not self.is_sampler:
            m = self.temperature**0.5 * white
        else:
            m = self.kinetic.momenta(white, self.temperature)
        energy, gradient = energy_and_grad(z)
        return Cloud(z, energy, gradient, (m,))

    def step(self, key, cloud, energy_and_grad, couple, step_size):
        coupling = couple(cloud.z)
        (m,) = cloud.memory
        if self._splits(coupling):
            m = m - step_size / 2 * cloud.gradient
            z = cloud.z + step_size / 2 * m
            m = self._rub(coupling.white_noise(key, cloud.z), m, step_size)
            z = z + step_size / 2 * m
            energy, gradient = energy_and_grad(z)
            return Cloud(z, energy, gradient, (m - step_size / 2 * gradient,))
        kick = step_size / 2 * thermal_drift(coupling, cloud.gradient, self.temperature)
        m = self._rub(coupling.white_noise(key, cloud.z), m + kick, step_size) + kick
        z = cloud.z + step_size * coupling.apply(m if self.kinetic is None else self.kinetic.velocity(m))
        energy, gradient = energy_and_grad(z)
        return Cloud(z, energy, gradient, (m,))

    def _splits(self, coupling):
        return coupling.is_identity and self.kinetic is None

    def _rub(self, white, m, step_size):
        """Apply friction and noise over a step: exactly for ‖m‖²/2, by Euler's method for other energies."""
        if self.kinetic is None:
            keep = jnp.exp(-self.friction * step_size)
            return keep * m + jnp.sqrt(self.temperature * (1.0 - keep**2)) * white
        noise = jnp.sqrt(2.0 * self.friction * self.temperature * step_size) * white
        return m - step_size * self.friction * self.kinetic.velocity(m) + noise


@dataclass(frozen=True)
class Thermostat(_Momenta):
    r"""Langevin dynamics whose friction ζ adapts, one for each particle: SGNHT, and SGNHT with repulsion.

    .. math::
        dz = K m\, dt, \qquad dm = (-K \nabla U + T\,\Gamma - \zeta m)\, dt + \sqrt{2 C T}\; dW, \qquad
        d\zeta = (\|m\|^2 / d - T)\, dt / \mu

    With ``H = U(z) + ‖m‖²/2 + μ d (ζ − C)²/2`` this is ``D = diag(0, C I, 0)``. Q couples z with m through K, as in
    :class:`~numpyro_repulsion.dynamics.Underdamped`, and m with ζ: ``Q_mζ = m / (μ d) = −Q_ζmᵀ``. As ε → 0 the
    stationary distribution is ``∏_i exp(−U(z_i) / T) × N(m_i; 0, T I) × N(ζ_i; C, T / (μ d))``: ζ has mean C. If ``K =
    I``, minibatch noise of variance V in every direction heats the momenta, and ζ rises by ``εV / (2T)`` to cool them,
    so the distribution of z stays the same. Any other K spreads the noise of one particle over others, differently at
    each place, and ζ removes only a part of that.

    If ``K = I``, an update is BADODAB, of second order in ε. Long steps leave momenta that noise kicks warmer than
    positions, so ζ follows the temperature of the positions: ``(1 − w) ‖m‖² / d + w C T / ζ`` with
    ``w = (1 − sech(εζ)) / 2`` takes the place of ``‖m‖² / d``. On a Gaussian with one curvature and for a constant ζ
    that is exact for any ε and V. For any other K an update is half a kick, friction, half a kick, the thermostat and a
    drift by ``K m``, of first order if K depends on the positions.

    :param friction: C > 0, the friction that balances the injected noise alone.
    :param temperature: T > 0; values other than 1 do not sample the posterior.
    :param inertia: μ > 0, how slowly ζ follows. ``None`` is ``max(1, 10 / d)``, because with few parameters and little
        inertia ζ sometimes turns negative and drives a particle far out. At ε = 1 on N(0, I), where E z⁴ is 3, it was
        561, 10.6 and 3.39 in 1, 2 and 5 dimensions with ``inertia=1``, and 3.13, 3.12 and 3.12 with ``None``.
    :raises ValueError: for values that are not positive, finite numbers.

    **References:**

    1. *Bayesian Sampling Using Stochastic Gradient Thermostats*, N. Ding, Y. Fang, R. Babbush, C. Chen, R. D. Skeel
       and H. Neven, NIPS 2014
    2. *Adaptive Thermostats for Noisy Gradient Systems*, B. Leimkuhler and X. Shang, https://arxiv.org/abs/1505.06889

    **Example**

    .. doctest::

        >>> from numpyro_repulsion import SGNHT
        >>> from numpyro_repulsion.dynamics import Thermostat
        >>> kernel = SGNHT(potential_fn=lambda z: z**2 / 2, dynamics=Thermostat(friction=2.0))
    """

    #: Noise that cancels within a sweep heats no position, but ζ would rise and cool the momenta.
    allows_sweeps: ClassVar[bool] = False
    absorbs_noise: ClassVar[bool] = True

    friction: float = 1.0
    temperature: float = 1.0
    inertia: float | None = None

    def __post_init__(self):
        for name in ("friction", "temperature", *(() if self.inertia is None else ("inertia",))):
            keep(self, name, positive)

    def _inertia(self, dimension):
        return max(1.0, 10.0 / dimension) if self.inertia is None else self.inertia

    def step_error(self, coupling):
        is_plain = self._splits(coupling)
        return ThermostatError(coupling, self.friction, True) if is_plain else super().step_error(coupling)

    def init(self, key, z, energy_and_grad, couple):
        momentum_key, friction_key = random.split(key)
        m = self.temperature**0.5 * couple(z).white_noise(momentum_key, z)
        spread = (self.temperature / (self._inertia(z.shape[-1]) * z.shape[-1])) ** 0.5
        ζ = self.friction + spread * normal(friction_key, (*z.shape[:-1], 1), z.dtype)
        energy, gradient = energy_and_grad(z)
        return Cloud(z, energy, gradient, (m, ζ))

    def settled(self, cloud, step_size, noise):
        # A friction that noise has raised would fall no faster than T / μ, however long that freezes the particles.
        m, ζ = cloud.memory
        balanced = self.friction + step_size * noise / (2.0 * self.temperature)
        return cloud._replace(memory=(m, jnp.full_like(ζ, balanced)))

    def step(self, key, cloud, energy_and_grad, couple, step_size):
        coupling = couple(cloud.z)
        m, ζ = cloud.memory
        white = coupling.white_noise(key, cloud.z)
        if self._splits(coupling):
            m = m - step_size / 2 * cloud.gradient
            z = cloud.z + step_size / 2 * m
            ζ = ζ + step_size / 2 * self._excess(m, ζ, step_size)
            m = self._rub(white, m, ζ, step_size)
            ζ = ζ + step_size / 2 * self._excess(m, ζ, step_size)
            z = z + step_size / 2 * m
            energy, gradient = energy_and_grad(z)
            return Cloud(z, energy, gradient, (m - step_size / 2 * gradient, ζ))
        kick = step_size / 2 * thermal_drift(coupling, cloud.gradient, self.temperature)
        m = self._rub(white, m + kick, ζ, step_size) + kick
        ζ = ζ + step_size * (jnp.mean(m**2, -1, keepdims=True) - self.temperature) / self._inertia(m.shape[-1])
        z = cloud.z + step_size * coupling.apply(m)
        energy, gradient = energy_and_grad(z)
        return Cloud(z, energy, gradient, (m, ζ))

    def _excess(self, m, ζ, step_size):
        share = (1.0 - 1.0 / jnp.cosh(step_size * ζ)) / 2.0
        square = jnp.mean(m**2, -1, keepdims=True)
        own = jnp.where(share > 0, self.friction * self.temperature * share / jnp.where(share > 0, ζ, 1.0), 0.0)
        return ((1.0 - share) * square + own - self.temperature) / self._inertia(m.shape[-1])

    def _rub(self, white, m, ζ, step_size):
        """Apply friction ζ, which may be negative, and noise over a step, exactly."""
        variance = 2.0 * step_size * self.friction * self.temperature * _mean_decay(2.0 * step_size * ζ)
        return jnp.exp(-step_size * ζ) * m + jnp.sqrt(variance) * white


def _mean_decay(x):
    """Return the mean of exp(−s) over s between 0 and x."""
    small = jnp.abs(x) < 1e-3
    return jnp.where(small, 1.0 - x / 2.0, -jnp.expm1(-x) / jnp.where(small, 1.0, x))
