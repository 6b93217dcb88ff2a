"""What does each constant of the warmup change? Each is moved by 30 % either way, on four posteriors.

A row is one constant moved one way: the first of the posteriors on which findings are others, or the learned step or
the worst effective sample size by more than 1 %, with the ratios of these and of the seconds of warmup to those with
the constants of the package. Constants for networks, funnels and far starts change nothing on these four.

    python -m benchmarks.constants
"""

import dataclasses
from functools import cache, partial
import importlib
import pkgutil
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


def run(posterior: str) -> dict[str, Any]:
    """What one run learned, and how well it mixes."""
    kernel, model = POSTERIORS[posterior]
    _, args, settings = problems().get(posterior, (None, (), {}))
    mcmc, began = vectorized(kernel(model), ITERATIONS, ITERATIONS, 20), time.perf_counter()
    mcmc.warmup(random.key(0), *args, **settings)
    seconds = time.perf_counter() - began
    mcmc.run(random.key(100), *args, **settings)
    draws = flat(mcmc.get_samples(group_by_chain=True))
    return {
        "step": float(np.ravel(mcmc.last_state.step_size)[0]),
        "seconds": seconds,
        "ess": min(float(effective_sample_size(draws[..., i])) for i in range(draws.shape[2])),
        "findings": sorted(finding.name for finding in diagnose(mcmc)),
    }


as_it_is = cache(run)


def compared(of: Any, field: str, factor: float) -> dict[str, Any]:
    """One constant moved: the first posterior on which the step, the worst ESS or the findings are others."""
    known = getattr(of, field)
    for posterior in POSTERIORS:
        before = as_it_is(posterior)
        # Compiled programs hold the constants.
        jax.clear_caches()
        object.__setattr__(of, field, moved(known, factor))
        try:
            after = run(posterior)
        finally:
            object.__setattr__(of, field, known)
            jax.clear_caches()
        ratios = {name: round(after[name] / before[name], 3) for name in ("step", "ess", "seconds")}
        # Draws that forget another start differ in their last digits.
        if max(abs(ratios[name] - 1.0) for name in ("step", "ess")) > 0.01 or before["findings"] != after["findings"]:
            return {"posterior": posterior, "before": before["findings"], "after": after["findings"]} | ratios
    return {"posterior": ""}


def measure(record: Record) -> None:
    for of in constants():
        for field in dataclasses.fields(of):
            for factor in (1.0 - SHARE, 1.0 + SHARE):
                key = f"{type(of).__name__}.{field.name} × {factor:g}"
                record.row(key, partial(compared, of, field.name, factor))


def tables(record: Record) -> str:
    lines = []
    for key, row in record.rows.items():
        numbers = [f"{row[name]:.2f}" for name in ("step", "ess", "seconds")] if row["posterior"] else [""] * 3
        lines.append([key, row["posterior"] or "none", *numbers])
    return table(["constant", "first posterior that changes", "step", "worst ESS", "seconds"], lines)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    record = Record("constants")
    measure(record)
    print(f"\n{tables(record)}\n\n{record.origin()}")
