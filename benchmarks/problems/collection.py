"""Thirty-six small posteriors of the kinds that applied work has, on simulated data.

They are written in the forms in which textbooks have them, neither eased for a sampler nor made hard for it.
"""

from collections.abc import Callable

import jax
from jax import lax
import jax.numpy as jnp
from jax.scipy.stats import norm
import numpy as np

import numpyro
import numpyro.distributions as dist

__all__ = ["COLLECTION"]

#: By name, what makes a model and its arguments.
COLLECTION: dict[str, Callable[[], tuple[Callable, tuple]]] = {}


def posterior(make: Callable) -> Callable:
    """Add a posterior, under the name of its function, which gets random numbers by its place."""
    seed = len(COLLECTION) + 1
    COLLECTION[make.__name__.replace("_", " ")] = lambda: make(np.random.default_rng(seed))
    return make


def _sigmoid(x):
    return 1 / (1 + np.exp(-x))


def _coefficients(d, scale=1.0, name="beta"):
    return numpyro.sample(name, dist.Normal(0, scale).expand([d]).to_event(1))


# --- Generalized linear models --------------------------------------------------------------------------------------


@posterior
def logistic_nearly_separated(rng):
    X = rng.normal(size=(40, 4))
    y = rng.random(40) < _sigmoid(4 * X[:, 0] - 3 * X[:, 1])

    def model(X, y):
        numpyro.sample(
            "y", dist.Bernoulli(logits=numpyro.sample("a", dist.Normal(0, 5)) + X @ _coefficients(4, 5)), obs=y
        )

    return model, (jnp.asarray(X), jnp.asarray(y, float))


@posterior
def probit_regression(rng):
    X = rng.normal(size=(150, 6))
    y = rng.normal(size=150) < X @ rng.normal(size=6) / 2

    def model(X, y):
        numpyro.sample("y", dist.Bernoulli(norm.cdf(X @ _coefficients(6)).clip(1e-6, 1 - 1e-6)), obs=y)

    return model, (jnp.asarray(X), jnp.asarray(y, float))


@posterior
def poisson_regression_in_raw_units(rng):
    X = np.stack([np.ones(120), rng.normal(170, 10, 120), rng.exponential(1000, 120)], 1)
    y = rng.poisson(np.exp(X @ [-3.0, 0.025, 2e-4]))

    def model(X, y):
        beta = numpyro.sample("beta", dist.Normal(0, jnp.array([10.0, 1.0, 0.1])).to_event(1))
        numpyro.sample("y", dist.Poisson(jnp.exp((X @ beta).clip(-20, 20))), obs=y)

    return model, (jnp.asarray(X), jnp.asarray(y))


@posterior
def poisson_with_effects_of_observations(rng):
    x = rng.normal(size=60)
    y = rng.poisson(np.exp(1 + 0.5 * x + 0.6 * rng.normal(size=60)))

    def model(x, y):
        a, b = numpyro.sample("a", dist.Normal(0, 3)), numpyro.sample("b", dist.Normal(0, 1))
        tau = numpyro.sample("tau", dist.HalfNormal(1))
        with numpyro.plate("row", 60):
            effect = numpyro.sample("effect", dist.Normal(0, tau))
            numpyro.sample("y", dist.Poisson(jnp.exp(a + b * x + effect)), obs=y)

    return model, (jnp.asarray(x), jnp.asarray(y))


@posterior
def negative_binomial_regression(rng):
    X = rng.normal(size=(200, 3))
    y = rng.negative_binomial(2, 2 / (2 + np.exp(1 + X @ [0.5, -0.5, 0.0])))

    def model(X, y):
        a = numpyro.sample("a", dist.Normal(0, 5))
        phi = numpyro.sample("phi", dist.Exponential(0.2))
        numpyro.sample("y", dist.NegativeBinomial2(jnp.exp(a + X @ _coefficients(3)), phi), obs=y)

    return model, (jnp.asarray(X), jnp.asarray(y))


@posterior
def zero_inflated_counts(rng):
    x = rng.normal(size=150)
    y = np.where(rng.random(150) < 0.3, 0, rng.poisson(np.exp(1 + 0.4 * x)))

    def model(x, y):
        a, b = numpyro.sample("a", dist.Normal(0, 2)), numpyro.sample("b", dist.Normal(0, 2))
        gate = numpyro.sample("gate", dist.Beta(1, 1))
        numpyro.sample("y", dist.ZeroInflatedPoisson(gate, jnp.exp(a + b * x)), obs=y)

    return model, (jnp.asarray(x), jnp.asarray(y))


@posterior
def beta_regression(rng):
    X = rng.normal(size=(100, 3))
    mean = _sigmoid(0.3 + X @ [0.6, -0.3, 0.1])
    y = rng.beta(12 * mean, 12 * (1 - mean)).clip(1e-4, 1 - 1e-4)

    def model(X, y):
        mean = jax.nn.sigmoid(numpyro.sample("a", dist.Normal(0, 2)) + X @ _coefficients(3))
        precision = numpyro.sample("precision", dist.Gamma(1, 0.05))
        numpyro.sample("y", dist.Beta(mean * precision, (1 - mean) * precision), obs=y)

    return model, (jnp.asarray(X), jnp.asarray(y))


@posterior
def gamma_regression(rng):
    X = rng.normal(size=(120, 4))
    y = rng.gamma(3, np.exp(2 + X @ [0.3, 0.1, -0.2, 0.0]) / 3)

    def model(X, y):
        mean = jnp.exp(numpyro.sample("a", dist.Normal(0, 5)) + X @ _coefficients(4))
        shape = numpyro.sample("shape", dist.HalfNormal(10))
        numpyro.sample("y", dist.Gamma(shape, shape / mean), obs=y)

    return model, (jnp.asarray(X), jnp.asarray(y))


@posterior
def ordered_logistic(rng):
    X = rng.normal(size=(200, 3))
    y = np.digitize(X @ [1.0, -0.5, 0.2] + rng.logistic(size=200), [-1.5, 0.0, 1.0])

    def model(X, y):
        cuts = numpyro.sample("cuts", dist.TransformedDistribution(
            dist.Normal(0, 3).expand([3]).to_event(1), dist.transforms.OrderedTransform()))  # fmt: skip
        numpyro.sample("y", dist.OrderedLogistic(X @ _coefficients(3), cuts), obs=y)

    return model, (jnp.asarray(X), jnp.asarray(y))


@posterior
def softmax_regression(rng):
    X = rng.normal(size=(200, 3))
    logits = np.concatenate([np.zeros((200, 1)), X @ rng.normal(size=(3, 3))], 1)
    y = np.array([rng.choice(4, p=np.exp(row) / np.exp(row).sum()) for row in logits])

    def model(X, y):
        W = numpyro.sample("W", dist.Normal(0, 2).expand([3, 3]).to_event(2))
        numpyro.sample("y", dist.Categorical(logits=jnp.concatenate([jnp.zeros((200, 1)), X @ W], 1)), obs=y)

    return model, (jnp.asarray(X), jnp.asarray(y))


@posterior
def linear_regression_nearly_collinear(rng):
    base = rng.normal(size=(80, 1))
    X = base + 0.05 * rng.normal(size=(80, 5))
    y = X @ rng.normal(size=5) + rng.normal(size=80)

    def model(X, y):
        sigma = numpyro.sample("sigma", dist.HalfNormal(2))
        numpyro.sample("y", dist.Normal(X @ _coefficients(5, 10), sigma), obs=y)

    return model, (jnp.asarray(X), jnp.asarray(y))


@posterior
def robust_location_and_scale(rng):
    y = np.append(rng.normal(3, 1, 40), [15.0, -20.0, 30.0])

    def model(y):
        mu, sigma = numpyro.sample("mu", dist.Normal(0, 10)), numpyro.sample("sigma", dist.HalfNormal(5))
        numpyro.sample("y", dist.StudentT(numpyro.sample("nu", dist.Gamma(2, 0.1)), mu, sigma), obs=y)

    return model, (jnp.asarray(y),)


# --- Hierarchies ----------------------------------------------------------------------------------------------------


@posterior
def varying_intercepts_centered(rng):
    group = np.repeat(np.arange(20), 5)
    y = 2 + rng.normal(size=20)[group] * 0.8 + rng.normal(size=100)

    def model(group, y):
        mu, tau = numpyro.sample("mu", dist.Normal(0, 5)), numpyro.sample("tau", dist.HalfCauchy(2))
        with numpyro.plate("group", 20):
            a = numpyro.sample("a", dist.Normal(mu, tau))
        numpyro.sample("y", dist.Normal(a[group], numpyro.sample("sigma", dist.HalfCauchy(2))), obs=y)

    return model, (jnp.asarray(group), jnp.asarray(y))


@posterior
def varying_intercepts_few_data(rng):
    group = np.repeat(np.arange(12), 2)
    y = 0.1 * rng.normal(size=12)[group] + rng.normal(size=24)

    def model(group, y):
        mu, tau = numpyro.sample("mu", dist.Normal(0, 5)), numpyro.sample("tau", dist.HalfNormal(1))
        with numpyro.plate("group", 12):
            a = numpyro.sample("a", dist.Normal(mu, tau))
        numpyro.sample("y", dist.Normal(a[group], 1.0), obs=y)

    return model, (jnp.asarray(group), jnp.asarray(y))


@posterior
def varying_slopes_correlated(rng):
    group = np.repeat(np.arange(15), 12)
    x = rng.normal(size=180)
    effects = rng.multivariate_normal([1.0, -0.5], [[0.5, 0.2], [0.2, 0.3]], 15)
    y = effects[group, 0] + effects[group, 1] * x + rng.normal(size=180) * 0.7

    def model(group, x, y):
        mean = numpyro.sample("mean", dist.Normal(0, 2).expand([2]).to_event(1))
        scale = numpyro.sample("scale", dist.HalfNormal(1).expand([2]).to_event(1))
        corr = numpyro.sample("corr", dist.LKJCholesky(2, 2.0))
        with numpyro.plate("group", 15):
            z = numpyro.sample("z", dist.Normal(0, 1).expand([2]).to_event(1))
        effect = mean + z @ (scale[:, None] * corr).T
        sigma = numpyro.sample("sigma", dist.HalfNormal(1))
        numpyro.sample("y", dist.Normal(effect[group, 0] + effect[group, 1] * x, sigma), obs=y)

    return model, (jnp.asarray(group), jnp.asarray(x), jnp.asarray(y))


@posterior
def beta_binomial_hierarchy(rng):
    n = rng.integers(10, 40, 30)
    y = rng.binomial(n, rng.beta(2, 8, 30))

    def model(n, y):
        mean, size = numpyro.sample("mean", dist.Beta(1, 1)), numpyro.sample("size", dist.Pareto(1.0, 1.5))
        with numpyro.plate("group", 30):
            theta = numpyro.sample("theta", dist.Beta(mean * size, (1 - mean) * size))
            numpyro.sample("y", dist.Binomial(n, theta), obs=y)

    return model, (jnp.asarray(n), jnp.asarray(y))


@posterior
def crossed_effects(rng):
    first, second = rng.integers(0, 15, 300), rng.integers(0, 10, 300)
    y = rng.random(300) < _sigmoid(rng.normal(size=15)[first] + 0.7 * rng.normal(size=10)[second])

    def model(first, second, y):
        mu = numpyro.sample("mu", dist.Normal(0, 2))
        one, other = (numpyro.sample(name, dist.HalfNormal(1)) for name in ("one", "other"))
        with numpyro.plate("first", 15):
            a = numpyro.sample("a", dist.Normal(0, one))
        with numpyro.plate("second", 10):
            b = numpyro.sample("b", dist.Normal(0, other))
        numpyro.sample("y", dist.Bernoulli(logits=mu + a[first] + b[second]), obs=y)

    return model, (jnp.asarray(first), jnp.asarray(second), jnp.asarray(y, float))


@posterior
def item_response_two_parameters(rng):
    ability, difficulty, slope = rng.normal(size=60), rng.normal(size=12), np.exp(0.3 * rng.normal(size=12))
    y = rng.random((60, 12)) < _sigmoid(slope * (ability[:, None] - difficulty))

    def model(y):
        with numpyro.plate("student", 60):
            ability = numpyro.sample("ability", dist.Normal(0, 1))
        with numpyro.plate("item", 12):
            difficulty = numpyro.sample("difficulty", dist.Normal(0, 2))
            slope = numpyro.sample("slope", dist.LogNormal(0, 0.5))
        numpyro.sample("y", dist.Bernoulli(logits=slope * (ability[:, None] - difficulty)).to_event(2), obs=y)

    return model, (jnp.asarray(y, float),)


@posterior
def paired_comparisons(rng):
    skill = rng.normal(size=12)
    i, j = np.array([rng.choice(12, 2, replace=False) for _ in range(150)]).T
    y = rng.random(150) < _sigmoid(skill[i] - skill[j])

    def model(i, j, y):
        sd = numpyro.sample("sd", dist.HalfNormal(1))
        skill = numpyro.sample("skill", dist.Normal(0, 1).expand([12]).to_event(1)) * sd
        numpyro.sample("y", dist.Bernoulli(logits=skill[i] - skill[j]), obs=y)

    return model, (jnp.asarray(i), jnp.asarray(j), jnp.asarray(y, float))


@posterior
def horseshoe_regression(rng):
    X = rng.normal(size=(100, 20))
    y = X[:, :3] @ [3.0, -2.0, 1.0] + rng.normal(size=100)

    def model(X, y):
        tau = numpyro.sample("tau", dist.HalfCauchy(0.1))
        local = numpyro.sample("local", dist.HalfCauchy(1).expand([20]).to_event(1))
        z = numpyro.sample("z", dist.Normal(0, 1).expand([20]).to_event(1))
        sigma = numpyro.sample("sigma", dist.HalfNormal(2))
        numpyro.sample("y", dist.Normal(X @ (z * tau * local), sigma), obs=y)

    return model, (jnp.asarray(X), jnp.asarray(y))


@posterior
def lasso_regression(rng):
    X = rng.normal(size=(60, 12))
    y = X[:, :2] @ [2.0, -1.0] + rng.normal(size=60)

    def model(X, y):
        scale = numpyro.sample("scale", dist.HalfNormal(1))
        beta = numpyro.sample("beta", dist.Laplace(0, scale).expand([12]).to_event(1))
        numpyro.sample("y", dist.Normal(X @ beta, numpyro.sample("sigma", dist.HalfNormal(2))), obs=y)

    return model, (jnp.asarray(X), jnp.asarray(y))


# --- Time, space and curves -----------------------------------------------------------------------------------------


@posterior
def autoregression_of_order_two(rng):
    y = np.zeros(200)
    for t in range(2, 200):
        y[t] = 0.5 * y[t - 1] + 0.3 * y[t - 2] + rng.normal()

    def model(y):
        c, sigma = numpyro.sample("c", dist.Normal(0, 2)), numpyro.sample("sigma", dist.HalfNormal(2))
        phi = numpyro.sample("phi", dist.Normal(0, 1).expand([2]).to_event(1))
        numpyro.sample("y", dist.Normal(c + phi[0] * y[1:-1] + phi[1] * y[:-2], sigma), obs=y[2:])

    return model, (jnp.asarray(y),)


@posterior
def moving_average(rng):
    e = rng.normal(size=151)
    y = 1 + e[1:] + 0.6 * e[:-1]

    def model(y):
        mu, sigma = numpyro.sample("mu", dist.Normal(0, 2)), numpyro.sample("sigma", dist.HalfNormal(2))
        theta = numpyro.sample("theta", dist.Uniform(-1, 1))

        def step(error, value):
            error = value - mu - theta * error
            return error, error

        errors = lax.scan(step, 0.0, y)[1]
        numpyro.factor("likelihood", dist.Normal(0, sigma).log_prob(errors).sum())

    return model, (jnp.asarray(y),)


@posterior
def local_level(rng):
    y = np.cumsum(0.3 * rng.normal(size=60)) + rng.normal(size=60)

    def model(y):
        step, noise = (numpyro.sample(name, dist.HalfNormal(1)) for name in ("step", "noise"))
        level = numpyro.sample("level", dist.GaussianRandomWalk(step, 60))
        numpyro.sample("y", dist.Normal(level, noise), obs=y)

    return model, (jnp.asarray(y),)


@posterior
def stochastic_volatility_of_one_hundred(rng):
    h = np.zeros(100)
    for t in range(1, 100):
        h[t] = 0.9 * h[t - 1] + 0.3 * rng.normal()
    y = np.exp(h / 2) * rng.normal(size=100)

    def model(y):
        mu, sigma = numpyro.sample("mu", dist.Normal(0, 2)), numpyro.sample("sigma", dist.HalfNormal(0.5))
        phi = numpyro.sample("phi", dist.Beta(20, 1.5)) * 2 - 1
        z = numpyro.sample("z", dist.Normal(0, 1).expand([100]).to_event(1))

        def step(h, z):
            h = phi * h + sigma * z
            return h, h

        first = sigma * z[0] / jnp.sqrt(1 - phi**2)
        h = jnp.append(first, lax.scan(step, first, z[1:])[1])
        numpyro.sample("y", dist.Normal(0, jnp.exp((mu + h) / 2)), obs=y)

    return model, (jnp.asarray(y),)


@posterior
def gaussian_process_regression(rng):
    x = np.sort(rng.uniform(0, 5, 30))
    y = np.sin(2 * x) + 0.3 * rng.normal(size=30)
    apart = (x[:, None] - x) ** 2

    def model(apart, y):
        length = numpyro.sample("length", dist.InverseGamma(5, 5))
        amplitude, noise = (numpyro.sample(name, dist.HalfNormal(1)) for name in ("amplitude", "noise"))
        K = amplitude**2 * jnp.exp(-apart / (2 * length**2)) + (noise**2 + 1e-5) * jnp.eye(30)
        numpyro.sample("y", dist.MultivariateNormal(jnp.zeros(30), K), obs=y)

    return model, (jnp.asarray(apart), jnp.asarray(y))


@posterior
def saturating_curve(rng):
    x = np.array([0.02, 0.06, 0.11, 0.22, 0.56, 1.1] * 2)
    y = 200 * x / (0.06 + x) + rng.normal(size=12) * 10

    def model(x, y):
        top, half = numpyro.sample("top", dist.LogNormal(5, 1)), numpyro.sample("half", dist.LogNormal(-3, 1))
        numpyro.sample("y", dist.Normal(top * x / (half + x), numpyro.sample("sigma", dist.HalfNormal(20))), obs=y)

    return model, (jnp.asarray(x), jnp.asarray(y))


@posterior
def logistic_growth_of_groups(rng):
    t = np.arange(10.0)
    rate = np.exp(-0.5 + 0.2 * rng.normal(size=6))
    y = 10 / (1 + np.exp(-rate[:, None] * (t - 5))) + 0.3 * rng.normal(size=(6, 10))

    def model(t, y):
        top, middle = numpyro.sample("top", dist.Normal(10, 3)), numpyro.sample("middle", dist.Normal(5, 2))
        mean, sd = numpyro.sample("mean", dist.Normal(0, 1)), numpyro.sample("sd", dist.HalfNormal(0.5))
        with numpyro.plate("group", 6):
            rate = jnp.exp(numpyro.sample("log_rate", dist.Normal(mean, sd)))
        curve = top / (1 + jnp.exp(-rate[:, None] * (t - middle)))
        numpyro.sample("y", dist.Normal(curve, numpyro.sample("sigma", dist.HalfNormal(1))).to_event(2), obs=y)

    return model, (jnp.asarray(t), jnp.asarray(y))


@posterior
def change_of_rate(rng):
    y = np.append(rng.poisson(3.0, 60), rng.poisson(1.2, 50))

    def model(y):
        early, late = (numpyro.sample(name, dist.Exponential(1.0)) for name in ("early", "late"))
        when = numpyro.sample("when", dist.Uniform(0, 110))
        share = jax.nn.sigmoid((jnp.arange(110) - when) / 2)
        numpyro.sample("y", dist.Poisson(early * (1 - share) + late * share), obs=y)

    return model, (jnp.asarray(y),)


@posterior
def survival_with_censoring(rng):
    X = rng.normal(size=(150, 3))
    t = np.exp(1 + X @ [0.5, -0.3, 0.0]) * rng.weibull(1.5, 150)
    censored = t > 6

    def model(X, t, censored):
        shape, a = numpyro.sample("shape", dist.Gamma(2, 1)), numpyro.sample("a", dist.Normal(0, 3))
        law = dist.Weibull(jnp.exp(a + X @ _coefficients(3)), shape)
        hazard = -((t / law.scale) ** shape)
        numpyro.factor("likelihood", jnp.where(censored, hazard, law.log_prob(t)).sum())

    return model, (jnp.asarray(X), jnp.asarray(t.clip(max=6)), jnp.asarray(censored))


# --- Latent structure -----------------------------------------------------------------------------------------------


@posterior
def mixture_of_two_ordered(rng):
    y = np.append(rng.normal(-1.5, 0.7, 60), rng.normal(2, 1, 90))

    def model(y):
        share = numpyro.sample("share", dist.Beta(2, 2))
        center = numpyro.sample("center", dist.TransformedDistribution(
            dist.Normal(0, 3).expand([2]).to_event(1), dist.transforms.OrderedTransform()))  # fmt: skip
        sd = numpyro.sample("sd", dist.HalfNormal(2).expand([2]).to_event(1))
        law = dist.MixtureSameFamily(dist.Categorical(jnp.stack([share, 1 - share])), dist.Normal(center, sd))
        numpyro.sample("y", law, obs=y)

    return model, (jnp.asarray(y),)


@posterior
def one_factor(rng):
    y = np.outer(rng.normal(size=80), [1.0, 0.8, 0.6, -0.5]) + 0.6 * rng.normal(size=(80, 4))

    def model(y):
        first = numpyro.sample("first", dist.HalfNormal(1))
        others = numpyro.sample("others", dist.Normal(0, 1).expand([3]).to_event(1))
        sd = numpyro.sample("sd", dist.HalfNormal(1).expand([4]).to_event(1))
        loading = jnp.append(first, others)
        law = dist.MultivariateNormal(jnp.zeros(4), jnp.outer(loading, loading) + jnp.diag(sd**2))
        with numpyro.plate("row", 80):
            numpyro.sample("y", law, obs=y)

    return model, (jnp.asarray(y),)


@posterior
def covariance_of_five(rng):
    root = rng.normal(size=(5, 5)) / 2
    y = rng.normal(size=(60, 5)) @ root.T

    def model(y):
        scale = numpyro.sample("scale", dist.HalfNormal(2).expand([5]).to_event(1))
        corr = numpyro.sample("corr", dist.LKJCholesky(5, 1.0))
        law = dist.MultivariateNormal(jnp.zeros(5), scale_tril=scale[:, None] * corr)
        with numpyro.plate("row", 60):
            numpyro.sample("y", law, obs=y)

    return model, (jnp.asarray(y),)


@posterior
def occupancy_of_sites(rng):
    x = rng.normal(size=80)
    seen = (rng.random(80) < _sigmoid(0.3 + x))[:, None] & (rng.random((80, 4)) < 0.4)

    def model(x, seen):
        a, b = numpyro.sample("a", dist.Normal(0, 2)), numpyro.sample("b", dist.Normal(0, 2))
        detection = numpyro.sample("detection", dist.Beta(1, 1))
        occupied = jax.nn.sigmoid(a + b * x)
        times = seen.sum(1)
        there = occupied * detection**times * (1 - detection) ** (4 - times)
        numpyro.factor("likelihood", jnp.log(there + (times == 0) * (1 - occupied) + 1e-30).sum())

    return model, (jnp.asarray(x), jnp.asarray(seen, float))


@posterior
def shares_of_groups(rng):
    shares = rng.dirichlet([4.0, 2.0, 1.0], 20)
    y = np.array([rng.multinomial(30, p) for p in shares])

    def model(y):
        center = numpyro.sample("center", dist.Dirichlet(jnp.ones(3)))
        size = numpyro.sample("size", dist.HalfNormal(20))
        with numpyro.plate("group", 20):
            numpyro.sample("y", dist.DirichletMultinomial(center * size, 30), obs=y)

    return model, (jnp.asarray(y),)


@posterior
def banana(rng):
    def model():
        x = numpyro.sample("x", dist.Normal(0, 1.5))
        numpyro.sample("y", dist.Normal(x**2 - 1, 0.5))

    return model, ()
