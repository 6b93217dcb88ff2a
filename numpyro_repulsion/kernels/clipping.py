"""Bounds on gradients that are far longer than any in the bulk of the posterior."""

from __future__ import annotations

import math

import jax.numpy as jnp

from numpyro_repulsion.shapes import Flag, Flags, Scalar, Vector, Vectors

__all__ = ["clip", "clip_coordinates"]

#: Gradients longer than this many times their expected length in whitened coordinates are clipped.
GRADIENT_LIMIT = 20.0
#: With minibatches, so is each coordinate longer than this many times its expected size: in warmup, whose steps are
#: longer; and after it, for up to eight coordinates and for each further doubling of their number. Noise of parameters
#: that few rows inform has exponential tails: of 1,000 random intercepts, one exceeds 10 in 6 % of the updates, but 20
#: in 0.06 % (tests/kernels/test_clipping.py); and more often where the expected size, which is measured on a few
#: minibatches, is too small. For half of it the factor per doubling is twice that of the tails.
WARMUP_LIMIT, COORDINATE_LIMIT, LIMIT_PER_DOUBLING = 6.0, 10.0, 2.8
#: A clipped gradient is recognized by reaching the limit, but for rounding.
AT_LIMIT = 1.0 - 1e-4


def clip(gradient: Vectors, variances: Vector | Scalar) -> tuple[Vectors, Flags]:
    """Return gradients clipped by their length, and which of them reach the limit.

    :param gradient: in whitened coordinates, ``(G, L, d)``.
    :param variances: those expected of the gradient, ``(d,)``.
    :return: gradients, and flags ``(G, L)``.
    """
    limit = GRADIENT_LIMIT * jnp.sqrt(jnp.sum(jnp.broadcast_to(variances, gradient.shape[-1:])))
    length = jnp.linalg.norm(gradient, axis=-1)
    is_clipped = length > AT_LIMIT * limit
    return gradient * jnp.minimum(limit / jnp.where(length > 0, length, 1.0), 1.0)[..., None], is_clipped


def clip_coordinates(gradient: Vectors, variance: Scalar, is_warmup: Flag) -> tuple[Vectors, Flags]:
    """Return gradients clipped by coordinate, and which of them reach the limit.

    One long coordinate, as in the neck of a funnel, would send a particle off.

    :param variance: that expected of a coordinate, a scalar; see also :func:`clip`.
    """
    usual = COORDINATE_LIMIT + LIMIT_PER_DOUBLING * max(0.0, math.log2(gradient.shape[-1] / 8))
    limit = jnp.where(is_warmup, WARMUP_LIMIT, usual) * jnp.sqrt(variance)
    return jnp.clip(gradient, -limit, limit), (jnp.abs(gradient) > AT_LIMIT * limit).any(-1)
