"""Animation of the cloud over the draws."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from numpyro_repulsion.checks import integer
from numpyro_repulsion.plots.particles import LEVELS, add_legend, dot_style, set_stage, trail_of

__all__ = ["animate_particles"]


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
    """Return an animation of the cloud, one frame for each draw: :func:`plot_particles` over time.

    Notebooks show ``animation.to_jshtml()``; ``animation.save("cloud.gif", writer="pillow")`` needs nothing beyond
    matplotlib. Keep the animation in a variable until it is saved or shown.

    :param draws: as for :func:`plot_particles`.
    :param potential: as for :func:`plot_particles`.
    :param pair: as for :func:`plot_particles`.
    :param iterations: the draws, one for each frame: a slice such as ``slice(0, 200, 2)``, or a sequence of numbers.
        ``None`` is all.
    :param trail: the number of preceding draws over which lines trace the particles; 0 for none.
    :param interval: milliseconds between frames.
    :param limits: as for :func:`plot_particles`; ``None`` includes the particles of all frames.
    :param levels: as for :func:`plot_particles`.
    :param num_ensembles: as for :func:`plot_particles`.
    :param colors: as for :func:`plot_particles`.
    :param ax: axes to draw on; ``None`` makes a figure.
    :param kwargs: passed to ``Axes.scatter`` for the dots.
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
    stage = set_stage(draws, potential, pair, iterations, limits, levels, num_ensembles, colors, ax)
    from matplotlib.animation import FuncAnimation

    style = dot_style(stage.points[:, :, 0, 0].size)
    dots, lines = [], []
    for points, color, label in zip(stage.points, stage.colors, stage.labels, strict=True):
        look = {"color": [color], "label": label, "zorder": 3} | style | kwargs
        dots.append(stage.ax.scatter(*points[:, 0].T, **look))
        lines.append(stage.ax.add_collection(trail_of(points[:, :1], color)))
    clock = stage.ax.text(0.02, 0.98, "", transform=stage.ax.transAxes, ha="left", va="top", fontsize="small")
    add_legend(stage)

    def update(frame):
        since = max(0, frame - trail)
        for i, points in enumerate(stage.points):
            dots[i].set_offsets(points[:, frame])
            lines[i].set_segments(list(points[:, since : frame + 1]))
        clock.set_text(f"draw {stage.iterations[frame]}")
        return [*dots, *lines, clock]

    return FuncAnimation(stage.ax.figure, update, frames=len(stage.iterations), interval=interval)
