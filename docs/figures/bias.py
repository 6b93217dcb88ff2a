"""The bias of the step size, with the default marked: the picture of ``docs/exactness.md``.

Logistic regression with 10,000 rows and 10 coefficients, minibatches of 100 rows, `SGLD` with tolerances of several
sizes. The reference is Laplace's approximation. Writes ``docs/_static/step-bias.png`` and prints what it shows.
"""

from __future__ import annotations

from jax import random
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from style import BLUE, GREEN, GREY, VERMILION, save

from numpyro.infer import MCMC

from benchmarks.problems.logistic_100k import data, reference
from benchmarks.problems.targets import logistic_regression
from numpyro_repulsion import SGLD, BiasBudget, ControlVariates

#: The gradient, its color, the tolerances (the default first), and where its label stands.
GRADIENTS = {
    "plain minibatches": ("plain", VERMILION, ("auto", 0.02, 0.1, 0.2, 0.4), (6, 0)),
    "control variates,\nfirst order": (ControlVariates(order=1), GREEN, ("auto", 0.02), (0, 24)),
    "second order,\nthe default": ("auto", BLUE, ("auto",), (0, -22)),
}


def inflation(gradient, tolerance, x, y, exact):
    """The step, and the mean relative inflation of the variances with its error."""
    mcmc = MCMC(
        SGLD(logistic_regression, step_size=BiasBudget(tolerance, min_draws=0), gradient=gradient),
        num_warmup=1000,
        num_samples=2000,
        num_chains=20,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.key(0), x, y, subsample_size=100)
    beta = np.asarray(mcmc.get_samples(group_by_chain=True)["beta"], float)
    squares = (((beta - beta.mean((0, 1))) / exact) ** 2).mean(-1)
    step_size = float(np.ravel(mcmc.last_state.step_size)[0])
    # Squares of different particles are nearly uncorrelated.
    return step_size, squares.mean() - 1, squares.mean(1).std(ddof=1) / len(squares) ** 0.5


def main():
    x, y = data(10_000, 10, np.float32)
    exact = reference(np.asarray(x, float), y)[1]
    figure, axes = plt.subplots(figsize=(5.5, 3.2))
    for name, (gradient, color, tolerances, place) in GRADIENTS.items():
        rows = [inflation(gradient, tolerance, jnp.asarray(x), jnp.asarray(y), exact) for tolerance in tolerances]
        for tolerance, (step, found, error) in zip(tolerances, rows, strict=True):
            print(f"{name!r}, tolerance {tolerance}: step {step:.4f}, variances {100 * found:.1f} ± {100 * error:.1f}%")
        step, found, error = np.array(rows).T
        order = np.argsort(step)
        axes.errorbar(step[order], 100 * found[order], 200 * error[order], color=color, marker="o", markersize=3)
        axes.plot(step[0], 100 * found[0], "o", color=color, markersize=10, fillstyle="none")
        last = step[order][-1], 100 * found[order][-1]
        ha = "left" if place[0] else "center"
        axes.annotate(name, last, place, textcoords="offset points", color=color, ha=ha, va="center")
    axes.axhline(0, color=GREY, linewidth=0.8, zorder=0)
    axes.set(
        xlim=(3e-4, 2),
        ylim=(-12, 43),
        xscale="log",
        xlabel="step size ε (rings: by default)",
        ylabel="inflation of variances, %",
    )
    save(figure, "step-bias.png")


if __name__ == "__main__":
    main()
