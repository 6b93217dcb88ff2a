"""The pictures of the page "Pictures" of the documentation, each drawn by the function that the page shows.

Writes them to ``docs/_static``.
"""

from __future__ import annotations

from functools import partial

from jax import random
import matplotlib.pyplot as plt
from style import save

import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC
from numpyro.infer.util import log_density

from benchmarks.problems.targets import exponential_mixture, gaussian, gaussian_mixture
from numpyro_repulsion import SGLD, SGLDR, SVGD, Independent, predict
from numpyro_repulsion.dynamics import Overdamped
from numpyro_repulsion.plots import animate_particles, plot_calibration, plot_particles, plot_running_estimates


def prepare(kernel, num_samples, num_chains, num_warmup=0):
    return MCMC(
        kernel,
        num_warmup=num_warmup,
        num_samples=num_samples,
        num_chains=num_chains,
        chain_method="vectorized",
        progress_bar=False,
    )


def mixture_potential(z):
    return -log_density(gaussian_mixture, (), {}, {"z": z})[0]


def trajectories():
    start = {"z": 3.0 + 0.5 * random.normal(random.key(0), (6, 2))}
    figure, axes = plt.subplots(1, 2, figsize=(7, 3.6), sharey=True)
    for ax, kernel in zip(axes, (SVGD, SGLDR), strict=True):
        mcmc = prepare(kernel(gaussian, step_size=0.05, num_steps=1), num_samples=200, num_chains=6)
        mcmc.run(random.key(1), init_params=start)
        plot_particles(mcmc, lambda z: z @ z / 2, trajectories=True, limits=(-3.5, 5.0), ax=ax)
        ax.set_title(kernel.__name__)
        ax.label_outer()
    return figure


def modes():
    mcmc = prepare(SGLDR(gaussian_mixture, num_ensembles=2), num_samples=1000, num_chains=20, num_warmup=1000)
    mcmc.run(random.key(0))
    figure, axes = plt.subplots(1, 2, figsize=(7, 3.6), sharey=True)
    plot_particles(mcmc, mixture_potential, limits=(-3.2, 3.2), ax=axes[0])
    plot_particles(mcmc, mixture_potential, iterations=slice(None, None, 10), limits=(-3.2, 3.2), ax=axes[1])
    axes[0].set_title("one draw of 20 particles")
    axes[1].set(title="a hundred draws", ylabel="")
    # Below the panels, a legend hides no mode.
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    for ax in axes:
        ax.get_legend().remove()
    return figure


def motion():
    mcmc = prepare(SGLDR(gaussian_mixture, step_size=0.02, num_steps=1), num_samples=40, num_chains=20)
    mcmc.run(random.key(0))
    ax = plt.subplots(figsize=(3.2, 3.2))[1]
    return animate_particles(mcmc, mixture_potential, limits=(-3.2, 3.2), trail=5, ax=ax)


def estimates():
    plain = {"interaction": Independent(), "dynamics": Overdamped(integrator="euler")}
    kernels = {
        "SGLD": SGLD(exponential_mixture, step_size=0.01, **plain),
        "SGLDR": SGLDR(exponential_mixture, step_size=0.01),
    }
    figure, ax = plt.subplots(figsize=(7, 3.6))
    for name, kernel in kernels.items():
        mcmc, repeats = prepare(kernel, num_samples=500, num_chains=10), []
        for seed in range(20):
            mcmc.run(random.key(seed))
            repeats.append(mcmc.get_samples(group_by_chain=True))
        plot_running_estimates(repeats, truth=14 / 9, label=name, ax=ax)
    return figure


def one_estimate():
    mcmc = prepare(SGLDR(exponential_mixture, num_ensembles=4), num_samples=1000, num_chains=40, num_warmup=1000)
    mcmc.run(random.key(0))

    def square(draw):
        return draw["z"] ** 2

    ax = plot_running_estimates(mcmc, square, truth=152 / 27)
    return ax.figure


def calibration():
    key, noise_key = random.split(random.key(0))
    x = random.uniform(key, (2000,), minval=-1.0)
    y = 1.0 + 2.0 * x + 0.5 * random.t(noise_key, 2.0, (2000,))

    def line(noise, x, y=None):
        a, b = (numpyro.sample(name, dist.Normal(0, 5)) for name in "ab")
        scale = numpyro.sample("scale", dist.HalfNormal(5))
        with numpyro.plate("rows", len(x), subsample_size=100) as i:
            numpyro.sample("y", noise(a + b * x[i], scale), obs=None if y is None else y[i])

    figure, axes = plt.subplots(1, 2, figsize=(7, 3.6))
    for name, noise in {"normal": dist.Normal, "Student-t": lambda loc, scale: dist.StudentT(2.0, loc, scale)}.items():
        mcmc = prepare(SGLD(partial(line, noise)), num_samples=500, num_chains=10, num_warmup=500)
        mcmc.run(random.key(1), x[:1000], y[:1000])
        predictions = predict(mcmc, x[1000:], y[1000:])
        plot_calibration(predictions, label=name, ax=axes[0])
        plot_calibration(predictions, "pit", label=name, ax=axes[1])
    return figure


def main():
    for draw in (trajectories, modes, estimates, one_estimate, calibration):
        save(draw(), f"pictures-{draw.__name__.replace('_', '-')}.png")
    save(motion(), "pictures-motion.gif", writer="pillow", dpi=150)


if __name__ == "__main__":
    main()
