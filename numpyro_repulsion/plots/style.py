"""What pictures have in common: matplotlib, axes and colours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["COLOURS", "check_axes", "ensemble_colours", "new_axes", "require_pyplot"]

#: Of Okabe and Ito's colours, which colour-blind readers tell apart, those that are legible on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")


def require_pyplot() -> Any:
    """``matplotlib.pyplot``, or an error that says how to get it."""
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError(
            'Pictures are drawn by matplotlib: install it, or this package with its extra "plots", '
            'pip install "numpyro-repulsion[plots]".'
        ) from error
    return plt


def check_axes(ax: Any) -> None:
    """Refuses what are no axes; and everything where there is no matplotlib."""
    plt = require_pyplot()
    if ax is not None and not isinstance(ax, plt.Axes):
        raise TypeError(f"`ax` must be axes of matplotlib, one of those from plt.subplots(); got {type(ax).__name__}.")


def new_axes(size: tuple[float, float]) -> Any:
    """Axes in a figure of this size in inches."""
    ax = require_pyplot().subplots(figsize=size, layout="constrained")[1]
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def ensemble_colours(count: int, colors: str | Sequence[Any] | None = None) -> list[Any]:
    """A colour for each ensemble: those given, or the palette's, or for more ensembles than it has a scale's."""
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
