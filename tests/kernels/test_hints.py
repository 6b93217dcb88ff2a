"""Notes below errors of a model."""

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

import numpyro
import numpyro.distributions as dist

from numpyro_repulsion import SGLD
from numpyro_repulsion.kernels.bound import hinting

X, Y = np.ones((40, 2), np.float32), np.ones(40, np.float32)


def model(x, y, takes="both"):
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("row", 40, subsample_size=10) as i:
        x, y = x if takes == "y" else x[i], y if takes == "x" else y[i]
        numpyro.sample("y", dist.Normal(x @ beta, 1.0), obs=y)


def notes(*args, **kwargs):
    with pytest.raises(Exception) as caught:
        SGLD(model, step_size=0.1).init(random.split(random.key(0), 4), 0, None, args, kwargs)
    return " ".join(getattr(caught.value, "__notes__", []))


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((pd.DataFrame(X), Y), r"args[0] is a DataFrame of pandas. Pass arrays: x.to_numpy()"),
        ((X, Y.tolist()), "args[1] is a list. Pass an array: np.asarray(x)"),
        ((X.astype(str), Y), "args[0] is an array of dtype <U"),
        ((X, Y, "x"), "x[i] and y[i]"),
        ((X, Y, "y"), "The plate 'row' draws 10 of 40 rows"),
    ],
)
def test_errors_of_a_model_come_with_a_note(args, words):
    assert words in notes(*args)


def test_keyword_arguments_are_named():
    assert "y= is a Series of pandas" in notes(x=X, y=pd.Series(Y))


def test_arrays_from_outside_are_named():
    def outside():
        slope = numpyro.sample("slope", dist.Normal(0, 1))
        with numpyro.plate("row", 40, subsample_size=10) as i:
            numpyro.sample("y", dist.Normal(slope * X[i, 0], 1.0), obs=Y[i])

    with pytest.raises(jax.errors.TracerArrayConversionError) as caught:
        SGLD(outside, step_size=0.1).init(random.split(random.key(0), 4), 0, None, (), {})
    assert "Pass them as arguments of the model." in " ".join(caught.value.__notes__)


def test_lists_that_are_settings_are_not_blamed():
    def sized(x, hidden):
        raise ValueError(f"{len(hidden)} layers")

    with pytest.raises(ValueError, match="2 layers") as caught, hinting(sized, (X,), {"hidden": [32, 32]}):
        sized(X, [32, 32])
    assert not getattr(caught.value, "__notes__", [])


def test_other_errors_have_no_notes():
    def broken():
        raise RuntimeError("shapes of another kind")

    with pytest.raises(RuntimeError) as caught, hinting(broken, (), {}):
        broken()
    assert not getattr(caught.value, "__notes__", [])


def test_callbacks_without_a_rule_for_vmap_are_explained():
    def calls(y, method):
        rate = numpyro.sample("rate", dist.Normal(0, 1))
        with numpyro.plate("row", 40, subsample_size=10) as i:
            shape = jax.ShapeDtypeStruct((), jnp.float32)
            rate = jax.lax.stop_gradient(rate)
            doubled = jax.pure_callback(lambda x: np.float32(2 * x), shape, rate, vmap_method=method)
            numpyro.sample("y", dist.Normal(rate + doubled, 1), obs=y[i])

    def start(method):
        SGLD(calls, step_size=0.1).init(random.split(random.key(0), 4), 0, None, (jnp.asarray(Y), method), {})

    with pytest.raises(ValueError, match='vmap_method="sequential"'):
        start(None)
    start("sequential")
