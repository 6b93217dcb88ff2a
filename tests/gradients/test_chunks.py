"""Gradients of some particles at a time."""

from functools import partial

import jax
from jax import random
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
import numpy as np
import pytest

import numpyro
import numpyro.distributions as dist

from numpyro_repulsion import ControlVariates, FullData, Subsampled
from numpyro_repulsion.gradients import FunctionTarget, ModelTarget, Reference, evaluate_reference

X, Y = random.normal(random.key(0), (60, 3)), random.normal(random.key(1), (60,))


def model():
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("rows", 60, subsample_size=20) as i:
        numpyro.sample("y", dist.Normal(jnp.tanh(X[i] @ w), 1), obs=Y[i])


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("gradient", [FullData, Subsampled, partial(Subsampled, shared=True), ControlVariates])
def test_gradients_do_not_depend_on_the_size_of_chunks(gradient, groups):
    target, (zero, unravel) = ModelTarget(model), ravel_pytree({"w": jnp.zeros(3)})
    z, key = random.normal(random.key(2), (groups, 6, 3)), random.key(3)
    reference = evaluate_reference(key, target, unravel, Reference.none(zero.shape, zero.dtype, 1), 20)
    whole, parts = (gradient(chunk_size=size).energy_and_grad(key, target, unravel, z, reference) for size in (None, 4))
    # But for rounding, which depends on the shapes of matrix products.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), whole, parts)


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


@pytest.mark.parametrize("size", [0, 2.5, "4"])
def test_a_size_of_chunks_is_checked(size):
    for gradient in (FullData, Subsampled):
        with pytest.raises((ValueError, TypeError), match="`chunk_size`.*None or a number of particles"):
            gradient(chunk_size=size)
