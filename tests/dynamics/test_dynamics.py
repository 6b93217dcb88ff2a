"""One update: exact limits, non-finite particles, keys."""

import dataclasses
from functools import partial

import jax
from jax import lax, random
import jax.numpy as jnp
import numpy as np
import pytest
from results import run

import numpyro
import numpyro.distributions as dist

from numpyro_repulsion import RBF, SGLD, SGLDR, Balanced, Independent, Subsampled
from numpyro_repulsion.dynamics import (
    Cloud,
    CurvatureStats,
    Dynamics,
    Overdamped,
    Relativistic,
    Thermostat,
    Underdamped,
    reject_nonfinite,
)
from numpyro_repulsion.gradients import ravel_cloud


def potential(z):
    return jnp.sum(z**4) / 4 + jnp.sum(z**2) / 2


energy_and_grad = jnp.vectorize(jax.value_and_grad(potential), signature="(d)->(),(d)")
EULER = Overdamped(integrator="euler")


@pytest.fixture
def starts():
    return random.normal(random.key(0), (6, 3))


def test_sgldr_without_interaction_is_sgld_and_with_next_to_none_nearly(starts):
    def draws(kernel, interaction):
        kernel = kernel(potential_fn=potential, step_size=0.05, interaction=interaction, dynamics=EULER)
        return run(kernel, key=1, init_params=starts).get_samples(group_by_chain=True)

    independent = draws(SGLD, Independent())
    assert np.array_equal(independent, draws(SGLDR, Independent()))
    near, far = (np.abs(draws(SGLDR, RBF(h, nugget=1e-9)) - independent).max() for h in (1e-8, 1.0))
    assert near < 1e-5 and far > 0.1


def test_sgld_is_a_langevin_loop_written_by_hand(starts):
    step_size, num_steps = 0.05, 4
    setting = {"step_size": step_size, "num_steps": num_steps, "interaction": Independent(), "dynamics": EULER}
    kernel = SGLD(potential_fn=potential, **setting)
    mcmc = run(kernel, key=1, num_samples=3, init_params=starts)
    state = kernel.init(random.split(random.key(1), 6), 0, starts, (), {})

    @jax.jit
    def by_hand(z, rng_key):
        draws = []
        for _ in range(3):
            rng_key, *keys = random.split(rng_key, 1 + num_steps)
            for key in keys:
                noise = random.normal(key, (1, 6, 3))[0]
                z = z + step_size * -jax.vmap(jax.grad(potential))(z) + jnp.sqrt(2 * step_size) * noise
            draws.append(z)
        return jnp.stack(draws, 1)

    # Equal but for the order of floating-point operations, which the compiler chooses.
    np.testing.assert_allclose(
        mcmc.get_samples(group_by_chain=True), by_hand(state.z, state.rng_key), rtol=1e-5, atol=1e-5
    )


def test_noise_and_minibatch_have_keys_of_their_own(starts):
    y = jnp.arange(12.0)

    def model():
        z = numpyro.sample("z", dist.Normal(0, 1).expand([3]).to_event(1))
        with numpyro.plate("rows", 12, subsample_size=3) as i:
            numpyro.sample("y", dist.Normal(z[0] + z[1] * i, 1), obs=y[i])

    setting = {"gradient": Subsampled(), "interaction": Independent(), "dynamics": EULER}
    kernel = SGLD(model, step_size=1e-3, num_steps=2, **setting)
    state = kernel.init(random.split(random.key(1), 6), 0, {"z": starts}, (), {})
    bound, (z, unravel) = kernel.bind(()), ravel_cloud(state.z)
    z, slope = z[None], state.gradient[None]
    for key in random.split(state.rng_key, 3)[1:]:
        noise_key, gradient_key = random.split(key)
        z = z - 1e-3 * slope + jnp.sqrt(2e-3) * random.normal(noise_key, z.shape)
        slope = bound.gradient.energy_and_grad(gradient_key, bound.target, unravel, z)[1]
    after = jax.jit(lambda state: kernel.sample(state, (), {}))(state)
    np.testing.assert_allclose(after.z["z"], z[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(after.gradient, slope[0], rtol=1e-4, atol=1e-4)


def test_svgd_direction_is_the_textbook_one(starts):
    # φ(x) = Σ_j k(x_j, x) ∇log π(x_j) + ∇_{x_j} k(x_j, x), by automatic differentiation, one particle at a time.
    h = 1.7

    def kernel(x, y):
        return jnp.exp(-jnp.sum((x - y) ** 2) / h)

    def direction(x):
        return sum(-kernel(y, x) * jax.grad(potential)(y) + jax.grad(kernel)(y, x) for y in starts)

    dynamics, couple = Overdamped(noise=False), RBF(h, nugget=1e-9).couple
    cloud = dynamics.init(random.key(0), starts, energy_and_grad, couple)
    moved = dynamics.step(random.key(1), cloud, energy_and_grad, couple, 0.1).z
    np.testing.assert_allclose(moved, starts + 0.1 * jax.vmap(direction)(starts), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("field", "bad"), [("z", jnp.nan), ("potential_energy", jnp.inf), ("gradient", jnp.nan), ("memory", jnp.inf)]
)
def test_hold_keeps_whatever_is_not_finite_where_it_was(field, bad):
    old = Cloud(jnp.zeros((4, 2)), jnp.zeros(4), jnp.zeros((4, 2)), (jnp.zeros((4, 2)),))
    new = jax.tree.map(lambda x: x + 1.0, old)
    value = getattr(new, field)
    broken = jax.tree.map(lambda x: x.at[(2,) * x.ndim if x.ndim == 1 else (2, 1)].set(bad), value)
    cloud, held = reject_nonfinite(old, new._replace(**{field: broken}))
    assert held.tolist() == [False, False, True, False]
    for name in Cloud._fields:
        array = jax.tree.leaves(getattr(cloud, name))[0]
        assert (array[2] == 0).all() and (array[jnp.array([0, 1, 3])] == 1).all()


@pytest.mark.parametrize("interaction", [RBF(), Balanced()])
def test_a_diverging_particle_does_not_infect_the_others(interaction):
    def energy(z):
        inside = jnp.where(z[0] > 2.0, -40.0 * z[0], jnp.sum(z**2) / 2)  # beyond 2 it falls toward a wall
        return jnp.where(z[0] > 3.0, jnp.nan, inside)

    starts = random.normal(random.key(0), (8, 2)).clip(-1.5, 1.5).at[3].set(jnp.array([2.99, 0.0]))
    kernel = SGLDR(potential_fn=energy, step_size=0.05, interaction=interaction, num_steps=1)
    mcmc = run(kernel, key=1, num_samples=300, num_chains=8, init_params=starts)
    draws = mcmc.get_samples(group_by_chain=True)
    diverging = np.asarray(mcmc.get_extra_fields(group_by_chain=True)["diverging"])
    assert np.isfinite(draws).all() and (draws[..., 0] <= 3.0).all()
    # A held particle stays exactly where it was, and all others move.
    before = np.concatenate([starts[:, None], draws[:, :-1]], 1)
    stayed = (np.asarray(draws) == before).all(-1)
    assert diverging[3].any()
    assert np.array_equal(stayed, diverging)
    assert int(mcmc.last_state.num_flagged_updates) == diverging.sum()


SETTINGS = [
    (lambda: Overdamped(integrator="baoab"), "Overdamped: `integrator` must be None, 'euler' or 'lm'; got 'baoab'"),
    (lambda: Underdamped(friction=0.0), "`friction` must be a positive, finite number; got 0.0"),
    (lambda: Underdamped(kinetic="relativistic"), r"must be None or Relativistic\(speed=...\)"),
    (lambda: Thermostat(temperature=0.0), "`temperature` must be a positive, finite number"),
]


@pytest.mark.parametrize(("make", "words"), SETTINGS)
def test_bad_settings(make, words):
    with pytest.raises((ValueError, TypeError), match=words):
        make()


def test_no_key_is_used_twice():
    @dataclasses.dataclass(frozen=True)
    class Careless(Overdamped):
        def step(self, key, cloud, energy_and_grad, couple, step_size):
            cloud = super().step(key, cloud, energy_and_grad, couple, step_size)
            return super().step(key, cloud, energy_and_grad, couple, step_size)

    def draw(dynamics):
        kernel = SGLDR(potential_fn=potential, step_size=0.05, num_steps=2, dynamics=dynamics)
        state = kernel.init(random.split(random.key(0), 4), 0, random.normal(random.key(0), (4, 3)), (), {})
        jax.jit(lambda state: kernel.sample(state, (), {}))(state)

    with jax.debug_key_reuse(True):
        draw("auto")
        with pytest.raises(jax.errors.KeyReuseError):
            draw(Careless())


@pytest.mark.parametrize("interaction", [RBF(2.0), Independent()])
def test_averaged_noise_is_the_mean_of_two_draws(starts, interaction):
    dynamics, couple = Overdamped("lm"), interaction.couple
    cloud = dynamics.init(random.key(0), starts, energy_and_grad, couple)
    once = dynamics.step(random.key(1), cloud, energy_and_grad, couple, 0.1)
    coupling = couple(starts)
    drift = coupling.repulsion - coupling.apply(energy_and_grad(starts)[1])
    fresh = coupling.draw(random.key(1))
    expected = starts + 0.1 * drift + 0.2**0.5 * (cloud.memory[0] + fresh) / 2
    np.testing.assert_allclose(once.z, expected, rtol=1e-5, atol=1e-5)
    # What was drawn with one K is used again after particles and K have moved.
    np.testing.assert_array_equal(once.memory[0], fresh)


def test_a_particle_that_has_jumped_carries_no_noise_and_makes_a_quarter_of_a_step(starts):
    # The noise that it carried is correlated with where it was. `test_moves.py` shows that the law is right so.
    dynamics, couple = Overdamped("lm"), Independent().couple
    cloud = dynamics.init(random.key(0), starts, energy_and_grad, couple)
    which = jnp.arange(6) % 2 == 0
    moved = dynamics.step(random.key(1), dynamics.jumped(cloud, which), energy_and_grad, couple, 0.1).z
    (carried,), fresh, slope = cloud.memory, couple(starts).draw(random.key(1)), energy_and_grad(starts)[1]
    whole = starts - 0.1 * slope + 0.2**0.5 * (carried + fresh) / 2
    quarter = starts - 0.1 / 4 * slope + 0.2**0.5 * fresh / 2
    np.testing.assert_allclose(moved, jnp.where(which[:, None], quarter, whole), rtol=1e-5, atol=1e-5)
    assert np.abs(quarter - whole).min() > 1e-4


# Momenta


def stationary_covariance(dynamics, step_size, curvature=1.3, noise=0.0):
    """Of (z, m) for one particle on a Gaussian, exactly: the update is linear, x ← A x + B ξ.

    The gradient that a state carries, with ``noise`` of this variance, is a part of x.
    """

    def update(x, white):
        coupling = Independent().couple(x[:1, None])
        ξ = coupling._replace(draw=lambda key: white[:1, None], white=lambda key: white[:1, None])
        cloud = Cloud(x[:1, None], jnp.zeros(1), x[-1:, None], tuple(x[1:-1, None, None]))
        noisy = lambda z: (jnp.zeros(1), curvature * z + noise**0.5 * white[1])  # noqa: E731
        moved = dynamics.step(random.key(0), cloud, noisy, lambda u: ξ, step_size)
        return jnp.concatenate([part.ravel() for part in (moved.z, *moved.memory, moved.gradient)])

    size = 2 if dynamics == EULER else 3
    # At 0 averaged noise would be that of a particle that has jumped.
    A, B = (jax.jacobian(update, k)(jnp.ones(size), jnp.zeros(2)) for k in (0, 1))
    covariance = np.linalg.solve(np.eye(size**2) - np.kron(A, A), np.asarray(B @ B.T).ravel()).reshape(size, size)
    return (covariance * np.diag([curvature, 1.0, 1.0])[:size, :size])[:-1, :-1]


@pytest.mark.parametrize("curvature", [0.1, 1.3])
@pytest.mark.parametrize("dynamics", [Overdamped(), Underdamped(), Underdamped(friction=4.0)])
def test_the_bias_of_gradient_noise_is_exact_on_a_gaussian(dynamics, curvature):
    step_size, noise = 0.9 if isinstance(dynamics, Underdamped) else 0.4, 0.8
    stats = CurvatureStats(curvature, curvature, noise)
    with jax.enable_x64(True):
        error = dynamics.step_error(Independent().couple(jnp.zeros((1, 1))))
        without, found = (stationary_covariance(dynamics, step_size, curvature, V)[0, 0] for V in (0.0, noise))
        expected = float(error.bias(step_size, stats))
        longest = float(error.max_step_for_bias(expected, stats._replace(curvature=jnp.asarray(1e-3))))
        unlimited = float(error.bias(longest, stats._replace(curvature=1e-3)))
    # Averaged noise has a bias of its own, which curvature amplifies too.
    assert found - without == pytest.approx(expected, rel=1e-9)
    assert unlimited == pytest.approx(expected, rel=1e-4)
    # Heat alone, without the length of a step, is not enough.
    if isinstance(dynamics, Underdamped):
        assert found - without > 1.05 * step_size * noise / (2 * dynamics.friction)


@pytest.mark.parametrize(("dynamics", "order"), [(EULER, 1), (Underdamped(), 2), (Underdamped(friction=4.0), 2)])
def test_bias_has_the_order_of_the_integrator(dynamics, order):
    # EULER is of one particle without memory; with momenta the law of z is exact and that of m is not.
    with jax.enable_x64(True):
        steps = (0.05, 0.1)
        biases = [np.abs(stationary_covariance(dynamics, ε) - np.eye(1 if order == 1 else 2)).max() for ε in steps]
    slope = np.log(biases[1] / biases[0]) / np.log(2.0)
    assert slope == pytest.approx(order, abs=0.1)


def test_splitting_and_averaged_noise_are_exact_for_positions_on_a_gaussian():
    with jax.enable_x64(True):
        for dynamics in (Underdamped(), Overdamped()):
            assert stationary_covariance(dynamics, 0.9)[0, 0] == pytest.approx(1.0, abs=1e-12)


@partial(jax.jit, static_argnums=range(4))
def _long_means(dynamics, interaction, functions, size, step_size, noise):
    key = random.key(0)
    z = random.normal(key, (200, size, 2))
    cloud = dynamics.init(random.fold_in(key, 1), z, gaussian_force, interaction.couple)

    def update(cloud, key):
        noise_key, step_key = random.split(key)

        def noisy(z):
            energy, gradient = gaussian_force(z)
            return energy, gradient + noise * random.normal(noise_key, z.shape)

        cloud = dynamics.step(step_key, cloud, noisy, interaction.couple, step_size)
        return cloud, jnp.stack([f(cloud).reshape(200, -1).mean(1) for f in functions])

    return lax.scan(update, cloud, random.split(random.fold_in(key, 2), 4000))[1].mean(0)


def long_means(dynamics, interaction, functions, *, step_size, size=4, noise=0.0):
    """Time averages of functions of a cloud and their errors, over replicas from exact draws of N(0, I)."""
    means = np.asarray(_long_means(dynamics, interaction, functions, size, step_size, jnp.asarray(noise)), float)
    return means.mean(1), means.std(1, ddof=1) / 200**0.5


def gaussian_force(z):
    return 0.5 * jnp.sum(z**2, -1), z


@pytest.mark.parametrize("dynamics", [Underdamped(), Thermostat()])
def test_positions_and_momenta_are_uncorrelated(dynamics):
    functions = (lambda c: c.z * c.memory[0], lambda c: c.z**2, lambda c: c.memory[0] ** 2)
    mean, error = long_means(dynamics, Balanced(), functions, step_size=0.05)
    # The bias is of second order, at most ε²/4 here.
    assert (np.abs(mean - [0.0, 1.0, 1.0]) < 4.5 * error + 0.05**2 / 4).all(), (mean, error)


@pytest.mark.parametrize("interaction", [Independent(), pytest.param(RBF(2.0), marks=pytest.mark.slow)])
def test_friction_of_the_thermostat_has_its_mean(interaction):
    functions = (lambda c: c.memory[1],)
    found = [long_means(Thermostat(friction=1.5), interaction, functions, step_size=ε) for ε in (0.02, 0.04)]
    mean, error = 2 * found[0][0] - found[1][0], (4 * found[0][1] ** 2 + found[1][1] ** 2) ** 0.5
    assert (np.abs(mean - 1.5) < 4.5 * error).all(), (mean, error)


def test_thermostat_absorbs_noise_that_heats_others():
    # Noise of variance V in the gradient adds εV/2 to the friction it takes, and leaves the law of z alone.
    ε, V = 0.1, 8.0
    functions = (lambda c: c.z**2, lambda c: c.memory[-1])
    setting = {"step_size": ε, "noise": V**0.5}
    mean, error = long_means(Thermostat(), Independent(), functions, **setting)
    assert (np.abs(mean - [1.0, 1.0 + ε * V / 2]) < 4.5 * error + ε**2).all(), (mean, error)
    mean, error = long_means(Underdamped(), Independent(), functions[:1], **setting)
    assert mean[0] - 1.0 > 0.2 + 4.5 * error[0]
    # What the step-size rule expects of it.
    expected = Underdamped().step_error(Independent().couple(jnp.zeros((2, 2)))).bias(ε, CurvatureStats(1.0, 1.0, V))
    assert mean[0] - 1.0 == pytest.approx(float(expected), rel=0.15)


@pytest.mark.parametrize("dynamics", [Overdamped(), Underdamped(), Thermostat()])
def test_noise_that_is_not_finite_allows_no_step(dynamics):
    error = dynamics.step_error(Independent().couple(jnp.zeros((2, 2))))
    for noise in (np.inf, np.nan):
        assert error.max_step_for_bias(0.05, CurvatureStats(1.0, 1.0, noise)) == 0.0
    assert 0.0 < error.max_step_for_bias(0.05, CurvatureStats(1.0, 1.0, 1e12)) < 1e-10


class Kinetic(Thermostat):
    """A control: ζ follows the temperature of the momenta, as published."""

    def _excess(self, m, ζ, step_size):
        return (jnp.mean(m**2, -1, keepdims=True) - self.temperature) / self._inertia(m.shape[-1])


@pytest.mark.parametrize(("dynamics", "holds"), [(Thermostat(inertia=20.0), True), (Kinetic(inertia=20.0), False)])
def test_a_thermostat_keeps_the_temperature_of_positions(dynamics, holds):
    # At long steps momenta that noise kicks are warmer than positions: too warm by ε²V tanh(ζε/2) / 4.
    setting = {"step_size": 0.6, "noise": 2.0**0.5, "size": 1}
    mean, error = long_means(dynamics, Independent(), (lambda c: c.z**2,), **setting)
    # Exact for a constant ζ, whose variance is 1 / (μ d).
    assert (abs(mean[0] - 1.0) < 4.5 * error[0] + 1 / 40) == holds, (mean, error)


def test_a_thermostat_settles_where_noise_takes_it():
    dynamics, z = Thermostat(friction=2.0, temperature=0.5), jnp.ones((3, 2))
    cloud = dynamics.init(random.key(0), z, gaussian_force, Independent().couple)
    settled = dynamics.settled(cloud, 0.1, 30.0)
    np.testing.assert_allclose(settled.memory[1], 2.0 + 0.1 * 30.0 / (2 * 0.5))
    np.testing.assert_array_equal(settled.memory[0], cloud.memory[0])
    assert Underdamped().settled(cloud, 0.1, 30.0) is cloud


def test_the_temperature_of_momenta_is_known_unless_they_are_relativistic():
    memory = (2.0 * jnp.ones((5, 4)),)
    assert Underdamped().kinetic_temperature(memory) == Thermostat().kinetic_temperature(memory) == 4.0
    assert Underdamped(kinetic=Relativistic()).kinetic_temperature(memory) is None
    assert Overdamped().kinetic_temperature(memory) is None


def test_the_step_of_a_thermostat_counts_on_it_for_isotropic_noise_only():
    identity, tolerance = Independent().couple(jnp.zeros((2, 2))), 0.1
    functions = (lambda c: c.z[..., 0] ** 2, lambda c: c.z[..., 1] ** 2)

    def stats(variances):
        # Curvature, which would limit the step, is left out.
        return CurvatureStats(1e-9, 1e-9, jnp.max(variances), jnp.zeros(()), isotropic_noise=jnp.mean(variances))

    isotropic, uneven = jnp.array([30.0, 30.0]), jnp.array([4.0, 2.0])
    error = Thermostat(inertia=10.0).step_error(identity)
    # The friction triples.
    assert error.max_step_for_bias(tolerance, stats(isotropic)) == pytest.approx(4.0 / 30.0)
    # Nor do short runs gain by longer steps.
    assert error.max_step_for_short_run(stats(isotropic), 1e-9) == pytest.approx(4.0 / 30.0)
    assert error.max_step_for_short_run(stats(0.0 * isotropic), 1e-9) > 100.0
    step = float(error.max_step_for_bias(tolerance, stats(uneven)))
    assert step == pytest.approx(2 * tolerance / (4.0 - 1.1 * 3.0), rel=1e-5)
    assert float(error.bias(step, stats(uneven))) == pytest.approx(tolerance, rel=1e-5)
    assert step > 3 * float(Underdamped().step_error(identity).max_step_for_bias(tolerance, stats(uneven)))
    for dynamics, variances, step_size, holds in (
        (Thermostat(inertia=10.0), isotropic, 4.0 / 30.0, True),
        (Underdamped(), isotropic, 4.0 / 30.0, False),
        (Thermostat(inertia=10.0), uneven, step, True),
        (Underdamped(), uneven, step, False),
    ):
        setting = {"step_size": step_size, "noise": variances**0.5}
        mean, spread = long_means(dynamics, Independent(), functions, **setting)
        expected = float(dynamics.step_error(identity).bias(step_size, stats(variances)))
        # Noise heats positions by less than momenta, by up to the share that curvature has in the friction.
        assert (mean.max() - 1.0 < tolerance + 4.5 * spread.max()) == holds, (dynamics, mean, spread, expected)


def test_relativistic_momenta_start_in_their_own_law():
    kinetic = Relativistic(speed=0.7)
    white = random.normal(random.key(0), (200_000,))
    for temperature in (1.0, 0.3):
        m = np.asarray(kinetic.momenta(white, temperature), float)
        grid = np.linspace(-40, 40, 200_001)
        weight = np.exp(-np.asarray(kinetic.energy(jnp.asarray(grid)[:, None]), float) / temperature)
        exact = (weight @ grid**2) / weight.sum()
        assert abs((m**2).mean() - exact) < 4.5 * (m**2).std() / len(m) ** 0.5 + 1e-3 * exact
    assert (np.abs(kinetic.velocity(jnp.asarray(m))) < 0.7).all()
    tails = kinetic.momenta(jnp.array([-5.6, -4.0, 4.0, 5.6]), 1.0)
    np.testing.assert_allclose(tails, -tails[::-1])


@pytest.mark.parametrize("dynamics", [Overdamped(temperature=0.0), Underdamped(temperature=0.0)])
def test_without_temperature_particles_descend(dynamics):
    cloud = dynamics.init(random.key(0), jnp.ones((3, 2)), gaussian_force, Independent().couple)
    for i in range(200):
        cloud = dynamics.step(random.key(i), cloud, gaussian_force, Independent().couple, 0.2)
    assert not dynamics.is_sampler
    np.testing.assert_allclose(cloud.z, 0.0, atol=1e-4)


def test_the_step_of_an_unknown_dynamics_is_not_measured():
    class Unknown(Dynamics):
        pass

    with pytest.raises(ValueError, match="Unknown does not define `.*give `step_size`"):
        SGLD(potential_fn=potential, dynamics=Unknown())
