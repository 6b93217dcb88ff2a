"""What warmup learns, against known answers."""

from collections.abc import Callable
from dataclasses import replace
import math
import tracemalloc
from types import SimpleNamespace
from typing import NamedTuple
import warnings

import jax
from jax import lax, random
import jax.numpy as jnp
from models import programs_of, vectorized, warmed
import numpy as np
import pytest

import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC

from numpyro_repulsion import (
    IMQ,
    RBF,
    SGLD,
    SGLDR,
    Balanced,
    BiasBudget,
    ControlVariates,
    Independent,
    Subsampled,
    ensemble_mcse,
)
from numpyro_repulsion.dynamics import Cloud, CurvatureStats, Dynamics, Overdamped, Thermostat, Underdamped
from numpyro_repulsion.dynamics.step_error import EulerError
from numpyro_repulsion.interactions import Coupling, Laplacian, RandomFeatures, RandomGroups, base
from numpyro_repulsion.kernels.warmup_host import HostSampler, iterations_of
from numpyro_repulsion.warmup import Measurements, Moments, Preconditioner, Timetable, Window, curvature
from numpyro_repulsion.warmup.adam import Surroundings
from numpyro_repulsion.warmup.arrival import arrive, left_behind, most_late_iterations, rescue, update_arrival
from numpyro_repulsion.warmup.bandwidth import measure_steepness
from numpyro_repulsion.warmup.curvature import UNKNOWN, estimate_curvature
from numpyro_repulsion.warmup.learned import WarmupDiagnosis, diagnose_warmup
from numpyro_repulsion.warmup.preconditioner import first_scale
from numpyro_repulsion.warmup.state import ArrivalState, WarmupPlan, WarmupState
from numpyro_repulsion.warmup.step_size import least_noisy_order, update_step_size
from numpyro_repulsion.warmup.symptoms import Symptoms

PRECISION = jnp.array([[9.0, 2.0, 0.0], [2.0, 4.0, 0.5], [0.0, 0.5, 0.01]])
EULER = Overdamped("euler")
LARGEST = float(np.linalg.eigvalsh(PRECISION)[-1])


def generator(seed=1):
    return np.random.default_rng(seed)


def numbers(seed, shape):
    """Standard normal numbers on the host."""
    return generator(seed).standard_normal(shape).astype(np.float32)


def linear(matrix):
    """The gradients of ``uᵀ A u / 2``, as learners ask for them."""
    return lambda cases: (u @ np.asarray(matrix) for _, u, _ in cases)


# Curvature and gradient noise


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

    _, (found, mean, _) = estimate_curvature(generator(), numbers(0, (2, 20, 3)), 0.2, noisy, orders)
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
    _, (found, mean, extreme) = estimate_curvature(generator(), u, 0.2, noisy, [0])
    # Three degrees of freedom for each particle in each half, along a direction from others.
    degrees = 2 * 3 * (curvature.CURVATURE.kept if is_large else 20)
    assert abs(found[0] - 1) < 4.5 * (2 / degrees) ** 0.5
    assert abs(mean[0] - 1) < 4.5 * (2 / (degrees * 200)) ** 0.5
    # Of the largest of 200 normal numbers, one in ten exceeds 3.46, where its density is 0.36.
    number = 2 * 4 * (curvature.CURVATURE.kept if is_large else 20)
    assert abs(extreme[0] - 3.46) < 4.5 * (0.09 / number) ** 0.5 / 0.36


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
    [(20, 290, 21, 11), (8, 980, 20, 10)],
    ids=["20 particles", "8 particles, a million parameters"],
)
def test_memory_of_large_clouds(particles, width, most, state_most):
    """Beside the state, the programs need about twenty clouds."""
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
    pool = pool.add(np.arange(10.0), np.array([[4.0, 1.0, -1.0], [2.0, 0.5, -1.0], [9.0, 5.0, -1.0]]), 3.0)
    second = np.where(np.arange(10) == 0, np.nan, np.arange(10.0, 20.0))
    pool = pool.add(second, np.array([[2.0, 3.0, 0.5], [1.0, 0.5, 0.2], [7.0, 7.0, 3.0]]), 4.0)
    values = [*range(10), *range(11, 20)]
    assert pool.high_curvature == pytest.approx(np.quantile(values, 0.9))
    assert pool.largest_curvature == 19.0
    assert pool.mean_noise.tolist() == [3.0, 2.0, 0.5]
    np.testing.assert_allclose(pool.mean_isotropic_noise, [1.5, 0.5, 0.2])
    assert pool.mean_extreme_gradient.tolist() == [8.0, 6.0, 3.0]
    assert pool.typical_steepness == pytest.approx(12.5**0.5)


# Step size


def coupling(bound, diagonal=1.0):
    return Coupling(lambda x: x, 0.0, lambda key: 0.0, jnp.asarray(bound), bound == 1.0, diagonal=diagonal)


def step_size(
    budget, dynamics=EULER, *, curvature=4.0, largest=6.0, noise=1.0, bound=1.0, diagonal=1.0, draws_per_step=1e9
):
    stats, K = CurvatureStats(*map(jnp.asarray, (curvature, largest, noise))), coupling(bound, diagonal)
    return float(
        budget.step_size(
            max_step_for_bias=dynamics.step_error(K).max_step_for_bias(budget.tolerance, stats),
            max_step_for_short_run=dynamics.step_error(K).stability_limit(stats._replace(largest=stats.curvature)) / 2,
            stability_limit=dynamics.step_error(K).stability_limit(stats),
            draws_per_step=draws_per_step,
        )
    )


def test_step_size_keeps_the_budget():
    budget, averaged = BiasBudget(0.1), Overdamped()
    assert step_size(budget) == pytest.approx(0.2 / 1.1 / 5.0)
    assert step_size(budget, bound=4.0) == pytest.approx(0.125 / 5.0)
    assert step_size(budget, averaged) == pytest.approx(0.5 / 4.0)
    assert step_size(BiasBudget(0.004), averaged, noise=0.0) == pytest.approx(5.0 * 0.004**0.5 / 4.0)
    # ε V / (2 − ε λ) = δ.
    assert step_size(budget, averaged, noise=10.0) == pytest.approx(0.2 / (10.0 + 0.1 * 4.0), rel=1e-5)
    # Averaging is of first order where particles interact.
    assert step_size(budget, Overdamped("lm"), bound=4.0) == pytest.approx(0.125 / 5.0)


def test_step_size_is_stable_at_the_stiffest_particle():
    budget = BiasBudget(0.5, min_draws=0.0)
    assert step_size(budget, largest=99.0) == pytest.approx(2 / 99)
    assert step_size(budget, largest=99.0, bound=6.0, noise=0.0) == pytest.approx(2 / 119)


def test_step_size_of_momenta_is_a_time():
    budget = BiasBudget(0.1)
    # ε²/2 is the step of averaged overdamped dynamics, where curvature sets it.
    assert step_size(budget, Underdamped(), noise=0.0) ** 2 / 2 == pytest.approx(0.5 / 4.0)
    assert step_size(budget, Underdamped(2.0), noise=100.0) == pytest.approx(2 * 2.0 * 0.1 / 100.0, rel=1e-4)
    for dynamics in (Underdamped(), Thermostat()):
        assert step_size(budget, dynamics, largest=1e4) == pytest.approx(2 / 1e2)
        assert step_size(budget, dynamics, noise=0.0, bound=3.0) < step_size(budget, dynamics, noise=0.0) / 3


@pytest.mark.parametrize(
    ("dynamics", "noise"), [(EULER, 0.0), (EULER, 3.0), (Overdamped("lm"), 3.0), (Underdamped(), 0.0)]
)
@pytest.mark.parametrize("limit", [{}, {"largest": 1e3}, {"draws_per_step": 1.0}])
def test_a_multiple_of_k_gets_a_step_as_much_shorter(dynamics, noise, limit):
    # 3 K is K with steps, of time squared where momenta move particles, of three times the length.
    budget = BiasBudget(0.05)
    plain, tripled = (
        step_size(budget, dynamics, noise=noise, bound=2.5 * weight, diagonal=weight, **limit) for weight in (1.0, 3.0)
    )
    assert tripled == pytest.approx(plain / 3.0)
    stats = CurvatureStats(4.0, 4.0, noise)
    biases = [
        float(dynamics.step_error(coupling(2.5 * weight, weight)).bias(step, stats))
        for step, weight in ((plain, 1.0), (tripled, 3.0))
    ]
    assert biases[1] == pytest.approx(biases[0])


def test_steepness_is_that_of_the_repulsion():
    # Two particles on a line: Γ₁ = −Γ₂ = 2r/h exp(−r²/h), whose slope in r is 2/h (1 − 2r²/h) exp(−r²/h).
    r, h = 0.6, 0.5
    u = jnp.tile(jnp.array([[r], [0.0]]), (20_000, 1, 1))
    slope = 2 / h * (1 - 2 * r**2 / h) * np.exp(-(r**2) / h)
    found = float(measure_steepness(random.key(0), RBF(h), u, jnp.asarray(h)))
    # r changes by the difference of two standard normal numbers.
    assert found == pytest.approx(2**0.5 * abs(slope), rel=4.5 * 0.5 * (2 / 20_000) ** 0.5)
    assert measure_steepness(random.key(0), 3 * RBF(h), u, jnp.asarray(h)) == pytest.approx(3 * found, rel=1e-5)
    assert measure_steepness(random.key(0), Balanced(), u, jnp.asarray(h)) == 0.0
    assert measure_steepness(random.key(0), RBF(h), u.at[0, 0].set(jnp.inf), jnp.asarray(h)) > 0.0


@pytest.mark.parametrize("dynamics", [EULER, Overdamped("lm"), Underdamped()])
def test_a_raised_step_costs_no_more_by_steepness_than_its_draws_are_worth(dynamics):
    stats, per_step = CurvatureStats(1.0, 1.0, 0.0, 300.0), 1e5
    longest = dynamics.step_error(coupling(1.0)).max_step_for_short_run
    step = longest(stats, per_step)
    assert (step * 300.0) ** 2 / 10.0 == pytest.approx((2.0 / (step * per_step)) ** 0.5)
    assert jnp.isinf(longest(stats._replace(steepness=jnp.zeros(())), per_step))
    # Where nothing is raised: particles that jump.
    assert longest(stats, jnp.inf) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("is_capped", [True, False])
def test_a_short_run_of_many_particles_on_a_line_is_not_far_too_wide(is_capped, monkeypatch):
    if not is_capped:
        monkeypatch.setattr(EulerError, "max_step_for_short_run", lambda *_: jnp.asarray(jnp.inf))
    monkeypatch.setattr(base, "NARROWEST", 1e-6)  # four neighbors for each
    mcmc = vectorized(SGLDR(potential_fn=lambda z: jnp.sum(jnp.exp(z) - z)), 50, 50, 100)
    # The logarithm of an exponential: mean −γ, variance π²/6.
    variances = []
    for seed in range(6):
        mcmc.run(random.key(seed), init_params=random.normal(random.key(100 + seed), (100, 1)))
        variances.append(float(np.mean((np.asarray(mcmc.get_samples(), float) + np.euler_gamma) ** 2)))
    inflation = np.array(variances) / (np.pi**2 / 6)
    upper = inflation.mean() + 4.5 * inflation.std(ddof=1) / 6**0.5
    lower = inflation.mean() - 4.5 * inflation.std(ddof=1) / 6**0.5
    # What the step at which the two are equal would cost: about 40 draws, 0.2.
    assert lower < 1.2 if is_capped else lower > 1.2
    assert upper < 1.5 or not is_capped


@pytest.mark.slow
@pytest.mark.parametrize("is_measured", [True, False])
def test_particles_on_a_line_keep_the_budget(is_measured, monkeypatch):
    if not is_measured:
        monkeypatch.setattr(HostSampler, "steepness", lambda *_: np.zeros(()))
    starts = random.normal(random.key(1), (20, 1))
    mcmc = vectorized(SGLDR(potential_fn=lambda z: jnp.sum(z**2) / 2), 1000, 8000, 20)
    mcmc.run(random.key(0), init_params=starts)
    draws = np.asarray(mcmc.get_samples(group_by_chain=True), float)
    excess, error = draws.var() - 1.0, 2.0 * ensemble_mcse(draws, method="sd")[0]
    if is_measured:
        assert abs(excess) < 0.05 + 4.5 * error
    else:
        assert excess > 0.05 + 4.5 * error


@pytest.mark.parametrize("interaction", [Laplacian(RBF(1.0)), RBF() + Laplacian(), RandomGroups(Laplacian(), size=4)])
def test_no_step_with_momenta_is_measured_where_the_diagonal_of_k_varies(interaction):
    u, stats = random.normal(random.key(0), (8, 2)), CurvatureStats(1.0, 1.0, 0.0)
    coupling = interaction.couple(u, 1.0)
    for dynamics in (Underdamped(), Thermostat()):
        with pytest.raises(ValueError, match="give `step_size`, use SGLDR"):
            dynamics.step_error(coupling).max_step_for_bias(0.05, stats)
        assert 0.0 < dynamics.step_error((3 * RBF(1.0)).couple(u)).max_step_for_bias(0.05, stats) < 0.2
    assert 0.0 < Overdamped().step_error(coupling).max_step_for_bias(0.05, stats) < 0.1


@pytest.mark.parametrize("dynamics", [EULER, Overdamped("lm"), Underdamped(), Thermostat()])
def test_repulsion_that_changes_fast_shortens_the_step(dynamics):
    flat, steep = CurvatureStats(1.0, 1.0, 0.0), CurvatureStats(1.0, 1.0, 0.0, 100.0)
    some = RBF(1.0).couple(random.normal(random.key(0), (8, 2)))
    step = float(dynamics.step_error(some).max_step_for_bias(0.05, steep))
    assert step == pytest.approx(0.5**0.5 / 100) and dynamics.step_error(some).max_step_for_bias(0.05, flat) > 2 * step
    assert float(dynamics.step_error(some).bias(step, steep)) == pytest.approx(0.05)
    if not isinstance(dynamics, Overdamped):
        assert float(dynamics.step_error(some).stability_limit(steep)) == pytest.approx(1 / 100)
        assert dynamics.step_error(some).stability_limit(flat) > 0.02
        assert dynamics.step_error(some).bias(0.0101, steep) > 100 > 0.1 > dynamics.step_error(some).bias(0.0099, steep)


@pytest.mark.slow
def test_momenta_in_a_dense_cloud_have_the_bias_of_the_budget():
    # Sixty particles on a line, for which steps used to be measured at which their variance is five.
    interaction, dynamics = RBF(0.1), Underdamped()
    z = random.normal(random.key(0), (12, 60, 1))

    def couple(u):
        return interaction.couple(u)

    def energy_and_grad(u):
        return jnp.sum(u**2, -1) / 2, u

    steepness = measure_steepness(random.key(1), interaction, z, 0.1)
    step_size = dynamics.step_error(couple(z)).max_step_for_bias(0.05, CurvatureStats(1.0, 1.0, 0.0, steepness))

    @jax.jit
    def variances(step_size):
        def update(cloud, key):
            cloud = dynamics.step(key, cloud, energy_and_grad, couple, step_size)
            return cloud, jnp.mean(cloud.z**2, (1, 2))

        start = dynamics.init(random.key(2), z, energy_and_grad, couple)
        return lax.scan(update, start, random.split(random.key(3), 3000))[1][1000:].mean(0)

    found, far = variances(step_size), variances(3 * step_size)
    error = found.std() / 12**0.5
    assert abs(found.mean() - 1) < 0.05 + 4.5 * error and error < 0.02
    # Control.
    assert far.mean() - 1 > 1.0


def momenta_update(dynamics, gram, H, step_size):
    """One update with a constant K on a Gaussian, ``x = (z, m) ← A x + B ξ + N n`` with white noise ξ and n in ∇U."""
    size = len(gram)

    def update(x, white, n):
        z, m = x[:size, None], x[size:, None]
        constant = Coupling(
            lambda x: gram @ x, 0.0, lambda key: 0.0, jnp.inf, white=lambda key: jnp.asarray(white)[:, None]
        )
        cloud = Cloud(z, jnp.zeros(size), H @ z + n[:, None], (m,))
        moved = dynamics.step(random.key(0), cloud, lambda z: (jnp.zeros(size), z), lambda u: constant, step_size)
        return jnp.concatenate((moved.z, *moved.memory)).ravel()

    zeros = (jnp.zeros(2 * size), jnp.zeros(size), jnp.zeros(size))
    return [np.asarray(jax.jacobian(update, k)(*zeros)) for k in range(3)]


def close_particles(size=6, k=0.9):
    """A Gram matrix, and its largest eigenvalue."""
    gram = k * np.ones((size, size)) + (1 - k) * np.eye(size)
    return gram, np.linalg.eigvalsh(gram)[-1]


@pytest.mark.parametrize("largest", [1.0, 30.0])
@pytest.mark.parametrize("friction", [0.1, 3.0])
def test_steps_of_momenta_are_stable_among_close_particles(friction, largest):
    # K acts twice, so that one stiff particle feels the diagonal of K², which is more than 1.
    dynamics, (gram, Λ), H = Underdamped(friction), close_particles(), np.diag([largest, 1.0, 1.0, 1.0, 1.0, 1.0])
    with jax.enable_x64(True):
        step = 0.99 * float(dynamics.step_error(coupling(Λ)).stability_limit(CurvatureStats(1.0, largest, 0.0)))
        A, _, _ = momenta_update(dynamics, gram, H, step)
    assert np.abs(np.linalg.eigvals(A)).max() < 1.0


def test_momenta_have_no_bias_of_first_order_where_k_is_constant():
    # A whole kick before friction, or after it, makes positions too warm or too cold by Cε/2.
    gram, _ = close_particles(k=0.3)
    biases = []
    with jax.enable_x64(True):
        for step_size in (0.02, 0.04):
            A, B, _ = momenta_update(Underdamped(friction=4.0), gram, np.eye(6), step_size)
            covariance = np.linalg.solve(np.eye(144) - np.kron(A, A), (B @ B.T).ravel()).reshape(12, 12)
            biases.append(np.abs(covariance[:6, :6] - np.eye(6)).max())
    assert np.log2(biases[1] / biases[0]) == pytest.approx(2.0, abs=0.1) and biases[1] < 0.04 / 20


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("k", [0.9, 0.3])
def test_gradient_noise_heats_momenta_through_k(k, shared):
    dynamics, (gram, Λ), V = Underdamped(), close_particles(k=k), 20.0
    with jax.enable_x64(True):
        # `adapt` counts Λ times the noise of a shared minibatch.
        stats = CurvatureStats(1.0, 1.0, V * Λ if shared else V)
        step = float(dynamics.step_error(coupling(Λ)).max_step_for_bias(0.05, stats))
        A, B, N = momenta_update(dynamics, gram, np.eye(6), step)
    noise = V * (np.ones((6, 6)) if shared else np.eye(6))
    driven = B @ B.T + N @ noise @ N.T
    covariance = np.linalg.solve(np.eye(144) - np.kron(A, A), driven.ravel()).reshape(12, 12)
    inflation = np.diag(covariance)[:6].mean() - 1
    assert 0.0 < inflation < 1.1 * 0.05  # the budget is of first order


def test_a_run_that_would_go_nowhere_gets_longer_steps():
    assert step_size(BiasBudget(0.1), draws_per_step=2500.0) == pytest.approx(200 / 2500)
    assert step_size(BiasBudget(0.1), draws_per_step=1.0) == pytest.approx(1 / 4)
    assert step_size(BiasBudget(0.1), draws_per_step=1.0, largest=30.0) == pytest.approx(2 / 30)
    assert step_size(BiasBudget(0.1, min_draws=0.0), draws_per_step=1.0) == pytest.approx(0.2 / 1.1 / 5.0)


@pytest.mark.parametrize(
    ("dynamics", "bound"),
    [(EULER, 1.0), (Overdamped(), 1.0), (Underdamped(), 1.0), (Underdamped(3.0), 4.0), (Thermostat(), 4.0)],
)
def test_bias_at_the_step_of_the_budget_is_the_tolerance(dynamics, bound):
    budget = BiasBudget(0.008, min_draws=0.0)
    for λ, noise in ((4.0, 0.0), (1e-6, 3.0)):
        step = step_size(budget, dynamics, curvature=λ, noise=noise, largest=λ, bound=bound)
        bias = dynamics.step_error(coupling(bound)).bias(step, CurvatureStats(λ, λ, noise))
        assert float(bias) == pytest.approx(0.008, rel=0.05)


@pytest.mark.parametrize(
    ("dynamics", "noise", "order", "tolerance"),
    [
        (Overdamped(), False, 0, 0.01),
        (Overdamped(), True, 0, 0.05),
        (Overdamped(), True, 1, 0.05),
        (Overdamped(), True, 2, 0.01),
        (Underdamped(), True, 2, 0.01),
        (EULER, False, 0, 0.05),
        (EULER, True, 2, 0.05),
    ],
)
def test_automatic_tolerance_is_small_where_nothing_is_of_first_order(dynamics, noise, order, tolerance):
    plan, error = WarmupPlan(BiasBudget(), None, False, True, noise), dynamics.step_error(coupling(1.0))
    assert plan.tolerance(error, order) == tolerance
    assert plan._replace(rule=BiasBudget(0.2)).tolerance(error, order) == 0.2


def test_bias_of_euler_is_that_of_its_recursion():
    # z ← (1 − ελ) z + √(2ε) ξ − ε noise has variance (2ε + ε² V) / (1 − (1 − ελ)²) = (1 + εV/2) / (λ (1 − ελ/2)).
    ε, λ, V = 0.05, 2.0, 3.0
    exact = (2 * ε + ε**2 * V) / (1 - (1 - ε * λ) ** 2) * λ - 1
    assert float(EULER.step_error(coupling(1.0)).bias(ε, CurvatureStats(λ, λ, V))) == pytest.approx(exact, rel=1e-5)


class Sampler(NamedTuple):
    """What learners know of a sampler."""

    plan: WarmupPlan
    gradient: Callable
    dynamics: Dynamics = Overdamped()

    def gradients(self, warmup):
        return self.gradient

    def couple(self, u, bandwidth):
        return Coupling.of_figures(1.0, 1.0, True)

    def steepness(self, u, bandwidth):
        return 0.0

    def settled(self, cloud, step_size, noise):
        return cloud


def tune(gradients, u, has_noise=False, **fields):
    """What is known of the step at the end of a warmup, given the gradients of cases."""
    plan = WarmupPlan(BiasBudget(0.1, min_draws=0.0), None, False, has_reference=has_noise, is_noisy=has_noise)
    cloud = Cloud(u, np.zeros(u.shape[:2], np.float32), next(iter(gradients([(0, u, 0)]))), ())
    warmup = WarmupState.start(100, Preconditioner(), 1e-3, jnp.asarray(jnp.nan), cloud, plan)
    moments = warmup.moments.add(*(x.reshape(-1, x.shape[-1]) for x in (cloud.z, cloud.gradient)))
    warmup = jax.device_get(warmup._replace(moments=moments, **fields))
    with np.errstate(all="ignore"):
        return update_step_size(generator(), Window(Timetable(100), 100), warmup, cloud, Sampler(plan, gradients))[0]


def test_where_no_curvature_is_met_the_step_follows_from_the_spread():
    def cone(cases):
        return (np.sign(u) for _, u, _ in cases)

    # On average, curvature is at least one over the variance.
    u = 10.0 + numbers(0, (1, 6, 3))
    np.testing.assert_allclose(tune(cone, u).step_size, 0.5 * u.var(1).max(), rtol=1e-5)
    # Particles that do not move have no spread.
    arrival = ArrivalState(jnp.array([[0.1, 0.4, 0.1, 0.4, 0.1, 0.4]]), jnp.zeros((1, 6), bool), None)
    found = tune(cone, np.ones((1, 6, 3), np.float32), arrival=arrival)
    np.testing.assert_allclose(found.step_size, 0.02, rtol=1e-5)


@pytest.mark.parametrize(("corrected", "order"), [(0.1, 1), (10.0, 0)])
def test_control_variates_are_given_up_where_they_add_noise(corrected, order):
    # As a minibatch would, the noise depends on the number alone.
    def noisy(cases):
        return (u + (corrected if of else 1.0) * numbers(number, u.shape) for number, u, of in cases)

    found = tune(noisy, numbers(0, (1, 20, 3)), has_noise=True)
    assert found.reference.order == order and found.noise == min(found.measurements.mean_noise[:2])
    diagnosis = diagnose_warmup(found, None, Overdamped())
    assert [finding.name for finding in diagnosis.findings()] == ([] if order else ["control_variates_off"])


def test_laplace_distribution_comes_out_in_its_own_size():
    # Its curvature is all in one point, which few measurements meet.
    mcmc = vectorized(SGLD(potential_fn=lambda z: jnp.abs(z).sum()), 200, 2000)
    mcmc.run(random.key(0), init_params=random.normal(random.key(50), (6, 1)))
    draws = np.asarray(mcmc.get_samples(group_by_chain=True), float)
    error = ensemble_mcse(draws, 6, method="sd")[0]
    # Its variance is 2, of which the budget is a share; and half that size, or twice, would be seen.
    assert abs(draws.std() - 2**0.5) < 4.5 * error + 2**0.5 * BiasBudget().tolerance_for(True) / 2
    assert 9 * error < 2**0.5 / 2


# Windows


def windows(timetable):
    """All windows of a warmup, in order."""
    return [Window(timetable, n) for n in range(1, timetable.num_warmup + 1) if timetable.is_end(n)]


def test_windows_of_warmup():
    timetable, ends = Timetable(100), [1, 2, 5, 10, 15, 25, 30, 40, 60, 65, 70, 75, 80, 85, 90, 95, 100]
    found = windows(timetable)
    assert [window.ends for window in found] == [n for n in range(1, 120) if timetable.is_end(n)] == ends
    assert [n for n in range(120) if timetable.is_arriving(n)] == list(range(25))
    assert [window.ends for window in found if window.was_arrival] == [1, 2, 5, 10, 15, 25]
    assert [window.ends for window in found if not window.is_adapting] == ends[9:]
    assert [window.ends for window in found if window.moves_references] == [25, 30, 40, 60]
    assert [Window(timetable, n).num_settled for n in (64, 65, 70, 100, 101)] == [0, 1, 2, 8, 8]
    # Sums count in the second half of a window, later in its last three quarters.
    begins = [n for n in range(120) if timetable.is_beginning(n)]
    assert begins == [1, 3, 7, 12, 20, 26, 32, 45, 70]
    for n in range(100):
        assert timetable.next_end(n) == next(end for end in ends if end > n)
        assert timetable.next_stop(n) == next(stop for stop in sorted({*ends, *begins}) if stop > n)


def test_windows_of_a_prolonged_arrival():
    timetable = Timetable(1000, True)
    later = [window for window in windows(timetable) if window.ends > 250]
    assert [n for n in range(250, 1000) if timetable.is_arriving(n)] == list(range(250, 800))
    ends = [800, 813, 840, 893, 906, 920, 933, 946, 960, 973, 986, 1000]
    assert [window.ends for window in later] == ends
    assert [window.ends for window in later if window.moves_references] == [800, 813, 840, 893]
    assert [window.ends for window in later if not window.is_adapting] == ends[4:]
    assert {timetable.half_of_arrival(n) for n in range(250, 800)} == {(250, 800)}
    # The mean of the positions, for the reference, is over the second half.
    assert next(n for n in range(250, 1000) if timetable.is_beginning(n)) == 525
    # A limit on its iterations shortens that half, and only shortens it.
    assert [window.ends for window in windows(Timetable(1000, True, 10**7))][-12:] == ends
    found = [window.ends for window in windows(Timetable(1000, True, 150))]
    assert found[-12:] == [400, 440, 520, 680, 720, 760, 800, 840, 880, 920, 960, 1000]
    assert not Timetable(1000, True, 150).is_arriving(400)


def test_a_prolonged_arrival_passes_through_the_rows_at_most_500_times():
    assert most_late_iterations({"rows": (1000, 100)}, num_steps=10) == 500
    assert most_late_iterations({"rows": (1000, 100), "others": (999, 10)}, num_steps=1) == 49950
    assert most_late_iterations({}, num_steps=10) is None


@pytest.mark.parametrize("num_warmup", [*range(1, 12), 50, 51, 99, 1000, 100_000, 600_000, 2_000_000_000])
def test_every_warmup_ends_with_a_measurement(num_warmup):
    timetable = Timetable(num_warmup)
    assert timetable.is_end(num_warmup) and not timetable.is_end(num_warmup + 1)
    assert timetable.next_stop(num_warmup - 1) == num_warmup


# Arrival


@pytest.mark.parametrize("scale", [1e-4, 1e3])
def test_particles_arrive_whatever_the_scale(scale):
    def energy_and_grad(u):
        return 0.5 * jnp.sum((u / scale - 3.0) ** 2, -1), (u / scale - 3.0) / scale

    def update(carry, key):
        return arrive(key, *carry, energy_and_grad), None

    u = 30.0 * random.normal(random.key(0), (1, 500, 2))
    start = ((u, *energy_and_grad(u)), jnp.full((1, 500), 0.05))
    run = jax.jit(lambda start: lax.scan(update, start, random.split(random.key(1), 1500))[0])
    (u, energy, gradient), step_size = run(start)
    standard = np.asarray(u / scale - 3.0).ravel()
    assert abs(standard.mean()) < 4.5 * len(standard) ** -0.5
    assert abs(standard.var() - 1) < 4.5 * (2 / len(standard)) ** 0.5
    assert (step_size > 0.1 * scale**2).all() and (step_size < 30 * scale**2).all()
    np.testing.assert_allclose(energy, energy_and_grad(u)[0], rtol=1e-4)
    np.testing.assert_allclose(gradient, energy_and_grad(u)[1], rtol=1e-3, atol=1e-5 / scale)


def test_arrival_stays_where_the_energy_is_finite():
    def energy_and_grad(u):
        inside = jnp.abs(u[..., 0]) < 1.0
        return jnp.where(inside, 0.0, jnp.nan), jnp.where(inside[..., None], 0.0 * u, jnp.nan)

    def update(carry, key):
        return arrive(key, *carry, energy_and_grad), None

    u = jnp.zeros((1, 50, 1))
    start = ((u, *energy_and_grad(u)), jnp.full((1, 50), 0.05))
    (u, energy, gradient), _ = lax.scan(update, start, random.split(random.key(1), 200))[0]
    assert (jnp.abs(u) < 1.0).all() and jnp.isfinite(energy).all() and jnp.isfinite(gradient).all()
    assert len(np.unique(u)) == 50


def test_lost_particles_are_rescued_and_others_left_alone():
    u = random.normal(random.key(0), (2, 10, 3))
    energy = jnp.zeros((2, 10)).at[1, 4].set(100.0).at[0, 2].set(12.0)
    u, energy = np.asarray(u), np.asarray(energy)
    lost = left_behind(energy, 3)
    particles = u, energy, 2.0 * u, np.arange(20.0).reshape(2, 10)
    moved, found, gradient, steps = rescue(generator(), particles, lost)
    changed = np.argwhere((moved != u).any(-1)).tolist()
    assert changed == [[1, 4]] and found[0, 2] == 12.0
    home = np.argwhere((u == moved[1, 4]).all(-1))
    assert len(home) == 1 and steps[1, 4] == 10 * home[0, 0] + home[0, 1]
    np.testing.assert_array_equal(gradient, 2.0 * moved)
    # Where all are lost there is nowhere to go.
    moved, *_ = rescue(generator(), particles, np.ones((2, 10), bool))
    np.testing.assert_array_equal(moved, u)


def test_noisy_energies_have_a_wider_limit():
    # Linear noise of variance V, the same for all particles: energies of exact draws differ by sqrt(V d).
    d, noise = 100, 400.0
    u = random.normal(random.key(0), (50, 20, d))
    slopes = noise**0.5 * random.normal(random.key(1), (50, 1, d))
    energy = 0.5 * jnp.sum(u**2, -1) + jnp.sum(slopes * u, -1)
    assert left_behind(energy[0][None], d).mean() > 0.2
    assert not any(left_behind(one[None], d, noise).any() for one in energy)
    assert left_behind(energy[0][None].at[0, 3].add(1e4), d, noise)[0, 3]


def test_what_is_not_finite_is_left_behind():
    energy = np.zeros((1, 40))
    energy[0, [7, 9]] = 1e5, np.nan
    assert np.argwhere(left_behind(energy, 3)).tolist() == [[0, 7], [0, 9]]


def test_networks_in_basins_of_different_depth_are_not_lost():
    depth = 1000.0 * random.normal(random.key(0), (1, 20))
    energy = depth.at[0, 4].set(1e5)
    lost = left_behind(energy, 100, 0.0, True)
    assert np.argwhere(lost).tolist() == [[0, 4]]
    # Without basins all would be, but the deepest.
    assert left_behind(energy, 100).sum() > 5
    # Particles in one basin are lost as usual.
    near = random.normal(random.key(1), (1, 20)).at[0, 7].set(100.0)
    np.testing.assert_array_equal(left_behind(near, 100, 0.0, jnp.asarray(True)), left_behind(near, 100))


def around(u, energy, gradient, length=40):
    """The surroundings of particles that see draws ``(time, 1, L, d)``."""
    surroundings = Surroundings.empty(u.shape[1:], u.dtype)
    for i in range(length):
        surroundings = surroundings.add(energy[i], gradient[i])
    return jax.device_get(surroundings)


def test_most_particles_leave_a_basin_that_is_lost():
    # Thirteen of twenty particles in a basin whose floor is 40 higher, and not wider.
    u = random.normal(random.key(0), (40, 1, 20, 5))
    higher = jnp.where(jnp.arange(20) < 13, 40.0, 0.0)
    energy = 0.5 * jnp.sum(u**2, -1) + higher
    assert around(u, energy, u).is_lost()[0].tolist() == [True] * 13 + [False] * 7
    # By energies against the median none is left behind.
    assert not left_behind(energy[-1], 5).any()


@pytest.mark.parametrize("dimension", [5, 100])
def test_the_neck_of_a_funnel_does_not_attract(dimension):
    # v is fixed at each particle: energies are lower by up to (d − 1) v / 2 in the neck, and the mass is alike.
    v = jnp.linspace(-6.0, 6.0, 20)
    x = random.normal(random.key(0), (40, 1, 20, dimension - 1)) * jnp.exp(v / 2)[:, None]
    energy = jnp.sum(x**2, -1) / (2 * jnp.exp(v)) + (dimension - 1) * v / 2 + v**2 / 18
    gradient = jnp.concatenate((x / jnp.exp(v)[:, None], jnp.ones((40, 1, 20, 1))), -1)
    assert not around(gradient, energy, gradient).is_lost().any()
    # By energy alone the neck would take in those who are in the wide part.
    assert (energy.mean(0) > energy.mean(0).min() + 10.0 + 2.0 * dimension**0.5).any()


@pytest.mark.parametrize("narrow", [1, 100])
def test_a_narrow_basin_and_a_wide_one_of_the_same_weight_both_stay(narrow):
    # Ten of the particles are in a basin that is twenty times narrower in some of 100 coordinates.
    width = jnp.where(jnp.arange(100) < narrow, jnp.where(jnp.arange(20) < 10, 0.05, 1.0)[:, None], 1.0)
    u = random.normal(random.key(0), (40, 1, 20, 100)) * width
    energy = 0.5 * jnp.sum((u / width) ** 2, -1) + jnp.sum(jnp.log(width), -1)
    assert not around(u, energy, u / width**2).is_lost().any()


def test_a_particle_that_does_not_move_does_not_attract():
    u = random.normal(random.key(0), (40, 1, 20, 100))
    u = u.at[:, 0, 3].set(u[0, 0, 3])
    assert not around(u, 0.5 * jnp.sum(u**2, -1), u).is_lost().any()


class Energies(NamedTuple):
    """A sampler on minibatches, as far as the learner of the arrival knows one."""

    plan: WarmupPlan
    energy: np.ndarray

    def energy_on_common_rows(self, warmup, u):
        return self.energy

    def log_volume(self, warmup, u):
        return 0.0


@pytest.mark.parametrize(("ends", "moves", "coincide"), [(30, True, True), (50, False, False), (60, True, False)])
def test_lost_particles_move_to_others_but_not_where_they_would_coincide(ends, moves, coincide):
    # At the end of the arrival, after 50 of 200 iterations, copies must part again before repulsion begins.
    u = random.normal(random.key(0), (1, 10, 3))
    plan = WarmupPlan(BiasBudget(), None, False, False, is_noisy=True)
    cloud = Cloud(u, jnp.zeros(u.shape[:2]), jnp.zeros_like(u), ())
    warmup, cloud = jax.device_get(
        (WarmupState.start(200, Preconditioner(), 1e-3, jnp.asarray(jnp.nan), cloud, plan), cloud)
    )
    energy = np.where(np.arange(10) == 4, 1e4, 0.0)[None]
    found, moved = update_arrival(generator(), Window(Timetable(200), ends), warmup, cloud, Energies(plan, energy))
    assert np.flatnonzero((moved.z != cloud.z).any(-1)).tolist() == ([4] if moves else [])
    assert np.flatnonzero(found.arrival.lost).tolist() == ([] if moves else [4])
    assert (len(np.unique(moved.z, axis=1)[0]) < 10) == coincide
    if moves:
        nearest = np.delete(np.linalg.norm(moved.z[0] - moved.z[0, 4], axis=-1), 4).min()
        assert nearest == pytest.approx(0.0 if coincide else 0.1 * 3**0.5, abs=1e-6)


def test_exact_draws_are_hardly_ever_lost():
    u = random.normal(random.key(0), (1, 20_000, 2))
    # A chi-squared of two degrees of freedom exceeds its median by 2 · 17 in one draw of 5·10⁷.
    assert not left_behind(0.5 * jnp.sum(u**2, -1), 2).any()


# Scales


@pytest.mark.parametrize("scale", [None, jnp.array([2.0, 0.5, 3.0]), jnp.linalg.cholesky(PRECISION + jnp.eye(3))])
@pytest.mark.parametrize("center", [None, jnp.array([1.0, -2.0, 30.0])])
def test_preconditioner_is_a_linear_change_of_variables(scale, center):
    change = Preconditioner(scale, center)
    z = random.normal(random.key(0), (2, 4, 3))
    np.testing.assert_allclose(change.to_positions(change.whiten(z)), z, rtol=1e-4, atol=1e-5)

    def energy(z):
        return jnp.sum(jnp.sin(z))

    expected = jax.grad(lambda u: energy(change.to_positions(u)))(change.whiten(z))
    np.testing.assert_allclose(change.whiten_gradient(jax.grad(energy)(z)), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dense", [False, True])
def test_changes_of_variables_follow_each_other(dense):
    scales = (jnp.array([2.0, 0.5, 3.0]), jnp.array([0.1, 7.0, 1.0]))
    if dense:
        scales = tuple(jnp.linalg.cholesky(PRECISION + jnp.diag(s)) for s in scales)
    first = Preconditioner(scales[0], jnp.array([1.0, -2.0, 30.0]))
    second = Preconditioner(scales[1], jnp.array([0.5, 0.0, -1.0]))
    z = random.normal(random.key(0), (4, 3))
    both = first.compose(second)
    np.testing.assert_allclose(both.whiten(z), second.whiten(first.whiten(z)), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(
        both.whiten_gradient(z), second.whiten_gradient(first.whiten_gradient(z)), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("dense", [False, True])
def test_moments_are_those_of_all_clouds(dense):
    u = 1000.0 + random.normal(random.key(0), (50, 8, 3))
    gradient = random.normal(random.key(1), (50, 8, 3)) @ PRECISION
    moments = Moments.empty(3, u.dtype, dense)
    for x, g in zip(u, gradient, strict=True):
        moments = moments.add(x, g)
    moments = jax.device_get(moments)
    assert moments.number == 400
    u, gradient = np.asarray(u, float).reshape(-1, 3), np.asarray(gradient, float).reshape(-1, 3)
    for mean, scatter, x in (
        (moments.position, moments.position_scatter, u),
        (moments.gradient, moments.gradient_scatter, gradient),
    ):
        np.testing.assert_allclose(mean, x.mean(0), rtol=1e-5, atol=1e-4)
        covariance = np.cov(x.T, bias=True) if dense else x.var(0)
        np.testing.assert_allclose(scatter / 400, covariance, rtol=1e-3, atol=1e-3)
    largest = np.linalg.eigvalsh(np.cov(u.T, bias=True))[-1] if dense else u.var(0).max()
    assert float(moments.spread()) == pytest.approx(largest, rel=1e-3)


def moments_of(covariance, gradient_covariance, count=1e8, dense=True):
    pick = np.asarray if dense else np.diag
    zero = np.zeros(len(covariance))
    return Moments(np.asarray(count), zero, zero, count * pick(covariance), count * pick(gradient_covariance))


@pytest.mark.parametrize("width", [0.25, 1.0, 4.0])
def test_shape_whitens_a_gaussian_even_if_the_cloud_is_too_wide_or_narrow(width):
    covariance = jnp.linalg.inv(PRECISION + jnp.eye(3))
    scale = moments_of(width * covariance, width * jnp.linalg.inv(covariance)).to_preconditioner(True).scale
    np.testing.assert_allclose(scale @ scale.T, covariance, rtol=2e-3, atol=2e-4)
    diagonal = (
        moments_of(width * covariance, width * jnp.linalg.inv(covariance), dense=False).to_preconditioner(True).scale
    )
    expected = (np.diag(covariance) / np.diag(np.linalg.inv(covariance))) ** 0.25
    np.testing.assert_allclose(diagonal, expected, rtol=1e-4)


def test_shape_makes_covariances_of_positions_and_gradients_equal():
    a, b = PRECISION + jnp.eye(3), jnp.array([[2.0, -1.0, 0.3], [-1.0, 3.0, 0.0], [0.3, 0.0, 0.5]])
    scale = np.asarray(moments_of(a, b).to_preconditioner(True).scale, float)
    inverse = np.linalg.inv(scale)
    np.testing.assert_allclose(
        inverse @ np.asarray(a) @ inverse.T, scale.T @ np.asarray(b) @ scale, rtol=1e-3, atol=1e-3
    )
    assert (np.triu(scale, 1) == 0).all()


def test_few_draws_or_an_early_window_keep_to_the_diagonal():
    covariance = jnp.linalg.inv(PRECISION + jnp.eye(3))
    moments = moments_of(covariance, jnp.linalg.inv(covariance))
    early = np.asarray(moments.to_preconditioner(False).scale)
    np.testing.assert_allclose(early, np.diag(np.diag(early)), atol=1e-6)
    few = np.asarray(moments_of(covariance, jnp.linalg.inv(covariance), count=10.0).to_preconditioner(True).scale)
    many = np.asarray(moments.to_preconditioner(True).scale)
    assert 0 < abs(few[1, 0]) < 0.5 * abs(many[1, 0])


@np.errstate(invalid="ignore", divide="ignore")
def test_shape_of_what_does_not_move_is_left_as_it_was():
    nothing = np.zeros((4, 3), np.float32)
    still = jax.device_get(Moments.empty(3, jnp.float32, True).add(nothing, nothing)).to_preconditioner(True)
    np.testing.assert_array_equal(still.scale, jnp.eye(3))
    flat = jax.device_get(Moments.empty(3, jnp.float32, False).add(numbers(0, (4, 3)), nothing))
    flat = flat.to_preconditioner(True)
    np.testing.assert_array_equal(flat.scale, jnp.ones(3))


def test_first_scales_are_those_of_a_gaussian():
    sd = jnp.array([1e-3, 1.0, 30.0])
    z = sd * random.normal(random.key(0), (2000, 3))
    gradient = z / sd**2
    np.testing.assert_allclose(first_scale(z, gradient, "diagonal").scale, sd, rtol=0.1)
    np.testing.assert_allclose(first_scale(z, gradient.at[:900].set(jnp.inf), "dense").scale, jnp.diag(sd), rtol=0.1)
    one = first_scale(z[:1], jnp.array([[1e3, 0.0, jnp.nan]]), False)
    np.testing.assert_allclose(one.scale, [1e-3, 1.0, 1.0])
    np.testing.assert_array_equal(one.center, z[0])


# Bandwidth


@pytest.mark.parametrize("weight", [0.1, 0.9])
def test_bandwidth_in_a_sum_with_the_identity_is_that_without(weight):
    u = random.normal(random.key(0), (1, 20, 5))
    mixed = weight * RBF() + (1 - weight) * Independent()
    # But for the nugget, which counts once in each.
    np.testing.assert_allclose(mixed.learn_bandwidth(u), RBF().learn_bandwidth(u), rtol=1e-3)


@pytest.mark.parametrize(("kernel", "dimension"), [(RBF(), 5), (IMQ(), 50)], ids=repr)
@pytest.mark.parametrize("size", [3, 60])
def test_bandwidth_makes_a_few_neighbors(kernel, dimension, size):
    u = 1e3 * random.normal(random.key(0), (2, size, dimension))
    h = kernel.learn_bandwidth(u)
    gram = np.stack([kernel.gram(v, h)[0] for v in u])
    diagonal = np.einsum("gii->gi", gram)
    similarity = (gram.sum((1, 2)) - diagonal.sum(1)) / diagonal.sum(1) / (size - 1)
    # The nugget is part of the diagonal, and not of the largest value.
    np.testing.assert_allclose(similarity.mean(), min(4 / (size - 1), 0.25) / 1.001, rtol=1e-3)


@pytest.mark.parametrize(
    ("kernel", "width"), [(RBF(), 1e-3), (RBF(), 1e3), (IMQ(), 1.0), (RandomFeatures(num_features=32), 1.0)], ids=repr
)
def test_many_particles_on_a_line_have_a_bandwidth_that_a_step_can_follow(kernel, width):
    u = width * random.normal(random.key(0), (1, 200, 1))
    h = kernel.learn_bandwidth(u)
    assert float(h) == pytest.approx(0.1 * float(jnp.var(u)), rel=1e-3)
    if kernel == RBF():
        # Four neighbors for each: k is 4 / 199 on average.
        x = u[0] / width
        four = 4.0 * (4.0 / 199.0) ** 2
        assert float(jnp.exp(-((x - x.T) ** 2) / four).sum()) / 200.0 - 1.0 == pytest.approx(4.0, rel=0.2)
        wide, narrow = (measure_steepness(random.key(1), kernel, x[None], b) for b in (h / width**2, four))
        assert narrow > 10.0 * wide


def test_a_given_bandwidth_is_not_learned():
    assert not any(k.learns_bandwidth for k in (RBF(2.0), Independent(), Balanced(), Balanced(RBF(1.0))))


def test_bandwidth_follows_a_cloud_that_shrinks_until_scales_are_frozen():
    # Half way between two windows of the sampler, 20 particles are twenty times closer than they were.
    kernel = SGLDR(potential_fn=lambda z: jnp.sum(z**2) / 2, step_size=1e-9, preconditioner=None)
    starts = random.normal(random.key(0), (20, 5))
    start = kernel.start(random.split(random.key(1), 20), 100, starts, (), {})
    before = kernel.interaction.learn_bandwidth(start.cloud.z)

    def bound_after(iteration):
        warmup = start.warmup._replace(iteration=jnp.asarray(iteration, jnp.int32), bandwidth=before)
        state = start._replace(cloud=start.cloud._replace(z=start.cloud.z / 20.0), warmup=warmup)
        assert not Timetable(100).is_end(iteration + 1)
        found = kernel.warm(state, 1, 100, (), {})
        return float(kernel.interaction.couple(found.cloud.z, found.warmup.bandwidth).bound)

    assert bound_after(32) == pytest.approx(float(kernel.interaction.couple(start.cloud.z, before).bound), rel=1e-3)
    # With the bandwidth of the last window they would all be neighbors: λ_max(K) is their number.
    old_rule = float(kernel.interaction.couple(start.cloud.z / 20.0, before).bound)
    assert old_rule > 19.0 and bound_after(72) == pytest.approx(old_rule)


# The verdict, and whole warmups


FINE = WarmupDiagnosis(1000.0, 1000.0, condition=5.0, curvature_ratio=3.0, dependence=0.1, noise_ratio=0.1)


@pytest.mark.parametrize(
    ("field", "value", "name", "figure", "words"),
    [
        ("num_warmup", 20, "short_run", 20.0, "Warmup has only 20 iterations, too few"),
        ("effective_draws", 50.0, "slow_directions", 50.0, "ESS of only about 50"),
        ("bias", 0.3, "step_bias", 1.3**0.5 - 1, "sds may be about 14% too large"),
        ("condition", 100.0, "varying_curvature", 2.5, "LocScaleReparam"),
        ("curvature_ratio", 100.0, "varying_curvature", 4.0, "LocScaleReparam"),
        ("dependence", 1.0, "funnel", 1.0, "as in a funnel"),
        ("has_heavy_tails", True, "heavy_tails", None, "heavy tails"),
        ("has_basins", True, "several_basins", None, "in several modes"),
        ("noise_ratio", 20.0, "gradient_noise", 20.0, "Gradient noise (20 times the curvature)"),
        ("control_variates_off", True, "control_variates_off", None, "Control variates increased the gradient noise"),
        ("jumps_off", True, "jumps_off", None, "Jumps between modes were almost never accepted"),
    ],
)
def test_verdict_names_what_is_wrong(field, value, name, figure, words):
    (finding,) = FINE._replace(**{field: np.float32(value)}).findings()
    assert finding.name == name and words in str(finding)
    assert finding.figure == (None if figure is None else pytest.approx(figure))


def test_verdict_of_several_figures():
    assert FINE.findings() == WarmupDiagnosis().findings() == []
    # The step is raised until the run is worth 200, which rounding must not make a finding.
    assert FINE._replace(effective_draws=199.99).findings() == []
    assert [FINE._replace(bias=x).findings()[0].severity for x in (0.15, 0.3)] == ["warning", "error"]
    slow = FINE._replace(effective_draws=50.0)
    assert 'Set preconditioner="dense"' in slow._replace(is_diagonal=True).findings()[0].remedy
    assert "Raise `subsample_size`" in slow._replace(noise_ratio=2.0).findings()[0].remedy
    noisy = slow._replace(noise_ratio=20.0, thermostat_helps=True)
    assert all(finding.remedy.startswith("Use SGNHT") for finding in noisy.findings())
    # Networks keep to their basins, and their control variates always add noise.
    (finding,) = FINE._replace(has_basins=True, control_variates_off=True, is_prolonged=True).findings()
    assert finding.name == "several_basins" and "predict(mcmc, ...)" in finding.remedy


def expectations(kernel, *args, num_warmup=1000, num_samples=30, num_chains=20, seed=0, **kwargs):
    """What a warmup found, in words, and the run."""
    mcmc = vectorized(kernel, num_warmup, num_samples, num_chains)
    mcmc.run(random.key(seed), *args, **kwargs)
    return " ".join(map(str, kernel.findings(mcmc.last_state))), mcmc


def test_a_short_warmup_is_announced():
    with pytest.warns(UserWarning, match="num_warmup=20 is too short"):
        jax.eval_shape(lambda: SGLD(noisy_mean).start(random.split(random.key(0), 6), 20, None, (jnp.zeros(9), 2), {}))


@np.errstate(invalid="ignore")
def test_an_optimizer_has_no_draws_to_be_judged():
    warmup = tune(linear(PRECISION), numbers(0, (1, 8, 3)))
    warmup = warmup._replace(symptoms=jax.device_get(Symptoms.empty(8, 3, jnp.float32)))
    sampler, optimizer = (diagnose_warmup(warmup, BiasBudget(), Overdamped(noise=x)).findings() for x in (True, False))
    assert [finding.name for finding in sampler] == ["slow_directions"] and optimizer == []


@pytest.mark.parametrize("measures", [False, True])
def test_nothing_is_cut_where_the_noise_was_not_measured(measures):
    settings = {} if measures else {"step_size": 1e-3}
    kernel = SGLD(noisy_mean, preconditioner="dense", gradient=Subsampled(), **settings)
    _, state = programs_of(kernel, random.split(random.key(0), 4), 60, jnp.zeros(2000), 2)[-1]
    assert (state.learned.gradient_limit is not None) == measures


def noisy_mean(y, subsample_size):
    mu = numpyro.sample("mu", dist.Normal(0, 10))
    with numpyro.plate("rows", len(y), subsample_size=subsample_size) as i:
        numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])


@pytest.mark.slow
def test_noise_that_rules_the_step_is_named():
    y = random.permutation(random.key(5), jnp.linspace(-30.0, 30.0, 2000))
    words, _ = expectations(SGLD(noisy_mean, gradient=Subsampled()), y, 2)
    assert "Use SGNHT" in words and "or raise `subsample_size`" in words
    # The likelihood is quadratic: control variates leave no noise at all.
    words, mcmc = expectations(SGLD(noisy_mean), y, 2)
    assert words == ""
    learned = mcmc.last_state.learned
    assert learned.reference is not None and learned.measurements.noise < 1e-3


def curved(x, y, subsample_size):
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("rows", len(y), subsample_size=subsample_size) as i:
        numpyro.sample("y", dist.Bernoulli(logits=x[i] @ beta), obs=y[i])


@pytest.mark.slow
def test_minibatches_with_control_variates_give_the_posterior():
    # Logistic regression on 2000 rows in batches of 20, against quadrature.
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2000, 2)) @ np.array([[1.0, 0.7], [0.0, 0.5]])
    y = rng.random(2000) < 1 / (1 + np.exp(-x @ np.array([1.0, -1.0])))
    axes = np.meshgrid(np.linspace(0.3, 1.7, 141), np.linspace(-2.0, 0.0, 141), indexing="ij")
    grid = np.stack([axis.ravel() for axis in axes], -1)
    logits = grid @ x.T
    log_density = (logits * y - np.logaddexp(0, logits)).sum(1) - (grid**2).sum(1) / 2
    weight = np.exp(log_density - log_density.max())
    weight /= weight.sum()
    mean = weight @ grid
    variance = weight @ (grid - mean) ** 2

    def scores(**kwargs):
        """Errors of means in their standard errors; and of variances, beyond what is tolerated."""
        data = jnp.asarray(x), jnp.asarray(y, jnp.int32)
        words, mcmc = expectations(SGLD(curved, **kwargs), *data, 20, num_warmup=300, num_samples=500)
        draws = np.asarray(mcmc.get_samples(group_by_chain=True)["beta"], float)
        square = (draws - mean) ** 2 / variance
        # Balanced noise makes ensemble means better than these standard errors of independent chains.
        errors = draws.mean(1) - mean, square.mean(1) - 1
        standard = [error.std(0, ddof=1) / 20**0.5 for error in errors]
        inflation = np.abs(errors[1].mean(0)) - 0.05
        return words, np.abs(errors[0].mean(0) / standard[0]), inflation / standard[1], mcmc.last_state.learned

    words, of_mean, of_variance, learned = scores()
    assert words == "" and learned.reference is not None
    assert (of_mean < 4.5).all() and (of_variance < 4.5).all()
    # Plain minibatches with the same step and scales inflate the variances.
    scale = np.asarray(learned.preconditioner.scale)
    _, _, of_variance, _ = scores(
        gradient=Subsampled(),
        step_size=float(learned.step_size),
        preconditioner=scale @ scale.T,
        dynamics=Overdamped("lm"),
    )
    assert (of_variance > 9.0).any()


def test_groups_share_what_is_learned():
    kernel = SGLDR(potential_fn=lambda z: jnp.sum(z**2) / 2, num_ensembles=2)
    starts = random.normal(random.key(1), (12, 2))
    keys = random.split(random.key(0), 12)
    warmup = warmed(kernel, keys, 60, 60, init_params=starts).warmup
    assert warmup.arrival.step_size.shape == (2, 6) and warmup.step_size.shape == ()
    # The moments are of all 12 particles, at every iteration of the last part.
    assert warmup.moments.number == 12 * (60 - int(0.7 * 60))


@pytest.mark.parametrize("preconditioner", ["auto", pytest.param(None, marks=pytest.mark.slow)])
def test_a_single_chain_learns_over_time(preconditioner):
    sd = jnp.array([0.01, 1.0, 100.0])
    kernel = SGLD(potential_fn=lambda z: jnp.sum((z / sd) ** 2) / 2, preconditioner=preconditioner)
    mcmc = MCMC(kernel, num_warmup=2000, num_samples=2000, progress_bar=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mcmc.run(random.key(0), init_params=jnp.array([1.0, -3.0, 50.0]))
    samples = np.asarray(mcmc.get_samples(), float) / np.asarray(sd)
    if preconditioner is None:
        # The step suits the stiffest direction, and the others hardly move.
        assert samples[:, 2].std() < 0.1
        return
    # Successive draws are ten updates of half a unit of time apart: independent, nearly.
    assert (np.abs(samples.mean(0)) < 4.5 * (1.1 / 2000) ** 0.5).all()
    assert (np.abs(samples.var(0) - 1) < 4.5 * (2.2 / 2000) ** 0.5 + 0.01).all()


def test_scales_that_are_learned_and_given():
    dimension = 5

    def shape(**kwargs):
        kernel = SGLD(potential_fn=lambda z: jnp.sum(z**2) / 2, **kwargs)
        starts = random.normal(random.key(1), (4, dimension))
        state = jax.eval_shape(lambda key: kernel.start(key, 100, starts, (), {}), random.split(random.key(0), 4))
        learned = state.warmup if hasattr(state, "warmup") else state.learned
        return None if (scale := learned.preconditioner.scale) is None else scale.shape

    assert shape() == shape(preconditioner="dense") == (dimension, dimension)
    assert shape(preconditioner="dense", step_size=0.1) == (dimension, dimension)
    assert shape(preconditioner="diagonal") == (dimension,)
    # A given step means what it means in plain SGLD.
    assert shape(step_size=0.1) is None and shape(preconditioner=None) is None
    assert shape(preconditioner=jnp.ones(dimension)) == (dimension,)


def random_mean(y, subsample_size, noise):
    mu = numpyro.sample("mu", dist.Normal(0, 10))
    with numpyro.plate("rows", len(y), subsample_size=subsample_size) as i:
        numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])
    numpyro.factor("estimate", noise * random.normal(numpyro.prng_key()) * mu)


def test_random_likelihoods_are_recognized():
    y = 5.0 + random.normal(random.key(5), (200,))
    # By default without control variates, and none on demand.
    _, mcmc = expectations(SGLD(random_mean), y, 20, 3.0, num_warmup=100, num_samples=300)
    assert mcmc.last_state.learned.reference is None
    draws = np.asarray(mcmc.get_samples(group_by_chain=True)["mu"], float)
    exact = float(y.sum() / (200 + 0.01))
    means = draws.mean(1)
    assert abs(means.mean() - exact) < 4.5 * max(means.std(ddof=1), draws.std() / 300**0.5) / 20**0.5
    with pytest.raises(ValueError, match="random .*prng_key.*Subsampled"):
        expectations(SGLD(random_mean, gradient=ControlVariates()), y, 20, 3.0)


def test_particles_arrive_under_a_random_likelihood():
    # A lucky estimate must not be kept for ever, which would hold its particle and shrink its steps.
    y = 5.0 + random.normal(random.key(5), (200,))
    state = warmed(SGLD(random_mean), random.split(random.key(0), 20), 49, 200, y, None, 5.0)
    assert len(np.unique(state.cloud.z)) == 20
    assert (state.warmup.arrival.step_size > 1e-3).all()


def test_long_gradients_are_cut_and_counted():
    # A wall that is met rarely, and only after warmup.
    def energy(z):
        return jnp.sum(z**2) / 2 + 1e6 * jnp.sum(jnp.maximum(z - 3.5, 0.0) ** 2)

    kernel = SGLD(potential_fn=energy, step_size=BiasBudget(0.5))
    starts = random.normal(random.key(1), (4, 1))
    state = kernel.init(random.split(random.key(0), 4), 100, starts, (), {})
    learned = state.learned._replace(step_size=jnp.asarray(0.1))
    over = state._replace(learned=learned, gradient=state.gradient.at[2].set(1e5))
    after = jax.jit(lambda state: kernel.sample(state, (), {}))(over)
    assert after.diverging.tolist() == [False, False, True, False]
    assert int(after.num_flagged_updates) >= 1
    # 20 standard deviations of a gradient, times the step, and noise.
    assert abs(after.z[2, 0] - starts[2, 0]) < 10.0


@pytest.mark.parametrize(("sizes", "best"), [((1, 2, 3), 0), ((2, 1, 3), 1), ((2, 1, 0.5), 2), ((0, 0, 0), 2)])
def test_scales_are_shrunk_for_the_order_with_the_least_noise(sizes, best):
    def noisy(cases):
        return (sizes[order] * numbers(seed, u.shape) for seed, u, order in cases)

    warmup = SimpleNamespace(arrival=SimpleNamespace(lost=np.zeros((1, 20), bool)))
    cloud, sampler = SimpleNamespace(z=numbers(0, (1, 20, 5))), SimpleNamespace(gradients=lambda _: noisy)
    assert least_noisy_order(generator(), 2, warmup, cloud, sampler) == best
