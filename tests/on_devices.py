"""Runs on four virtual devices, in a process of its own: what `test_layout.py` looks at."""

import contextlib
import dataclasses
import functools
import json
import math
import re
import sys

import jax
from jax import lax, random
import jax.numpy as jnp
from jax.sharding import AxisType
from models import vectorized
import numpy as np

import numpyro
import numpyro.distributions as dist

from numpyro_repulsion import (
    RBF,
    SGHMC,
    SGHMCR,
    SGLD,
    SGLDR,
    SGNHT,
    SVGD,
    SVRG,
    ControlVariates,
    FullData,
    Rows,
    Subsampled,
    Sweeps,
    layout,
    predict,
    summary,
    to_inference_data,
)
from numpyro_repulsion.gradients import ravel_cloud
from numpyro_repulsion.rows import Shards

RNG = np.random.default_rng(0)
N, D = 803, 6
X = RNG.standard_normal((N, D)).astype(np.float32)
Y = (RNG.random(N) < 1 / (1 + np.exp(-X[:, 0]))).astype(np.int32)
GROUP = RNG.integers(0, N, N).astype(np.int32)
WIDE = RNG.standard_normal((N, 1200)).astype(np.float32) / 30
MESHES = {"particles": ((4,), ("particles",)), "both": ((2, 2), ("particles", "rows")), "rows": ((4,), ("rows",))}


def regression(x, y, batch=40):
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("rows", len(x), subsample_size=batch) as i:
        numpyro.sample("y", dist.Bernoulli(logits=x[i] @ beta), obs=y[i])


def subsampled(x, y):
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("rows", len(x), subsample_size=40):
        logits = numpyro.subsample(x, 1) @ beta
        numpyro.sample("y", dist.Bernoulli(logits=logits), obs=numpyro.subsample(y, 0))


def awkward(x, y):
    """A plate shorter than the data, a table indexed by a column, and rows in another order."""
    table, group = x
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([D]).to_event(1))
    with numpyro.plate("rows", N - 200, subsample_size=40) as i:
        numpyro.sample("y", dist.Bernoulli(logits=table[group[i]] @ beta + table[N - 1 - i] @ beta), obs=y[i])


def with_dropout(x, y):
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("rows", len(x), subsample_size=40) as i:
        kept = random.bernoulli(numpyro.prng_key(), 0.5, beta.shape)
        numpyro.sample("y", dist.Bernoulli(logits=x[i] @ (kept * beta)), obs=y[i])


def hierarchical(x, y):
    """Which warmup centers partly."""
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    with numpyro.plate("features", x.shape[1]):
        beta = numpyro.sample("beta", dist.Normal(0, scale))
    with numpyro.plate("rows", len(x), subsample_size=40) as i:
        numpyro.sample("y", dist.Bernoulli(logits=x[i] @ beta), obs=y[i])


def many_effects(x, y):
    """Whose Hessian is an arrow, of which control variates take all rows."""
    table, group = x
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([D]).to_event(1))
    effect = numpyro.sample("effect", dist.Normal(0, 1).expand([N]).to_event(1))
    with numpyro.plate("rows", N, subsample_size=40) as i:
        numpyro.sample("y", dist.Bernoulli(logits=table[i] @ beta + effect[group[i]]), obs=y[i])


@dataclasses.dataclass(frozen=True)
class Own(Subsampled):
    """Rows drawn with replacement, which lie anywhere."""

    def rows(self, key, target, shape):
        return {name: random.randint(key, (*shape, batch), 0, size) for name, (size, batch) in target.plates.items()}, 2


def small(kernel, **settings):
    """A run without warmup, with a step that moves particles by about their spread."""
    return functools.partial(kernel, regression, step_size=1e-3, **settings), 0


#: By name: how to make the kernel, and the iterations of warmup.
CASES = {
    "SGLD": small(SGLD, gradient=Subsampled()),
    "SGLDR": small(SGLDR, gradient=Subsampled(shared=True)),
    "SGHMC": small(SGHMC, gradient=Subsampled(block_size=10)),
    "SGNHT": small(SGNHT, gradient=SVRG()),
    "SVGD": small(SVGD, gradient=FullData()),
    "sweeps": small(SGLD, gradient=Sweeps()),
    "groups": small(SGLDR, num_ensembles=4, interaction=RBF(), gradient=Subsampled()),
    "half groups": small(SGLDR, num_ensembles=2, interaction=RBF(), gradient=Subsampled(shared=True)),
    "subsample": (lambda: SGLD(subsampled, step_size=1e-3), 0),
    "awkward": (lambda: SGLD(awkward, step_size=1e-3), 0),
    "own rows": (lambda: SGLD(regression, step_size=1e-3, gradient=Own()), 0),
    "dropout": (lambda: SGLD(with_dropout, step_size=1e-3), 0),
    "warmup": (lambda: SGLD(hierarchical), 60),
    "arrow": (lambda: SGLD(many_effects, gradient=ControlVariates(order=2)), 60),
}
#: Cases whose covariates have a table and the group of each row.
WITH_GROUPS = "awkward", "arrow"
#: The runs of `make test`, by mesh; and the cases of which it compares gradients, which compile faster.
QUICK = {"SGLDR": ["particles", "both"], "SGHMC": ["rows"]}
GRADIENTS = ["SGHMC", "subsample", "awkward", "own rows", "dropout"]
#: Cases of many parameters that interact, of which each device has some.
WIDE_CASES = {"SGLDR": SGLDR, "SGHMCR": SGHMCR}


def mesh_of(name, kind=AxisType.Auto):
    sizes, names = MESHES[name]
    return jax.make_mesh(sizes, names, axis_types=(kind,) * len(names))


def draws(make, num_warmup, x, y, num_chains=8):
    mcmc = vectorized(make(), num_warmup, 4, num_chains)
    mcmc.run(random.key(0), x, y)
    return mcmc.get_samples()["beta"]


def on(mesh, make, num_warmup, x=X, y=Y):
    """Draws on a mesh, with its own `Rows`, as shares stay with their objects."""
    with jax.set_mesh(mesh):
        found = draws(make, num_warmup, jax.tree.map(Rows, x), Rows(y))
    return np.asarray(found), str(found.sharding.spec)


def energies_and_gradients(name, mesh=None):
    """Those at a cloud, of the same minibatches, in one array ``(particles, 1 + parameters)``."""
    x = (X, GROUP) if name in WITH_GROUPS else X
    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        bound = CASES[name][0]().bind((jax.tree.map(Rows, x), Rows(Y)))
        bound.gradient.share(bound.target)
        z = {"beta": random.normal(random.key(1), (8, D))}

        def evaluate(z):
            flat, unravel = ravel_cloud(z)
            energy, slope = bound.gradient.energy_and_grad(random.key(2), bound.target, unravel, flat[None])
            return jnp.concatenate([energy[..., None], slope], -1)[0]

        return np.asarray(jax.jit(evaluate)(z))


def loop_bytes(mesh, make, x, y):
    """The bytes that one device gets from others in one update."""
    with jax.set_mesh(mesh):
        x, y = (Rows(x), Rows(y)) if "rows" in mesh.axis_names else (jnp.asarray(x), jnp.asarray(y))
        kernel = make()
        state = kernel.init(random.split(random.key(0), 8), 0, None, (x, y), {})
        text = jax.jit(lambda state: kernel.sample(state, (x, y), {})).lower(state).compile().as_text()
    operations = r"= (.*?) (?:all-gather|all-reduce|reduce-scatter|collective-permute|all-to-all)(?:-start)?\("
    sizes = {"pred": 1, "s32": 4, "u32": 4, "f32": 4}
    total = 0
    for line in text.splitlines():
        if "while/body" in line and (found := re.search(operations, line)):
            for kind, shape in re.findall(r"(\w+)\[([\d,]*)\]", found[1]):
                total += sizes[kind] * math.prod(int(k) for k in shape.split(",") if k)
    return total


def message(call):
    try:
        call()
    except (ValueError, TypeError, IndexError) as error:
        return str(error)
    return ""


@contextlib.contextmanager
def fault(owner, attribute, wrong):
    known = getattr(owner, attribute)
    setattr(owner, attribute, wrong)
    try:
        yield
    finally:
        setattr(owner, attribute, known)


def share_without_blocks(self, rows, mesh, block_size):
    """Shares that end with the last row of their last stratum, where blocks still begin."""
    INIT(self, rows, mesh, 1)


def row_of_any_share(self, array, rows):
    return array[jnp.asarray(rows, jnp.int32) % len(array)]


INIT = Shards.__init__
#: What is broken, each of which must show.
FAULTS = {
    "sum in place of the mean": (lax, "pmean", lax.psum),
    "no offset of a share": (Shards, "local", row_of_any_share),
    "blocks beyond a share": (Shards, "__init__", share_without_blocks),
}


def refusals():
    x, y = Rows(X), Rows(Y)

    def run(mesh, kernel=None, x=x, y=y, num_chains=8):
        kernel = kernel or SGLD(regression, step_size=1e-3)
        with jax.set_mesh(mesh):
            return message(lambda: draws(lambda: kernel, 0, x, y, num_chains))

    def crossed(x, y):
        z = numpyro.sample("z", dist.Normal(0, 1))
        with numpyro.plate("a", 40, 4, dim=-2) as i, numpyro.plate("b", 12, 4, dim=-1) as j:
            numpyro.sample("x", dist.Normal(z, 1), obs=x[i][:, j])

    def outside(x, y):
        beta = numpyro.sample("beta", dist.Normal(0, 1).expand([D]).to_event(1))
        with numpyro.plate("rows", N, subsample_size=40) as i:
            pass
        numpyro.factor("y", N / 40 * dist.Bernoulli(logits=x[i] @ beta).log_prob(y[i]).sum())

    plain, rows = mesh_of("particles"), mesh_of("rows")
    square = jnp.asarray(RNG.standard_normal((40, 12)))
    other = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    grouped = SGLD(regression, step_size=1e-3, num_ensembles=2)
    odd = SGLD(functools.partial(regression, batch=42), step_size=1e-3)
    by_blocks = SGLD(regression, step_size=1e-3, gradient=Subsampled(block_size=20))
    whole = SGLD(regression, step_size=1e-3, gradient=FullData())
    return {
        "explicit axes": run(mesh_of("particles", AxisType.Explicit)),
        "other axes": run(other),
        "odd number of particles": run(plain, num_chains=6),
        "odd number of particles in groups": run(plain, grouped, num_chains=12),
        "odd minibatch": run(rows, odd),
        "odd number of blocks": run(rows, by_blocks),
        "odd number of rows": run(rows, whole),
        "crossed plates": run(rows, SGLD(crossed, step_size=1e-3), square),
        "rows outside of the plate": run(rows, SGLD(outside, step_size=1e-3)),
        "rows on a device": run(rows, x=Rows(jnp.asarray(X))),
        "integers of 64 bits": run(rows, y=Rows(np.int64(2**40) + Y)) + run(plain, y=Rows(np.int64(2**40) + Y)),
    }


def compare(names, arrays, facts):
    """Make the runs of these cases, on one device and on meshes."""
    for name in names:
        make, num_warmup = CASES[name]
        x = (X, GROUP) if name in WITH_GROUPS else X
        arrays[f"{name}/one"] = np.asarray(draws(make, num_warmup, jax.tree.map(Rows, x), Rows(Y)))
        for where in names[name]:
            found, spec = on(mesh_of(where), make, num_warmup, x)
            arrays[f"{name}/{where}"], facts["sharding"][f"{name}/{where}"] = found, spec


def meshes(name):
    """Those of a slow case; devices cannot share all of 803 rows, and over particles alone all gradients are alike."""
    if name == "SVGD":
        return ["particles"]
    return list(MESHES) if name in ("SGLDR", "groups", "warmup") else ["both", "rows"]


#: All runs of `make test-full`, by mesh.
SLOW = {name: meshes(name) for name in CASES} | {"SGLDR": ["rows"]}


def results(facts):
    """What follows a run, inside of the mesh."""
    with jax.set_mesh(mesh_of("both")):
        mcmc = vectorized(SGLD(regression, step_size=1e-3), 0, 4, 8)
        x, y = Rows(X), Rows(Y)
        mcmc.run(random.key(0), x, y)
        summary(mcmc)
        to_inference_data(mcmc, log_likelihood=True)
        predict(mcmc, Rows(X[:8]), Rows(Y[:8]))
        facts["last row"] = [np.asarray(x[-1]).tolist(), X[-1].tolist(), message(lambda: x[N])]


def quick(arrays, facts):
    results(facts)
    facts["refused"] = refusals()
    compare(QUICK, arrays, facts)
    for name in GRADIENTS:
        for where in (None, "both", "rows"):
            arrays[f"gradient {name}/{where}"] = energies_and_gradients(name, mesh_of(where) if where else None)
    for name, broken in FAULTS.items():
        with fault(*broken):
            arrays[f"gradient SGHMC/{name}"] = energies_and_gradients("SGHMC", mesh_of("rows"))
    for name in ("SGLD", "groups"):
        facts["bytes"][name] = loop_bytes(mesh_of("particles"), CASES[name][0], X, Y)
    facts["bytes"]["SGLD, rows"] = loop_bytes(mesh_of("rows"), CASES["SGLD"][0], X, Y)


def slow(arrays, facts):
    compare(SLOW, arrays, facts)
    for name, kind in WIDE_CASES.items():
        make = functools.partial(kind, regression, step_size=1e-4)
        arrays[f"wide {name}/one"] = np.asarray(draws(make, 0, WIDE, Y))
        arrays[f"wide {name}/particles"], _ = on(mesh_of("particles"), make, 0, WIDE)
        facts["bytes"][f"wide {name}"] = loop_bytes(mesh_of("particles"), make, WIDE, Y)
        with fault(layout, "MIN_PARAMETERS", 10**9):
            facts["bytes"][f"wide {name} by particles"] = loop_bytes(mesh_of("particles"), make, WIDE, Y)


if __name__ == "__main__":
    arrays, facts = {}, {"sharding": {}, "bytes": {}}
    {"quick": quick, "slow": slow}[sys.argv[1]](arrays, facts)
    np.savez(sys.argv[2], facts=json.dumps(facts), **arrays)
