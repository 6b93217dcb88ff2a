"""Rules that choose a bandwidth from the distances between particles."""

from __future__ import annotations

from collections.abc import Callable
import math

from jax import lax
import jax.numpy as jnp

from numpyro_repulsion.shapes import Scalar, Vectors

__all__ = ["bisect_bandwidth"]

#: The smallest bandwidth, divided by the variance of a coordinate.
NARROWEST = 0.1


def bisect_bandwidth(mean_similarity: Callable[[Scalar], Scalar], u: Vectors, target: float) -> Scalar:
    """Return the bandwidth at which the mean similarity of ``u``, ``(G, L, d)``, is ``target`` times its largest value.

    It is at least :data:`NARROWEST` times the variance of a coordinate. With many particles on a line, repulsion would
    otherwise change over the distance of neighbours, and a step short enough to follow it would hardly move them.
    """
    scale = jnp.log(jnp.mean(jnp.var(u, -2)))
    scale = jnp.where(jnp.isfinite(scale), scale, 0.0)
    narrow, wide = scale + math.log(NARROWEST), scale + math.log(u.shape[-1]) + 14.0
    # The similarity of a sum with the identity stays far below its diagonal.
    widest = mean_similarity(jnp.exp(wide))

    def halve(interval, _):
        low, high = interval
        middle = (low + high) / 2.0
        too_wide = mean_similarity(jnp.exp(middle)) > target * widest
        return (jnp.where(too_wide, low, middle), jnp.where(too_wide, middle, high)), None

    (low, high), _ = lax.scan(halve, (narrow, wide), length=30)
    return jnp.exp((low + high) / 2.0).astype(u.dtype)
