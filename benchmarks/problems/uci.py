"""The regression sets of the paper's Tables 3 and 4 with their splits, and how predictions of a network are scored."""

from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
from jax.scipy.special import logsumexp
from jax.scipy.stats import norm
import numpy as np

from benchmarks.problems.posteriordb import data_folder
from benchmarks.problems.targets import relu_network

#: Short names; the last is what there is without the data folder: scikit-learn's, with splits of our own.
SHOWN = {"yacht": "yacht", "bostonHousing": "Boston", "wine-quality-red": "wine", "kin8nm": "kin8nm"}
SHOWN |= {"naval-propulsion-plant": "naval", "protein-tertiary-structure": "protein", "diabetes": "diabetes"}
OWN = {"diabetes": 20}
#: How many splits each set has.
UCI = {name: 5 if SHOWN[name] == "protein" else 20 for name in SHOWN if name not in OWN}


class Split(NamedTuple):
    """Rows to fit and rows to score, standardized by the former, and the responses' standard deviation there."""

    X: np.ndarray
    y: np.ndarray
    X_test: np.ndarray
    y_test: np.ndarray
    unit: float


def load(name: str, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Covariates, responses and the test rows of one split."""
    if name in UCI:
        stored = np.load(data_folder() / "uci" / f"{name}.npz")
        return stored["X"].astype(float), stored["y"].astype(float), stored[f"test_{number}"]
    from sklearn.datasets import load_diabetes

    X, y = load_diabetes(return_X_y=True)
    return X, y, np.random.default_rng(number).permutation(len(X))[: len(X) // 10]


def split(name: str, number: int, validation: bool = False) -> Split:
    """One split; for validation its training rows alone, in an order by the split's number, the last fifth scored."""
    X, y, test = load(name, number)
    train = np.setdiff1d(np.arange(len(X)), test)
    if validation:
        # The sets lie sorted in part, and the last rows of such a one would be another law.
        train = np.random.default_rng(number).permutation(train)
        train, test = np.split(train, [len(train) * 4 // 5])
    return _standardized(X, y, train, test)


def _standardized(X, y, train, test):
    spread = X[train].std(0)
    X = (X - X[train].mean(0)) / np.where(spread > 0, spread, 1.0)
    unit = y[train].std()
    y = (y - y[train].mean()) / unit
    return Split(X[train], y[train], X[test], y[test], float(unit))


def score(draws: dict[str, jax.Array], X: jax.Array, y: jax.Array) -> dict[str, jax.Array]:
    """Log-likelihood and RMSE of the mixture over draws, and the share of responses in its central intervals.

    :param draws: of the network's sites, with two leading axes.
    """

    def add(total, some):
        fit = relu_network(some, X)
        scale = jnp.sqrt(some["noise_precision"])[:, None]
        z = scale * (y - fit)
        density = logsumexp(norm.logpdf(z) + jnp.log(scale), 0)
        return (jnp.logaddexp(total[0], density), total[1] + norm.cdf(z).mean(0), total[2] + fit.mean(0)), None

    zero = jnp.zeros_like(y)
    groups, size = draws["noise_precision"].shape
    (density, below, fit), _ = lax.scan(add, (zero - jnp.inf, zero, zero), draws)
    off_center = jnp.abs(below / groups - 0.5)
    covered = {f"coverage_{share}": jnp.mean(off_center <= share / 200) for share in (50, 90)}
    return {
        "log_likelihood": jnp.mean(density) - jnp.log(groups * size),
        "rmse": jnp.sqrt(jnp.mean((fit / groups - y) ** 2)),
    } | covered


def in_units(scores: dict[str, jax.Array], unit: float) -> dict[str, np.ndarray]:
    """Scores of standardized responses as those of the responses."""
    scores = {name: np.asarray(value, float) for name, value in scores.items()}
    return scores | {"log_likelihood": scores["log_likelihood"] - np.log(unit), "rmse": scores["rmse"] * unit}
