"""Running estimates, which show how averages converge."""

from __future__ import annotations

from collections.abc import Callable
from statistics import NormalDist
from typing import Any

import jax.numpy as jnp
import numpy as np

from numpyro_repulsion.checks import number
from numpyro_repulsion.diagnostics import ensemble_mcse
from numpyro_repulsion.plots.draws import COLORS, axes, check_axes, evaluate, numbers, read_draws

#: Marks the lines of estimates among the artists of the axes.
MARK = "running estimate"


def plot_running_estimates(
    runs: Any,
    estimand: str | int | Callable | None = None,
    *,
    truth: float | None = None,
    times: Any = None,
    prob: float = 0.9,
    num_ensembles: int | None = None,
    label: str | None = None,
    color: Any = None,
    ax: Any = None,
    **kwargs: Any,
) -> Any:
    r"""Plot the mean over all draws so far, of all particles, against iterations or time.

    For several runs, repeats of each other, the line is the median at each time, and the band holds the share ``prob``
    of them (between interpolated quantiles). For a single run the line is its estimate, and the band is as many
    standard errors wide as would hold that share of a Gaussian, from :func:`~numpyro_repulsion.ensemble_mcse` for the
    draws so far, where known; it leaves out bias from the step size or from the start. Call the function again with the
    same axes to compare kernels.

    :param runs: a run: an array ``(particles, draws, ...)`` or a dictionary of such, an ``MCMC`` that has run, or
        inference data (ArviZ). Or a list of runs with equally many draws.
    :param estimand: the quantity to average: the label of a coordinate, ``"beta[0]"``; its number, if there is one
        variable; or a function in ``jax.numpy`` of one draw, an array or a dictionary of arrays, to a scalar; it is
        vectorized here. ``None`` if there is one coordinate.
    :param truth: the true value, drawn as a black line.
    :param times: seconds for the x-axis: one number for a whole run, which presumes even speed; or ``(draws,)``
        increasing numbers. ``None`` shows iterations (draws times thinning).
    :param prob: the share that the band holds, between 0 and 1.
    :param num_ensembles: as for :func:`plot_particles`.
    :param label: the label of the line in the legend.
    :param color: the color of the line and the band; ``None`` takes the next of the palette.
    :param ax: axes to draw on; ``None`` makes a figure.
    :param kwargs: passed to ``Axes.plot`` for the line.
    :return: the axes.
    :raises ImportError: without matplotlib.
    :raises ValueError: without draws, for runs of different lengths, an estimand that does not exist, is not chosen or
        is not a scalar, an optimizer, whose path has no mean, and settings out of range.
    :raises TypeError: for arguments of a wrong type.

    **References:**

    1. *Stochastic Gradient MCMC with Repulsive Forces*, V. Gallego and D. Ríos Insua,
       https://arxiv.org/abs/1812.00071, Figures 3 and 4

    **Example**

    .. doctest::

        >>> from jax import random
        >>> from numpyro_repulsion.plots import plot_running_estimates
        >>> repeats = random.normal(random.key(0), (5, 10, 200))  # five runs of ten particles
        >>> ax = plot_running_estimates(list(repeats), lambda z: z**2, truth=1.0)
        >>> ax.get_xlabel()
        'iteration'
    """
    check_axes(ax)
    prob = number("`prob`", prob, "a number between 0 and 1", lambda x: 0.0 < x < 1.0)
    if truth is not None:
        truth = number("`truth`", truth, "a finite number", lambda x: True)
    found = [_series(run, estimand, num_ensembles) for run in (runs if isinstance(runs, list | tuple) else [runs])]
    if not found:
        raise ValueError("There are no runs; expected one or more.")
    draws, _, name = found[0]
    if len({(one.num_draws, one.thinning) for one, *_ in found}) > 1:
        lengths = [one.num_draws * one.thinning for one, *_ in found]
        raise ValueError(f"All runs must have the same number of iterations and draws; got {lengths} iterations.")
    x = _times(times, draws)
    running = np.stack([np.cumsum(f.mean(0)) / np.arange(1, len(x) + 1) for _, f, _ in found])
    if len(found) > 1:
        middle = np.median(running, 0)
        low, high = np.quantile(running, [(1.0 - prob) / 2.0, (1.0 + prob) / 2.0], 0)
    else:
        middle = running[0]
        half = NormalDist().inv_cdf((1.0 + prob) / 2.0) * _errors(found[0][1], draws.num_independent)
        low, high = middle - half, middle + half
    ax = axes(ax, (6.0, 3.6))
    if color is None:
        color = COLORS[sum(line.get_gid() == MARK for line in ax.lines) % len(COLORS)]
    ax.plot(x, middle, **{"color": color, "label": label, "gid": MARK, "linewidth": 1.5, "zorder": 3} | kwargs)
    ax.fill_between(x, low, high, color=color, alpha=0.2, linewidth=0, zorder=2)
    if truth is not None:
        ax.axhline(truth, color="black", linewidth=1.0, label="truth", zorder=2.5)
    ax.set(xlabel="iteration" if times is None else "seconds", ylabel=name)
    ax.set_xlim(0, max(x[-1], ax.dataLim.x1))
    if label is not None or truth is not None:
        # By name, so that labels from several calls occur once, and the truth comes last.
        handles, names = ax.get_legend_handles_labels()
        entries = dict(sorted(zip(names, handles, strict=True), key=lambda entry: entry[0] == "truth"))
        ax.legend(entries.values(), entries.keys(), frameon=False)
    return ax


def _series(run, estimand, num_ensembles):
    """Return the draws, the estimand of each ``(particles, draws)``, and its name."""
    draws = read_draws(run, num_ensembles)
    if not draws.is_sampler:
        raise ValueError(
            "The path of an optimizer, such as SVGD, is not a sample: its average estimates nothing. Use SGLDR for "
            "draws."
        )
    if callable(estimand):
        flat = {name: jnp.asarray(value).reshape(-1, *value.shape[2:]) for name, value in draws.values.items()}
        values = evaluate("estimand", estimand, flat["z"] if draws.is_array else flat, "one draw")
        name = getattr(estimand, "__name__", "<lambda>")
        label = "running mean" if name == "<lambda>" else f"running mean of {name}"
        return draws, values.reshape(draws.num_particles, draws.num_draws), label
    if estimand is None:
        if len(labels := draws.labels()) != 1:
            raise ValueError(
                f"The draws have {len(labels)} coordinates: name one by `estimand`, or pass a function of a draw."
            )
        (estimand,) = labels
    values, label = draws.pick(estimand)
    return draws, values.astype(float), f"running mean of {label}"


def _errors(f, num_ensembles):
    """Return the standard error of the mean so far at each draw, NaN at the first draws."""
    total, first = f.shape[1], 10
    if total < first:
        return np.full(total, np.nan)
    # They are computed at sixty places and interpolated.
    places = np.unique(np.linspace(first, total, 60).astype(int))
    errors = [float(ensemble_mcse(f[:, :place], num_ensembles)) for place in places]
    return np.interp(np.arange(1, total + 1), places, errors, left=np.nan)


def _times(times, draws):
    count = np.arange(1, draws.num_draws + 1)
    if times is None:
        return count * draws.thinning
    x = numbers(times)
    if x.ndim == 0:
        x = x * count / draws.num_draws
    if x.shape != count.shape or not np.isfinite(x).all() or (np.diff(x) <= 0).any() or x[-1] <= 0:
        raise ValueError(
            f"`times` must be the seconds of the whole run, above 0, or ({draws.num_draws},) increasing times of its "
            f"draws; got {times!r}."
        )
    return x
