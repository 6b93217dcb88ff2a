"""The tournament that chooses the rate of an optimizer, and the rows that it holds out."""

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC

from numpyro_repulsion import (
    SVGD,
    ControlVariates,
    Descent,
    FullData,
    Subsampled,
    Sweeps,
    to_inference_data,
)
from numpyro_repulsion.gradients import HoldingOut, ModelTarget, likelihood_energies, rows_to_compare
from numpyro_repulsion.warmup.tournament import SHARE, best_rate

ADAGRAD = optax.chain(optax.scale_by_rss(0.0), optax.ema(0.9, debias=False))
N, BATCH = 200, 20
X = random.normal(random.key(0), (N, 3)) * jnp.array([1.0, 5.0, 0.2])
Y = X @ jnp.array([1.0, -0.2, 3.0]) + 0.1 * random.normal(random.key(1), (N,))


def regression(X, y, subsample_size, scale=1.0):
    w = numpyro.sample("w", dist.Normal(0, 10 * scale).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", len(y), subsample_size=subsample_size) as i:
        numpyro.sample("y", dist.Normal(X[i] @ w / scale, 0.3), obs=y[i])


def run(dynamics, num_warmup=100, num_chains=12, seed=2, data=(X, Y), settings=None, **kwargs):
    mcmc = MCMC(
        SVGD(regression, dynamics=dynamics, **(settings or {})),
        num_warmup=num_warmup,
        num_samples=1,
        num_chains=num_chains,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.key(seed), *data, subsample_size=BATCH, **kwargs)
    return mcmc


def error(mcmc, truth):
    return float(jnp.abs(mcmc.last_state.z["w"].mean(0) - truth).max())


@pytest.mark.parametrize("seed", [2, 3])
def test_the_rate_found_arrives_where_the_slowest_does_not(seed):
    exact = jnp.linalg.solve(X.T @ X / 0.09 + jnp.eye(3) / 100, X.T @ Y / 0.09)
    found = run(Descent(ADAGRAD), seed=seed)
    rates = found.last_state.warmup.tournament.rates.ravel()
    rate = float(found.last_state.step_size[0])
    assert (found.last_state.step_size == rate).all() and rate in np.asarray(rates)
    assert error(found, exact) < 0.3
    assert error(run(Descent(ADAGRAD), seed=seed, settings={"step_size": float(rates[0])}), exact) > 1.0


def test_rates_are_in_units_of_the_starts():
    """The same posterior in other units, and the same starts, have rates in these units."""
    plain, scaled = run(Descent(ADAGRAD)), run(Descent(ADAGRAD), scale=100.0)
    np.testing.assert_allclose(scaled.last_state.step_size, 100 * plain.last_state.step_size, rtol=1e-4)


def states(kernel, iterations, num_warmup=100):
    kwargs = {"subsample_size": BATCH}
    state = kernel.init(random.split(random.key(2), 12), num_warmup, None, (X, Y), kwargs)
    sample = jax.jit(lambda state: kernel.sample(state, (X, Y), kwargs))
    for _ in range(iterations):
        before, state = state, sample(state)
    return before, state


def test_all_begin_again_at_their_starts_with_the_best_rate():
    kernel = SVGD(regression, dynamics=Descent(optax.scale_by_adam()))
    during, after = states(kernel, round(100 * SHARE))
    starts = after.warmup.tournament.starts[0]
    assert np.array_equal(after.z["w"], starts)
    # While it goes on, each particle has a rate of its own, and some have moved.
    assert np.array_equal(during.step_size, during.warmup.tournament.rates.ravel())
    assert not np.allclose(during.z["w"], starts, atol=0.1)
    assert np.ptp(after.step_size) > 0 and np.isclose(after.warmup.step.size, after.warmup.tournament.rates).any()
    # Adam has forgotten what it knew: its count is 0, and so are its means.
    assert all((memory == 0).all() for memory in after.memory) and any((memory != 0).any() for memory in during.memory)


def test_wild_starts_come_nearer_and_good_ones_stay():
    def energy(z):
        return jnp.sum(z**2) / 2

    def begun(starts):
        kernel = SVGD(potential_fn=energy, dynamics=Descent(ADAGRAD))
        state = kernel.init(random.split(random.key(0), len(starts)), 100, starts)
        return kernel.sample(state, (), {}).warmup.tournament.starts[0]

    starts = random.normal(random.key(1), (8, 3))
    assert np.array_equal(begun(starts), starts)
    wild = begun(starts.at[2].mul(1e3))
    assert np.array_equal(np.delete(wild, 2, 0), np.delete(starts, 2, 0))
    assert 0 < np.abs(wild[2]).max() < 30


def test_no_start_moves_to_where_the_energy_is_not_finite():
    def energy(z):
        return jnp.where(jnp.abs(z[0]) < 1.5, jnp.nan, 1e3 * jnp.sum(z**2))

    kernel = SVGD(potential_fn=energy, dynamics=Descent(ADAGRAD))
    starts = 2.0 * jnp.array([[1.0], [1.05], [1.1], [-1.0], [-1.05], [-1.1]])
    state = kernel.init(random.split(random.key(0), 6), 100, starts)
    after = kernel.sample(state, (), {})
    assert np.array_equal(after.warmup.tournament.starts[0], starts)
    assert np.isfinite(after.potential_energy).all()


def test_the_best_rate_is_that_of_a_particle_and_its_neighbours():
    rates = jnp.geomspace(0.01, 1.0, 9).reshape(1, 9)
    assert best_rate(rates, jnp.array([[9, 9, 8, 5, 3, 5, 9, 0, 9.0]])) == rates[0, 4]
    # What ran away counts as what stood still.
    assert best_rate(rates, jnp.array([[9, 9, 8, 5, 3, 4, 3, 1e30, jnp.nan]])) == rates[0, 5]
    assert best_rate(rates, jnp.full((1, 9), jnp.nan)) == rates[0, 0]


@pytest.mark.parametrize("gradient", [Subsampled(), ControlVariates(), Subsampled(shared=True), Sweeps(), FullData()])
def test_rows_held_out_are_in_no_minibatch(gradient):
    target = ModelTarget(regression, (X, Y), {"subsample_size": BATCH})
    held = HoldingOut(gradient, 10)

    def used(gradient):
        def drawn(i):
            at = gradient.at(i, jnp.asarray(5, jnp.uint32))
            return at.rows(random.key(i), target, (1, 5))[0]["rows"]

        return set(np.ravel(jax.vmap(drawn)(jnp.arange(300))).tolist())

    compared = set(np.ravel(rows_to_compare(target, 10)["rows"]).tolist())
    assert compared == set(range(9, N, 10)) and not used(held) & compared
    assert used(gradient) == set(range(N)) and used(held) == set(range(N)) - compared


def test_rows_to_compare_are_spread_over_the_plate():
    target = ModelTarget(regression, (X, Y), {"subsample_size": 30})
    rows = np.asarray(rows_to_compare(target, None)["rows"])
    assert rows.shape == (6, 30) and len(np.unique(rows)) == 180 and rows.max() > 190
    few = np.asarray(rows_to_compare(target, 50)["rows"])
    assert few.tolist() == [[49, 99, 149, 199]]


def test_energies_to_compare_are_of_the_likelihood_alone():
    target = ModelTarget(regression, (X, Y), {"subsample_size": BATCH})
    w = random.normal(random.key(4), (5, 3))
    rows = rows_to_compare(target, None)
    found = likelihood_energies(target, {"w": w}, rows)
    chosen = np.ravel(rows["rows"])
    expected = -N * jax.vmap(lambda w: dist.Normal(X[chosen] @ w, 0.3).log_prob(Y[chosen]).mean())(w)
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    prior = -jax.vmap(lambda w: dist.Normal(0, 10).log_prob(w).sum())(w)
    assert not np.allclose(found, expected + prior, rtol=1e-4)


@pytest.mark.parametrize("seed", [2, 5])
def test_particles_are_compared_on_the_rows_held_out(seed):
    """Held-out rows contradict all others, so on them the particles that move least predict best."""
    y = jnp.where(jnp.arange(N) % 10 == 9, -30.0, 30.0)
    by_all, by_held_out = (
        float(run(Descent(ADAGRAD, validation=v), data=(jnp.ones((N, 1)), y), seed=seed).last_state.step_size[0])
        for v in (None, 0.1)
    )
    assert by_held_out < by_all / 10


def test_a_run_says_how_its_rate_was_found():
    mcmc = run(Descent(ADAGRAD, validation=0.25))
    attrs = to_inference_data(mcmc)["posterior"].attrs
    assert attrs["step_size_rule"] == "tournament" and attrs["step_size_measured"] == "false"
    assert "validation=0.25" in attrs["dynamics"] and mcmc.sampler.findings(mcmc.last_state) == []
    # The run goes on, with the rate found.
    mcmc.post_warmup_state = mcmc.last_state
    mcmc.run(random.key(9), X, Y, subsample_size=BATCH)
    assert mcmc.last_state.step_size[0] == mcmc.post_warmup_state.step_size[0]


def test_a_plate_must_have_rows_to_hold_out():
    with pytest.raises(ValueError, match="holds out one row in 200, and plate 'rows' has 60"):
        run(Descent(ADAGRAD, validation=0.005), data=(X[:60], Y[:60]))
