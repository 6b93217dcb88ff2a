"""Curvature and gradient noise over the cloud, and the scales that follow from them."""

from models import generator, numbers
import numpy as np
import pytest

from numpyro_repulsion.gradients import Units
from numpyro_repulsion.warmup import Preconditioner
from numpyro_repulsion.warmup.curvature import (
    CURVATURE,
    collective_shift,
    hessian_and_noise,
    mean_diagonal,
    mean_product,
    signs,
)
from numpyro_repulsion.warmup.scales import extremes, pooled_factors, shrink_noisy_directions, whitening, wide_direction

DIMENSION = 6


def gradients_of(gradient):
    """The gradients for many cases of a function of the number of a minibatch and the particles."""
    return lambda cases: (gradient(number, u) for number, u, _ in cases)


def mean_hessian(rng, u, gradient, number):
    """The Hessian without the noise."""
    hessian, noise = hessian_and_noise(rng, u, gradients_of(gradient), number, 0, False)
    assert (noise == 0).all()
    return hessian


def noise_covariance(rng, u, gradient, number):
    """The noise from so many pairs of minibatches."""
    return hessian_and_noise(rng, u, gradients_of(gradient), 1, number, False)[1]


def matrix(seed, dimension=DIMENSION, condition=100.0):
    """A positive matrix of this condition."""
    rng = np.random.default_rng(seed)
    vectors = np.linalg.qr(rng.standard_normal((dimension, dimension)))[0]
    return (vectors * np.geomspace(1.0, condition, dimension)) @ vectors.T


HESSIAN = matrix(0)
STIFF = matrix(0, condition=3e3)


def noisy_gradient(number, u):
    """The gradient of a linear regression on 400 rows that all particles share, of mean Hessian ``STIFF``."""
    rows = np.random.default_rng(number).standard_normal((400, DIMENSION)) @ np.linalg.cholesky(STIFF).T
    rows = rows.astype(np.float32)
    return (u @ rows.T) @ rows / len(rows)


def exact_gradient(number, u):
    return u @ HESSIAN.astype(u.dtype)


def cloud(seed=1, size=5):
    return numbers(seed, (1, size, DIMENSION))


def test_the_mean_hessian_of_a_quadratic_is_its_matrix():
    found = mean_hessian(generator(0), cloud(), exact_gradient, 2)
    np.testing.assert_allclose(found, HESSIAN, atol=1e-3 * HESSIAN.max())
    one = mean_product(cloud(), np.eye(DIMENSION, dtype=np.float32)[2], gradients_of(exact_gradient), [0])
    np.testing.assert_allclose(one, HESSIAN[2], atol=1e-3 * HESSIAN.max())


def test_it_is_the_mean_over_particles():
    def cubic(number, u):
        return u**3

    def expected(u):
        return 3 * np.mean(u**2, 0) + CURVATURE.width**2

    u = cloud(size=7)
    found = mean_hessian(generator(0), u, cubic, 1)
    np.testing.assert_allclose(np.diag(found), expected(u[0]), rtol=1e-3)
    # A particle whose gradient is not finite is left out.
    broken = u.copy()
    broken[0, 3] = np.nan
    found = mean_hessian(generator(0), broken, cubic, 1)
    np.testing.assert_allclose(np.diag(found), expected(np.delete(u[0], 3, 0)), rtol=1e-3)


def relative_eigenvalues(found):
    root = np.linalg.inv(np.linalg.cholesky(STIFF))
    return np.linalg.eigvalsh(root @ np.asarray(found, float) @ root.T)


def test_columns_share_their_minibatches():
    # The errors of all eigenvalues are then relative to them, of the order sqrt(d / rows).
    found = relative_eigenvalues(mean_hessian(generator(3), cloud(), noisy_gradient, 4))
    spread = 2 * (DIMENSION / 1600) ** 0.5
    assert (np.abs(found - 1) < 2.5 * spread).all()

    # With other minibatches for each column, errors of the large ones fall on the small ones.
    def own(number, u):
        column = np.argmax(np.abs(u - cloud()).sum((0, 1)))
        return noisy_gradient([number, column], u)

    others = [relative_eigenvalues(mean_hessian(generator(i), cloud(), own, 4)) for i in range(8)]
    assert np.abs(np.array(others) - 1).max() > 5 * spread


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("dimension", [DIMENSION, 2 * CURVATURE.probes])
def test_the_diagonal_is_that_of_the_hessian(dimension, seed):
    size, hessian = 20, matrix(0, dimension)
    u = numbers(1, (1, size, dimension))
    found = mean_diagonal(generator(seed), u, gradients_of(lambda number, u: u @ hessian.astype(u.dtype)))
    # Products with random signs add the other entries of a row; there are none with unit vectors.
    off = (hessian - np.diag(np.diag(hessian))) * (dimension > CURVATURE.probes)
    error = np.sqrt((off**2).sum(1) / (CURVATURE.probes * size)) + 1e-3
    assert (np.abs(found - np.diag(hessian)) < 4.5 * error).all()


def test_whitening_inverts_a_curvature():
    scale = whitening(HESSIAN.astype(np.float32)).astype(float)
    assert (np.triu(scale, 1) == 0).all()
    np.testing.assert_allclose(scale.T @ HESSIAN @ scale, np.eye(DIMENSION), atol=1e-3)
    # A saddle is scaled by the size of its curvature; one that is lost in the noise is bounded.
    saddle = whitening(np.diag([4.0, -9.0, 1.0]))
    np.testing.assert_allclose(np.diag(saddle), [1 / 2, 1 / 3, 1], rtol=1e-5)
    singular = whitening(np.ones((2, 2)))
    assert np.isfinite(singular).all() and np.abs(singular).max() < 100
    np.testing.assert_allclose(whitening(np.array([4.0, 1e-9, np.nan])), [0.5, 10**0.5, 1.0], rtol=1e-5)
    assert np.isfinite(whitening(np.full((2, 2), np.nan))).all()


def test_the_noise_is_measured():
    covariance = matrix(5, condition=30.0)
    root = np.linalg.cholesky(covariance).astype(np.float32)

    def gradient(number, u):
        return u**2 + numbers(number, u.shape) @ root.T

    number, size = 100, 20
    found = noise_covariance(generator(0), cloud(size=size), gradient, number).astype(float)
    whitened = np.linalg.solve(np.linalg.cholesky(covariance), found)
    whitened = np.linalg.solve(np.linalg.cholesky(covariance), whitened.T)
    error = (2 / (number * size)) ** 0.5
    assert np.abs(whitened - np.eye(DIMENSION)).max() < 4.5 * error
    np.testing.assert_allclose(noise_covariance(generator(0), cloud(), exact_gradient, 4), 0.0, atol=1e-12)


def test_only_noisy_directions_are_shrunk():
    covariance = np.diag([0.1, 0.5, 2.0, 8.0])
    many = 10**7
    scale, factor = shrink_noisy_directions(covariance, many, 0.5)
    np.testing.assert_allclose(np.diag(scale.T @ covariance @ scale), [0.1, 0.5, 0.5, 0.5], rtol=1e-5)
    np.testing.assert_allclose(factor, 16.0, rtol=1e-5)
    # Noise that is the same everywhere limits all directions alike.
    scale, factor = shrink_noisy_directions(100.0 * np.eye(3), many, 0.5)
    np.testing.assert_allclose(scale, np.eye(3), rtol=1e-5)
    np.testing.assert_allclose(factor, 1.0, rtol=1e-5)


def test_equal_noise_known_from_few_draws_is_not_shrunk():
    dimension, number = 50, 160
    draws = 10.0 * numbers(0, (number, dimension))
    covariance = draws.T @ draws / number
    assert shrink_noisy_directions(covariance, 10**7, 0.5)[1] > 5.0  # taken at its word
    assert shrink_noisy_directions(covariance, number, 0.5)[1] < 1.3
    # What stands out from it still is.
    draws[:, 0] *= 10.0
    scale, factor = shrink_noisy_directions(draws.T @ draws / number, number, 0.5)
    assert scale[0, 0] < 0.2 * np.diag(scale)[1:].min() and factor > 30.0


def outliers(dimension=200):
    """A matrix with most eigenvalues near one, and six that are not, with these six."""
    rng = np.random.default_rng(2)
    values = np.concatenate((np.geomspace(0.02, 0.2, 3), np.linspace(0.9, 1.1, dimension - 6), np.geomspace(8, 90, 3)))
    vectors = np.linalg.qr(rng.standard_normal((dimension, dimension)))[0]
    return (vectors * values) @ vectors.T, values[[0, 1, 2, -3, -2, -1]]


def test_lanczos_finds_the_extreme_eigenvalues():
    hessian, expected = outliers()
    single = hessian.astype(np.float32)
    vectors, values = extremes(numbers(0, (200,)), lambda v: single @ v, 20)
    far = np.abs(np.log(values)) > 1
    np.testing.assert_allclose(np.sort(values[far]), expected, rtol=2e-2)
    found = vectors[:, far].astype(float)
    np.testing.assert_allclose(found.T @ found, np.eye(6), atol=1e-4)
    np.testing.assert_allclose(hessian @ found, found * values[far], atol=0.1)
    change = Preconditioner(np.ones(200), np.zeros(200), vectors, values**-0.5 - 1.0)
    spectrum = np.linalg.eigvalsh(change.whiten_gradient(change.to_positions(np.eye(200)) @ hessian))
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
    single = hessian.astype(np.float32)
    found, values = extremes(numbers(0, (300,)), lambda v: single @ v, 10)
    residual = np.linalg.norm(hessian @ found - found * values, axis=0)
    assert (residual <= 0.35 * np.sqrt(values)).all()
    assert ((values == 1) == (np.linalg.norm(found, axis=0) == 0)).all()


def test_a_flat_direction_among_thousands_is_found():
    """Curvatures of 0.3 to 3, and one of 1/300, along which the cloud is as wide as the posterior."""
    size = 3000
    flat = signs(generator(3), (size,), np.float32) / np.float32(size**0.5)
    bulk = np.geomspace(0.3, 3.0, size, dtype=np.float32)

    def product(v):
        beside = v - flat * (flat @ v)
        image = bulk * beside
        return image - flat * (flat @ image) + flat * (flat @ v) / 300.0

    def flattest(start):
        vectors, values = extremes(start, product, 5)
        found = np.argmin(values)
        return values[found], abs(vectors[:, found] @ flat)

    y = numbers(0, (1, 20, size)) / bulk**0.5 + 300.0**0.5 * numbers(1, (1, 20, 1)) * flat
    value, alignment = flattest(wide_direction(generator(2), y))
    assert abs(300.0 * value - 1.0) < 0.5 and alignment > 0.99
    # From a random direction, the same number of steps does not find it.
    assert flattest(signs(generator(2), (size,), np.float32))[0] > 2.0 / 300.0


# Many effects


@pytest.mark.parametrize("effects", [20, 4000])
def test_inflations_of_effects_add_up_to_a_shift_of_their_scale(effects):
    # log s and effects of variance v at s = 1: U = Σ x²/(2s²) + ..., in units of their standard deviations.
    variance, sd = 0.6, 1.0 / effects**0.5

    def gradient(number, u):
        t, x = sd * u[..., :1], variance**0.5 * u[..., 1:]
        noise = numbers(number, (1, 1, 1))
        by_scale = effects - (x**2).sum(-1, keepdims=True) * np.exp(-2.0 * t) + noise
        return np.concatenate([sd * by_scale, variance**0.5 * (x * np.exp(-2.0 * t) + noise)], -1)

    u, sds = np.zeros((1, 4, 1 + effects), np.float64), np.ones(1 + effects)

    def shift(noise):
        return collective_shift(np.random.default_rng(0), u, sds, noise, gradients_of(gradient))

    exact, rel = variance * effects * sd, (2.0 * CURVATURE.width * sd) ** 2
    assert shift(sds) == pytest.approx(exact * effects / (1 + effects), rel=rel + 1 / effects)
    # Noise of the same mean in a quarter of the effects moves the scale as much; noise of the scale itself does not.
    quarter = np.where(np.arange(1 + effects) % 4 == 1, 1.0, 0.0)
    assert shift(quarter) == pytest.approx(exact, rel=4 * rel + 2 / effects)
    assert shift(1.0 - np.sign(np.arange(1 + effects))) < exact / 10 and shift(np.zeros(1 + effects)) == 0.0


def test_factors_are_pooled_as_far_as_halves_disagree():
    units = Units(2003, ((3, (2000,), 0),))
    rng, own = np.random.default_rng(0), np.array([1.0, 5.0, 25.0])

    def pooled(true, error):
        halves = true * np.exp(error * rng.standard_normal((2, 2000)))
        return pooled_factors(np.concatenate([np.stack([own, own]), halves], 1), units)

    same, different = np.full(2000, 10.0), 10.0 * np.exp(rng.standard_normal(2000))
    found = pooled(same, 1.0)
    np.testing.assert_allclose(found[:3], own)
    # Of unrelated halves the correlation is within 4.5 / √2000 of 0.
    assert found[3:].std() / found[3:].mean() < 2 * 4.5 / 2000**0.5
    assert found[3:].mean() == pytest.approx(10.0 * np.exp(0.5), rel=4.5 * ((np.e - 1.0) / 4000) ** 0.5)
    np.testing.assert_allclose(pooled(different, 0.0)[3:], different)
    # All by themselves would differ from the true ones by more.
    found = np.log(pooled(different, 1.0)[3:])
    assert (found - np.log(different)).std() < 0.95 * 0.5**0.5
