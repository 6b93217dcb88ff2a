"""Dynamics with momenta whose friction adapts, so that it removes the heat of gradient noise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from jax import random
import jax.numpy as jnp

from numpyro_repulsion.checks import keep, positive
from numpyro_repulsion.dynamics.base import Cloud
from numpyro_repulsion.dynamics.step_error import MomentumError, ThermostatError
from numpyro_repulsion.dynamics.underdamped import Momenta
from numpyro_repulsion.noise import normal

__all__ = ["Thermostat"]


@dataclass(frozen=True)
class Thermostat(Momenta):
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
    that is exact for any ε and V. At ``ε = 0.6``, ``V = 2`` the variance of N(0, I) in 20 dimensions is 0.99, where
    ``‖m‖² / d`` makes it 0.90. For any other K an update is half a kick, friction, half a kick, the thermostat and a
    drift by ``K m``, of first order if K depends on the positions.

    :param friction: C > 0, the friction that balances the injected noise alone.
    :param temperature: T > 0; values other than 1 do not sample the posterior.
    :param inertia: μ > 0, how slowly ζ follows. ``None`` is ``max(1, 10 / d)``, because with few parameters and little
        inertia ζ sometimes turns negative and drives a particle far out. At ε = 1 on N(0, I), where E z⁴ is 3:

        ====  ======================  =============================
        d     E z⁴, ``inertia=1``     E z⁴, ``inertia=None``
        ====  ======================  =============================
        1     561                     3.13
        2     10.6                    3.12
        5     3.39                    3.12
        ====  ======================  =============================

    :raises ValueError: for values that are not positive, finite numbers.

    **References:**

    1. *Bayesian Sampling Using Stochastic Gradient Thermostats*, N. Ding, Y. Fang, R. Babbush, C. Chen, R. D. Skeel
       and H. Neven, NIPS 2014
    2. *Adaptive Thermostats for Noisy Gradient Systems*, B. Leimkuhler and X. Shang, https://arxiv.org/abs/1505.06889

    **Example**

    .. doctest::

        >>> from jax import random
        >>> import jax.numpy as jnp
        >>> from numpyro_repulsion import Independent
        >>> from numpyro_repulsion.dynamics import Thermostat
        >>> def energy_and_grad(z):
        ...     return 0.5 * jnp.sum(z**2, -1), z
        >>> dynamics, couple = Thermostat(friction=2.0), Independent().couple
        >>> cloud = dynamics.init(random.key(1), jnp.ones((6, 2)), energy_and_grad, couple)
        >>> momenta, friction = dynamics.step(random.key(2), cloud, energy_and_grad, couple, 0.1).memory
        >>> momenta.shape, friction.shape
        ((6, 2), (6, 1))
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

    @property
    def carries(self):
        return "momenta and a friction for each particle"

    def step_error(self, coupling):
        error = super().step_error(coupling)
        if not (coupling.is_identity and isinstance(error, MomentumError)):
            return error
        return ThermostatError(coupling, self.friction, self._splits(coupling))

    def init(self, key, z, energy_and_grad, couple):
        momentum_key, friction_key = random.split(key)
        m = self.temperature**0.5 * self._white(momentum_key, z, couple(z))
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
        white = self._white(key, cloud.z, coupling)
        if self._splits(coupling):
            m = m - step_size / 2 * cloud.gradient
            z = cloud.z + step_size / 2 * m
            ζ = ζ + step_size / 2 * self._excess(m, ζ, step_size)
            m = self._rub(white, m, ζ, step_size)
            ζ = ζ + step_size / 2 * self._excess(m, ζ, step_size)
            z = z + step_size / 2 * m
            energy, gradient = energy_and_grad(z)
            return Cloud(z, energy, gradient, (m - step_size / 2 * gradient, ζ))
        kick = step_size / 2 * self._kick(coupling, cloud.gradient)
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
