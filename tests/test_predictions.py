"""Predictions against those of NumPyro and of exact mixtures; what new data are refused, and what of them is missing.

Most draws are arbitrary, for what is predicted from them does not depend on where they come from.
"""

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import pytest

import numpyro
from numpyro.contrib.control_flow import scan
import numpyro.distributions as dist
from numpyro.handlers import mask, uncondition
from numpyro.infer import Predictive, log_likelihood

from numpyro_repulsion import Rows, all_rows, predict
from numpyro_repulsion.contrib import Localized, llc
from numpyro_repulsion.plots import plot_calibration
from numpyro_repulsion.predictions import Predictions

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{words}")
    for words in ("The center is no", "The potential energy does not change")
]

N, FEWER = 60, 12
X = np.linspace(-2.0, 2.0, N, dtype=np.float32)
Y = np.asarray(0.8 * X + random.normal(random.key(0), (N,)))
NEW = jnp.array([-3.0, 0.0, 1.0, 4.0])
SEEN = np.random.default_rng(1).random(N) < 0.5
HIDDEN = np.where(SEEN, Y, 999.0)


def line(x, y=None):
    slope = numpyro.sample("slope", dist.Normal(0, 1))
    scale = numpyro.sample("scale", dist.HalfNormal(1))
    f = numpyro.deterministic("f", slope * x)
    with numpyro.plate("rows", len(x), subsample_size=min(len(x), 30)) as i:
        numpyro.sample("y", dist.Normal(f[i], scale), obs=None if y is None else y[i])


def classes(x, y=None, seen=True):
    slope = numpyro.sample("slope", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("rows", len(x)), mask(mask=seen):
        numpyro.sample("y", dist.Categorical(logits=x[:, None] * slope), obs=y)


@pytest.fixture(scope="module")
def run(pretended):
    def build(model, *args, num_samples=10, **kwargs):
        return pretended(model, *args, num_samples=num_samples, num_chains=5, **kwargs)

    return build


@pytest.fixture(scope="module")
def fitted(run):
    return run(line, jnp.asarray(X), jnp.asarray(Y), num_samples=40)


def test_moments_are_those_of_the_mixture(fitted):
    found = predict(fitted, NEW)
    draws = fitted.get_samples()
    means = np.asarray(draws["slope"], float)[:, None] * np.asarray(NEW, float)
    np.testing.assert_allclose(found.mean, means.mean(0), rtol=1e-4, atol=1e-5)
    variance = means.var(0) + (np.asarray(draws["scale"], float) ** 2).mean()
    np.testing.assert_allclose(found.sd, np.sqrt(variance), rtol=1e-4)
    assert found.replicates.shape == (200, 4) and found.probabilities is None
    assert found.observed is None and found.log_likelihood is None
    # All rows of a subsampled plate.
    assert predict(fitted, X).mean.shape == predict(fitted, X, X).log_likelihood.shape == X.shape


def test_replicates_are_draws_of_the_mixture(fitted):
    x = jnp.full((2000,), 3.0)
    found = predict(fitted, x, rng_key=random.key(5))
    mixture = dist.Normal(3.0 * fitted.get_samples()["slope"], fitted.get_samples()["scale"])
    for q in (0.05, 0.5, 0.9):
        # 2000 rows of 200 replicates each: as many values as draws from the mixture
        pooled = np.quantile(found.replicates, q)
        exact = float(mixture.cdf(pooled).mean())
        assert abs(exact - q) < 4.5 * (q * (1 - q) / found.replicates.size) ** 0.5
    assert found.quantile(0.5).shape == (2000,) and found.quantile([0.1, 0.9]).shape == (2, 2000)
    assert len(np.unique(found.replicates[:, 0])) == 200
    again = predict(fitted, x, rng_key=random.key(6))
    assert not np.array_equal(found.replicates, again.replicates)


def test_log_likelihoods_are_those_of_numpyro(fitted):
    y = jnp.array([0.0, 0.2, 1.0, 3.0])
    found = predict(fitted, NEW, y)
    # NumPyro would take the deterministic site of the old rows.
    draws = {name: value for name, value in fitted.get_samples().items() if name != "f"}
    by_numpyro = np.asarray(log_likelihood(line, draws, NEW, y)["y"], float)
    exact = np.logaddexp.reduce(by_numpyro, 0) - np.log(len(by_numpyro))
    np.testing.assert_allclose(found.log_likelihood, exact, rtol=1e-4)
    np.testing.assert_array_equal(found.observed, y)
    mean = f"mean log likelihood {found.log_likelihood.mean():.4g}"
    assert repr(found) == f"Predictions('y', 200 draws, shape (4,), {mean})"
    assert repr(predict(fitted, NEW)) == "Predictions('y', 200 draws, shape (4,))"


def test_chunks_make_no_difference_and_all_have_room(fitted, monkeypatch):
    y = jnp.zeros(4)
    whole = predict(fitted, NEW, y, num_draws=97)
    monkeypatch.setattr("numpyro_repulsion.inference_data.rows.CHUNK_SIZE", 10)
    parts = predict(fitted, NEW, y, num_draws=97)
    for name in ("mean", "sd", "log_likelihood", "replicates"):
        np.testing.assert_allclose(getattr(parts, name), getattr(whole, name), rtol=1e-5, atol=1e-6)
    assert len(parts.replicates) == 97
    monkeypatch.setattr("numpyro_repulsion.inference_data.rows.MAX_BYTES", 1000)
    with pytest.raises(ValueError, match="Lower `num_draws`"):
        predict(fitted, NEW)


def test_deterministic_sites_vary_by_the_draws_alone(fitted):
    found = predict(fitted, NEW, site="f")
    values = Predictive(line, fitted.get_samples())(random.key(0), NEW)["f"]
    np.testing.assert_allclose(found.mean, values.mean(0), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found.sd, np.asarray(values, float).std(0), rtol=1e-3, atol=1e-6)
    np.testing.assert_allclose(found.replicates, values, rtol=1e-5)
    assert (predict(fitted, NEW).sd > found.sd).all()


def test_classes_have_probabilities(run):
    y = (X > 0).astype(int) + (X > 1)
    mcmc = run(classes, X, y, num_samples=40)
    found = predict(mcmc, NEW, jnp.array([0, 0, 1, 2]))
    slope = np.asarray(mcmc.get_samples()["slope"], float)
    each = np.asarray(jax.nn.softmax(NEW[None, :, None] * slope[:, None], -1))
    np.testing.assert_allclose(found.probabilities, each.mean(0), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found.probabilities.sum(-1), 1.0, rtol=1e-5)
    np.testing.assert_allclose(
        found.log_likelihood, np.log(each.mean(0)[np.arange(4), [0, 0, 1, 2]]), rtol=1e-4, atol=1e-5
    )
    assert found.mean is None and found.sd is None
    with pytest.raises(ValueError, match="no order"):
        found.pit()
    # Hidden ones are missing, in pictures too.
    pytest.importorskip("matplotlib")
    found, alone = (
        predict(mcmc, X, np.where(SEEN, y, 0), SEEN),
        predict(mcmc, X[SEEN], y[SEEN], np.ones(SEEN.sum(), bool)),
    )
    assert (np.isnan(found.observed) == ~SEEN).all()
    legends = [plot_calibration(each).get_legend().get_texts()[0].get_text() for each in (found, alone)]
    assert legends[0] == legends[1]


def test_calibration_is_told_and_its_lack():
    """Observations from the mixture itself are covered as often as they should be; from a wider one, they are not."""
    draws, rows = 400, 3000
    rng = np.random.default_rng(1)
    replicates, observed = rng.poisson(4.0, (draws, rows)), rng.poisson(4.0, rows)
    found = Predictions("y", replicates, observed)
    for prob in (0.5, 0.9):
        assert abs(found.coverage(prob) - prob) < 4.5 * (prob * (1 - prob) / rows) ** 0.5 + 1 / draws
    counts = np.histogram(found.pit(), 10, (0, 1))[0]
    assert (abs(counts - rows / 10) < 4.5 * (rows * 0.09) ** 0.5 + rows / draws).all()
    wide = Predictions("y", replicates, 2 * observed - 4)
    assert wide.coverage(0.9) < 0.8


def test_models_of_several_sites_name_one(run):
    def two(x, y=None):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        for name in ("a", "b"):
            numpyro.sample(name, dist.StudentT(3.0, mu).expand([2]), obs=y)

    mcmc = run(two, 0.0, jnp.zeros(2))
    with pytest.raises(ValueError, match=r"one of \['a', 'b'\]; got None, and the model observes several"):
        predict(mcmc, 0.0)
    assert predict(mcmc, 0.0, site="b").mean.shape == (2,)
    with pytest.raises(ValueError, match="one of .* got 'c'"):
        predict(mcmc, 0.0, site="c")


def test_effects_of_rows_are_refused_for_other_rows(run):
    def rows(y=None, count=5):
        with numpyro.plate("rows", count):
            z = numpyro.sample("z", dist.Normal(0, 1))
            numpyro.sample("y", dist.Normal(z, 1), obs=y)

    mcmc = run(rows, jnp.zeros(5))
    assert predict(mcmc).mean.shape == (5,)
    with pytest.raises(ValueError, match="'z' has the shape \\(3,\\), and its draws have \\(5,\\)"):
        predict(mcmc, count=3)


def test_distributions_without_moments_use_replicates(run):
    def skewed(y=None):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        base = dist.TransformedDistribution(dist.Normal(mu, 0.1), dist.transforms.SigmoidTransform())
        with numpyro.plate("rows", 5):
            numpyro.sample("y", base, obs=y)

    found = predict(run(skewed, jnp.full(5, 0.6)))
    np.testing.assert_allclose(found.mean, found.replicates.mean(0), rtol=1e-5)
    assert (found.sd > 0).all()


@pytest.mark.parametrize(
    ("ask", "error", "message"),
    [
        (lambda fitted: predict(fitted, NEW, covariates=3), TypeError, "does not take these arguments"),
        (lambda fitted: predict(fitted, NEW, rng_key=3), TypeError, "PRNG key"),
        (lambda fitted: predict(fitted, NEW, num_draws=0), ValueError, "num_draws"),
        (lambda fitted: predict(fitted, NEW).quantile(5), ValueError, "from 0 to 1"),
        (lambda fitted: predict(fitted, NEW).coverage(), ValueError, "no observations"),
        (lambda fitted: predict(fitted, NEW, NEW).coverage(1.5), ValueError, "between 0 and 1"),
        (lambda fitted: predict(fitted, X, Y[:, None]), ValueError, r"shape \(60, 1\), and the site has.*y\[:, 0\]"),
    ],
)
def test_wrong_calls_say_what_to_write(fitted, ask, error, message):
    with pytest.raises(error, match=message):
        ask(fitted)


def test_replicates_have_keys_of_their_own(run):
    """Effects of new groups come from their prior, independent of the noise of the observations."""

    def groups(count=0, y=None):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        effects = [numpyro.sample(f"new {group}", dist.Normal(0, 1)) for group in range(count)]
        numpyro.sample("y", dist.Normal(mu + sum(effects), 1), obs=y)

    mcmc = run(groups, y=0.0, num_samples=200)
    for count in (1, 2):
        found = predict(mcmc, count, 0.0).replicates  # observed, so that the model draws no noise itself
        found = found - mcmc.get_samples()["mu"]
        # Were an effect the noise again, the variance would be count + 3 in place of count + 1.
        expected = count + 1.0
        assert abs(found.var() - expected) < 4.5 * expected * (2.0 / len(found)) ** 0.5


def test_latent_sites_inside_a_scan(run):
    def walk(y=None):
        def step(x, _):
            x = numpyro.sample("x", dist.Normal(0.9 * x, 0.1))
            return x, x

        _, xs = scan(step, 0.0, None, length=4)
        with numpyro.plate("times", 4):
            numpyro.sample("y", dist.Normal(xs, 0.5), obs=y)

    mcmc = run(walk, jnp.ones(4))
    found = predict(mcmc)
    np.testing.assert_allclose(found.mean, np.asarray(mcmc.get_samples()["x"], float).mean(0), rtol=1e-4, atol=1e-5)


# New data


def regression(size, batch):
    """On a plate of a size of its own, or of the length of the data."""

    def model(x, y=None):
        slope = numpyro.sample("slope", dist.Normal(0, 1))
        count = size or len(x)
        with numpyro.plate("rows", count, subsample_size=batch and min(batch, count)) as i:
            numpyro.sample("y", dist.Normal(slope * x[i], 1), obs=None if y is None else y[i])

    return model


@pytest.mark.parametrize(("batch", "kind"), [(None, np.asarray), (20, jnp.asarray), (20, Rows)])
def test_fewer_rows_than_a_plate_has_are_refused(run, batch, kind):
    mcmc = run(regression(N, batch), jnp.asarray(X), jnp.asarray(Y))
    few, of_few = kind(X[:FEWER]), kind(Y[:FEWER])
    for args in ((few,), (few, of_few), (kind(X), of_few)):
        with pytest.raises(
            (ValueError, IndexError), match=f"entry {N - 1} of an axis of length {FEWER}.* plate .rows. of size {N}"
        ):
            predict(mcmc, *args)
    assert predict(mcmc, kind(X), kind(Y)).log_likelihood.shape == (N,)
    alike = run(regression(None, batch), jnp.asarray(X), jnp.asarray(Y))
    with pytest.raises(ValueError, match=f"entry {N - 1} of an axis of length {FEWER}"):
        predict(alike, kind(X), of_few)


@pytest.mark.parametrize("kind", [np.asarray, Rows])
def test_groups_that_the_run_did_not_have_are_refused(run, kind):
    def model(group, y=None):
        effects = numpyro.sample("effects", dist.Normal(0, 1).expand([5]).to_event(1))
        with numpyro.plate("rows", len(group), subsample_size=min(20, len(group))) as i:
            numpyro.sample("y", dist.Normal(effects[group[i]], 1), obs=None if y is None else y[i])

    mcmc = run(model, jnp.arange(N) % 5, jnp.asarray(Y))
    assert predict(mcmc, kind(np.arange(5))).mean.shape == (5,)
    for wrong, where in (([1, 2, 3, 4, 5], "row 4 "), ([0, 1, 9, 2], "row 2 "), ([0, -7], "row 1 ")):
        with pytest.raises(ValueError, match=f"of an axis of length 5, which does not exist, in {where}"):
            predict(mcmc, kind(np.array(wrong)))


@pytest.mark.parametrize("batch", [None, 5])
def test_arrays_of_numpy_are_indexed_in_full_plates(run, batch):
    model = regression(None, batch)
    mcmc = run(model, X, Y)
    known, found = (predict(mcmc, kind(X[:FEWER]), kind(Y[:FEWER])) for kind in (jnp.asarray, np.asarray))
    np.testing.assert_allclose(found.log_likelihood, known.log_likelihood, rtol=1e-5)
    drawn = Predictive(uncondition(all_rows(model)), mcmc.get_samples())(random.key(0), X[:FEWER], Y[:FEWER])
    assert drawn["y"].shape == (50, FEWER)


def test_values_of_param_sites_are_those_of_the_run(run):
    def model(x, y):
        slope = numpyro.sample("slope", dist.Normal(0, 1))
        level = numpyro.param("level", jnp.mean(y))
        with numpyro.plate("rows", len(x)):
            numpyro.sample("y", dist.Normal(level + slope * x, 1), obs=y)

    found = predict(run(model, jnp.asarray(X), jnp.asarray(Y) + 5.0), jnp.zeros(3), jnp.zeros(3))
    np.testing.assert_allclose(found.mean, np.mean(Y) + 5.0, rtol=1e-4)


def larger(count, y=None):
    mean = numpyro.sample("mean", dist.Normal(0, 1))
    with numpyro.plate("rows", count, subsample_size=20) as i:
        numpyro.sample("y", dist.Normal(mean, 1), obs=None if y is None else y[i])


def shaped(y=None):
    b = numpyro.sample("b", dist.Normal(0, 1), sample_shape=(3,))
    numpyro.sample("y", dist.Normal(b.sum(), 1).expand([N]), obs=y)


def shared(y):
    numpyro.sample("y", dist.Normal(numpyro.sample("mean", dist.Normal(0, 1)), 1.0), obs=y)


@pytest.mark.parametrize(
    ("model", "args", "new", "shape"),
    [(larger, (N, Y), (FEWER,), (FEWER,)), (shaped, (Y,), (), (N,)), (shared, (Y,), (Y,), ())],
    ids=["a subsample larger than new data", "a sample shape", "one distribution of all observations"],
)
def test_sites_of_other_shapes(run, model, args, new, shape):
    found = predict(run(model, *args), *new)
    assert found.mean.shape == shape and (model is not shared or found.log_likelihood.shape == (N,))


def masked(how):
    def model(x, y=None, seen=None):
        slope = numpyro.sample("slope", dist.Normal(0, 1))
        with numpyro.plate("rows", len(x), subsample_size=None if how in ("obs_mask", "parts") else 20) as i:
            known = jnp.ones(len(i), bool) if seen is None else seen[i]
            obs = None if y is None else y[i]
            fn = dist.Normal(slope * x[i], 1)
            if how == "handler":
                with mask(mask=known):
                    numpyro.sample("y", fn, obs=obs)
            elif how == "obs_mask":
                numpyro.sample("y", fn, obs=obs, obs_mask=known)
            else:  # a pair, of which the first is hidden in some rows
                both = jnp.stack([known, jnp.ones_like(known)], -1)
                pair = dist.Normal((slope * x[i])[:, None], 1).expand([len(i), 2]).mask(both)
                numpyro.sample("y", pair.to_event(1), obs=None if y is None else jnp.stack([obs, obs], -1))

    return model


@pytest.mark.parametrize("how", ["handler", "obs_mask"])
def test_hidden_observations_are_missing(run, how):
    mcmc = run(masked(how), jnp.asarray(X), jnp.asarray(HIDDEN), jnp.asarray(SEEN), num_samples=100)
    site = "y_observed" if how == "obs_mask" else "y"
    found = predict(mcmc, X, HIDDEN, SEEN, site=site)
    assert (np.isnan(found.log_likelihood) == ~SEEN).all() and (np.isnan(found.observed) == ~SEEN).all()
    assert (np.isnan(found.pit()) == ~SEEN).all()
    right = found.log_likelihood[SEEN].mean()
    assert f"mean log likelihood {right:.4g}, {SEEN.sum()} of {N} observed" in repr(found)
    exact = dist.Normal(np.asarray(mcmc.get_samples()["slope"], float)[:, None] * X[SEEN], 1).log_prob(Y[SEEN])
    np.testing.assert_allclose(right, (np.logaddexp.reduce(np.asarray(exact), 0) - np.log(500)).mean(), rtol=1e-4)
    # Without the hidden ones from the start.
    if how == "handler":
        alone = predict(mcmc, X[SEEN], Y[SEEN], np.ones(SEEN.sum(), bool), site=site)
        assert abs(alone.coverage(0.9) - found.coverage(0.9)) < 0.1 and "observed" not in repr(alone)
    with pytest.raises(ValueError, match="no observations"):
        predict(mcmc, X, HIDDEN, np.zeros(N, bool), site=site).coverage()


def test_events_that_are_hidden_in_part(run):
    found = predict(run(masked("parts"), jnp.asarray(X), jnp.asarray(Y), jnp.asarray(SEEN)), X, Y, SEEN)
    assert found.observed.shape == (N, 2) and not np.isnan(found.log_likelihood).any()
    assert (np.isnan(found.observed[:, 0]) == ~SEEN).all() and not np.isnan(found.observed[:, 1]).any()
    assert np.isnan(found.pit()).sum() == (~SEEN).sum()


def test_missing_values_are_missing(run):
    mcmc = run(regression(None, 20), X, Y)
    found = predict(mcmc, X, np.where(SEEN, Y, np.nan))
    known = predict(mcmc, X, Y)
    np.testing.assert_allclose(np.nanmean(found.log_likelihood), known.log_likelihood[SEEN].mean(), rtol=1e-5)
    assert f"{SEEN.sum()} of {N} observed" in repr(found) and "observed" not in repr(known)


@pytest.mark.parametrize("how", ["handler", "parts", "factor"])
def test_the_number_of_terms_leaves_hidden_ones_out(run, how):
    def factor(x, y, seen):
        slope = numpyro.sample("slope", dist.Normal(0, 1))
        with numpyro.plate("rows", len(x)), mask(mask=seen):
            numpyro.factor("of y", -0.5 * (y - slope * x) ** 2)

    model = factor if how == "factor" else masked(how)
    factors = ["of y"] if how == "factor" else None
    local = Localized(model, center={"slope": 0.8}, strength=1.0, inverse_temperature=0.1, factors=factors)
    mcmc = run(local, jnp.asarray(X), jnp.asarray(HIDDEN), jnp.asarray(SEEN))
    # A pair of which one is known counts.
    assert llc(mcmc).n == (N if how == "parts" else SEEN.sum())
