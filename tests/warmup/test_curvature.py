"""Curvature and gradient noise, against known matrices."""

from dataclasses import replace
import math
import tracemalloc

import jax
from jax import random
import jax.numpy as jnp
from jax.scipy.special import gammaln
from models import PRECISION, generator, linear, numbers
import numpy as np
import pytest
from results import run

import numpyro
import numpyro.distributions as dist

from numpyro_repulsion import SGLD, diagnose
from numpyro_repulsion.kernels.warmup_host import iterations_of
from numpyro_repulsion.warmup import Measurements, curvature
from numpyro_repulsion.warmup.curvature import UNKNOWN, estimate_curvature, rounding_shift

LARGEST = float(np.linalg.eigvalsh(PRECISION)[-1])


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_curvature_is_the_largest_eigenvalue(scale):
    u, gradients = numbers(0, (2, 5, 3)) / np.float32(scale**0.5), linear(scale * PRECISION)
    found, (noise, *_) = estimate_curvature(generator(), u, 0.2 / scale**0.5, gradients, [0])
    # Eight iterations from a random direction, the best of ten: (4.2 / 9.7)^8 is well below 1 %.
    assert found.shape == (10,)
    np.testing.assert_allclose(found.max(), scale * LARGEST, rtol=0.02)
    # Of rounding, at most.
    assert (noise < 1e-6 * scale).all()


def test_curvature_is_absolute_and_leaves_out_what_is_not_finite():
    u = numbers(0, (1, 6, 3))
    exact = pytest.approx(LARGEST, rel=0.02)
    assert estimate_curvature(generator(), u, 0.2, linear(-PRECISION), [0])[0].max() == exact

    def broken(cases):
        for gradient in linear(PRECISION)(cases):
            gradient[:, 2] = np.nan
            yield gradient

    found, (noise, *_) = estimate_curvature(generator(), u, 0.2, broken, [0])
    assert (found < 0).tolist() == [False, False, True, False, False, False]
    assert found.max() == exact and np.isfinite(noise).all()

    # Nor is there noise if a gradient is finite on some minibatches only.
    minibatches = iter(range(100))

    def sometimes(cases):
        is_broken = next(minibatches) % 3 == 0
        for gradient in linear(PRECISION)(cases):
            gradient[:, 2] = np.nan if is_broken else gradient[:, 2]
            yield gradient + 100.0

    assert estimate_curvature(generator(), u, 0.2, sometimes, [0])[1][0, 0] < 1e-3


@pytest.mark.parametrize("orders", [[0, 1], [1, 0]])
def test_noise_is_the_largest_variance_of_the_gradient(orders):
    # As a minibatch would, the noise depends on the number alone; control variates, say, halve it.
    root = np.array([[3.0, 0.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 0.1]])

    def noisy(cases):
        for number, u, order in cases:
            yield u @ np.asarray(PRECISION) + (0.5 if order else 1.0) * numbers(number, u.shape) @ root.T

    _, (found, mean, *_) = estimate_curvature(generator(), numbers(0, (2, 20, 3)), 0.2, noisy, orders)
    assert found[2] == mean[2] == UNKNOWN
    found, mean = found[:2], mean[:2]
    exact = np.linalg.eigvalsh(root @ root.T)[-1] * np.array([1.0, 0.25])
    # Seven degrees of freedom for each of 40 particles; finding the direction from half of them loses a little.
    assert (np.abs(found / exact - 1) < 4.5 * (2 / 280) ** 0.5).all()
    exact_mean = np.trace(root @ root.T) / 3 * np.array([1.0, 0.25])
    assert (np.abs(mean / exact_mean - 1) < 4.5 * (2 / 240) ** 0.5).all()
    assert not (np.abs(found / exact_mean - 1) < 4.5 * (2 / 240) ** 0.5).any()


@pytest.mark.parametrize("is_large", [False, True])
def test_noise_is_not_overestimated_in_many_dimensions(is_large, monkeypatch):
    if is_large:
        monkeypatch.setattr(curvature, "CURVATURE", replace(curvature.CURVATURE, large=0))

    # The largest eigenvalue of the sample covariance of 140 rows in 200 dimensions would be near (1 + √1.4)² = 4.8.
    def noisy(cases):
        return (numbers(number, u.shape) for number, u, _ in cases)

    u = np.zeros((1, 20, 200), np.float32)
    _, (found, mean, extreme, _) = estimate_curvature(generator(), u, 0.2, noisy, [0])
    # Three degrees of freedom for each particle in each half, along a direction from others.
    degrees = 2 * 3 * (curvature.CURVATURE.kept if is_large else 20)
    assert abs(found[0] - 1) < 4.5 * (2 / degrees) ** 0.5
    assert abs(mean[0] - 1) < 4.5 * (2 / (degrees * 200)) ** 0.5
    # Of the largest of 200 normal numbers, one in ten exceeds 3.46, where its density is 0.36.
    number = 2 * 4 * (curvature.CURVATURE.kept if is_large else 20)
    assert abs(extreme[0] - 3.46) < 4.5 * (0.09 / number) ** 0.5 / 0.36


def test_extremes_of_the_noise_are_not_those_of_gradients_far_from_the_posterior():
    """A row that one minibatch in four has is long; what pulls a particle back from afar is longer."""
    seeds = []

    def gradients(cases):
        for seed, u, _ in cases:
            seeds.extend([seed] * (seed not in seeds))
            yield 50.0 + 30.0 * (len(seeds) % 4 == 1) * (np.arange(u.shape[-1]) == 0) + 0.0 * u

    found = estimate_curvature(generator(), np.zeros((1, 20, 5), np.float32), 0.2, gradients, [0])[1][2:, 0]
    np.testing.assert_allclose(found, [80.0, 30.0], rtol=1e-5)


def test_noise_of_one_particle_is_not_that_of_the_cloud():
    # Each particle is where one coordinate of its own is noisy. Pooled over the 20, it has a variance of 5 there.
    own = np.ones((20, 200), np.float32)
    own[np.arange(20), np.arange(20)] = 10.0

    def noise(particles, **kwargs):
        u = np.zeros((1, particles, 200), np.float32)

        def gradients(cases):
            return (own[:particles] * numbers(number, u.shape) for number, *_ in cases)

        return estimate_curvature(generator(), u, 0.2, gradients, [0], **kwargs)[1][0, 0]

    assert abs(noise(20) - 1) < 4.5 * (2 / 120) ** 0.5
    # Where they keep apart, it stays; that of a single one cannot be told apart.
    assert noise(20, mixes=False) > 2 and noise(1) > 10


@pytest.mark.slow
@pytest.mark.parametrize(
    "particles, width, most, state_most",
    [(20, 290, 21, 12), (8, 980, 20, 11)],
    ids=["20 particles", "8 particles, a million parameters"],
)
def test_memory_of_large_clouds(particles, width, most, state_most):
    """The state has eleven clouds, four of them Adam's; beside it, the programs need about twenty."""
    x, y = jnp.zeros((2000, 50)), jnp.zeros(2000)

    def network(x, y):
        first = numpyro.sample("first", dist.Normal(0, 1).expand([50, width]).to_event(2))
        second = numpyro.sample("second", dist.Normal(0, 1).expand([width, width]).to_event(2))
        with numpyro.plate("rows", 2000, subsample_size=100) as i:
            numpyro.sample("y", dist.Normal((jnp.tanh(jnp.tanh(x[i] @ first) @ second)).sum(-1), 1), obs=y[i])

    kernel = SGLD(network)
    state = jax.eval_shape(lambda: kernel.start(random.split(random.key(0), particles), 100, None, (x, y), {}))
    cloud = 4 * particles * (50 + width) * width
    for step in iterations_of(kernel.bind((x, y)), state):
        program = jax.jit(step, donate_argnums=0).lower(state).compile()
        assert program.memory_analysis().temp_size_in_bytes / cloud < most
    carried = sum(math.prod(x.shape) * 4 for x in jax.tree.leaves(state) if hasattr(x, "shape")) / cloud
    assert carried < state_most


@pytest.mark.parametrize("is_large", [True, False])
def test_memory_of_measurements_on_large_clouds(is_large, monkeypatch):
    """The control keeps the gradients of all particles."""
    monkeypatch.setattr(curvature, "CURVATURE", replace(curvature.CURVATURE, large=0 if is_large else 10**9))
    u = np.zeros((1, 40, 5_000), np.float32)
    tracemalloc.start()
    estimate_curvature(generator(), u, 0.2, lambda cases: (u for _, u, _ in cases), [0, 1])
    clouds = tracemalloc.get_traced_memory()[1] / u.nbytes
    tracemalloc.stop()
    assert (clouds < 20) == is_large, clouds


def test_measurements_pool_clouds():
    pool = jax.device_get(Measurements.empty(3, 10, jnp.float32))
    assert pool.high_curvature == 0.0 and pool.largest_curvature == 0.0
    pool = pool.add(
        np.arange(10.0), np.array([[4.0, 1.0, -1.0], [2.0, 0.5, -1.0], [9.0, 5.0, -1.0], [1.0, 2.0, -1.0]]), 3.0
    )
    second = np.where(np.arange(10) == 0, np.nan, np.arange(10.0, 20.0))
    pool = pool.add(second, np.array([[2.0, 3.0, 0.5], [1.0, 0.5, 0.2], [7.0, 7.0, 3.0], [3.0, 4.0, 5.0]]), 4.0)
    values = [*range(10), *range(11, 20)]
    assert pool.high_curvature == pytest.approx(np.quantile(values, 0.9))
    assert pool.largest_curvature == 19.0
    assert pool.mean_noise.largest.tolist() == [3.0, 2.0, 0.5]
    np.testing.assert_allclose(pool.mean_noise.mean, [1.5, 0.5, 0.2])
    assert pool.mean_noise.extreme_gradient.tolist() == [8.0, 6.0, 3.0]
    assert pool.mean_noise.extreme.tolist() == [2.0, 3.0, 5.0]
    assert pool.typical_steepness == pytest.approx(12.5**0.5)


@pytest.mark.parametrize(("error", "found"), [(0.0, 0.0), (0.3, 0.3)])
def test_rounding_is_told_from_what_is_smooth(error, found):
    u, rng = numbers(0, (1, 20, 50)), np.random.default_rng(0)

    def rounded(cases):
        # Of one coordinate, and of one particle a kink.
        for _, u, _ in cases:
            slope = u + u**3 / 10
            slope[..., 7] += error * rng.standard_normal(u.shape[:2])
            slope[0, 0] += 100.0 * (rng.random() > 0.5)
            yield slope

    assert rounding_shift(u, rounded) == pytest.approx(found, rel=0.5, abs=1e-3)


@pytest.mark.parametrize(("rows", "is_named"), [(100, False), (50_000, True)])
def test_posteriors_that_single_precision_does_not_know_are_named(rows, is_named):
    def potential(z):
        # As of degrees of freedom ν: what is added is 0 to within 1 / ν³, but for rounding.
        nu = jnp.exp(5.0 + 0.2 * z)
        nothing = gammaln((nu + 1) / 2) - gammaln(nu / 2) - jnp.log(nu / 2) / 2 + 1 / (4 * nu)
        return jnp.sum(z**2) / 2 + rows * jnp.sum(nothing)

    mcmc = run(SGLD(potential_fn=potential), num_warmup=100, num_samples=10, init_params=numbers(0, (6, 2)))
    assert ("rounding" in diagnose(mcmc)) == is_named
