"""Limits of a plot, and contours of the potential within them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

__all__ = ["LEVELS", "draw_contours", "find_limits"]

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
    """Draw in grey the regions of highest density that hold these shares of exp(−U) within the limits."""
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
    greys = [str(grey) for grey in np.linspace(max(0.96 - 0.03 * len(heights), 0.7), 0.96, len(heights))]
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
