"""Shapes are those of the annotations, in all rooms that a run enters.

Run by `test_shapes.py` in a process of its own, because the checks must be there before the package is imported::

    python -m pytest --noconftest --jaxtyping-packages=numpyro_repulsion,beartype.beartype tests/check_shapes.py

Programs are traced and not compiled.
"""

from catalogue import DYNAMICS, GRADIENTS, INTERACTIONS, having
import jax
from jax import random
import jax.numpy as jnp
from models import programs_of
import pytest

import numpyro
import numpyro.distributions as dist

from numpyro_repulsion import SGHMC, SGLD, SGLDR, Archive, FullData
from numpyro_repulsion.gradients import ModelTarget, Reference, ravel_cloud
from numpyro_repulsion.warmup import Moments
from numpyro_repulsion.warmup.adam import svgd_direction

#: Two groups of six particles with two coordinates, whose gradients are the same.
CLOUD = random.normal(random.key(0), (2, 6, 2))
Y = jnp.arange(20.0) / 10.0


def energy_and_grad(z):
    return jnp.sum(z**2, -1) / 2.0, z


def rows(y):
    mu = numpyro.sample("mu", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    with numpyro.plate("rows", len(y), subsample_size=4) as i:
        numpyro.sample("y", dist.Normal(mu.sum(), 1.0), obs=y[i])


def groups(y):
    mu, tau = numpyro.sample("mu", dist.Normal(0.0, 5.0)), numpyro.sample("tau", dist.HalfNormal(5.0))
    with numpyro.plate("groups", 4):
        theta = numpyro.sample("theta", dist.Normal(mu, tau))
    with numpyro.plate("rows", len(y), subsample_size=4) as i:
        numpyro.sample("y", dist.Normal(theta[i % 4], 1.0), obs=y[i])


@pytest.mark.parametrize("interaction", having(INTERACTIONS).values(), ids=repr)
def test_interactions(interaction):
    def everything(key, u):
        coupling = interaction.at(key if interaction.is_redrawn else None, jnp.zeros((), int)).couple(u, 1.0)
        return coupling.apply(u), coupling.repulsion, coupling.draw(key), coupling.bound, coupling.diagonal

    jax.eval_shape(everything, random.key(1), CLOUD)


@pytest.mark.parametrize("dynamics", having(DYNAMICS).values(), ids=repr)
def test_dynamics(dynamics):
    def update(key, u):
        couple = having(INTERACTIONS)["independent"].couple
        return dynamics.step(key, dynamics.init(key, u, energy_and_grad, couple), energy_and_grad, couple, 0.1)

    jax.eval_shape(update, random.key(1), CLOUD)


@pytest.mark.parametrize("gradient", having(GRADIENTS).values(), ids=repr)
def test_gradients(gradient):
    target = ModelTarget(rows, (Y,))
    _, unravel = ravel_cloud({"mu": CLOUD[0]})
    reference = Reference.none(CLOUD.shape, CLOUD.dtype, order=1) if gradient.has_reference else None

    def at(key, count):
        now = gradient.at(count, jnp.zeros((), jnp.uint32))
        return now.energy_and_grad(key, target, unravel, CLOUD, *[reference] * gradient.has_reference)

    jax.eval_shape(at, random.key(1), jnp.zeros((), jnp.int32))


@pytest.mark.parametrize(
    ("kernel", "args"),
    [
        (SGLDR(rows), (Y,)),
        (SGLD(rows, preconditioner="low_rank"), (Y,)),
        (SGHMC(rows, preconditioner="diagonal"), (Y,)),
        (SGLD(groups), (Y,)),
        (SGLD(groups, gradient=FullData()), (Y,)),
        (SGLD(rows, gradient=FullData(), moves=Archive()), (Y,)),
    ],
)
def test_runs(kernel, args):
    for function, state in programs_of(kernel, random.split(random.key(0), 6), 50, *args):
        jax.eval_shape(function, state)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Moments.empty(2, jnp.float32, True).add(CLOUD[0], CLOUD[0, :, :1]),
        lambda: svgd_direction(CLOUD, CLOUD[..., :1]),
    ],
)
def test_the_control_a_wrong_shape_is_seen(wrong):
    with pytest.raises(Exception, match=r"Float\["):
        wrong()
