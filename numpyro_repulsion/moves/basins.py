"""Jumps that switch themselves on where warmup leaves particles in several basins."""

from __future__ import annotations

from typing import NamedTuple

import jax
from jax import lax, random
import jax.numpy as jnp
import numpy as np

from numpyro_repulsion.dynamics import Cloud, EnergyAndGrad, select
from numpyro_repulsion.warmup import Preconditioner, Stage, WarmupPlan, WarmupState, inverse_root

__all__ = ["BasinJumps", "jump_between_basins", "learn_basins"]

#: Fractions of warmup between which particles are followed; the rest of it tries jumps, if they are of use.
BEGINNING, END = 0.7, 0.95
MAX_COMPONENTS = 64
#: Fewer particles do not tell basins from chance.
MIN_PARTICLES = 4
#: The proposal's standard deviations over those of a particle: tails that are too light would trap particles.
INFLATION = 1.2
#: Bounds on these deviations, in units of the width of a basin.
WIDTHS = (1e-3, 1e3)


class BasinJumps(NamedTuple):
    r"""Metropolis-Hastings steps from a mixture with one Gaussian for each of C particles.

    Coordinates are :math:`w = S^{-1} u`, with :math:`S S^\top` the inverse of the gradients' covariance over T: the
    covariance within a basin, whatever lies between basins. The mixture :math:`q = \frac1C \sum_c N(m_c, 1.44\, V_c)`
    has the mean and the (diagonal) variances of particle c in the second last part of warmup, and is frozen. A proposal
    y is accepted with probability :math:`\min\bigl(1, \frac{\pi(y)\, q(x)}{\pi(x)\, q(y)}\bigr)`, once in each
    iteration for each particle, so that the stationary distribution is the sampler's own.

    - **scale** - S, ``(d, d)`` or ``(d,)``.
    - **origin** - where the C particles were when they began to be followed, ``(C, d)``, in w.
    - **sums** - of their w less that, and of its squares, ``(2, C, d)``.
    - **number** - of iterations in these.
    - **centre**, **width** - of the components, ``(C, d)`` each.
    - **is_on** - whether warmup found several basins.
    - **tally** - how many jumps there were, and the sum of their acceptance probabilities.
    """

    scale: jax.Array
    origin: jax.Array
    sums: jax.Array
    number: jax.Array
    centre: jax.Array
    width: jax.Array
    is_on: jax.Array
    tally: jax.Array

    @staticmethod
    def start(z: jax.Array, plan: WarmupPlan) -> BasinJumps | None:
        """Nothing learned yet, for particles ``(G, L, d)``; ``None`` where jumps would not be exact, or not judged."""
        particles, dimension = z.shape[0] * z.shape[1], z.shape[2]
        if plan.step_size is None or not plan.basins or particles < MIN_PARTICLES:
            return None
        dtype = z.dtype
        zero = jnp.zeros((min(particles, MAX_COMPONENTS), dimension), dtype)
        return BasinJumps(
            scale=jnp.eye(dimension, dtype=dtype) if plan.scale == "dense" else jnp.ones(dimension, dtype),
            origin=zero,
            sums=jnp.stack([zero, zero]),
            number=jnp.zeros((), dtype),
            centre=zero,
            width=zero + 1.0,
            is_on=jnp.zeros((), bool),
            tally=jnp.zeros(2, dtype),
        )

    @property
    def acceptance(self) -> jax.Array:
        """The mean acceptance probability; 0 before the first jump."""
        return self.tally[1] / jnp.maximum(self.tally[0], 1.0)


def learn_basins(stage: Stage, jumps: BasinJumps, warmup: WarmupState, cloud: Cloud, temperature: float) -> BasinJumps:
    """What one more iteration teaches; constant after warmup, but for the tally."""
    if warmup.symptoms is None:
        return jumps
    widest = warmup.symptoms.widest
    begins, ends = stage.at(BEGINNING), stage.at(END)
    is_first, is_last = stage.done == begins, stage.done == ends

    def scale():
        covariance = warmup.moments.gradient_scatter / jnp.maximum(warmup.moments.number, 1.0) / temperature
        return inverse_root(covariance)

    def follow():
        within = lax.cond(is_first, scale, lambda: jumps.scale)
        change = Preconditioner(within)
        w = _followed(change.whiten(cloud.z), len(jumps.origin))
        origin = jnp.where(is_first, w, jumps.origin)
        shift = w - origin
        sums = jnp.where(is_first, 0.0, jumps.sums) + jnp.stack([shift, shift**2])
        number = jnp.where(is_first, 0.0, jumps.number) + 1.0
        mean, square = sums / number
        width = INFLATION * jnp.sqrt(jnp.maximum(square - mean**2, 0.0))
        is_on = is_last & widest.has_basins
        return BasinJumps(within, origin, sums, number, origin + mean, jnp.clip(width, *WIDTHS), is_on, jumps.tally)

    return lax.cond((stage.done >= begins) & (stage.done <= ends), follow, lambda: jumps)


def jump_between_basins(
    key: jax.Array, cloud: Cloud, jumps: BasinJumps, energy_and_grad: EnergyAndGrad, temperature: float
) -> tuple[Cloud, jax.Array, BasinJumps]:
    """One jump of every particle.

    :return: the cloud, which particles have jumped, ``(G, L)``, and the jumps with their acceptance noted.
    """
    change = Preconditioner(jumps.scale)
    start = change.whiten(cloud.z)
    # All random numbers are of one draw: each generator takes a tenth of a second to compile.
    uniform = random.uniform(key, (*start.shape[:2], 2 * start.shape[2] + 2), start.dtype)
    chosen, threshold, radius, angle = jnp.split(uniform, (1, 2, 2 + start.shape[2]), -1)
    index = (chosen[..., 0] * len(jumps.centre)).astype(int)
    noise = jnp.sqrt(-2.0 * jnp.log1p(-radius)) * jnp.cos(2.0 * np.pi * angle)
    end = jumps.centre[index] + jumps.width[index] * noise
    position = change.to_positions(end)
    proposal = (position, *energy_and_grad(position))

    def add(total, coordinate):
        point, centre, width = coordinate
        return total - ((point[..., None] - centre) / width) ** 2 / 2.0 - jnp.log(width), None

    # One coordinate at a time: basins may be thousands of their widths apart, where an expanded square is lost.
    points = jnp.stack([start, end])
    nothing = jnp.zeros((*points.shape[:-1], len(jumps.centre)), points.dtype)
    terms = lax.scan(add, nothing, (jnp.moveaxis(points, -1, 0), jumps.centre.T, jumps.width.T))[0]
    largest = terms.max(-1, keepdims=True)
    at_start, at_end = jnp.log(jnp.sum(jnp.exp(terms - largest), -1)) + largest[..., 0]
    log_ratio = (cloud.potential_energy - proposal[1]) / temperature + at_start - at_end
    usable = jnp.isfinite(log_ratio) & jnp.isfinite(proposal[2]).all(-1)
    probability = jnp.where(usable, jnp.exp(jnp.minimum(jnp.where(usable, log_ratio, 0.0), 0.0)), 0.0)
    jumped = threshold[..., 0] < probability
    z, energy, gradient = select(jumped, proposal, tuple(cloud[:3]))
    tally = jumps.tally + jnp.stack([jnp.ones_like(probability[0, 0]), probability.mean()])
    return Cloud(z, energy, gradient, cloud.memory), jumped, jumps._replace(tally=tally)


def _followed(w, components):
    """As many particles of a cloud ``(G, L, d)`` as there are components, evenly spread over the groups."""
    flat = w.reshape(-1, w.shape[-1])
    return flat[np.arange(components) * len(flat) // components]
