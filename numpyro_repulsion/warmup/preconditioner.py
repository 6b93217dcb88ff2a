"""The preconditioner: a linear change of variables that gives the posterior about unit scale, and its estimators."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float
import numpy as np

from numpyro_repulsion.gradients import ArrowRoot, Units
from numpyro_repulsion.rounding import AnyArray, cholesky, eigh, matmul, solve_rows, solve_triangular, xp


@dataclass(frozen=True)
class PreconditionerConstants:
    """What estimates of scales chose."""

    #: The scales at the starts are between these: a few gradients far from the posterior may give any.
    first_scales: tuple[float, float] = (1e-4, 1e2)
    #: How many directions have scales of their own, beside those of the coordinates.
    rank: int = 40
    #: How many successive clouds, which are similar, count as one; and with how many draws a correlation counts half.
    alike: float = 10.0
    few: float = 5.0


PRECONDITIONER = PreconditionerConstants()


class Preconditioner(NamedTuple):
    """The change of variables ``z = c + S u``.

    S is diagonal, ``(d,)``; or lower triangular, ``(d, d)``; or low rank plus diagonal, ``D (I + V F Vᵀ)`` with D and F
    diagonal and k orthonormal columns V; or ``D R`` with the root R of an arrow. The dynamics runs in u, where K is
    evaluated too, so its diffusion in z is ``K ⊗ S Sᵀ``. Because S is constant, Γ needs no extra term. ``None`` means
    the identity for S and the origin for c; c changes no dynamics, but keeps u of order one, as single precision needs.

    - **scale** - S or D.
    - **center** - c, ``(d,)``.
    - **vectors** - V, ``(d, k)``; ``None`` unless S is of low rank plus diagonal.
    - **stretch** - the diagonal of F, ``(k,)``, above -1.
    - **root** - R; ``None`` unless S is that of an arrow.
    """

    scale: Float[AnyArray, " d"] | Float[AnyArray, "d d"] | None = None
    center: Float[AnyArray, " d"] | None = None
    vectors: Float[AnyArray, "d k"] | None = None
    stretch: Float[AnyArray, " _"] | None = None
    root: ArrowRoot | None = None

    @property
    def kind(self) -> str:
        """``"dense"``, ``"arrow"``, ``"low_rank"`` or ``"diagonal"``."""
        if self.root is not None:
            return "arrow"
        if self.vectors is not None:
            return "low_rank"
        return "dense" if self.scale is not None and self.scale.ndim == 2 else "diagonal"

    def along_coordinates(self, scale: Float[AnyArray, " d"], center: Float[AnyArray, " d"]) -> Preconditioner:
        """Return scales of the same kind, but of the coordinates alone."""
        if self.kind == "dense":
            return Preconditioner(np.diag(scale), center)
        stretch = None if self.stretch is None else np.zeros_like(self.stretch)
        root = None if self.root is None else jax.device_get(ArrowRoot.identity(self.root.units, scale.dtype))
        return Preconditioner(scale, center, self.vectors, stretch, root)

    def whiten(self, z: Float[AnyArray, "*particles d"]) -> Float[AnyArray, "*particles d"]:
        """Return u for positions z, ``(..., d)``."""
        if self.center is not None:
            z = z - self.center
        if self.scale is None:
            return z
        if self.scale.ndim == 1:
            z = z / self.scale
            return self._stretch(z, inverse=True) if self.root is None else self.root.solve(z)
        return solve_rows(self.scale, z)

    def to_positions(self, u: Float[AnyArray, "*particles d"]) -> Float[AnyArray, "*particles d"]:
        """Return z for whitened positions u, ``(..., d)``."""
        if self.root is not None:
            u = self.root.times(u) * self.scale
        elif self.scale is not None:
            u = self._stretch(u) * self.scale if self.scale.ndim == 1 else matmul(u, self.scale.T)
        return u if self.center is None else self.center + u

    def whiten_gradient(self, gradient: Float[AnyArray, "*particles d"]) -> Float[AnyArray, "*particles d"]:
        """Return the gradient with respect to u, ``Sᵀ ∇_z U``, from gradients ``(..., d)`` with respect to z."""
        if self.scale is None:
            return gradient
        if self.root is not None:
            return self.root.transposed_times(gradient * self.scale)
        return self._stretch(gradient * self.scale) if self.scale.ndim == 1 else matmul(gradient, self.scale)

    def unwhiten_gradient(self, gradient: Float[AnyArray, "*particles d"]) -> Float[AnyArray, "*particles d"]:
        """Return the gradient with respect to z from gradients ``(..., d)`` with respect to u."""
        if self.scale is None:
            return gradient
        if self.root is not None:
            return self.root.transposed_solve(gradient) / self.scale
        if self.scale.ndim == 1:
            return self._stretch(gradient, inverse=True) / self.scale
        return solve_rows(self.scale, gradient, transposed=True)

    def by_coordinate(
        self, u: Float[AnyArray, "*particles d"], gradient: Float[AnyArray, "*particles d"]
    ) -> tuple[Float[AnyArray, "*particles d"], Float[AnyArray, "*particles d"]]:
        """Return whitened positions and gradients along the coordinates of z, each in units of its scale."""
        if self.kind == "diagonal":
            return u, gradient
        unit = self.lengths()
        positions = self._replace(center=None).to_positions(u)
        return positions / unit, self.unwhiten_gradient(gradient) * unit

    def compose(self, change: Preconditioner) -> Preconditioner:
        """Return this change composed with ``u = c' + S' u'``, which is applied first; both must have scales.

        Of low rank plus diagonal, or an arrow, S must be diagonal yet, and S' is diagonal.
        """
        first: Any = self.scale
        second, center, *_ = change
        scale = first * second if first.ndim == 1 else matmul(first, second)
        return self._replace(scale=scale, center=self.to_positions(center))

    def _stretch(self, x, inverse=False):
        """Multiply by ``I + V F Vᵀ`` or its inverse, which has the same form."""
        if self.vectors is None or self.stretch is None:
            return x
        factor = 1.0 / (1.0 + self.stretch) - 1.0 if inverse else self.stretch
        return x + matmul(matmul(x, self.vectors) * factor, self.vectors.T)

    def lengths(self) -> Float[AnyArray, " d"] | float:
        """Return the lengths of the rows of S, the scales of the coordinates of z; 1 without scales."""
        if self.scale is None:
            return 1.0
        if self.root is not None:
            return self.scale * self.root.variances**0.5
        if self.vectors is not None and self.stretch is not None:
            return self.scale * (1.0 + matmul(self.vectors**2, (1.0 + self.stretch) ** 2 - 1.0)) ** 0.5
        return self.scale if self.scale.ndim == 1 else (self.scale**2).sum(1) ** 0.5


def first_scale(
    z: Float[AnyArray, "n d"], gradient: Float[AnyArray, "n d"], kind: str, units: Units | None = None
) -> Preconditioner:
    """Estimate diagonal scales at the starts: for a Gaussian, spread over gradient is the variance.

    Non-finite values are ignored. A single particle has no spread, so its scale is one over its gradient.
    """
    center = jnp.nanmedian(z, 0)
    spread = jnp.nanmedian(jnp.abs(z - center), 0)
    slope = jnp.nanmedian(jnp.where(jnp.isfinite(gradient), jnp.abs(gradient), jnp.nan), 0)
    scale = jnp.where(spread > 0, jnp.sqrt(spread / slope), 1.0 / slope)
    scale = jnp.where(jnp.isfinite(scale), scale, 1.0)
    scale = jnp.clip(scale, *PRECONDITIONER.first_scales).astype(z.dtype)
    if kind == "low_rank":
        nothing = jnp.zeros((len(scale), min(PRECONDITIONER.rank, len(scale))), z.dtype)
        return Preconditioner(scale, center, nothing, nothing[0])
    if kind == "arrow" and units is not None:
        return Preconditioner(scale, center, root=ArrowRoot.identity(units, z.dtype))
    return Preconditioner(jnp.diag(scale) if kind == "dense" else scale, center)


def usable(scale: np.ndarray) -> np.ndarray:
    """Return scales, and 1 for those that are not finite and positive."""
    return np.where(np.isfinite(scale) & (scale > 0), scale, 1.0)


def inverse_root(covariance: np.ndarray) -> np.ndarray:
    """Return S with ``S Sᵀ`` the inverse of a covariance, lower triangular or ``(d,)``; identity where not finite."""
    if covariance.ndim == 1:
        scale = covariance**-0.5
        # An infinite variance, from a gradient whose square overflows, gives 0.
        return usable(scale)
    identity = np.eye(len(covariance), dtype=covariance.dtype)
    # The reversed Cholesky factor of the reversed matrix is upper triangular, and S is the inverse of its transpose.
    root = cholesky(covariance[::-1, ::-1])[::-1, ::-1]
    scale = solve_triangular(root.T, identity)
    return scale if np.isfinite(scale).all() else identity


def shrink(covariance: np.ndarray, number: float) -> np.ndarray:
    """Shrink the correlations of a covariance ``(d, d)`` from ``number`` particles of successive clouds."""
    # Few draws cannot distinguish correlation from chance.
    draws = number / PRECONDITIONER.alike
    share = draws / (draws + PRECONDITIONER.few)
    return np.where(np.eye(len(covariance), dtype=bool), covariance, share * covariance)


class Moments(NamedTuple):
    """Means and central second moments of positions and gradients, over particles and iterations.

    - **number** - how many pairs of particle and iteration.
    - **position**, **gradient** - means, ``(d,)``.
    - **position_scatter**, **gradient_scatter** - sums of products of deviations from the means, ``(d, d)``, or of
      their squares, ``(d,)``.
    """

    number: Float[AnyArray, ""]
    position: Float[AnyArray, " d"]
    gradient: Float[AnyArray, " d"]
    position_scatter: Float[AnyArray, " d"] | Float[AnyArray, "d d"]
    gradient_scatter: Float[AnyArray, " d"] | Float[AnyArray, "d d"]

    @staticmethod
    def empty(size: int, dtype, dense: bool) -> Moments:
        mean, scatter = jnp.zeros(size, dtype), jnp.zeros((size, size) if dense else size, dtype)
        return Moments(jnp.zeros((), dtype), mean, mean, scatter, scatter)

    def add(self, u: Float[AnyArray, "n d"], gradient: Float[AnyArray, "n d"]) -> Moments:
        """Return the moments with the particles ``(L, d)`` of one more iteration."""
        added = float(len(u))
        count = self.number + added

        def merge(mean, scatter, x):
            # Merge two batches of central moments, because raw sums of squares would cancel.
            center = x.mean(0)
            offset, x = center - mean, x - center
            weight = self.number * added / count
            if scatter.ndim == 1:
                return mean + offset * added / count, scatter + (x**2).sum(0) + weight * offset**2
            return mean + offset * added / count, scatter + matmul(x.T, x) + weight * offset[:, None] * offset

        position, position_scatter = merge(self.position, self.position_scatter, u)
        slope, gradient_scatter = merge(self.gradient, self.gradient_scatter, gradient)
        return Moments(count, position, slope, position_scatter, gradient_scatter)

    def to_preconditioner(self, dense: bool) -> Preconditioner:
        """Return the change of variables after which positions and gradients have the same covariance.

        For a Gaussian with exact gradients this whitens: the covariance of the gradients is the inverse of that of the
        positions, and a cloud that is too wide or too narrow does not bias the geometric mean.

        :param dense: whether to use correlations, if they were recorded.
        """
        count = max(float(self.number), 1.0)
        position, gradient = self.position_scatter / count, self.gradient_scatter / count
        variances = (position, gradient) if position.ndim == 1 else (position.diagonal(), gradient.diagonal())
        unit = usable((variances[0] / variances[1]) ** 0.25)
        if position.ndim == 1:
            return Preconditioner(unit, self.position)
        if not dense:
            return Preconditioner(np.diag(unit), self.position)
        position = shrink(position / np.outer(unit, unit), count)
        gradient = shrink(gradient * np.outer(unit, unit), count)
        # Σ with Σ C_g Σ = C_u, from C_g = R Rᵀ.
        root = cholesky(gradient)
        values, vectors = eigh(matmul(matmul(root.T, position), root))
        half = matmul(vectors * np.sqrt(np.maximum(values, 0.0)), vectors.T)
        left = solve_triangular(root, half, transposed=True)
        covariance = solve_triangular(root, left.T, transposed=True)
        scale = unit[:, None] * cholesky((covariance + covariance.T) / 2)
        return Preconditioner(scale if np.isfinite(scale).all() else np.diag(unit), self.position)

    def compose(self, change: Preconditioner) -> Moments:
        """Return the moments of the same clouds after a change of variables, which must have a scale."""
        scale: Any = change.scale
        if scale.ndim == 1:
            position, gradient = self.position_scatter / scale**2, self.gradient_scatter * scale**2
        else:
            half = solve_triangular(scale, self.position_scatter)
            position, gradient = solve_triangular(scale, half.T), matmul(matmul(scale.T, self.gradient_scatter), scale)
        return Moments(
            self.number, change.whiten(self.position), change.whiten_gradient(self.gradient), position, gradient
        )

    def variances(self) -> Float[AnyArray, " d"]:
        """Return the variance of each coordinate, ``(d,)``."""
        scatter = self.position_scatter
        return (scatter if scatter.ndim == 1 else scatter.diagonal()) / xp.maximum(self.number, 1.0)

    def largest_variance(self) -> float:
        """Return the largest variance of the positions in any direction."""
        covariance = self.position_scatter / np.maximum(self.number, 1.0)
        return covariance.max() if covariance.ndim == 1 else eigh(covariance)[0][-1]
