"""Discrete latent sites against sums by hand, on every minibatch there is."""

from functools import partial
import itertools

import jax
from jax import random
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
from models import vectorized
import numpy as np
import pytest

import numpyro
from numpyro import handlers
from numpyro.contrib.control_flow import scan
import numpyro.distributions as dist
from numpyro.infer import init_to_uniform

from numpyro_repulsion import SGLDR, Subsampled, to_inference_data
from numpyro_repulsion.gradients import ModelTarget

pytest.importorskip("funsor")

KEY = random.key(0)
RNG = np.random.default_rng(0)
Y, X = RNG.normal(size=5), RNG.normal(size=5)
TABLE = RNG.normal(size=(5, 3))
SERIES = RNG.normal(size=6)


def take(array, rows):
    """Rows of captured data, in the precision of the test."""
    return jnp.asarray(array)[rows]


def parameters():
    means = numpyro.sample("means", dist.Normal(jnp.array([-1.0, 1.0]), 1).to_event(1))
    weight = numpyro.sample("weight", dist.Beta(2, 1))
    return means, weight, jnp.stack([1 - weight, weight])


def sums(first, second, weight):
    """log Σ p(c) exp(...) for two values of c."""
    return jnp.logaddexp(jnp.log1p(-weight) + first, jnp.log(weight) + second)


def normal(y, mean):
    return dist.Normal(mean, 1.0).log_prob(y)


# Each model with enumeration, and with its sums written by hand.


def local(by_hand, batch=2):
    means, weight, weights = parameters()
    with numpyro.plate("rows", 5, subsample_size=batch) as i:
        if by_hand:
            law = dist.MixtureSameFamily(dist.Categorical(weights), dist.Normal(means, 1))
        else:
            law = dist.Normal(means[numpyro.sample("c", dist.Bernoulli(weight))], 1)
        numpyro.sample("y", law, obs=take(Y, i))
    return weight


def two_plates(by_hand):
    weight = local(by_hand)
    with numpyro.plate("others", 5, subsample_size=3) as i:
        x = take(X, i)
        if by_hand:
            numpyro.factor("g", sums(normal(x, weight), normal(x, weight + 1), 0.3))
        else:
            numpyro.sample("x", dist.Normal(weight + numpyro.sample("d", dist.Bernoulli(0.3)), 1), obs=x)


def cells(by_hand):
    means, weight, _ = parameters()
    with numpyro.plate("columns", 3, subsample_size=2) as j, numpyro.plate("rows", 5, subsample_size=2) as i:
        y = take(TABLE, (i[:, None], j))
        if by_hand:
            numpyro.factor("f", sums(*(normal(y, mean) for mean in means), weight))
        else:
            numpyro.sample("y", dist.Normal(means[numpyro.sample("c", dist.Bernoulli(weight))], 1), obs=y)


def scaled_and_masked(by_hand):
    means, weight, _ = parameters()
    with numpyro.plate("rows", 5, subsample_size=2) as i:
        y, seen = take(Y, i), take(X > 0, i)
        if by_hand:
            numpyro.factor("f", sums(*(jnp.where(seen, 0.3 * normal(y, mean), 0.0) for mean in means), weight))
        else:
            c = numpyro.sample("c", dist.Bernoulli(weight))
            with handlers.scale(scale=0.3), handlers.mask(mask=seen):
                numpyro.sample("y", dist.Normal(means[c], 1), obs=y)


def outside(by_hand):
    means, weight, _ = parameters()
    groups = jnp.asarray(TABLE[0])
    if by_hand:
        numpyro.factor("f", sums(*(normal(0.7, mean) for mean in means), weight))
        numpyro.factor("g", sums(*(normal(groups, mean) for mean in means), 0.8).sum())
    else:
        c = numpyro.sample("c", dist.Bernoulli(weight))
        numpyro.sample("before", dist.Normal(means[c], 1), obs=0.7)
        with numpyro.plate("groups", 3):
            d = numpyro.sample("d", dist.Categorical(jnp.array([0.2, 0.8])))
            numpyro.sample("group", dist.Normal(means[d], 1), obs=groups)
    with numpyro.plate("rows", 5, subsample_size=2) as i:
        numpyro.sample("y", dist.Normal(means[0] * means[1], 1), obs=take(Y, i))


def hidden_markov(by_hand):
    means, weight, weights = parameters()

    def transition(c, y):
        c = numpyro.sample("c", dist.Bernoulli(jnp.where(c == 1, weight, 0.3)))
        numpyro.sample("series", dist.Normal(means[c], 1), obs=y)
        return c, None

    if by_hand:
        move, state = jnp.stack([jnp.array([0.7, 0.3]), weights]), jnp.array([1.0, 0.0])
        for y in SERIES:
            state = (state @ move) * jnp.exp(normal(y, means))
        numpyro.factor("f", jnp.log(state.sum()))
    else:
        scan(transition, 0, jnp.asarray(SERIES))
    with numpyro.plate("rows", 5, subsample_size=2) as i:
        numpyro.sample("y", dist.Normal(means[0], 1), obs=take(Y, i))


MODELS = {"local": local, "single rows": partial(local, batch=1), "cells": cells, "outside": outside}
#: In the full test alone.
MORE = {"two plates": two_plates, "scaled and masked": scaled_and_masked, "hidden Markov": hidden_markov}


def minibatches(target):
    """All minibatches without repetition, stacked."""
    parts = [list(itertools.combinations(range(size), batch)) for size, batch in target.plates.values()]
    outcomes = list(itertools.product(*parts))
    return {name: jnp.array([outcome[k] for outcome in outcomes]) for k, name in enumerate(target.plates)}


def energy_and_grad(target):
    return jax.jit(lambda z, rows: jax.value_and_grad(target.potential_energy)(z, rows, KEY))


@pytest.mark.parametrize("name", [*MODELS, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)])
def test_every_minibatch_has_the_energy_and_gradient_of_sums_by_hand(x64, name):
    target, plain = (ModelTarget((MODELS | MORE)[name], (by_hand,)) for by_hand in (False, True))
    assert target.plates == plain.plates and target.discrete and not plain.discrete
    z = plain.draw(random.key(1), init_to_uniform)
    rows = minibatches(target)
    given, expected = (jax.vmap(energy_and_grad(t), (None, 0))(z, rows) for t in (target, plain))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-10), given, expected)
    # They average to that of all rows, and differ, or the average would say nothing.
    average, full = jax.tree.map(lambda x: x.mean(0), given), energy_and_grad(target)(z, target.all_rows)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-10), average, full)
    assert ravel_pytree(jax.tree.map(lambda x: x.std(0), given))[0].max() > 1e-2


# Refused, and the remedy.


def global_switch():
    means, weight, _ = parameters()
    c = numpyro.sample("c", dist.Bernoulli(weight))
    with numpyro.plate("rows", 5, subsample_size=2) as i:
        numpyro.sample("y", dist.Normal(means[c], 1), obs=take(Y, i))


def switch_two_steps_away():
    means, weight, _ = parameters()
    c = numpyro.sample("c", dist.Bernoulli(weight))
    with numpyro.plate("rows", 5, subsample_size=2) as i:
        d = numpyro.sample("d", dist.Bernoulli(jnp.where(c == 1, 0.2, 0.7)))
        numpyro.sample("y", dist.Normal(means[d], 1), obs=take(Y, i))


def only_half_of_the_cells():
    means, weight, _ = parameters()
    with numpyro.plate("rows", 5, subsample_size=2, dim=-2) as i:
        c = numpyro.sample("c", dist.Bernoulli(weight))
        with numpyro.plate("columns", 3, subsample_size=2, dim=-1) as j:
            numpyro.sample("y", dist.Normal(means[c], 1), obs=take(TABLE, (i[:, None], j)))


def rows_without_a_plate():
    # The factor N / B by hand: the plate does not know of the site, but its rows are seen.
    means, weight, _ = parameters()
    c = numpyro.sample("c", dist.Bernoulli(weight))
    with numpyro.plate("rows", 5, subsample_size=2) as i:
        y = take(Y, i)
    numpyro.factor("f", 5 / 2 * normal(y, means[c]).sum())


def total_of_the_rows():
    means, weight, _ = parameters()
    with numpyro.plate("rows", 5, subsample_size=2) as i:
        c = numpyro.sample("c", dist.Bernoulli(weight))
        numpyro.sample("y", dist.Normal(means[c], 1), obs=take(Y, i))
    numpyro.factor("f", -1.0 * c.sum())


def poisson():
    means, _, _ = parameters()
    k = numpyro.sample("k", dist.Poisson(2.0))
    numpyro.sample("y", dist.Normal(means[0] + k, 1), obs=1.0)


def sequential():
    means, weight, _ = parameters()
    k = numpyro.sample("k", dist.Bernoulli(weight), infer={"enumerate": "sequential"})
    numpyro.sample("y", dist.Normal(means[k], 1), obs=1.0)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (global_switch, "'c' would be summed over.*'y'.*'rows'.*by hand.*drop `subsample_size`"),
        (switch_two_steps_away, "'c' would be summed over.*'d'.*'rows'"),
        (only_half_of_the_cells, "'c' would be summed over.*'y'.*'columns'"),
        (rows_without_a_plate, "'c' would be summed over.*'f'.*'rows'"),
        (total_of_the_rows, "'c' would be summed over.*'f'.*'rows'"),
        (poisson, "'k' has a Poisson distribution.*by hand.*Categorical"),
        (sequential, "'k' asks for enumerate='sequential'.*'parallel'"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_refusals_name_the_sites_and_the_remedy(x64, model, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        ModelTarget(model)


def test_without_funsor_the_remedy_is_named(monkeypatch):
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "funsor" else find(name, *a))
    with pytest.raises(ImportError, match="'c'.*needs funsor.*MixtureSameFamily"):
        ModelTarget(local, (False,))


# In a run.


def with_deterministic():
    means, weight, _ = parameters()
    numpyro.deterministic("gap", means[1] - means[0])
    with numpyro.plate("rows", 5, subsample_size=2) as i:
        c = numpyro.sample("c", dist.Bernoulli(weight))
        mean = numpyro.deterministic("mean", means[c])
        numpyro.deterministic("residual", take(Y, i) - means[0])
        numpyro.sample("y", dist.Normal(mean, 1), obs=take(Y, i))


@pytest.mark.slow
def test_draws_have_no_discrete_sites_nor_what_depends_on_them():
    mcmc = vectorized(SGLDR(with_deterministic, gradient=Subsampled(shared=True)), 50, 5, 4)
    with pytest.warns(UserWarning, match=r"\['mean'\] depend on discrete sites.*infer_discrete=True"):
        mcmc.run(KEY)
    samples = mcmc.get_samples()
    assert set(samples) == {"means", "weight", "gap"}
    np.testing.assert_allclose(samples["gap"], samples["means"][:, 1] - samples["means"][:, 0], rtol=1e-5)
    data = to_inference_data(mcmc)
    assert set(data["posterior"].data_vars) == {"means", "weight", "gap", "residual"}
    assert data["posterior"]["residual"].shape == (4, 5, 5)
    assert data["observed_data"]["y"].shape == (5,)
