"""Prior and posterior predictive draws of runs with minibatches, on whichever ArviZ is installed."""

import importlib.metadata
import warnings

import arviz
import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import numpyro
from numpyro.contrib.control_flow import scan
import numpyro.distributions as dist
from numpyro.handlers import uncondition
from numpyro.infer import Predictive

from numpyro_repulsion import SVGD, all_rows, to_inference_data
from numpyro_repulsion.inference_data import rows

ROWS, BATCH, NOISE = 40, 8, 0.5
NEW_ARVIZ = int(importlib.metadata.version("arviz").split(".")[0]) >= 1
X = np.asarray(random.normal(random.key(1), (ROWS, 2)))
Y = np.asarray(random.normal(random.key(0), (ROWS,))) + 10.0


def regression(X, y):
    beta = numpyro.sample("beta", dist.Normal(1, 2).expand([2]).to_event(1))
    with numpyro.plate("rows", len(X), subsample_size=BATCH) as i:
        mean = numpyro.deterministic("mean", X[i] @ beta)
        y = numpyro.sample("y", dist.Normal(mean, NOISE), obs=y[i])
    numpyro.deterministic("largest", y.max())
    numpyro.deterministic("sum", beta.sum())


@pytest.fixture(scope="module")
def mcmc(pretended):
    return pretended(regression, X, Y, num_samples=100)


@pytest.fixture(scope="module")
def data(mcmc):
    return to_inference_data(mcmc, posterior_predictive=random.key(1), prior=random.key(2))


def z_of_mean(draws, mean, sd):
    return float((np.mean(draws) - mean) / (sd / np.sqrt(np.size(draws))))


def z_of_square(draws, sd):
    """Of the mean square of draws from N(0, sd²)."""
    return z_of_mean(np.asarray(draws) ** 2, sd**2, sd**2 * np.sqrt(2.0))


def test_replicates_over_all_rows(mcmc, data):
    found = data["posterior_predictive"]["y"]
    assert found.dims == ("chain", "draw", "rows") and found.shape == (4, 100, ROWS)
    means = np.einsum("ij,cdj->cdi", X, mcmc.get_samples(group_by_chain=True)["beta"])
    residuals = found.values - means
    assert abs(z_of_mean(residuals, 0.0, NOISE)) <= 4.5
    assert abs(z_of_square(residuals, NOISE)) <= 4.5
    # Every draw and row has noise of its own.
    assert abs(z_of_square(residuals.mean((0, 1)), NOISE / 20)) <= 4.5
    assert abs(z_of_square(residuals.mean(2), NOISE / ROWS**0.5)) <= 4.5
    assert stats.kstest(residuals.ravel(), stats.norm(0, NOISE).cdf).pvalue > 1e-5
    assert abs(z_of_square(Y - means, NOISE)) > 9, "control: the observations in the place of replicates"
    assert abs(z_of_mean(np.roll(found.values, 1, -1) - means, 0.0, NOISE)) > 9 or (
        abs(z_of_square(np.roll(found.values, 1, -1) - means, NOISE)) > 9
    ), "control: rows out of order"
    flat = {"beta": mcmc.get_samples()["beta"]}
    of_numpyro = Predictive(uncondition(regression), flat)(random.key(0), jnp.asarray(X), jnp.asarray(Y))
    assert of_numpyro["y"].shape[-1] == BATCH, "control: a minibatch"


def test_statistics_of_replicates(data):
    predicted = data["posterior_predictive"]
    assert set(predicted.data_vars) == {"y", "largest"}
    np.testing.assert_allclose(predicted["largest"].values, predicted["y"].values.max(-1), rtol=1e-6)
    assert "mean" in data["posterior"].data_vars


def test_prior(data):
    assert set(data["prior"].data_vars) == {"beta", "mean", "sum"}
    assert set(data["prior_predictive"].data_vars) == {"y", "largest"}
    assert data["prior"]["beta"].shape == (1, 1000, 2)
    assert data["prior"]["mean"].dims == ("chain", "draw", "rows")
    beta, y = data["prior"]["beta"].values[0], data["prior_predictive"]["y"].values[0]
    for j in range(2):
        assert abs(z_of_mean(beta[:, j], 1.0, 2.0)) <= 4.5
        assert abs(z_of_square(beta[:, j] - 1.0, 2.0)) <= 4.5
    np.testing.assert_allclose(data["prior"]["mean"].values[0], beta @ X.T, rtol=1e-4, atol=1e-5)
    assert abs(z_of_square(y - beta @ X.T, NOISE)) <= 4.5
    # Closed form of the prior predictive of one row.
    sd = np.sqrt(4.0 * (X**2).sum(-1) + NOISE**2)
    z = [z_of_square((y[:, i] - X[i].sum()), sd[i]) for i in range(ROWS)]
    assert max(np.abs(z)) <= 5
    assert abs(z_of_mean(Y, X[0].sum(), sd[0])) > 9, "control: the data, which the prior does not expect"


def test_keys_decide(mcmc, data):
    again = to_inference_data(mcmc, posterior_predictive=random.key(1), prior=random.key(3))
    np.testing.assert_array_equal(again["posterior_predictive"]["y"].values, data["posterior_predictive"]["y"].values)
    assert np.all(again["prior"]["beta"].values != data["prior"]["beta"].values)
    old = to_inference_data(mcmc, posterior_predictive=random.PRNGKey(1))
    assert old["posterior_predictive"]["y"].shape == (4, 100, ROWS)


@pytest.mark.slow
def test_draws_of_numpyro_are_taken(mcmc):
    samples = {"beta": mcmc.get_samples()["beta"]}
    whole = uncondition(all_rows(regression))
    replicates = Predictive(whole, samples)(random.key(0), X, Y)
    grouped = {"y": np.asarray(replicates["y"]).reshape(4, 100, ROWS)}
    new = np.asarray(random.normal(random.key(5), (3, 2)))
    new = np.concatenate([new] * 4)  # as many rows as a minibatch, at least
    predictions = Predictive(whole, samples)(random.key(0), new, jnp.zeros(12))
    prior = Predictive(whole, num_samples=50)(random.key(0), X, Y)
    for given in (replicates, grouped):
        data = to_inference_data(
            mcmc,
            posterior_predictive=given,
            predictions=predictions,
            prior=prior,
            coords={"rows": np.arange(ROWS) * 2, "part": ["a", "b"]},
            dims={"X": ["rows", "part"]},
            constant_data={"X": X},
            predictions_constant_data={"X": new},
        )
        np.testing.assert_array_equal(data["posterior_predictive"]["y"].values, grouped["y"])
    assert data["predictions"]["y"].dims == ("chain", "draw", "rows")
    assert data["predictions"]["y"].shape == (4, 100, 12)
    np.testing.assert_array_equal(data["predictions"]["y"].coords["rows"].values, np.arange(12))
    assert data["prior"]["beta"].shape == (1, 50, 2) and data["prior_predictive"]["y"].shape == (1, 50, ROWS)
    assert data["constant_data"]["X"].dims == data["predictions_constant_data"]["X"].dims == ("rows", "part")
    assert list(data["constant_data"]["X"].coords["rows"].values[:2]) == [0, 2]


def test_draws_of_a_wrong_shape_are_refused(mcmc):
    with pytest.raises(
        ValueError, match="'y' for each of the 4 × 100 draws.*\\(400, ...\\) or \\(4, 100, ...\\).*\\(399, 2\\)"
    ):
        to_inference_data(mcmc, posterior_predictive={"y": np.ones((399, 2))})


@pytest.mark.parametrize("name", ["posterior_predictive", "prior"])
def test_anything_but_keys_and_draws_is_refused_and_too_much(mcmc, monkeypatch, name):
    for given in (True, "key"):
        with pytest.raises(TypeError, match=f"`{name}` must be a PRNG key such as random.key.*got {given!r}"):
            to_inference_data(mcmc, **{name: given})
    monkeypatch.setattr(rows, "MAX_BYTES", 4 * 400 * ROWS - 1)
    with pytest.raises(ValueError, match=f"over all rows would take.*Leave {name}=None"):
        to_inference_data(mcmc, deterministic=False, **{name: random.key(0)})


@pytest.mark.slow
def test_last_cloud_of_an_optimizer(pretended):
    mcmc = pretended(regression, X, Y, kernel=SVGD)
    flat = {"y": mcmc.get_samples()["beta"][:, 0]}
    data = to_inference_data(mcmc, posterior_predictive=random.key(0), predictions=flat)
    assert data["posterior_predictive"]["y"].shape == (1, 4, ROWS)
    np.testing.assert_array_equal(data["predictions"]["y"].values, data["posterior"]["beta"].values[..., 0])


def test_all_rows_takes_the_scale_off_and_leaves_fixed_rows_alone():
    def traced(model):
        return numpyro.handlers.trace(numpyro.handlers.seed(model, 0)).get_trace(X, Y)["y"]

    whole = traced(all_rows(regression))
    np.testing.assert_array_equal(whole["value"], Y)
    assert whole["scale"] is None
    np.testing.assert_array_equal(jax.jit(lambda: traced(all_rows(regression))["value"])(), Y)
    fixed = numpyro.handlers.substitute(regression, {"rows": jnp.arange(8, 16)})
    for model in (all_rows(fixed), uncondition(all_rows(fixed))):
        assert traced(model)["value"].shape == (8,) and traced(model)["scale"] == ROWS / 8


def test_observed_values_that_depend_on_latent_sites_are_no_data(pretended):
    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with numpyro.plate("rows", ROWS):
            numpyro.sample("residual", dist.Normal(0, 1), obs=y - mu)
            numpyro.sample("y", dist.Normal(mu, 1), obs=y)

    with pytest.warns(UserWarning, match="observed sites \\['residual'\\] depend on latent sites"):
        data = to_inference_data(pretended(model, jnp.asarray(Y)))
    assert set(data["observed_data"].data_vars) == {"y"}


def test_discrete_latent_sites(pretended):
    def mixture(y):
        mu = numpyro.sample("mu", dist.Normal(0, 1).expand([2]).to_event(1))
        with numpyro.plate("rows", ROWS):
            which = numpyro.sample("which", dist.Bernoulli(0.5), infer={"enumerate": "parallel"})
            numpyro.sample("y", dist.Normal(mu[which], 1), obs=y)

    mcmc = pretended(mixture, jnp.asarray(Y))
    with pytest.raises(ValueError, match="\\['which'\\] are summed over.*infer_discrete=True"):
        to_inference_data(mcmc, posterior_predictive=random.key(0))
    data = to_inference_data(mcmc, prior=random.key(0))
    assert data["prior"]["which"].dims == ("chain", "draw", "rows")


def test_observed_inside_scan_is_refused(pretended):
    def series(y):
        phi = numpyro.sample("phi", dist.Normal(0, 1))
        scan(lambda last, new: (new, numpyro.sample("y", dist.Normal(phi * last, 1), obs=new)), 0.0, y)

    mcmc = pretended(series, jnp.asarray(Y))
    for name in ("posterior_predictive", "prior"):
        with pytest.raises(ValueError, match=f"\\['y'\\] are observed inside a `scan` or `cond`.*`{name}`"):
            to_inference_data(mcmc, **{name: random.key(0)})
    found = to_inference_data(mcmc, log_likelihood=True)["log_likelihood"]["y"].values
    phi = np.asarray(mcmc.get_samples(group_by_chain=True)["phi"])[..., None]
    expected = stats.norm(phi * np.concatenate([[0.0], Y[:-1]]), 1).logpdf(Y)
    np.testing.assert_allclose(found, expected, rtol=1e-4)


@pytest.mark.slow
def test_priors_without_draws_and_factors(pretended):
    def improper(y):
        mu = numpyro.sample("mu", dist.ImproperUniform(dist.constraints.real, (), ()))
        numpyro.factor("penalty", -(mu**2))
        with numpyro.plate("rows", ROWS):
            numpyro.sample("y", dist.Normal(mu, 1), obs=y)

    def proper(y):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        numpyro.factor("penalty", -(mu**2))
        with numpyro.plate("rows", ROWS):
            numpyro.sample("y", dist.Normal(mu, 1), obs=y)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ValueError, match="cannot be drawn from: a site has no sampler"):
            to_inference_data(pretended(improper, jnp.asarray(Y)), prior=random.key(0))
        everything = to_inference_data(
            pretended(improper, jnp.asarray(Y)), log_likelihood=True, posterior_predictive=random.key(0)
        )
    assert everything["observed_data"]["y"].shape == (ROWS,)
    with pytest.warns(UserWarning, match="ignore the factors \\['penalty'\\]"):
        to_inference_data(pretended(proper, jnp.asarray(Y)), prior=random.key(0))


@pytest.mark.slow
def test_random_models_have_fresh_randomness_in_every_replicate(pretended):
    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        noise = random.normal(numpyro.prng_key(), (ROWS,))
        with numpyro.plate("rows", ROWS):
            numpyro.sample("y", dist.Normal(mu + noise, 0.01), obs=y)

    mcmc = pretended(model, jnp.asarray(Y), num_samples=50)
    y = to_inference_data(mcmc, posterior_predictive=random.key(0))["posterior_predictive"]["y"].values
    residuals = y - np.asarray(mcmc.get_samples(group_by_chain=True)["mu"])[..., None]
    assert abs(z_of_square(residuals, (1.0 + 1e-4) ** 0.5)) <= 4.5


def test_loo_pit(mcmc):
    """ArviZ finds in the groups what it needs to compare replicates with observations one by one."""
    data = to_inference_data(mcmc, posterior_predictive=random.key(0), log_likelihood=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Pareto k: these draws are no posterior's
        pit = arviz.loo_pit(data)["y"].values if NEW_ARVIZ else np.asarray(arviz.loo_pit(data, y="y"))
    assert pit.shape == (ROWS,) and np.all((pit >= 0) & (pit <= 1 + 1e-6))
