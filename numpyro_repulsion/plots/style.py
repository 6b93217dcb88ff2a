"""Matplotlib, axes and colours for all plots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["COLOURS", "check_axes", "ensemble_colours", "new_axes", "require_pyplot"]

#: Those of Okabe and Ito's colours, which colour-blind readers can tell apart, that are legible on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")


def require_pyplot() -> Any:
    """Return ``matplotlib.pyplot``, or raises an ``ImportError`` that says how to install it."""
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError(
            'Plots need matplotlib: install it, or this package with its extra "plots", '
            'pip install "numpyro-repulsion[plots]".'
        ) from error
    return plt


def check_axes(ax: Any) -> None:
    """Raise ``TypeError`` for anything but axes or ``None``, and ``ImportError`` without matplotlib."""
    plt = require_pyplot()
    if ax is not None and not isinstance(ax, plt.Axes):
        raise TypeError(f"`ax` must be axes of matplotlib, such as from plt.subplots(); got {type(ax).__name__}.")


def new_axes(size: tuple[float, float]) -> Any:
    """Return axes in a figure of this size in inches."""
    ax = require_pyplot().subplots(figsize=size, layout="constrained")[1]
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def ensemble_colours(count: int, colors: str | Sequence[Any] | None = None) -> list[Any]:
    """Return a colour for each ensemble: those given, or the palette's, or a scale's if the palette has too few."""
    if isinstance(colors, str):
        return [colors] * count
    if colors is not None:
        if len(colors) != count:
            raise ValueError(f"`colors` must be one colour, or one for each of {count} ensembles; got {len(colors)}.")
        return list(colors)
    if count <= len(COLOURS):
        return list(COLOURS[:count])
    scale = require_pyplot().get_cmap("viridis")
    return [scale(0.9 * i / (count - 1)) for i in range(count)]
