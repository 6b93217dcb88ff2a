"""What warmup measures, against known answers."""

import jax
from jax import lax, random
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_repulsion import RBF, BiasBudget
from numpyro_repulsion.adaptation import (
    Preconditioner,
    Tuning,
    arrive,
    curvature,
    gradient_noise,
    is_arriving,
    is_due,
    measure,
)


def quadratic(precision):
    def force(key, u):
        return 0.5 * jnp.einsum("...i,ij,...j", u, precision, u), u @ precision

    return force


def tuning(iteration=0, num_warmup=100, **kwargs):
    one = jnp.ones(())
    values = {"step_size": one, "curvature": one, "bandwidth": one, "arrival": jnp.full((1, 6), 0.05)} | kwargs
    return Tuning(jnp.asarray(iteration), jnp.asarray(num_warmup), **values)


PRECISION = jnp.array([[9.0, 2.0, 0.0], [2.0, 4.0, 0.5], [0.0, 0.5, 0.01]])


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_curvature_is_the_largest_eigenvalue(scale):
    u = random.normal(random.key(0), (2, 5, 3)) / scale**0.5
    found = curvature(random.key(1), u, quadratic(scale * PRECISION))
    # Eight iterations from a random direction, the best of ten: (4.2 / 9.7)^8 is well below 1 %.
    np.testing.assert_allclose(found, scale * np.linalg.eigvalsh(PRECISION)[-1], rtol=0.02)


def test_curvature_is_absolute_and_leaves_out_what_is_not_finite():
    u = random.normal(random.key(0), (1, 6, 3))
    exact = pytest.approx(np.linalg.eigvalsh(PRECISION)[-1], rel=0.02)
    assert curvature(random.key(1), u, quadratic(-PRECISION)) == exact

    def broken(key, u):
        energy, gradient = quadratic(PRECISION)(key, u)
        return energy, gradient.at[:, 2].set(jnp.nan)

    assert curvature(random.key(1), u, broken) == exact


def test_gradient_noise_is_the_largest_eigenvalue_of_its_covariance():
    root = jnp.array([[3.0, 0.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 0.1]])

    def noisy(key, u):
        energy, gradient = quadratic(PRECISION)(key, u)
        return energy, gradient + random.normal(key, u.shape) @ root.T

    u = random.normal(random.key(0), (2, 20, 3))
    found = gradient_noise(random.key(1), u, noisy)
    exact = np.linalg.eigvalsh(root @ root.T)[-1]
    # 16 pairs for each of 40 particles.
    assert abs(found / exact - 1) < 4.5 * (2 / 640) ** 0.5
    assert gradient_noise(random.key(1), u, quadratic(PRECISION)) == 0.0


@pytest.mark.parametrize("shared", [False, True])
def test_step_size_keeps_the_budget_and_the_margin_of_stability(shared):
    u = random.normal(random.key(0), (1, 6, 3))
    largest = np.linalg.eigvalsh(PRECISION)[-1]
    for interaction in (RBF(1e-6), RBF(1e6)):
        bound = float(interaction.couple(u).bound)
        found = measure(random.key(1), tuning(), u, quadratic(PRECISION), interaction, BiasBudget(0.1), shared)
        np.testing.assert_allclose(found.step_size, min(0.2 / 1.1, 0.5 / bound) / largest, rtol=0.02)
    assert bound > 5.9


def test_later_measurements_do_not_forget_a_stiff_place():
    u = random.normal(random.key(0), (1, 6, 3))
    early, late = (
        measure(
            random.key(1),
            tuning(iteration, curvature=jnp.asarray(100.0)),
            u,
            quadratic(PRECISION),
            RBF(1.0),
            BiasBudget(),
            False,
        )
        for iteration in (30, 60)
    )
    assert early.curvature < 12 and late.curvature == 100.0


def test_a_measurement_that_is_not_finite_is_not_used():
    u = jnp.zeros((1, 6, 3))
    found = measure(random.key(1), tuning(), u, lambda key, u: (0 * u[..., 0], 0 * u), RBF(1.0), BiasBudget(), False)
    assert found.step_size == 1.0


def test_without_curvature_the_step_is_a_fraction_of_the_metropolis_steps():
    def cone(key, u):
        return jnp.abs(u).sum(-1), jnp.sign(u)

    u = 10.0 + random.normal(random.key(0), (1, 6, 3))
    before = tuning(curvature=jnp.zeros(()), arrival=jnp.array([[0.1, 0.4, 0.1, 0.4, 0.1, 0.4]]))
    found = measure(random.key(1), before, u, cone, RBF(1.0), BiasBudget(), False)
    np.testing.assert_allclose(found.step_size, 0.02, rtol=1e-5)
    assert found.curvature == 0.0


def test_warmup_arrives_then_measures_five_times_then_rests():
    iterations = range(120)
    due = [n for n in iterations if is_due(tuning(n))]
    arriving = [n for n in iterations if is_arriving(tuning(n))]
    assert due == [25, 37, 50, 62, 75]
    assert arriving == list(range(25))
    assert not any(is_due(tuning(n, 0)) or is_arriving(tuning(n, 0)) for n in iterations)


@pytest.mark.parametrize("num_warmup", range(1, 12))
def test_the_shortest_warmup_still_measures(num_warmup):
    assert any(is_due(tuning(n, num_warmup)) for n in range(num_warmup))


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e3])
def test_particles_arrive_whatever_the_scale(scale):
    def force(u):
        return 0.5 * jnp.sum((u / scale - 3.0) ** 2, -1), (u / scale - 3.0) / scale

    def update(carry, key):
        return arrive(key, *carry, force), None

    u = 30.0 * random.normal(random.key(0), (1, 2000, 2))
    start = ((u, *force(u)), jnp.full((1, 2000), 0.05))
    run = jax.jit(lambda start: lax.scan(update, start, random.split(random.key(1), 1500))[0])
    (u, energy, gradient), step_size = run(start)
    standard = np.asarray(u / scale - 3.0).ravel()
    assert abs(standard.mean()) < 4.5 * len(standard) ** -0.5
    assert abs(standard.var() - 1) < 4.5 * (2 / len(standard)) ** 0.5
    assert (step_size > 0.1 * scale**2).all() and (step_size < 30 * scale**2).all()
    np.testing.assert_allclose(energy, force(u)[0], rtol=1e-4)
    np.testing.assert_allclose(gradient, force(u)[1], rtol=1e-3, atol=1e-5 / scale)


def test_arrival_stays_where_the_energy_is_finite():
    def force(u):
        inside = jnp.abs(u[..., 0]) < 1.0
        return jnp.where(inside, 0.0, jnp.nan), jnp.where(inside[..., None], 0.0 * u, jnp.nan)

    def update(carry, key):
        return arrive(key, *carry, force), None

    u = jnp.zeros((1, 50, 1))
    start = ((u, *force(u)), jnp.full((1, 50), 0.05))
    (u, energy, gradient), _ = lax.scan(update, start, random.split(random.key(1), 200))[0]
    assert (jnp.abs(u) < 1.0).all() and jnp.isfinite(energy).all() and jnp.isfinite(gradient).all()
    assert len(np.unique(u)) == 50


@pytest.mark.parametrize("scale", [None, jnp.array([2.0, 0.5, 3.0]), jnp.linalg.cholesky(PRECISION + jnp.eye(3))])
def test_preconditioner_is_a_linear_change_of_variables(scale):
    change = Preconditioner(scale)
    z = random.normal(random.key(0), (2, 4, 3))
    np.testing.assert_allclose(change.colour(change.whiten(z)), z, rtol=1e-4, atol=1e-5)

    def energy(z):
        return jnp.sum(jnp.sin(z))

    expected = jax.grad(lambda u: energy(change.colour(u)))(change.whiten(z))
    np.testing.assert_allclose(change.pull(jax.grad(energy)(z)), expected, rtol=1e-4, atol=1e-5)
