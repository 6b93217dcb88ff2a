"""Stored states: what may go on from them, and what raises an error and says what to do instead."""

import copy
from functools import cache
import pickle

import jax
from jax import random
import jax.numpy as jnp
from models import programs_of, quadratic, vectorized as make
import numpy as np
import optax
import pytest
from results import SIX

import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC

from numpyro_repulsion import RBF, SGHMC, SGLD, SGLDR, SGNHT, SVRG, BiasBudget, ControlVariates, run_in_pieces
from numpyro_repulsion.dynamics import Overdamped
from numpyro_repulsion.interactions import Scheduled

Y = jnp.linspace(-1.0, 1.0, 20)


def rows(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("rows", 20, subsample_size=4) as i:
        numpyro.sample("y", dist.Normal(mu[0], 1), obs=y[i])


def sgld(step_size=0.1, kernel=SGLD, **kwargs):
    return kernel(potential_fn=quadratic, step_size=step_size, **kwargs)


KEYS = random.split(random.key(0), 6)


def shapes_of(kernel, *args, starts=None):
    """A state after warmup, without its numbers."""
    num_warmup = 100 if isinstance(kernel.step_size, BiasBudget) else 0
    return programs_of(kernel, KEYS, num_warmup, *args, init_params=starts)[-1][1]


@pytest.fixture(scope="module")
def state_of():
    """The state of a kernel after warmup, by a name."""
    kernels = {
        "lm": sgld(),
        "rbf": sgld(kernel=SGLDR),
        "momenta": sgld(kernel=SGHMC),
        "dense": sgld(preconditioner=np.array([1.0, 4.0])),
        "measured": SGLD(potential_fn=quadratic),
        "schedule": sgld(optax.linear_schedule(0.1, 0.01, 100)),
    }
    return cache(lambda name: shapes_of(kernels[name], starts=SIX))


def abstractly(kernel, state, *args):
    """One iteration, without compiling it."""
    return jax.eval_shape(lambda state: kernel.sample(state, args, {}), state)


@pytest.mark.parametrize(
    ("name", "kernel", "words"),
    [
        ("lm", sgld(dynamics=Overdamped("euler")), "now dynamics=.*integrator='euler'"),
        ("rbf", sgld(), r"kernel=SGLDR and is now kernel=SGLD, interaction=RBF\(.* now interaction=Balanced"),
        ("momenta", sgld(kernel=SGNHT), "kernel=SGHMC and is now kernel=SGNHT"),  # the first memory has the same shape
        ("lm", sgld(0.2), "step_size=0.1 and is now step_size=0.2"),
        ("schedule", sgld(optax.linear_schedule(0.1, 0.01, 200)), r"and is now step_size=.*: \[0.1000"),
        (
            "rbf",
            sgld(kernel=SGLDR, interaction=Scheduled(RBF(), optax.linear_schedule(1.0, 0.0, 10))),
            "weight of the interaction=None and is now weight of the interaction=",
        ),
        ("lm", sgld(num_ensembles=2), "num_ensembles=1 and is now num_ensembles=2"),
        ("dense", sgld(preconditioner=np.ones(2)), "preconditioner=digest .* now preconditioner=digest"),
        ("lm", SGLD(potential_fn=quadratic), "step_size=0.1 and is now step_size=BiasBudget"),
        (
            "measured",
            SGLD(potential_fn=quadratic, step_size=BiasBudget(0.01)),
            "now .*tolerance=0.01",
        ),
    ],
)
def test_states_of_other_kernels(name, kernel, words, state_of):
    with pytest.raises(ValueError, match=f"(?s)was made with .*{words}.*mcmc.run.key, ..., init_params=state.z."):
        abstractly(kernel, state_of(name))


@pytest.mark.parametrize(
    ("name", "kernel"),
    [
        ("lm", sgld(num_steps=3)),
        ("dense", sgld(preconditioner=np.array([1.0, 4.0]))),
        ("measured", SGLD(potential_fn=quadratic, num_steps=3)),
    ],
)
def test_states_that_go_on(name, kernel, state_of):
    state = state_of(name)
    after = abstractly(kernel, state)
    assert after.origin == state.origin and jax.tree.structure(after) == jax.tree.structure(state)


def test_gradients_of_stored_states():
    state = shapes_of(SGLD(rows, step_size=0.01), Y)
    abstractly(SGLD(rows, step_size=0.01, gradient=ControlVariates()), state, Y)  # the default
    with pytest.raises(ValueError, match="gradient=ControlVariates.* and is now gradient=SVRG"):
        abstractly(SGLD(rows, step_size=0.01, gradient=SVRG()), state, Y)


def test_a_state_of_another_model():
    def other():
        numpyro.sample("nu", dist.Normal(0, 1).expand([2]).to_event(1))

    state = shapes_of(SGLD(rows, step_size=0.01), Y)
    with pytest.raises(ValueError, match=r"The state has the sites \{'mu': \(6, 2\)\}, and this model has \{'nu'"):
        abstractly(SGLD(other, step_size=0.01), state)


def test_a_continued_run_prepares_its_state_once(monkeypatch):
    # NumPyro's bar asks for `is_ensemble_kernel` each time that it moves.
    mcmc = make(sgld(), num_samples=20, num_chains=4, progress_bar=True)
    mcmc.run(random.key(0), init_params=random.normal(random.key(1), (4, 2)))
    mcmc.post_warmup_state, seen = mcmc.last_state, []
    resumed = SGLD.resumed
    monkeypatch.setattr(SGLD, "resumed", lambda *args: seen.append(args) or resumed(*args))
    mcmc.run(random.key(1))
    assert len(seen) == 1


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


def test_starts_of_numpy_may_be_traced():
    kernel, starts = sgld(), np.asarray(SIX)
    found = jax.jit(lambda: kernel.init(KEYS, 0, starts, (), {}))()
    assert jax.tree.all(jax.tree.map(np.array_equal, found.z, kernel.init(KEYS, 0, SIX, (), {}).z))


def test_origins_survive():
    state = sgld(kernel=SGHMC).init(KEYS, 0, SIX, (), {})
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
    """States of six particles and of one chain."""
    kernel = sgld()
    return {1: kernel.init(KEYS[0], 0, SIX[0], (), {}), 6: kernel.init(KEYS, 0, SIX, (), {})}


@pytest.mark.parametrize("run", [MCMC.run, run_in_pieces])
@pytest.mark.parametrize(
    ("number", "num_chains", "words"),
    [
        (6, 3, "of 6 chains .*, and this MCMC has num_chains=3.*num_chains=6"),
        (6, 1, "of 6 chains .*, and this MCMC has num_chains=1"),
        (1, 6, "of 1 chain .*, and this MCMC has num_chains=6"),
    ],
)
def test_states_of_other_chains(run, number, num_chains, words, stored):
    mcmc = make(sgld(), num_chains=num_chains)
    mcmc.post_warmup_state = stored[number]
    with pytest.raises(ValueError, match=f"`post_warmup_state` is a state {words}"):
        run(mcmc, random.key(1))


def test_a_state_in_the_midst_of_its_warmup():
    mcmc = make(sgld())
    mcmc.post_warmup_state = sgld().init(KEYS, 30, SIX, (), {})
    with pytest.raises(ValueError, match="after 0 of 30 iterations of warmup"):
        mcmc.run(random.key(1))


def test_precision_of_states():
    kernel = SGLD(rows, step_size=0.01)
    single = shapes_of(kernel, Y)
    with jax.enable_x64(True):
        double = SGLD(rows, step_size=0.01).init(KEYS, 0, None, (Y,), {})
        abstractly(kernel, double, Y)
        with pytest.raises(ValueError, match=r"in float32, and this run in float64: set .*jax_enable_x64', False"):
            abstractly(kernel, single, Y)
        double_z = sgld().init(KEYS, 0, np.asarray(SIX, float), (), {})
        abstractly(sgld(), shapes_of(sgld(), starts=SIX))  # starts of single precision
    abstractly(kernel, single, Y)
    with pytest.raises(ValueError, match=r"in float64, and this run in float32: set .*jax_enable_x64', True"):
        abstractly(kernel, double, Y)
    with pytest.raises(ValueError, match="in float64, and this run in float32"):
        abstractly(sgld(), double_z)


def test_settings_of_a_kernel_are_fixed():
    """Programs are compiled with them: a run after a change would go on as before, without a word."""
    kernel = sgld()
    for name in ("num_steps", "step_size", "interaction"):
        with pytest.raises(AttributeError, match=rf"cannot change, .* Make a new kernel, SGLD\(..., {name}=3\)"):
            setattr(kernel, name, 3)
    assert pickle.loads(pickle.dumps(kernel)).num_steps == copy.copy(kernel).num_steps == 10
