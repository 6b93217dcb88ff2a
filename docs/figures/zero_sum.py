"""What zero-sum noise is, and what it does to the mean of an ensemble: the picture of ``docs/repulsion.md``.

Writes ``docs/_static/zero-sum.png`` and prints how far the mean moves.
"""

from __future__ import annotations

from itertools import pairwise

from jax import random
import matplotlib.pyplot as plt
import numpy as np
from style import BLUE, GREY, INK, VERMILION, save

from numpyro.infer import MCMC

from benchmarks.problems.targets import gaussian
from numpyro_repulsion import SGLD, Balanced, Independent

PARTICLES, SHOWN, DRAWS = 20, 8, 300
KINDS = {"independent noise": (Independent(), VERMILION), "zero-sum noise": (Balanced(), BLUE)}


def noise(interaction):
    """The noise of one update, ``(particle, 2)``."""
    white = np.array(random.normal(random.key(5), (SHOWN, 2)))
    return white if isinstance(interaction, Independent) else (white - white.mean(0)) * (SHOWN / (SHOWN - 1)) ** 0.5


def chain(axes, steps, color, title):
    """The vectors of all particles, head to tail, by their angles: the order does not change the sum."""
    steps = steps[np.argsort(np.arctan2(steps[:, 1], steps[:, 0]))]
    corners = np.concatenate([np.zeros((1, 2)), steps.cumsum(0)])
    for tail, head in pairwise(corners):
        axes.annotate("", head, tail, arrowprops={"arrowstyle": "-|>", "color": color, "shrinkA": 0, "shrinkB": 0})
    axes.plot(*corners[0], "o", color=INK, zorder=3)
    axes.annotate("start", corners[0], (0, 6), textcoords="offset points", ha="center", color=INK)
    if np.abs(corners[-1]).max() > 0.1:
        axes.annotate("", corners[-1], corners[0], arrowprops={"arrowstyle": "-", "color": GREY, "linestyle": ":"})
        axes.annotate("sum", corners[-1] / 2, (0, -12), textcoords="offset points", ha="center", color=GREY)
    axes.update_datalim(corners)
    axes.margins(0.15)
    axes.autoscale_view()
    axes.set(title=title, aspect="equal", xticks=[], yticks=[], adjustable="datalim")
    axes.spines[:].set_visible(False)


def means(interaction):
    """The mean of the ensemble over the draws of a run with the usual step."""
    mcmc = MCMC(
        SGLD(gaussian, step_size=0.05, num_steps=1, interaction=interaction),
        num_warmup=200,
        num_samples=DRAWS,
        num_chains=PARTICLES,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.key(0))
    return np.asarray(mcmc.get_samples(group_by_chain=True)["z"])[..., 0].mean(0)


def main():
    figure, panels = plt.subplots(1, 3, figsize=(7, 2.6), width_ratios=(1, 1, 1.5))
    for axes, (name, (interaction, color)) in zip(panels, KINDS.items(), strict=False):
        chain(axes, noise(interaction), color, name)
        axes.set_xlabel(f"one update of {SHOWN} particles")
    last = panels[-1]
    for name, (interaction, color) in KINDS.items():
        mean = means(interaction)
        print(f"{name}: the standard deviation of the ensemble's mean over {DRAWS} updates is {mean.std():.1e}")
        last.plot(mean, color=color, linewidth=1.1)
        last.text(DRAWS, -0.6 if color == BLUE else 0.6, name, ha="right", color=color)
    last.set(
        title=f"mean of {PARTICLES} particles on N(0, I)", xlabel="update", ylim=(-0.75, 0.75), yticks=(-0.5, 0, 0.5)
    )
    save(figure, "zero-sum.png")


if __name__ == "__main__":
    main()
