"""How to read a run: the runs, numbers and pictures of ``docs/diagnostics.md``.

Writes ``docs/_static/diagnostics-*.png`` and prints what the page quotes; parts may be named, as in
``python docs/figures/diagnostics.py biases``.
"""

from __future__ import annotations

import sys
import warnings

import arviz
import jax
from jax import random
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from style import BLUE, GREY, VERMILION, save

import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC

from numpyro_repulsion import (
    SGLD,
    SGLDR,
    Balanced,
    Independent,
    Subsampled,
    ensemble_ess,
    ensemble_mcse,
    ksd,
    nested_rhat,
    step_bias,
    summary,
)
from numpyro_repulsion.diagnostics import scores
from numpyro_repulsion.dynamics import Overdamped

Y = 0.5 + random.normal(random.key(9), (1000,))
#: Of the conjugate posterior of the model below.
MEAN, SD = float(Y.sum() / 1001), 1001**-0.5
EFFECTS = jnp.array([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
ERRORS = jnp.array([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])


def level(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("rows", len(y), subsample_size=50) as i:
        numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])


def schools(centered):
    def model():
        mu = numpyro.sample("mu", dist.Normal(0, 5))
        tau = numpyro.sample("tau", dist.HalfCauchy(5))
        with numpyro.plate("school", 8):
            if centered:
                theta = numpyro.sample("theta", dist.Normal(mu, tau))
            else:
                theta = mu + tau * numpyro.sample("eta", dist.Normal(0, 1))
            numpyro.sample("y", dist.Normal(theta, ERRORS), obs=EFFECTS)

    return model


def run(kernel, *args, key=0, num_warmup=500, num_samples=500, num_chains=20, init_params=None):
    mcmc = MCMC(
        kernel,
        num_warmup=num_warmup,
        num_samples=num_samples,
        num_chains=num_chains,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.key(key), *args, init_params=init_params)
    jax.effects_barrier()
    return mcmc


def averages():
    """The same particles' traces, and three errors of their average."""
    print("\nThe mean of 1,000 rows, 50 in a minibatch, 20 particles, 500 draws of each")
    kinds = {
        "minibatches shared": (Independent(), Subsampled(shared=True), VERMILION),
        "independent": (Independent(), Subsampled(), GREY),
        "zero-sum noise": (Balanced(), Subsampled(), BLUE),
    }
    figure, panels = plt.subplots(1, 3, figsize=(7, 2.6), sharey=True)
    for axes, (name, (interaction, gradient, to_positions)) in zip(panels, kinds.items(), strict=True):
        kernel = SGLD(level, step_size=1e-4, interaction=interaction, gradient=gradient)
        mcmc, repeats = run(kernel, Y, num_warmup=100), []
        for key in range(40):
            mcmc.run(random.key(key), Y)
            repeats.append(np.asarray(mcmc.get_samples(group_by_chain=True)["mu"]))
        draws = repeats[0]
        worth, usual = float(ensemble_ess(draws, method="mean")), float(arviz.ess(draws))
        said = np.mean([ensemble_mcse(x) for x in repeats]) / SD
        wrong = np.sqrt(np.mean([(x.mean() - MEAN) ** 2 for x in repeats])) / SD
        naive = np.mean([x.std() / arviz.ess(x) ** 0.5 for x in repeats]) / SD
        print(
            f"{name:20} ensemble ESS {worth:8,.0f}, as if independent {usual:7,.0f}; error of the mean, in posterior "
            f"sd: {wrong:.4f} ± {wrong / 80**0.5:.4f} over 40 runs, ensemble_mcse {said:.4f}, as if independent "
            f"{naive:.4f}"
        )
        axes.plot(draws[:4, :200].T, color="#c9c9c9", linewidth=0.7)
        axes.plot(draws[:, :200].mean(0), color=to_positions, linewidth=1.6)
        axes.axhline(MEAN, color="black", linewidth=0.8, linestyle=":")
        axes.set_title(f"{name}\nensemble ESS {worth:,.0f}")
        axes.set_xlabel("draw")
    panels[0].set_ylabel("mu")
    save(figure, "diagnostics-averages.png")


def biases():
    """What the step size does, by three estimates, where the answer is known."""
    print("\nEuler's chain on N(0, I) in ten dimensions, 20 particles: inflation of variances, %")
    steps = np.array([0.05, 0.1, 0.2, 0.3, 0.4])
    rows = []
    for step_size in steps:
        kernel = SGLD(
            potential_fn=lambda z: jnp.sum(z**2) / 2, step_size=float(step_size), dynamics=Overdamped("euler")
        )
        mcmc = run(kernel, num_warmup=50, num_samples=200, init_params=random.normal(random.key(1), (20, 10)))
        found = step_bias(mcmc, num_samples=200)
        halved = 2 * np.mean(found.halving_by_parameter)
        error = 2 * np.sqrt(np.mean(np.square(found.halving_error_by_parameter)) / 10)
        exact = 1 / (1 - step_size / 2) - 1
        rows.append((exact, found.predicted, found.observed, found.observed_error, halved, error))
        print(
            f"step {step_size:.2f}: exact {100 * exact:5.2f}, predicted {100 * found.predicted:5.2f}, "
            f"observed {100 * found.observed:5.2f} ± {100 * found.observed_error:.2f}, "
            f"twice the fall on halving {100 * halved:5.2f} ± {100 * error:.2f}"
        )
    exact, predicted, observed, observed_error, halved, error = 100 * np.array(rows).T
    figure, axes = plt.subplots(figsize=(5.5, 3.2))
    fine = np.linspace(0, 0.42, 100)
    axes.plot(fine, 100 * (1 / (1 - fine / 2) - 1), color="black", linewidth=1, label="exact")
    axes.plot(steps, predicted, "s", color=GREY, markersize=7, fillstyle="none", label="predicted")
    axes.errorbar(steps - 0.004, observed, 2 * observed_error, fmt="o", color=BLUE, label="observed, ± 2 s.e.")
    axes.errorbar(steps + 0.004, halved, 2 * error, fmt="^", color=VERMILION, label="2 × fall on halving, ± 2 s.e.")
    axes.set(xlabel="step size", ylabel="inflation of variances, %", ylim=(0, None), xlim=(0, None))
    axes.legend(frameon=False)
    save(figure, "diagnostics-bias.png")


def superchains():
    """Ensembles that agree while their particles do not mix."""

    def model():
        modes = dist.Normal(jnp.array([-6.0, 6.0]), 1.0)
        numpyro.sample("x", dist.MixtureSameFamily(dist.Categorical(probs=jnp.ones(2) / 2), modes))

    starts = {"x": jnp.tile(jnp.array([-6.0, -6.2, 6.0, 6.2]), 4) + 0.1 * random.normal(random.key(2), (16,))}
    mcmc = run(SGLD(model, step_size=0.1, num_ensembles=4), num_warmup=0, num_chains=16, init_params=starts)
    draws = np.asarray(mcmc.get_samples(group_by_chain=True)["x"])
    plain, nested = float(arviz.rhat(draws)), float(nested_rhat(draws, 4))
    print(f"\nTwo far modes, four ensembles of four: R-hat of particles {plain:.2f}, nested R-hat {nested:.3f}")
    figure, panels = plt.subplots(1, 4, figsize=(7, 2.4), sharey=True)
    for number, axes in enumerate(panels):
        of_ensemble = draws[4 * number : 4 * number + 4, ::5]
        for x in of_ensemble:
            axes.plot(x, color=BLUE if x[0] > 0 else VERMILION, linewidth=0.6)
        axes.axhline(of_ensemble.mean(), color="black", linewidth=1)
        axes.set(title=f"ensemble {number}", xlabel="draw, every 5th")
    panels[0].set_ylabel("x")
    panels[0].annotate("ensemble mean", (0, 0.4), color="black", fontsize=8)
    save(figure, "diagnostics-superchains.png")


def verdicts():
    """What `summary` says of runs of several kinds."""
    warnings.simplefilter("ignore")
    for name, kernel in {
        "non-centered eight schools": SGLDR(schools(False)),
        "centered eight schools, kept so": SGLDR(schools(True), reparam=None),
        "a step that is too long": SGLD(schools(False), step_size=0.1, dynamics=Overdamped("euler")),
        "small minibatches": SGLD(level, step_size=1e-4, gradient=Subsampled()),
    }.items():
        print(f"\n{name}:")
        args = (Y,) if kernel.model is level else ()
        mcmc = run(kernel, *args, num_warmup=1000, num_samples=1000)
        table = summary(mcmc, round_to=2)
        print(table.iloc[:3] if "non-centered" in name else table.diagnosis)


def discrepancies():
    """Stein discrepancies of runs with steps of several lengths."""
    print("\nKernelized Stein discrepancy of 2,000 draws of the mean's posterior, scale 1 posterior sd")
    for step_size in (1e-4, 4e-4, 1e-3, 1.5e-3):
        kernel = SGLD(level, step_size=step_size, dynamics=Overdamped("euler"), interaction=Independent())
        mcmc = run(kernel, Y, num_samples=1000, num_warmup=100)
        z, s = scores(mcmc, num_draws=2000)
        print(
            f"step {step_size:.4f}: {float(ksd(z, s, scale=SD)):.3f}; sd {float(z.std() / SD):.2f} of the posterior's"
        )
    exact = MEAN + SD * random.normal(random.key(0), (2000, 1))
    print(f"exact draws: {float(ksd(exact, -(exact - MEAN) / SD**2, scale=SD)):.3f}")


def main():
    for part in (averages, biases, superchains, discrepancies, verdicts):
        if not sys.argv[1:] or part.__name__ in sys.argv[1:]:
            part()


if __name__ == "__main__":
    main()
