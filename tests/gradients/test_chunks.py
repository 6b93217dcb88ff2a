"""Gradients of some particles at a time."""

import jax
from jax import random
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
from models import vectorized
import numpy as np
import pytest

import numpyro
import numpyro.distributions as dist

from numpyro_repulsion import SGLD, ControlVariates, FullData, Subsampled
from numpyro_repulsion.gradients import FunctionTarget

X, Y = random.normal(random.key(0), (60, 3)), random.normal(random.key(1), (60,))


def model(batch):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("rows", 60, subsample_size=batch) as i:
        numpyro.sample("y", dist.Normal(jnp.tanh(X[i] @ w), 1), obs=Y[i])


@pytest.mark.parametrize(
    ("gradient", "groups"),
    [
        (FullData, 1),
        (Subsampled, 1),
        (Subsampled, 2),
        (lambda **k: Subsampled(shared=True, **k), 2),
        (ControlVariates, 1),
    ],
)
def test_draws_do_not_depend_on_the_size_of_chunks(gradient, groups):
    found = []
    for size in (None, 4):
        kernel = SGLD(model, gradient=gradient(chunk_size=size), num_ensembles=groups)
        mcmc = vectorized(kernel, 50, 5, 6 * groups)
        mcmc.run(random.key(2), 20)
        found.append(np.asarray(mcmc.get_samples()["w"]))
    # But for rounding, which depends on the shapes of matrix products.
    np.testing.assert_allclose(*found, rtol=1e-3, atol=1e-4)


def test_memory_is_that_of_a_chunk():
    width = 4096

    def wide(z):
        return jnp.sum(jnp.sin(z[0] * jnp.arange(width)) ** 2)

    def largest(size):
        _, unravel = ravel_pytree(jnp.zeros(1))
        target, gradient = FunctionTarget(wide), FullData(chunk_size=size)
        program = jax.jit(lambda z: gradient.energy_and_grad(random.key(0), target, unravel, z))
        return program.lower(jnp.zeros((1, 64, 1))).compile().memory_analysis().temp_size_in_bytes

    assert largest(4) < 0.2 * largest(None)


@pytest.mark.parametrize("gradient", [FullData, Subsampled])
@pytest.mark.parametrize("size", [0, -1, 2.5, "4"])
def test_a_size_of_chunks_is_checked(gradient, size):
    with pytest.raises((ValueError, TypeError), match="`chunk_size`.*None or a number of particles"):
        gradient(chunk_size=size)
