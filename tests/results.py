"""A model with plates, rows and deterministic sites, and its run: what tests of results look at, made once for all."""

from jax import random
import jax.numpy as jnp
from models import vectorized

import numpyro
import numpyro.distributions as dist

X = random.normal(random.key(0), (40, 3))
Y = (X[:, 0] + random.normal(random.key(1), (40,)) > 0).astype(jnp.int32)
#: Starts of six particles.
SIX = jnp.linspace(-2.0, 2.0, 12).reshape(6, 2)


def logistic(X, y):
    with numpyro.plate("features", 3):
        beta = numpyro.sample("beta", dist.Normal(0, 1))
    numpyro.deterministic("total", beta.sum())
    scale = numpyro.sample("scale", dist.Gamma(3, 3).expand([2]).to_event(1))
    with numpyro.plate("rows", 40, subsample_size=8) as i:
        logits = numpyro.deterministic("logits", X[i] @ beta * scale[0])
        numpyro.sample("y", dist.Bernoulli(logits=logits), obs=y[i])


def made(kernel, num_samples=20, num_chains=6, num_warmup=0, **settings):
    """An ``MCMC`` of particles, without a progress bar."""
    return vectorized(kernel, num_warmup, num_samples, num_chains, **settings)


def run(kernel, *args, key=0, num_samples=20, num_chains=6, num_warmup=0, **given):
    """The same, after a run on the arguments of a model; of a potential energy from starts ``(L, 2)``."""
    if kernel.model is None:
        given.setdefault("init_params", random.normal(random.key(1), (num_chains, 2)))
    settings = {name: given.pop(name) for name in ("thinning", "chain_method") if name in given}
    mcmc = made(kernel, num_samples, num_chains, num_warmup, **settings)
    mcmc.run(random.key(key), *args, **given)
    return mcmc
