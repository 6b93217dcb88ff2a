"""The figure of ``docs/contributing.md``: how data flow through one iteration.

Writes it to ``docs/_static``.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
import matplotlib.pyplot as plt

OUTPUT = Path(__file__).parents[1] / "_static"
INK, PALE, ACCENT = "#333333", "#eef2f7", "#3b6ea5"


def box(axes, x, y, width, height, title, text, color=PALE):
    axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0.06", fc=color, ec=ACCENT, lw=1.2))
    axes.text(x + width / 2, y + height - 0.22, title, ha="center", va="center", fontsize=10, weight="bold", color=INK)
    axes.text(x + width / 2, y + (height - 0.35) / 2, text, ha="center", va="center", fontsize=8.5, color=INK)


def arrow(axes, start, end, text="", dx=0.0, dy=0.16):
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=13, color=INK, lw=1.1))
    if text:
        middle = (start[0] + end[0]) / 2 + dx, (start[1] + end[1]) / 2 + dy
        axes.text(*middle, text, ha="center", va="center", fontsize=8, color=ACCENT)


def flow():
    """One MCMC iteration, from state to state."""
    figure, axes = plt.subplots(figsize=(10, 5.4))
    axes.set(xlim=(-0.2, 12.2), ylim=(-0.5, 6.0))
    axes.axis("off")
    box(axes, 0.0, 2.2, 1.9, 1.3, "ParticleState", "z by site, U,\n∇U, memory,\nwarmup, key")
    box(axes, 3.1, 4.3, 2.6, 1.3, "Gradient", "rows of a minibatch;\ncontrol variates by\nthe Reference")
    box(axes, 3.1, 2.2, 2.6, 1.3, "Cloud", "u = whitened z,\n(G, L, d)")
    box(axes, 3.1, 0.1, 2.6, 1.3, "Interaction", "Coupling: K·x, Γ,\nnoise with K as\nits covariance")
    box(axes, 7.0, 2.2, 2.2, 1.3, "Dynamics", "step: new u,\nmemory", "#dfe9f5")
    box(axes, 7.0, 4.3, 2.2, 1.3, "Move", "every other update:\npropose, accept")
    box(axes, 10.2, 2.2, 1.8, 1.3, "Learners", "warmup only:\nnew WarmupState")
    arrow(axes, (1.98, 2.85), (3.02, 2.85), "whiten")
    arrow(axes, (4.4, 3.6), (4.4, 4.22), "u", dx=0.2, dy=0)
    arrow(axes, (4.4, 2.1), (4.4, 1.48), "u", dx=0.2, dy=0)
    arrow(axes, (5.8, 4.9), (7.3, 3.6), "U, ∇U", dx=-0.1, dy=-0.35)
    arrow(axes, (5.8, 0.8), (8.4, 2.1), "Coupling", dx=0.6, dy=-0.3)
    arrow(axes, (5.8, 2.85), (6.92, 2.85))
    arrow(axes, (8.4, 4.22), (8.4, 3.6))
    arrow(axes, (9.28, 2.85), (10.12, 2.85), "Cloud")
    for corners, color in (
        (((7.3, 2.1), (7.3, 1.7), (5.35, 1.7), (5.35, 2.1)), ACCENT),
        (((11.1, 2.1), (11.1, -0.25), (0.95, -0.25), (0.95, 2.1)), INK),
    ):
        axes.plot(*zip(*corners[:-1], strict=True), color=color, lw=1.1)
        axes.add_patch(FancyArrowPatch(*corners[-2:], arrowstyle="-|>", mutation_scale=13, color=color, lw=1.1,
                                       shrinkA=0))  # fmt: skip
    axes.text(6.33, 1.87, "num_steps updates", ha="center", fontsize=8, color=ACCENT)
    axes.text(8.6, -0.09, "the next state", ha="center", fontsize=8, color=ACCENT)
    figure.savefig(OUTPUT / "house-iteration.png", dpi=150, bbox_inches="tight")


if __name__ == "__main__":
    flow()
