"""Random numbers are those that JAX draws, and integers are uniform."""

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_repulsion.noise import integers_below, normal, uniform

SHAPES = [(), (7,), (1, 20, 9), (3, 0, 2)]


@pytest.mark.parametrize("shape", SHAPES)
def test_numbers_are_those_of_jax(shape):
    for key in random.split(random.key(0), 3):
        np.testing.assert_array_equal(normal(key, shape), random.normal(key, shape))
        np.testing.assert_array_equal(uniform(key, shape, jnp.float32), random.uniform(key, shape, jnp.float32))


@pytest.mark.parametrize("size", [1, 2, 3, 1000, 65_536, 65_537, 10**6 + 3, 2**31 - 1])
def test_integers_are_the_upper_word_of_a_product(size):
    key = random.key(1)
    found = integers_below(key, (4, 500), size)
    low, high = np.asarray(random.bits(key, (4000,), jnp.uint32)).reshape(2, 4, 500).astype(object)
    assert found.dtype == jnp.uint32
    np.testing.assert_array_equal(np.asarray(found).astype(object), ((high << 32) + low) * size >> 64)


def test_integers_are_uniform():
    found = np.asarray(jax.jit(lambda key: integers_below(key, (70_000,), 7))(random.key(2)))
    counts = np.bincount(found, minlength=7)
    assert ((counts - 10_000) ** 2 / 10_000).sum() < 22.5  # the 0.999 quantile of χ² with 6 degrees of freedom
