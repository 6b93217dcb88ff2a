"""Stein discrepancies between draws and a distribution with known scores."""

from __future__ import annotations

import jax
from jax import lax
import jax.numpy as jnp

from numpyro_repulsion.rounding import matmul

__all__ = ["ksd"]


def ksd(draws: jax.Array, scores: jax.Array, *, scale: float | jax.Array = 1.0, exponent: float = -0.5) -> jax.Array:
    r"""Return the kernelized Stein discrepancy between draws and the distribution with these scores.

    In the limit it is 0 for that distribution alone. With the inverse multiquadric
    :math:`k(x, y) = (1 + \|x - y\|^2 / c^2)^\beta` and scores :math:`s = \nabla \log \pi = -\nabla U`,

    .. math::
        \mathrm{KSD}^2 = \frac{1}{n^2} \sum_{ij} \bigl( s_i \cdot s_j\, k + s_i \cdot \nabla_y k + s_j \cdot \nabla_x k
        + \nabla_x \cdot \nabla_y k \bigr)(x_i, x_j)

    It needs no normalizing constant and no exact draws. It detects bias and lack of convergence alike, but not wrong
    weights of distant modes. For n independent draws from π it is about :math:`n^{-1/2}` times its value for one draw.
    Rows are processed one at a time, so no array of shape ``(n, n)`` is formed. Scores from minibatches add the
    variance of their noise.

    :param draws: ``(n, d)``, in the unconstrained space of the scores.
    :param scores: ``(n, d)``.
    :param scale: c, a number or one for each coordinate; about the scale of the posterior.
    :param exponent: β, between -1 and 0.
    :return: a scalar, 0 or above.
    :raises ValueError: if the shapes differ or there are no draws, if ``scale`` is not positive or not one number or
        one for each coordinate, or if ``exponent`` is out of range.

    **References:**

    1. *Measuring Sample Quality with Kernels*, J. Gorham and L. Mackey, https://arxiv.org/abs/1703.01717

    **Example**

    .. doctest::

        >>> from jax import random
        >>> from numpyro_repulsion import ksd
        >>> x = random.normal(random.key(0), (1000, 2))  # from N(0, I), whose score is −x
        >>> bool(ksd(x, -x) < 0.1 < ksd(1.3 * x, -1.3 * x))
        True
    """
    x, s = jnp.asarray(draws), jnp.asarray(scores)
    if x.ndim != 2 or x.shape != s.shape:
        raise ValueError(f"`draws` and `scores` must both be of shape (n, d); got {x.shape} and {s.shape}.")
    if not len(x):
        raise ValueError("`draws` must be of shape (n, d) with one draw or more; got none.")
    if jnp.shape(scale) not in ((), (1,), x.shape[1:]) or not (jnp.asarray(scale) > 0).all():
        raise ValueError(
            f"`scale` must be above 0, one number or one for each of {x.shape[1]} coordinates; got {scale!r}."
        )
    if not -1.0 < exponent < 0.0:
        raise ValueError(f"`exponent` must lie between -1 and 0; got {exponent!r}.")
    # In units of c the kernel has scale 1, and scores are longer by the factor c.
    x, s = x / scale, s * scale

    def row(point):
        xi, si = point
        gap = xi - x
        q = 1.0 + jnp.sum(gap**2, -1)
        k, slope = q**exponent, 2.0 * exponent * q ** (exponent - 1.0)  # ∇_x k = slope · gap = −∇_y k
        trace = -slope * x.shape[1] - 4.0 * exponent * (exponent - 1.0) * q ** (exponent - 2.0) * (q - 1.0)
        return jnp.mean(matmul(s, si) * k + slope * jnp.sum(gap * (s - si), -1) + trace)

    return jnp.sqrt(jnp.maximum(jnp.mean(lax.map(row, (x, s))), 0.0))
