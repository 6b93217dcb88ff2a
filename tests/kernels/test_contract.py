"""What NumPyro asks of a kernel, over kernels, interactions, gradients, keys and precisions.

Shapes and types are computed abstractly, without compiling.
"""

import itertools

import catalogue
from catalogue import having
import jax
from jax import random
import jax.numpy as jnp
from models import programs_of
import optax
import pytest

import numpyro
import numpyro.distributions as dist

from numpyro_repulsion import RBF, SGHMC, SGHMCR, SGLD, SGLDR, SGNHT, SGNHTR, SVGD, SVRG, Balanced, BiasBudget, FullData
from numpyro_repulsion.dynamics import Descent, Overdamped, Thermostat, Underdamped

KERNELS = tuple(having(catalogue.PRESETS, but={"momenta"}).values())
MOMENTA = tuple(having(catalogue.PRESETS, "momenta").values())
INTERACTIONS = ("auto", *having(catalogue.INTERACTIONS, "setting").values())
GRADIENTS = ("auto", *having(catalogue.GRADIENTS).values())
STEP_SIZES = ("auto", *having(catalogue.SCHEDULES, but={"cycle"}).values())
CYCLE = catalogue.SCHEDULES["cyclical"].part
Y = jnp.linspace(-1.0, 1.0, 20)


def model(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1).expand([2]).to_event(1))
    sigma = numpyro.sample("sigma", dist.Gamma(3, 1))
    with numpyro.plate("rows", 20, subsample_size=4) as i:
        numpyro.sample("y", dist.Normal(mu[0], sigma), obs=y[i])


def combine(kernel, interaction, **kwargs):
    num_ensembles = 2 if getattr(interaction, "balances_ensembles", False) else 1
    return kernel(model, interaction=interaction, num_ensembles=num_ensembles, **kwargs)


def kernels():
    """Every kernel with every interaction, gradient, step size and jumps, one of them at a time."""
    yield from (combine(kernel, interaction) for kernel, interaction in itertools.product(KERNELS, INTERACTIONS))
    for gradient, step_size in itertools.product(GRADIENTS, (None, 0.01)):
        yield SGLDR(model, gradient=gradient, step_size=step_size)
    for kernel, step_size in itertools.product((SGLDR, *MOMENTA), STEP_SIZES):
        yield kernel(model, step_size=step_size)
    for kernel, found in itertools.product((SGLD, SGLDR, *MOMENTA), catalogue.MOVES.values()):
        yield kernel(model, gradient=FullData(), moves=found.part)
    for dynamics in having(catalogue.DYNAMICS, but={"alone", "optimizer"}).values():
        yield SGLDR(model, dynamics=dynamics, step_size=0.01)
    yield SGLDR(model, step_size=CYCLE, preconditioner="diagonal")
    yield SGLDR(model, step_size=CYCLE, gradient=SVRG(shared=True))
    yield SVGD(model, step_size=0.01, dynamics=Descent(optax.scale_by_adam()))


def describe(state):
    return jax.tree.map(lambda x: (x.shape, x.dtype), state)


#: A part of them here, and all in the full test.
@pytest.mark.parametrize(
    ("make_key", "double", "every"),
    [
        (random.PRNGKey, True, 31),
        pytest.param(random.PRNGKey, True, 1, marks=pytest.mark.slow),
        pytest.param(random.key, False, 1, marks=pytest.mark.slow),
    ],
)
def test_one_iteration_keeps_shapes_and_types(make_key, double, every):
    with jax.enable_x64(double):
        keys = random.split(make_key(0), 6)
        for kernel in itertools.islice(kernels(), 0, None, every):
            for function, before in programs_of(kernel, keys, 50, jnp.asarray(Y, float)):
                after = jax.eval_shape(function, before)
                assert describe(before) == describe(after)
            assert after.potential_energy.dtype == (jnp.float64 if double else jnp.float32)
            # Fields that may be collected lead with the particles, and the key is a single one.
            for name in kernel.default_fields:
                assert all(leaf.shape[0] == 6 for leaf in jax.tree.leaves(getattr(after, name)))
            assert after.rng_key.shape == make_key(0).shape


@pytest.mark.parametrize(
    ("make_key", "every"), [(random.key, 4), pytest.param(random.PRNGKey, 1, marks=pytest.mark.slow)]
)
def test_one_chain_has_no_particle_axis(make_key, every):
    settings = [
        (interaction, "auto", 0.01) for interaction in having(catalogue.INTERACTIONS, "identity", "setting").values()
    ]
    settings += [*(("auto", gradient, 0.01) for gradient in GRADIENTS), ("auto", "auto", CYCLE)]
    for interaction, gradient, step_size in settings[::every]:
        kernel = SGLD(model, interaction=interaction, gradient=gradient, step_size=step_size)

        def iterate(key, kernel=kernel):
            state = kernel.init(key, 0, None, (Y,), {})
            return state, kernel.sample(state, (Y,), {})

        before, after = jax.eval_shape(iterate, make_key(0))
        assert describe(before) == describe(after)
        assert after.z["mu"].shape == (2,) and after.diverging.shape == ()


def test_presets_differ_in_their_parts_alone():
    assert {kernel(model).interaction for kernel in KERNELS + MOMENTA} == {Balanced(), RBF()}
    assert SGLD(model).dynamics == SGLDR(model, step_size=0.1).dynamics == Overdamped()
    # With nothing set, what has the least bias; with a step given, the paper's update.
    assert SGLDR(model).dynamics == SGLDR(model, step_size=BiasBudget(0.1)).dynamics == Overdamped("lm")
    assert SVGD(model).dynamics == Overdamped(noise=False)
    assert SGHMC(model).dynamics == SGHMCR(model).dynamics == Underdamped()
    assert SGNHT(model).dynamics == SGNHTR(model).dynamics == Thermostat()
    assert not any(set(vars(kernel)) & {"init", "sample", "postprocess_fn", "__init__"} for kernel in KERNELS + MOMENTA)
