"""At how many rows does ``SGLD`` become faster than NUTS? CPU seconds until all means and squares have an ESS of 400.

The study fits two logistic regressions: a plain one with 20 coefficients, and a hierarchical one with 5 coefficients
and 50 group effects. `SGLD` and `SGHMC` run 20 particles on minibatches of 500 rows. NUTS runs 4 vectorized chains and
ChEES-HMC 20, both on all rows. All have 500 warmup iterations and default settings. After warmup, a run makes draws in
equal parts until the ESS of every parameter's mean and of its squared deviation is 400 or more. The sampling time is
then scaled to an ESS of exactly 400. The ESS is estimated from the draws, so it does not include the step-size bias. To
show this bias, the table has the relative error of the coefficients' standard deviations (root mean square, plain
regression, against Laplace's approximation).

Each sampler, model and number of rows has its own process on one core, without a compilation cache. Times are CPU
seconds of that process after the data are made. The first run includes compilation; the second run is compiled, and
has another seed. After ten minutes a run makes no further part, and there is no second run. A time marked ≈
is extrapolated from an ESS below 400. A process that takes more than four hours is stopped.
"""

from importlib.util import find_spec
import os
import time

import arviz
import jax
from jax import random
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
import numpy as np

import numpyro
import numpyro.distributions as dist
from numpyro.infer import NUTS
from numpyro.infer.util import initialize_model

from benchmarks.harness.apart import apart
from benchmarks.harness.runs import flat, vectorized
from benchmarks.harness.store import Record, table
from benchmarks.problems.logistic_100k import data, reference
from benchmarks.problems.targets import logistic_regression, normals
from numpyro_repulsion import SGHMC, SGLD, ensemble_ess

ROWS, MODELS = (1_000, 10_000, 100_000, 1_000_000), ("plain", "hierarchical")
GROUPS, BATCH, WARMUP, WANTED = 50, 500, 500, 400
#: Seconds: when a run ends, and when a process is killed.
BOX, KILLED = 600, 14_400
#: The kernel, the number of chains, and of the draws of each in a part.
SAMPLERS = {"SGLD": (SGLD, 20, 100), "SGHMC": (SGHMC, 20, 100), "NUTS": (NUTS, 4, 50), "ChEES-HMC": (None, 20, 200)}


def hierarchical(x, group, y, subsample_size=None):
    """Coefficients, and effects of groups around a mean."""
    b, mu, tau = normals(x.shape[1]), numpyro.sample("mu", dist.Normal(0, 1)), numpyro.sample("tau", dist.HalfNormal(1))
    with numpyro.plate("group", GROUPS):
        effect = numpyro.sample("effect", dist.Normal(mu, tau))
    with numpyro.plate("rows", len(y), subsample_size=subsample_size) as i:
        numpyro.sample("y", dist.Bernoulli(logits=effect[group[i]] + x[i] @ b), obs=y[i])


def problem(model: str, rows: int) -> tuple:
    """The model, its arguments, and reference standard deviations or ``None``."""
    x, y = data(rows, 20 if model == "plain" else 5, np.float32)
    if model == "plain":
        return logistic_regression, (jnp.asarray(x), jnp.asarray(y)), reference(np.asarray(x, float), y)[1]
    rng, group = np.random.default_rng(1), np.arange(rows) % GROUPS
    logits = x @ np.linspace(-1, 1, 5) + (rng.standard_normal(GROUPS) - 0.5)[group]
    y = rng.random(rows) < 1 / (1 + np.exp(-logits))
    return hierarchical, (jnp.asarray(x), jnp.asarray(group), jnp.asarray(y, jnp.float32)), None


def effective(draws: dict, ours: bool) -> list[float]:
    """The least effective sample size of a mean and of a squared deviation; 0 if it cannot be told yet."""
    ess, scalars = ensemble_ess if ours else arviz.ess, np.moveaxis(flat(draws), -1, 0)
    return [float(np.nan_to_num([ess(x, method=method) for x in scalars]).min()) for method in ("mean", "sd")]


def through_mcmc(name: str, density, args: tuple):
    """A function of a seed: seconds of warmup and of draws, and the draws until those wanted."""
    kernel, chains, part = SAMPLERS[name]
    ours, settings = name != "NUTS", {"subsample_size": BATCH} if name != "NUTS" else {}
    # With its bar, as users have it: one compilation serves every part.
    mcmc = vectorized(kernel(density), WARMUP, part, chains, progress_bar=True)

    def once(seed):
        began, taken, parts, worth = time.process_time(), 0.0, [], [0.0, 0.0]
        mcmc.warmup(random.key(seed), *args, **settings)
        jax.block_until_ready(mcmc.last_state)
        warmup = time.process_time() - began
        while min(worth) < WANTED and (not parts or warmup + taken < BOX):
            began = time.process_time()
            mcmc.post_warmup_state = mcmc.last_state
            mcmc.run(mcmc.last_state.rng_key, *args, **settings)
            parts.append(jax.tree.map(np.asarray, mcmc.get_samples(group_by_chain=True)))
            taken += time.process_time() - began
            draws = jax.tree.map(lambda *x: np.concatenate(x, 1), *parts)
            worth = effective(draws, ours)  # Not on the clock.
        return warmup, taken, worth, draws

    return once


def through_blackjax(name: str, density, args: tuple):
    """As `through_mcmc`, but one program of all; its seconds are split as its gradients are."""
    from benchmarks.methods.current_peers import run_chees

    _, chains, part = SAMPLERS[name]
    given = {"model_args": args, "dynamic_args": True, "validate_grad": False}
    info = initialize_model(random.split(random.key(0), chains), density, **given)
    unravel = ravel_pytree(jax.tree.map(lambda x: x[0], info.param_info.z))[1]

    @jax.jit
    def program(key, starts, args):
        keys = key, random.fold_in(key, 1)
        x, *steps = run_chees(lambda x: -info.potential_fn(*args)(unravel(x)), keys, starts, WARMUP, part)
        return jax.vmap(jax.vmap(unravel))(x.swapaxes(0, 1)), *steps

    def once(seed):
        began = time.process_time()
        z = initialize_model(random.split(random.key(seed), chains), density, **given).param_info.z
        draws, tuning, steps = jax.block_until_ready(
            program(random.key(seed), jax.vmap(lambda x: ravel_pytree(x)[0])(z), args)
        )
        taken, share = time.process_time() - began, float(steps / (steps + tuning))
        return taken * (1 - share), taken * share, effective(draws, False), draws

    return once


def measure_here(model: str, rows: int, name: str) -> dict:
    """Measures one cell, in this process."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    density, args, exact = problem(model, rows)
    once = (through_mcmc if SAMPLERS[name][0] else through_blackjax)(name, density, args)
    row: dict = {}
    for seed, run_ in enumerate(("first", "second")):
        warmup, taken, worth, draws = once(seed)
        row[run_] = {"warmup": warmup, "draws": taken, "effective": worth, "is_extrapolated": min(worth) < WANTED}
        row[run_]["seconds"] = warmup + taken * WANTED / max(min(worth), 1.0)
        if warmup + taken > BOX:
            break
    if exact is not None:
        row["sd_error"] = float(np.sqrt(np.mean((draws["beta"].std((0, 1)) / exact - 1) ** 2)))
    return row


def measure(record: Record) -> None:
    for rows in ROWS:
        for model in MODELS:
            for name in SAMPLERS:
                if not SAMPLERS[name][0] and not find_spec("blackjax"):
                    print(f"{model} {rows} {name}: not run, for BlackJAX is not installed", flush=True)
                    continue
                there = __name__, "measure_here", KILLED, {"JAX_ENABLE_COMPILATION_CACHE": "false"}
                cell = {"model": model, "rows": rows, "name": name}
                record.row(f"{model} {rows} {name}", lambda a=there, c=cell: c | apart(*a, **c))


def tables(record: Record) -> str:
    lines = []
    for row in record.rows.values():
        if "failed" in row:
            lines.append([row["model"], f"{row['rows']:,}", row["name"], row["failed"], "", "", ""])
            continue
        runs = [row.get(which) for which in ("first", "second")]
        cells = [f"{'≈ ' * x['is_extrapolated']}{x['seconds']:,.1f}" if x else "not repeated" for x in runs]
        last = runs[1] or runs[0]
        worth = " · ".join(f"{x:,.0f}" for x in last["effective"])
        error = f"{100 * row['sd_error']:.1f}%" if "sd_error" in row else ""
        lines.append([row["model"], f"{row['rows']:,}", f"`{row['name']}`", *cells, worth, error])
    head = ["", "rows", "", "first run, CPU s", "second, CPU s", "effective draws: mean · square", "error of sds"]
    missing = [name for name in SAMPLERS if record.rows and not record.select(name=name)]
    note = f"\n\nNot run, for it is not installed: {', '.join(missing)}." if missing else ""
    return table(head, lines) + note
