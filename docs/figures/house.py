"""The figure of ``docs/contributing.md``: how data flow through one iteration.

Writes it to ``docs/_static``.
"""

from __future__ import annotations

from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
import matplotlib.pyplot as plt
from style import BLUE as ACCENT, INK, save

PALE, STRONG = "#eef2f7", "#d6e6f4"


def box(axes, x, y, width, height, title, text, color=PALE):
    axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0.06", fc=color, ec=ACCENT, lw=1))
    axes.text(x + width / 2, y + height - 0.2, title, ha="center", va="center", weight="bold", color=INK)
    axes.text(x + width / 2, y + (height - 0.35) / 2, text, ha="center", va="center", fontsize=7, color=INK)


def arrow(axes, corners, text="", place=(0, 0), color=INK):
    """An arrow through these corners, and a text beside it."""
    axes.plot(*zip(*corners[:-1], strict=True), color=color, lw=0.9, solid_joinstyle="miter")
    settings = {"arrowstyle": "-|>", "mutation_scale": 10, "color": color, "lw": 0.9, "shrinkA": 0, "shrinkB": 0}
    axes.add_patch(FancyArrowPatch(*corners[-2:], **settings))
    axes.text(*place, text, ha="center", va="center", fontsize=7, color=ACCENT)


def flow():
    """One MCMC iteration, from state to state."""
    figure, axes = plt.subplots(figsize=(7, 3.8))
    axes.set(xlim=(-0.1, 12.1), ylim=(-1.0, 5.8))
    axes.axis("off")
    box(axes, 0.0, 2.1, 2.0, 1.4, "ParticleState", "z by site, U,\n∇U, memory,\nwarmup, key")
    box(axes, 3.3, 4.2, 2.6, 1.4, "Gradient", "minibatch rows;\ncontrol variates by\nthe Reference")
    box(axes, 3.3, 2.1, 2.6, 1.4, "Cloud", "u = whitened z,\n(G, L, d)")
    box(axes, 3.3, -0.35, 2.6, 1.4, "Interaction", "Coupling: K·x, Γ,\nnoise with K as\nits covariance")
    box(axes, 7.3, 2.1, 2.0, 1.4, "Dynamics", "step: new u,\nmemory", STRONG)
    box(axes, 7.3, 4.2, 2.0, 1.4, "Move", "every other update:\npropose, accept")
    box(axes, 10.2, 2.1, 1.8, 1.4, "Learners", "warmup only: new\nWarmupState")
    arrow(axes, [(2.08, 2.8), (3.22, 2.8)], "whiten", (2.65, 2.98))
    arrow(axes, [(4.2, 3.58), (4.2, 4.12)], "u", (4.4, 3.85))
    arrow(axes, [(4.2, 2.02), (4.2, 1.13)], "u", (4.4, 1.57))
    arrow(axes, [(5.98, 4.9), (6.6, 4.9), (6.6, 3.2), (7.22, 3.2)], "U, ∇U", (6.98, 3.85))
    arrow(axes, [(5.98, 0.35), (8.3, 0.35), (8.3, 2.02)], "Coupling", (7.1, 0.53))
    arrow(axes, [(5.98, 2.8), (7.22, 2.8)])
    arrow(axes, [(8.3, 4.12), (8.3, 3.58)])
    arrow(axes, [(9.38, 2.8), (10.12, 2.8)], "Cloud", (9.75, 2.98))
    arrow(axes, [(7.7, 2.02), (7.7, 1.5), (5.5, 1.5), (5.5, 2.02)], "num_steps updates", (6.6, 1.68), ACCENT)
    arrow(axes, [(11.1, 2.02), (11.1, -0.8), (1.0, -0.8), (1.0, 2.02)], "the next state", (6.0, -0.62))
    save(figure, "house-iteration.png")


if __name__ == "__main__":
    flow()
