"""Rows at which a density or its gradient is no number are named, and rows that only starts make so are accepted."""

import re

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import pytest

import numpyro
from numpyro import handlers
import numpyro.distributions as dist

from numpyro_repulsion import SGLD, Rows
from numpyro_repulsion.gradients import ModelTarget, is_finite_on_all_rows, sites_not_finite

N, BATCH = 400, 20
X = np.random.default_rng(0).normal(size=N).astype(np.float32)


def init(model, *args, particles=6):
    return SGLD(model, step_size=1e-4).init(random.split(random.key(0), particles), 0, None, args, {})


def outcomes(value, *rows, typical=0.5, dtype=np.float32):
    y = np.full(N, typical, dtype)
    y[list(rows)] = value
    return y


def model_of(family, batch=BATCH):
    def model(y):
        b = numpyro.sample("b", dist.Normal(0, 1).expand([5]).to_event(1))
        with numpyro.plate("rows", N, subsample_size=batch) as i:
            numpyro.sample("y", family(b), obs=y[i])

    return model


FAULTS = {
    "a label beyond the last class": (lambda b: dist.Categorical(logits=b), outcomes(7, 30, 399, typical=1, dtype=int)),
    "a size below zero": (lambda b: dist.LogNormal(b[0], 1), outcomes(-1, 30, 399)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_rows_without_a_density_are_named(fault):
    family, y = FAULTS[fault]
    for kind in (jnp.asarray, Rows) if fault == "a size below zero" else (jnp.asarray,):
        with pytest.raises(ValueError, match=r"not finite at 'y' \(row 30, 399 of the plate 'rows' of size 400\)"):
            init(model_of(family), kind(y))


def test_data_that_are_used_whole_are_named():
    family, y = FAULTS["a label beyond the last class"]
    with pytest.raises(ValueError, match=r"log density of 'y' \(row 30, 399 of the plate 'rows' of size 400\)"):
        init(model_of(family, batch=None), jnp.asarray(y))


def test_starts_that_meet_the_rows_name_them_too():
    family, _ = FAULTS["a size below zero"]
    with pytest.raises(ValueError, match=r"start of particles .* of 'y' \(row 100, 101, 102, 103, 104, \.\.\."):
        init(model_of(family), jnp.asarray(outcomes(-1, *range(100, N))))


def test_rows_without_a_gradient_are_named():
    def model(size):
        b = numpyro.sample("b", dist.Normal(0, 1))
        numpyro.factor("apart", -(b**2))
        with numpyro.plate("rows", N, subsample_size=BATCH) as i:
            numpyro.sample("fine", dist.Normal(b, 1), obs=size[i])
            numpyro.sample("y", dist.Normal(jnp.sqrt(b**2 * size[i]), 1), obs=size[i])

    size = jnp.asarray(outcomes(0, 250))
    target, z = ModelTarget(model, (size,)), {"b": jnp.ones(1)}
    assert sites_not_finite(target, z) == ["'y' (row 250 of the plate 'rows' of size 400)"]
    assert sites_not_finite(ModelTarget(model, (size + 1,)), z) == []
    with pytest.raises(ValueError, match=r"'y' \(row 250 of"):
        init(model, size)


def test_missing_values_are_said_with_their_rows():
    def model(x, y):
        b = numpyro.sample("b", dist.Normal(0, 1))
        with numpyro.plate("rows", N, subsample_size=BATCH) as i:
            numpyro.sample("y", dist.Normal(b * x[i], 1), obs=y[i])

    with pytest.raises(ValueError, match=r"NaN: 1 in the model's args\[0\]. The log density .* 'y' \(row 7 of"):
        init(model, jnp.asarray(outcomes(np.nan, 7)), jnp.asarray(X))


AT = {"z": jnp.float32(0.3)}


def with_holes(y, batch=2, mask=False):
    z = numpyro.sample("z", dist.Normal(0, 1))
    with numpyro.plate("rows", 7, subsample_size=batch) as i:
        rows = y[i]
        seen = ~jnp.isnan(rows) if mask else True
        with handlers.mask(mask=seen):
            numpyro.sample("y", dist.Normal(z, 1), obs=jnp.where(seen, rows, 0.0) if mask else rows)


def test_nan_is_found_and_named():
    y = jnp.asarray(X[:7]).at[jnp.array([5, 6])].set(jnp.nan)
    target = ModelTarget(with_holes, (y,))
    (argument, site) = target.find_nan()
    assert argument.startswith("2 in") and "args[0]" in argument
    assert site == "2 in the observed site 'y'"
    (argument, _) = ModelTarget(with_holes, (), {"y": y}).find_nan()
    assert "'y'" in argument and "kwargs" in argument
    assert not is_finite_on_all_rows(target, AT)
    assert is_finite_on_all_rows(ModelTarget(with_holes, (y,), {"mask": True}), AT)
    # Captured data, and those without NaN.
    assert ModelTarget(lambda: with_holes(y)).find_nan() == ["2 in the observed site 'y'"]
    target = ModelTarget(with_holes, (jnp.asarray(X[:7]),))
    assert target.find_nan() == [] and is_finite_on_all_rows(target, AT)
    labels, y = FAULTS["a label beyond the last class"]
    assert ModelTarget(model_of(labels), (jnp.asarray(y),)).find_nan() == []  # integers


def with_missing_covariates(x, mask):
    slope = numpyro.sample("z", dist.Normal(0, 1))
    with numpyro.plate("rows", 7, subsample_size=2) as i, handlers.mask(mask=~jnp.isnan(x[i]) if mask else True):
        numpyro.sample("y", dist.Bernoulli(logits=slope * x[i]), obs=jnp.zeros(7)[i])


@pytest.mark.parametrize("mask", [False, True])
def test_nan_is_found_behind_a_likelihood_that_hides_it(mask):
    x = jnp.ones(7).at[3].set(jnp.nan)
    target = ModelTarget(with_missing_covariates, (x, mask))
    energy, gradient = jax.jit(
        jax.value_and_grad(lambda z: target.potential_energy({"z": z}, {"rows": jnp.array([3])}, random.key(0)))
    )(0.5)
    assert jnp.isfinite(energy) and jnp.isnan(gradient)
    assert not is_finite_on_all_rows(target, AT)
    assert is_finite_on_all_rows(ModelTarget(with_missing_covariates, (jnp.ones(7), mask)), AT)


def test_plates_that_do_not_meet_are_told_apart():
    def model(first, second):
        b = numpyro.sample("b", dist.Normal(0, 1))
        for name, y in (("first", first), ("second", second)):
            with numpyro.plate(f"rows of {name}", N, subsample_size=BATCH) as i:
                numpyro.sample(name, dist.LogNormal(b, 1), obs=y[i])

    with pytest.raises(ValueError, match=r"finite at 'second' \(row 3 of the plate 'rows of second' of size 400\),"):
        init(model, jnp.asarray(outcomes(1)), jnp.asarray(outcomes(-1, 3)))


def test_one_cell_of_two_plates_is_named():
    def model(y):
        b = numpyro.sample("b", dist.Normal(0, 1))
        columns = numpyro.plate("columns", 50, dim=-1, subsample_size=10)
        with columns as j, numpyro.plate("rows", 60, dim=-2, subsample_size=10) as i:
            numpyro.sample("y", dist.LogNormal(b, 1), obs=y[i[:, None], j])

    y = jnp.ones((60, 50)).at[41, 33].set(-1)
    words = r"'y' \(row 33 of the plate 'columns' of size 50 and row 41 of the plate 'rows' of size 60\)"
    with pytest.raises(ValueError, match=words):
        init(model, y)
    assert is_finite_on_all_rows(ModelTarget(model, (jnp.ones((60, 50)),)), {"b": jnp.zeros(())})


def test_rows_are_named_where_discrete_sites_are_summed_out():
    def model(y):
        b = numpyro.sample("b", dist.Normal(0, 1))
        with numpyro.plate("rows", N, subsample_size=BATCH) as i:
            # The density of half of the rows is zero for one value of k, as it should be.
            k = numpyro.sample("k", dist.Bernoulli(0.5), infer={"enumerate": "parallel"})
            numpyro.sample("y", dist.Uniform(0, jnp.where(k == 1, 2.0, 0.5) * jnp.exp(0 * b)), obs=y[i])

    y = np.where(np.arange(N) % 2, 1.0, 0.2).astype(np.float32)
    init(model, jnp.asarray(y))
    y[31] = -1
    with pytest.raises(ValueError, match="not finite at row 31 of the plate 'rows'"):
        init(model, jnp.asarray(y))


def test_rows_that_only_the_starts_make_impossible_are_accepted():
    def model(x, low, high):
        b = numpyro.sample("b", dist.Normal(0, 5).expand([2]).to_event(1))
        with numpyro.plate("rows", N, subsample_size=BATCH) as i:
            law = dist.IntervalCensoredDistribution(dist.Normal(b[0] + b[1] * x[i], 1), x[i] > 1e9, x[i] > 1e9)
            numpyro.sample("y", law, obs=jnp.stack([low[i], high[i]], -1))

    x = X.copy()
    x[[5, 300]] = 9.0, -11.0
    low = np.floor(1 + 2 * x)
    data = tuple(map(jnp.asarray, (x, low, low + 1)))
    target = ModelTarget(model, data)
    # At such starts rows far out have no density.
    z = {"b": jnp.asarray([[0.0, 0.0], [0.0, -1.0]])}
    assert not is_finite_on_all_rows(target, {"b": z["b"][0]})
    assert {5, 300} <= set(map(int, re.findall(r"\d+", sites_not_finite(target, z)[0])))
    assert sites_not_finite(target, z, doubtful=True) == []
    init(model, *data)


def test_sites_without_rows_are_named():
    def counts(y):
        rate = numpyro.sample("rate", dist.LogNormal(0, 1))
        numpyro.sample("y", dist.Poisson(rate), obs=y)
        numpyro.factor("fine", -(rate**2))

    z = {"rate": jnp.zeros(1)}
    assert sites_not_finite(ModelTarget(counts, (jnp.array([1, -1]),)), z) == ["'y' (entry 1 of 2)"]
    assert sites_not_finite(ModelTarget(counts, (jnp.array([1, 1]),)), z) == []
    with pytest.raises(ValueError, match=r"log density of 'y' \(entry 1 of 2\), or its gradient. Look for"):
        init(counts, jnp.array([1, -1]))
    assert jax.config.jax_debug_nans is False
