"""Interactions that change with the update: redrawn at a cost linear in the number of particles, or scheduled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import jax
from jax import random
import jax.numpy as jnp
from jaxtyping import Array, Float

from numpyro_repulsion.checks import integer, keep, number, positive
from numpyro_repulsion.interactions.base import Coupling, Gram, Interaction, Wrapping, bisect_bandwidth
from numpyro_repulsion.noise import normal
from numpyro_repulsion.rounding import matmul


@dataclass(frozen=True)
class RandomFeatures(Interaction):
    r"""Repulsion through random features: exact for any number of features, and linear in the number of particles.

    .. math::
        K_{ij} = \alpha\, 1\{i = j\} + (1 - \alpha)\, \frac{1}{F} \sum_{f=1}^{F} \cos\bigl(w_f \cdot (u_i - u_j)\bigr),
        \qquad w_f \sim N(0, \tfrac{2}{h} I)

    The expectation of the second term over w is :class:`~numpyro_repulsion.RBF`, but each draw of w is itself a
    positive-definite kernel: its Γ, two sums over particles, and its square root, the matrix of features, are exact.
    There is no ``L × L`` matrix, no Cholesky factor and no approximation: as ε → 0 the stationary distribution is
    ``∏_i π(u_i)``. Every update draws new frequencies w, independently of the particles.

    The largest eigenvalue of the second term is at least ``L / (2F)``, and the step shrinks as it grows. For many
    particles the weight ``1 − α`` should fall with ``F / L``, as it does by default.

    :param bandwidth: h; ``None`` learns it in warmup.
    :param num_features: F.
    :param weight: ``1 − α``, between 0 and 1. ``None`` is ``min(1 / 2, 8 F / L)``, which keeps the eigenvalue
        below about five.
    :raises ValueError: for numbers out of range.

    **References:**

    1. *Random Features for Large-Scale Kernel Machines*, A. Rahimi and B. Recht, NIPS 2007

    **Example**

    .. doctest::

        >>> from jax import random
        >>> from numpyro_repulsion.interactions import RandomFeatures
        >>> u = random.normal(random.key(0), (10_000, 3))
        >>> coupling = RandomFeatures(bandwidth=1.0).at(random.key(1), 0).couple(u)
        >>> coupling.repulsion.shape, coupling.draw(random.key(2)).shape
        ((10000, 3), (10000, 3))
    """

    bandwidth: float | None = None
    num_features: int = 64
    weight: float | None = None
    #: The key of the frequencies; every update sets a new one.
    key: jax.Array | None = field(default=None, repr=False, compare=False)

    interacts = True
    is_redrawn = True

    def __post_init__(self):
        if self.bandwidth is not None:
            keep(self, "bandwidth", positive)
        keep(self, "num_features", integer)
        if self.weight is not None:
            keep(self, "weight", number, expected="a number between 0 and 1", accepts=lambda x: 0.0 < x < 1.0)

    learns_bandwidth = property(lambda self: self.bandwidth is None)

    def at(self, key, count):
        return replace(self, key=key)

    def learn_bandwidth(self, u):
        def mean_similarity(h):
            cosines, sines = self._features(u, h)
            total = (cosines.sum(-2) ** 2 + sines.sum(-2) ** 2).sum(-1)
            return jnp.mean(total / u.shape[-2] - 1.0) / (u.shape[-2] - 1)

        # With finitely many features some pairs always stay similar.
        target = min(4.0 / (u.shape[-2] - 1), 0.25) + self.num_features**-0.5 / 4.0
        return bisect_bandwidth(mean_similarity, u, target)

    def couple(self, u, bandwidth=None):
        h = bandwidth if self.bandwidth is None else self.bandwidth
        size, features = u.shape[-2], self.num_features
        weight = min(0.5, 8.0 * features / size) if self.weight is None else self.weight
        cosines, sines = self._features(u, h)
        Φ = jnp.concatenate((cosines, sines), -1)
        turned = jnp.concatenate((-sines, cosines), -1)  # the derivative of Φ along w·u
        w = jnp.concatenate((self._frequencies(u, h),) * 2)
        transposed = jnp.swapaxes(Φ, -1, -2)

        def draw(key):
            own_key, common_key = random.split(key)
            own = normal(own_key, u.shape, u.dtype)
            common = normal(common_key, (*u.shape[:-2], 2 * features, u.shape[-1]), u.dtype)
            return (1.0 - weight) ** 0.5 * own + weight**0.5 * matmul(Φ, common)

        # Σ_j ∇_{u_j} φ(u_i)·φ(u_j); the derivative of φ(u_i)·φ(u_i) = 1 vanishes.
        repulsion = matmul(Φ * turned.sum(-2, keepdims=True), w)
        return Coupling(
            apply=lambda x: (1.0 - weight) * x + weight * matmul(Φ, matmul(transposed, x)),
            repulsion=weight * repulsion,
            draw=draw,
            bound=1.0 - weight + weight * jnp.linalg.eigvalsh(matmul(transposed, Φ))[..., -1].max(),
        )

    def _frequencies(self, u, h):
        key = random.key(0) if self.key is None else self.key
        return jnp.sqrt(2.0 / h) * normal(key, (self.num_features, u.shape[-1]), u.dtype)

    def _features(self, u, h):
        phase = matmul(u, self._frequencies(u, h).T)
        return jnp.cos(phase) * self.num_features**-0.5, jnp.sin(phase) * self.num_features**-0.5


@dataclass(frozen=True)
class RandomGroups(Wrapping):
    r"""An interaction within small groups of particles that every update redraws.

    K is block diagonal: ``interaction`` couples ``size`` randomly drawn particles, and the next update draws other
    groups. The groups do not depend on the positions, so each K is valid: as ε → 0 the stationary distribution is
    ``∏_i π(u_i)``. The cost is linear in the number of particles, which must be a multiple of ``size``.

    :param interaction: the interaction within groups, with a Gram matrix.
    :param size: the number of particles in a group, 2 or more.
    :raises TypeError: for an interaction without a Gram matrix.
    :raises ValueError: for groups of fewer than two.

    **Example**

    .. doctest::

        >>> from jax import random
        >>> from numpyro_repulsion import RBF
        >>> from numpyro_repulsion.interactions import RandomGroups
        >>> u = random.normal(random.key(0), (1000, 3))
        >>> RandomGroups(RBF(bandwidth=1.0), size=20).at(random.key(1), 0).couple(u).repulsion.shape
        (1000, 3)
    """

    interaction: Gram
    size: int = 20
    #: The key of the groups; every update sets a new one.
    key: jax.Array | None = field(default=None, repr=False, compare=False)

    interacts = True
    is_redrawn = True

    def __post_init__(self):
        if not isinstance(self.interaction, Gram):
            raise TypeError(
                f"RandomGroups takes an interaction with a Gram matrix, such as RBF(); got {self.interaction!r}."
            )
        keep(self, "size", integer, least=2)

    def gram(self, u, bandwidth):
        """Return K and Γ by groups, ``(L / size, size, size)`` and ``(L / size, size, d)``, to test K."""
        return jax.vmap(lambda v: self.interaction.gram(v, bandwidth))(self._split(u, self._order(u)))

    def at(self, key, count):
        return replace(self, key=key)

    def learn_bandwidth(self, u):
        return self.interaction.learn_bandwidth(self._split(u, self._order(u)))

    def couple(self, u, bandwidth=None):
        order = self._order(u)
        back = jnp.argsort(order, -1)
        coupling = self.interaction.couple(self._split(u, order), bandwidth)

        def join(x):
            return jnp.take_along_axis(x.reshape(*u.shape[:-1], x.shape[-1]), back[..., None], -2)

        return Coupling(
            apply=lambda x: join(coupling.apply(self._split(x, order))),
            repulsion=join(coupling.repulsion),
            draw=lambda key: join(coupling.draw(key)),
            bound=coupling.bound,
            diagonal=join(coupling.diagonal[..., None])[..., 0] if jnp.ndim(coupling.diagonal) else coupling.diagonal,
        )

    def _order(self, u):
        if u.shape[-2] % self.size:
            raise ValueError(
                f"{self!r} needs a multiple of {self.size} particles in each ensemble; got {u.shape[-2]}. Change "
                "`num_chains` or `size`."
            )
        key = random.key(0) if self.key is None else self.key
        keys = random.split(key, u.shape[:-2] or (1,))
        order = jax.vmap(lambda key: random.permutation(key, u.shape[-2]))(keys)
        return order if u.ndim == 3 else order[0]

    def _split(self, x, order):
        return jnp.take_along_axis(x, order[..., None], -2).reshape(-1, self.size, x.shape[-1])


@dataclass(frozen=True)
class Scheduled(Wrapping):
    r"""An interaction whose strength is a function of the update count.

    .. math::
        K_t = w(t)\, K + (1 - w(t))\, I, \qquad \Gamma_t = w(t)\, \Gamma

    At ``w = 1`` this is the interaction, at ``w = 0`` parallel SGLD. For any w in [0, 1], ``D = K_t ⊗ I`` and
    ``Q = 0`` (with momenta ``Q = [[0, −K_t], [K_t, 0]]``). K_t is positive definite, and w depends on time but not on
    the particles, so Γ_t is complete. ``∏_i π(u_i)`` is therefore the stationary distribution of every K_t and, as
    ε → 0, of the whole run, for any schedule w.

    The paper switches repulsion off for the last half of training, as in the example. The count includes warmup,
    ``num_steps`` updates for each iteration. Every update computes K, and with momenta the integrator stays first order
    at ``w = 0`` too. Warmup measures the step for the w in [0, 1] at which it must be shortest.

    :param interaction: the scheduled interaction, whose K must depend on the particles: ``RBF()``, a sum,
        ``RandomFeatures()``, ``RandomGroups(...)`` or ``Balanced(RBF())`` (groups stay balanced against each other).
    :param weight: w, a callable of the update count (0 at the first update) with values in [0, 1], for example an
        optax schedule. Values outside are clipped.
    :raises TypeError: for an interaction whose K does not depend on the particles, or a weight that is not callable.
    :raises ValueError: for a first value that is not a number in [0, 1].

    **References:**

    1. *Stochastic Gradient MCMC with Repulsive Forces*, V. Gallego and D. Ríos Insua,
       https://arxiv.org/abs/1812.00071

    **Example**

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from numpyro_repulsion import RBF
        >>> from numpyro_repulsion.interactions import Scheduled
        >>> interaction = Scheduled(RBF(bandwidth=2.0), lambda count: jnp.where(count < 10_000, 1.0, 0.0))
        >>> u = jnp.array([[0.0], [1.0]])
        >>> [f"{interaction.at(None, count).couple(u).repulsion[1, 0]:.2f}" for count in (0, 10_000)]
        ['0.61', '0.00']
    """

    interaction: Interaction
    weight: Callable[..., Float[Array, ""] | float]
    #: The weight of the current update. It is 1 if not set, as when warmup measures.
    now: Float[Array, ""] | float | None = field(default=None, repr=False, compare=False)

    interacts = True

    def __post_init__(self):
        if self.now is not None:
            return
        if not (isinstance(self.interaction, Interaction) and self.interaction.interacts):
            raise TypeError(
                "Scheduled takes an interaction whose K depends on the particles, such as RBF() or RandomFeatures(); "
                f"got {self.interaction!r}."
            )
        if not callable(self.weight):
            raise TypeError(
                "Scheduled: `weight` must be a callable of the update count with values in [0, 1], such as "
                "`lambda count: jnp.where(count < 10_000, 1.0, 0.0)` or an optax schedule; got "
                f"{self.weight!r}. For a constant weight write 0.3 * RBF() + 0.7 * Independent()."
            )
        first = self.weight(0)
        if jnp.shape(first) != () or not 0.0 <= float(first) <= 1.0:
            raise ValueError(
                f"Scheduled: `weight` must be a number in [0, 1] at any update; got {first!r} at the first one."
            )

    def __repr__(self):
        # The name of a function without its address, because this is stored with the results.
        return f"Scheduled({self.interaction!r}, weight={getattr(self.weight, '__name__', repr(self.weight))})"

    is_redrawn = property(lambda self: self.interaction.is_redrawn)
    balances_ensembles = property(lambda self: self.interaction.balances_ensembles)

    def at(self, key, count):
        now = jnp.clip(self.weight(count), 0.0, 1.0)
        return replace(self, interaction=self.interaction.at(key, count), now=now)

    def couple(self, u, bandwidth=None):
        coupling = self.interaction.couple(u, bandwidth)
        if self.now is None:
            # The largest over w, because the step is measured once.
            return coupling._replace(
                bound=jnp.maximum(coupling.bound, 1.0), diagonal=jnp.maximum(coupling.diagonal, 1.0)
            )
        w = jnp.asarray(self.now, u.dtype)

        def draw(key):
            common_key, own_key = random.split(key)
            return jnp.sqrt(w) * coupling.draw(common_key) + jnp.sqrt(1.0 - w) * coupling.white_noise(own_key, u)

        return coupling._replace(
            apply=lambda x: w * coupling.apply(x) + (1.0 - w) * x,
            repulsion=w * coupling.repulsion,
            draw=draw,
            bound=w * coupling.bound + 1.0 - w,
            diagonal=w * coupling.diagonal + 1.0 - w,
        )

    def gram(self, u, bandwidth):
        gram, repulsion = super().gram(u, bandwidth)
        w = 1.0 if self.now is None else jnp.asarray(self.now, u.dtype)
        return w * gram + (1.0 - w) * jnp.eye(gram.shape[-1], dtype=u.dtype), w * repulsion
