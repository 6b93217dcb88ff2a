"""Summaries of runs: the numbers of ensembles, and the sentence. On ArviZ 0.23 and on 1.x."""

from functools import partial
import importlib.metadata
import warnings

import arviz
import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import pytest
from results import X, Y

import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC

from numpyro_repulsion import (
    SGLD,
    SVRG,
    ControlVariates,
    FullData,
    Independent,
    Subsampled,
    ensemble_ess,
    ensemble_mcse,
    nested_rhat,
    report,
    step_bias,
    summary,
    to_inference_data,
)
from numpyro_repulsion.kernels import has_other_data

NEW_ARVIZ = int(importlib.metadata.version("arviz").split(".")[0]) >= 1


@pytest.fixture(scope="module")
def mcmc(logistic_run):
    return logistic_run[0]


@pytest.fixture(scope="module")
def data(logistic_run):
    return logistic_run[1]


@pytest.mark.parametrize("from_data", [False, True])
def test_summary(mcmc, data, from_data, capsys):
    table = summary(data if from_data else mcmc, var_names=["beta", "total"])
    assert len(table) == 4
    text = capsys.readouterr().out
    assert "SGLDR: 6 particles in 2 ensembles, 10 updates of size 0.001 per draw. No update was held" in text


def test_summary_is_of_ensembles(mcmc, data):
    table = summary(data)
    labels = [f"beta[{i}]" for i in range(3)]
    for column, function in (
        ("ess_bulk", ensemble_ess),
        ("ess_tail", partial(ensemble_ess, method="tail")),
        ("mcse_mean", ensemble_mcse),
        ("mcse_sd", partial(ensemble_mcse, method="sd")),
        ("nested_r_hat", nested_rhat),
    ):
        found = np.asarray(table.loc[labels, column], float)
        np.testing.assert_allclose(found, function(data)["beta"], rtol=0.06, atol=6e-4)
    # Not what ArviZ takes of independent chains.
    plain = np.asarray(arviz.summary(data).loc[labels, "ess_bulk"], float)
    assert not np.allclose(plain, np.asarray(table.loc[labels, "ess_bulk"], float), rtol=0.01)
    assert len(summary(data, var_names=["beta"])) == 3


def test_of_some_chains_or_draws_it_is_of_ensembles_too():
    mcmc = MCMC(SGLD(potential_fn=lambda z: jnp.sum(z**4), step_size=0.1, num_ensembles=2), num_warmup=0,
                num_samples=400, num_chains=8, chain_method="vectorized", progress_bar=False)  # fmt: skip
    mcmc.run(random.key(0), init_params=random.normal(random.key(1), (8, 2)))
    data = to_inference_data(mcmc)
    draws = np.asarray(mcmc.get_samples(group_by_chain=True), float)
    # Those of independent chains are other ones.
    for coords, expected in (
        ({"chain": [0, 1, 2]}, ensemble_ess(draws[:3])),
        ({"draw": slice(0, 199)}, ensemble_ess(draws[:, :200], 2)),
    ):
        table = summary(data, coords=coords)
        np.testing.assert_allclose(np.asarray(table["ess_bulk"], float), expected, rtol=0.01)


def test_the_numbers_of_ensembles_are_those_that_are_shown(data):
    # ArviZ 1.3 prints text that it made of its own numbers.
    table = summary(data, var_names=["beta"])
    lines = [line.split() for line in table.to_string().splitlines()]
    for column, expected in (("ess_bulk", ensemble_ess(data)), ("nested_r_hat", nested_rhat(data))):
        place = lines[0].index(column) + 1
        found = [float(line[place]) for line in lines[1:]]
        np.testing.assert_allclose(found, expected["beta"], rtol=0.06)


def test_rows_of_a_summary_find_their_variables():
    names = ["z", "z[a]", "z[a].b"]
    rows = ["z", "z[0]", "z[a]", "z[a][1, 2]", "z[a].b[3]"]
    assert [report._variable(row, names) for row in rows] == ["z", "z", "z[a]", "z[a]", "z[a].b"]


def test_summary_counts_divergences(capsys):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        mcmc = MCMC(SGLD(potential_fn=lambda z: jnp.sum(z**4), step_size=3.0), num_warmup=0, num_samples=9,
                    num_chains=6, chain_method="vectorized", progress_bar=False)  # fmt: skip
        mcmc.run(random.key(0), init_params=random.normal(random.key(1), (6, 2)))
        jax.effects_barrier()
        data = to_inference_data(mcmc)
        summary(mcmc)
    held = data["posterior"].attrs["num_divergences"]
    assert held == int(mcmc.last_state.num_divergences) > 0
    said = capsys.readouterr().out
    assert f"{held} updates were not finite and held, or had a gradient that was cut: divide `step_size`" in said


def test_summary_says_when_particles_have_not_mixed(capsys):
    def say(step_size):
        starts = random.normal(random.key(1), (6, 1))
        mcmc = MCMC(
            SGLD(potential_fn=lambda z: jnp.sum(z**2) / 2, step_size=step_size),
            num_warmup=0,
            num_samples=100,
            num_chains=6,
            chain_method="vectorized",
            progress_bar=False,
        )
        mcmc.run(random.key(0), init_params=starts)
        summary(mcmc)
        return capsys.readouterr().out

    assert "R-hat" not in say(0.2)
    text = say(1e-6)
    assert "R-hat is" in text and "have not mixed. Raise `num_steps`" in text


@pytest.mark.parametrize("form", ["long", "xarray"])
def test_formats_that_would_have_the_numbers_of_independent_chains_are_refused(data, form):
    with pytest.raises(ValueError, match=f"into the wide table; got fmt='{form}'. For ArviZ's own call arviz.summary"):
        summary(data, fmt=form)
    assert len(summary(data, fmt="wide", var_names=["beta"])) == 3


def test_summary_of_foreign_data_is_refused():
    chains = {"x": np.random.default_rng(0).normal(size=(2, 50))}
    foreign = arviz.from_dict({"posterior": chains}) if NEW_ARVIZ else arviz.from_dict(posterior=chains)
    with pytest.raises(TypeError, match="to_inference_data"):
        summary(foreign)


def two_labels(y):
    means = numpyro.sample("means", dist.Normal(0, 10).expand([2]).to_event(1))
    numpyro.sample("y", dist.MixtureSameFamily(dist.Categorical(jnp.ones(2) / 2), dist.Normal(means, 1.0)), obs=y)


def test_summary_says_that_labels_are_exchangeable(capsys):
    y = jnp.concatenate([random.normal(random.key(0), (50,)) - 5, random.normal(random.key(1), (50,)) + 5])
    starts = {"means": 5.0 * jnp.array([[-1.0, 1.0], [1.0, -1.0]])[jnp.arange(6) % 2]}
    mcmc = MCMC(SGLD(two_labels, step_size=0.005), num_warmup=0, num_samples=100, num_chains=6, progress_bar=False,
                chain_method="vectorized")  # fmt: skip
    mcmc.run(random.key(0), y, init_params=starts)
    table = summary(mcmc)
    figures = np.asarray(table[["ess_bulk", "ess_tail", "mcse_mean", "mcse_sd"]], float)
    assert np.isnan(figures).all()
    said = capsys.readouterr().out
    assert "the particles have not mixed. For 2 of 2 quantities particles move, but stay apart" in said
    assert "no effective sample size or standard error is known: order the labels, or let particles jump" in said
    assert "reparameterize the model" not in said


def test_summary_says_that_a_run_is_short(capsys):
    def say(draws, **kwargs):
        mcmc = MCMC(SGLD(potential_fn=lambda z: jnp.sum(z**2) / 2, step_size=0.05), num_warmup=0, num_samples=draws,
                    num_chains=6, chain_method="vectorized", progress_bar=False, **kwargs)  # fmt: skip
        mcmc.run(random.key(0), init_params=random.normal(random.key(1), (6, 2)))
        summary(mcmc)
        return capsys.readouterr().out

    assert "For 2 of 2 quantities the run is short beside the time in which particles mix, so no effective" in say(40)
    assert "quantities" not in say(1000)
    assert "quantities" not in say(2000, thinning=2)


def rows_in_a_plate(subsample_size):
    def model(x, y, weight=1.0):
        beta = numpyro.sample("beta", dist.Normal(0, 1).expand([2]).to_event(1))
        with numpyro.handlers.scale(scale=weight), numpyro.plate("rows", len(y), subsample_size=subsample_size) as i:
            numpyro.sample("y", dist.Bernoulli(logits=x[i] @ beta), obs=y[i])

    return model


GRADIENTS = {
    "no plates": (40, None),
    "all rows": (8, FullData()),
    "control variates": (8, ControlVariates()),
    "minibatches": (8, Subsampled()),
    "SVRG": (8, SVRG()),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name == "no plates" else pytest.mark.slow) for name in GRADIENTS],
)
def test_summary_knows_other_data_than_those_of_the_warmup(name, capsys):
    size, gradient = GRADIENTS[name]
    mcmc = MCMC(SGLD(rows_in_a_plate(size), gradient=gradient), num_warmup=60, num_samples=40, num_chains=6,
                chain_method="vectorized", progress_bar=False)  # fmt: skip
    x = X[:, :2]
    mcmc.warmup(random.key(0), x, Y)
    state = mcmc.post_warmup_state
    mcmc.run(random.key(1), x, Y)
    data = to_inference_data(mcmc)
    assert data["posterior"].attrs["other_data"] == "false"
    assert np.isfinite(data["posterior"].attrs["step_size_bias"])
    summary(mcmc)
    assert "other data" not in capsys.readouterr().out
    mcmc.post_warmup_state = state
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        mcmc.run(random.key(1), x, Y, 30.0)
        jax.effects_barrier()
    for source in (mcmc, to_inference_data(mcmc)):
        summary(source)
        said = capsys.readouterr().out
        assert "This run has other data than its warmup" in said and "Warm up on these, unless they are alike." in said
        assert "at most about" not in said and "BiasBudget" not in said
        assert ("Step-size bias" in said) == (source is mcmc)
    if name != "control variates":
        return
    assert step_bias(mcmc).predicted > 0.1
    # Warmed up on them, they are its own.
    mcmc.post_warmup_state = None
    mcmc.run(random.key(1), x, Y, 30.0)
    assert not has_other_data(mcmc)


@pytest.mark.parametrize("num_rows", [1000, pytest.param(200_000, marks=pytest.mark.slow)])
def test_the_same_data_are_never_taken_for_others(num_rows):
    # Terms of both signs, and sites of many scales.
    x = random.normal(random.key(0), (num_rows, 2))
    y = 1e-3 * random.normal(random.key(1), (num_rows,)) + x[:, 0]

    def model(x, y):
        beta = numpyro.sample("beta", dist.Normal(0, 1).expand([2]).to_event(1))
        scale = numpyro.sample("scale", dist.LogNormal(0, 3))
        numpyro.sample("y", dist.Normal(x @ beta, scale), obs=y)

    kernel = SGLD(model)
    for seed in range(2 if num_rows == 1000 else 6):
        state = kernel.init(random.split(random.key(seed), 6), 100, None, (x, y), {})
        mcmc = MCMC(kernel, num_warmup=100, num_samples=1, num_chains=6, chain_method="vectorized", progress_bar=False)
        mcmc._last_state, mcmc._args, mcmc._kwargs = state, (np.asarray(x), np.asarray(y)), {}
        assert not has_other_data(mcmc)
        order = np.random.default_rng(seed).permutation(num_rows)
        mcmc._args = (x[order], y[order])
        assert not has_other_data(mcmc)
        mcmc._args = (x, 1.1 * y)
        assert has_other_data(mcmc)


@pytest.mark.slow
def test_plain_chains_know_other_data_too():
    for size, method in ((1, "sequential"), (2, "sequential")):
        mcmc = MCMC(SGLD(rows_in_a_plate(40), interaction=Independent()), num_warmup=60, num_samples=5,
                    num_chains=size, chain_method=method, progress_bar=False)  # fmt: skip
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            mcmc.run(random.key(0), X[:, :2], Y)
        assert not has_other_data(mcmc)
        mcmc._args = (X[:, :2], 1 - Y)
        assert has_other_data(mcmc)


def test_no_bias_is_promised_where_many_updates_are_flagged(mcmc, capsys):
    data = to_inference_data(mcmc)  # of its own, to be written to

    def say(share):
        data["posterior"].attrs.update(before | {"step_size_measured": "true", "step_size_bias": 0.03, **share})
        summary(data)
        return capsys.readouterr().out

    before = dict(data["posterior"].attrs)
    assert "at most about 1.5 %" in say({"num_divergences": 1, "share_flagged": 1e-4})
    text = say({"num_divergences": 100, "share_flagged": 0.01})
    assert "Step-size bias: unknown where so many updates are held or cut" in text and "at most" not in text
    del before["share_flagged"]
    data["posterior"].attrs.pop("share_flagged")
    assert "at most about 1.5 %" in say({"num_divergences": 1})


def test_an_unstable_step_is_not_passed_over():
    attributes = {"step_size_measured": "false", "remedy": "divide it"}
    assert "more than a posterior sd, if it is stable at all" in report._of_bias((np.inf, 0.0), attributes)
