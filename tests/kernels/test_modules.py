"""Networks of the libraries that NumPyro wraps: the model as their users write it, minibatches, predictions."""

from types import SimpleNamespace

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import pytest

import numpyro
from numpyro.contrib import module
import numpyro.distributions as dist
from numpyro.infer import MCMC

from numpyro_repulsion import SGLD, SGLDR, SGNHT, FullData, predict, to_inference_data

pytestmark = [
    pytest.mark.filterwarnings("ignore:Warmup found problems"),
    pytest.mark.filterwarnings("ignore:num_warmup"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

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


def convolution(outputs):
    flax = pytest.importorskip("flax.linen")

    class Net(flax.Module):
        @flax.compact
        def __call__(self, x):
            image = jnp.broadcast_to(x[..., None], (*x.shape, 2))[..., None]
            image = jnp.tanh(flax.Conv(2, (2, 2))(image))
            return flax.Dense(outputs)(image.reshape(*x.shape[:-1], -1))

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


NETS = {net.__name__: net for net in (linen, linen_with_dropout, convolution, nnx, equinox)}


def regression(make, x, y=None):
    net = make()
    with numpyro.plate("rows", len(x), subsample_size=min(len(x), 16)) as i:
        mean, log_scale = jnp.moveaxis(net(x[i]), -1, 0)  # two heads
        numpyro.sample("y", dist.Normal(mean, jnp.exp(jnp.clip(log_scale, -3, 3))), obs=None if y is None else y[i])


def classification(make, x, y=None):
    net = make()
    with numpyro.plate("rows", len(x), subsample_size=min(len(x), 16)) as i:
        numpyro.sample("y", dist.Categorical(logits=net(x[i])), obs=None if y is None else y[i])


def run(kernel, *args, num_warmup=60, num_samples=10, num_chains=4):
    mcmc = MCMC(
        kernel,
        num_warmup=num_warmup,
        num_samples=num_samples,
        num_chains=num_chains,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.key(2), *args)
    return mcmc


@pytest.mark.parametrize("net", NETS)
def test_networks_run_and_predict(net):
    make = NETS[net](2)
    mcmc = run(SGLD(regression), make, X, Y)
    assert all(np.isfinite(value).all() for value in mcmc.get_samples().values())
    found = predict(mcmc, make, X[:7], Y[:7])
    assert found.mean.shape == found.log_likelihood.shape == (7,)
    assert np.isfinite(found.log_likelihood).all() and (found.sd > 0).all()
    assert to_inference_data(mcmc)["posterior"].sizes["chain"] == 4


@pytest.mark.parametrize("net", ["linen", "equinox"])
@pytest.mark.parametrize("kernel", [SGLDR, SGNHT])
def test_classes(net, kernel):
    make = NETS[net](3)
    labels = (X[:, 0] > 0).astype(int) + (X[:, 1] > 0)
    mcmc = run(kernel(classification), make, X, labels)
    found = predict(mcmc, make, X, labels)
    assert found.probabilities.shape == (48, 3) and found.log_likelihood.shape == (48,)


def test_gradients_are_those_of_the_network():
    """The potential energy of all rows is that of the network written by hand."""
    make = NETS["linen"](2)
    mcmc = run(SGLD(regression, gradient=FullData(), step_size=1e-4), make, X, Y, num_warmup=0)
    state, draws = mcmc.last_state, {name: value[-1] for name, value in mcmc.get_samples(group_by_chain=True).items()}
    draws = SimpleNamespace(**{name.removeprefix("net/").replace(".", "_"): value for name, value in draws.items()})
    # Flax numbers the outer layer first.
    hidden = jnp.tanh(X @ draws.Dense_1_kernel[-1] + draws.Dense_1_bias[-1])
    mean, log_scale = (hidden @ draws.Dense_0_kernel[-1] + draws.Dense_0_bias[-1]).T
    log_joint = dist.Normal(mean, jnp.exp(jnp.clip(log_scale, -3, 3))).log_prob(Y).sum()
    for value in vars(draws).values():
        log_joint += PRIOR.log_prob(value[-1]).sum()
    np.testing.assert_allclose(-log_joint, state.potential_energy[-1], rtol=1e-4)
