"""The coupling of a cloud, and interactions with a Gram matrix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
import math
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer

from numpyro_repulsion.checks import positive
from numpyro_repulsion.noise import normal
from numpyro_repulsion.rounding import AnyArray, matmul

#: The largest share of the injected noise that gradient noise takes the place of.
MOST_REPLACED = 0.7
#: The smallest bandwidth, divided by the variance of a coordinate. With many particles on a line, repulsion would
#: otherwise change over the distance of neighbors, and a step short enough to follow it would hardly move them.
NARROWEST = 0.1


def bisect_bandwidth(
    mean_similarity: Callable[[Float[Array, ""]], Float[Array, ""]], u: Float[Array, "*particles d"], target: float
) -> Float[Array, ""]:
    """Return the bandwidth at which the mean similarity of ``u``, ``(G, L, d)``, is ``target`` times its largest."""
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

    # 30 halvings of an interval of some twenty reach the rounding of single precision.
    (low, high), _ = lax.scan(halve, (narrow, wide), length=30)
    return jnp.exp((low + high) / 2.0).astype(u.dtype)


class Coupling(NamedTuple):
    """The operations that the matrix K of one cloud supports.

    - **apply** - ``x -> K x`` for any numbers of each particle, ``(..., L, k)``.
    - **repulsion** - Γ, with ``Γ_i = Σ_j ∇_{u_j} K_ij``, of the cloud's shape (0 where K is constant).
    - **draw** - ``key -> ξ``, Gaussian noise of the cloud's shape, with covariance ``K ⊗ I_d`` for each group.
    - **bound** - scalar, at least the largest eigenvalue of K.
    - **is_identity** - whether K is the identity, which allows second-order integrators.
    - **white** - ``key -> η``, the same with covariance ``I ⊗ I_d``; ``None`` is independent standard normal noise.
    - **diagonal** - ``K_ii``: a scalar if it is the same for all particles at all positions, otherwise of shape
      ``(..., L)``. The stationary bias of a step grows with its mean, and warmup takes that into account.
    """

    apply: Callable[[Float[AnyArray, "*particles k"]], Float[AnyArray, "*particles k"]]
    repulsion: Float[AnyArray, "*particles d"] | float
    draw: Callable[[jax.Array], Float[AnyArray, "*particles d"]]
    bound: Float[AnyArray, ""] | float
    is_identity: bool = False
    white: Callable[[jax.Array], Float[AnyArray, "*particles d"]] | None = None
    diagonal: Float[AnyArray, "*particles"] | Float[AnyArray, ""] | float = 1.0

    @staticmethod
    def identity(white: Callable[[jax.Array], Float[AnyArray, "*particles d"]]) -> Coupling:
        """Return the coupling ``K = I`` with this noise."""
        return Coupling(lambda x: x, 0.0, white, 1.0, is_identity=True, white=white)

    def white_noise(self, key: jax.Array, u: Float[Array, "*particles d"]) -> Float[Array, "*particles d"]:
        """Return standard normal noise for particles, balanced if the interaction balances it."""
        return normal(key, u.shape, u.dtype) if self.white is None else self.white(key)

    def with_less_noise(self, share: Float[AnyArray, " d"], u: Float[Array, "*particles d"]) -> Coupling:
        """Return the coupling whose noise lacks a share of its variance in each coordinate, up to `MOST_REPLACED`."""
        scale = jnp.sqrt(1.0 - jnp.minimum(share, MOST_REPLACED))
        return self._replace(
            draw=lambda key: scale * self.draw(key), white=lambda key: scale * self.white_noise(key, u)
        )

    @staticmethod
    def of_figures(
        bound: Float[AnyArray, ""] | float, diagonal: Float[AnyArray, "*particles"] | float, is_identity: bool
    ) -> Coupling:
        """Return a coupling without operations, for ``Dynamics.step_error`` on the host."""

        def missing(_):
            raise TypeError("This coupling contains statistics only; call `Interaction.couple` for its operations.")

        return Coupling(missing, 0.0, missing, bound, bool(is_identity), diagonal=diagonal)


class Interaction:
    """Base class of interactions. One with a Gram matrix derives from :class:`Gram`, which is enough in most cases.

    **Example**

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from jax import random
        >>> from numpyro_repulsion.interactions import Coupling, Interaction

        >>> class HalfSpeed(Interaction):  # K = I / 2
        ...     def couple(self, u, bandwidth=None):
        ...         noise = lambda key: 0.5**0.5 * random.normal(key, u.shape)
        ...         return Coupling(lambda x: x / 2, 0.0, noise, 0.5, diagonal=0.5)

        >>> HalfSpeed().couple(jnp.zeros((3, 2))).bound
        0.5
    """

    #: So that NumPy leaves ``np.float64(0.5) * RBF()`` to `__rmul__` and does not make an array of objects.
    __array_ufunc__ = None
    #: Whether K depends on the cloud, which must then have two distinct particles.
    interacts: bool = False
    #: Whether every update redraws K, independently of the cloud.
    is_redrawn: bool = False
    #: Whether whole ensembles are balanced against each other, which needs two or more.
    balances_ensembles: bool = False
    #: Whether warmup chooses a bandwidth.
    learns_bandwidth: bool = False
    #: Whether warmup chooses it by its measured gain, not by the rule of `learn_bandwidth` alone.
    tunes_bandwidth: bool = False
    #: Whether K is known to be positive definite. If not, it is tested on the starting cloud.
    positive_definite: bool = True
    #: Whether ``K_ii`` may depend on the positions. If so, warmup cannot measure steps with momenta.
    diagonal_varies: bool = False

    def at(self, key: jax.Array | None, count: Integer[Array, ""] | int) -> Interaction:
        """Return the interaction of one update: itself, unless it is redrawn or changes with time.

        :param key: a PRNG key if the interaction is redrawn, otherwise ``None``.
        :param count: the number of updates done before.
        """
        return self

    def learn_bandwidth(self, u: Float[Array, "*particles d"]) -> Float[Array, ""]:
        """Return the bandwidth by the rule for particles ``(G, L, d)``, if the interaction learns one."""
        raise NotImplementedError(f"{type(self).__name__} does not implement `learn_bandwidth`.")

    def couple(self, u: Float[Array, "*particles d"], bandwidth: Float[Array, ""] | float | None = None) -> Coupling:
        """Return the coupling of the cloud.

        :param u: particles, ``(L, d)`` or ``(G, L, d)``.
        :param bandwidth: the bandwidth in use, for interactions that learn it.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement `couple`.")

    def __add__(self, other):
        return Sum(Sum.of(self).terms + Sum.of(other).terms)

    def __rmul__(self, weight):
        weight = positive("Sum: `weight`", weight)
        return Sum(tuple((weight * w, term) for w, term in Sum.of(self).terms))

    __mul__ = __rmul__


@dataclass(frozen=True)
class Independent(Interaction):
    """No interaction: ``K = I``, ``Γ = 0`` and white noise. This is parallel SGLD.

    **Example**

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from numpyro_repulsion import Independent
        >>> coupling = Independent().couple(jnp.zeros((3, 2)))
        >>> coupling.repulsion, coupling.bound
        (0.0, 1.0)
    """

    def couple(self, u, bandwidth=None):
        return Coupling.identity(lambda key: normal(key, u.shape, u.dtype))

    def gram(self, u, bandwidth):
        return jnp.eye(u.shape[0], dtype=u.dtype), jnp.zeros_like(u)

    def similarity(self, u, bandwidth):
        return self.gram(u, bandwidth)[0]


class Wrapping(Interaction):
    """Base class of interactions that wrap another one, ``interaction``, and use its bandwidth."""

    interaction: Interaction | None

    @property
    def _inner(self) -> Any:
        return Independent() if self.interaction is None else self.interaction

    bandwidth = property(lambda self: getattr(self._inner, "bandwidth", None))
    learns_bandwidth = property(lambda self: self._inner.learns_bandwidth)
    tunes_bandwidth = property(lambda self: self._inner.tunes_bandwidth)
    positive_definite = property(lambda self: self._inner.positive_definite)

    def learn_bandwidth(self, u):
        return self._inner.learn_bandwidth(u)

    def gram(self, u, bandwidth):
        """Return K and Γ of one group ``(L, d)``, if the interaction has a Gram matrix."""
        return self._inner.gram(u, bandwidth)


class Gram(Interaction):
    """Base class of interactions with a Gram matrix: ``K_ij = k(u_i, u_j) + nugget · 1{i = j}``.

    A subclass defines :meth:`evaluate`, the kernel for one pair of points. Γ comes from automatic differentiation, and
    the starting cloud tells whether K is positive definite. The nugget, in the drift *and* the noise, causes no bias
    and keeps the Cholesky factor finite if particles are close, L is large or the bandwidth is wide. Such interactions
    can be multiplied by positive weights and added: ``0.9 * RBF() + 0.1 * Independent()``.

    **Example**

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from numpyro_repulsion.interactions import Gram

        >>> class Cosine(Gram):
        ...     def evaluate(self, x, y, bandwidth):
        ...         return jnp.mean(jnp.cos(x - y))

        >>> coupling = Cosine().couple(jnp.array([[0.0], [1.0]]))
        >>> coupling.repulsion.round(2).tolist()
        [[-0.8399999737739563], [0.8399999737739563]]
    """

    interacts = True
    positive_definite = False
    diagonal_varies = True
    nugget: float = 1e-3

    def evaluate(
        self, x: Float[Array, " d"], y: Float[Array, " d"], bandwidth: Float[Array, ""] | float | None
    ) -> Float[Array, ""]:
        """Return the kernel k for a pair of points of shape ``(d,)``: symmetric, and differentiable also at ``x = y``.

        ``bandwidth`` is meaningless unless ``learns_bandwidth`` is true. A kernel that uses it otherwise raises
        ``ValueError`` when a run begins.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement `evaluate`.")

    def gram(
        self, u: Float[Array, "L d"], bandwidth: Float[Array, ""] | float | None
    ) -> tuple[Float[Array, "L L"], Float[Array, "L d"]]:
        """Return K of shape ``(L, L)`` and Γ of shape ``(L, d)`` for one group ``u`` of shape ``(L, d)``."""

        def k(x, y):
            return self.evaluate(x, y, bandwidth)

        def repulsion(x):
            # ∇_{u_j} K_ij through the second argument for all j, and for j = i also through the first. One row at a
            # time, so that no array of shape (L, L, d) is formed.
            through_second = jax.vmap(jax.grad(k, 1), (None, 0))(x, u).sum(0)
            return through_second + jax.grad(k, 0)(x, x)

        gram = jax.vmap(jax.vmap(k, (None, 0)), (0, None))(u, u)
        return gram + self.nugget * jnp.eye(len(u), dtype=u.dtype), lax.map(repulsion, u)

    def similarity(self, u: Float[Array, "L d"], bandwidth: Float[Array, ""] | float | None) -> Float[Array, "L L"]:
        """Return the matrix ``(L, L)`` from which the bandwidth is learned; K by default."""
        return self.gram(u, bandwidth)[0]

    def learn_bandwidth(self, u):
        """Return the bandwidth at which the mean of k over pairs is ``min(4 / (L − 1), 1 / 4)`` of its maximum.

        Each particle then has at most about four neighbors, and the largest eigenvalue of K, which limits the step,
        stays near five. The bandwidth is at least 0.1 of a coordinate's variance: many particles in few dimensions have
        more than four neighbors, because repulsion between nearest neighbors would need shorter steps.
        """
        size = u.shape[-2]

        def mean_similarity(h):
            gram = lax.map(lambda v: self.similarity(v, h), u)
            diagonal = jnp.trace(gram, axis1=-2, axis2=-1)
            return jnp.mean((gram.sum((-2, -1)) - diagonal) / diagonal) / (size - 1)

        return bisect_bandwidth(mean_similarity, u, min(4.0 / (size - 1), 0.25))

    def couple(self, u, bandwidth=None, white=None):
        white = white or (lambda key: normal(key, u.shape, u.dtype))
        gram, repulsion = jnp.vectorize(lambda v: self.gram(v, bandwidth), signature="(l,d)->(l,l),(l,d)")(u)
        root, diagonal = jnp.linalg.cholesky(gram), jnp.diagonal(gram, axis1=-2, axis2=-1)
        return Coupling(
            apply=lambda x: matmul(gram, x),
            repulsion=repulsion,
            draw=lambda key: matmul(root, white(key)),
            bound=jnp.linalg.eigvalsh(gram)[..., -1].max(),  # the compiler drops it if it is unused
            white=white,
            diagonal=diagonal if self.diagonal_varies else diagonal.mean(),
        )


@dataclass(frozen=True)
class Sum(Gram):
    """A sum of Gram-type interactions with positive weights, written ``0.9 * RBF() + 0.1 * Independent()``.

    Terms without a given bandwidth share the learned one. It is ``"learned"`` if it is so for any of them.

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
        """Return the interaction as a sum of one term."""
        if isinstance(interaction, Sum):
            return interaction
        if not isinstance(interaction, Gram | Independent):
            raise TypeError(
                "Only interactions with a Gram matrix can be added, and multiplied by a weight; got "
                f"{interaction!r}. Wrap the sum to balance, schedule or redraw it: Balanced(a + b), "
                "Scheduled(a + b, weight), RandomGroups(a + b). The term for K = I is Independent()."
            )
        return Sum(((1.0, interaction),))

    @property
    def bandwidth(self):
        given = {getattr(term, "bandwidth", None) for _, term in self.terms} - {None}
        return given.pop() if len(given) == 1 else None

    positive_definite = property(lambda self: all(term.positive_definite for _, term in self.terms))
    learns_bandwidth = property(lambda self: any(term.learns_bandwidth for _, term in self.terms))
    tunes_bandwidth = property(lambda self: any(term.tunes_bandwidth for _, term in self.terms))
    diagonal_varies = property(lambda self: any(term.diagonal_varies for _, term in self.terms))

    def similarity(self, u, bandwidth):
        return sum(weight * term.similarity(u, bandwidth) for weight, term in self.terms)

    def gram(self, u, bandwidth):
        parts = [(weight, term.gram(u, bandwidth)) for weight, term in self.terms]
        return sum(weight * gram for weight, (gram, _) in parts), sum(weight * gamma for weight, (_, gamma) in parts)

    def __repr__(self):
        return " + ".join(f"{weight:g} * {term!r}" for weight, term in self.terms)
