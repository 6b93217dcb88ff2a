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

import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC

from numpyro_repulsion import (
    SGLD,
    SGLDR,
    ensemble_ess,
    ensemble_mcse,
    nested_rhat,
    report,
    summary,
    to_inference_data,
)

# Most of these runs are too short to be worth anything, and warmup says so.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Warmup expects trouble"),
    pytest.mark.filterwarnings("ignore:num_warmup"),
]

NEW_ARVIZ = int(importlib.metadata.version("arviz").split(".")[0]) >= 1

X = random.normal(random.key(0), (40, 3))
Y = (X[:, 0] + random.normal(random.key(1), (40,)) > 0).astype(jnp.int32)


def logistic(X, y):
    with numpyro.plate("features", 3):
        beta = numpyro.sample("beta", dist.Normal(0, 1))
    numpyro.deterministic("total", beta.sum())
    scale = numpyro.sample("scale", dist.Gamma(3, 3).expand([2]).to_event(1))
    with numpyro.plate("rows", 40, subsample_size=8) as i:
        logits = numpyro.deterministic("logits", X[i] @ beta * scale[0])
        numpyro.sample("y", dist.Bernoulli(logits=logits), obs=y[i])


def run(kernel, *args, num_samples=20, num_chains=6, extra_fields=(), **kwargs):
    mcmc = MCMC(
        kernel,
        num_warmup=0,
        num_samples=num_samples,
        num_chains=num_chains,
        chain_method="vectorized",
        progress_bar=False,
        **kwargs,
    )
    mcmc.run(random.key(0), *args, extra_fields=extra_fields)
    return mcmc


@pytest.fixture(scope="module")
def mcmc():
    return run(SGLDR(logistic, step_size=1e-3, num_ensembles=2), X, Y)


@pytest.fixture(scope="module")
def data(mcmc):
    return to_inference_data(mcmc)


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
