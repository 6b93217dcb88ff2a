"""Is there a bias left with minibatches? Variances of long runs beside exact ones, and the time per update.

With default settings, `MCMC(kernel(model), 1000, 2000, num_chains=20)` runs, then five more runs of 2,000 draws of each
chain start from its last state. The reference takes all rows, in double precision: draws from the normal distribution
of the mode and its curvature, weighted by the posterior. The error of its variances is that of twenty parts. All values
are for unconstrained coordinates, relative to the posterior's variances; ± is a standard error over the runs. The
largest of d biases that are 0 would be about two to three of their errors.
"""

from functools import cache, partial
import time

import jax
from jax import random
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
import numpy as np
from scipy.optimize import minimize

from numpyro.infer.util import initialize_model, unconstrain_fn

from benchmarks.harness.runs import in_turns, vectorized
from benchmarks.harness.store import Record, pm, table
from benchmarks.problems import real, simulated
from benchmarks.problems.real import Problem
from benchmarks.problems.targets import logistic_regression
from numpyro_repulsion import SGHMC, SGLD, ControlVariates, to_inference_data

KERNELS = {"SGLD": SGLD, "SGHMC": SGHMC}
BATCH, ROWS = 500, 50_000
RUNS, DRAWS = 6, 2_000
#: Draws of the reference, half of them mirrored, in so many parts.
REFERENCE, PARTS = 40_000, 20
#: d and the rows of a minibatch for the time of an update.
UPDATES = ((50, 500), (300, 500))


def regression(rows: int, d: int, freedom: float = np.inf, batch: int = BATCH) -> Problem:
    """A logistic regression on correlated covariates, heavy-tailed with few degrees of freedom."""
    rng = np.random.default_rng(0)
    distance = np.abs(np.subtract.outer(np.arange(d), np.arange(d)))
    x = rng.standard_normal((rows, d)) @ np.linalg.cholesky(0.7**distance).T
    if np.isfinite(freedom):
        x /= np.sqrt(rng.chisquare(freedom, (rows, 1)) / freedom)
    y = rng.random(rows) < 1 / (1 + np.exp(-x @ (0.5 * rng.standard_normal(d))))
    return Problem("", logistic_regression, real.as_jax(X=x, y=y.astype(float)), batch, ("beta",))


def of_coverage(name: str) -> Problem:
    """A model of the study of coverage with more rows."""
    problem = simulated.problems(ROWS)[name]
    _, responses = problem.draw(random.key(1), 1)
    return Problem(name, problem.model, problem.covariates | {"y": responses[0]}, BATCH, problem.sites)


CASES = {
    "logistic, 20,000 × 20, t₃ covariates": partial(regression, 20_000, 20, 3.0, 200),
    **{f"{name}, {ROWS:,} rows": partial(of_coverage, name) for name in simulated.problems(ROWS)},
    "bikes": real.PROBLEMS["bikes"],
    "wine, all rows": real.PROBLEMS["wine"],
    "logistic, 100,000 × 50": partial(regression, 100_000, 50),
}


@cache
def reference(name: str) -> tuple[np.ndarray, np.ndarray, float, float]:
    """Means, variances, the share of effective draws, and the largest relative error of a variance."""
    case = CASES[name]()
    with jax.enable_x64(True):
        data = {key: jnp.asarray(np.asarray(x, float) if x.dtype == jnp.float32 else x) for key, x in case.data.items()}
        start, potential, *_ = initialize_model(random.key(0), case.model, model_kwargs=data, dynamic_args=False)
        flat, unravel = ravel_pytree(start.z)
        energy = jax.jit(lambda z: potential(unravel(z)))
        found = minimize(jax.jit(jax.value_and_grad(lambda z: potential(unravel(z)))), flat, jac=True, method="BFGS")
        mode, hessian = found.x, jax.jit(jax.hessian(lambda z: potential(unravel(z))))
        for _ in range(5):
            mode = mode - np.linalg.solve(hessian(mode), jax.grad(energy)(mode))
        covariance = np.linalg.inv(hessian(mode))
        z = np.random.default_rng(0).standard_normal((REFERENCE // 2, len(mode)))
        z = np.concatenate((z, -z))
        x = z @ np.linalg.cholesky(covariance).T
        energies = np.asarray(jax.jit(lambda points: jax.lax.map(energy, points))(mode + x))
    log_weight = -energies + (z**2).sum(1) / 2
    weight = np.exp(log_weight - log_weight.max())

    def moments(some):
        # Known moments of the normal distribution are taken off, which leaves little to chance.
        w = (weight[some] / weight[some].mean() - 1)[:, None]
        mean = (w * x[some]).mean(0)
        return mode + mean, covariance.diagonal() + (w * (x[some] ** 2 - covariance.diagonal())).mean(0) - mean**2

    mean, variance = moments(np.arange(REFERENCE))
    parts = [moments(np.arange(k, REFERENCE, PARTS))[1] for k in range(PARTS)]
    error = np.std(parts, axis=0, ddof=1) / PARTS**0.5 / variance
    return mean, variance, float(weight.mean() ** 2 / (weight**2).mean()), float(error.max())


def bias(name: str, kernel: str, seed: int) -> dict:
    """A row: the bias of each variance, and of means in posterior sds."""
    mean, variance, *quality = reference(name)
    case, began = CASES[name](), time.process_time()
    flat = jax.jit(jax.vmap(lambda x: ravel_pytree(unconstrain_fn(case.model, (), case.data, x))[0]))
    mcmc = vectorized(KERNELS[kernel](case.model), 1000, DRAWS, 20, progress_bar=True)
    squares, means, row = [], [], {"case": name, "kernel": kernel, "seed": seed, "d": len(mean)}
    for k in range(RUNS):
        mcmc.run(random.key(1000 * seed + k), **case.kwargs)
        if not k:
            row["first"] = time.process_time() - began
            known = to_inference_data(mcmc).posterior.attrs
            row |= {key: known[key] for key in ("control_variates", "step_size", "step_size_bias")}
        draws = {site: x for site, x in mcmc.get_samples().items() if site in mcmc.last_state.z}
        x = np.asarray(flat(draws), float) - mean
        squares.append((x**2).mean(0))
        means.append(x.mean(0))
        mcmc.post_warmup_state = mcmc.last_state
    off = np.mean(means, 0)
    biases = (np.mean(squares, 0) - off**2) / variance - 1
    errors = np.std(squares, axis=0, ddof=1) / RUNS**0.5 / variance
    row |= {"bias": biases.tolist(), "error": errors.tolist(), "mean": (off / variance**0.5).tolist()}
    whole = np.mean(squares / variance, 1)
    row |= {"average": float(biases.mean()), "average_error": float(whole.std(ddof=1) / RUNS**0.5)}
    jax.clear_caches()
    return row | {"effective": quality[0], "reference_error": quality[1]}


def update(d: int, batch: int) -> dict:
    """A row: seconds of an update with control variates of either order, in turns."""
    case = regression(20_000, d, batch=batch)
    programs = {}
    for order in (1, 2):
        mcmc = vectorized(SGLD(case.model, gradient=ControlVariates(order=order)), 300, 500, 20, progress_bar=True)
        mcmc.run(random.key(0), **case.kwargs)
        mcmc.post_warmup_state = mcmc.last_state

        def again(key, mcmc=mcmc):
            mcmc.run(key, **case.kwargs)
            return mcmc.last_state.z

        programs[f"order {order}"] = again
    seconds = in_turns(programs, (), 7)
    jax.clear_caches()
    return {"d": d, "batch": batch} | {name: np.median(x) / 5000 for name, x in seconds.items()}


def measure(record: Record) -> None:
    for name in CASES:
        for kernel in KERNELS:
            record.row(f"{name} / {kernel}", partial(bias, name, kernel, 0))
    for d, batch in UPDATES:
        record.row(f"update, d = {d}", partial(update, d, batch))


def tables(record: Record) -> str:
    lines, costs = [], []
    for row in record.rows.values():
        if "case" not in row:
            cells = [f"{1e6 * row[order]:.0f}" for order in ("order 1", "order 2")]
            costs.append([str(row["d"]), *cells, f"{row['order 2'] / row['order 1']:.2f}"])
            continue
        biases = 100 * np.array(row["bias"])
        worst = int(np.abs(biases).argmax())
        cells = [row["case"], f"`{row['kernel']}`", str(row["d"]), row["control_variates"] or "none"]
        cells += [f"{float(row['step_size']):.2f}", f"{100 * float(row['step_size_bias']):.1f}%"]
        cells += [f"{pm(100 * row['average'], 100 * row['average_error'], 2)}%"]
        cells += [f"{pm(biases[worst], 100 * row['error'][worst], 2)}%", f"{np.abs(row['mean']).max():.4f}"]
        lines.append([*cells, f"{100 * row['reference_error']:.2f}%"])
    head = ["posterior", "kernel", "d", "control variates", "step", "tolerance", "mean bias of variances"]
    head += ["largest bias of a variance", "largest error of a mean, sd", "error of the reference"]
    parts = [table(head, lines)] + [table(["d", "first order, µs", "second order, µs", "ratio"], costs)] * bool(costs)
    return "\n\n".join(parts)
