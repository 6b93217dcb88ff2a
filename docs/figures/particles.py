"""Why the noise matters: 20 particles on a Gaussian, moved by SVGD and by SGLD with repulsion.

Both push the particles apart; only SGLD+R also adds the noise that makes the posterior stationary. Prints the
variances and writes ``docs/_static/particles.png``.
"""

from __future__ import annotations

from pathlib import Path

from jax import random
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from numpyro.infer import MCMC

from benchmarks.problems.targets import gaussian
from numpyro_repulsion import SGLDR, SVGD
from numpyro_repulsion.plots import plot_particles

OUTPUT = Path(__file__).parents[1] / "_static" / "particles.png"
PARTICLES = 20
BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#8a8a8a"


def run(kernel, num_samples):
    """Draws of the particles, ``(chain, draw, 2)``."""
    mcmc = MCMC(
        kernel,
        num_warmup=500,
        num_samples=num_samples,
        num_chains=PARTICLES,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.key(0))
    return np.asarray(mcmc.get_samples(group_by_chain=True)["z"])


def variance(points):
    """The mean squared coordinate: 1 for the target, whose mean is known to be 0."""
    return np.mean(points**2)


def potential(z):
    return z @ z / 2


def panel(ax, points, title, to_positions):
    shown = {"iterations": slice(None), "limits": (-3.3, 3.3), "levels": (0.5, 0.9)}
    plot_particles(points, potential, colors=to_positions, ax=ax, **shown)
    ax.set(title=title, xlabel="", ylabel="", xticks=[-2, 0, 2], yticks=[-2, 0, 2])
    ax.spines[["top", "right"]].set_visible(False)


def main():
    svgd = run(SVGD(gaussian, step_size=0.1), 500)[:, -1:]
    sgldr = run(SGLDR(gaussian), 2000)
    print(f"N(0, I) in two dimensions, {PARTICLES} particles; the variance should be 1.")
    print(f"SVGD, its final cloud: {variance(svgd):.2f}. SGLD+R, all draws: {variance(sgldr):.2f}.")
    figure, axes = plt.subplots(1, 3, figsize=(10, 3.9))
    panel(axes[0], svgd, f"SVGD, where it comes to rest\nvariance {variance(svgd):.2f}", ORANGE)
    panel(axes[1], sgldr[:, -1:], "SGLD+R, one moment\n20 particles of a moving cloud", BLUE)
    panel(axes[2], sgldr[:, ::20], f"SGLD+R, all moments together\nvariance {variance(sgldr):.2f}", BLUE)
    figure.suptitle("Target N(0, I), with the discs that hold 50 % and 90 % of it", fontsize=10, color=GREY)
    figure.tight_layout()
    figure.savefig(OUTPUT, dpi=130)
    print(f"Wrote {OUTPUT.relative_to(OUTPUT.parents[2])}.")


if __name__ == "__main__":
    main()
