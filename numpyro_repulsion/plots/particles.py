"""Scatter plots of particles in the plane of two coordinates, with their trajectories."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from numpyro_repulsion.plots.draws import (
    COLORS,
    check_axes,
    choose_iterations,
    ensemble_colors,
    listed,
    new_axes,
    read_draws,
)

__all__ = [
    "LEVELS",
    "Stage",
    "draw_contours",
    "find_limits",
    "plot_particles",
    "set_stage",
]

#: Shares of the mass that the contours hold by default.
LEVELS = (0.1, 0.3, 0.5, 0.7, 0.9, 0.99)
#: Grid points in each direction, and how many points are evaluated at once.
GRID = 160
BATCH = 256
#: White space around the particles, as a share of their range.
MARGIN = 0.1


def find_limits(limits: Any, points: np.ndarray, ax: Any, is_square: bool) -> np.ndarray:
    """Return limits ``[[low, high], [low, high]]``: those given, those of axes in use, or ones around the particles.

    :param points: ``(..., 2)``.
    :param is_square: whether both ranges must have equal length.
    """
    if limits is not None:
        try:
            found = np.asarray(limits, float)
        except (TypeError, ValueError):
            found = np.empty(0)
        if found.shape not in ((2,), (2, 2)) or not np.isfinite(found).all() or (found[..., 0] >= found[..., 1]).any():
            raise ValueError(f"`limits` must be (low, high), or one such pair each for x and y; got {limits!r}.")
        return np.broadcast_to(found, (2, 2))
    if ax is not None and ax.has_data():
        return np.array([ax.get_xlim(), ax.get_ylim()])
    points = points.reshape(-1, 2)
    points = points[np.isfinite(points).all(1)]
    if not len(points):
        raise ValueError("There is nothing to draw: no particle has a finite position.")
    low, high = points.min(0), points.max(0)
    half = np.where(high > low, (0.5 + MARGIN) * (high - low), 0.5)
    half = half.max() if is_square else half
    middle = (low + high)[:, None] / 2.0
    return middle + np.multiply.outer(np.broadcast_to(half, 2), [-1.0, 1.0])


def draw_contours(ax: Any, potential: Callable, levels: Sequence[float], limits: np.ndarray) -> None:
    """Draw in gray the regions of highest density that hold these shares of exp(−U) within the limits."""
    masses = _masses(levels)
    sides = [np.linspace(low, high, GRID) for low, high in limits]
    energy = _evaluate(potential, sides)
    # There is no mass where U is not finite.
    energy = np.where(np.isfinite(energy), energy, np.inf)
    if not np.isfinite(energy).any():
        raise ValueError(f"`potential` is nowhere finite within the limits {limits.tolist()}.")
    lowest = energy.min()
    ordered = np.sort(energy, None)
    density = np.exp(lowest - ordered)
    heights = np.interp(masses, np.cumsum(density) / density.sum(), ordered)
    top = ordered[np.isfinite(ordered)][-1]
    heights = np.unique(heights[(heights > lowest) & (heights < top)])
    if not len(heights):
        return
    energy = np.ma.masked_invalid(energy)
    greys = [str(gray) for gray in np.linspace(max(0.96 - 0.03 * len(heights), 0.7), 0.96, len(heights))]
    ax.contourf(*sides, energy, levels=[lowest, *heights], colors=greys, zorder=0)
    ax.contour(*sides, energy, levels=heights, colors="0.65", linewidths=0.6, zorder=0.5)


def _masses(levels):
    try:
        masses = np.asarray(levels, float)
    except (TypeError, ValueError):
        masses = np.empty(0)
    if masses.ndim != 1 or not masses.size or not ((masses > 0) & (masses < 1)).all():
        raise ValueError(f"`levels` must be shares of the mass, each between 0 and 1; got {levels!r}.")
    return np.sort(masses)


def _evaluate(potential, sides):
    if not callable(potential):
        raise TypeError(
            f"`potential` must be a function of one point, (2,) → scalar, in jax.numpy; got {type(potential).__name__}."
        )
    points = jnp.stack(jnp.meshgrid(*map(jnp.asarray, sides)), -1).reshape(-1, 2)
    shape = jax.eval_shape(potential, points[0])
    if getattr(shape, "shape", None) != ():
        raise ValueError(f"`potential` must return a scalar for a point of shape (2,); got {shape}.")
    # The likelihood of many rows at all points at once would not fit into memory.
    energy = jax.jit(lambda points: lax.map(potential, points, batch_size=BATCH))(points)
    return np.asarray(energy, float).reshape(GRID, GRID)


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

    Each ensemble has its color. For an optimizer (:class:`~numpyro_repulsion.SVGD`), an ``MCMC`` has the whole path,
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
    :param colors: a color, or one for each ensemble.
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
        >>> from numpyro_repulsion.plots import plot_particles
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
    for i, (color, label) in enumerate(zip(stage.colors, stage.labels, strict=True)):
        if trajectories:
            stage.ax.add_collection(trail_of(stage.points[i], color))
            ring = {"s": 14, "facecolors": "white", "edgecolors": [color], "linewidths": 0.8, "zorder": 2}
            stage.ax.scatter(*stage.points[i, :, 0].T, **ring)
        dots = shown[i].reshape(-1, 2).T
        stage.ax.scatter(*dots, **{"color": [color], "label": label, "zorder": 3} | style | kwargs)
    add_legend(stage)
    return stage.ax


class Stage(NamedTuple):
    """Axes with limits, names and contours, and the particles to draw on them.

    - **points** - ``(ensembles, particles, draws, 2)``.
    - **iterations** - the numbers of these draws.
    - **colors**, **labels** - one for each ensemble.
    """

    ax: Any
    points: np.ndarray
    iterations: np.ndarray
    colors: list[Any]
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
    colors = ensemble_colors(count, colors)
    is_one_variable = x_label.split("[")[0] == y_label.split("[")[0]
    window = find_limits(limits, points, ax, is_one_variable)
    ax = new_axes((5.0, 5.0)) if ax is None else ax
    if potential is not None:
        draw_contours(ax, potential, levels, window)
    ax.set(xlim=window[0], ylim=window[1], xlabel=x_label, ylabel=y_label)
    if is_one_variable:
        ax.set_aspect("equal")
    labels: list[str | None] = [f"ensemble {i}" for i in range(count)] if count > 1 else [None]
    return Stage(ax, points.reshape(count, -1, *points.shape[1:]), chosen, colors, labels)


def trail_of(points: np.ndarray, color: Any) -> Any:
    """Return a line through the draws of each particle, for points ``(particles, draws, 2)``."""
    from matplotlib.collections import LineCollection

    return LineCollection(list(points), colors=[color], linewidths=0.8, alpha=0.45, zorder=1)


def dot_style(number: int) -> dict[str, Any]:
    """Return the style of this number of dots."""
    if number > MANY:
        return {"s": 6, "linewidths": 0, "alpha": 0.5}
    return {"s": 32, "edgecolors": "white", "linewidths": 0.6}


def add_legend(stage: Stage) -> None:
    """Adds a legend of ensembles if the palette has enough colors for them."""
    if 1 < len(stage.colors) <= len(COLORS):
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
