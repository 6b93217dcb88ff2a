"""Curvature and gradient noise over the cloud, and the scales that follow from them."""

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_repulsion.noise import signs
from numpyro_repulsion.warmup import Preconditioner
from numpyro_repulsion.warmup.hessian import (
    NUM_PROBES,
    extremes,
    hessian_and_noise,
    mean_diagonal,
    mean_product,
    num_minibatches,
    num_noise_pairs,
    shrink_noisy_directions,
    whitening,
)
from numpyro_repulsion.warmup.scales import wide_direction

DIMENSION = 6


def mean_hessian(key, u, gradient, width, number):
    """The Hessian without the noise."""
    hessian, noise = hessian_and_noise(key, u, lambda key, u, is_noise: gradient(key, u), width, number, 0)
    assert (noise == 0).all()
    return hessian


def noise_covariance(key, u, gradient, number):
    """The noise from so many pairs of minibatches."""
    return hessian_and_noise(key, u, lambda key, u, is_noise: gradient(key, u), 0.2, 1, number)[1]


def matrix(seed, dimension=DIMENSION, condition=100.0):
    """A positive matrix of this condition."""
    rng = np.random.default_rng(seed)
    vectors = np.linalg.qr(rng.standard_normal((dimension, dimension)))[0]
    return (vectors * np.geomspace(1.0, condition, dimension)) @ vectors.T


HESSIAN = matrix(0)


STIFF = matrix(0, condition=3e3)


def noisy_gradient(key, u):
    """The gradient of a linear regression on 400 rows that all particles share, of mean Hessian ``STIFF``."""
    rows = random.normal(key, (400, DIMENSION)) @ jnp.asarray(np.linalg.cholesky(STIFF).T, jnp.float32)
    return (u @ rows.T) @ rows / len(rows)


def exact_gradient(key, u):
    return u @ jnp.asarray(HESSIAN, u.dtype)


def test_the_diagonal_alone_is_that_of_products_with_signs():
    u, key = random.normal(random.key(0), (2, 20, DIMENSION)), random.key(1)

    def gradient(key, u, is_noise):
        return exact_gradient(key, u)

    found, noise = hessian_and_noise(key, u, gradient, 0.2, 3, 0, only_diagonal=True)
    expected = mean_diagonal(key, u, exact_gradient, 0.2, NUM_PROBES)
    np.testing.assert_allclose(found, np.diag(expected), rtol=1e-3)
    assert (noise == 0).all()


def cloud(seed=1, size=5):
    return random.normal(random.key(seed), (1, size, DIMENSION))


def test_the_mean_hessian_of_a_quadratic_is_its_matrix():
    found = mean_hessian(random.key(0), cloud(), exact_gradient, 0.2, 2)
    np.testing.assert_allclose(found, HESSIAN, atol=1e-3 * HESSIAN.max())
    one = mean_product(random.key(0), cloud(), jnp.eye(DIMENSION)[2], exact_gradient, 0.2, 1)
    np.testing.assert_allclose(one, HESSIAN[2], atol=1e-3 * HESSIAN.max())


def test_it_is_the_mean_over_particles():
    u = cloud(size=7)
    found = mean_hessian(random.key(0), u, lambda key, u: u**3, 0.01, 1)
    np.testing.assert_allclose(np.diag(found), 3 * np.mean(u[0] ** 2, 0), rtol=1e-2)
    # A particle whose gradient is not finite is left out.
    broken = u.at[0, 3].set(jnp.nan)
    found = mean_hessian(random.key(0), broken, lambda key, u: u**3, 0.01, 1)
    np.testing.assert_allclose(np.diag(found), 3 * np.mean(np.delete(u[0], 3, 0) ** 2, 0), rtol=1e-2)


def relative_eigenvalues(found):
    root = np.linalg.inv(np.linalg.cholesky(STIFF))
    return np.linalg.eigvalsh(root @ np.asarray(found, float) @ root.T)


def test_columns_share_their_minibatches():
    # The errors of all eigenvalues are then relative to them, of the order sqrt(d / rows).
    found = relative_eigenvalues(mean_hessian(random.key(3), cloud(), noisy_gradient, 0.2, 4))
    spread = 2 * (DIMENSION / 1600) ** 0.5
    assert (np.abs(found - 1) < 2.5 * spread).all()

    # With other minibatches for each column, errors of the large ones fall on the small ones.
    def own(key, u):
        column = jnp.argmax(jnp.abs(u - cloud()).sum((0, 1)))
        return noisy_gradient(random.fold_in(key, column), u)

    others = [relative_eigenvalues(mean_hessian(random.key(i), cloud(), own, 0.2, 4)) for i in range(8)]
    assert np.abs(np.array(others) - 1).max() > 5 * spread


@pytest.mark.parametrize("seed", [0, 1])
def test_random_signs_give_the_diagonal(seed):
    number, size = 50, 20
    found = mean_diagonal(random.key(seed), cloud(size=size), exact_gradient, 0.2, number)
    off = HESSIAN - np.diag(np.diag(HESSIAN))
    # Each product adds the other entries of a row with random signs.
    error = np.sqrt((off**2).sum(1) / (number * size))
    assert (np.abs(found - np.diag(HESSIAN)) < 4.5 * error).all()


def test_whitening_inverts_a_curvature():
    scale = np.asarray(whitening(jnp.asarray(HESSIAN, jnp.float32)), float)
    assert (np.triu(scale, 1) == 0).all()
    np.testing.assert_allclose(scale.T @ HESSIAN @ scale, np.eye(DIMENSION), atol=1e-3)
    # A saddle is scaled by the size of its curvature; one that is lost in the noise is bounded.
    saddle = whitening(jnp.diag(jnp.array([4.0, -9.0, 1.0])))
    np.testing.assert_allclose(np.diag(saddle), [1 / 2, 1 / 3, 1], rtol=1e-5)
    singular = whitening(jnp.ones((2, 2)))
    assert np.isfinite(singular).all() and np.abs(singular).max() < 100
    np.testing.assert_allclose(whitening(jnp.array([4.0, 1e-9, jnp.nan])), [0.5, 10**0.5, 1.0], rtol=1e-5)
    assert np.isfinite(whitening(jnp.full((2, 2), jnp.nan))).all()


def test_the_noise_is_measured():
    covariance = matrix(5, condition=30.0)
    root = jnp.asarray(np.linalg.cholesky(covariance), jnp.float32)

    def gradient(key, u):
        return u**2 + random.normal(key, u.shape) @ root.T

    number, size = 100, 20
    found = np.asarray(noise_covariance(random.key(0), cloud(size=size), gradient, number), float)
    whitened = np.linalg.solve(np.linalg.cholesky(covariance), found)
    whitened = np.linalg.solve(np.linalg.cholesky(covariance), whitened.T)
    error = (2 / (number * size)) ** 0.5
    assert np.abs(whitened - np.eye(DIMENSION)).max() < 4.5 * error
    np.testing.assert_allclose(noise_covariance(random.key(0), cloud(), exact_gradient, 4), 0.0, atol=1e-12)


def test_only_noisy_directions_are_shrunk():
    covariance = jnp.diag(jnp.array([0.1, 0.5, 2.0, 8.0]))
    many = 10**7
    scale, factor = shrink_noisy_directions(covariance, many, jnp.asarray(0.5))
    np.testing.assert_allclose(np.diag(scale.T @ covariance @ scale), [0.1, 0.5, 0.5, 0.5], rtol=1e-5)
    np.testing.assert_allclose(factor, 16.0, rtol=1e-5)
    # Noise that is the same everywhere limits all directions alike.
    scale, factor = shrink_noisy_directions(100.0 * jnp.eye(3), many, jnp.asarray(0.5))
    np.testing.assert_allclose(scale, np.eye(3), rtol=1e-5)
    np.testing.assert_allclose(factor, 1.0, rtol=1e-5)


def test_equal_noise_known_from_few_draws_is_not_shrunk():
    dimension, number = 50, 160
    draws = 10.0 * random.normal(random.key(0), (number, dimension))
    covariance = draws.T @ draws / number
    assert shrink_noisy_directions(covariance, 10**7, jnp.asarray(0.5))[1] > 5.0  # taken at its word
    assert shrink_noisy_directions(covariance, number, jnp.asarray(0.5))[1] < 1.3
    # What stands out from it still is.
    draws = draws.at[:, 0].multiply(10.0)
    scale, factor = shrink_noisy_directions(draws.T @ draws / number, number, jnp.asarray(0.5))
    assert scale[0, 0] < 0.2 * jnp.diag(scale)[1:].min() and factor > 30.0


def outliers(dimension=200):
    """A matrix with most eigenvalues near one, and six that are not, with these six."""
    rng = np.random.default_rng(2)
    values = np.concatenate((np.geomspace(0.02, 0.2, 3), np.linspace(0.9, 1.1, dimension - 6), np.geomspace(8, 90, 3)))
    vectors = np.linalg.qr(rng.standard_normal((dimension, dimension)))[0]
    return (vectors * values) @ vectors.T, values[[0, 1, 2, -3, -2, -1]]


def test_lanczos_finds_the_extreme_eigenvalues():
    hessian, expected = outliers()
    product = jax.jit(lambda v: jnp.asarray(hessian, jnp.float32) @ v)
    vectors, values = extremes(random.normal(random.key(0), (200,)), product, 20)
    far = np.abs(np.log(values)) > 1
    np.testing.assert_allclose(np.sort(values[far]), expected, rtol=2e-2)
    found = np.asarray(vectors[:, far], float)
    np.testing.assert_allclose(found.T @ found, np.eye(6), atol=1e-4)
    np.testing.assert_allclose(hessian @ found, found * np.asarray(values[far]), atol=0.1)
    change = Preconditioner(jnp.ones(200), jnp.zeros(200), vectors, values**-0.5 - 1.0)
    whitened = jax.vmap(lambda u: change.whiten_gradient(jnp.asarray(hessian, jnp.float32) @ change.to_positions(u)))
    spectrum = np.linalg.eigvalsh(np.asarray(whitened(jnp.eye(200)), float))
    assert spectrum[0] > 0.7 and spectrum[-1] < 1.4
    # Diagonal scales alone leave the condition as it is.
    diagonal = np.diag(hessian) ** -0.5
    plain = np.linalg.eigvalsh(hessian * np.outer(diagonal, diagonal))
    assert plain[-1] / plain[0] > 1000


def test_what_has_not_converged_is_left_out():
    # A flat spectrum has no extremes that 20 products could find.
    rng = np.random.default_rng(3)
    vectors = np.linalg.qr(rng.standard_normal((300, 300)))[0]
    hessian = (vectors * np.geomspace(0.03, 30, 300)) @ vectors.T
    found, values = extremes(random.normal(random.key(0), (300,)), lambda v: jnp.asarray(hessian, jnp.float32) @ v, 10)
    residual = np.linalg.norm(hessian @ np.asarray(found, float) - np.asarray(found * values, float), axis=0)
    assert (residual <= 0.35 * np.sqrt(values)).all()
    assert ((np.asarray(values) == 1) == (np.linalg.norm(found, axis=0) == 0)).all()


def test_how_much_is_measured():
    assert num_minibatches(167, 10_000) == 4 and num_minibatches(5, 1) == 200 and num_minibatches(900, 10) == 1
    assert num_minibatches(4000, 10_000, rank=40) == 8 and num_minibatches(100, 0) == 1
    assert num_noise_pairs(100, 20) == 15 and num_noise_pairs(1, 20) == 1
    assert num_noise_pairs(10_000, 2) == 100


def test_a_flat_direction_among_thousands_is_found():
    """Curvatures of 0.3 to 3, and one of 1/300, along which the cloud is as wide as the posterior."""
    size = 3000
    flat = signs(random.key(3), (size,)) / size**0.5
    bulk = jnp.geomspace(0.3, 3.0, size)

    def product(v):
        beside = v - flat * (flat @ v)
        image = bulk * beside
        return image - flat * (flat @ image) + flat * (flat @ v) / 300.0

    def flattest(start):
        vectors, values = extremes(start, product, 5)
        found = jnp.argmin(values)
        return float(values[found]), float(abs(vectors[:, found] @ flat))

    y = random.normal(random.key(0), (1, 20, size)) / bulk**0.5
    y = y + 300.0**0.5 * random.normal(random.key(1), (1, 20, 1)) * flat
    value, alignment = flattest(wide_direction(random.key(2), y))
    assert abs(300.0 * value - 1.0) < 0.5 and alignment > 0.99
    # From a random direction, the same number of steps does not find it.
    assert flattest(signs(random.key(2), (size,)))[0] > 2.0 / 300.0
