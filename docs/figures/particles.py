"""Why the noise matters: 20 particles on a Gaussian, moved by SVGD and by SGLDR.

Both push the particles apart; only SGLDR also adds the noise that makes the posterior stationary. Prints the
variances and writes ``docs/_static/particles.png``.
"""

from __future__ import annotations

from jax import random
import matplotlib.pyplot as plt
import numpy as np
from style import BLUE, INK, VERMILION, save

from numpyro.infer import MCMC

from benchmarks.problems.targets import gaussian
from numpyro_repulsion import SGLDR, SVGD
from numpyro_repulsion.plots import plot_particles

PARTICLES = 20
#: The radii of the discs that hold 50% and 90% of N(0, I).
RADII = {"50%": (2 * np.log(2)) ** 0.5, "90%": (2 * np.log(10)) ** 0.5}


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


def main():
    svgd = run(SVGD(gaussian, step_size=0.1), 500)[:, -1:]
    sgldr = run(SGLDR(gaussian), 2000)
    print(f"N(0, I) in two dimensions, {PARTICLES} particles; the variance should be 1.")
    print(f"SVGD, its final particles: {variance(svgd):.2f}. SGLDR, all draws: {variance(sgldr):.2f}.")
    figure, axes = plt.subplots(1, 3, figsize=(7, 2.8), sharey=True)
    panel(axes[0], svgd, f"SVGD at rest\nvariance {variance(svgd):.2f}", VERMILION)
    panel(axes[1], sgldr[:, -1:], f"SGLDR, one draw\n{PARTICLES} particles, still moving", BLUE)
    panel(axes[2], sgldr[:, ::20], f"SGLDR, all draws\nvariance {variance(sgldr):.2f}", BLUE)
    for share, radius in RADII.items():
        axes[0].text(0, -radius - 0.05, share, ha="center", va="top", fontsize=7, color=INK, zorder=5)
    save(figure, "particles.png")


if __name__ == "__main__":
    main()
