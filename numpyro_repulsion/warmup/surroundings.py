"""How much of the posterior lies around each particle that arrives."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from numpyro_repulsion.shapes import Flags, Numbers, Scalar, Vectors

__all__ = ["Surroundings"]


class Surroundings(NamedTuple):
    """Sums of energies and squared gradients of each particle over a window; they estimate nearby posterior mass.

    - **number** - iterations in the window.
    - **energy** - the sum of U, ``(G, L)``.
    - **square** - the sum of the squared whitened gradient, ``(G, L, d)``.
    """

    number: Scalar
    energy: Numbers
    square: Vectors

    @staticmethod
    def empty(shape: tuple[int, ...], dtype) -> Surroundings:
        """Return empty sums for particles ``(G, L, d)``."""
        return Surroundings(jnp.zeros((), dtype), jnp.zeros(shape[:2], dtype), jnp.zeros(shape, dtype))

    def add(self, energy: Numbers, gradient: Vectors) -> Surroundings:
        """Return the sums with one more iteration."""
        return Surroundings(self.number + 1.0, self.energy + energy, self.square + gradient**2)

    def is_lost(self) -> Flags:
        """Return which particles, ``(G, L)``, have almost no posterior mass around them compared with the best one.

        In a basin of curvature H, the mean of U is its minimum plus ``d/2`` and the mean of ``g gᵀ`` is H. So the basin
        holds a posterior mass of ``exp(−E U) |E g gᵀ|^(−1/2)``, up to a constant. Energy alone would prefer narrow
        basins, such as the neck of a funnel. ``E g gᵀ`` has two estimates: one width per coordinate overestimates the
        mass around a particle that has not moved; one width for all coordinates underestimates a basin that is narrow
        in some of them. A particle is lost only if it is far behind by both.
        """
        number, dimension = jnp.maximum(self.number, 1.0), self.square.shape[-1]
        energy, square = self.energy / number, self.square / number
        smallest = jnp.finfo(square.dtype).tiny
        log_weights = (
            -energy - 0.5 * jnp.sum(jnp.log(square + smallest), -1),
            -energy - 0.5 * dimension * jnp.log(jnp.mean(square, -1) + smallest),
        )
        lost = jnp.ones(energy.shape, bool)
        for log_weight in log_weights:
            best = jnp.nanmax(jnp.where(jnp.isfinite(log_weight), log_weight, -jnp.inf))
            lost &= ~(log_weight >= best - 10.0 - 2.0 * dimension**0.5)
        return lost
