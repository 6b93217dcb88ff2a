"""Scatter plots of particles in the plane of two coordinates, with their trajectories."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from numpyro_repulsion.plots.draws import choose_iterations, listed, read_draws
from numpyro_repulsion.plots.landscape import LEVELS, draw_contours, find_limits
from numpyro_repulsion.plots.style import COLOURS, check_axes, ensemble_colours, new_axes

__all__ = ["Stage", "plot_particles", "set_stage"]

#: More points than this are drawn small and translucent.
MANY = 300


def plot_particles(
    draws: Any,
    potential: Callable | None = None,
    *,
    pair: Sequence[str | int] | None = None,
    iterations: Any = None,
    trajectories: bool = False,
    limits: Any = None,
    levels: Sequence[float] = LEVELS,
    num_ensembles: int | None = None,
    colors: Any = None,
    ax: Any = None,
    **kwargs: Any,
) -> Any:
    r"""Plots particles in the plane of two coordinates, over contours of a potential, with their trajectories.

    Each ensemble has its colour. For an optimizer (:class:`~numpyro_repulsion.SVGD`), an ``MCMC`` has the whole path,
    and inference data only the last cloud.

    :param draws: an array ``(particles, draws, ...)`` or a dictionary of such; an ``MCMC`` that has run; or inference
        data (ArviZ) with a ``posterior``.
    :param potential: U, a function in ``jax.numpy`` of one point ``(2,)`` of the two coordinates as drawn; it is
        vectorized here. Contours hold the shares ``levels`` of the mass of exp(−U) within the limits. ``None`` draws
        none.
    :param pair: the two coordinates, x and y: labels as in ArviZ's tables, ``("mu", "beta[0]")``, or numbers if there
        is one variable. ``None`` if there are just two.
    :param iterations: the draws: a number, a slice, or a sequence of numbers. ``None`` is the last one, and all with
        trajectories.
    :param trajectories: whether lines join the draws of each particle, from a small ring to a dot at the last one.
    :param limits: ``(low, high)`` for both axes, or one such pair each. ``None`` includes the particles, or keeps the
        limits of axes that already show data.
    :param levels: shares of the mass for the contours, each between 0 and 1.
    :param num_ensembles: number of equal ensembles, in the order of the particles. ``None`` reads it from runs and
        their inference data, and is 1 for arrays.
    :param colors: a colour, or one for each ensemble.
    :param ax: axes to draw on; ``None`` makes a figure. Both axes get one scale if they show the same variable.
    :param kwargs: passed to ``Axes.scatter`` for the dots.
    :return: the axes.
    :raises ImportError: without matplotlib.
    :raises ValueError: without draws, for coordinates that do not exist or are not chosen, and for settings out of
        range.
    :raises TypeError: for arguments of a wrong type.

    **References:**

    1. *Stochastic Gradient MCMC with Repulsive Forces*, V. Gallego and D. Ríos Insua,
       https://arxiv.org/abs/1812.00071, Figures 2 and 6

    **Example**

    .. doctest::

        >>> from jax import random
        >>> from numpyro_repulsion import plot_particles
        >>> draws = random.normal(random.key(0), (6, 50, 2)).cumsum(1)
        >>> ax = plot_particles(draws, lambda z: z @ z / 200, trajectories=True, num_ensembles=2)
        >>> ax.get_xlabel(), ax.get_ylabel()
        ('z[0]', 'z[1]')
    """
    if iterations is None:
        iterations = slice(None) if trajectories else -1
    stage = set_stage(draws, potential, pair, iterations, limits, levels, num_ensembles, colors, ax)
    if trajectories and stage.points.shape[2] < 2:
        raise ValueError("A trajectory needs two draws or more; got one. Choose more `iterations`.")
    shown = stage.points[:, :, -1:] if trajectories else stage.points
    style = dot_style(shown[..., 0].size)
    for i, (colour, label) in enumerate(zip(stage.colours, stage.labels, strict=True)):
        if trajectories:
            stage.ax.add_collection(trail_of(stage.points[i], colour))
            ring = {"s": 14, "facecolors": "white", "edgecolors": [colour], "linewidths": 0.8, "zorder": 2}
            stage.ax.scatter(*stage.points[i, :, 0].T, **ring)
        dots = shown[i].reshape(-1, 2).T
        stage.ax.scatter(*dots, **{"color": [colour], "label": label, "zorder": 3} | style | kwargs)
    add_legend(stage)
    return stage.ax


class Stage(NamedTuple):
    """Axes with limits, names and contours, and the particles to draw on them.

    - **points** - ``(ensembles, particles, draws, 2)``.
    - **iterations** - the numbers of these draws.
    - **colours**, **labels** - one for each ensemble.
    """

    ax: Any
    points: np.ndarray
    iterations: np.ndarray
    colours: list[Any]
    labels: list[str | None]


def set_stage(
    draws: Any,
    potential: Callable | None,
    pair: Sequence[str | int] | None,
    iterations: Any,
    limits: Any,
    levels: Sequence[float],
    num_ensembles: int | None,
    colors: Any,
    ax: Any,
) -> Stage:
    """Draw everything but the particles; the arguments are those of :func:`plot_particles`."""
    check_axes(ax)
    found = read_draws(draws, num_ensembles)
    chosen = choose_iterations(iterations, found.num_draws)
    (x, x_label), (y, y_label) = (found.pick(label) for label in _pair(found, pair))
    points = np.stack((x[:, chosen], y[:, chosen]), -1).astype(float)
    count = found.num_ensembles
    colours = ensemble_colours(count, colors)
    is_one_variable = x_label.split("[")[0] == y_label.split("[")[0]
    window = find_limits(limits, points, ax, is_one_variable)
    ax = new_axes((5.0, 5.0)) if ax is None else ax
    if potential is not None:
        draw_contours(ax, potential, levels, window)
    ax.set(xlim=window[0], ylim=window[1], xlabel=x_label, ylabel=y_label)
    if is_one_variable:
        ax.set_aspect("equal")
    labels: list[str | None] = [f"ensemble {i}" for i in range(count)] if count > 1 else [None]
    return Stage(ax, points.reshape(count, -1, *points.shape[1:]), chosen, colours, labels)


def trail_of(points: np.ndarray, colour: Any) -> Any:
    """Return a line through the draws of each particle, for points ``(particles, draws, 2)``."""
    from matplotlib.collections import LineCollection

    return LineCollection(list(points), colors=[colour], linewidths=0.8, alpha=0.45, zorder=1)


def dot_style(number: int) -> dict[str, Any]:
    """Return the style of this number of dots."""
    if number > MANY:
        return {"s": 6, "linewidths": 0, "alpha": 0.5}
    return {"s": 32, "edgecolors": "white", "linewidths": 0.6}


def add_legend(stage: Stage) -> None:
    """Adds a legend of ensembles if the palette has enough colours for them."""
    if 1 < len(stage.colours) <= len(COLOURS):
        legend = stage.ax.legend(fontsize="small", edgecolor="none", framealpha=0.9)
        for handle in legend.legend_handles:
            handle.set(alpha=1.0, sizes=[32])


def _pair(draws, pair):
    if pair is None:
        if draws.num_coordinates != 2:
            raise ValueError(
                f"A plot shows two coordinates, and the draws have {draws.num_coordinates}: name two by `pair`, of "
                f"{listed(draws.labels())}" + (", or by their numbers." if len(draws.values) == 1 else ".")
            )
        return draws.labels()
    if isinstance(pair, str) or not isinstance(pair, Sequence) or len(pair) != 2:
        raise ValueError(f"`pair` must be two coordinates, such as ('mu', 'beta[0]') or (0, 1); got {pair!r}.")
    return pair
