"""Known gradient noise takes the place of injected noise."""

from dataclasses import replace
from types import SimpleNamespace

import jax
from jax import random
import jax.numpy as jnp
from models import generator, numbers
import numpy as np
import pytest
from results import run
from scipy.linalg import solve_discrete_lyapunov
from scipy.special import logsumexp

import numpyro
import numpyro.distributions as dist

from numpyro_repulsion import SGHMC, SGLD, SGLDR, SGNHT, BiasBudget
from numpyro_repulsion.dynamics import Cloud, CurvatureStats, Overdamped, Relativistic, Thermostat, Underdamped
from numpyro_repulsion.interactions import Coupling
from numpyro_repulsion.interactions.base import MOST_REPLACED
from numpyro_repulsion.warmup import Timetable, WarmupPlan, Window, step_size as step_size_module

NOISE = 1.5


def stationary_variance(dynamics, step, curvature, noise, known):
    """The variance of u, times its curvature, under updates whose gradients have noise of a variance."""

    def update(state, drawn):
        (z, gradient, *memory), (white, kick) = state, drawn
        cloud = Cloud(*(jnp.reshape(x, shape) for x, shape in ((z, (1, 1, 1)), (0.0, (1, 1)), (gradient, (1, 1, 1)))))
        cloud = cloud._replace(memory=tuple(jnp.reshape(x, (1, 1, 1)) for x in memory))
        coupling = Coupling.identity(lambda key: jnp.reshape(white, (1, 1, 1)))
        if known:
            coupling = coupling.with_less_noise(dynamics.heat(step, jnp.array([known])), cloud.z)

        def energy_and_grad(z):
            return jnp.zeros((1, 1)), curvature * z + noise**0.5 * kick

        new = dynamics.step(random.key(0), cloud, energy_and_grad, lambda u: coupling, step)
        return jnp.stack([x.ravel()[0] for x in (new.z, new.gradient, *new.memory)])

    size = 2 + len(dynamics.init(random.key(0), jnp.zeros((1, 1, 1)), lambda z: (z[..., 0], z), couple).memory)
    # An update is linear, so its covariance is that of a discrete Lyapunov equation.
    with jax.enable_x64(True):
        matrix, drawn = map(np.asarray, jax.jacobian(update, (0, 1))(jnp.ones(size), jnp.ones(2)))
    return solve_discrete_lyapunov(matrix, drawn @ drawn.T)[0, 0] * curvature


def couple(u):
    return Coupling.identity(lambda key: jnp.zeros(u.shape))


@pytest.mark.parametrize("step", [0.05, 0.4])
@pytest.mark.parametrize(
    "dynamics", [Overdamped(), Overdamped("euler"), Underdamped(), Underdamped(friction=3.0)], ids=repr
)
def test_variances_are_those_without_noise(dynamics, step):
    heat, flat = float(dynamics.heat(step, NOISE)), 1e-4
    assert stationary_variance(dynamics, step, flat, 0.0, 0.0) == pytest.approx(1.0, abs=step * flat)
    assert stationary_variance(dynamics, step, flat, NOISE, NOISE) == pytest.approx(1.0, abs=step * flat)
    assert stationary_variance(dynamics, step, flat, NOISE, 0.0) == pytest.approx(1.0 + heat, abs=step * flat)
    # Along a steep direction what remains is of higher order.
    plain, replaced = (stationary_variance(dynamics, step, 1.0, noise, noise) for noise in (0.0, NOISE))
    assert abs(replaced - plain) < heat * step


def test_some_noise_is_always_injected():
    coupling = Coupling.identity(lambda key: jnp.ones((2, 3))).with_less_noise(jnp.array([0.0, 0.5, 9.0]), jnp.ones(()))
    expected = np.tile(np.sqrt([1.0, 0.5, 1.0 - MOST_REPLACED]), (2, 1))
    np.testing.assert_allclose(coupling.draw(random.key(0)), expected, rtol=1e-6)
    np.testing.assert_allclose(coupling.white_noise(random.key(0), None), expected, rtol=1e-6)


@pytest.mark.parametrize("dynamics", [Overdamped("euler"), Thermostat()], ids=repr)
def test_updates_inject_what_the_gradient_lacks(dynamics):
    kernel = SGLD(potential_fn=lambda z: z @ z / 2, dynamics=dynamics, step_size=0.1, num_steps=1)
    state = kernel.init(random.split(random.key(0), 4), 0, jnp.ones((4, 3)))
    known = jnp.array([0.0, 5.0, 100.0])

    def injected(learned):
        return kernel.sample(state._replace(learned=learned), (), {}).z - 0.9

    # Shares of 0, 1/4 and more than the most.
    factors = np.sqrt([1.0, 0.75, 1.0 - MOST_REPLACED]) if dynamics == Overdamped("euler") else 1.0
    found = injected(state.learned._replace(gradient_noise=known))
    np.testing.assert_allclose(found, factors * injected(state.learned), rtol=1e-5, atol=1e-6)


def test_only_dynamics_that_can_tell_replace_noise():
    others = Thermostat(), Overdamped(noise=False), Overdamped(temperature=0.0), Underdamped(kinetic=Relativistic())
    assert all(dynamics.heat(0.1, 1.0) is None for dynamics in others)
    # Hot particles have more noise of their own.
    assert Overdamped(temperature=2.0).heat(0.1, 1.0) == Overdamped().heat(0.1, 1.0) / 2.0


def test_known_noise_is_the_mean_of_what_was_measured():
    u, known = numbers(0, (1, 20, 5)), np.zeros(5)

    def gradients(scale):
        rng = generator()
        return lambda cases: (scale * rng.standard_normal(u.shape) for _ in cases)

    def found(known, ends, number, scale=1.0, order=2, dynamics=None, is_identity=True, independent=20):
        warmup = SimpleNamespace(
            gradient_noise=known,
            order=order,
            measurements=SimpleNamespace(number=number),
            arrival=SimpleNamespace(lost=np.zeros((1, 20), bool)),
            reference=None,
            bandwidth=0.0,
        )
        sampler = SimpleNamespace(
            couple=lambda u, bandwidth: Coupling.of_figures(1.0, 1.0, is_identity),
            gradients=lambda warmup: gradients(scale),
            dynamics=Overdamped() if dynamics is None else dynamics,
            plan=SimpleNamespace(num_independent=lambda cloud: independent),
        )
        window, cloud = Window(Timetable(100), ends), SimpleNamespace(z=u)
        return step_size_module._known_noise(generator(), window, warmup, warmup, cloud, sampler)

    # The first was counted when the scales were frozen.
    first = found(known, 65, 2)
    np.testing.assert_allclose(first, 1.0, atol=4.5 * (2 / 80) ** 0.5)
    np.testing.assert_allclose(found(first, 70, 3, 2.0), (first + 4.0 * first) / 2, rtol=1e-5)
    # Minibatches that all particles share count once.
    more = found(known, 65, 2, independent=1)
    np.testing.assert_allclose(more, 1.0, atol=4.5 * (2 / 1600) ** 0.5)
    # While scales change, with noisier control variates, where K acts on it, and where momenta absorb it.
    for others in ({"ends": 60}, {"order": 1}, {"is_identity": False}, {"dynamics": Thermostat()}):
        assert not found(first, **{"ends": 70, "number": 3} | others).any()


def test_noise_for_which_there_is_no_room_counts():
    stats = CurvatureStats(1.0, 1.0, 6.0, isotropic_noise=5.0)
    assert step_size_module.without_known(stats)[2::3] == (3.0, 1.0)
    assert step_size_module.without_known(stats, 2.0)[2::3] == (4.0, 3.0)


@pytest.mark.parametrize("dynamics", [Overdamped(), Underdamped()], ids=repr)
def test_steps_with_momenta_become_longer_up_to_limits(dynamics):
    plan = WarmupPlan(BiasBudget(), "arrow", learns_bandwidth=False, has_reference=True, is_noisy=True)
    coupling, window = Coupling.of_figures(1.0, 1.0, True), Window(Timetable(100), 30)
    sampler = SimpleNamespace(dynamics=dynamics, plan=plan, couple=lambda u, bandwidth: coupling)
    cloud = SimpleNamespace(z=numbers(0, (1, 20, 100)))
    error = dynamics.step_error(coupling)

    def longest(known=1.0, largest=3.0, extreme=1.0, noise=2.0):
        rare = SimpleNamespace(extreme=extreme)
        warmup = SimpleNamespace(gradient_noise=np.full(100, known), order=2, noise=rare, bandwidth=0.0)
        stats = CurvatureStats(*map(np.float64, (1.5, largest, noise)), isotropic_noise=np.float64(noise))
        return step_size_module._longest_within_bias(None, window, warmup, cloud, sampler, error, stats, 0.0), stats

    plain, longer = longest(known=0.0)[0], longest()[0]
    if isinstance(dynamics, Overdamped):
        assert longer == plain
        return
    assert longer > 2.0 * plain
    # By half the limit of stability.
    stiff, stats = longest(largest=1600.0)
    assert plain < stiff == 0.5 * error.stability_limit(stats)
    # By kicks: of the largest energy, 20 + 5 √100, that particles may gain.
    assert plain < longest(extreme=40.0)[0] == pytest.approx(140.0**0.5 / 8.0 / 40.0)
    # Never shorter.
    assert longest(largest=1e6)[0] == longest(known=0.0, largest=1e6)[0] and longest(extreme=1e6)[0] == plain


def counts(group, number, y=None):
    """Counts of groups whose scale is known, so that their effects are independent."""
    numpyro.sample("other", dist.Normal())  # The dense part of an arrow is never empty.
    with numpyro.plate("groups", number):
        effect = numpyro.sample("effect", dist.Normal(0.0, 1.0))
    with numpyro.plate("rows", len(group), subsample_size=100) as i:
        numpyro.sample("y", dist.Poisson(jnp.exp(effect[group[i]])), obs=None if y is None else y[i])


def data(number, rows=4):
    rng, group = generator(), np.repeat(np.arange(number), rows)
    y = rng.poisson(np.exp(rng.standard_normal(number)[group]))
    return {"group": jnp.asarray(group), "number": number, "y": jnp.asarray(y)}


def test_noise_of_other_data_is_forgotten():
    known = data(20, rows=10)
    mcmc = run(SGLD(counts), num_warmup=60, num_samples=1, num_chains=4, **known)
    state = mcmc.last_state
    state = state._replace(learned=state.learned._replace(gradient_noise=jnp.ones(21)))
    assert mcmc.sampler.resumed(state, (), known).learned.gradient_noise is not None
    assert mcmc.sampler.resumed(state, (), known | {"y": known["y"] + 1}).learned.gradient_noise is None


def exact_variances(group, number, y):
    effect = np.linspace(-6.0, 6.0, 4001)
    total, rows = np.bincount(group, np.asarray(y)), np.bincount(group)
    log_density = total[:, None] * effect - rows[:, None] * np.exp(effect) - effect**2 / 2
    weight = np.exp(log_density - logsumexp(log_density, axis=1, keepdims=True))
    return weight @ effect**2 - (weight @ effect) ** 2


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [SGLD, SGHMC])
def test_effects_are_as_wide_as_by_quadrature(kernel):
    known = data(600)
    mcmc = run(kernel(counts), num_warmup=500, num_samples=1000, num_chains=20, **known)
    state, variances = mcmc.last_state, exact_variances(**known)
    noise = np.asarray(state.learned.gradient_noise)
    heat = np.mean(mcmc.sampler.dynamics.heat(state.learned.step_size, noise))

    def inflation():
        """The mean over the effects, and its standard error over twenty parts of the run."""
        draws = np.asarray(mcmc.get_samples(group_by_chain=True)["effect"], float)
        parts = draws.reshape(20, 20, -1, 600).swapaxes(0, 1).reshape(20, -1, 600)
        found = (((parts - draws.mean((0, 1))) ** 2).mean(1) / variances).mean(1) - 1.0
        return found.mean(), found.std(ddof=1) / 20**0.5

    mean, error = inflation()
    # What counts as unknown of the mean noise may remain.
    allowed = step_size_module.STEP.unknown_mean * heat
    assert abs(mean) < 4.5 * error + allowed
    # The same step with all of the injected noise: the control.
    mcmc.post_warmup_state = state._replace(learned=state.learned._replace(gradient_noise=jnp.zeros_like(noise)))
    mcmc.run(random.key(1), **known)
    mean, error = inflation()
    assert mean > 4.5 * error + allowed


@pytest.mark.slow
def test_known_noise_lengthens_steps_that_can_turn_back(monkeypatch):
    known = data(600)

    def learned(kernel):
        mcmc = run(kernel, num_warmup=200, num_samples=1, num_chains=20, **known)
        return mcmc.last_state.learned

    found, constants = (learned(kernel(counts)) for kernel in (SGLD, SGHMC)), step_size_module.STEP
    overdamped, with_momenta = found
    for one in (overdamped, with_momenta):
        assert one.gradient_noise.shape == (601,) and (one.gradient_noise > 0).mean() > 0.9
    monkeypatch.setattr(step_size_module, "STEP", replace(constants, unknown=1.0, unknown_mean=1.0))
    assert learned(SGHMC(counts)).step_size < 0.7 * with_momenta.step_size
    assert learned(SGLD(counts)).step_size == overdamped.step_size
    for kernel in (SGLDR, SGNHT):
        assert not learned(kernel(counts)).gradient_noise.any()
    assert learned(SGLD(counts, preconditioner="diagonal")).gradient_noise is None
