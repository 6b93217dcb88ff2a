"""Arrival with minibatches: noisy Adam, whose steps do not depend on the scale of a coordinate's gradient."""

from __future__ import annotations

from dataclasses import dataclass
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Integer
import numpy as np

from numpyro_repulsion.dynamics import EnergyAndGrad, select
from numpyro_repulsion.interactions import RBF, median_bandwidth
from numpyro_repulsion.noise import normal
from numpyro_repulsion.rounding import AnyArray, xp


@dataclass(frozen=True)
class AdamConstants:
    """Constants of the descent and the search for lost particles, chosen by measurement."""

    #: Decay rates of the means of gradients and of their squares, which forget those at the starts within the arrival.
    decays: tuple[float, float] = (0.9, 0.995)
    #: The smallest and largest rate, in units of the standard deviations of the starts. Each particle has its own, so
    #: that the fastest that do not overshoot lead, and the others are moved to them.
    rates: tuple[float, float] = (0.01, 0.1)
    #: The rate of all particles if the arrival is prolonged, because those that share gradients must keep pace.
    late_rate: float = 0.07
    #: The rate at the end, relative to that at the start.
    cooled: float = 1e-3
    #: A coordinate is far from where it belongs if the mean of recent gradients exceeds this share of the root mean
    #: square gradient, and the mean of all signs the other. The log of its step then grows, and otherwise decays, per
    #: update. Recent ones alone would not do: as long as many effects take to follow their scale, its gradient keeps
    #: its sign too.
    far: float = 0.8
    course: float = 0.8
    growth: float = 0.1
    shrinkage: float = 0.9
    #: The median distance is that of so many particles of a group: there are their square of distances.
    compared: int = 100
    #: A particle is lost if the log of its posterior mass is behind by more than the sum of these, the second times √d.
    behind: float = 10.0
    behind_by_dimension: float = 2.0


ADAM = AdamConstants()


class Surroundings(NamedTuple):
    """Sums of energies and squared gradients of each particle over a window; they estimate nearby posterior mass."""

    number: Float[AnyArray, ""]  # of iterations in the window
    energy: Float[AnyArray, "*particles"]  # the sum of U
    square: Float[AnyArray, "*particles d"]  # the sum of the squared whitened gradient

    @staticmethod
    def empty(shape: tuple[int, ...], dtype) -> Surroundings:
        return Surroundings(jnp.zeros((), dtype), jnp.zeros(shape[:2], dtype), jnp.zeros(shape, dtype))

    def add(self, energy: Float[AnyArray, "*particles"], gradient: Float[AnyArray, "*particles d"]) -> Surroundings:
        """Return the sums with one more iteration."""
        return Surroundings(self.number + 1.0, self.energy + energy, self.square + gradient**2)

    def is_lost(self, temperature: float = 1.0) -> np.ndarray:
        """Return which particles, ``(G, L)``, have almost no posterior mass around them compared with the best one.

        In a basin of curvature H, the mean of U is its minimum plus ``d/2`` and the mean of ``g gᵀ`` is H. So the basin
        holds a posterior mass of ``exp(−E U / T) |E g gᵀ|^(−1/2)``, up to a constant. ``E g gᵀ`` has two estimates: one
        width per coordinate overestimates the mass around a particle that has not moved; one for all coordinates
        underestimates a basin that is narrow in some of them. A particle is lost only if it is far behind by both.
        """
        number, dimension = max(float(self.number), 1.0), self.square.shape[-1]
        energy, square = self.energy / (number * temperature), self.square / number
        smallest = np.finfo(square.dtype).tiny
        log_weights = (
            -energy - 0.5 * np.sum(np.log(square + smallest), -1),
            -energy - 0.5 * dimension * np.log(np.mean(square, -1) + smallest),
        )
        lost = np.ones(energy.shape, bool)
        for log_weight in log_weights:
            best = np.nanmax(np.where(np.isfinite(log_weight), log_weight, -np.inf))
            lost &= ~(log_weight >= best - ADAM.behind - ADAM.behind_by_dimension * dimension**0.5)
        return lost


#: ``(u, U, ∇U)``
Position = tuple[Float[AnyArray, "*particles d"], Float[AnyArray, "*particles"], Float[AnyArray, "*particles d"]]


class Adam(NamedTuple):
    """The state of Adam for each particle."""

    number: Integer[AnyArray, ""]  # how many updates it has made
    mean: Float[AnyArray, "*particles d"]  # of recent gradients
    sign: Float[AnyArray, "*particles d"]  # the mean of the signs of gradients, over as many as that of the squares
    square: Float[AnyArray, "*particles d"]  # the mean of their squares
    growth: Float[AnyArray, "*particles d"]  # log of the factor by which the step of a far coordinate has grown
    unit: Float[AnyArray, " d"]  # standard deviations: of the starts, and later of the whitened particles

    @staticmethod
    def start(
        u: Float[AnyArray, "*particles d"], unit: Float[AnyArray, " d"] | Float[AnyArray, ""] | float = 1.0
    ) -> Adam:
        """Return the state for particles ``(G, L, d)`` at their starts.

        :param unit: the unit of coordinates in which starts do not differ, as for a single particle.
        """
        flat = u.reshape(-1, u.shape[-1])
        # The median absolute deviation of a normal distribution is 0.6745 sds.
        sds = xp.median(xp.abs(flat - xp.median(flat, axis=0)), axis=0) / 0.6745
        nothing = xp.zeros_like(u)
        unit = xp.where(sds > 0, sds, unit)
        return Adam(np.zeros((), np.int32), nothing, nothing, nothing, nothing, unit.astype(u.dtype))


def first_rates(shape: tuple[int, ...], dtype) -> Float[AnyArray, "*particles"]:
    """Return the rates of particles ``(G, L)``, spread evenly in logarithm."""
    low, high = ADAM.rates
    share = (jnp.arange(shape[1], dtype=dtype) + 0.5) / shape[1]
    return jnp.broadcast_to(low * (high / low) ** share, shape[:2])


def svgd_direction(
    u: Float[AnyArray, "*particles d"], gradient: Float[AnyArray, "*particles d"]
) -> Float[AnyArray, "*particles d"]:
    r"""Return :math:`K \nabla U - \Gamma` with a Gaussian kernel of the median bandwidth; of one particle, ∇U."""
    size = u.shape[-2]
    if size == 1:
        return gradient
    some = u[:, : ADAM.compared]
    bandwidth = median_bandwidth(some) * (math.log(some.shape[-2]) / math.log(size))
    coupling = RBF().couple(u, bandwidth)
    return coupling.apply(gradient) - coupling.repulsion


def descend(
    key: jax.Array,
    position: Position,
    slope: Float[AnyArray, "*particles d"],
    state: Adam,
    rate: Float[AnyArray, "*particles"],
    share_done: Float[AnyArray, ""] | float,
    temperature: Float[AnyArray, ""] | float,
    energy_and_grad: EnergyAndGrad,
) -> tuple[Position, Adam, Float[AnyArray, "*particles"]]:
    r"""Move each particle by one update of Adam with Langevin noise.

    .. math::
        u \leftarrow u - \eta\, \hat m / \sqrt{\hat v} + \sqrt{2 T \eta / \sqrt{\hat v}}\; \xi

    where :math:`\hat m` and :math:`\hat v` are means of slopes and of their squares.

    Where minibatch noise is larger than gradients, :math:`\hat v` hardly depends on the position, so this is Langevin
    dynamics with a constant diagonal preconditioner, exact for T = 1 as η falls to zero (by half a cosine). With T = 0
    particles would collect where a density is high but holds no mass, as in the neck of a funnel. A particle whose new
    position is not finite stays, with half its rate.

    :param slope: what the particles descend, ``(G, L, d)``: ∇U or :func:`svgd_direction`.
    :param rate: η at the start, in units of the standard deviations of the starts, ``(G, L)``.
    :param share_done: the share of the arrival that is done, in [0, 1].
    """
    u = position[0]
    count = state.number + 1
    steps, (short, long) = count.astype(u.dtype), ADAM.decays
    mean = short * state.mean + (1.0 - short) * slope
    sign, square = (
        long * old + (1.0 - long) * new for old, new in ((state.sign, jnp.sign(slope)), (state.square, slope**2))
    )
    size, course = jnp.sqrt(square / (1.0 - long**steps)), sign / (1.0 - long**steps)
    direction = mean / (1.0 - short**steps) / jnp.where(size > 0, size, 1.0)
    # The first means are dominated by the first gradient.
    goes_on = jnp.sign(direction) * course > ADAM.course
    is_far = (jnp.abs(direction) > ADAM.far) & goes_on & (count > 10)
    growth = jnp.where(is_far, state.growth + ADAM.growth, ADAM.shrinkage * state.growth)
    cooling = ADAM.cooled + (1.0 - ADAM.cooled) * 0.5 * (1.0 + jnp.cos(jnp.pi * jnp.clip(share_done, 0.0, 1.0)))
    step = rate[..., None] * cooling * jnp.exp(growth) * state.unit
    # Not wider than for a posterior as wide as the starts.
    variance = 2.0 * temperature * step / jnp.maximum(size, 1.0 / state.unit)
    proposal = u - step * direction + jnp.sqrt(variance) * normal(key, u.shape, u.dtype)
    energy, gradient = energy_and_grad(proposal)
    usable = jnp.isfinite(energy) & jnp.isfinite(gradient).all(-1)
    moved = select(usable, (proposal, energy, gradient), position)
    # After a rejected update, the old momentum would propose the same position again.
    mean, growth = select(usable, (mean, growth), (jnp.zeros_like(mean), jnp.zeros_like(growth)))
    return moved, Adam(count, mean, sign, square, growth, state.unit), jnp.where(usable, rate, rate / 2.0)
