"""Bandwidths by rules of the particles' distances."""

from __future__ import annotations

from collections.abc import Callable
import math

import jax
from jax import lax
import jax.numpy as jnp

__all__ = ["bisect_bandwidth"]

#: The least bandwidth, over the variance of a coordinate.
NARROWEST = 0.1


def bisect_bandwidth(mean_similarity: Callable[[jax.Array], jax.Array], u: jax.Array, target: float) -> jax.Array:
    """The bandwidth at which particles ``(G, L, d)`` have a mean similarity of ``target`` times its largest value.

    No narrower than :data:`NARROWEST` times the variance of a coordinate: many particles on a line would make for a
    repulsion that changes over their distances, and a step that can follow it moves nobody.
    """
    scale = jnp.log(jnp.mean(jnp.var(u, -2)))
    scale = jnp.where(jnp.isfinite(scale), scale, 0.0)
    narrow, wide = scale + math.log(NARROWEST), scale + math.log(u.shape[-1]) + 14.0
    # A sum with the identity never comes near its diagonal.
    widest = mean_similarity(jnp.exp(wide))

    def halve(interval, _):
        low, high = interval
        middle = (low + high) / 2.0
        too_wide = mean_similarity(jnp.exp(middle)) > target * widest
        return (jnp.where(too_wide, low, middle), jnp.where(too_wide, middle, high)), None

    (low, high), _ = lax.scan(halve, (narrow, wide), length=30)
    return jnp.exp((low + high) / 2.0).astype(u.dtype)
