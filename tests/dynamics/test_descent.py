"""SVGD in the steps of an optimizer."""

import jax
from jax import random
import jax.numpy as jnp
from models import vectorized
import numpy as np
import optax
import pytest

from benchmarks.problems.targets import logistic_regression
from numpyro_repulsion import RBF, SGLD, SVGD, Archive, BiasBudget, Independent, Subsampled, run_in_pieces
from numpyro_repulsion.dynamics import Descent, Overdamped, reject_nonfinite

ADAGRAD = optax.chain(optax.scale_by_rss(), optax.ema(0.9, debias=False))
OPTIMIZERS = {"none": optax.identity(), "Adam": optax.scale_by_adam(), "Adagrad": ADAGRAD,
              "clipped": optax.clip_by_global_norm(0.3)}  # fmt: skip


def potential(z):
    return jnp.sum(z**2 / jnp.array([1.0, 100.0, 0.1])) / 2 + jnp.sum(z**4) / 4


energy_and_grad = jnp.vectorize(jax.value_and_grad(potential), signature="(d)->(),(d)")


@pytest.fixture
def starts():
    return random.normal(random.key(0), (6, 3))


def run(optimizer, starts, num_samples=20, step_size=0.02, num_warmup=4, **settings):
    kernel = SVGD(potential_fn=potential, dynamics=Descent(optimizer), step_size=step_size, **settings)
    mcmc = vectorized(kernel, num_warmup, num_samples, len(starts))
    mcmc.run(random.key(1), init_params=starts)
    return mcmc


def test_particles_that_are_alone_follow_the_optimizer(starts):
    optimizer = ADAGRAD
    settings = {"interaction": Independent(), "num_steps": 5}
    found = run(optimizer, starts, num_samples=6, step_size=optax.linear_schedule(0.05, 0.01, 50), **settings)
    for start, end in zip(starts, found.last_state.z, strict=True):
        # As optax has it: a learning rate that turns the sign is one more transformation.
        whole = optax.chain(optimizer, optax.scale_by_learning_rate(optax.linear_schedule(0.05, 0.01, 50)))
        z, state = start, whole.init(start)
        for _ in range(50):
            updates, state = whole.update(jax.grad(potential)(z), state, z)
            z = optax.apply_updates(z, updates)
        np.testing.assert_allclose(end, z, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_one_update_is_the_transformed_direction_of_svgd(starts, optimizer):
    dynamics, couple = Descent(optimizer), RBF(2.0).couple
    cloud = dynamics.init(random.key(0), starts, energy_and_grad, couple)
    moved = dynamics.step(random.key(1), cloud, energy_and_grad, couple, 0.1)
    plain = Overdamped(noise=False).step(random.key(1), cloud._replace(memory=()), energy_and_grad, couple, 1.0)
    for z, φ, end in zip(starts, plain.z - starts, moved.z, strict=True):
        expected, _ = optimizer.update(-φ, optimizer.init(z), z)
        np.testing.assert_allclose(end, z - 0.1 * expected, rtol=1e-4, atol=1e-5)
        assert not np.allclose(end, z + 0.1 * expected, atol=1e-3)


def test_a_particle_that_is_held_keeps_its_accumulators(starts):
    def broken(z):
        energy, gradient = energy_and_grad(z)
        return energy.at[2].set(jnp.nan), gradient

    dynamics, couple = Descent(optax.scale_by_adam()), Independent().couple
    cloud = dynamics.init(random.key(0), starts, energy_and_grad, couple)
    cloud = dynamics.step(random.key(1), cloud, energy_and_grad, couple, 0.1)
    whole = dynamics.step(random.key(2), cloud, energy_and_grad, couple, 0.1)
    held, which = reject_nonfinite(cloud, dynamics.step(random.key(2), cloud, broken, couple, 0.1))
    assert which.tolist() == [False, False, True, False, False, False]
    for before, after, free in zip(cloud.memory, held.memory, whole.memory, strict=True):
        assert np.array_equal(after[2], before[2])
        assert np.array_equal(np.delete(after, 2, 0), np.delete(free, 2, 0))
        assert not np.array_equal(after, before)


def test_a_run_in_pieces_on_disk_keeps_the_accumulators(starts, tmp_path):
    optimizer = optax.scale_by_adam()
    kernel = SVGD(potential_fn=potential, dynamics=Descent(optimizer), step_size=0.02)
    pieces, whole = vectorized(kernel, 4), run(optimizer, starts)
    run_in_pieces(pieces, random.key(1), init_params=starts, piece_size=7, directory=tmp_path)
    assert np.array_equal(whole.last_state.num_updates, pieces.last_state.num_updates)
    for a, b in zip(
        jax.tree.leaves((whole.last_state.z, whole.last_state.memory)),
        jax.tree.leaves((pieces.last_state.z, pieces.last_state.memory)),
        strict=True,
    ):
        # Adam counts its updates; the rest is of other programs, which may round differently.
        if a.dtype.kind == "i":
            assert np.array_equal(a, b)
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_minibatches_of_a_model_whose_parameters_differ_in_scale():
    """The middle of the cloud is within a posterior deviation of the mode."""
    X = random.normal(random.key(0), (1000, 3)) * jnp.array([1.0, 10.0, 0.1])
    y = random.bernoulli(random.key(1), jax.nn.sigmoid(X @ jnp.array([1.0, -0.1, 2.0]))).astype(float)

    @jax.jit
    def newton(beta):
        def energy(beta):
            logits = X @ beta
            return jnp.sum(beta**2) / 2 - jnp.sum(y * logits - jax.nn.softplus(logits))

        hessian = jax.hessian(energy)(beta)
        return beta - jnp.linalg.solve(hessian, jax.grad(energy)(beta)), jnp.sqrt(jnp.diag(jnp.linalg.inv(hessian)))

    mode = jnp.zeros(3)
    for _ in range(20):
        mode, deviations = newton(mode)

    step_size = optax.exponential_decay(0.3, 1000, 0.03)
    kernel = SVGD(logistic_regression, gradient=Subsampled(), dynamics=Descent(ADAGRAD), step_size=step_size)
    mcmc = vectorized(kernel, 0, 100, 6)
    starts = {"beta": random.normal(random.key(2), (6, 3))}
    mcmc.run(random.key(3), X, y, subsample_size=50, init_params=starts)
    assert jnp.max(jnp.abs(mcmc.last_state.z["beta"].mean(0) - mode) / deviations) < 1.0


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: Descent(optax.adam(0.1)), ValueError, "for a gradient of 1 it gave -0.1. `step_size` is the learning"),
        (lambda: Descent(optax.set_to_zero()), ValueError, "it gave 0. "),
        (lambda: Descent(optax.adam), TypeError, r"such as optax.scale_by_adam\(\); got <function adam"),
        (lambda: Descent(0.1), TypeError, "got 0.1"),
        (lambda: SGLD(potential_fn=potential, dynamics=Descent(ADAGRAD), moves=Archive()), ValueError, "is not one"),
        (
            lambda: run(ADAGRAD, jnp.eye(3), step_size=BiasBudget()),
            ValueError,
            "A bias budget does not apply to an optimizer",
        ),
    ],
)
def test_what_is_refused(make, error, words):
    with pytest.raises(error, match=words):
        make()


def test_without_a_step_size_the_rate_is_the_documented_one():
    assert SVGD(potential_fn=potential, dynamics=Descent(ADAGRAD)).schedule(7) == np.float32(0.05)
