"""SGMCMCJax and jax-sgmc on the logistic regression with many rows, in an environment of their own.

Neither can be imported beside a JAX of today: SGMCMCJax 0.2.13 asks for `jax.experimental.host_callback` and jax-sgmc
0.1.5 for `jax.tree_unflatten`, which are gone. So they run beside JAX 0.4.30, and a bare scan runs there with them, in
turns, for the ratio. Each chain looks at rows of its own, as both libraries have it; SGMCMCJax draws them with
replacement. jax-sgmc compiles in every call and runs chains one after another: the time of an update is the slope
between a short run and a long one. Accuracy is that of whole runs from cold caches, a third of the updates dropped;
with control variates chains start at the mode, whose search is in the seconds.

    python benchmarks/older_peers.py [--short] [--again]
"""

import json
import pathlib
import subprocess
import sys
import tempfile
import venv

NEEDED = ("jax[cpu]==0.4.30", "numpy<2", "scipy<1.14", "SGMCMCJax==0.2.13", "jax-sgmc==0.1.5")
HERE = pathlib.Path(__file__).parent
#: `(sampler, step size)`, 6000 updates of 20 chains.
RUNS = (("SGLD", 1e-7), ("SGLD", 1e-6), ("SGLD, control variates", 1e-6), ("SGLD, control variates", 1e-5))


def measure(record):
    """Asks the script below, in a new environment."""
    if record.rows:
        return
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = str(pathlib.Path(folder) / ("Scripts" if sys.platform == "win32" else "bin") / "python")
        subprocess.run([python, "-m", "pip", "install", "--quiet", *NEEDED], check=True)
        form = "short" if record.short else "full"
        text = subprocess.run([python, __file__, "measure", form], check=True, stdout=subprocess.PIPE, text=True).stdout
    for key, row in json.loads(text).items():
        record.row(key, lambda row=row: row)


def tables(record):
    from peers import accuracy_table
    from record import pm, table

    lines = [
        (row["program"], pm(*row["microseconds"], digits=0), pm(*row["ratio"], digits=2) if row["ratio"] else "")
        for row in record.select(part="updates")
    ]
    head = ("JAX 0.4.30, own minibatches", "µs an update", "over the bare scan's")
    return f"{table(head, lines)}\n\n{accuracy_table(record)}"


def measure_here(short):
    """The rows; of both libraries only what is theirs, on the data and with the scores of the other peers."""
    from functools import partial
    import time

    import jax
    from jax import lax, random
    import jax.numpy as jnp
    from jax_sgmc import alias, potential
    from jax_sgmc.data.numpy_loader import NumpyDataLoader
    import large
    from large import BATCH, DIMENSION, PARTICLES, ROWS
    import numpy as np
    from sgmcmcjax.kernels import build_sgld_kernel, build_sgldCV_kernel
    from turns import in_turns, middle

    X, y = large.data()
    exact_mean, exact_sd = large.reference(X, y)
    X, y = large.as_jax(X, y)

    def log_likelihood(beta, x, y):
        logit = x @ beta
        return y * logit - jax.nn.softplus(logit)

    def log_prior(beta):
        return -0.5 * jnp.sum(beta**2)

    def chains(kernel, beta, num_draws, thinning, key):
        """Positions of all chains of a kernel of SGMCMCJax after every ``thinning`` updates."""
        init, step, position = kernel
        start_key, key = random.split(key)
        states = jax.vmap(init)(random.split(start_key, PARTICLES), beta)

        def update(states, at):
            i, key = at
            return jax.vmap(partial(step, i))(random.split(key, PARTICLES), states), None

        def draw(states, at):
            states, _ = lax.scan(update, states, at)
            return states, jax.vmap(position)(states)

        count = num_draws * thinning
        at = jnp.arange(count), random.split(key, count)
        at = jax.tree.map(lambda x: x.reshape(num_draws, thinning, *x.shape[1:]), at)
        return lax.scan(draw, states, at)[1]

    def bare(num_updates, step_size, key):
        def slope(beta, rows):
            return jax.grad(lambda beta: log_prior(beta) + ROWS / BATCH * log_likelihood(beta, X[rows], y[rows]).sum())(
                beta
            )

        def update(beta, key):
            rows_key, key = random.split(key)
            rows = random.randint(rows_key, (PARTICLES, BATCH), 0, ROWS)
            noise = (2 * step_size) ** 0.5 * random.normal(key, beta.shape)
            return beta + step_size * jax.vmap(slope)(beta, rows) + noise, None

        return lax.scan(update, jnp.zeros((PARTICLES, DIMENSION)), random.split(key, num_updates))[0]

    def mode():
        return jnp.asarray(large.newton(np.asarray(X, float), np.asarray(y, float), 8)[0], jnp.float32)

    def kernel(name, step_size, centre=None):
        if name == "SGLD":
            return build_sgld_kernel(step_size, log_likelihood, log_prior, (X, y), BATCH)
        return build_sgldCV_kernel(step_size, log_likelihood, log_prior, (X, y), BATCH, centre)

    found = {}
    num_updates, rounds = (200, 7) if short else (500, 25)
    zero, centre = jnp.zeros((PARTICLES, DIMENSION)), mode()
    programs = {"bare `lax.scan`": jax.jit(partial(bare, num_updates, 1e-6))}
    for name in ("SGLD", "SGLD, control variates"):
        step = kernel(name, 1e-6, centre)
        programs[f"SGMCMCJax {name}"] = jax.jit(partial(chains, step, zero + centre, num_updates // 10, 10))
    seconds = {name: np.array(values) for name, values in in_turns(programs, (), rounds).items()}
    for name, mine in seconds.items():
        ratio = None if name.startswith("bare") else middle(mine / seconds["bare `lax.scan`"])
        row = {"part": "updates", "program": name, "microseconds": middle(1e6 * mine / num_updates), "ratio": ratio}
        found[f"updates of {name}"] = row

    loader = NumpyDataLoader(x=np.asarray(X), y=np.asarray(y))
    energy = potential.minibatch_potential(
        prior=lambda sample: log_prior(sample["beta"]),
        likelihood=lambda sample, row: log_likelihood(sample["beta"], row["x"], row["y"]),
        strategy="vmap",
    )

    def jax_sgmc(iterations):
        run = alias.sgld(
            energy,
            loader,
            cache_size=100,
            batch_size=BATCH,
            first_step_size=1e-6,
            last_step_size=1e-6,
            accepted_samples=iterations // 10,
            progress_bar=False,
        )
        began = time.perf_counter()
        run(*({"beta": beta} for beta in zero), iterations=iterations)
        return time.perf_counter() - began

    low, high = 200, 600 if short else 2200
    slopes = [(jax_sgmc(high) - jax_sgmc(low)) / (high - low) for _ in range(2 if short else 5)]
    ratio = np.array(slopes) / (np.median(seconds["bare `lax.scan`"]) / num_updates)
    name = "jax-sgmc SGLD, chains one after another"
    row = {"part": "updates", "program": name, "microseconds": middle(1e6 * np.array(slopes)), "ratio": middle(ratio)}
    found[f"updates of {name}"] = row

    length, repeats = 6000, 2 if short else 3
    for name, step_size in RUNS[-1:] if short else RUNS:
        means, deviations, took = [], [], []
        for seed in range(repeats):
            jax.clear_caches()
            began = time.perf_counter()
            centre = None if name == "SGLD" else mode()
            start = zero if centre is None else zero + centre
            program = jax.jit(partial(chains, kernel(name, step_size, centre), start, length // 10, 10))
            draws = np.asarray(program(random.PRNGKey(seed)), float)[length // 30 :].reshape(-1, DIMENSION)
            took.append(time.perf_counter() - began)
            means.append((draws.mean(0) - exact_mean) / exact_sd)
            deviations.append(draws.std(0) / exact_sd - 1)
        middle_seconds, error = middle(took)
        row = {"part": "accuracy", "sampler": f"SGMCMCJax {name}", "setting": f"step {step_size:g}"}
        row |= {"length": length, "run": f"{length:,} updates", "is_table": True, "repeats": repeats}
        scores = large.scores(means, deviations)
        row |= {"seconds": middle_seconds, "seconds_se": error} | scores
        row |= large.rates(scores, middle_seconds, error)
        found[f"{row['sampler']}, {row['setting']}"] = row
    return found


if __name__ == "__main__":
    if sys.argv[1:2] == ["measure"]:
        print(json.dumps(measure_here(sys.argv[2] == "short")))
    else:
        from record import run

        run(__doc__, "older_peers", measure, tables, None)
