"""New data are checked like those of a run, and hidden observations are missing."""

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import pytest
from results import run as ran

import numpyro
import numpyro.distributions as dist
from numpyro.handlers import mask, uncondition
from numpyro.infer import Predictive

from numpyro_repulsion import SGLD, Rows, all_rows, init_around, predict
from numpyro_repulsion.contrib import Localized, llc
from numpyro_repulsion.plots import plot_calibration

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{words}")
    for words in ("Warmup found problems", "num_warmup", "The center is no", "The potential energy does not change")
]

N, NEW = 60, 12
X = np.linspace(-2.0, 2.0, N)
Y = 0.8 * X + np.random.default_rng(0).normal(size=N)
SEEN = np.random.default_rng(1).random(N) < 0.5
HIDDEN = np.where(SEEN, Y, 999.0)


def run(model, *args, init=None, **given):
    strategy = {} if init is None else {"init_strategy": init}
    kernel = SGLD(model, step_size=1e-3, **strategy)
    return ran(kernel, *args, num_warmup=20, num_chains=5, **({"num_samples": 10} | given))


def line(size, batch):
    """A regression on a plate of a size of its own, or of the length of the data."""

    def model(x, y=None):
        slope = numpyro.sample("slope", dist.Normal(0, 1))
        count = size or len(x)
        with numpyro.plate("rows", count, subsample_size=batch and min(batch, count)) as i:
            numpyro.sample("y", dist.Normal(slope * x[i], 1), obs=None if y is None else y[i])

    return model


@pytest.mark.parametrize("batch", [None, 20])
@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray, Rows])
def test_fewer_rows_than_a_plate_has_are_refused(batch, kind):
    mcmc = run(line(N, batch), jnp.asarray(X), jnp.asarray(Y))
    for args in ((kind(X[:NEW]),), (kind(X[:NEW]), kind(Y[:NEW])), (kind(X), kind(Y[:NEW]))):
        with pytest.raises(
            (ValueError, IndexError), match=f"entry {N - 1} of an axis of length {NEW}.* plate .rows. of size {N}"
        ):
            predict(mcmc, *args)
    assert predict(mcmc, kind(X), kind(Y)).log_likelihood.shape == (N,)
    alike = run(line(None, batch), jnp.asarray(X), jnp.asarray(Y))
    with pytest.raises(ValueError, match=f"entry {N - 1} of an axis of length {NEW}"):
        predict(alike, kind(X), kind(Y[:NEW]))


@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray, Rows])
def test_groups_that_the_run_did_not_have_are_refused(kind):
    def model(group, y=None):
        effects = numpyro.sample("effects", dist.Normal(0, 1).expand([5]).to_event(1))
        with numpyro.plate("rows", len(group), subsample_size=min(20, len(group))) as i:
            numpyro.sample("y", dist.Normal(effects[group[i]], 1), obs=None if y is None else y[i])

    mcmc = run(model, jnp.arange(N) % 5, jnp.asarray(Y))
    assert predict(mcmc, kind(np.arange(5))).mean.shape == (5,)
    for wrong, where in (
        (np.arange(1, 6), "row 4 "),
        (np.array([0, 1, 9, 2]), "row 2 "),
        (np.array([0, -7]), "row 1 "),
    ):
        with pytest.raises(ValueError, match=f"of an axis of length 5, which does not exist, in {where}"):
            predict(mcmc, kind(wrong))


@pytest.mark.parametrize("batch", [None, 5, 20])
def test_arrays_of_numpy_are_indexed_in_full_plates(batch):
    model = line(None, batch)
    mcmc = run(model, X, Y)
    for count in (1, NEW, N):
        known = predict(mcmc, jnp.asarray(X[:count]), jnp.asarray(Y[:count]))
        found = predict(mcmc, X[:count], Y[:count])
        np.testing.assert_allclose(found.log_likelihood, known.log_likelihood, rtol=1e-5)
        drawn = Predictive(uncondition(all_rows(model)), mcmc.get_samples())(random.key(0), X[:count], Y[:count])
        assert drawn["y"].shape == (50, count)


def test_a_subsample_may_be_larger_than_the_new_data():
    def model(count, y=None):
        mean = numpyro.sample("mean", dist.Normal(0, 1))
        with numpyro.plate("rows", count, subsample_size=20) as i:
            numpyro.sample("y", dist.Normal(mean, 1), obs=None if y is None else y[i])

    assert predict(run(model, N, jnp.asarray(Y)), NEW).mean.shape == (NEW,)


def test_values_of_param_sites_are_those_of_the_run():
    def model(x, y):
        slope = numpyro.sample("slope", dist.Normal(0, 1))
        level = numpyro.param("level", jnp.mean(y))
        with numpyro.plate("rows", len(x)):
            numpyro.sample("y", dist.Normal(level + slope * x, 1), obs=y)

    mcmc = run(model, jnp.asarray(X), jnp.asarray(Y) + 5.0)
    found = predict(mcmc, jnp.zeros(3), jnp.zeros(3))
    np.testing.assert_allclose(found.mean, np.mean(Y) + 5.0, rtol=1e-4)


def test_sites_with_a_sample_shape():
    def model(y=None):
        b = numpyro.sample("b", dist.Normal(0, 1), sample_shape=(3,))
        numpyro.sample("y", dist.Normal(b.sum(), 1).expand([N]), obs=y)

    assert predict(run(model, jnp.asarray(Y))).mean.shape == (N,)


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
            elif how == "distribution":
                numpyro.sample("y", fn.mask(known), obs=obs)
            elif how == "obs_mask":
                numpyro.sample("y", fn, obs=obs, obs_mask=known)
            elif how == "events":
                numpyro.sample("y", fn.expand_by([2]).to_event(1).mask(known).expand([len(i)]), obs=obs)
            else:  # a pair, of which the first is hidden in some rows
                both = jnp.stack([known, jnp.ones_like(known)], -1)
                pair = dist.Normal((slope * x[i])[:, None], 1).expand([len(i), 2]).mask(both)
                numpyro.sample("y", pair.to_event(1), obs=None if y is None else jnp.stack([obs, obs], -1))

    return model


@pytest.mark.parametrize("how", ["handler", "distribution", "obs_mask"])
def test_hidden_observations_are_missing(how):
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
    alone = predict(mcmc, X[SEEN], Y[SEEN], np.ones(SEEN.sum(), bool), site=site) if how != "obs_mask" else None
    if alone is not None:
        assert abs(alone.coverage(0.9) - found.coverage(0.9)) < 0.1 and "observed" not in repr(alone)
    with pytest.raises(ValueError, match="no observations"):
        predict(mcmc, X, HIDDEN, np.zeros(N, bool), site=site).coverage()


def test_events_that_are_hidden_in_part():
    mcmc = run(masked("parts"), jnp.asarray(X), jnp.asarray(Y), jnp.asarray(SEEN))
    found = predict(mcmc, X, Y, SEEN)
    assert found.observed.shape == (N, 2) and not np.isnan(found.log_likelihood).any()
    assert (np.isnan(found.observed[:, 0]) == ~SEEN).all() and not np.isnan(found.observed[:, 1]).any()
    assert np.isnan(found.pit()).sum() == (~SEEN).sum()


def test_masks_that_move_with_the_draws_are_part_of_the_model():
    def model(y):
        mean = numpyro.sample("mean", dist.Normal(0, 1))
        with numpyro.plate("rows", N), mask(mask=y > mean - 0.5):
            numpyro.sample("y", dist.Normal(mean, 1), obs=y)

    y = jnp.asarray(Y)
    mcmc = run(model, y)
    found, lowest = predict(mcmc, y), float(mcmc.get_samples()["mean"].min()) - 0.5
    assert (np.isnan(found.log_likelihood) == (np.float32(Y) <= lowest)).all()


def test_hidden_classes_are_missing():
    pytest.importorskip("matplotlib")

    def model(x, y, seen):
        slope = numpyro.sample("slope", dist.Normal(0, 1).expand([3]).to_event(1))
        with numpyro.plate("rows", len(x)), mask(mask=seen):
            numpyro.sample("y", dist.Categorical(logits=x[:, None] * slope), obs=y)

    y = (X > 0).astype(int) + (X > 1)
    mcmc = run(model, jnp.asarray(X), jnp.where(SEEN, y, 0), jnp.asarray(SEEN))
    found, alone = (
        predict(mcmc, X, np.where(SEEN, y, 0), SEEN),
        predict(mcmc, X[SEEN], y[SEEN], np.ones(SEEN.sum(), bool)),
    )
    assert (np.isnan(found.observed) == ~SEEN).all()
    legends = [plot_calibration(each).get_legend().get_texts()[0].get_text() for each in (found, alone)]
    assert legends[0] == legends[1]


def test_missing_values_are_missing():
    mcmc = run(line(None, 20), X, Y)
    found = predict(mcmc, X, np.where(SEEN, Y, np.nan))
    known = predict(mcmc, X, Y)
    np.testing.assert_allclose(np.nanmean(found.log_likelihood), known.log_likelihood[SEEN].mean(), rtol=1e-5)
    assert f"{SEEN.sum()} of {N} observed" in repr(found) and "observed" not in repr(known)


@pytest.mark.parametrize("how", ["handler", "distribution", "parts", "factor"])
def test_the_number_of_terms_leaves_hidden_ones_out(how):
    def factor(x, y, seen):
        slope = numpyro.sample("slope", dist.Normal(0, 1))
        with numpyro.plate("rows", len(x)), mask(mask=seen):
            numpyro.factor("of y", -0.5 * (y - slope * x) ** 2)

    model = factor if how == "factor" else masked(how)
    factors = ["of y"] if how == "factor" else None
    local = Localized(model, center={"slope": 0.8}, strength=1.0, inverse_temperature=0.1, factors=factors)
    mcmc = run(local, jnp.asarray(X), jnp.asarray(HIDDEN), jnp.asarray(SEEN), init=init_around({"slope": 0.8}))
    # A pair of which one is known counts.
    assert llc(mcmc).n == (N if how == "parts" else SEEN.sum())


def test_predictions_are_in_the_precision_of_the_run():
    """On accelerators JAX rounds the factors of matrix products unless told."""
    used = []

    def model(x, y=None):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
        used.append(jax.config.jax_default_matmul_precision)
        numpyro.sample("y", dist.Normal(x @ w, 1), obs=y)

    mcmc = run(model, jnp.ones((4, 2)), jnp.ones(4))
    used.clear()
    predict(mcmc, jnp.ones((3, 2)))
    assert used[-1] == "highest"
