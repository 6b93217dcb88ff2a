"""The size of the house: lines, files, names, and what one update walks through, with what is aimed at beside them.

The walk is that of ``SGLDR(model)`` on a minibatched logistic regression: an update and an iteration, traced, with
nothing compiled or sampled.

    python -m benchmarks.harness.house
"""

import ast
from collections.abc import Iterator
from pathlib import Path
import sys
from typing import Any

import jax
from jax import random
import jax.numpy as jnp

import numpyro
import numpyro.distributions as dist

from benchmarks.harness.store import ROOT, table
import numpyro_repulsion
from numpyro_repulsion import SGLDR
from numpyro_repulsion.kernels.warmup_programs import Frozen

PACKAGE = ROOT / "numpyro_repulsion"
ROWS, DIMENSION, BATCH, PARTICLES = 200, 3, 20, 20
#: The method that makes one update.
UPDATE = "CloudMover._update"
TARGETS = {
    "lines of the package": 15_500,
    "files of the package": 85,
    "lines of its longest file": 600,
    "lines of tests": 17_500,
    "lines of benchmarks": 5_000,
    "constants of modules": 150,
    "`is None`": 250,
    "public names": 40,
    "files that an update enters": 14,
    "equations of an iteration": 1_200,
    "leaves of the state": 25,
}


def lengths(folder: Path) -> dict[str, int]:
    """Lines by file."""
    return {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in folder.rglob("*.py")}


def sizes() -> dict[str, Any]:
    """What is counted without running anything."""
    package, texts = lengths(PACKAGE), [path.read_text() for path in PACKAGE.rglob("*.py")]
    longest = max(package, key=lambda name: package[name])
    assigned = (s for text in texts for s in ast.parse(text).body if isinstance(s, ast.Assign | ast.AnnAssign))
    nodes = (node for s in assigned for node in ast.walk(s) if isinstance(node, ast.Name))
    names = [node.id for node in nodes if isinstance(node.ctx, ast.Store)]
    return {
        "lines of the package": sum(package.values()),
        "files of the package": len(package),
        "lines of its longest file": f"{package[longest]} ({longest})",
        "lines of tests": sum(lengths(ROOT / "tests").values()),
        "lines of benchmarks": sum(lengths(ROOT / "benchmarks").values()),
        "constants of modules": sum(name.isupper() for name in names),
        "`is None`": sum(text.count(" is None") for text in texts),
        "`is not None`": sum(text.count(" is not None") for text in texts),
        "public names": len(numpyro_repulsion.__all__),
    }


def equations(jaxpr: Any) -> Iterator[Any]:
    """The equations of a program, those of inner programs included."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(inner := getattr(inner, "jaxpr", inner), "eqns"):
                yield from equations(inner)


def model(x, y):
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([DIMENSION]).to_event(1))
    with numpyro.plate("rows", ROWS, subsample_size=BATCH) as i:
        numpyro.sample("y", dist.Bernoulli(logits=x[i] @ beta), obs=y[i])


def walk() -> dict[str, Any]:
    """Files that a traced update enters, the equations of a traced ``sample``, and the state's leaves."""
    kernel = SGLDR(model)
    args = random.normal(random.key(1), (ROWS, DIMENSION)), jnp.arange(ROWS) % 2
    keys = random.split(random.key(0), PARTICLES)
    start = jax.eval_shape(lambda keys: kernel.start(keys, 1000, None, args, {}), keys)
    # With control variates in use, as usual.
    how = Frozen((1, False), False, 1000, False)
    state = jax.eval_shape(lambda start: kernel.frozen_as(how, start, args, {}), start)
    files, within = set(), 0

    def listen(frame, event, _):
        nonlocal within
        if event in ("call", "return") and str(PACKAGE) in frame.f_code.co_filename:
            within += (frame.f_code.co_qualname == UPDATE) * (1 if event == "call" else -1)
            if within:
                files.add(frame.f_code.co_filename)

    sys.setprofile(listen)
    try:
        program = jax.make_jaxpr(lambda state: kernel.sample(state, args, {}))(state)
    finally:
        sys.setprofile(None)
    found = {
        "files that an update enters": len(files),
        "equations of an iteration": len(list(equations(program.jaxpr))),
    }
    return found | {"leaves of the state": len(jax.tree.leaves(state))}


if __name__ == "__main__":
    figures = sizes() | walk()
    lines = [[name, str(value), str(TARGETS.get(name, ""))] for name, value in figures.items()]
    print(table(["", "is", "at most"], lines))
