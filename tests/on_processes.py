"""Runs of two processes with two virtual devices each, or of one with four: what `test_processes.py` looks at.

python on_processes.py PART DIRECTORY PROCESS PROCESSES PORT
"""

import itertools
import json
import os
import signal
import sys

import jax
from jax import random
from jax.sharding import PartitionSpec
from models import vectorized
import numpy as np
from on_devices import D, X, Y, hierarchical, mesh_of, message, regression

from numpyro.infer import MCMC

from numpyro_repulsion import SGHMCR, SGLD, Rows, diagnose, predict, run_in_pieces, summary, to_inference_data

# pytest looks for examples in this file.
PART, DIRECTORY, PROCESS, PROCESSES = sys.argv[1:5] if __name__ == "__main__" else ("", "", 0, 1)
PROCESS, PROCESSES = int(PROCESS), int(PROCESSES)
#: Which four devices share equally.
X, Y = X[:800], Y[:800]


def ran(kernel, where, *args, num_warmup=0, num_samples=4, bar=False, how=MCMC.run, **settings):
    """The run of a kernel on a mesh over the devices of all processes."""
    mcmc = vectorized(kernel, num_warmup, num_samples, 8)
    mcmc.progress_bar = bar
    with jax.set_mesh(mesh_of(where)):
        how(mcmc, random.key(0), *args, **settings)
    return mcmc


def drawn(*args, **settings):
    return np.asarray(ran(*args, **settings).get_samples()["beta"])


def spread(array):
    """An array of which this process gives its part."""
    part = np.split(array, PROCESSES)[PROCESS]
    sharding = jax.NamedSharding(mesh_of("rows"), PartitionSpec("rows"))
    return jax.make_array_from_process_local_data(sharding, part, array.shape)


def kernel(model=regression, **settings):
    return SGLD(model, step_size=1e-3, **settings)


def quick(arrays, facts):
    mcmc = ran(SGHMCR(regression, step_size=1e-3), "particles", X, Y)  # Whose momenta are looked at.
    arrays["particles"] = np.asarray(mcmc.get_samples()["beta"])
    arrays["rows of a file"] = drawn(kernel(), "rows", Rows(X), Rows(Y))
    in_parts = ran(kernel(), "rows", Rows(spread(X)), Rows(spread(Y)))
    arrays["rows of an array"] = np.asarray(in_parts.get_samples()["beta"])
    if PROCESS == 0:  # What the other process does not wait for.
        facts["alone"] = [list(summary(mcmc).index), sorted(to_inference_data(mcmc, log_likelihood=True).groups())]
        facts["alone"].append([predict(mcmc, X[:5], Y[:5]).mean is None, len(diagnose(mcmc))])
    if PROCESSES == 1:
        return
    other, missing = X + PROCESS, X.copy()
    everywhere = jax.NamedSharding(mesh_of("rows"), PartitionSpec())
    odd = [jax.make_array_from_callback((798, *a.shape[1:]), everywhere, lambda i, a=a: a[:798][i]) for a in (X, Y)]
    missing[-1, 0] = np.nan  # In the part of the last process.
    facts["refused"] = {
        "other data": message(lambda: drawn(kernel(), "particles", other, Y)),
        "another step": message(lambda: drawn(SGLD(regression, step_size=1e-3 * (1 + PROCESS)), "particles", X, Y)),
        "no mesh": message(lambda: vectorized(kernel(), 0, 4, 8).run(random.key(0), X, Y)),
        "missing numbers": message(lambda: drawn(kernel(), "rows", Rows(spread(missing)), Rows(spread(Y)))),
        "more samples": message(lambda: ran(kernel(), "particles", X, Y, num_samples=4 + PROCESS)),
        "a bar in one process": message(lambda: ran(kernel(), "particles", X, Y, bar=PROCESS == 0)),
        "more arguments": message(lambda: ran(kernel(), "particles", X, Y, *[20] * PROCESS)),
        "alone with parts": message(lambda: summary(in_parts)),
        "odd number of rows": message(lambda: drawn(kernel(), "rows", *map(Rows, odd))),
    }


def slow(arrays, facts):
    arrays["warmup"] = drawn(SGLD(hierarchical), "both", Rows(X), Rows(Y), num_warmup=60)
    mcmc = ran(kernel(), "rows", spread(X), spread(Y))
    arrays["plain array"] = np.asarray(mcmc.get_samples()["beta"])
    with jax.set_mesh(mesh_of("rows")):
        facts["together"] = list(summary(mcmc).index)
    mcmc = ran(kernel(), "rows", Rows(spread(X)), Rows(spread(Y)))
    with jax.set_mesh(mesh_of("rows")):
        facts["together"] += list(summary(mcmc).index)
    arrays["whole"] = pieces(f"whole-{PROCESSES}")


def pieces(name, ends=None):
    """A run in pieces; in the third one, of warmup, it may end by a signal to one of its processes."""
    made, count = SGLD(regression), itertools.count()
    warm = made.warm

    def end(*args):
        if next(count) == 2 and PROCESS == PROCESSES - 1:
            os.kill(os.getpid(), ends)
        return warm(*args)

    if ends is not None:
        made.warm = end
    data, where = (Rows(spread(X)), Rows(spread(Y))), f"{DIRECTORY}/{name}"
    return drawn(made, "rows", *data, num_warmup=60, how=run_in_pieces, piece_size=10, directory=where)


PARTS = {
    "quick": quick,
    "slow": slow,
    "killed": lambda arrays, facts: pieces("killed", signal.SIGKILL),
    "stopped": lambda arrays, facts: pieces("stopped", signal.SIGTERM),
    "after killed": lambda arrays, facts: arrays.update(resumed=pieces("killed")),
    "after stopped": lambda arrays, facts: arrays.update(resumed=pieces("stopped")),
}

if __name__ == "__main__":
    if PROCESSES > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{sys.argv[5]}", num_processes=PROCESSES, process_id=PROCESS)
    assert jax.device_count() == 4 and X.shape[1] == D
    arrays, facts = {}, {}
    PARTS[PART](arrays, facts)
    np.savez(f"{DIRECTORY}/{PART}-{PROCESSES}-{PROCESS}.npz", facts=json.dumps(facts), **arrays)
