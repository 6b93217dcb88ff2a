"""Stored states: what may go on from them, and what raises an error and says what to do instead."""

import copy
import os
import pickle
import subprocess
import sys

from catalogue import DYNAMICS
import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import pytest

import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC

from numpyro_repulsion import (
    RBF,
    SGHMC,
    SGLD,
    SGLDR,
    SGNHT,
    SVGD,
    SVRG,
    Balanced,
    BiasBudget,
    Cyclical,
    FullData,
    Independent,
    Overdamped,
    Polynomial,
    Recipe,
    Subsampled,
    run_in_pieces,
)

SIX = jnp.linspace(-2.0, 2.0, 12).reshape(6, 2)
Y = jnp.linspace(-1.0, 1.0, 20)


def quadratic(z):
    return jnp.sum(z**2) / 2


def rows(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("rows", 20, subsample_size=4) as i:
        numpyro.sample("y", dist.Normal(mu[0], 1), obs=y[i])


def make(kernel, num_warmup=0, num_samples=20, num_chains=6, chain_method="vectorized", **kwargs):
    settings = {"num_chains": num_chains, "chain_method": chain_method, "progress_bar": False} | kwargs
    return MCMC(kernel, num_warmup=num_warmup, num_samples=num_samples, **settings)


def sgld(step_size=0.1, kernel=SGLD, **kwargs):
    return kernel(potential_fn=quadratic, step_size=step_size, **kwargs)


@pytest.fixture(scope="module")
def state_of():
    """The state of a kernel after its start, by a name."""
    kernels = {
        "lm": sgld(),
        "euler": sgld(dynamics=Overdamped("euler")),
        "rbf": sgld(kernel=SGLDR),
        "balanced rbf": sgld(interaction=Balanced(RBF(2.0)), num_ensembles=2),
        "momenta": sgld(kernel=SGHMC),
        "recipe": sgld(dynamics=DYNAMICS["recipe"].part),
        "dense": sgld(preconditioner=np.array([1.0, 4.0])),
        "measured": SGLD(potential_fn=quadratic),
    }
    keys = random.split(random.key(0), 6)

    def build(name):
        return kernels[name].init(keys, 100 if name == "measured" else 0, SIX, (), {})

    return build


def abstractly(kernel, state, *args):
    """One iteration, without compiling it."""
    return jax.eval_shape(lambda state: kernel.sample(state, args, {}), state)


@pytest.mark.parametrize(
    ("name", "kernel", "words"),
    [
        ("euler", sgld(), "carries nothing .*integrator='euler'.* would read it as noise"),
        ("lm", sgld(dynamics=Overdamped("euler")), "carries noise .*would read it as nothing"),
        ("rbf", sgld(), "carries nothing.*would read it as noise"),
        ("momenta", sgld(), "carries momenta.* would read it as noise"),  # of the same shapes
        ("lm", sgld(kernel=SGHMC), "carries noise .* would read it as momenta"),
        ("momenta", sgld(kernel=SGNHT), "carries momenta .* would read it as momenta and a friction"),
        ("recipe", sgld(kernel=SGHMC), "carries extra coordinates .* would read it as momenta"),
        ("recipe", sgld(dynamics=Recipe(lambda x: jnp.eye(x.size), extra=1)), "carries extra coordinates"),
        ("lm", sgld(kernel=SVGD), "would read it as nothing"),
        ("euler", sgld(kernel=SGLDR), "needs a bandwidth that warmup learns, and the state has none"),
        ("lm", sgld(num_ensembles=2), "The state has num_ensembles=1, and this kernel has num_ensembles=2"),
        ("lm", sgld(preconditioner=np.ones(2)), "The state has no preconditioner, which stays in use"),
        ("dense", sgld(preconditioner=np.ones(2)), "The state has another preconditioner"),
        ("dense", sgld(preconditioner=None), "The state has another preconditioner"),
        ("lm", SGLD(potential_fn=quadratic), "The step size of the state was given and not measured"),
        (
            "measured",
            SGLD(potential_fn=quadratic, step_size=BiasBudget(0.01)),
            r"measured for step_size=BiasBudget\(tolerance=0.05.* and is now step_size=BiasBudget\(tolerance=0.01",
        ),
        (
            "measured",
            SGLD(potential_fn=quadratic, interaction=Independent()),
            r"measured for interaction=Balanced.* and is now interaction=Independent\(\)",
        ),
    ],
)
def test_states_that_would_be_misread(name, kernel, words, state_of):
    with pytest.raises(ValueError, match=f"(?s){words}.*mcmc.run.key, ..., init_params=state.z."):
        abstractly(kernel, state_of(name))


@pytest.mark.parametrize(
    ("name", "kernel"),
    [
        ("lm", sgld(0.2, num_steps=3, interaction=Independent())),
        ("lm", sgld(Polynomial(0.1))),
        ("lm", sgld(Cyclical(0.1, 20))),
        ("euler", sgld(dynamics=Overdamped("euler", temperature=0.5))),
        ("euler", sgld(kernel=SVGD, interaction=RBF(1.0))),
        ("rbf", sgld(kernel=SGLDR, interaction=RBF())),
        ("momenta", sgld(0.5, kernel=SGHMC)),
        ("dense", sgld(preconditioner=np.array([1.0, 4.0]))),
        ("dense", sgld()),
        ("measured", SGLD(potential_fn=quadratic, num_steps=3)),
        ("measured", sgld()),
    ],
)
def test_states_that_go_on(name, kernel, state_of):
    state = state_of(name)
    after = abstractly(kernel, state)
    assert after.origin == state.origin and jax.tree.structure(after) == jax.tree.structure(state)


def test_gradients_of_stored_states():
    keys = random.split(random.key(0), 6)
    plain = SGLD(rows, step_size=0.01, gradient=Subsampled()).init(keys, 0, None, (Y,), {})
    for gradient in (None, FullData(), Subsampled(shared=True)):
        abstractly(SGLD(rows, step_size=0.01, gradient=gradient), plain, Y)
    with pytest.raises(ValueError, match="needs a reference for each particle, and the state has none"):
        abstractly(SGLD(rows, step_size=0.01, gradient=SVRG()), plain, Y)
    measured = SGLD(rows, gradient=FullData()).init(keys, 100, None, (Y,), {})
    with pytest.raises(ValueError, match=r"measured for gradient=FullData.* and is now gradient=Subsampled"):
        abstractly(SGLD(rows, gradient=Subsampled()), measured, Y)


def test_a_state_of_another_model():
    def other():
        numpyro.sample("nu", dist.Normal(0, 1).expand([2]).to_event(1))

    state = SGLD(rows, step_size=0.01).init(random.split(random.key(0), 6), 0, None, (Y,), {})
    with pytest.raises(ValueError, match=r"The state has the sites \{'mu': \(6, 2\)\}, and this model has \{'nu'"):
        abstractly(SGLD(other, step_size=0.01), state)


def test_the_advice_is_right():
    """What the errors say to call has the variance of a fresh run, where the old memory had that of Euler, 2."""
    starts = random.normal(random.key(1), (20, 2))
    run = make(sgld(1.0, dynamics=Overdamped("euler"), num_steps=5), num_samples=300, num_chains=20)
    run.run(random.key(0), init_params=starts)
    assert np.var(run.get_samples()) > 1.8
    state = run.last_state
    run = make(sgld(1.0, num_steps=5), num_samples=300, num_chains=20)
    run.post_warmup_state = state
    with pytest.raises(ValueError, match="to start again from its positions, set mcmc.post_warmup_state = None"):
        run.run(random.key(2))
    run.post_warmup_state = None
    run.run(random.key(2), init_params=state.z)
    # 12,000 draws, hardly dependent: a standard error of about 0.02.
    assert abs(np.var(run.get_samples()) - 1.0) < 0.1


def test_origins_survive(state_of):
    state = state_of("momenta")
    for again in (
        pickle.loads(pickle.dumps(state)),
        copy.deepcopy(state),
        jax.tree.map(lambda x: x, state),
        jax.device_get(state),
        jax.jit(lambda x: x)(state),
        jax.vmap(lambda x: x)(jax.tree.map(lambda x: x[None], state)),
    ):
        assert again.origin == state.origin and again._replace(rng_key=random.key(1)).origin == state.origin


# Chains


@pytest.fixture(scope="module")
def stored():
    """A kernel that was used, and states of six particles, of three chains one by one, and of one chain."""
    kernel, keys = sgld(), random.split(random.key(0), 6)
    alone = [kernel.init(key, 0, start, (), {}) for key, start in zip(keys, SIX, strict=True)]
    together = jax.tree.map(lambda *x: jnp.stack(x), *alone[:3])
    return kernel, {1: alone[0], 3: together, 6: kernel.init(keys, 0, SIX, (), {})}


@pytest.mark.parametrize("is_used", [False, True])
@pytest.mark.parametrize("run", [MCMC.run, run_in_pieces])
@pytest.mark.parametrize(
    ("number", "num_chains", "method", "words"),
    [
        (6, 3, "vectorized", "of 6 particles, and this MCMC has num_chains=3.*num_chains=6"),
        (6, 1, "vectorized", "of 6 particles, and this MCMC has num_chains=1"),
        (6, 6, "sequential", "of particles that moved together, .*'vectorized'"),
        (3, 4, "sequential", "of 3 chains, and this MCMC has num_chains=4"),
        (3, 3, "vectorized", "of chains that ran one by one, .*'sequential'"),
        (3, 1, "sequential", "of 3 chains, and this MCMC has num_chains=1"),
        (1, 6, "vectorized", "of 1 chain, and this MCMC has num_chains=6"),
        (1, 3, "sequential", "of 1 chain, and this MCMC has num_chains=3"),
    ],
)
def test_states_of_other_chains(run, number, num_chains, method, words, is_used, stored):
    kernel, states = stored
    mcmc = make(kernel if is_used else sgld(), num_chains=num_chains, chain_method=method)
    mcmc.post_warmup_state = states[number]
    with pytest.raises(ValueError, match=f"`post_warmup_state` is a state {words}"):
        run(mcmc, random.key(1))


def build(kernel, num_chains, method, num_samples=4):
    return make(kernel, num_samples=num_samples, num_chains=num_chains, chain_method=method)


@pytest.mark.parametrize(("num_chains", "method"), [(1, "vectorized"), (2, "sequential")])
def test_chains_go_on_with_a_fresh_kernel(num_chains, method, stored):
    state = jax.tree.map(lambda x: x[:num_chains], stored[1][3]) if num_chains > 1 else stored[1][1]
    mcmc = build(sgld(num_steps=1), num_chains, method)
    mcmc.post_warmup_state = state
    mcmc.run(random.key(1))
    assert mcmc.get_samples(True).shape == (num_chains, 4, 2)


@pytest.mark.slow
@pytest.mark.parametrize("make_key", [random.key, random.PRNGKey])
@pytest.mark.parametrize(("num_chains", "method"), [(1, "vectorized"), (2, "sequential"), (2, jax.vmap)])
@pytest.mark.filterwarnings("ignore:Some donated buffers")
def test_chains_go_on_with_any_kernel(num_chains, method, make_key):
    """A fresh kernel, one that was last used otherwise, and an unpickled one: to the same bits as one long run."""
    starts = SIX[0] if num_chains == 1 else SIX[:2]
    used = sgld(num_steps=2)
    used.init(random.split(random.key(0), 6), 0, SIX, (), {})
    whole, first = build(used, num_chains, method, 8), build(used, num_chains, method)
    whole.run(make_key(0), init_params=starts)
    first.run(make_key(0), init_params=starts)
    others = [build(sgld(num_steps=2), num_chains, method), build(used, num_chains, method)]
    others += [] if callable(method) else [pickle.loads(pickle.dumps(first))]
    for mcmc in others:
        mcmc.post_warmup_state = first.last_state
        mcmc.run(first.last_state.rng_key)
        got = np.concatenate([first.get_samples(True), mcmc.get_samples(True)], 1)
        np.testing.assert_array_equal(whole.get_samples(True), got)


PARALLEL = """
import sys; sys.path[:0] = {folders!r}
import test_states as here
from jax import random
import numpy as np
runs = [here.make(here.sgld(), num_samples=n, num_chains=2, chain_method="parallel") for n in (20, 10, 10)]
whole, first, second = runs
assert whole.chain_method == "parallel"
whole.run(random.key(0), init_params=here.SIX[:2])
first.run(random.key(0), init_params=here.SIX[:2])
second.post_warmup_state = first.last_state
second.run(first.last_state.rng_key)
got = np.concatenate([first.get_samples(True), second.get_samples(True)], 1)
assert np.array_equal(whole.get_samples(True), got)
"""


@pytest.mark.slow
def test_parallel_chains_go_on():
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
    folder = os.path.dirname(__file__)
    script = PARALLEL.format(folders=[folder, os.path.dirname(folder)])
    subprocess.run([sys.executable, "-c", script], check=True, env=os.environ | {"XLA_FLAGS": flags})


def test_a_state_in_the_midst_of_its_warmup():
    mcmc = make(sgld())
    mcmc.post_warmup_state = sgld().init(random.split(random.key(0), 6), 30, SIX, (), {})
    with pytest.raises(ValueError, match="after 0 of 30 iterations of warmup"):
        mcmc.run(random.key(1))


def test_precision_of_states():
    kernel, keys = SGLD(rows, step_size=0.01), random.split(random.key(0), 6)
    single = kernel.init(keys, 50, None, (Y,), {})
    with jax.enable_x64(True):
        double = SGLD(rows, step_size=0.01).init(keys, 50, None, (Y,), {})
        abstractly(kernel, double, Y)
        with pytest.raises(ValueError, match=r"in float32, and this run in float64: set .*jax_enable_x64', False"):
            abstractly(kernel, single, Y)
        double_z = sgld().init(keys, 0, np.asarray(SIX, float), (), {})
        abstractly(sgld(), sgld().init(keys, 0, SIX, (), {}))  # starts of single precision
    abstractly(kernel, single, Y)
    with pytest.raises(ValueError, match=r"in float64, and this run in float32: set .*jax_enable_x64', True"):
        abstractly(kernel, double, Y)
    with pytest.raises(ValueError, match="in float64, and this run in float32"):
        abstractly(sgld(), double_z)


@pytest.mark.parametrize("name", ["num_steps", "step_size", "interaction", "gradient", "num_ensembles"])
def test_settings_of_a_kernel_are_fixed(name):
    """Programs are compiled with them: a run after a change would go on as before, without a word."""
    kernel = sgld()
    with pytest.raises(AttributeError, match=rf"cannot change, .* Make a new kernel, SGLD\(..., {name}=3\)"):
        setattr(kernel, name, 3)
    assert pickle.loads(pickle.dumps(kernel)).num_steps == copy.copy(kernel).num_steps == 10
