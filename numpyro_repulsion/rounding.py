"""Matrix products in the full precision of their numbers, which GPUs and TPUs do not use unless told."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import jax
import jax.numpy as jnp

__all__ = ["einsum", "matmul", "unrounded"]

#: JAX's name. By default accelerators round the factors of products to about ten bits: distances of particles would
#: have errors of 0.001 of the largest norm, and `whiten` would not invert `to_positions`.
FULL = "highest"

matmul = partial(jnp.matmul, precision=FULL)
einsum = partial(jnp.einsum, precision=FULL)


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
