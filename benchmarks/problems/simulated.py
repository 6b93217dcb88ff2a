"""Data simulated from priors: six minibatched models, with parameters and responses drawn for each data set."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
from jax import random
import jax.numpy as jnp

import numpyro
import numpyro.distributions as dist
from numpyro.distributions.transforms import OrderedTransform
from numpyro.infer import Predictive

from benchmarks.problems.targets import normals, sample

GROUPS = 20


class Simulated(NamedTuple):
    """A model, its covariates, and the sites that are drawn from the prior and compared."""

    model: Callable
    covariates: dict[str, jax.Array]
    sites: tuple[str, ...]

    def draw(self, key: jax.Array, number: int) -> tuple[dict[str, jax.Array], jax.Array]:
        """Parameters from the prior, and responses to each: ``number`` of both."""
        found = Predictive(self.model, num_samples=number)(key, **self.covariates)
        return {site: found[site] for site in self.sites}, found["y"]


def taken(y, i):
    """The responses of a minibatch; of none where they are drawn."""
    return None if y is None else y[i]


def logistic(x, y=None, subsample_size: int | None = None):
    b, a = normals(3, name="b"), numpyro.sample("a", dist.Normal(0, 1.5))
    with numpyro.plate("rows", len(x), subsample_size=subsample_size) as i:
        numpyro.sample("y", dist.Bernoulli(logits=a + x[i] @ b), obs=taken(y, i))


def poisson(x, group, y=None, subsample_size: int | None = None):
    a, b = numpyro.sample("a", dist.Normal(1, 0.5)), normals(3, 0.5, "b")
    tau = numpyro.sample("tau", dist.HalfNormal(0.5))
    with numpyro.plate("groups", GROUPS):
        u = numpyro.sample("u", dist.Normal(a, tau))
    with numpyro.plate("rows", len(x), subsample_size=subsample_size) as i:
        numpyro.sample("y", dist.Poisson(jnp.exp(u[group[i]] + x[i] @ b)), obs=taken(y, i))


def student(x, y=None, subsample_size: int | None = None):
    a, b = numpyro.sample("a", dist.Normal(0, 1)), normals(3, name="b")
    sigma, nu = sample(sigma=dist.HalfNormal(1), nu=dist.Gamma(2, 0.1))
    with numpyro.plate("rows", len(x), subsample_size=subsample_size) as i:
        numpyro.sample("y", dist.StudentT(nu, a + x[i] @ b, sigma), obs=taken(y, i))


def negative_binomial(x, y=None, subsample_size: int | None = None):
    a, b = numpyro.sample("a", dist.Normal(1, 0.5)), normals(3, 0.5, "b")
    phi = numpyro.sample("phi", dist.Gamma(2, 0.5))
    with numpyro.plate("rows", len(x), subsample_size=subsample_size) as i:
        numpyro.sample("y", dist.NegativeBinomial2(jnp.exp(a + x[i] @ b), phi), obs=taken(y, i))


def ordered(x, y=None, subsample_size: int | None = None):
    b, base = normals(3, name="b"), dist.Normal(0, 1.5).expand([4]).to_event(1)
    c = numpyro.sample("c", dist.TransformedDistribution(base, OrderedTransform()))
    with numpyro.plate("rows", len(x), subsample_size=subsample_size) as i:
        numpyro.sample("y", dist.OrderedLogistic(x[i] @ b, c), obs=taken(y, i))


def mixture(rows, y=None, subsample_size: int | None = None):
    w, base = numpyro.sample("w", dist.Beta(3, 3)), dist.Normal(jnp.array([-1.0, 0.5]), 1).to_event(1)
    m = numpyro.sample("m", dist.TransformedDistribution(base, OrderedTransform()))
    parts = dist.Normal(m, numpyro.sample("s", dist.HalfNormal(1)))
    with numpyro.plate("rows", rows, subsample_size=subsample_size) as i:
        weights = dist.Categorical(probs=jnp.stack([w, 1 - w]))
        numpyro.sample("y", dist.MixtureSameFamily(weights, parts), obs=taken(y, i))


def problems(rows: int) -> dict[str, Simulated]:
    """The six, by name; their covariates are the same in each process."""
    x = random.normal(random.key(0), (rows, 3))
    group = jnp.arange(rows) % GROUPS
    return {
        "logistic": Simulated(logistic, {"x": x}, ("a", "b")),
        "Poisson, effects of groups": Simulated(poisson, {"x": x, "group": group}, ("a", "b", "tau", "u")),
        "Student-t": Simulated(student, {"x": x}, ("a", "b", "sigma", "nu")),
        "negative binomial": Simulated(negative_binomial, {"x": x}, ("a", "b", "phi")),
        "ordered": Simulated(ordered, {"x": x}, ("b", "c")),
        "mixture": Simulated(partial(mixture, rows), {}, ("w", "m", "s")),
    }
