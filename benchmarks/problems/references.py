"""Long NUTS runs on real posteriors: the moments and quantiles that draws of other samplers are compared with.

NUTS runs in double precision from two seeds on the cheapest model with the same posterior, ``Problem.for_nuts`` of
``benchmarks.problems.real``. Moments are those of both seeds together; R-hat is between their halves. Effective draws
are those of the mean, ``ess``, and of the squared distance from it, ``ess_square``, on which the standard deviation
depends. A stored reference is left alone unless asked for again.

    python -m benchmarks.problems.references NAME... [--again]
"""

import argparse
from dataclasses import asdict, dataclass
import json
import time
from typing import Any

import jax
from jax import random
import jax.numpy as jnp
import numpy as np

import numpyro
from numpyro.diagnostics import effective_sample_size, split_gelman_rubin
from numpyro.infer import MCMC, NUTS, init_to_uniform

from benchmarks.harness.store import cores, provenance
from benchmarks.problems.real import FULL_DATA, NAMES, RESULTS, Problem, load

SEEDS = (0, 1)


@dataclass(frozen=True)
class Settings:
    """Of a NUTS run."""

    warmup: int = 1000
    draws: int = 2000
    accept: float = 0.9
    dense: bool = True
    #: The deepest tree in warmup and after it.
    depth: tuple[int, int] = (8, 10)


SETTINGS = {
    # Gradients of many milliseconds.
    "protein": Settings(warmup=600, draws=1500),
    "gp_classification": Settings(warmup=500, draws=1500, dense=False),
    "volatility": Settings(dense=False),
    "volatility_500": Settings(draws=4000, accept=0.95, dense=False),
    # Standard normals but for two scales.
    "kin8nm": Settings(draws=5000, dense=False),
}


def in_double(data: dict[str, Any]) -> dict[str, jax.Array]:
    """The data as they are, in double precision: a conversion in every evaluation would cost more than that."""
    arrays = {name: jnp.asarray(x) for name, x in data.items()}
    return {name: x.astype(jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x for name, x in arrays.items()}


def run(problem: Problem, settings: Settings) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Draws ``(seed, draw, ...)`` of the quantities, and how the runs went."""
    model, data = problem.for_nuts()
    kernel = NUTS(
        model,
        dense_mass=settings.dense,
        target_accept_prob=settings.accept,
        max_tree_depth=settings.depth,
        init_strategy=init_to_uniform(radius=0.5),
    )
    mcmc = MCMC(kernel, num_warmup=settings.warmup, num_samples=settings.draws, progress_bar=False)
    data = in_double(data)
    chains, went = [], {"seconds": [], "divergences": [], "steps": []}
    for seed in SEEDS:
        began = time.perf_counter()
        mcmc.run(random.key(seed), extra_fields=("diverging", "num_steps"), **data)
        samples, extra = mcmc.get_samples(), mcmc.get_extra_fields()
        chains.append({site: np.asarray(samples[site]) for site in problem.quantities})
        went["seconds"].append(round(time.perf_counter() - began, 1))
        went["divergences"].append(int(extra["diverging"].sum()))
        went["steps"].append(round(float(extra["num_steps"].mean()), 1))
        print(f"{problem.name}, seed {seed}: " + ", ".join(f"{key} {values[-1]}" for key, values in went.items()))
    return {site: np.stack([chain[site] for chain in chains]) for site in problem.quantities}, went


def describe(draws: np.ndarray) -> dict[str, np.ndarray]:
    """What is stored of a site's draws ``(seed, draw, ...)``."""
    pooled = draws.reshape(-1, *draws.shape[2:])
    mean = pooled.mean(0)
    low, high = np.quantile(pooled, (0.05, 0.95), axis=0)
    return {
        "mean": mean,
        "sd": pooled.std(0),
        "q05": low,
        "q95": high,
        "ess": effective_sample_size(draws),
        "ess_square": effective_sample_size((draws - mean) ** 2),
        "rhat": split_gelman_rubin(draws),
    }


def rounded(values: np.ndarray, what: str) -> Any:
    """As lists of numbers no longer than their Monte Carlo error needs."""
    form = {"ess": ".0f", "ess_square": ".0f", "rhat": ".4f"}.get(what, ".6g")
    return np.vectorize(lambda x: float(format(x, form)), otypes=[float])(values).tolist()


def worst(sites: dict[str, dict[str, np.ndarray]]) -> dict[str, Any]:
    """The lowest number of effective draws and the largest R-hat, with their sites."""
    found = {}
    for what, pick in (("ess", np.min), ("ess_square", np.min), ("rhat", np.max)):
        at = {site: float(pick(columns[what])) for site, columns in sites.items()}
        site = (max if what == "rhat" else min)(at, key=at.__getitem__)
        found[what] = [site, rounded(np.asarray(at[site]), what)]
    return found


def measure(name: str) -> dict[str, Any]:
    """A problem's reference."""
    problem, settings = load(name), SETTINGS.get(name, Settings())
    draws, went = run(problem, settings)
    sites = {site: describe(x) for site, x in draws.items()}
    return {
        "problem": name,
        "settings": asdict(settings) | {"seeds": len(SEEDS)},
        **went,
        "worst": worst(sites),
        "cores": cores(),
        "provenance": provenance(),
        "sites": {
            site: {what: rounded(values, what) for what, values in columns.items()} for site, columns in sites.items()
        },
    }


def write(name: str, row: dict[str, Any]) -> None:
    """Stores a reference, a site a line."""
    sites = ",\n".join(f"{json.dumps(site)}: {json.dumps(columns)}" for site, columns in row["sites"].items())
    head = json.dumps({key: value for key, value in row.items() if key != "sites"})
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{name}.json").write_text(f'{head[:-1]},\n"sites": {{\n{sites}\n}}}}\n')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = (*NAMES, *FULL_DATA)
    parser.add_argument("names", nargs="+", choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--again", action="store_true", help="run also those that are stored")
    arguments = parser.parse_args()
    numpyro.enable_x64()
    for name in dict.fromkeys(arguments.names):
        if load(name).reference != name:
            print(f"{name} has no reference of its own.")
        elif (RESULTS / f"{name}.json").exists() and not arguments.again:
            print(f"{name} is stored.")
        else:
            row = measure(name)
            write(name, row)
            print(f"{name}: {row['worst']}", flush=True)


if __name__ == "__main__":
    main()
