"""Networks of the libraries that NumPyro wraps: the model as their users write it, minibatches, predictions."""

import jax
from jax import random
import jax.numpy as jnp
from models import vectorized
import numpy as np
import pytest

import numpyro
from numpyro.contrib import module
import numpyro.distributions as dist
from numpyro.handlers import block, substitute

from numpyro_repulsion import SGLD, BiasBudget, init_around, predict, to_inference_data
from numpyro_repulsion.contrib import Localized, llc
from numpyro_repulsion.gradients import ModelTarget

pytestmark = [pytest.mark.filterwarnings("ignore:num_warmup"), pytest.mark.filterwarnings("ignore::DeprecationWarning")]

HIDDEN = 5
X = random.normal(random.key(0), (48, 2))
Y = jnp.tanh(X[:, 0]) + 0.1 * random.normal(random.key(1), (48,))
PRIOR = dist.Normal(0.0, 1.0)


def linen(outputs):
    flax = pytest.importorskip("flax.linen")

    class Net(flax.Module):
        @flax.compact
        def __call__(self, x):
            return flax.Dense(outputs)(jnp.tanh(flax.Dense(HIDDEN)(x)))

    return lambda: module.random_flax_module("net", Net(), PRIOR, input_shape=(1, 2))


def linen_with_dropout(outputs):
    """A layer that needs a random stream, switched off as for predictions."""
    flax = pytest.importorskip("flax.linen")

    class Net(flax.Module):
        @flax.compact
        def __call__(self, x):
            hidden = flax.Dropout(0.5, deterministic=True)(jnp.tanh(flax.Dense(HIDDEN)(x)))
            return flax.Dense(outputs)(flax.LayerNorm()(hidden))

    return lambda: module.random_flax_module("net", Net(), PRIOR, input_shape=(1, 2))


def nnx(outputs):
    nnx = pytest.importorskip("flax.nnx")

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.first, self.last = nnx.Linear(2, HIDDEN, rngs=rngs), nnx.Linear(HIDDEN, outputs, rngs=rngs)

        def __call__(self, x):
            return self.last(jnp.tanh(self.first(x)))

    return lambda: module.random_nnx_module("net", Net(nnx.Rngs(0)), PRIOR)


def equinox(outputs):
    eqx = pytest.importorskip("equinox")
    net = eqx.nn.MLP(2, outputs, HIDDEN, 1, activation=jnp.tanh, key=random.key(0))

    def make():
        one = module.random_eqx_module("net", net, PRIOR)
        return jax.vmap(one)

    return make


NETS = {net.__name__: net for net in (linen, linen_with_dropout, nnx, equinox)}


def regression(make, x, y=None):
    net = make()
    with numpyro.plate("rows", len(x), subsample_size=min(len(x), 16)) as i:
        mean, log_scale = jnp.moveaxis(net(x[i]), -1, 0)  # two heads
        numpyro.sample("y", dist.Normal(mean, jnp.exp(jnp.clip(log_scale, -3, 3))), obs=None if y is None else y[i])


def run(kernel, *args, num_samples=10):
    mcmc = vectorized(kernel, 60 if kernel.step_size == BiasBudget() else 0, num_samples, 4)
    mcmc.run(random.key(2), *args)
    return mcmc


@pytest.mark.parametrize("net", ["linen", "nnx", "equinox"])
def test_networks_run_and_predict(net):
    make = NETS[net](2)
    mcmc = run(SGLD(regression, step_size=1e-4), make, X, Y)
    assert all(np.isfinite(value).all() for value in mcmc.get_samples().values())
    found = predict(mcmc, make, X[:7], Y[:7])
    assert found.mean.shape == found.log_likelihood.shape == (7,)
    assert np.isfinite(found.log_likelihood).all() and (found.sd > 0).all()
    data = to_inference_data(mcmc, log_likelihood=True)
    assert data["posterior"].sizes["chain"] == 4
    # The key that a module asks for does not make the likelihood random.
    assert data["log_likelihood"]["y"].shape == (4, 10, 48)


def dropout():
    """A layer that drops units at random in the likelihood."""
    flax = pytest.importorskip("flax.linen")

    class Net(flax.Module):
        @flax.compact
        def __call__(self, x):
            return flax.Dense(2)(flax.Dropout(0.5, deterministic=False)(flax.Dense(HIDDEN)(x)))

    def make():
        net = module.random_flax_module("net", Net(), PRIOR, input_shape=(1, 2), apply_rng=["dropout"])
        return lambda x: net(x, rngs={"dropout": numpyro.prng_key()})

    return make


@pytest.mark.parametrize("net", [*NETS.values(), dropout])
def test_only_layers_that_use_a_key_make_the_likelihood_random(net):
    """All modules ask for a key, most for initial weights that the latent sites replace."""
    make = dropout() if net is dropout else net(2)
    target = ModelTarget(regression, (make, X, Y))
    assert target.is_random == (net is dropout)


FLAX = {"net": {"Dense_0": {"kernel": np.zeros((HIDDEN, 2)), "bias": np.zeros(2)}}}
FIRST = {"net/Dense_1.kernel": np.ones((2, HIDDEN)), "net/Dense_1.bias": np.zeros(HIDDEN)}


@pytest.mark.filterwarnings("ignore:The center is not a minimum")
def test_the_local_posterior_of_the_last_layer():
    """The values of a Flax module may be nested, as its own parameters are."""
    make = NETS["linen"](2)
    last = block(substitute(regression, data=FIRST), hide=list(FIRST))
    local = Localized(last, center=FLAX, strength=1e6, inverse_temperature=0.3)
    mcmc = run(SGLD(local, init_strategy=init_around(local.center, scale=1e-3)), make, X, Y, num_samples=40)
    for value in mcmc.get_samples().values():
        # The data move it by little, and the tether alone has this standard deviation.
        assert np.abs(value).max() < 0.02 and 0.5e-3 < np.std(value - value.mean(0)) < 1.5e-3
    assert np.isfinite(llc(mcmc, num_draws=40).value)
    with pytest.raises(ValueError, match="Dense_9.*not latent sites of the model. It has.*net/Dense_0.bias"):
        run(SGLD(Localized(last, center={"net": {"Dense_9": {"bias": np.zeros(2)}}}, strength=1.0)), make, X, Y)


def test_substitute_alone_does_not_fix_a_layer():
    make = NETS["linen"](2)
    with (
        pytest.warns(UserWarning, match="already stores a value"),
        pytest.raises(ValueError, match=r"latent sites .*'net/Dense_..kernel'.*write block\(substitute"),
    ):
        SGLD(substitute(regression, data=FIRST)).bind((make, X, Y))
