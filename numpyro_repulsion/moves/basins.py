"""Jumps that switch on automatically if warmup leaves particles in several basins."""

from __future__ import annotations

from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from numpyro_repulsion.moves.base import Move, Proposal
from numpyro_repulsion.noise import uniform
from numpyro_repulsion.rounding import xp
from numpyro_repulsion.warmup import Preconditioner, inverse_root

__all__ = ["BasinsState", "Basins"]

#: Fractions of warmup between which particles are followed; the rest of warmup tries jumps if there are basins.
BEGINNING, END = 0.7, 0.95
MAX_COMPONENTS = 64
#: The proposal's standard deviations divided by those of a particle: tails that are too light would trap particles.
INFLATION = 1.2
#: Bounds on these deviations, in units of the width of a basin.
WIDTHS = (1e-3, 1e3)


class BasinsState(NamedTuple):
    """The learned state of jumps between basins; after warmup only the tally changes.

    - **scale** - S, ``(d, d)`` or ``(d,)``.
    - **origin** - the first followed positions of the C particles, ``(C, d)``, in w.
    - **sums** - the sums of w minus the origin and of its squares, ``(2, C, d)``.
    - **number** - the number of iterations in these sums; 0 while particles are not followed.
    - **center**, **width** - the centers and widths of the components, ``(C, d)`` each.
    - **is_on** - whether warmup found several basins.
    - **tally** - the number of jumps, and the sum of their acceptance probabilities.
    """

    scale: jax.Array
    origin: jax.Array
    sums: jax.Array
    number: jax.Array
    center: jax.Array
    width: jax.Array
    is_on: jax.Array
    tally: tuple[jax.Array, jax.Array]

    @property
    def acceptance(self) -> jax.Array:
        """The mean acceptance probability; 0 before the first jump."""
        return self.tally[1] / xp.maximum(self.tally[0], 1.0)


class Basins(Move[BasinsState]):
    r"""Metropolis-Hastings steps with proposals from a mixture of one Gaussian for each of C particles.

    Coordinates are :math:`w = S^{-1} u`, with :math:`S S^\top` the inverse of the gradients' covariance over T: the
    covariance within a basin, whatever the distance between basins. The mixture
    :math:`q = \frac1C \sum_c N(m_c, 1.44\, V_c)` has the mean and the (diagonal) variances of particle c
    between 70 % and 95 % of warmup, and is then frozen. A proposal y is accepted with probability
    :math:`\min\bigl(1, \frac{\pi(y)\, q(x)}{\pi(x)\, q(y)}\bigr)`, once in each iteration for each particle. This
    preserves the sampler's stationary distribution.
    """

    min_particles = 4  # Fewer do not distinguish basins from chance.
    draws_threshold = False

    def start(self, cloud, iterations, dense):
        del iterations
        z = cloud.z
        dimension, dtype = z.shape[2], z.dtype
        zero = jnp.zeros((min(z.shape[0] * z.shape[1], MAX_COMPONENTS), dimension), dtype)
        return BasinsState(
            scale=jnp.eye(dimension, dtype=dtype) if dense else jnp.ones(dimension, dtype),
            origin=zero,
            sums=jnp.stack([zero, zero]),
            number=jnp.zeros((), dtype),
            center=zero,
            width=zero + 1.0,
            is_on=jnp.zeros((), bool),
            tally=(jnp.zeros((), dtype),) * 2,
        )

    def is_on(self, state):
        return state.is_on

    def record(self, state, positions, cloud, age):
        del positions, age
        shift = _followed(Preconditioner(state.scale).whiten(cloud.z), len(state.origin)) - state.origin
        # Particles are followed once `learn` has begun with it.
        is_followed = state.number > 0
        sums = state.sums + jnp.where(is_followed, jnp.stack([shift, shift**2]), 0.0)
        return state._replace(sums=sums, number=state.number + is_followed)

    def learn(self, window, state, warmup, cloud, temperature):
        if warmup.symptoms is None:
            return state
        if window.is_at(BEGINNING):
            moments = warmup.moments
            scale = inverse_root(moments.gradient_scatter / np.maximum(moments.number, 1.0) / temperature)
            origin = _followed(Preconditioner(scale).whiten(cloud.z), len(state.origin))
            one = np.ones_like(state.number)
            state = state._replace(scale=scale, origin=origin, sums=np.zeros_like(state.sums), number=one)
        if window.is_at(END):
            mean, square = state.sums / np.maximum(state.number, 1.0)
            width = np.clip(INFLATION * np.sqrt(np.maximum(square - mean**2, 0.0)), *WIDTHS)
            state = state._replace(
                center=state.origin + mean,
                width=width,
                number=np.zeros_like(state.number),
                is_on=np.asarray(warmup.symptoms.widest.has_basins),
            )
        return state

    def propose(self, key, state, cloud, energy_and_grad, temperature, stratified):
        del temperature, stratified
        change = Preconditioner(state.scale)
        start = change.whiten(cloud.z)
        # All random numbers are of one draw, because each generator takes a tenth of a second to compile.
        particles = start.shape[0] * start.shape[1]
        drawn = uniform(key, (2 * (particles + start.size),), start.dtype)
        chosen, threshold, radius, angle = jnp.split(drawn, (particles, 2 * particles, 2 * particles + start.size))
        radius, angle = radius.reshape(start.shape), angle.reshape(start.shape)
        index = (chosen.reshape(start.shape[:2]) * len(state.center)).astype(int)
        noise = jnp.sqrt(-2.0 * jnp.log1p(-radius)) * jnp.cos(2.0 * np.pi * angle)
        end = state.center[index] + state.width[index] * noise
        position = change.to_positions(end)

        def add(total, coordinate):
            point, center, width = coordinate
            return total - ((point[..., None] - center) / width) ** 2 / 2.0 - jnp.log(width), None

        # One coordinate at a time: basins may be thousands of widths apart, where an expanded square loses precision.
        points = jnp.stack([start, end])
        nothing = jnp.zeros((*points.shape[:-1], len(state.center)), points.dtype)
        terms = lax.scan(add, nothing, (jnp.moveaxis(points, -1, 0), state.center.T, state.width.T))[0]
        largest = terms.max(-1, keepdims=True)
        at_start, at_end = jnp.log(jnp.sum(jnp.exp(terms - largest), -1)) + largest[..., 0]
        energy, gradient = energy_and_grad(position)
        return Proposal(position, energy, gradient, at_start - at_end, threshold.reshape(start.shape[:2]))


def _followed(w, components):
    """Return one particle of a cloud ``(G, L, d)`` for each component, evenly spread over the groups."""
    flat = w.reshape(-1, w.shape[-1])
    return flat[np.arange(components) * len(flat) // components]
