"""What tests of many rooms run: particles of a kernel, without a bar; and numbers and Gaussians to run them on."""

import jax
import jax.numpy as jnp
import numpy as np

import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC

from numpyro_repulsion.kernels import ParticleState
from numpyro_repulsion.kernels.warmup_host import iterations_of
from numpyro_repulsion.kernels.warmup_programs import Frozen

PRECISION = np.array([[9.0, 2.0, 0.0], [2.0, 4.0, 0.5], [0.0, 0.5, 0.01]], np.float32)


def generator(seed=1):
    return np.random.default_rng(seed)


def numbers(seed, shape):
    """Standard normal numbers on the host."""
    return generator(seed).standard_normal(shape).astype(np.float32)


def linear(matrix):
    """The gradients of ``uᵀ A u / 2``, as learners ask for them."""
    return lambda cases: (u @ matrix for _, u, _ in cases)


def quadratic(z):
    return jnp.sum(z**2) / 2


def moments(grid, log_density):
    """The mean and the variance of a density on a grid, ``(n,)`` or ``(n, d)``, known up to a factor."""
    weight = np.exp(log_density - np.max(log_density))
    weight /= weight.sum()
    mean = weight @ grid
    return mean, weight @ (grid - mean) ** 2


def mean_of(likelihood, batch=20):
    """A model of the mean of rows with this likelihood of it, which returns the mean."""

    def model(y, subsample_size=batch):
        mu = numpyro.sample("mu", dist.Normal(0, 10))
        with numpyro.plate("rows", len(y), subsample_size=subsample_size) as i:
            numpyro.sample("y", likelihood(mu), obs=y[i])
        return mu

    return model


def student(mu):
    return dist.StudentT(5.0, mu, 1.0)


def vectorized(
    kernel, num_warmup=0, num_samples=20, num_chains=6, chain_method="vectorized", progress_bar=False, **settings
):
    """An ``MCMC`` whose chains are particles."""
    settings |= {"num_warmup": num_warmup, "num_samples": num_samples, "num_chains": num_chains}
    return MCMC(kernel, chain_method=chain_method, progress_bar=progress_bar, **settings)


def warmed(kernel, keys, iterations, num_warmup, *args, init_params=None, **kwargs):
    """The state of a warmup after so many of its iterations."""
    state = kernel.start(keys, num_warmup, init_params, args, kwargs)
    return kernel.warm(state, iterations, num_warmup, args, kwargs)


def one_by_one(kernel, keys, num_warmup, *args, iterations=None, init_params=None, **kwargs):
    """The state of a warmup after each of its iterations."""
    state = kernel.start(keys, num_warmup, init_params, args, kwargs)
    for _ in range(num_warmup if iterations is None else iterations):
        state = kernel.warm(state, 1, num_warmup, args, kwargs)
        yield state


def sites(kernel, state, *args, **kwargs):
    """The sites of the particles in a warmup, each ``(L, ...)``."""
    return kernel.freeze(state, args, kwargs, False, 0).z


def programs_of(kernel, keys, num_warmup, *args, init_params=None, **kwargs):
    """The functions of the iterations of warmup and of one after it, each with the shapes of its state."""
    state = jax.eval_shape(lambda: kernel.start(keys, num_warmup, init_params, args, kwargs))
    if isinstance(state, ParticleState):
        return [(lambda state: kernel.sample(state, args, kwargs), state)]
    how = Frozen((1, True), False, num_warmup, False)
    frozen = jax.eval_shape(lambda state: kernel.frozen_as(how, state, args, kwargs), state)
    steps = iterations_of(kernel.bind(args, kwargs), state)
    return [*((step, state) for step in steps), (lambda state: kernel.sample(state, args, kwargs), frozen)]
