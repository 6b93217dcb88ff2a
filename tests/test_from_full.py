"""Models of all rows, turned into models of minibatches."""

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import pytest

import numpyro
import numpyro.distributions as dist

from numpyro_repulsion import Rows, minibatch, predict, to_inference_data
from numpyro_repulsion.gradients import ModelTarget

SIZE, BATCH = 60, 8
X, GROUP = random.normal(random.key(0), (SIZE, 3)), random.randint(random.key(1), (SIZE,), 0, 4)
Y = X[:, 0] + 0.3 * random.normal(random.key(2), (SIZE,))


def full(x, group, y=None):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("groups", 4):
        effect = numpyro.sample("effect", dist.Normal(0, 1))
    with numpyro.plate("rows", len(x)):
        mean = numpyro.deterministic("mean", x @ w + effect[group])
        numpyro.sample("y", dist.Normal(mean, 0.5), obs=y)


def by_hand(x, group, y=None):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("groups", 4):
        effect = numpyro.sample("effect", dist.Normal(0, 1))
    with numpyro.plate("rows", len(x), subsample_size=BATCH) as i:
        mean = numpyro.deterministic("mean", x[i] @ w + effect[group[i]])
        numpyro.sample("y", dist.Normal(mean, 0.5), obs=None if y is None else y[i])


Z = {"w": jnp.array([0.3, -0.2, 1.0]), "effect": jnp.arange(4) / 4.0}
ROWS = {"rows": jnp.array([3, 3, 59])}


def assert_same(target, other, rows=ROWS, rows_of_other=None):
    """The same energies and gradients."""

    def of(target, rows):
        return jax.jit(jax.value_and_grad(lambda z: target.potential_energy(z, rows, random.key(0))))(Z)

    found, expected = of(target, rows), of(other, rows if rows_of_other is None else rows_of_other)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, expected)


def test_it_is_the_model_written_by_hand():
    target, other = (ModelTarget(model, (X, GROUP, Y)) for model in (minibatch(full, BATCH), by_hand))
    for name in ("plates", "latent", "observed", "subsampled", "minibatched", "rows_outside"):
        assert getattr(target, name) == getattr(other, name)
    assert_same(target, other)
    assert_same(target, other, target.all_rows)
    # All rows once are the model of all rows.
    assert_same(target, ModelTarget(full, (X, GROUP, Y)), target.all_rows, {})


def test_results_and_predictions_are_those_of_the_model_written_by_hand(pretended):
    found = []
    for model in (minibatch(full, BATCH), by_hand):
        mcmc = pretended(model, X, GROUP, Y)
        data = to_inference_data(mcmc, log_likelihood=True)
        predicted = predict(mcmc, X[:5], GROUP[:5], Y[:5], num_draws=20)
        found.append((data["log_likelihood"]["y"].values, data["posterior"]["mean"].values, predicted.mean))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), *found)


def test_rows_on_the_host_are_taken_too():
    target = ModelTarget(minibatch(full, BATCH), (Rows(np.asarray(X)), np.asarray(GROUP), Rows(np.asarray(Y))))
    assert_same(target, ModelTarget(by_hand, (X, GROUP, Y)))


def test_attributes_of_a_model_are_not_taken_for_its_own():
    class Doubled:
        def __init__(self):
            self.model, self.subsample_size = full, 3

        def __call__(self, x, group, y=None):
            full(2.0 * x, group, y)

    target = ModelTarget(minibatch(Doubled(), BATCH), (X, GROUP, Y))
    assert target.plates == {"rows": (SIZE, BATCH)}
    assert_same(target, ModelTarget(by_hand, (2.0 * X, GROUP, Y)))


def test_few_rows_are_all_taken():
    assert not ModelTarget(minibatch(full, SIZE), (X, GROUP, Y)).plates


def fixed_size(x, group, y):
    w = numpyro.sample("w", dist.Normal(0, 1))
    with numpyro.plate("rows", SIZE):
        numpyro.sample("y", dist.Normal(w, 1), obs=y)


def centered(x, group, y):
    w = numpyro.sample("w", dist.Normal(0, 1))
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Normal(w * (x[:, 0] - x[:, 0].mean()), 1), obs=y)


def of_rows(x, group, y):
    w = numpyro.sample("w", dist.Normal(0, 1))
    with numpyro.plate("rows", len(y)):
        u = numpyro.sample("u", dist.Normal(w, 1))
        numpyro.sample("y", dist.Normal(u, 1), obs=y)


def two_plates(x, group, y):
    w = numpyro.sample("w", dist.Normal(0, 1))
    for name in ("rows", "others"):
        with numpyro.plate(name, len(y)):
            numpyro.sample(f"y_{name}", dist.Normal(w, 1), obs=y)


def without_data(x, group, y):
    w = numpyro.sample("w", dist.Normal(0, 1))
    with numpyro.plate("rows", 70):
        numpyro.sample("y", dist.Normal(w, 1), obs=jnp.zeros(70))


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        (fixed_size, {}, "'rows' has 60 rows where its data have 8.*len"),
        (centered, {}, "depends on the other rows"),
        (of_rows, {}, "latent site 'u' lies inside of the plate 'rows'"),
        (two_plates, {}, "equally large"),
        # Rows are taken for both plates, and only one is scaled.
        (two_plates, {"plate": "others"}, "'y_rows' uses rows of the subsampled plate 'others' outside of that plate"),
        (without_data, {}, "no argument of the model has the 70 rows"),
        (full, {"plate": "columns"}, r"one of \['groups', 'rows'\]; got 'columns'"),
        (by_hand, {}, "subsampled already"),
    ],
)
def test_what_cannot_be_turned_is_refused(model, settings, message):
    with pytest.raises(ValueError, match=message):
        ModelTarget(minibatch(model, BATCH, **settings), (X, GROUP, Y))


def test_settings_are_checked():
    with pytest.raises(ValueError, match="`subsample_size`"):
        minibatch(full, 0)
