"""Particles in the plane of two coordinates: scatter plots, trajectories and animations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from numpyro_repulsion.checks import integer
from numpyro_repulsion.plots.draws import (
    COLORS,
    axes,
    check_axes,
    evaluate,
    listed,
    numbers,
    read_draws,
    require_pyplot,
)

#: Shares of the mass that the contours hold by default.
LEVELS = (0.1, 0.3, 0.5, 0.7, 0.9, 0.99)


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
    r"""Plot particles in the plane of two coordinates, over contours of a potential, with their trajectories.

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
    ax, points, _, colors, labels = _stage(
        draws, potential, pair, iterations, limits, levels, num_ensembles, colors, ax
    )
    if trajectories and points.shape[2] < 2:
        raise ValueError("A trajectory needs two draws or more; got one. Choose more `iterations`.")
    shown = points[:, :, -1:] if trajectories else points
    for of_ensemble, ends, color, label in zip(points, shown, colors, labels, strict=True):
        if trajectories:
            _trace(ax, of_ensemble, color)
            ring = {"s": 14, "facecolors": "white", "edgecolors": [color], "linewidths": 0.8, "zorder": 2}
            ax.scatter(*of_ensemble[:, 0].T, **ring)
        _dots(ax, ends.reshape(-1, 2), shown[..., 0].size, color, label, kwargs)
    _add_legend(ax, labels)
    return ax


def animate_particles(
    draws: Any,
    potential: Callable | None = None,
    *,
    pair: Sequence[str | int] | None = None,
    iterations: Any = None,
    trail: int = 10,
    interval: float = 50.0,
    limits: Any = None,
    levels: Sequence[float] = LEVELS,
    num_ensembles: int | None = None,
    colors: Any = None,
    ax: Any = None,
    **kwargs: Any,
) -> Any:
    """Return an animation, one frame of :func:`~numpyro_repulsion.plots.plot_particles` for each draw.

    Notebooks show ``animation.to_jshtml()``; ``animation.save("cloud.gif", writer="pillow")`` needs matplotlib alone.
    Keep it in a variable until it is saved or shown. Arguments that are not listed are those of :func:`plot_particles`.

    :param iterations: the draws, one for each frame: a slice such as ``slice(0, 200, 2)``, or a sequence of numbers.
        ``None`` is all.
    :param trail: the number of preceding draws over which lines trace the particles; 0 for none.
    :param interval: milliseconds between frames.
    :param limits: as for :func:`plot_particles`; ``None`` includes the particles of all frames.
    :return: ``matplotlib.animation.FuncAnimation``.
    :raises ImportError: without matplotlib.
    :raises ValueError: as :func:`plot_particles` does, and for a negative trail or an interval that is not positive.
    :raises TypeError: as :func:`plot_particles` does.

    **Example**

    .. doctest::

        >>> from tempfile import TemporaryDirectory
        >>> from jax import random
        >>> from numpyro_repulsion.plots import animate_particles
        >>> draws = random.normal(random.key(0), (6, 5, 2)).cumsum(1)
        >>> animation = animate_particles(draws)
        >>> with TemporaryDirectory() as folder:
        ...     animation.save(f"{folder}/cloud.gif", writer="pillow")
    """
    trail = integer("`trail`", trail, 0, "a number of draws, 0 or more")
    if not interval > 0:
        raise ValueError(f"`interval` must be a time in milliseconds, above 0; got {interval!r}.")
    iterations = slice(None) if iterations is None else iterations
    ax, points, iterations, colors, labels = _stage(
        draws, potential, pair, iterations, limits, levels, num_ensembles, colors, ax
    )
    from matplotlib.animation import FuncAnimation

    number, dots, lines = points[:, :, 0, 0].size, [], []
    for of_ensemble, color, label in zip(points, colors, labels, strict=True):
        dots.append(_dots(ax, of_ensemble[:, 0], number, color, label, kwargs))
        lines.append(_trace(ax, of_ensemble[:, :1], color))
    clock = ax.text(0.02, 0.98, "", transform=ax.transAxes, ha="left", va="top", fontsize="small")
    _add_legend(ax, labels)

    def update(frame):
        since = max(0, frame - trail)
        for i, of_ensemble in enumerate(points):
            dots[i].set_offsets(of_ensemble[:, frame])
            lines[i].set_segments(list(of_ensemble[:, since : frame + 1]))
        clock.set_text(f"draw {iterations[frame]}")
        return [*dots, *lines, clock]

    return FuncAnimation(ax.figure, update, frames=len(iterations), interval=interval)


def _stage(draws, potential, pair, iterations, limits, levels, num_ensembles, colors, ax):
    """Draw everything but the particles; return the axes, the particles ``(ensembles, particles, draws, 2)``, the
    numbers of these draws, and a color and a label for each ensemble."""
    check_axes(ax)
    found = read_draws(draws, num_ensembles)
    chosen = _iterations(iterations, found.num_draws)
    (x, x_label), (y, y_label) = (found.pick(label) for label in _pair(found, pair))
    points = np.stack((x[:, chosen], y[:, chosen]), -1).astype(float)
    count = found.num_ensembles
    colors = _ensemble_colors(count, colors)
    is_one_variable = x_label.split("[")[0] == y_label.split("[")[0]
    window = _window(limits, points, ax, is_one_variable)
    ax = axes(ax, (5.0, 5.0))
    if potential is not None:
        _draw_contours(ax, potential, levels, window)
    ax.set(xlim=window[0], ylim=window[1], xlabel=x_label, ylabel=y_label)
    if is_one_variable:
        ax.set_aspect("equal")
    labels = [f"ensemble {i}" for i in range(count)] if count > 1 else [None]
    return ax, points.reshape(count, -1, *points.shape[1:]), chosen, colors, labels


def _pair(draws, pair):
    if pair is None:
        labels = draws.labels()
        if len(labels) != 2:
            raise ValueError(
                f"A plot shows two coordinates, and the draws have {len(labels)}: name two by `pair`, of "
                f"{listed(labels)}" + (", or by their numbers." if len(draws.values) == 1 else ".")
            )
        return labels
    if isinstance(pair, str) or not isinstance(pair, Sequence) or len(pair) != 2:
        raise ValueError(f"`pair` must be two coordinates, such as ('mu', 'beta[0]') or (0, 1); got {pair!r}.")
    return pair


def _iterations(iterations, number):
    """Return the numbers of the draws that an integer, a slice, or a sequence of integers or booleans chooses."""
    index = list(iterations) if isinstance(iterations, range | tuple) else iterations
    try:
        chosen = np.atleast_1d(np.arange(number)[index])
    except (IndexError, TypeError) as error:
        raise ValueError(
            f"`iterations` must be a draw's number, a slice, or a sequence of numbers, of draws 0 to {number - 1}; got "
            f"{iterations!r}."
        ) from error
    if chosen.ndim > 1 or not chosen.size:
        raise ValueError(f"`iterations` must choose at least one of {number} draws, in one row; got {iterations!r}.")
    return chosen


def _ensemble_colors(count, colors):
    """Return a color for each ensemble: those given, or the palette's, or a scale's if the palette has too few."""
    if isinstance(colors, str):
        return [colors] * count
    if colors is not None:
        if len(colors) != count:
            raise ValueError(f"`colors` must be one color, or one for each of {count} ensembles; got {len(colors)}.")
        return list(colors)
    if count <= len(COLORS):
        return COLORS[:count]
    scale = require_pyplot().get_cmap("viridis")
    return [scale(0.9 * i / (count - 1)) for i in range(count)]


def _window(limits, points, ax, is_square):
    """Return limits ``[[low, high], [low, high]]``: those given, those of axes in use, or ones around the particles."""
    if limits is not None:
        found = numbers(limits)
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
    # White space of a tenth of the range on each side.
    half = np.where(high > low, 0.6 * (high - low), 0.5)
    half = np.full(2, half.max()) if is_square else half
    return np.stack(((low + high) / 2 - half, (low + high) / 2 + half), 1)


def _draw_contours(ax, potential, levels, limits):
    """Draw in gray the regions of highest density that hold these shares of exp(−U) within the limits."""
    masses = numbers(levels)
    if masses.ndim != 1 or not masses.size or not ((masses > 0) & (masses < 1)).all():
        raise ValueError(f"`levels` must be shares of the mass, each between 0 and 1; got {levels!r}.")
    if not callable(potential):
        raise TypeError(
            f"`potential` must be a function of one point, (2,) → scalar, in jax.numpy; got {type(potential).__name__}."
        )
    sides = [np.linspace(low, high, 160) for low, high in limits]
    points = jnp.stack(jnp.meshgrid(*map(jnp.asarray, sides)), -1)
    energy = evaluate("potential", potential, points.reshape(-1, 2), "a point of shape (2,)")
    # There is no mass where U is not finite.
    energy = np.where(np.isfinite(energy), energy, np.inf)
    if not np.isfinite(energy).any():
        raise ValueError(f"`potential` is nowhere finite within the limits {limits.tolist()}.")
    ordered = np.sort(energy)
    lowest, top = ordered[0], ordered[np.isfinite(ordered)][-1]
    density = np.exp(lowest - ordered)
    heights = np.interp(np.sort(masses), np.cumsum(density) / density.sum(), ordered)
    heights = np.unique(heights[(heights > lowest) & (heights < top)])
    if not len(heights):
        return
    energy = np.ma.masked_invalid(energy.reshape(points.shape[:2]))
    greys = [str(gray) for gray in np.linspace(max(0.96 - 0.03 * len(heights), 0.7), 0.96, len(heights))]
    ax.contourf(*sides, energy, levels=[lowest, *heights], colors=greys, zorder=0)
    ax.contour(*sides, energy, levels=heights, colors="0.65", linewidths=0.6, zorder=0.5)


def _trace(ax, points, color):
    """Add a line through the draws of each particle, for points ``(particles, draws, 2)``."""
    from matplotlib.collections import LineCollection

    return ax.add_collection(LineCollection(list(points), colors=[color], linewidths=0.8, alpha=0.45, zorder=1))


def _dots(ax, points, number, color, label, settings):
    """Add the dots of an ensemble: small and translucent if there is a large number in all."""
    many = {"s": 6, "linewidths": 0, "alpha": 0.5}
    style = many if number > 300 else {"s": 32, "edgecolors": "white", "linewidths": 0.6}
    return ax.scatter(*points.T, **{"color": [color], "label": label, "zorder": 3} | style | settings)


def _add_legend(ax, labels):
    if 1 < len(labels) <= len(COLORS):  # The palette has enough colors.
        legend = ax.legend(fontsize="small", edgecolor="none", framealpha=0.9)
        for handle in legend.legend_handles:
            handle.set(alpha=1.0, sizes=[32])
