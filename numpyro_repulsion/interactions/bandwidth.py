"""Bandwidths by rules of the particles' distances."""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax import lax
import jax.numpy as jnp

__all__ = ["bisect_bandwidth"]


def bisect_bandwidth(mean_similarity: Callable[[jax.Array], jax.Array], u: jax.Array, target: float) -> jax.Array:
    """The bandwidth at which particles ``(G, L, d)`` have a mean similarity of ``target`` times its largest value."""
    # Around the mean squared distance, e^±14 of it.
    scale = jnp.log(jnp.mean(jnp.var(u, -2).sum(-1)))
    scale = jnp.where(jnp.isfinite(scale), scale, 0.0)
    # A sum with the identity never comes near its diagonal.
    widest = mean_similarity(jnp.exp(scale + 14.0))

    def halve(interval, _):
        low, high = interval
        middle = (low + high) / 2.0
        wide = mean_similarity(jnp.exp(middle)) > target * widest
        return (jnp.where(wide, low, middle), jnp.where(wide, middle, high)), None

    (low, high), _ = lax.scan(halve, (scale - 14.0, scale + 14.0), length=30)
    return jnp.exp((low + high) / 2.0).astype(u.dtype)
