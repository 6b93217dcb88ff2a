"""Calibration of predictions: coverage of intervals, probability integral transforms, reliability of classes."""

from __future__ import annotations

from statistics import NormalDist
from typing import Any

import numpy as np

from numpyro_repulsion.checks import integer, number
from numpyro_repulsion.plots.draws import COLORS, axes, check_axes
from numpyro_repulsion.predictions import Predictions

KINDS = ("coverage", "pit", "reliability")
#: Marks what a call has drawn among the artists of the axes.
MARK = "calibration"


def plot_calibration(
    predictions: Predictions,
    kind: str | None = None,
    *,
    bins: int = 10,
    prob: float = 0.9,
    label: str | None = None,
    color: Any = None,
    ax: Any = None,
) -> Any:
    r"""Plot whether predictions hold as often as they say.

    - ``"coverage"``: the share of observations in central intervals, against the share that they should hold. Above
      the diagonal intervals are too wide, below it too narrow.
    - ``"pit"``: a histogram of :meth:`~numpyro_repulsion.predictions.Predictions.pit`, flat where predictions are
      calibrated, shaped like ∪ where they are too narrow and like ∩ where they are too wide.
    - ``"reliability"``, for classes: how often the most probable class is right, against its probability, in bins of
      equally many observations. The legend has the expected calibration error, the mean distance from the diagonal.

    The gray band holds the share ``prob`` of calibrated predictions with as many independent observations; bars of
    ``"reliability"`` are intervals of that share. Call the function again with the same axes to compare.

    :param predictions: what :func:`~numpyro_repulsion.predict` returned for data with observations.
    :param kind: one of the three; ``None`` is ``"reliability"`` for classes and ``"coverage"`` otherwise.
    :param bins: the number of bins of ``"pit"`` and ``"reliability"``.
    :param prob: the share that bands hold, between 0 and 1.
    :param label: the label in the legend.
    :param color: the color; ``None`` takes the next of the palette.
    :param ax: axes to draw on; ``None`` makes a figure.
    :return: the axes.
    :raises ImportError: without matplotlib.
    :raises TypeError: for anything but predictions and axes.
    :raises ValueError: for an unknown kind, or one that does not apply; without observations; for settings out of
        range.

    **References:**

    1. *Probabilistic forecasts, calibration and sharpness*, T. Gneiting, F. Balabdaoui and A. E. Raftery,
       Journal of the Royal Statistical Society B 69, 2007
    2. *On Calibration of Modern Neural Networks*, C. Guo, G. Pleiss, Y. Sun and K. Q. Weinberger,
       https://arxiv.org/abs/1706.04599

    **Example**

    .. doctest::

        >>> import numpy as np
        >>> from numpyro_repulsion.plots import plot_calibration
        >>> from numpyro_repulsion.predictions import Predictions
        >>> rng = np.random.default_rng(0)
        >>> found = Predictions("y", replicates=rng.normal(size=(200, 50)), observed=rng.normal(size=50))
        >>> plot_calibration(found).get_ylabel()
        'observed coverage'
    """
    check_axes(ax)
    if not isinstance(predictions, Predictions):
        raise TypeError(f"plot_calibration takes what predict(mcmc, ...) returned; got {type(predictions).__name__}.")
    bins = integer("`bins`", bins)
    prob = number("`prob`", prob, "a number between 0 and 1", lambda x: 0.0 < x < 1.0)
    has_classes = predictions.probabilities is not None
    if kind is None:
        kind = "reliability" if has_classes else "coverage"
    if kind not in KINDS:
        raise ValueError(f"`kind` must be one of {list(KINDS)}; got {kind!r}.")
    if has_classes != (kind == "reliability"):
        applies = "reliability" if has_classes else "coverage' or 'pit"
        raise ValueError(
            f"'{predictions.site}' {'has' if has_classes else 'does not have'} classes: set kind='{applies}'."
        )
    # Before a figure is made.
    found = _reliability(predictions, bins) if has_classes else predictions.pit()
    ax = axes(ax, (4.2, 4.2))
    count = sum(artist.get_gid() == MARK for artist in ax.get_children())
    color = COLORS[count % len(COLORS)] if color is None else color
    width = NormalDist().inv_cdf((1.0 + prob) / 2.0)
    if kind == "reliability":
        _draw_reliability(ax, found, width, label, color, is_first=not count)
    else:
        share = found[~np.isnan(found)]
        draw = _draw_coverage if kind == "coverage" else _draw_pit
        draw(ax, share, width, label, color, bins, is_first=not count)
    if label is not None or kind == "reliability":
        ax.legend(frameon=False)
    return ax


def _draw_coverage(ax, share, width, label, color, bins, is_first):
    nominal = np.linspace(0.0, 1.0, 101)
    covered = (2.0 * np.abs(share - 0.5)[:, None] <= nominal).mean(0)
    if is_first:
        half = width * np.sqrt(nominal * (1.0 - nominal) / len(share))
        ax.fill_between(nominal, nominal - half, nominal + half, color="0.88", linewidth=0)
        ax.plot([0, 1], [0, 1], color="black", linewidth=0.8)
        ax.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
        ax.set(xlabel="nominal coverage of central intervals", ylabel="observed coverage")
    ax.plot(nominal, covered, color=color, linewidth=1.5, label=label, gid=MARK)


def _draw_pit(ax, share, width, label, color, bins, is_first):
    density, edges = np.histogram(share, bins, (0.0, 1.0), density=True)
    if is_first:
        half = width * np.sqrt((bins - 1.0) / len(share))
        ax.fill_between([0, 1], 1.0 - half, 1.0 + half, color="0.88", linewidth=0)
        ax.axhline(1.0, color="black", linewidth=0.8)
        ax.set(xlim=(0, 1), xlabel="predictive CDF at the observation (PIT)", ylabel="density")
    ax.stairs(density, edges, baseline=None, color=color, linewidth=1.5, label=label, gid=MARK)
    ax.set_ylim(0, max(1.05 * density.max(), 1.0 if is_first else ax.get_ylim()[1]))


def _reliability(predictions, bins):
    """Return probabilities, shares right and numbers of observations of the bins that have some."""
    probabilities = predictions.probabilities
    observed = predictions.require_observed()
    known = ~np.isnan(observed)
    confidence = probabilities.max(-1)[known]
    right = (probabilities.argmax(-1) == observed)[known]
    parts = [part for part in np.array_split(np.argsort(confidence, kind="stable"), bins) if len(part)]
    return np.array([(confidence[part].mean(), right[part].mean(), len(part)) for part in parts]).T


def _draw_reliability(ax, found, width, label, color, is_first):
    confidence, right, number = found
    error = float((np.abs(confidence - right) * number).sum() / number.sum())
    # Wilson's interval, which is not empty where all are right.
    center = (right + width**2 / (2 * number)) / (1 + width**2 / number)
    half = width * np.sqrt(right * (1 - right) / number + width**2 / (4 * number**2)) / (1 + width**2 / number)
    ax.axline((0, 0), slope=1, color="black", linewidth=0.8)
    ax.vlines(confidence, center - half, center + half, color=color, linewidth=1.0)
    said = f"{label}: " if label is not None else ""
    name = f"{said}calibration error {error:.3f}"
    ax.plot(confidence, right, "o-", color=color, markersize=4, linewidth=1.2, label=name, gid=MARK)
    low = min(confidence.min(), (center - half).min()) - 0.03
    low = max(0.0, low if is_first else min(low, ax.get_xlim()[0]))
    ax.set(xlim=(low, 1.01), ylim=(low, 1.01))
    ax.set(xlabel="probability of the most probable class", ylabel="accuracy")
