"""The complete recipe for user-supplied matrices D and Q."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped
import numpy as np

from numpyro_repulsion.checks import integer, keep, positive
from numpyro_repulsion.dynamics.base import Cloud, Dynamics
from numpyro_repulsion.dynamics.step_error import UnknownError
from numpyro_repulsion.noise import normal
from numpyro_repulsion.rounding import einsum, matmul

#: Relative tolerance of the checks on D and Q, in units of their largest entries.
_ROUNDING = 1e-4


def _squares(extra: Float[Array, "*particles d"]) -> Float[Array, "*particles"]:
    return 0.5 * jnp.sum(extra**2, -1)


@dataclass(frozen=True)
class Recipe(Dynamics):
    r"""The complete recipe (Ma, Chen & Fox, 2015) for user-supplied matrices D and Q.

    .. math::
        x \leftarrow x + \epsilon \bigl(-(D + Q) \nabla H + T\, \Gamma\bigr) + \sqrt{2 \epsilon T D}\; \xi,
        \qquad \Gamma_i = \sum_j \partial_{x_j} (D + Q)_{ij}

    Here x is the whole ensemble: an array ``(L, d + a)`` of positions and, for each particle, ``a`` extra coordinates
    (for example momenta), and :math:`H = \sum_i U(z_i) + \sum_i E(\text{extra}_i)`. ``D(x)`` and ``Q(x)`` are ``n × n``
    with ``n = L (d + a)``, in the order of ``x.ravel()``; D is symmetric and positive semidefinite, Q skew-symmetric. Γ
    is computed by automatic differentiation. As ε → 0 the stationary distribution is ``exp(−H / T)`` for all D and Q;
    Euler's bias is first order.

    It costs ``n³`` in time and memory: for research and teaching. D and Q contain the interaction, so the kernel's
    ``interaction`` must be ``Independent()`` or ``Balanced()``, and noise is never balanced. ``step_size`` must be
    given. Positions are whitened if a ``preconditioner`` is given or learned.

    :param D: ``x -> (n, n)``.
    :param Q: ``x -> (n, n)``; ``None`` is zero.
    :param extra: a, the number of coordinates of each particle in addition to its position.
    :param energy: E, the energy of the extra coordinates, ``(..., a) -> (...)``; by default half their sum of squares.
        They start as standard normal variables times ``√T``.
    :param temperature: T > 0.
    :raises TypeError: if D, Q or ``energy`` is not callable.
    :raises ValueError: for matrices without these properties on the starting cloud, a temperature that is not
        positive, or no ``step_size``. If matrices lose these properties later, particles keep their positions and are
        flagged ``diverging``.

    **References:**

    1. *A Complete Recipe for Stochastic Gradient MCMC*, Y.-A. Ma, T. Chen and E. Fox,
       https://arxiv.org/abs/1506.04696

    **Example**

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from numpyro_repulsion import SGLD
        >>> from numpyro_repulsion.dynamics import Recipe
        >>> def D(x):  # each particle slower where it is far out
        ...     return jnp.diag(1.0 / (1.0 + x.ravel() ** 2))
        >>> kernel = SGLD(potential_fn=lambda z: jnp.sum(z**2) / 2, dynamics=Recipe(D), step_size=0.1)
    """

    D: Callable[[Float[Array, "n d"]], Float[Array, "_ _"]]
    Q: Callable[[Float[Array, "n d"]], Float[Array, "_ _"]] | None = None
    extra: int = 0
    energy: Callable[[Float[Array, "*particles d"]], Float[Array, "*particles"]] = _squares
    temperature: float = 1.0

    interacts: ClassVar[bool] = True

    def __post_init__(self):
        for name in ("D", "Q", "energy"):
            value = getattr(self, name)
            if not (callable(value) or (name == "Q" and value is None)):
                raise TypeError(f"Recipe: `{name}` must be a function; got {value!r}.")
        keep(self, "extra", integer, least=0, expected="a number of coordinates, an integer of 0 or more")
        keep(self, "temperature", positive)

    def step_error(self, coupling):
        return UnknownError(
            "Warmup cannot adapt the step size of Recipe(D, Q); give `step_size`, as in SGLD(model, "
            "dynamics=Recipe(D, Q), step_size=1e-3)."
        )

    def init(self, key, z, energy_and_grad, couple):
        self._require_identity(couple(z))
        memory: tuple[Shaped[Array, "*particles _"], ...] = ()
        if self.extra:
            memory = (self.temperature**0.5 * normal(key, (*z.shape[:-1], self.extra), z.dtype),)
        energy, gradient = energy_and_grad(z)
        return Cloud(z, energy, gradient, memory)

    def step(self, key, cloud, energy_and_grad, couple, step_size):
        self._require_identity(couple(cloud.z))
        x = jnp.concatenate((cloud.z, *cloud.memory), -1)
        slope = cloud.gradient
        if self.extra:
            slope = jnp.concatenate((slope, jax.grad(lambda extra: self.energy(extra).sum())(cloud.memory[0])), -1)
        drift = jnp.vectorize(self.drift, signature="(l,k),(l,k)->(l,k)")(x, slope)
        root = jnp.vectorize(self._root, signature="(l,k)->(n,n)")(x)
        white = normal(key, root.shape[:-1], x.dtype)
        noise = einsum("...ij,...j->...i", root, white).reshape(x.shape)
        x = x + step_size * drift + jnp.sqrt(2.0 * step_size * self.temperature) * noise
        z, extra = x[..., : cloud.z.shape[-1]], x[..., cloud.z.shape[-1] :]
        energy, gradient = energy_and_grad(z)
        return Cloud(z, energy, gradient, (extra,) if self.extra else ())

    def drift(self, x: Float[Array, "n d"], slope: Float[Array, "n d"]) -> Float[Array, "n d"]:
        """Return ``−(D + Q) ∇H + TΓ`` for one ensemble ``(L, d + a)`` and ``slope``, ∇H there, of the same shape."""

        def matrix(flat):
            D = _matrix(self.D, flat.reshape(x.shape), 1.0)
            return D if self.Q is None else D + _matrix(self.Q, flat.reshape(x.shape), -1.0)

        divergence = jnp.trace(jax.jacfwd(matrix)(x.ravel()), axis1=1, axis2=2)
        return (self.temperature * divergence - matmul(matrix(x.ravel()), slope.ravel())).reshape(x.shape)

    def check(self, cloud):
        for x in np.concatenate((cloud.z, *cloud.memory), -1):
            n = x.size
            for name, kind, sign in (("D", "symmetric", "-"), ("Q", "skew-symmetric", "+")):
                if (function := getattr(self, name)) is None:
                    continue
                matrix = np.asarray(function(x))
                if matrix.shape != (n, n):
                    raise ValueError(f"Recipe: `{name}` must be of shape ({n}, {n}); got shape {matrix.shape}.")
                allowed = _ROUNDING * max(float(np.abs(matrix).max(initial=0.0)), 1e-6)
                mirrored = matrix.T if name == "D" else -matrix.T
                if not np.allclose(matrix, mirrored, atol=allowed):
                    gap = f"{name} {sign} {name}.T has entries up to {np.abs(matrix - mirrored).max():.2g}"
                    raise ValueError(f"Recipe: `{name}` must be {kind}; {gap}.")
                if name == "D" and (smallest := float(np.linalg.eigvalsh(matrix)[0])) < -allowed:
                    raise ValueError(
                        f"Recipe: `D` must be positive semidefinite; its smallest eigenvalue is {smallest:.2g}."
                    )

    def _root(self, x):
        # A singular D has no Cholesky factor.
        values, vectors = jnp.linalg.eigh(_matrix(self.D, x, 1.0))
        values = jnp.where(values[0] < -_ROUNDING * jnp.abs(values).max(), jnp.nan, values)
        return vectors * jnp.sqrt(jnp.maximum(values, 0.0))

    def _require_identity(self, coupling):
        if not coupling.is_identity:
            raise ValueError(
                "Recipe(D, Q) contains the interaction in D and Q; pass interaction=Independent(), as in SGLD(model, "
                "dynamics=Recipe(D, Q), interaction=Independent())."
            )


def _matrix(function, x, sign):
    """Return a matrix that equals its transpose times a sign; or NaN, which rejects the update and flags particles."""
    found = jnp.asarray(function(x), x.dtype)
    return jnp.where(jnp.abs(found - sign * found.T).max() > _ROUNDING * jnp.abs(found).max(), jnp.nan, found)
