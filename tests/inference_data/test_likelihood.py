"""Pointwise log likelihoods of runs with minibatches, on whichever ArviZ is installed."""

import warnings

import arviz
from jax import random
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import numpyro
import numpyro.distributions as dist
from numpyro.handlers import mask, scale
from numpyro.infer import log_likelihood

from numpyro_repulsion import all_rows, to_inference_data
from numpyro_repulsion.inference_data import rows

ROWS, BATCH = 40, 8
Y = np.asarray(random.normal(random.key(0), (ROWS,))) + 1.0
X = np.asarray(random.normal(random.key(1), (ROWS, 2)))


def regression(X, y, subsample_size=BATCH):
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([2]).to_event(1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    with numpyro.plate("rows", ROWS, subsample_size=subsample_size) as i:
        numpyro.sample("y", dist.Normal(X[i] @ beta, sigma), obs=y[i])


def values(data, name="y"):
    return data["log_likelihood"][name].values


def elpd(data, name="y"):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Pareto k, where there are few draws
        found = arviz.loo(data, var_name=name)
    return float(found.elpd if hasattr(found, "elpd") else found.elpd_loo)


def test_exact_over_all_rows(pretended, x64):
    X64, y64 = jnp.asarray(X, float), jnp.asarray(Y, float)
    mcmc = pretended(regression, X64, y64)
    data = to_inference_data(mcmc, log_likelihood=True, coords={"rows": np.arange(ROWS) + 100})
    found = data["log_likelihood"]["y"]
    assert found.dims == ("chain", "draw", "rows") and found.dtype == np.float64
    assert found.coords["rows"].values[0] == 100
    draws = mcmc.get_samples(group_by_chain=True)
    mean = np.einsum("ij,cdj->cdi", X, draws["beta"])
    np.testing.assert_allclose(found.values, stats.norm(mean, draws["sigma"][..., None]).logpdf(Y), rtol=1e-12)
    unsubsampled = log_likelihood(lambda *args: regression(*args, None), draws, X64, y64, batch_ndims=2)
    np.testing.assert_allclose(found.values, unsubsampled["y"], rtol=1e-13)
    # NumPyro's own on the model as it is: the rows of one minibatch.
    assert log_likelihood(numpyro.handlers.seed(regression, 0), draws, X64, y64, batch_ndims=2)["y"].shape[-1] == BATCH
    handled = log_likelihood(all_rows(regression), draws, X64, y64, batch_ndims=2)
    np.testing.assert_allclose(found.values, handled["y"], rtol=1e-13)
    for no in (False, []):
        other = to_inference_data(mcmc, log_likelihood=no)
        assert "log_likelihood" not in list(other.groups() if callable(other.groups) else other.children)


def test_numpyro_subsample_and_events(pretended):
    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0, 1).expand([2]).to_event(1))
        with numpyro.plate("rows", ROWS, subsample_size=BATCH):
            batch = numpyro.subsample(y, event_dim=1)
            numpyro.sample("y", dist.MultivariateNormal(mu, jnp.eye(2)), obs=batch, infer={"event_dims": ["side"]})

    mcmc = pretended(model, jnp.asarray(X))
    data = to_inference_data(mcmc, log_likelihood=["y"], coords={"side": ["left", "right"]})
    mu = mcmc.get_samples(group_by_chain=True)["mu"]
    np.testing.assert_allclose(values(data), stats.norm(mu[:, :, None], 1).logpdf(X).sum(-1), rtol=1e-5)
    assert data["log_likelihood"]["y"].dims == ("chain", "draw", "rows")
    assert data["observed_data"]["y"].dims == ("rows", "side")
    assert list(data["observed_data"]["y"].coords["side"].values) == ["left", "right"]


def test_crossed_plates_some_of_them_subsampled(pretended):
    table = jnp.asarray(random.normal(random.key(2), (5, 1, ROWS)))

    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        rows = numpyro.plate("rows", ROWS, subsample_size=BATCH, dim=-1)
        with numpyro.plate("groups", 5, dim=-3), rows as i:
            numpyro.sample("y", dist.Normal(mu, 1), obs=y[..., i])

    mcmc = pretended(model, table)
    data = to_inference_data(mcmc, log_likelihood=True)
    assert data["log_likelihood"]["y"].dims == ("chain", "draw", "groups", "y_dim_1", "rows")
    mu = np.asarray(mcmc.get_samples(group_by_chain=True)["mu"])[:, :, None, None, None]
    np.testing.assert_allclose(values(data), stats.norm(mu, 1).logpdf(table), rtol=1e-5)


HIDDEN = np.arange(ROWS) % 4 == 0


def masked(y, hidden, how):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("rows", ROWS, subsample_size=None if how == "obs_mask" else BATCH) as i:
        fn = dist.Normal(mu, 1)
        if how == "obs_mask":
            numpyro.sample("y", fn, obs=y, obs_mask=~hidden)
        elif how == "distribution":
            numpyro.sample("y", fn.expand([len(i)]).mask(~hidden[i]), obs=y[i])
        else:
            with mask(mask=~hidden[i]):
                numpyro.sample("y", fn, obs=y[i])


@pytest.mark.parametrize("how", ["handler", "distribution", "obs_mask"])
def test_masked_observations_are_left_out(pretended, how):
    mcmc = pretended(masked, jnp.asarray(Y), jnp.asarray(HIDDEN), how, num_samples=50)
    data = to_inference_data(mcmc, log_likelihood=True, posterior_predictive=random.key(1), prior=random.key(2))
    name = "y_observed" if how == "obs_mask" else "y"
    found = data["log_likelihood"][name]
    assert found.dims == ("chain", "draw", f"{name}_entry")
    np.testing.assert_array_equal(found.coords[f"{name}_entry"].values, np.flatnonzero(~HIDDEN))
    mu = np.asarray(mcmc.get_samples(group_by_chain=True)["mu"])[..., None]
    np.testing.assert_allclose(found.values, stats.norm(mu, 1).logpdf(Y[~HIDDEN]), rtol=1e-5)
    np.testing.assert_array_equal(data["observed_data"][name].values, Y[~HIDDEN])
    for group, shape in (("posterior_predictive", (4, 50)), ("prior_predictive", (1, 1000))):
        assert data[group][name].shape == (*shape, (~HIDDEN).sum())
        assert data[group][name].dims == found.dims
    if how == "obs_mask":
        # The whole series, with replicates in place of what was observed.
        assert data["posterior_predictive"]["y"].shape == (4, 50, ROWS)
    assert np.isfinite(elpd(data, name))


@pytest.mark.slow
def test_partly_masked_events_and_shapes(pretended):
    hidden = np.zeros((3, ROWS), bool)
    hidden[1, 5:] = hidden[2] = True
    both = jnp.stack([jnp.asarray(X)] * 3)

    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with numpyro.plate("groups", 3, dim=-2), numpyro.plate("rows", ROWS, dim=-1):
            with mask(mask=jnp.asarray(~hidden)):
                numpyro.sample("y", dist.Normal(mu, 1).expand([2]).to_event(1), obs=y)
            part = dist.Normal(mu, 1).expand([3, ROWS, 2]).mask(jnp.asarray([True, False])).to_event(1)
            numpyro.sample("part", part, obs=y)

    mcmc = pretended(model, both)
    data = to_inference_data(mcmc, log_likelihood=True, posterior_predictive=random.key(0))
    assert values(data).shape == (4, 6, ROWS + 5)
    np.testing.assert_array_equal(data["observed_data"]["y"].values, both[~hidden])
    assert data["posterior_predictive"]["y"].shape == (4, 6, ROWS + 5, 2)
    assert data["observed_data"]["y"].dims == ("y_entry", "y_dim_1")
    mu = np.asarray(mcmc.get_samples(group_by_chain=True)["mu"])[..., None]
    np.testing.assert_allclose(values(data), stats.norm(mu[..., None], 1).logpdf(both[~hidden]).sum(-1), rtol=1e-5)
    # A part of each event counts.
    assert values(data, "part").shape == (4, 6, 3, ROWS)
    expected = stats.norm(mu[..., None], 1).logpdf(both[..., 0])
    np.testing.assert_allclose(values(data, "part"), expected, rtol=1e-5)


@pytest.mark.slow
def test_a_mask_that_moves_with_the_draws_is_part_of_the_model(pretended):
    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with numpyro.plate("rows", ROWS), mask(mask=y > mu):
            numpyro.sample("y", dist.Normal(mu, 1), obs=y)

    mcmc = pretended(model, jnp.asarray(Y))
    found = to_inference_data(mcmc, log_likelihood=True)["log_likelihood"]["y"]
    assert found.dims == ("chain", "draw", "rows")
    mu = np.asarray(mcmc.get_samples(group_by_chain=True)["mu"])[..., None]
    np.testing.assert_array_equal(found.values == 0.0, mu >= Y)


def with_factors(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    numpyro.factor("penalty", -(mu**2))
    with numpyro.plate("rows", ROWS, subsample_size=BATCH) as i:
        numpyro.factor("cost", -jnp.abs(y[i] - mu))
        numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])


def test_factors_are_left_out_aloud_unless_named(pretended):
    mcmc = pretended(with_factors, jnp.asarray(Y))
    with pytest.warns(UserWarning, match="factors \\['penalty', 'cost'\\] are left out"):
        data = to_inference_data(mcmc, log_likelihood=True)
    assert set(data["log_likelihood"].data_vars) == {"y"}
    data = to_inference_data(mcmc, log_likelihood=["cost"])
    mu = np.asarray(mcmc.get_samples(group_by_chain=True)["mu"])[..., None]
    np.testing.assert_allclose(values(data, "cost"), -np.abs(Y - mu), rtol=1e-5)
    assert data["log_likelihood"]["cost"].dims == ("chain", "draw", "rows")


def test_weights_are_taken_off_aloud(pretended):
    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with scale(scale=0.5), numpyro.plate("rows", ROWS, subsample_size=BATCH) as i:
            numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])

    mcmc = pretended(model, jnp.asarray(Y))
    with pytest.warns(UserWarning, match="A handler weights the sites \\['y'\\]"):
        data = to_inference_data(mcmc, log_likelihood=True)
    mu = np.asarray(mcmc.get_samples(group_by_chain=True)["mu"])[..., None]
    np.testing.assert_allclose(values(data), stats.norm(mu, 1).logpdf(Y), rtol=1e-5)


def mixture(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("rows", ROWS):
        which = numpyro.sample("which", dist.Bernoulli(0.5), infer={"enumerate": "parallel"})
        numpyro.sample("y", dist.Normal(mu[which], 1), obs=y)


def random_likelihood(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    noise = random.normal(numpyro.prng_key(), (ROWS,))
    with numpyro.plate("rows", ROWS):
        numpyro.sample("y", dist.Normal(mu + noise, 1), obs=y)


def unobserved():
    numpyro.sample("mu", dist.Normal(0, 1))


@pytest.mark.parametrize(
    ("model", "which", "error", "match"),
    [
        (mixture, True, ValueError, "\\['which'\\] are summed over.*MixtureSameFamily"),
        (random_likelihood, True, ValueError, "likelihood is random"),
        (with_factors, ["y", "z"], ValueError, "names \\['z'\\].*observes \\['y'\\], and has the factors"),
        (with_factors, "y", TypeError, "list of names.*got 'y'"),
        (with_factors, [1], TypeError, "list of names"),
        (unobserved, True, ValueError, "observes nothing"),
    ],
)
def test_what_has_no_log_likelihood_is_refused(pretended, model, which, error, match):
    mcmc = pretended(model, *([] if model is unobserved else [jnp.asarray(Y)]))
    with pytest.raises(error, match=match):
        to_inference_data(mcmc, log_likelihood=which)


def test_draws_of_all_sites_are_needed_and_room_for_results(pretended, monkeypatch):
    mcmc = pretended(regression, X, Y)
    monkeypatch.setattr(rows, "MAX_BYTES", 4 * 6 * ROWS * 4 - 1)
    with pytest.raises(
        ValueError, match="log likelihood of \\['y'\\] over all rows.*24 draws.*False or fewer.*thinning"
    ):
        to_inference_data(mcmc, log_likelihood=True)
    del mcmc._states["z"]["beta"]  # as extra_fields=("~z.beta",) does
    with pytest.raises(ValueError, match="need the draws of all latent sites \\['beta', 'sigma'\\]"):
        to_inference_data(mcmc, log_likelihood=True)


def conjugate(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("rows", ROWS, subsample_size=BATCH) as i:
        numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])


def exact_loo():
    """The sum of log N(yᵢ; posterior of the others), for prior N(0, 1) and unit noise."""
    variance = 1.0 / ROWS
    mean = (Y.sum() - Y) * variance
    return stats.norm(mean, np.sqrt(1.0 + variance)).logpdf(Y)


def test_loo_of_a_gaussian(pretended):
    mcmc = pretended(conjugate, jnp.asarray(Y), num_samples=500)
    mean, sd = Y.sum() / (ROWS + 1), (ROWS + 1) ** -0.5
    exact, scaled = [], []
    for i in range(12):
        # Independent draws from the posterior, so that its error is none of the sampler's.
        mcmc._states["z"]["mu"] = mean + sd * random.normal(random.key(i), (4, 500))
        data = to_inference_data(mcmc, log_likelihood=True)
        exact.append(elpd(data))
        data["log_likelihood"]["y"] = data["log_likelihood"]["y"] * (ROWS / BATCH)
        scaled.append(elpd(data))

    def z(found):
        return (np.mean(found) - exact_loo().sum()) / (np.std(found, ddof=1) / len(found) ** 0.5)

    assert abs(z(exact)) <= 4.5
    assert abs(z(scaled)) > 9, "control: the scale of the plate left on"
