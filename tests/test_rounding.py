"""Products are not rounded to the ten bits that GPUs and TPUs keep by default, unless the user says so."""

import jax
from jax import random
import jax.numpy as jnp
from models import programs_of
from programs import equations
import pytest

import numpyro
import numpyro.distributions as dist

from numpyro_repulsion import SGHMCR, SGLD, SGLDR, SVRG, Independent, Subsampled
from numpyro_repulsion.dynamics import Recipe
from numpyro_repulsion.gradients import FunctionTarget
from numpyro_repulsion.inference_data import map_draws
from numpyro_repulsion.interactions import RandomFeatures

X = jnp.asarray(random.normal(random.key(0), (300, 4)))
Y = (X[:, 0] > 0).astype(float)
#: JAX's names of what is rounded.
PRODUCTS = {"dot_general", "conv_general_dilated"}


@jax.custom_vjp
def product(x, beta):
    """A product with a rule of its own for its derivative."""
    return x @ beta


product.defvjp(lambda x, beta: (x @ beta, (x, beta)), lambda kept, slope: (jnp.outer(slope, kept[1]), slope @ kept[0]))


def own_rule(x, y):
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([4]).to_event(1))
    with numpyro.plate("rows", len(x), subsample_size=30) as i:
        numpyro.sample("y", dist.Bernoulli(logits=product(x[i], beta)), obs=y[i])


def hierarchical(x, y):
    scale = numpyro.sample("scale", dist.HalfNormal(1))
    with numpyro.plate("effects", 4):
        beta = numpyro.sample("beta", dist.Normal(0, scale))
    with numpyro.plate("rows", len(x), subsample_size=30) as i:
        numpyro.sample("y", dist.Bernoulli(logits=x[i] @ beta), obs=y[i])


def logistic(x, y):
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([4]).to_event(1))
    with numpyro.plate("rows", len(x), subsample_size=30) as i:
        numpyro.sample("y", dist.Bernoulli(logits=x[i] @ beta), obs=y[i])


def two_parts(x):
    return jnp.eye(x.size) * (1.0 + jnp.tanh(x.sum()) / 4.0)


KERNELS = {
    "SGLDR": lambda: SGLDR(logistic),
    "own_rule": lambda: SGLD(own_rule),
    "hierarchical": lambda: SGLD(hierarchical),
    "SVRG": lambda: SGLDR(logistic, gradient=SVRG(), preconditioner="dense"),
    "SGHMCR": lambda: SGHMCR(logistic, gradient=Subsampled()),
    "features": lambda: SGLDR(logistic, interaction=RandomFeatures()),
    "recipe": lambda: SGLD(logistic, interaction=Independent(), dynamics=Recipe(two_parts), step_size=1e-3),
}


def precisions(function, *args):
    """The precisions of the products of a program."""
    program = jax.make_jaxpr(function)(*args)
    return [e.params["precision"] for e in equations(program.jaxpr) if e.primitive.name in PRODUCTS]


def program(kernel):
    """Those of an iteration of warmup and of one after it."""
    found = programs_of(kernel, random.split(random.key(1), 4), 100, X, Y)
    return [precision for function, state in found for precision in precisions(function, state)]


def full(precision):
    return precision is not None and set(precision) == {jax.lax.Precision.HIGHEST}


@pytest.mark.parametrize("name", KERNELS)
def test_all_products_of_an_iteration_have_full_precision(name):
    found = program(KERNELS[name]())
    assert found
    assert all(map(full, found))


def test_a_potential_function_has_full_precision():
    kernel = SGLDR(potential_fn=lambda z: jnp.sum(product(X, z) ** 2) / 2)
    starts = random.normal(random.key(2), (4, 4))
    programs = programs_of(kernel, random.split(random.key(1), 4), 100, init_params=starts)
    found = [precision for function, state in programs for precision in precisions(function, state)]
    assert found
    assert all(map(full, found))


def test_functions_of_draws_have_full_precision():
    """As log likelihoods, predictions and `llc` evaluate them."""
    used = []

    def double(target, draw):
        used.append(jax.config.jax_default_matmul_precision)
        return {"double": 2 * draw["x"]}

    map_draws(double, FunctionTarget(jnp.sum), {"x": jnp.ones((4, 6, 3))}, "", "")
    assert used[-1] == "highest"


def test_a_model_has_the_precision_that_the_user_sets():
    kernel = SGLDR(logistic)
    with jax.default_matmul_precision("tensorfloat32"):
        found = program(kernel)
    with jax.default_matmul_precision("highest"):
        others = program(kernel)
    # Some of the products, forward and backward, are the model's.
    assert 0 < sum(not full(p) for p in found) < len(found) == len(others)
    assert all(map(full, others))


def test_rounded_products_are_seen():
    """The control."""
    assert precisions(lambda x: x @ x, jnp.eye(2)) == [None]
