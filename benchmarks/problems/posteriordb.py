"""Posteriors with references: those of posteriordb that lie in ``NUMPYRO_REPULSION_DATA``, and some made here."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
import os
import pathlib
from typing import Any

from jax import lax
import jax.numpy as jnp
import numpy as np

import numpyro
import numpyro.distributions as dist
from numpyro.distributions import constraints

from benchmarks.problems.targets import gaussian, logistic_regression, normals, sample


@dataclass
class Posterior:
    """A model, its arguments, and what is known of its sites: ``(mean, standard deviation)``, or reference draws."""

    model: Callable
    args: tuple = ()
    kwargs: dict = field(default_factory=dict)
    moments: dict[str, tuple[Any, Any]] | None = None
    draws: dict[str, np.ndarray] | None = None

    @property
    def all_rows(self) -> dict:
        """The keyword arguments of the model without a minibatch."""
        return {name: value for name, value in self.kwargs.items() if name != "subsample_size"}


def flat(support=constraints.real, shape=()):
    return dist.ImproperUniform(support, (), shape)


def eight_schools(J, y, sigma, is_centered=False):
    mu, tau = sample(mu=dist.Normal(0, 5), tau=dist.HalfCauchy(5))
    with numpyro.plate("school", J):
        if is_centered:
            theta = numpyro.sample("theta", dist.Normal(mu, tau))
        else:
            theta = numpyro.deterministic("theta", mu + tau * numpyro.sample("standard", dist.Normal(0, 1)))
        numpyro.sample("y", dist.Normal(theta, sigma), obs=y)


def kidscore(mom_iq, kid_score):
    sigma, beta = sample(sigma=dist.HalfCauchy(2.5), beta=flat(constraints.real_vector, (2,)))
    numpyro.sample("y", dist.Normal(beta[0] + beta[1] * mom_iq, sigma), obs=kid_score)


def logearn(height, earn):
    beta, sigma = sample(beta=flat(constraints.real_vector, (2,)), sigma=flat(constraints.positive))
    numpyro.sample("y", dist.Normal(beta[0] + beta[1] * height, sigma), obs=jnp.log(earn))


def blr(X, y):
    beta, sigma = normals(X.shape[1], 10), numpyro.sample("sigma", dist.HalfNormal(10))
    numpyro.sample("y", dist.Normal(X @ beta, sigma), obs=y)


def autoregression(K, y):
    alpha, beta = numpyro.sample("alpha", dist.Normal(0, 10)), normals(K, 10)
    sigma = numpyro.sample("sigma", dist.HalfCauchy(2.5))
    lags = jnp.stack([y[K - k - 1 : len(y) - k - 1] for k in range(K)], 1)
    numpyro.sample("y", dist.Normal(alpha + lags @ beta, sigma), obs=y[K:])


def mixture(y):
    mu = numpyro.sample("mu", flat(constraints.ordered_vector, (2,)))
    numpyro.factor("prior", dist.Normal(0, 2).log_prob(mu).sum())
    sigma = numpyro.sample("sigma", dist.HalfNormal(2).expand([2]).to_event(1))
    theta = numpyro.sample("theta", dist.Beta(5, 5))
    weights = dist.Categorical(probs=jnp.stack([theta, 1 - theta]))
    numpyro.sample("y", dist.MixtureSameFamily(weights, dist.Normal(mu, sigma)), obs=y)


def garch(y, sigma1):
    mu, alpha0, alpha1 = sample(mu=flat(), alpha0=flat(constraints.positive), alpha1=dist.Uniform(0, 1))
    # Flat, not uniform: a density of 1 whatever the length of the interval.
    beta1 = numpyro.sample("beta1", dist.Uniform(0, 1 - alpha1))
    numpyro.factor("flat", jnp.log1p(-alpha1))

    def next_variance(variance, value):
        return alpha0 + alpha1 * (value - mu) ** 2 + beta1 * variance, variance

    _, variances = lax.scan(next_variance, sigma1**2 + 0.0 * mu, y)
    numpyro.sample("y", dist.Normal(mu, jnp.sqrt(variances)), obs=y)


#: What of the stored data each model takes.
POSTERIORDB = {
    "eight_schools_noncentered": (eight_schools, lambda d: (int(d["J"]), d["y"], d["sigma"])),
    "kidscore_momiq": (kidscore, lambda d: (d["mom_iq"], d["kid_score"])),
    "logearn_height": (logearn, lambda d: (d["height"], d["earn"])),
    "blr": (blr, lambda d: (d["X"], d["y"])),
    "arK": (autoregression, lambda d: (int(d["K"]), d["y"])),
    "low_dim_gauss_mix": (mixture, lambda d: (d["y"],)),
    "garch11": (garch, lambda d: (d["y"], float(d["sigma1"]))),
}


def data_folder():
    """The folder of ``NUMPYRO_REPULSION_DATA``, or ``None``."""
    folder = os.environ.get("NUMPYRO_REPULSION_DATA")
    return pathlib.Path(folder) if folder else None


def stored(folder: str, name: str) -> Any:
    """An archive in the data folder."""
    if (where := data_folder()) is None:
        raise SystemExit(f"{name} lies in a folder that the environment variable NUMPYRO_REPULSION_DATA must name.")
    return np.load(where / folder / f"{name}.npz")


def posteriordb(name: str) -> Posterior:
    """A posterior of posteriordb, with its reference draws."""
    model, arguments = POSTERIORDB[name]
    archive = stored("posteriordb", name)
    args = arguments({key[5:]: archive[key] for key in archive.files if key.startswith("data_")})
    args = tuple(jnp.asarray(a, float) if isinstance(a, np.ndarray) else a for a in args)
    draws = archive["draws"].reshape(-1, archive["draws"].shape[-1]).astype(float)
    names = [str(parameter).split("[")[0] for parameter in archive["parameters"]]
    known = {site: draws[:, [name == site for name in names]] for site in dict.fromkeys(names)}
    return Posterior(model, args, draws=known)


def many_rows() -> Posterior:
    """Logistic regression with 20,000 rows, 20 parameters and minibatches of 200."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(20_000, 20))
    y = (rng.random(20_000) < 1 / (1 + np.exp(-X @ rng.normal(size=20) / 20**0.5))).astype(float)
    return Posterior(logistic_regression, (jnp.asarray(X), jnp.asarray(y)), {"subsample_size": 200})


def hierarchical_logistic() -> Posterior:
    """Twenty groups of a hundred rows with intercepts of their own, not centered."""
    rng = np.random.default_rng(1)
    group = np.repeat(np.arange(20), 100)
    X = rng.normal(size=(2000, 3))
    logits = X @ np.array([1.0, -0.5, 0.2]) + rng.normal(size=20)[group] * 0.7 - 0.5
    y = (rng.random(2000) < 1 / (1 + np.exp(-logits))).astype(float)

    def model(X, y):
        mu, tau = sample(mu=dist.Normal(0, 2), tau=dist.HalfNormal(1))
        with numpyro.plate("groups", 20):
            offset = numpyro.sample("offset", dist.Normal(0, 1))
        numpyro.sample("y", dist.Bernoulli(logits=mu + tau * offset[group] + X @ normals(3, 2)), obs=y)

    return Posterior(model, (jnp.asarray(X), jnp.asarray(y)))


def robust_regression() -> Posterior:
    """Student-t errors with unknown degrees of freedom, covariates in raw units."""
    rng = np.random.default_rng(2)
    X = np.stack([np.ones(200), rng.normal(50, 5, 200), rng.normal(0, 1e-2, 200)], 1)
    y = X @ np.array([10.0, 0.3, 50.0]) + rng.standard_t(4, 200)

    def model(X, y):
        beta = normals(3, 100)
        sigma, nu = sample(sigma=dist.HalfNormal(5), nu=dist.Gamma(2, 0.1))
        numpyro.sample("y", dist.StudentT(nu, X @ beta, sigma), obs=y)

    return Posterior(model, (jnp.asarray(X), jnp.asarray(y)))


def counts() -> Posterior:
    """Negative-binomial regression with a simplex of category effects."""
    rng = np.random.default_rng(3)
    category, exposure = rng.integers(0, 4, 300), rng.uniform(0.5, 2, 300)
    rate = np.array([0.1, 0.2, 0.3, 0.4])[category] * 20 * exposure
    y = rng.negative_binomial(5, 5 / (5 + rate))

    def model(y):
        total, share = sample(total=dist.LogNormal(2, 1), share=dist.Dirichlet(jnp.ones(4)))
        dispersion = numpyro.sample("dispersion", dist.Gamma(2, 0.2))
        mean = total * share[category] * jnp.asarray(exposure)
        numpyro.sample("y", dist.NegativeBinomial2(mean, dispersion), obs=y)

    return Posterior(model, (jnp.asarray(y),))


def exact(sd):
    return {"z": (np.zeros(len(sd)), sd)}


def independent(sd):
    numpyro.sample("z", dist.Normal(0, jnp.asarray(sd)).to_event(1))


#: Standard deviations of a condition of 10⁶, and correlations by 0.9 to the power of the distance.
WIDE = 10 ** np.linspace(-1.5, 1.5, 100)
CORRELATED = 0.9 ** np.abs(np.arange(50)[:, None] - np.arange(50))
MADE_HERE = {
    "gaussian, d = 100, condition 1e6": lambda: Posterior(independent, (WIDE,), moments=exact(WIDE)),
    "logistic, N = 20,000, batch 200": many_rows,
    "gaussian, d = 50, correlated": lambda: Posterior(gaussian, (np.zeros(50), CORRELATED), moments=exact(np.ones(50))),
    "hierarchical logistic": hierarchical_logistic,
    "robust regression": robust_regression,
    "negative binomial": counts,
    "eight schools, centered": lambda: Posterior(
        partial(eight_schools, is_centered=True), posteriordb("eight_schools_noncentered").args
    ),
}


def known(name: str) -> Posterior:
    return posteriordb(name) if name in POSTERIORDB else MADE_HERE[name]()
