"""Linear algebra on arrays of the host and of JAX, in the full precision of their numbers.

GPUs and TPUs multiply matrices in less unless told. Functions that warmup uses on the host and in programs take the
library of their arrays, because one operation of JAX outside of a program costs a compilation.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import jax.numpy as jnp
import jax.scipy.linalg
import numpy as np
import scipy.linalg

if TYPE_CHECKING:  # Checkers know nothing that both have.
    AnyArray: TypeAlias = Any
else:
    #: An array of JAX, or of the host.
    AnyArray = jax.Array | np.ndarray | np.generic
#: JAX's name. By default accelerators round the factors of products to about ten bits: distances of particles would
#: have errors of 0.001 of the largest norm, and `whiten` would not invert `to_positions`.
FULL = "highest"

einsum = partial(jnp.einsum, precision=FULL)


def namespace(*arrays: Any) -> ModuleType:
    """Return ``jax.numpy`` if one of the arrays is JAX's, otherwise ``numpy``."""
    return jnp if any(isinstance(x, jax.Array) for x in arrays) else np


class _Either:
    """Functions of ``jax.numpy`` for arrays of JAX, otherwise of ``numpy``."""

    def __getattr__(self, name):
        return lambda *arrays, **settings: getattr(namespace(*arrays), name)(*arrays, **settings)


xp = _Either()


def matmul(a: Any, b: Any) -> Any:
    """Return the product of two arrays."""
    return jnp.matmul(a, b, precision=FULL) if namespace(a, b) is jnp else np.matmul(a, b)


def cholesky(matrix: np.ndarray) -> np.ndarray:
    """Return the lower Cholesky factor of a matrix of the host; NaN where it has none."""
    try:
        return np.linalg.cholesky(matrix)
    except np.linalg.LinAlgError:
        return np.full_like(matrix, np.nan)


def eigh(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the eigenvalues and eigenvectors of a symmetric matrix of the host; NaN where it is not finite."""
    try:
        return np.linalg.eigh(matrix)
    except np.linalg.LinAlgError:
        return np.full_like(matrix[0], np.nan), np.full_like(matrix, np.nan)


def solve_triangular(scale: Any, x: Any, transposed: bool = False) -> Any:
    """Return ``S⁻¹ x``, or ``S⁻ᵀ x``, for a lower triangular S."""
    if namespace(scale, x) is jnp:
        return jax.scipy.linalg.solve_triangular(scale, x, lower=True, trans=int(transposed))
    return scipy.linalg.solve_triangular(scale, x, lower=True, trans=int(transposed), check_finite=False)


def solve_rows(scale: Any, x: Any, transposed: bool = False) -> Any:
    """Return ``S⁻¹ x``, or ``S⁻ᵀ x``, for each row x of ``(..., d)`` and a lower triangular S."""
    return solve_triangular(scale, x.reshape(-1, x.shape[-1]).T, transposed).T.reshape(x.shape)


@contextmanager
def unrounded() -> Iterator[None]:
    """Evaluate a model in full precision, unless the user has set another in JAX; a context, and a decorator.

    A sum over N rows with such errors moves the posterior by some multiple of ``0.001 N ** 0.5`` standard deviations.
    Where a model is differentiated, the derivatives must be in the context too: rules of the user's own
    (``jax.custom_vjp``) are traced there.
    """
    chosen = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    with jax.default_matmul_precision(chosen or FULL):
        yield
