"""Posteriors of models with hundreds to thousands of effects, and references for them.

``PROBLEMS`` makes a :class:`ManyEffects`. References are moments of scales (as logarithms) and of some effects: exact
where all rows are Gaussian or an effect can be integrated out by quadrature, else of long runs of HMC or NUTS on all
rows in double precision, made outside of this repository.
"""

from collections.abc import Callable
from functools import partial
import pathlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import numpyro
import numpyro.distributions as dist

from benchmarks.problems import real
from benchmarks.problems.real import as_jax
from benchmarks.problems.targets import normals, sample

REFERENCES = pathlib.Path(__file__).parents[1] / "references" / "many_effects"
BATCH = 500


class ManyEffects(NamedTuple):
    """A model and its data; ``scales`` are compared as logarithms, ``effects`` are the sites with many entries."""

    model: Callable
    data: dict[str, jax.Array]
    scales: tuple[str, ...]
    effects: tuple[str, ...]
    others: tuple[str, ...] = ()

    @property
    def sites(self) -> tuple[str, ...]:
        return self.scales + self.others + self.effects


def half_normal(name: str) -> jax.Array:
    return numpyro.sample(name, dist.HalfNormal(1.0))


def bernoulli(rng: np.random.Generator, logits: np.ndarray) -> np.ndarray:
    return (rng.random(len(logits)) < 1 / (1 + np.exp(-logits))).astype(np.float32)


def ratings(users: int = 3000, items: int = 1000, n: int = 100_000) -> ManyEffects:
    """Ratings of items by users, some much busier than others; all three scales are unknown."""
    rng = np.random.default_rng(0)
    busy, popular = rng.gamma(1.0, size=users) + 0.05, rng.gamma(0.5, size=items) + 0.02
    u, i = rng.choice(users, n, p=busy / busy.sum()), rng.choice(items, n, p=popular / popular.sum())
    user, item = 0.4 * rng.standard_normal(users), 0.6 * rng.standard_normal(items)
    y = 3.5 + user[u] + item[i] + 0.9 * rng.standard_normal(n)

    def model(u, i, y):
        mean = numpyro.sample("mean", dist.Normal(3, 1))
        s_user, s_item, sigma = half_normal("s_user"), half_normal("s_item"), half_normal("sigma")
        item, user = normals(items, s_item, "item"), normals(users, s_user, "user")
        with numpyro.plate("rows", len(y), subsample_size=BATCH) as r:
            numpyro.sample("y", dist.Normal(mean + user[u[r]] + item[i[r]], sigma), obs=y[r])

    scales = ("s_user", "s_item", "sigma")
    return ManyEffects(model, as_jax(u=u, i=i, y=y), scales, ("user", "item"), ("mean",))


def responses(persons: int = 2000, items: int = 100, share: float = 0.3) -> ManyEffects:
    """Item response with two parameters of each item: its difficulty, and the logarithm of its discrimination."""
    rng = np.random.default_rng(0)
    ability, log_a, b = rng.standard_normal(persons), 0.4 * rng.standard_normal(items), rng.standard_normal(items)
    u, i = np.divmod(rng.permutation(persons * items)[: int(share * persons * items)], items)
    y = bernoulli(rng, np.exp(log_a[i]) * (ability[u] - 0.3 - b[i]))

    def model(u, i, y):
        mean, s_a, s_b = numpyro.sample("mean", dist.Normal(0, 1)), half_normal("s_a"), half_normal("s_b")
        with numpyro.plate("items", items):
            log_a, b = sample(log_a=dist.Normal(0, s_a), b=dist.Normal(mean, s_b))
        with numpyro.plate("persons", persons):
            ability = numpyro.sample("ability", dist.Normal(0, 1))
        with numpyro.plate("rows", len(y), subsample_size=BATCH) as r:
            logits = jnp.exp(log_a[i[r]]) * (ability[u[r]] - b[i[r]])
            numpyro.sample("y", dist.Bernoulli(logits=logits), obs=y[r])

    return ManyEffects(model, as_jax(u=u, i=i, y=y), ("s_a", "s_b"), ("ability", "log_a", "b"), ("mean",))


def slopes(groups: int = 300, n: int = 20_000) -> ManyEffects:
    """Logistic regression with an intercept and a slope of each group."""
    rng = np.random.default_rng(0)
    weight = rng.gamma(0.7, size=groups) + 0.02
    u, x = rng.choice(groups, n, p=weight / weight.sum()), rng.standard_normal((n, 3))
    a, c = 0.7 * rng.standard_normal(groups), 0.4 * rng.standard_normal(groups)
    y = bernoulli(rng, -0.5 + x @ np.array([0.5, -0.3, 0.2]) + a[u] + c[u] * x[:, 0])

    def model(u, x, y):
        mean, beta = numpyro.sample("mean", dist.Normal(0, 1)), normals(3)
        s_a, s_c = half_normal("s_alpha"), half_normal("s_gamma")
        with numpyro.plate("groups", groups):
            alpha, gamma = sample(alpha=dist.Normal(0, s_a), gamma=dist.Normal(0, s_c))
        with numpyro.plate("rows", len(y), subsample_size=BATCH) as r:
            logits = mean + x[r] @ beta + alpha[u[r]] + gamma[u[r]] * x[r][:, 0]
            numpyro.sample("y", dist.Bernoulli(logits=logits), obs=y[r])

    data = as_jax(u=u, x=x, y=y)
    return ManyEffects(model, data, ("s_alpha", "s_gamma"), ("alpha", "gamma"), ("mean", "beta"))


VISITS = 10


def visits(subjects: int = 5000) -> ManyEffects:
    """Repeated measures: an intercept and a slope of each subject, whose covariance is unknown."""
    rng = np.random.default_rng(0)
    time = np.linspace(-1, 1, VISITS)
    factor = np.array([[1.0, 0.0], [-0.3, 0.4]])
    effects = rng.standard_normal((subjects, 2)) @ factor.T
    y = 2.0 - 0.5 * time + effects[:, :1] + effects[:, 1:] * time + 0.5 * rng.standard_normal((subjects, VISITS))

    def model(u, t, y):
        beta = normals(2)
        scale = numpyro.sample("scale", dist.HalfNormal(1.0).expand([2]).to_event(1))
        correlation, sigma = numpyro.sample("correlation", dist.LKJCholesky(2, 2.0)), half_normal("sigma")
        with numpyro.plate("subjects", subjects):
            law = dist.MultivariateNormal(jnp.zeros(2), scale_tril=scale[:, None] * correlation)
            effect = numpyro.sample("effect", law)
        with numpyro.plate("rows", len(y), subsample_size=BATCH) as r:
            mean = beta[0] + effect[u[r], 0] + (beta[1] + effect[u[r], 1]) * t[r]
            numpyro.sample("y", dist.Normal(mean, sigma), obs=y[r])

    u = np.repeat(np.arange(subjects), VISITS)
    data = as_jax(u=u, t=np.tile(time, subjects), y=y.ravel())
    return ManyEffects(model, data, ("scale", "sigma"), ("effect",), ("beta", "correlation"))


def counts(areas: int = 10_000, n: int = 50_000) -> ManyEffects:
    """Poisson counts in many areas."""
    rng = np.random.default_rng(0)
    u, x = rng.permutation(np.arange(n) % areas), rng.standard_normal((n, 2))
    y = rng.poisson(np.exp(0.5 + x @ np.array([0.3, -0.2]) + 0.5 * rng.standard_normal(areas)[u]))

    def model(u, x, y):
        mean, beta, s_area = numpyro.sample("mean", dist.Normal(0, 1)), normals(2), half_normal("s_area")
        area = normals(areas, s_area, "area")
        with numpyro.plate("rows", len(y), subsample_size=BATCH) as r:
            numpyro.sample("y", dist.Poisson(jnp.exp(mean + x[r] @ beta + area[u[r]])), obs=y[r])

    return ManyEffects(model, as_jax(u=u, x=x, y=y), ("s_area",), ("area",), ("mean", "beta"))


def flights() -> ManyEffects:
    """Late arrivals, with effects of 4,037 aircraft beside those of five smaller groups."""
    problem = real.PROBLEMS["flights_aircraft"]()
    groups = (*real.GROUPS, "aircraft")
    model = partial(problem.model, subsample_size=BATCH)
    return ManyEffects(model, problem.data, tuple(f"s_{group}" for group in groups), groups, ("a", "b"))


PROBLEMS: dict[str, Callable[[], ManyEffects]] = {
    "flights": flights,
    "ratings": ratings,
    "item response": responses,
    "slopes": slopes,
    "visits": visits,
    "counts": counts,
    # Without references.
    "large ratings": partial(ratings, 20_000, 5_000, 2_000_000),
    "large item response": partial(responses, 20_000, 60),
}


def reference(name: str) -> dict[str, np.ndarray]:
    """``SITE mean`` and ``SITE sd`` of each site, scales as logarithms; empty without any."""
    path = REFERENCES / f"{name}.npz"
    if not path.exists():
        return {}
    with np.load(path) as stored:
        return dict(stored)
