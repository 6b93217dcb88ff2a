"""Kernels of the distance between particles, computed by two matrix products, and the median bandwidth rule."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
from jax import lax
import jax.numpy as jnp
from jaxtyping import Array, Float
import numpy as np

from numpyro_repulsion.checks import keep, number, positive
from numpyro_repulsion.interactions.base import Gram, Independent, Sum, Wrapping
from numpyro_repulsion.rounding import matmul


class Radial(Gram):
    """Base class of kernels ``k(x, y) = φ(‖x − y‖² / h)`` with a positive-definite profile φ, ``φ(0) = 1``.

    A subclass defines :meth:`profile`. K and Γ then take two matrix products. A particle that diverged so far that
    float arithmetic overflows is decoupled and does not turn the others into NaN.

    **Example**

    .. doctest::

        >>> from dataclasses import dataclass
        >>> import jax.numpy as jnp
        >>> from numpyro_repulsion.interactions import Radial

        >>> @dataclass(frozen=True)
        ... class Exponential(Radial):
        ...     bandwidth: float | None = None
        ...     def profile(self, s):
        ...         return jnp.exp(-jnp.sqrt(s + 1e-6))

        >>> gram, _ = Exponential(1.0).gram(jnp.array([[0.0], [1.0]]))
        >>> f"{gram[0, 1]:.2f}"
        '0.37'
    """

    bandwidth: float | str | None = None
    positive_definite = True
    diagonal_varies = False

    def __post_init__(self):
        if self.bandwidth is not None and not (self.tunes_bandwidth and self.bandwidth == "learned"):
            expected = "a positive, finite number, None (a rule) or 'learned'"
            keep(self, "bandwidth", number, expected=expected, accepts=lambda x: x > 0.0)
        keep(self, "nugget", positive)

    learns_bandwidth = property(lambda self: self.bandwidth is None or self.tunes_bandwidth)
    tunes_bandwidth = property(lambda self: isinstance(self.bandwidth, str))

    def profile(self, s: jax.Array) -> jax.Array:
        """Return φ, elementwise."""
        raise NotImplementedError(f"{type(self).__name__} does not implement `profile`.")

    def evaluate(self, x, y, bandwidth=None):
        return self.profile(jnp.sum((x - y) ** 2) / self._bandwidth(bandwidth))

    def _bandwidth(self, learned):
        h = learned if self.learns_bandwidth else self.bandwidth
        if h is None:
            name = type(self).__name__
            raise ValueError(f"{self!r} has no bandwidth yet; pass `bandwidth`, or write {name}(bandwidth=1.0).")
        return h

    def gram(self, u, bandwidth=None):
        h = self._bandwidth(bandwidth)
        x, squared, together = _centered(u)
        off_diagonal = together & ~jnp.eye(u.shape[0], dtype=bool)
        gram, slope = jax.jvp(self.profile, (squared / h,), (jnp.ones_like(squared),))
        gram = jnp.where(off_diagonal, gram, 0.0) + (1.0 + self.nugget) * jnp.eye(len(u), dtype=u.dtype)
        # ∇_{u_j} φ(‖u_i − u_j‖²/h) = W_ij (u_i − u_j) with W = −(2/h) φ'; the sum over j is one product.
        weight = jnp.where(off_diagonal, -2.0 / h * slope, 0.0)
        return gram, weight.sum(1, keepdims=True) * x - matmul(weight, x)


@dataclass(frozen=True)
class RBF(Radial):
    r"""The Gaussian kernel of the paper, :math:`k(x, y) = \exp(-\lVert x - y\rVert^2 / h)`.

    :math:`\Gamma_i = (2/h) \sum_j k_{ij} (u_i - u_j)` is *added* to the drift and pushes particles apart.

    :param bandwidth: h, in squared units of the (preconditioned) parameters; frozen after warmup. ``None`` sets it in
        warmup by a rule: each particle has about four neighbors, or h is 0.1 of a coordinate's variance if that is
        larger. ``"learned"`` takes the h that promises the most draws for each gradient on the clouds of warmup (see
        :ref:`repulsion <learned-bandwidth>`). With a warmup of 0 both use the median rule on the starts.
    :param nugget: added to the diagonal of K, in both drift and noise.
    :raises ValueError: unless both are positive and finite, or the bandwidth is ``None`` or ``"learned"``.

    **References:**

    1. *Stochastic Gradient MCMC with Repulsive Forces*, V. Gallego and D. Ríos Insua,
       https://arxiv.org/abs/1812.00071

    **Example**

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from numpyro_repulsion import RBF
        >>> coupling = RBF(bandwidth=2.0).couple(jnp.array([[0.0], [1.0]]))
        >>> [f"{x:.2f}" for x in coupling.repulsion.ravel()]
        ['-0.61', '0.61']
    """

    bandwidth: float | str | None = None
    nugget: float = 1e-3

    def profile(self, s):
        return jnp.exp(-s)


@dataclass(frozen=True)
class IMQ(Radial):
    r"""The inverse multiquadric, :math:`k(x, y) = (1 + \lVert x - y\rVert^2 / h)^{-1/2}`: long-range repulsion.

    :param bandwidth: h, as for :class:`RBF`, and so is ``nugget``.
    :raises ValueError: as for :class:`RBF`.

    **References:**

    1. *Measuring Sample Quality with Kernels*, J. Gorham and L. Mackey, https://arxiv.org/abs/1703.01717

    **Example**

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from numpyro_repulsion import IMQ
        >>> f"{IMQ(bandwidth=1.0).evaluate(jnp.zeros(2), jnp.ones(2)):.3f}"
        '0.577'
    """

    bandwidth: float | str | None = None
    nugget: float = 1e-3

    def profile(self, s):
        return lax.rsqrt(1.0 + s)


def median_bandwidth(u: Float[Array, "*particles d"]) -> Float[Array, ""]:
    """Return the median rule ``h = median ‖u_i − u_j‖² / log L`` over the pairs ``i ≠ j`` of each group.

    :param u: particles, ``(L, d)`` or ``(G, L, d)`` with ``L > 1``.
    """

    def distances(group):
        _, squared, together = _centered(group)
        return jnp.where(together, squared, jnp.inf)

    size = u.shape[-2]
    pairs = jnp.vectorize(distances, signature="(l,d)->(l,l)")(u)[..., *jnp.triu_indices(size, 1)]
    # If the median is not positive and finite (coincident or diverged particles), any positive bandwidth is exact.
    h = jnp.median(pairs) / jnp.log(jnp.asarray(float(size), u.dtype))
    return jnp.where(jnp.isfinite(h) & (h > 0), h, 1.0).astype(u.dtype)


def _centered(u):
    """Return points ``(L, d)`` relative to a central one, their squared distances, and which pairs are finite."""
    # ‖x‖² + ‖y‖² − 2 x·y cancels badly far from the origin. One diverged particle would move the mean, and ruin the
    # distances of all others, so the center is the median of three.
    first, second, third = u[0], u[len(u) // 2], u[-1]
    center = jnp.maximum(jnp.minimum(first, second), jnp.minimum(jnp.maximum(first, second), third))
    x = u - lax.stop_gradient(center)
    near = jnp.sum(x * x, 1) < jnp.finfo(u.dtype).max ** 0.75
    x = jnp.where(near[:, None], x, 0.0)
    norm = jnp.sum(x * x, 1)
    squared = jnp.maximum(norm[:, None] + norm[None, :] - 2.0 * matmul(x, x.T), 0.0)
    return x, squared, near[:, None] & near[None, :]


@dataclass(frozen=True)
class Laplacian(Wrapping, Gram):
    r"""Particles that move apart faster than together: K is the identity plus a graph Laplacian.

    .. math::
        K_{ij} = 1\{i = j\}\,\bigl(1 + b \textstyle\sum_{l \ne i} k_{il}\bigr) - 1\{i \ne j\}\, b\, k_{ij}, \qquad
        \Gamma_i = 2 b \sum_{l \ne i} \nabla_{u_i} k(u_i, u_l)

    The quadratic form of K is :math:`\|x\|^2 + b \sum_{i < j} k_{ij} (x_i - x_j)^2`, so K is positive definite for any
    ``k >= 0``. The mean of neighbors moves as it would without interaction, and their differences move faster: with
    :class:`~numpyro_repulsion.RBF` as K neighbors get similar noise, here opposite noise. As for any K, the stationary
    distribution is ``∏_i π(u_i)`` as ε → 0. Γ *attracts*, and exactly compensates for the noise, which drives neighbors
    apart faster.

    The bandwidth is learned by the rule of k. With about four neighbors ``K_ii`` is about ``1 + 4b``, and a measured
    step is shorter by that factor. With momenta ``step_size`` must be given, and be short: in five dimensions, with
    b = 1 and 20 particles, variances are 20 % too large at ε = 0.01 and 10 % at 0.005.

    :param interaction: k, for each pair of particles: a :class:`~numpyro_repulsion.interactions.Radial` kernel that is
        never negative, or a sum of such kernels. Its nugget does not enter K.
    :param strength: b > 0.
    :raises TypeError: for any other interaction.
    :raises ValueError: for a kernel that is negative at some distance, or a strength that is not positive.

    **References:**

    1. *A Complete Recipe for Stochastic Gradient MCMC*, Y.-A. Ma, T. Chen and E. Fox,
       https://arxiv.org/abs/1506.04696

    **Example**

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from numpyro_repulsion import RBF
        >>> from numpyro_repulsion.interactions import Laplacian
        >>> gram, _ = Laplacian(RBF(bandwidth=1.0), strength=2.0).gram(jnp.array([[0.0], [1.0]]), None)
        >>> gram.round(2).tolist()
        [[1.7400000095367432, -0.7400000095367432], [-0.7400000095367432, 1.7400000095367432]]
    """

    interaction: Radial | Sum = field(default=RBF())
    strength: float = 1.0

    def __post_init__(self):
        inner = self.interaction
        terms = [term for _, term in inner.terms] if isinstance(inner, Sum) else [inner]
        radial = [term for term in terms if isinstance(term, Radial)]
        if not radial or any(not isinstance(term, Radial | Independent) for term in terms):
            raise TypeError(
                f"Laplacian takes a radial kernel, such as Laplacian(RBF()), or a sum of such kernels; got {inner!r}."
            )
        for term in radial:
            # A kernel may be made while a program is traced.
            with jax.ensure_compile_time_eval():
                affinity = np.asarray(term.profile(jnp.linspace(0.0, 12.0, 4001) ** 4))
            if not (affinity >= 0.0).all():
                raise ValueError(f"Laplacian takes kernels that are nowhere negative, such as RBF(); got {term!r}.")
        keep(self, "strength", positive)

    def similarity(self, u, bandwidth):
        return self.interaction.similarity(u, bandwidth)

    def gram(self, u, bandwidth=None):
        gram, repulsion = self.interaction.gram(u, bandwidth)
        eye = jnp.eye(len(u), dtype=u.dtype)
        affinity = self.strength * gram * (1.0 - eye)
        # ∇_{u_j} k_ij = −∇_{u_i} k_ij for radial k: once from −k_ij, and once from the k_ij of the diagonal.
        return eye * (1.0 + affinity.sum(1)) - affinity, -2.0 * self.strength * repulsion
