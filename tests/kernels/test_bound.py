"""Large arguments of a model within the programs that use them."""

import jax
from jax import random
import jax.numpy as jnp
from models import programs_of, vectorized
import numpy as np
import pytest

import numpyro
import numpyro.distributions as dist

from numpyro_repulsion import SGLD, Rows
from numpyro_repulsion.kernels import bound, requirements

N, L = 200, 6
X = random.normal(random.key(0), (N, 3))
GROUP = jnp.arange(N) % 4
Y = X[:, 0] + random.normal(random.key(1), (N,))


def model(x, group, y, batch=20):
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("groups", 4):
        level = numpyro.sample("level", dist.Normal(0, 1))
    with numpyro.plate("rows", N, subsample_size=batch) as i:
        numpyro.sample("y", dist.Normal(x[i] @ beta + level[group[i]], 1), obs=y[i])


def asks_for_values(x, group, y, batch=20):
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("groups", int(np.asarray(group).max()) + 1):
        level = numpyro.sample("level", dist.Normal(0, 1))
    with numpyro.plate("rows", N, subsample_size=batch) as i:
        numpyro.sample("y", dist.Normal(x[i] @ beta + level[group[i]], 1), obs=y[i])


def users_of_constants(kernel, args):
    """The operations of the program of an iteration that use a constant with N rows; "inner" for those of parts."""
    function, state = programs_of(kernel, random.split(random.key(2), L), 60, *args)[-1]
    program = jax.make_jaxpr(function)(state)
    large = {var for var in program.jaxpr.constvars if var.aval.shape[:1] == (N,)}
    found = [eqn.primitive.name for eqn in program.jaxpr.eqns if large.intersection(map(_as_key, eqn.invars))]
    return found + ["inner"] * _count_inner(program.jaxpr)


def _as_key(var):
    return None if hasattr(var, "val") else var


def _count_inner(jaxpr):
    parts = [part for eqn in jaxpr.eqns for part in jax.tree.leaves(list(eqn.params.values()), is_leaf=_is_closed)]
    parts = [part for part in parts if _is_closed(part)]
    own = sum(np.shape(const)[:1] == (N,) for part in parts for const in part.consts)
    return own + sum(_count_inner(part.jaxpr) for part in parts)


def _is_closed(part):
    return hasattr(part, "jaxpr") and hasattr(part, "consts")


def test_large_arguments_are_no_constants_of_loops(monkeypatch):
    kernel = SGLD(model)
    monkeypatch.setattr(bound, "LARGE_BYTES", 1)
    assert set(users_of_constants(kernel, (X, GROUP, Y))) == {"optimization_barrier"}
    # The control: small arguments are constants of whatever uses them.
    monkeypatch.setattr(bound, "LARGE_BYTES", 1 << 22)
    assert "optimization_barrier" not in (used := users_of_constants(kernel, (X, GROUP, Y))) and used


@pytest.mark.parametrize(
    "of, args",
    [
        (model, (X, GROUP, Y)),
        (model, (np.asarray(X), np.asarray(GROUP), np.asarray(Y))),
        (model, (Rows(X), Rows(GROUP), Rows(Y))),
        (asks_for_values, (X, GROUP, Y)),
    ],
    ids=["arrays", "of NumPy", "rows", "values needed"],
)
def test_energies_do_not_depend_on_the_size(of, args, monkeypatch):
    sampler, z = SGLD(of).bind(args), {"beta": jnp.ones(3), "level": jnp.arange(4.0)}

    def energy(number):
        return sampler.behind_barrier().target.potential_energy(z, {"rows": 7 * jnp.arange(20)}, random.key(0))

    monkeypatch.setattr(bound, "LARGE_BYTES", 1)
    shielded = jax.jit(energy)(0)
    # Another program may round differently.
    np.testing.assert_allclose(shielded, energy(0), rtol=1e-5)


def test_only_the_arrays_whose_values_are_needed_are_constants(monkeypatch):
    monkeypatch.setattr(bound, "LARGE_BYTES", 1)
    target = SGLD(asks_for_values).bind((X, GROUP, Y))
    assert [target._needs_values({place: leaf}) for place, leaf in enumerate((X, GROUP, Y))] == [False, True, False]


def test_arrays_of_numpy_keep_their_precision(monkeypatch):
    """Nanoseconds since 1970 do not fit 32 bits; models subtract the first of them, with NumPy."""
    minutes = np.linspace(0, 3, N)
    stamps = 1_700_000_000_000_000_000 + (60e9 * minutes).astype(np.int64)
    y = jnp.asarray(2 * minutes, jnp.float32)

    def trends(integers, floats, y):
        b = numpyro.sample("b", dist.Normal(0, 10).expand([2]).to_event(1))
        for k, t in enumerate((integers, floats)):
            numpyro.sample(f"y{k}", dist.Normal(b[k] * jnp.asarray((t - t.min()) / 60e9), 1), obs=y)

    monkeypatch.setattr(bound, "LARGE_BYTES", 1)
    mcmc = vectorized(SGLD(trends, step_size=1e-3), 0, 50, L)
    mcmc.run(random.key(0), stamps, stamps / 1.0, y, init_params={"b": 2.0 + jnp.arange(2 * L).reshape(L, 2) / 100})
    # The posterior has a standard deviation of 0.04; with wrapped or rounded times it would be 10.
    assert (abs(mcmc.get_samples()["b"].mean(0) - 2) < 0.1).all()


def test_errors_of_libraries_mean_that_values_are_needed(monkeypatch):
    class Picky(dict):
        def __getitem__(self, key):
            if isinstance(key, jax.core.Tracer):
                raise KeyError("a library of its own kind of error")
            return 4

    def picky(names, group, y):
        level = numpyro.sample("level", dist.Normal(0, 1).expand([Picky()[group]]).to_event(1))
        numpyro.sample("y", dist.Normal(level[GROUP], 1), obs=y)

    monkeypatch.setattr(bound, "LARGE_BYTES", 1)
    mcmc = vectorized(SGLD(picky, step_size=1e-3), 0, 2, L)
    # An array of text keeps the first state, too, from tracing the arguments.
    mcmc.run(random.key(0), np.array(["a", "b"]), GROUP, Y)
    assert mcmc.get_samples()["level"].shape == (2 * L, 4)


def test_arguments_whose_copies_exceed_memory_are_warned_of(monkeypatch):
    size = X.nbytes + GROUP.nbytes + Y.nbytes
    monkeypatch.setattr(requirements, "device_memory", lambda: requirements.MAX_COPIES * size - 1)

    def run(*args, **settings):
        kernel = SGLD(model, step_size=1e-3)
        mcmc = vectorized(kernel, 0, 1, L, **settings)
        jax.eval_shape(lambda: kernel.start(random.split(random.key(0), L), 0, None, args, {}, mcmc))

    with pytest.warns(
        UserWarning, match="arguments of the model take 0.0 GiB.*hold 7 copies. Pass numpyro_repulsion.Rows"
    ):
        run(X, GROUP, Y)
    # What it advises, and room for the copies: warnings are errors in these tests.
    run(*map(Rows, map(np.asarray, (X, GROUP, Y))))
    run(X, GROUP, Y, jit_model_args=True)
    monkeypatch.setattr(requirements, "device_memory", lambda: requirements.MAX_COPIES * size)
    run(X, GROUP, Y)
