"""Two regression sets on which a package for sampled networks publishes figures, and its network with two heads."""

from collections.abc import Sequence
import itertools
from typing import NamedTuple

import jax
from jax import nn
import jax.numpy as jnp
import numpy as np

import numpyro
import numpyro.distributions as dist

from benchmarks.problems.posteriordb import data_folder

#: Published figures (negative log-likelihood, RMSE), both in standardized units, from the data folder's README.
PUBLISHED = {
    "airfoil": {
        "sklearn-contrib-bde": (-0.913, 0.1215),
        "deep ensemble": (0.176, 0.365),
        "CatBoost": (0.148, 0.239),
        "TabPFN v2": (-0.934, 0.136),
    },
    "bikesharing": {
        "sklearn-contrib-bde": (-0.732, 0.226),
        "deep ensemble": (-0.455, 0.288),
        "CatBoost": (-0.374, 0.265),
        "TabPFN v2": (-0.686, 0.210),
    },
}
#: The smallest standard deviation that a network may predict.
FLOOR = 1e-3


class Split(NamedTuple):
    """Rows to fit and rows to score, standardized by the former."""

    X: jax.Array
    y: jax.Array
    X_test: jax.Array
    y_test: jax.Array


def split(name: str, validation: bool = False) -> Split:
    """The one split; for validation its training rows alone, a fifth of them scored."""
    stored = np.load(data_folder() / "tabular" / f"{name}.npz")
    X, y, test = stored["X"].astype(float), stored["y"].astype(float).ravel(), stored["test_0"]
    train = np.setdiff1d(np.arange(len(y)), test)
    if validation:
        test, train = np.split(np.random.default_rng(0).permutation(train), [len(train) // 5])

    def standardized(x):
        return (x - x[train].mean(0)) / x[train].std(0)

    X, y = (jnp.asarray(standardized(x), jnp.float32) for x in (X, y))
    return Split(X[train], y[train], X[test], y[test])


def network(X, y=None, subsample_size: int | None = None, widths: Sequence[int] = (16, 16, 16, 16)) -> None:
    """A network that predicts mean and standard deviation; weights are N(0, 1) a priori."""
    sizes = (X.shape[1], *widths, 2)
    layers = [
        (
            numpyro.sample(f"w{i}", dist.Normal(0, 1).expand(shape).to_event(2)),
            numpyro.sample(f"b{i}", dist.Normal(0, 1).expand(shape[1:]).to_event(1)),
        )
        for i, shape in enumerate(itertools.pairwise(sizes))
    ]
    with numpyro.plate("rows", len(X), subsample_size=subsample_size) as i:
        x = X[i]
        for weights, biases in layers[:-1]:
            x = nn.silu(x @ weights + biases)
        weights, biases = layers[-1]
        mean, spread = (x @ weights + biases).T
        observed = None if y is None else y[i]
        numpyro.sample("y", dist.Normal(mean, FLOOR + nn.softplus(spread)), obs=observed)
