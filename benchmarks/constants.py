"""What does each constant of the warmup change? Each is moved by 30 % either way, on four posteriors.

A row is one constant moved one way: the ratios of the learned step, of the seconds of warmup and of the worst effective
sample size to those with the constants of the package, as geometric means over three seeds, for each posterior on which
it changed anything at all.

    python -m benchmarks.constants
"""

import dataclasses
from functools import cache, partial
import hashlib
import importlib
import math
import pkgutil
import statistics
import time
from typing import Any
import warnings

import jax
from jax import random
import jax.numpy as jnp
import numpy as np

import numpyro
from numpyro.diagnostics import effective_sample_size
import numpyro.distributions as dist

from benchmarks.harness.runs import flat, vectorized
from benchmarks.harness.store import Record, table
from benchmarks.problems.posteriordb import eight_schools
from benchmarks.problems.targets import bayesian_neural_network, logistic_regression
from benchmarks.studies.first_run import problems
import numpyro_repulsion
from numpyro_repulsion import SGLD, SGLDR, diagnose

SEEDS = (0, 1, 2)
ITERATIONS = 200
SHARE = 0.3


def two_modes():
    numpyro.sample("z", dist.MixtureSameFamily(dist.Categorical(probs=jnp.array([0.3, 0.7])), dist.Normal(MODES, 1.0)))


MODES = jnp.array([-6.0, 6.0])
POSTERIORS = {
    "eight schools": (SGLD, eight_schools),
    "logistic, minibatches": (SGLDR, logistic_regression),
    "the paper's network": (SGLD, partial(bayesian_neural_network, hidden=10)),
    "two modes": (SGLD, two_modes),
}


def constants() -> list[Any]:
    """All frozen dataclasses of constants in the package, by their one value."""
    found = {}
    for module in pkgutil.walk_packages(numpyro_repulsion.__path__, "numpyro_repulsion."):
        for value in vars(importlib.import_module(module.name)).values():
            if type(value).__name__.endswith("Constants"):
                found[type(value).__name__] = value
    return [found[name] for name in sorted(found)]


def moved(value: Any, factor: float) -> Any:
    """A constant times a factor: of a number that is close to 1, its distance from 1; of a tuple, all its entries."""
    if isinstance(value, tuple):
        return tuple(moved(x, factor) for x in value)
    if isinstance(value, int):
        return max(1, round(value * factor))
    return 1.0 - (1.0 - value) / factor if 0.7 <= value < 1.0 else value * factor


def run(posterior: str, seed: int) -> dict[str, Any]:
    """What one run learned, how well it mixes, and a digest of its draws."""
    kernel, model = POSTERIORS[posterior]
    _, args, settings = problems().get(posterior, (None, (), {}))
    mcmc, began = vectorized(kernel(model), ITERATIONS, ITERATIONS, 20), time.perf_counter()
    mcmc.warmup(random.key(seed), *args, **settings)
    seconds = time.perf_counter() - began
    mcmc.run(random.key(seed + 100), *args, **settings)
    draws = flat(mcmc.get_samples(group_by_chain=True))
    return {
        "step": float(np.ravel(mcmc.last_state.step_size)[0]),
        "seconds": seconds,
        "ess": min(float(effective_sample_size(draws[..., i])) for i in range(draws.shape[2])),
        "findings": sorted(finding.name for finding in diagnose(mcmc)),
        "digest": hashlib.sha256(draws.tobytes()).hexdigest(),
    }


as_it_is = cache(run)


def compared(of: Any, field: str, factor: float) -> dict[str, Any]:
    """One constant moved: the ratios for each posterior on which draws are others."""
    row: dict[str, Any] = {"constants": type(of).__name__, "field": field, "factor": factor}
    known = getattr(of, field)
    for posterior in POSTERIORS:
        pairs = []
        for seed in SEEDS:
            before = as_it_is(posterior, seed)
            object.__setattr__(of, field, moved(known, factor))
            try:
                after = run(posterior, seed)
            finally:
                object.__setattr__(of, field, known)
            if after["digest"] == before["digest"] and after["findings"] == before["findings"]:
                break
            pairs.append((before, after))
        jax.clear_caches()
        if pairs:
            row[posterior] = {
                name: round(math.exp(statistics.mean(math.log(b[name] / a[name]) for a, b in pairs)), 3)
                for name in ("step", "ess", "seconds")
            } | {"findings": sum(a["findings"] != b["findings"] for a, b in pairs)}
    return row


def measure(record: Record) -> None:
    for of in constants():
        for field in dataclasses.fields(of):
            for factor in (1.0 - SHARE, 1.0 + SHARE):
                key = f"{type(of).__name__}.{field.name} × {factor:g}"
                record.row(key, partial(compared, of, field.name, factor))


def tables(record: Record) -> str:
    """The ratios of the step and of the worst effective sample size; a dash where nothing changed."""
    lines = []
    for key, row in record.rows.items():
        cells = [f"{found['step']:.2f}, {found['ess']:.2f}" if (found := row.get(name)) else "-" for name in POSTERIORS]
        lines.append([key, *cells])
    return table(["constant", *POSTERIORS], lines)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    record = Record("constants")
    measure(record)
    print(f"\n{tables(record)}\n\n{record.origin()}")
