"""The step of a budget of bias, against recursions and long runs."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import NamedTuple

import jax
from jax import lax, random
import jax.numpy as jnp
from models import generator, numbers, quadratic, vectorized
import numpy as np
import pytest
from results import run

from numpyro_repulsion import RBF, SGLD, SGLDR, Balanced, BiasBudget, ensemble_mcse
from numpyro_repulsion.dynamics import Cloud, CurvatureStats, Dynamics, Overdamped, Thermostat, Underdamped
from numpyro_repulsion.dynamics.step_error import EulerError
from numpyro_repulsion.interactions import Coupling, Laplacian, RandomGroups, base
from numpyro_repulsion.kernels.warmup_host import HostSampler
from numpyro_repulsion.warmup import Preconditioner, Timetable, Window, step_size as step_size_module
from numpyro_repulsion.warmup.adam import Adam
from numpyro_repulsion.warmup.bandwidth import measure_steepness
from numpyro_repulsion.warmup.learned import diagnose_warmup
from numpyro_repulsion.warmup.state import ArrivalState, WarmupPlan, WarmupState
from numpyro_repulsion.warmup.step_size import least_noisy_order, needs_hessian, update_step_size

EULER = Overdamped("euler")


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

    def steepness(interaction, u=u):
        return float(jax.jit(lambda u: measure_steepness(random.key(0), interaction, u, jnp.asarray(h)))(u))

    found = steepness(RBF(h))
    # r changes by the difference of two standard normal numbers.
    assert found == pytest.approx(2**0.5 * abs(slope), rel=4.5 * 0.5 * (2 / 20_000) ** 0.5)
    assert steepness(3 * RBF(h)) == pytest.approx(3 * found, rel=1e-5)
    assert steepness(Balanced()) == 0.0
    assert steepness(RBF(h), u.at[0, 0].set(jnp.inf)) > 0.0


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
    for seed in range(18):
        mcmc.run(random.key(seed), init_params=random.normal(random.key(100 + seed), (100, 1)))
        variances.append(float(np.mean((np.asarray(mcmc.get_samples(), float) + np.euler_gamma) ** 2)))
    inflation = np.array(variances) / (np.pi**2 / 6)
    upper = inflation.mean() + 4.5 * inflation.std(ddof=1) / 18**0.5
    lower = inflation.mean() - 4.5 * inflation.std(ddof=1) / 18**0.5
    # What the step at which the two are equal would cost: about 40 draws, 0.2.
    assert lower < 1.2 if is_capped else lower > 1.2
    assert upper < 1.5 or not is_capped


@pytest.mark.slow
@pytest.mark.parametrize("is_measured", [True, False])
def test_particles_on_a_line_keep_the_budget(is_measured, monkeypatch):
    if not is_measured:
        monkeypatch.setattr(HostSampler, "steepness", lambda *_: np.zeros(()))
    starts = random.normal(random.key(1), (20, 1))
    kernel = SGLDR(potential_fn=quadratic)
    mcmc = run(kernel, num_warmup=1000, num_samples=8000, num_chains=20, init_params=starts)
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
    assert plan._replace(budget=BiasBudget(0.2)).tolerance(error, order) == 0.2


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


def tune(gradients, u, has_noise=False, min_draws=0.0, **fields):
    """What is known of the step at the end of a warmup, given the gradients of cases."""
    plan = WarmupPlan(BiasBudget(0.1, min_draws), None, False, has_reference=has_noise, is_noisy=has_noise)
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


@pytest.mark.parametrize("variance", [20.0, 1000.0])
def test_with_minibatches_no_step_is_raised_in_vain(variance, monkeypatch):
    variances = np.array([1.0, variance, variance], np.float32)
    u = variances**0.5 * numbers(0, (1, 6, 3))

    def is_raised():
        of_budget, found = (
            tune(lambda cases: (u / variances for _, u, _ in cases), u, has_noise=True, min_draws=least).step_size
            for least in (0.0, 200.0)
        )
        return found > 1.01 * of_budget

    # In 6,000 updates the wide directions have some three draws for each unit of time, and the less wide ones 150.
    assert is_raised() == (variance < 100)
    monkeypatch.setattr(step_size_module, "STEP", replace(step_size_module.STEP, least=0.0))
    assert is_raised()


@pytest.mark.parametrize(("corrected", "order"), [(0.1, 1), (10.0, 0), (np.nan, 0)])
def test_control_variates_are_given_up_where_they_add_noise(corrected, order):
    # As a minibatch would, the noise depends on the number alone.
    def noisy(cases):
        return (u + (corrected if of else 1.0) * numbers(number, u.shape) for number, u, of in cases)

    found = tune(noisy, numbers(0, (1, 20, 3)), has_noise=True)
    assert found.reference.order == order and found.noise.largest == found.measurements.mean_noise.largest[order]
    diagnosis = diagnose_warmup(found, None, Overdamped())
    assert [finding.name for finding in diagnosis.findings()] == ([] if order else ["control_variates_off"])


@pytest.mark.parametrize("scale", [1e-3, 1e4])
def test_without_scales_curvature_is_measured_where_the_particles_are(scale):
    """Where the rate of the arrival, which has no unit, is far too long or too short."""

    def bounded(cases):
        return (np.tanh(u / scale) / scale + numbers(number, u.shape) / scale for number, u, _ in cases)

    u = scale * numbers(0, (1, 20, 3))
    rate = ArrivalState(np.full((1, 20), 0.03, np.float32), np.zeros((1, 20), bool), None, Adam.start(u))
    found = tune(bounded, u, has_noise=True, arrival=rate)
    # Of tanh, up to 1 in the middle, and 0.6 on average.
    assert 0.5 < scale**2 * found.measurements.largest_curvature < 1.1


@pytest.mark.parametrize(("of_one", "order"), [(1.2, 1), (5.0, 0)])
def test_a_single_noisy_coordinate_does_not_give_them_up(of_one, order):
    def noisy(cases):
        size = np.array([of_one, 0.1, 0.1], np.float32)
        return (u + (size if of else 1.0) * numbers(number, u.shape) for number, u, of in cases)

    found = tune(noisy, numbers(0, (1, 20, 3)), has_noise=True)
    assert found.reference.order == order
    # By the noisiest direction alone it would be 0.
    assert found.measurements.mean_noise.largest[1] > found.measurements.mean_noise.largest[0]


def test_laplace_distribution_comes_out_in_its_own_size():
    # Its curvature is all in one point, which few measurements meet.
    kernel, starts = SGLD(potential_fn=lambda z: jnp.abs(z).sum()), random.normal(random.key(50), (6, 1))
    mcmc = run(kernel, num_warmup=200, num_samples=2000, init_params=starts)
    draws = np.asarray(mcmc.get_samples(group_by_chain=True), float)
    error = ensemble_mcse(draws, 6, method="sd")[0]
    # Its variance is 2, of which the budget is a share; and half that size, or twice, would be seen.
    assert abs(draws.std() - 2**0.5) < 4.5 * error + 2**0.5 * BiasBudget().tolerance_for(True) / 2
    assert 9 * error < 2**0.5 / 2


@pytest.mark.parametrize(
    ("sizes", "best"), [((1, 2, 3), 0), ((2, 1, 3), 1), ((2, 1, 0.5), 2), ((0, 0, 0), 2), ((2, 1, np.nan), 1)]
)
def test_scales_are_shrunk_for_the_order_with_the_least_noise(sizes, best):
    def noisy(cases):
        return (sizes[order] * numbers(seed, u.shape) for seed, u, order in cases)

    warmup = SimpleNamespace(arrival=SimpleNamespace(lost=np.zeros((1, 20), bool)), reference=None)
    cloud, sampler = SimpleNamespace(z=numbers(0, (1, 20, 5))), SimpleNamespace(gradients=lambda _: noisy)
    assert least_noisy_order(generator(), 2, warmup, cloud, sampler) == best


@pytest.mark.parametrize(
    ("end", "noise", "kind", "order", "needs"),
    [
        (30, 1.0, "dense", 1, False),
        (30, 2000.0, "dense", 1, True),  # as of a few extreme rows, which keep particles from arriving
        (40, 1.0, "dense", 2, True),  # once in use
        (60, 1.0, "dense", 1, True),
        (30, 1.0, "arrow", 1, True),
    ],
)
def test_a_hessian_comes_early_where_noise_keeps_particles_from_arriving(end, noise, kind, order, needs):
    plan = WarmupPlan(BiasBudget(), kind, False, True, is_noisy=True)
    known = SimpleNamespace(high_curvature=1.0)
    reference = SimpleNamespace(hessian=np.eye(2))
    warmup = SimpleNamespace(
        reference=reference,
        measurements=known,
        noise=SimpleNamespace(largest=noise),
        order=order,
        gradient_noise=None,
        bandwidth=0.0,
    )
    cloud, sampler = SimpleNamespace(z=numbers(0, (1, 20, 2))), SimpleNamespace(plan=plan, dynamics=Overdamped())
    sampler.couple = lambda u, bandwidth: Coupling.of_figures(1.0, 1.0, True)
    window = Window(Timetable(100), end)
    assert needs_hessian(window, warmup, cloud, sampler) == needs
    reference.hessian = None
    assert not needs_hessian(window, warmup, cloud, sampler)
