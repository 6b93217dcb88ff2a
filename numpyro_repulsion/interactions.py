"""How particles see each other: the matrix K, its divergence Γ, and noise with covariance K.

A cloud of L particles in d dimensions is an array ``u`` of shape ``(L, d)``, or ``(G, L, d)`` for G groups that do
not interact. :meth:`Interaction.couple` turns it into a :class:`Coupling`, which is all that the dynamics sees:
apply K, the repulsion Γ, a draw with covariance K, and a bound on the largest eigenvalue of K.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import ClassVar, NamedTuple

import jax
from jax import lax, random
import jax.numpy as jnp

__all__ = [
    "Balanced",
    "Coupling",
    "Gram",
    "IMQ",
    "Independent",
    "Interaction",
    "RBF",
    "Radial",
    "Sum",
    "median_bandwidth",
    "squared_distances",
]


class Coupling(NamedTuple):
    """The matrix K of one cloud, by what can be done with it.

    - **apply** - ``x -> K x`` for ``x`` of the cloud's shape.
    - **repulsion** - Γ, with ``Γ_i = Σ_j ∇_{u_j} K_ij``, of the cloud's shape (0 where K is constant).
    - **draw** - ``key -> ξ``, Gaussian noise of the cloud's shape, each group's with covariance ``K ⊗ I_d``.
    - **bound** - scalar, at least the largest eigenvalue of K.
    - **is_identity** - whether K is the identity, which allows Leimkuhler-Matthews averaging of the noise.
    """

    apply: Callable[[jax.Array], jax.Array]
    repulsion: jax.Array | float
    draw: Callable[[jax.Array], jax.Array]
    bound: jax.Array | float
    is_identity: bool = False


class Interaction:
    """What every interaction answers. Those with a Gram matrix derive from :class:`Gram`, and most need only that.

    **Example**

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from jax import random
        >>> from numpyro_repulsion import Interaction
        >>> from numpyro_repulsion.interactions import Coupling

        >>> class HalfSpeed(Interaction):  # K = I / 2
        ...     def couple(self, u, bandwidth=None):
        ...         noise = lambda key: 0.5**0.5 * random.normal(key, u.shape)
        ...         return Coupling(lambda x: x / 2, 0.0, noise, 0.5)

        >>> HalfSpeed().couple(jnp.zeros((3, 2))).bound
        0.5
    """

    #: Whether particles need each other: K depends on the cloud, which must hold two distinct particles.
    interacts: ClassVar[bool] = False

    @property
    def learns_bandwidth(self) -> bool:
        """Whether a bandwidth is left to be learned."""
        return False

    def couple(self, u: jax.Array, bandwidth: jax.Array | float | None = None) -> Coupling:
        """The coupling of the cloud.

        :param u: particles, ``(L, d)`` or ``(G, L, d)``.
        :param bandwidth: the learned bandwidth, for kernels whose own is ``None``.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement `couple`.")

    def __add__(self, other):
        return Sum.of(self) + other

    def __rmul__(self, weight):
        return weight * Sum.of(self)

    __mul__ = __rmul__


@dataclass(frozen=True)
class Independent(Interaction):
    """No interaction: ``K = I``, ``Γ = 0``, white noise. Parallel SGLD, the paper's plain baseline.

    **Example**

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from numpyro_repulsion import Independent
        >>> coupling = Independent().couple(jnp.zeros((3, 2)))
        >>> coupling.repulsion, coupling.bound
        (0.0, 1.0)
    """

    def couple(self, u, bandwidth=None):
        return Coupling(lambda x: x, 0.0, lambda key: random.normal(key, u.shape, u.dtype), 1.0, True)

    def gram(self, u, bandwidth):
        """The identity and zero: what a sum needs."""
        return jnp.eye(u.shape[0], dtype=u.dtype), jnp.zeros_like(u)


@dataclass(frozen=True)
class Balanced(Interaction):
    r"""Noise that sums to zero: repulsion in the noise instead of the drift.

    Without an argument, ``K = I``, ``Γ = 0`` and the L particles of a group get
    :math:`\xi_i = \sqrt{L/(L-1)}\,(\eta_i - \bar\eta)` with white η. Given the past every ξ_i is N(0, I), so each
    particle is *exactly* the Markov chain it would be under :class:`Independent`; but the noises cancel in the
    ensemble average, whose error shrinks many times. The price is the product law: at one time the particles are
    (slightly, negatively) correlated. Plain noise for a group of one.

    With an interaction, ``Balanced(RBF())``, whole groups are balanced against each other in the same way, group
    ``a`` getting ``C_a`` applied to :math:`\sqrt{G/(G-1)}\,(\eta_a - \bar\eta)`. Each group's own law is exactly
    that of the interaction; it takes ``num_ensembles > 1``.

    :param interaction: the interaction within groups, or ``None`` for ``K = I``.

    **Example**

    .. doctest::

        >>> from jax import random
        >>> import jax.numpy as jnp
        >>> from numpyro_repulsion import Balanced
        >>> noise = Balanced().couple(jnp.zeros((5, 2))).draw(random.key(0))
        >>> bool(jnp.allclose(noise.sum(0), 0.0, atol=1e-5))
        True
    """

    interaction: Interaction | None = None

    def __post_init__(self):
        if self.interaction is not None and not isinstance(self.interaction, Gram):
            raise TypeError(
                "Balanced(interaction) balances groups of Gram-type particles against each other, such as "
                f"Balanced(RBF()); got {self.interaction!r}. For K = I write Balanced()."
            )

    @property
    def interacts(self):
        return self.interaction is not None

    @property
    def learns_bandwidth(self):
        return self.interaction is not None and self.interaction.learns_bandwidth

    @property
    def bandwidth(self):
        return getattr(self.interaction, "bandwidth", None)

    @property
    def positive_definite(self):
        return self.interaction is None or self.interaction.positive_definite

    def couple(self, u, bandwidth=None):
        def white(key):
            return _balance(random.normal(key, u.shape, u.dtype), axis=-2 if self.interaction is None else 0)

        if self.interaction is None:
            return Coupling(lambda x: x, 0.0, white, 1.0, True)
        if u.ndim != 3 or u.shape[0] < 2:
            raise ValueError(
                f"{self!r} balances groups against each other and needs at least two of them, a cloud of shape "
                f"(G, L, d) with G > 1; got {u.shape}. Set num_ensembles=2 or more, or use {self.interaction!r}."
            )
        return self.interaction.couple(u, bandwidth, white)

    def __add__(self, other):
        raise TypeError(
            "Balanced noise has no Gram matrix and cannot be part of a sum; write Balanced(a + b) to balance groups "
            "of a sum, or use Independent() as the K = I term."
        )

    def __rmul__(self, weight):
        raise TypeError("Balanced noise cannot be scaled; change `step_size`, or write Balanced(weight * interaction).")

    __radd__ = __add__
    __mul__ = __rmul__


class Gram(Interaction):
    """Base of the interactions with a Gram matrix: ``K_ij = k(u_i, u_j) + nugget · 1{i = j}``.

    A subclass writes :meth:`evaluate`, the kernel for one pair of points; this class lifts it to a cloud, takes Γ by
    automatic differentiation and tests on the starting cloud that K is positive definite. The nugget belongs to K:
    it is in the drift *and* in the noise, so it biases nothing, and it keeps the Cholesky factor finite where
    particles are close, L is large or the bandwidth is wide. Positive weights and sums of such interactions are
    interactions again: ``0.9 * RBF() + 0.1 * Independent()``.

    **Example**

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from numpyro_repulsion import Gram

        >>> class Cosine(Gram):
        ...     def evaluate(self, x, y, bandwidth):
        ...         return jnp.mean(jnp.cos(x - y))

        >>> coupling = Cosine().couple(jnp.array([[0.0], [1.0]]))
        >>> coupling.repulsion.round(2).tolist()
        [[-0.8399999737739563], [0.8399999737739563]]
    """

    interacts: ClassVar[bool] = True
    #: Whether k is known to be positive definite; if not, K is tested on the starting cloud.
    positive_definite: bool = False
    nugget: float = 1e-3

    def evaluate(self, x: jax.Array, y: jax.Array, bandwidth: jax.Array | float | None) -> jax.Array:
        """The kernel k of one pair of points of shape ``(d,)``; symmetric, and equal to 1 or so where ``x = y``."""
        raise NotImplementedError(f"{type(self).__name__} does not implement `evaluate`.")

    def gram(self, u: jax.Array, bandwidth: jax.Array | float | None) -> tuple[jax.Array, jax.Array]:
        """K of shape ``(L, L)`` and Γ of shape ``(L, d)`` for one group ``u`` of shape ``(L, d)``."""

        def k(x, y):
            return self.evaluate(x, y, bandwidth)

        def repulsion(x):
            # ∇_{u_j} K_ij through the second argument for all j, and for j = i through the first one too. One row
            # at a time, so that nothing of shape (L, L, d) is formed.
            through_second = jax.vmap(jax.grad(k, 1), (None, 0))(x, u).sum(0)
            return through_second + jax.grad(k, 0)(x, x)

        gram = jax.vmap(jax.vmap(k, (None, 0)), (0, None))(u, u)
        return gram + self.nugget * jnp.eye(len(u), dtype=u.dtype), lax.map(repulsion, u)

    def couple(self, u, bandwidth=None, white=None):
        if white is None:

            def white(key):
                return random.normal(key, u.shape, u.dtype)

        gram, repulsion = jnp.vectorize(lambda v: self.gram(v, bandwidth), signature="(l,d)->(l,l),(l,d)")(u)
        root = jnp.linalg.cholesky(gram)
        return Coupling(
            apply=lambda x: gram @ x,
            repulsion=repulsion,
            draw=lambda key: root @ white(key),
            bound=jnp.abs(gram).sum(-1).max(),  # Gershgorin
        )


class Radial(Gram):
    """Base of the kernels ``k(x, y) = φ(‖x − y‖² / h)`` with a positive-definite profile φ, ``φ(0) = 1``.

    A subclass writes :meth:`profile`. K and Γ then take two matrix products, and a particle that has run away to
    where float arithmetic overflows is decoupled instead of turning the others into NaN.

    **Example**

    .. doctest::

        >>> from dataclasses import dataclass
        >>> import jax.numpy as jnp
        >>> from numpyro_repulsion import Radial

        >>> @dataclass(frozen=True)
        ... class Exponential(Radial):
        ...     bandwidth: float | None = None
        ...     def profile(self, s):
        ...         return jnp.exp(-jnp.sqrt(s + 1e-6))

        >>> gram, _ = Exponential(1.0).gram(jnp.array([[0.0], [1.0]]))
        >>> f"{gram[0, 1]:.2f}"
        '0.37'
    """

    positive_definite: bool = True
    bandwidth: float | None = None

    def __post_init__(self):
        _require_positive(self, "bandwidth", self.bandwidth)
        _require_positive(self, "nugget", self.nugget)

    @property
    def learns_bandwidth(self):
        return self.bandwidth is None

    def profile(self, s: jax.Array) -> jax.Array:
        """φ, elementwise."""
        raise NotImplementedError(f"{type(self).__name__} does not implement `profile`.")

    def evaluate(self, x, y, bandwidth=None):
        return self.profile(jnp.sum((x - y) ** 2) / self._bandwidth(bandwidth))

    def _bandwidth(self, learned):
        h = learned if self.bandwidth is None else self.bandwidth
        if h is None:
            raise ValueError(f"{self!r} has no bandwidth yet; pass `bandwidth` or give the kernel one.")
        return h

    def gram(self, u, bandwidth=None):
        h = self._bandwidth(bandwidth)
        x, squared, together = _centred(u)
        off_diagonal = together & ~jnp.eye(u.shape[0], dtype=bool)
        gram, slope = jax.jvp(self.profile, (squared / h,), (jnp.ones_like(squared),))
        gram = jnp.where(off_diagonal, gram, 0.0) + (1.0 + self.nugget) * jnp.eye(len(u), dtype=u.dtype)
        # ∇_{u_j} φ(‖u_i − u_j‖²/h) = W_ij (u_i − u_j) with W = −(2/h) φ'; summed over j that is one product.
        weight = jnp.where(off_diagonal, -2.0 / h * slope, 0.0)
        return gram, weight.sum(1, keepdims=True) * x - weight @ x


@dataclass(frozen=True)
class RBF(Radial):
    r"""The Gaussian kernel of the paper, :math:`k(x, y) = \exp(-\lVert x - y\rVert^2 / h)`.

    :math:`\Gamma_i = (2/h) \sum_j k_{ij} (u_i - u_j)`, which is *added* to the drift: it pushes particles apart.

    :param bandwidth: h, in squared units of the (preconditioned) parameters; ``None`` learns it in warmup.
    :param nugget: added to the diagonal of K, in drift and noise alike.
    :raises ValueError: unless both are positive and finite.

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

    bandwidth: float | None = None
    nugget: float = 1e-3

    def profile(self, s):
        return jnp.exp(-s)


@dataclass(frozen=True)
class IMQ(Radial):
    r"""The inverse multiquadric, :math:`k(x, y) = (1 + \lVert x - y\rVert^2 / h)^{-1/2}`: repulsion with a long range.

    :param bandwidth: h, in squared units of the (preconditioned) parameters; ``None`` learns it in warmup.
    :param nugget: added to the diagonal of K, in drift and noise alike.
    :raises ValueError: unless both are positive and finite.

    **References:**

    1. *Measuring Sample Quality with Kernels*, J. Gorham and L. Mackey, https://arxiv.org/abs/1703.01717

    **Example**

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from numpyro_repulsion import IMQ
        >>> f"{IMQ(bandwidth=1.0).evaluate(jnp.zeros(2), jnp.ones(2)):.3f}"
        '0.577'
    """

    bandwidth: float | None = None
    nugget: float = 1e-3

    def profile(self, s):
        return lax.rsqrt(1.0 + s)


@dataclass(frozen=True)
class Sum(Gram):
    """A sum of Gram-type interactions with positive weights; written ``0.9 * RBF() + 0.1 * Independent()``.

    Terms without a bandwidth of their own share the learned one.

    :param terms: pairs ``(weight, interaction)``.

    **Example**

    .. doctest::

        >>> from numpyro_repulsion import IMQ, RBF
        >>> 0.5 * RBF(1.0) + 0.5 * IMQ(2.0)
        0.5 * RBF(bandwidth=1.0, nugget=0.001) + 0.5 * IMQ(bandwidth=2.0, nugget=0.001)
    """

    terms: tuple[tuple[float, Gram | Independent], ...]

    @staticmethod
    def of(interaction):
        """The interaction as a sum of one term."""
        if isinstance(interaction, Sum):
            return interaction
        if not isinstance(interaction, Gram | Independent):
            raise TypeError(f"Only interactions with a Gram matrix can be added; got {interaction!r}.")
        return Sum(((1.0, interaction),))

    @property
    def bandwidth(self):
        given = {h for _, term in self.terms if (h := getattr(term, "bandwidth", None)) is not None}
        return given.pop() if len(given) == 1 else None

    @property
    def positive_definite(self):
        return all(getattr(term, "positive_definite", True) for _, term in self.terms)

    @property
    def learns_bandwidth(self):
        return any(term.learns_bandwidth for _, term in self.terms)

    def evaluate(self, x, y, bandwidth=None):
        raise NotImplementedError("A sum is evaluated on a cloud: use `gram` or `couple`.")

    def gram(self, u, bandwidth):
        parts = [(weight, term.gram(u, bandwidth)) for weight, term in self.terms]
        return sum(weight * gram for weight, (gram, _) in parts), sum(weight * gamma for weight, (_, gamma) in parts)

    def __add__(self, other):
        if not isinstance(other, Interaction):
            return NotImplemented
        return Sum(self.terms + Sum.of(other).terms)

    def __rmul__(self, weight):
        _require_positive(self, "weight", weight)
        return Sum(tuple((weight * w, term) for w, term in self.terms))

    __mul__ = __rmul__

    def __repr__(self):
        return " + ".join(f"{weight:g} * {term!r}" for weight, term in self.terms)


def squared_distances(u: jax.Array) -> jax.Array:
    """The squared distances ``(L, L)`` of points ``(L, d)``, by one matrix product; infinite for runaway points."""
    _, squared, together = _centred(u)
    return jnp.where(together, squared, jnp.inf)


def median_bandwidth(u: jax.Array) -> jax.Array:
    """The median rule ``h = median ‖u_i − u_j‖² / log L`` over the pairs ``i ≠ j`` of each group.

    :param u: particles, ``(L, d)`` or ``(G, L, d)`` with ``L > 1``.
    """
    size = u.shape[-2]
    squared = jnp.vectorize(squared_distances, signature="(l,d)->(l,l)")(u)
    pairs = squared[..., *jnp.triu_indices(size, 1)]
    # Without a positive, finite median (coincident or runaway particles) any positive bandwidth is exact.
    h = jnp.median(pairs) / jnp.log(jnp.asarray(float(size), u.dtype))
    return jnp.where(jnp.isfinite(h) & (h > 0), h, 1.0).astype(u.dtype)


def _balance(noise, axis):
    """Centre along an axis and rescale, so that each slice stays N(0, I); a single slice is left alone."""
    size = noise.shape[axis]
    if size == 1:
        return noise
    return (size / (size - 1)) ** 0.5 * (noise - noise.mean(axis, keepdims=True))


def _centred(u):
    """Points ``(L, d)`` about a central one, their squared distances, and which pairs are near enough to have one."""
    # ‖x‖² + ‖y‖² − 2 x·y cancels badly far from the origin. The mean would do, but one runaway particle moves it and
    # ruins the distances of all others, so centre on the median of three.
    first, second, third = u[0], u[len(u) // 2], u[-1]
    centre = jnp.maximum(jnp.minimum(first, second), jnp.minimum(jnp.maximum(first, second), third))
    x = u - lax.stop_gradient(centre)
    near = jnp.sum(x * x, 1) < jnp.finfo(u.dtype).max ** 0.75
    x = jnp.where(near[:, None], x, 0.0)
    norm = jnp.sum(x * x, 1)
    squared = jnp.maximum(norm[:, None] + norm[None, :] - 2.0 * (x @ x.T), 0.0)
    return x, squared, near[:, None] & near[None, :]


def _require_positive(owner, name, value):
    if value is not None and not (isinstance(value, Real) and 0.0 < value < float("inf")):
        raise ValueError(f"{type(owner).__name__}: `{name}` must be a positive, finite number; got {value!r}.")
