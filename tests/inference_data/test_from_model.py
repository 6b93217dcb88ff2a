"""What comes from a model over all its rows: log likelihoods, replicates, prior draws, observed values."""

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
from numpyro.handlers import mask, scale, seed, substitute, trace, uncondition
from numpyro.infer import Predictive, log_likelihood

from numpyro_repulsion import all_rows, to_inference_data
from numpyro_repulsion.inference_data import rows

ROWS, BATCH, NOISE = 40, 8, 0.5
X = np.asarray(random.normal(random.key(1), (ROWS, 2)))
Y = np.asarray(random.normal(random.key(0), (ROWS,))) + 1.0
HIDDEN = np.arange(ROWS) % 4 == 0
#: As far from what the model expects of the rows of X as the controls need.
FAR = Y + 9.0


def regression(X, y, subsample_size=BATCH):
    beta = numpyro.sample("beta", dist.Normal(1, 2).expand([2]).to_event(1))
    with numpyro.plate("rows", len(X), subsample_size=subsample_size) as i:
        mean = numpyro.deterministic("mean", X[i] @ beta)
        y = numpyro.sample("y", dist.Normal(mean, NOISE), obs=y[i])
    numpyro.deterministic("largest", y.max())
    numpyro.deterministic("sum", beta.sum())


def conjugate(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("rows", ROWS, subsample_size=BATCH) as i:
        numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])


def mixture(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("rows", ROWS):
        which = numpyro.sample("which", dist.Bernoulli(0.5), infer={"enumerate": "parallel"})
        numpyro.sample("y", dist.Normal(mu[which], 1), obs=y)


def with_factors(y, is_proper=True):
    mu = numpyro.sample("mu", dist.Normal(0, 1) if is_proper else dist.ImproperUniform(dist.constraints.real, (), ()))
    numpyro.factor("penalty", -(mu**2))
    with numpyro.plate("rows", ROWS, subsample_size=BATCH) as i:
        numpyro.factor("cost", -jnp.abs(y[i] - mu))
        numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])


def random_likelihood(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    noise = random.normal(numpyro.prng_key(), (ROWS,))
    with numpyro.plate("rows", ROWS):
        numpyro.sample("y", dist.Normal(mu + noise, 0.01), obs=y)


@pytest.fixture(scope="module")
def mcmc(pretended):
    return pretended(regression, X, FAR, num_samples=100)


@pytest.fixture(scope="module")
def data(mcmc):
    return to_inference_data(mcmc, posterior_predictive=random.key(1), prior=random.key(2), log_likelihood=True)


def values(data, name="y"):
    return data["log_likelihood"][name].values


def of_mu(mcmc):
    """Draws of `mu`, with an axis for rows."""
    return np.asarray(mcmc.get_samples(group_by_chain=True)["mu"])[..., None]


def elpd(data, name="y"):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Pareto k, where there are few draws
        found = arviz.loo(data, var_name=name)
    return float(found.elpd if hasattr(found, "elpd") else found.elpd_loo)


# Log likelihoods


def test_log_likelihoods_are_exact_over_all_rows(pretended, x64):
    X64, y64 = jnp.asarray(X, float), jnp.asarray(Y, float)
    mcmc = pretended(regression, X64, y64)
    data = to_inference_data(mcmc, log_likelihood=True, coords={"rows": np.arange(ROWS) + 100})
    found = data["log_likelihood"]["y"]
    assert found.dims == ("chain", "draw", "rows") and found.dtype == np.float64
    assert found.coords["rows"].values[0] == 100
    draws = {"beta": mcmc.get_samples(group_by_chain=True)["beta"]}
    mean = np.einsum("ij,cdj->cdi", X, draws["beta"])
    np.testing.assert_allclose(found.values, stats.norm(mean, NOISE).logpdf(Y), rtol=1e-12)

    def by_numpyro(model, *more):
        return log_likelihood(seed(model, 0), draws, X64, y64, *more, batch_ndims=2)["y"]

    np.testing.assert_allclose(found.values, by_numpyro(regression, None), rtol=1e-13)
    np.testing.assert_allclose(found.values, by_numpyro(all_rows(regression)), rtol=1e-13)
    assert by_numpyro(regression).shape[-1] == BATCH, "control: the rows of one minibatch"
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
    np.testing.assert_allclose(values(data), stats.norm(of_mu(mcmc)[..., None, None], 1).logpdf(table), rtol=1e-5)


def masked(y, hidden, how):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("rows", ROWS, subsample_size=None if how == "obs_mask" else BATCH) as i:
        if how == "obs_mask":
            numpyro.sample("y", dist.Normal(mu, 1), obs=y, obs_mask=~hidden)
        else:
            numpyro.sample("y", dist.Normal(mu, 1).expand([len(i)]).mask(~hidden[i]), obs=y[i])


@pytest.mark.parametrize("how", ["distribution", "obs_mask"])
def test_masked_observations_are_left_out(pretended, how):
    mcmc = pretended(masked, jnp.asarray(Y), jnp.asarray(HIDDEN), how, num_samples=50)
    data = to_inference_data(mcmc, log_likelihood=True, posterior_predictive=random.key(1), prior=random.key(2))
    name = "y_observed" if how == "obs_mask" else "y"
    found = data["log_likelihood"][name]
    assert found.dims == ("chain", "draw", f"{name}_entry")
    np.testing.assert_array_equal(found.coords[f"{name}_entry"].values, np.flatnonzero(~HIDDEN))
    np.testing.assert_allclose(found.values, stats.norm(of_mu(mcmc), 1).logpdf(Y[~HIDDEN]), rtol=1e-5)
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
    np.testing.assert_array_equal(data["observed_data"]["y"].values, both[~hidden])
    assert data["posterior_predictive"]["y"].shape == (4, 6, ROWS + 5, 2)
    assert data["observed_data"]["y"].dims == ("y_entry", "y_dim_1")
    mu = of_mu(mcmc)[..., None]
    np.testing.assert_allclose(values(data), stats.norm(mu, 1).logpdf(both[~hidden]).sum(-1), rtol=1e-5)
    # A part of each event counts.
    np.testing.assert_allclose(values(data, "part"), stats.norm(mu, 1).logpdf(both[..., 0]), rtol=1e-5)


@pytest.mark.slow
def test_a_mask_that_moves_with_the_draws_is_part_of_the_model(pretended):
    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with numpyro.plate("rows", ROWS), mask(mask=y > mu):
            numpyro.sample("y", dist.Normal(mu, 1), obs=y)

    mcmc = pretended(model, jnp.asarray(Y))
    found = to_inference_data(mcmc, log_likelihood=True)["log_likelihood"]["y"]
    assert found.dims == ("chain", "draw", "rows")
    np.testing.assert_array_equal(found.values == 0.0, of_mu(mcmc) >= Y)


def test_factors_are_left_out_aloud_unless_named(pretended):
    mcmc = pretended(with_factors, jnp.asarray(Y))
    with pytest.warns(UserWarning, match="factors \\['penalty', 'cost'\\] are left out"):
        data = to_inference_data(mcmc, log_likelihood=True)
    assert set(data["log_likelihood"].data_vars) == {"y"}
    with pytest.warns(UserWarning, match="ignore the factors \\['penalty', 'cost'\\]"):
        data = to_inference_data(mcmc, log_likelihood=["cost"], prior=random.key(0))
    np.testing.assert_allclose(values(data, "cost"), -np.abs(Y - of_mu(mcmc)), rtol=1e-5)
    assert data["log_likelihood"]["cost"].dims == ("chain", "draw", "rows")


def test_weights_are_taken_off_aloud(pretended):
    mcmc = pretended(scale(conjugate, scale=0.5), jnp.asarray(Y))
    with pytest.warns(UserWarning, match="A handler weights the sites \\['y'\\]"):
        data = to_inference_data(mcmc, log_likelihood=True)
    np.testing.assert_allclose(values(data), stats.norm(of_mu(mcmc), 1).logpdf(Y), rtol=1e-5)


@pytest.mark.parametrize(
    ("model", "which", "error", "match"),
    [
        (mixture, True, ValueError, "\\['which'\\] are summed over.*MixtureSameFamily"),
        (random_likelihood, True, ValueError, "likelihood is random"),
        (with_factors, ["y", "z"], ValueError, "names \\['z'\\].*observes \\['y'\\], and has the factors"),
        (with_factors, "y", TypeError, "list of names.*got 'y'"),
        (with_factors, [1], TypeError, "list of names"),
        (lambda y: numpyro.sample("mu", dist.Normal(0, 1)), True, ValueError, "observes nothing"),
    ],
)
def test_what_has_no_log_likelihood_is_refused(pretended, model, which, error, match):
    with pytest.raises(error, match=match):
        to_inference_data(pretended(model, jnp.asarray(Y)), log_likelihood=which)


def test_draws_of_all_sites_are_needed_and_room_for_results(pretended, monkeypatch):
    mcmc = pretended(regression, X, Y)
    monkeypatch.setattr(rows, "MAX_BYTES", 4 * 6 * ROWS * 4 - 1)
    with pytest.raises(
        ValueError, match="log likelihood of \\['y'\\] over all rows.*24 draws.*False or fewer.*thinning"
    ):
        to_inference_data(mcmc, log_likelihood=True, deterministic=False)
    for name in ("posterior_predictive", "prior"):
        with pytest.raises(ValueError, match=f"over all rows would take.*Leave {name}=None"):
            to_inference_data(mcmc, deterministic=False, **{name: random.key(0)})
    del mcmc._states["z"]["beta"]  # as extra_fields=("~z.beta",) does
    with pytest.raises(ValueError, match="need the draws of all latent sites \\['beta'\\]"):
        to_inference_data(mcmc, log_likelihood=True)


# Replicates and the prior


def z_of_mean(draws, mean, sd):
    return float((np.mean(draws) - mean) / (sd / np.sqrt(np.size(draws))))


def z_of_square(draws, sd):
    """Of the mean square of draws from N(0, sd²)."""
    return z_of_mean(np.asarray(draws) ** 2, sd**2, sd**2 * np.sqrt(2.0))


def test_replicates_over_all_rows(mcmc, data):
    predicted = data["posterior_predictive"]
    assert set(predicted.data_vars) == {"y", "largest"} and "mean" in data["posterior"].data_vars
    np.testing.assert_allclose(predicted["largest"].values, predicted["y"].values.max(-1), rtol=1e-6)
    found = predicted["y"]
    assert found.dims == ("chain", "draw", "rows") and found.shape == (4, 100, ROWS)
    means = np.einsum("ij,cdj->cdi", X, mcmc.get_samples(group_by_chain=True)["beta"])
    residuals = found.values - means
    assert abs(z_of_mean(residuals, 0.0, NOISE)) <= 4.5
    assert abs(z_of_square(residuals, NOISE)) <= 4.5
    # Every draw and row has noise of its own.
    assert abs(z_of_square(residuals.mean((0, 1)), NOISE / 20)) <= 4.5
    assert abs(z_of_square(residuals.mean(2), NOISE / ROWS**0.5)) <= 4.5
    assert stats.kstest(residuals.ravel(), stats.norm(0, NOISE).cdf).pvalue > 1e-5
    assert abs(z_of_square(FAR - means, NOISE)) > 9, "control: the observations in the place of replicates"
    assert abs(z_of_square(np.roll(found.values, 1, -1) - means, NOISE)) > 9, "control: rows out of order"


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
    assert abs(z_of_mean(FAR, X[0].sum(), sd[0])) > 9, "control: the data, which the prior does not expect"


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
    replicates = Predictive(whole, samples)(random.key(0), X, FAR)
    grouped = {"y": np.asarray(replicates["y"]).reshape(4, 100, ROWS)}
    new = np.asarray(random.normal(random.key(5), (3, 2)))
    new = np.concatenate([new] * 4)  # as many rows as a minibatch, at least
    predictions = Predictive(whole, samples)(random.key(0), new, jnp.zeros(12))
    prior = Predictive(whole, num_samples=50)(random.key(0), X, FAR)
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


def test_anything_but_keys_and_draws_of_the_run_is_refused(mcmc):
    for name in ("posterior_predictive", "prior"):
        for given in (True, "key"):
            with pytest.raises(TypeError, match=f"`{name}` must be a PRNG key such as random.key.*got {given!r}"):
                to_inference_data(mcmc, **{name: given})
    with pytest.raises(
        ValueError, match="'y' for each of the 4 × 100 draws.*\\(400, ...\\) or \\(4, 100, ...\\).*\\(399, 2\\)"
    ):
        to_inference_data(mcmc, posterior_predictive={"y": np.ones((399, 2))})


def test_all_rows_takes_the_scale_off_and_leaves_fixed_rows_alone():
    def traced(model):
        return trace(seed(model, 0)).get_trace(X, Y)["y"]

    whole = traced(all_rows(regression))
    np.testing.assert_array_equal(whole["value"], Y)
    assert whole["scale"] is None
    np.testing.assert_array_equal(jax.jit(lambda: traced(all_rows(regression))["value"])(), Y)
    fixed = substitute(regression, {"rows": jnp.arange(8, 16)})
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
    mcmc = pretended(mixture, jnp.asarray(Y))
    with pytest.raises(ValueError, match="\\['which'\\] are summed over.*infer_discrete=True"):
        to_inference_data(mcmc, posterior_predictive=random.key(0))
    data = to_inference_data(mcmc, prior=random.key(0))
    assert data["prior"]["which"].dims == ("chain", "draw", "rows")


def test_observed_inside_scan_is_refused(pretended):
    def series(y):
        phi = numpyro.sample("mu", dist.Normal(0, 1))
        scan(lambda last, new: (new, numpyro.sample("y", dist.Normal(phi * last, 1), obs=new)), 0.0, y)

    mcmc = pretended(series, jnp.asarray(Y))
    for name in ("posterior_predictive", "prior"):
        with pytest.raises(ValueError, match=f"\\['y'\\] are observed inside a `scan` or `cond`.*`{name}`"):
            to_inference_data(mcmc, **{name: random.key(0)})
    found = to_inference_data(mcmc, log_likelihood=True)["log_likelihood"]["y"].values
    expected = stats.norm(of_mu(mcmc) * np.concatenate([[0.0], Y[:-1]]), 1).logpdf(Y)
    np.testing.assert_allclose(found, expected, rtol=1e-4)


@pytest.mark.slow
def test_priors_without_draws(pretended):
    mcmc = pretended(with_factors, jnp.asarray(Y), is_proper=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ValueError, match="cannot be drawn from: a site has no sampler"):
            to_inference_data(mcmc, prior=random.key(0))
        everything = to_inference_data(mcmc, log_likelihood=True, posterior_predictive=random.key(0))
    assert everything["observed_data"]["y"].shape == (ROWS,)


@pytest.mark.slow
def test_random_models_have_fresh_randomness_in_every_replicate(pretended):
    mcmc = pretended(random_likelihood, jnp.asarray(Y), num_samples=50)
    y = to_inference_data(mcmc, posterior_predictive=random.key(0))["posterior_predictive"]["y"].values
    assert abs(z_of_square(y - of_mu(mcmc), (1.0 + 1e-4) ** 0.5)) <= 4.5
