"""The bias of a step size, estimated without exact draws, on chains with a stationary distribution in closed form."""

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import pytest
from results import run as ran

import numpyro
import numpyro.distributions as dist

from numpyro_repulsion import (
    RBF,
    SGHMC,
    SGLD,
    SGLDR,
    Archive,
    Balanced,
    Independent,
    Subsampled,
    bias,
    ensemble_mcse,
    step_bias,
    summary,
)
from numpyro_repulsion.dynamics import Overdamped, Underdamped
from numpyro_repulsion.interactions import Laplacian

SCALES = jnp.array([1.0, 1.0, 0.5])


def gaussian(z):
    return jnp.sum((z / SCALES) ** 2) / 2


def run(kernel, dimension=3, chains=20, num_samples=40, **kwargs):
    starts = None
    if kernel.model is None:
        starts = random.normal(random.key(1), (chains, dimension) if chains > 1 else (dimension,))
    return ran(kernel, num_samples=num_samples, num_chains=chains, init_params=starts, **kwargs)


def euler(curvature, step_size):
    """By how much the stationary variance of Euler's chain on a Gaussian is too large."""
    return 1.0 / (1.0 - step_size * curvature / 2.0) - 1.0


def test_predicted_and_observed_bias_are_those_of_eulers_chain():
    step_size, temperature = 0.4, 2.0
    dynamics = Overdamped("euler", temperature=temperature)
    kernel = SGLD(potential_fn=gaussian, step_size=step_size, interaction=Independent(), dynamics=dynamics)
    mcmc = run(kernel)
    before = jax.tree.leaves(mcmc.last_state)
    found = step_bias(mcmc, random.key(5), num_samples=500)
    curvature = 1 / SCALES**2
    expected = euler(curvature, step_size)
    np.testing.assert_allclose([found.predicted, found.step_size], [expected.max(), step_size], rtol=1e-3)
    assert found.predicted_noise == 0.0
    z = (found.observed_by_parameter - expected) / found.observed_error_by_parameter
    assert np.abs(z).max() < 4.5, z
    assert abs(found.observed - expected.mean()) < 4.5 * found.observed_error
    # Control: the posterior itself.
    assert (found.observed_by_parameter / found.observed_error_by_parameter)[2] > 9.0
    halved = 1 - (1 + euler(curvature, step_size / 2)) / (1 + expected)
    z = (found.halving_by_parameter - halved) / found.halving_error_by_parameter
    assert np.abs(z).max() < 4.5, z
    assert (found.halving_by_parameter / found.halving_error_by_parameter)[2] > 9.0
    # Errors are of the right size: those of that many draws, correlated or not.
    assert (found.observed_error_by_parameter < 0.1).all()
    assert all(a is b for a, b in zip(before, jax.tree.leaves(mcmc.last_state), strict=True))
    assert kernel.step_size == step_size
    assert "% on average, as observed" in str(found)


def test_nothing_is_predicted_where_nothing_is_known():
    mcmc = run(SGHMC(potential_fn=gaussian, step_size=0.01, interaction=Laplacian()), chains=4)
    found = step_bias(mcmc)
    assert np.isnan(found.predicted) and np.isnan(found.predicted_noise)
    assert "too large by an unknown amount (there is no estimate for this dynamics)." in str(found)
    assert "posterior sd" not in str(summary(mcmc))


def test_of_a_schedule_the_longest_step_counts():
    # The last step is next to nothing, and says nothing of the draws before.
    def schedule(count):
        return jnp.where(count < 60, 0.3, 1e-4)

    mcmc = run(SGLD(potential_fn=gaussian, step_size=schedule, dynamics=Overdamped("euler")))
    longest = 0.3
    found = step_bias(mcmc)
    np.testing.assert_allclose(found.step_size, longest, rtol=1e-5)
    np.testing.assert_allclose(found.predicted, euler(4.0, longest), rtol=1e-3)
    assert found.observed is None
    assert mcmc.last_state.step_size[0] < 1e-3
    assert "mostly through curvature. Divide `step_size` by 2 to 10." in str(summary(mcmc))


def test_averaged_noise_has_next_to_no_bias():
    found = step_bias(run(SGLD(potential_fn=gaussian, step_size=0.1)), num_samples=500)
    z = found.observed_by_parameter / found.observed_error_by_parameter
    assert np.abs(z).max() < 4.5, z
    np.testing.assert_allclose(found.predicted, (0.1 * 4) ** 2 / 25, rtol=1e-3)


Y = random.normal(random.key(3), (100,))


def minibatched(y):
    mu = numpyro.sample("mu", dist.Normal(0, 0.1))
    with numpyro.plate("rows", 100, subsample_size=5) as i:
        numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])


def test_gradient_noise_is_seen():
    # ∇U has curvature 200 and, by sampling with replacement or without, noise of variance close to 100² var(y) / 5.
    mcmc = run(SGLD(minibatched, step_size=1e-3, gradient=Subsampled()), y=Y)
    found = step_bias(mcmc, num_samples=1000)
    noise = 100**2 * Y.var() / 5
    np.testing.assert_allclose(found.predicted_noise, 1e-3 * noise / 2, rtol=0.25)
    # Curvature amplifies it.
    np.testing.assert_allclose(found.predicted, found.predicted_noise / (1 - 1e-3 * 200 / 2), rtol=1e-3)
    # The stationary variance of averaged noise and a gradient with noise of variance V: (1 + ε V / (2 − ε λ)) / λ.
    plain = 1e-3 * noise / (2 - 1e-3 * 200)
    ratio = found.observed_by_parameter["mu"] / plain
    error = found.observed_error_by_parameter["mu"] / plain
    assert 0.75 - 4.5 * error < ratio < 1.25 + 4.5 * error
    assert found.observed > 9 * found.observed_error
    said = str(summary(mcmc))
    assert "mostly through minibatches. Raise `subsample_size`, set gradient=ControlVariates(), or" in said


@pytest.mark.filterwarnings("ignore:num_warmup")
def test_measured_step_is_judged_by_what_warmup_measured():
    mcmc = ran(
        SGLDR(potential_fn=gaussian),
        num_warmup=200,
        num_samples=50,
        num_chains=10,
        init_params=random.normal(random.key(1), (10, 3)),
    )
    # One measured its clouds, the other took the step after the last of them.
    np.testing.assert_allclose(step_bias(mcmc).predicted, mcmc.last_state.learned.figures.bias, rtol=0.1)
    table = summary(mcmc)
    assert len(table) == 3
    assert "step-size bias at most 2." in str(table)


@pytest.mark.slow
def test_jumps_leave_the_bias_of_the_updates_that_follow():
    """Jumps are exact, and an iteration ends with updates, so that draws have Euler's bias, a quarter."""
    kernel = SGLD(potential_fn=lambda z: jnp.sum(z**2) / 2, step_size=0.4, dynamics=Overdamped("euler"),
                  interaction=Independent(), moves=Archive())  # fmt: skip
    mcmc = ran(
        kernel, num_warmup=100, num_samples=1000, num_chains=50, init_params=random.normal(random.key(1), (50, 1))
    )
    draws = np.asarray(mcmc.get_samples(group_by_chain=True), float)
    variance, error = draws.var(), float(ensemble_mcse(draws**2, 50).max())
    found = step_bias(mcmc, random.key(2), num_samples=1000)
    assert abs(found.observed - (variance - 1)) < 4 * np.hypot(error, found.observed_error)
    assert abs(found.observed - 0.25) < 4 * found.observed_error < 0.05


@pytest.mark.slow
@pytest.mark.parametrize(
    "kernel, chains",
    [
        (SGHMC(potential_fn=gaussian, step_size=0.2, dynamics=Underdamped(temperature=2.0)), 10),
        (SGLDR(potential_fn=gaussian, step_size=0.01, num_ensembles=2), 10),
        (SGLDR(potential_fn=gaussian, step_size=0.01, num_ensembles=2, interaction=Balanced(RBF())), 10),
        (SGLD(potential_fn=gaussian, step_size=0.02), 1),
    ],
)
def test_every_kind_of_run_can_be_asked(kernel, chains):
    found = step_bias(run(kernel, chains=chains), num_samples=2000)
    z = found.observed_by_parameter / found.observed_error_by_parameter
    # What bias these steps have is below what this can see, or just above.
    assert z.shape == (3,) and np.abs(z).max() < 5.5, z
    assert np.isfinite(found.halving_by_parameter).all()


def test_large_particles_are_followed_in_part(monkeypatch):
    monkeypatch.setattr(bias, "MAX_ENTRIES", 8 * 6 * 5)
    keys = random.split(random.key(0))
    starts = {"a": random.normal(keys[0], (6, 7)), "b": random.normal(keys[1], (6, 2, 2))}
    kernel = SGLD(potential_fn=lambda z: sum(jnp.sum(x**2) for x in z.values()), step_size=0.1)
    mcmc = ran(kernel, num_samples=4, init_params=starts)
    found = step_bias(mcmc, num_samples=8).observed_by_parameter
    assert found["a"].shape == (7,) and found["b"].shape == (2, 2)
    assert sum(int(jnp.isfinite(x).sum()) for x in found.values()) == 5


def test_misuse_is_refused():
    mcmc = run(SGLD(potential_fn=gaussian, step_size=0.1), num_samples=1)
    for number in (-1, 7, 1.5):
        with pytest.raises(ValueError, match=f"`num_samples` must be 0, or 8 or more; got {number}"):
            step_bias(mcmc, num_samples=number)
