"""How long does a first run take, compared with NumPyro's NUTS?

Each run has 100 + 100 iterations, with 20 particles or 4 vectorized chains of NUTS on all rows. Each kernel runs in its
own process, on one core, without a cache of compiled programs. The first run is measured in CPU seconds of the whole
process, from the import to the draws; all other seconds are wall-clock time. A stored first run finds an earlier
process's programs in JAX's persistent compilation cache. Values are medians over three processes.
"""

from functools import partial
import os
import statistics
import tempfile
import time

import jax
from jax import random
import jax.numpy as jnp
import numpy as np

import numpyro
import numpyro.distributions as dist
from numpyro.infer import NUTS

from benchmarks.harness.apart import apart
from benchmarks.harness.runs import vectorized
from benchmarks.harness.store import Record, table
from benchmarks.problems.posteriordb import eight_schools
from benchmarks.problems.targets import bayesian_neural_network, logistic_regression
from numpyro_repulsion import SGLD, SGLDR

KERNELS = {"SGLD": SGLD, "SGLDR": SGLDR, "NUTS": NUTS}
ITERATIONS = 100
#: Of a first run of SGLD over that of NUTS.
TARGETS = {
    "eight schools": 0.65, "logistic, minibatches": 0.8, "60 covariates": 0.65, "hierarchical logit": 0.75,
    "the paper's network": 0.5,
}  # fmt: skip


def hierarchical_logit(x, group, y, subsample_size=None):
    """A slope and an intercept for each of 20 groups, correlated; the reparameterization is by hand."""
    mean = numpyro.sample("mean", dist.Normal(0, 1).expand([2]).to_event(1))
    scale = numpyro.sample("scale", dist.HalfNormal(1).expand([2]).to_event(1))
    factor = numpyro.sample("factor", dist.LKJCholesky(2, 2.0))
    with numpyro.plate("group", 20):
        raw = numpyro.sample("raw", dist.Normal(0, 1).expand([2]).to_event(1))
    effects = mean + raw @ (scale[:, None] * factor).T
    with numpyro.plate("rows", len(y), subsample_size=subsample_size) as i:
        logits = effects[group[i], 0] + effects[group[i], 1] * x[i]
        numpyro.sample("y", dist.Bernoulli(logits=logits), obs=y[i])


def problems():
    """By name: the model, its arguments, and those that only our kernels get."""
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    X = normal(2000, 8)
    y = jnp.asarray(rng.random(2000) < 1 / (1 + np.exp(-np.asarray(X[:, 0]))), jnp.float32)
    covariates = normal(455, 13)
    schools = jnp.array([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
    errors = jnp.array([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])
    responses = jnp.sin(covariates[:, 0]) + 0.1 * normal(455)
    wide = normal(1000, 60)
    answers = jnp.asarray(rng.random(1000) < 1 / (1 + np.exp(-np.asarray(wide[:, 0]))), jnp.float32)
    x, group, labels = normal(1000), jnp.arange(1000) % 20, jnp.asarray(rng.random(1000) < 0.5, jnp.int32)
    return {
        "eight schools": (eight_schools, (8, schools, errors), {}),
        "logistic, minibatches": (logistic_regression, (X, y), {"subsample_size": 100}),
        "60 covariates": (logistic_regression, (wide, answers), {}),
        "hierarchical logit": (hierarchical_logit, (x, group, labels), {}),
        "the paper's network": (bayesian_neural_network, (covariates, responses), {"subsample_size": 100}),
    }


def measure_here(problem: str, name: str) -> dict:
    """Measures one kernel on one model, in this process."""
    model, args, settings = problems()[problem]
    ours = name != "NUTS"
    settings = settings if ours else {}
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    kernel = KERNELS[name](model)
    row: dict[str, float] = {}
    mcmc, quiet = (vectorized(kernel, ITERATIONS, ITERATIONS, 20 if ours else 4, progress_bar=x) for x in (True, False))
    # A kernel of NUTS serves one MCMC.
    for name, each in (("first", mcmc), ("second", mcmc), *[("without a bar", quiet)] * ours):
        began = time.perf_counter()
        each.run(random.key(0), *args, **settings)
        jax.block_until_ready(each.get_samples())
        row[name] = time.perf_counter() - began
        row.setdefault("cpu", time.process_time())
    return row


def timed(problem: str, name: str) -> dict:
    """A row: medians over processes without a cache, and a first run with the programs of an earlier process."""
    measured = partial(apart, __name__, "measure_here", 1200, problem=problem, name=name)
    rows = [measured({"JAX_ENABLE_COMPILATION_CACHE": "false"}) for _ in range(3)]
    with tempfile.TemporaryDirectory() as folder:
        cache = {"JAX_COMPILATION_CACHE_DIR": folder, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        stored = [measured(cache)["first"] for _ in range(2)][1]
    found = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
    return {"model": problem, "kernel": name, "stored": stored} | found


def measure(record: Record) -> None:
    for problem in problems():
        for name in KERNELS:
            record.row(f"{problem} {name}", partial(timed, problem, name))


def tables(record: Record) -> str:
    lines = []
    for row in record.rows.values():
        nuts = record.rows.get(f"{row['model']} NUTS")
        target = TARGETS.get(row["model"]) if row["kernel"] == "SGLD" else None
        ratio = "" if row["kernel"] == "NUTS" or not nuts else f"{row['cpu'] / nuts['cpu']:.2f}"
        ratio += f" (at most {target})" if target and ratio else ""
        keys = ("cpu", "second", "without a bar", "stored")
        seconds = (f"{row[key]:.1f}" if key in row else "" for key in keys)
        lines.append([row["model"], f"`{row['kernel']}`", ratio, *seconds])
    head = ["model", "kernel", "first run / NUTS's", "first run, CPU s", "second run, s", "second run without a bar, s"]
    head.append("stored first run, s")
    return table(head, lines)
