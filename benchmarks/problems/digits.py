"""Scikit-learn's 8 x 8 digits without one class, a small convolutional network for them, and scores of predictions."""

from typing import NamedTuple

import jax
from jax import nn
import jax.numpy as jnp
import numpy as np

import numpyro
import numpyro.distributions as dist

#: The last class, which no network is trained on; its images show what a network says of something unknown.
LEFT_OUT = 9
NUM_TEST = 600
CHANNELS, HIDDEN = 8, 32
#: Shapes of the weights; the inputs of a unit are along all axes but the last.
SHAPES = {"convolution": (9, CHANNELS), "dense": (9 * CHANNELS, HIDDEN), "classes": (HIDDEN, LEFT_OUT)}
#: Equal bins of the top probability for the calibration error, and of the entropy for histograms.
CONFIDENCE_BINS, ENTROPY_BINS = 15, 18


class Split(NamedTuple):
    """Images ``(rows, 8, 8)`` between -1 and 1: to fit, to score, and unknown to the network."""

    X: jax.Array
    y: jax.Array
    X_test: jax.Array
    y_test: jax.Array
    rotated: jax.Array
    left_out: jax.Array


def split(validation: bool = False) -> Split:
    """The one split; for validation its training rows alone, a fifth of them scored.

    Rotated images are the scored ones, turned by 90 degrees. The left-out class has all of its rows, on either side of
    the split, because no network was trained on them.
    """
    from sklearn.datasets import load_digits

    found = load_digits()
    images, digits = (found.images / 8.0 - 1.0).astype(np.float32), found.target
    test, train = np.split(np.random.default_rng(0).permutation(len(digits)), [NUM_TEST])
    if validation:
        test, train = np.split(train, [len(train) // 5])
    train, test = (rows[digits[rows] != LEFT_OUT] for rows in (train, test))
    rotated = np.rot90(images[test], axes=(1, 2)).copy()
    parts = images[train], digits[train], images[test], digits[test], rotated, images[digits == LEFT_OUT]
    return Split(*(jnp.asarray(part) for part in parts))


def logits(weights: dict[str, jax.Array], images: jax.Array) -> jax.Array:
    """Logits of the nine classes, ``(rows, 9)``, from one network's weights."""
    # A 3 x 3 convolution without padding, as a product: each image has 6 x 6 patches.
    patches = jnp.stack([images[:, i : i + 6, j : j + 6] for i in range(3) for j in range(3)], -1)
    x = nn.relu(patches @ weights["convolution"] + weights["convolution_bias"])
    x = x.reshape(-1, 3, 2, 3, 2, CHANNELS).mean((2, 4)).reshape(-1, 9 * CHANNELS)
    x = nn.relu(x @ weights["dense"] + weights["dense_bias"])
    return x @ weights["classes"] + weights["classes_bias"]


def network(images, digits=None, subsample_size: int | None = None) -> None:
    """Weights and biases with a variance of two over the number of inputs, which keeps the size of signals."""
    weights = {}
    for name, shape in SHAPES.items():
        prior = dist.Normal(0, (2 / shape[0]) ** 0.5)
        weights[name] = numpyro.sample(name, prior.expand(shape).to_event(2))
        weights[f"{name}_bias"] = numpyro.sample(f"{name}_bias", prior.expand(shape[1:]).to_event(1))
    with numpyro.plate("rows", len(images), subsample_size=subsample_size) as i:
        observed = None if digits is None else digits[i]
        numpyro.sample("digit", dist.Categorical(logits=logits(weights, images[i])), obs=observed)


def score(known: np.ndarray, digits: np.ndarray, rotated: np.ndarray, left_out: np.ndarray) -> dict:
    """Scores of class probabilities ``(rows, 9)``, with the counts that the figure needs.

    :param known: probabilities for scored rows, whose digits are given.
    :param rotated: for the same rows, rotated.
    :param left_out: for rows of the class that is left out.
    """
    from sklearn.metrics import roc_auc_score

    known = np.asarray(known, float)
    tiny = np.finfo(float).tiny
    right, top = known.argmax(1) == digits, known.max(1)
    which = np.minimum((top * CONFIDENCE_BINS).astype(int), CONFIDENCE_BINS - 1)
    counts, hits, sums = (np.bincount(which, x, CONFIDENCE_BINS) for x in (np.ones(len(top)), right, top))
    groups = {"known": known, "rotated": np.asarray(rotated, float), "left_out": np.asarray(left_out, float)}
    entropies = {name: -(p * np.log(p + tiny)).sum(1) for name, p in groups.items()}

    def auroc(name):
        unknown = np.repeat([0, 1], [len(entropies["known"]), len(entropies[name])])
        return float(roc_auc_score(unknown, np.concatenate([entropies["known"], entropies[name]])))

    edges = np.linspace(0, np.log(LEFT_OUT) + 1e-6, ENTROPY_BINS + 1)
    return {
        "accuracy": float(right.mean()),
        "nll": float(-np.log(known[np.arange(len(digits)), digits] + tiny).mean()),
        "calibration_error": float(np.abs(hits - sums).sum() / len(top)),
        "auroc_rotated": auroc("rotated"),
        "auroc_left_out": auroc("left_out"),
        "confidence_bins": {"count": counts.tolist(), "right": hits.tolist(), "confidence": sums.tolist()},
        "entropy_bins": {name: np.histogram(x, edges)[0].tolist() for name, x in entropies.items()},
    }
