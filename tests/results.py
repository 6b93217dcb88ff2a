"""A model with plates, rows and deterministic sites, and its run: what tests of results look at, made once for all."""

from jax import random
import jax.numpy as jnp
from models import vectorized

import numpyro
import numpyro.distributions as dist

X = random.normal(random.key(0), (40, 3))
Y = (X[:, 0] + random.normal(random.key(1), (40,)) > 0).astype(jnp.int32)


def logistic(X, y):
    with numpyro.plate("features", 3):
        beta = numpyro.sample("beta", dist.Normal(0, 1))
    numpyro.deterministic("total", beta.sum())
    scale = numpyro.sample("scale", dist.Gamma(3, 3).expand([2]).to_event(1))
    with numpyro.plate("rows", 40, subsample_size=8) as i:
        logits = numpyro.deterministic("logits", X[i] @ beta * scale[0])
        numpyro.sample("y", dist.Bernoulli(logits=logits), obs=y[i])


def run(kernel, *args, num_samples=20, num_chains=6, extra_fields=(), **kwargs):
    mcmc = vectorized(kernel, 0, num_samples, num_chains, **kwargs)
    mcmc.run(random.key(0), *args, extra_fields=extra_fields)
    return mcmc
