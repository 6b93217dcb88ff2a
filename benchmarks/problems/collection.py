"""Thirty-six small posteriors of the kinds that applied work has, on simulated data.

They are written as textbooks have them, neither eased for a sampler nor made hard for it: generalized linear models,
hierarchies, series and curves, latent structure.
"""

from collections.abc import Callable

import jax
from jax import lax
import jax.numpy as jnp
from jax.scipy.stats import norm
import numpy as np
from scipy.special import expit

import numpyro
import numpyro.distributions as dist
from numpyro.distributions.transforms import OrderedTransform

from benchmarks.problems.targets import normals, sample

CUTS, EFFECTS = [-1.5, 0.0, 1.0], [0.5, -0.5, 0.0]
#: By name, what makes a model and its arguments.
COLLECTION: dict[str, Callable[[], tuple[Callable, tuple]]] = {}


def data(simulate: Callable) -> Callable:
    """Add a model under its name, with arguments that ``simulate`` makes of random numbers by the model's place."""

    def add(model: Callable) -> Callable:
        seed = len(COLLECTION) + 1

        def make():
            arrays = map(np.asarray, simulate(np.random.default_rng(seed)))
            return model, tuple(jnp.asarray(x, float if x.dtype == bool else None) for x in arrays)

        COLLECTION[model.__name__.replace("_", " ")] = make
        return model

    return add


def half_normals(d: int, scale: float, name: str):
    return numpyro.sample(name, dist.HalfNormal(scale).expand([d]).to_event(1))


def ordered(d: int, name: str):
    return numpyro.sample(
        name, dist.TransformedDistribution(dist.Normal(0, 3).expand([d]).to_event(1), OrderedTransform())
    )


@data(lambda rng: (X := rng.normal(size=(40, 4)), rng.random(40) < expit(4 * X[:, 0] - 3 * X[:, 1])))
def logistic_nearly_separated(X, y):
    a = numpyro.sample("a", dist.Normal(0, 5))
    numpyro.sample("y", dist.Bernoulli(logits=a + X @ normals(4, 5)), obs=y)


@data(lambda rng: (X := rng.normal(size=(150, 6)), rng.normal(size=150) < X @ rng.normal(size=6) / 2))
def probit_regression(X, y):
    numpyro.sample("y", dist.Bernoulli(norm.cdf(X @ normals(6)).clip(1e-6, 1 - 1e-6)), obs=y)


def raw_units(rng):
    X = np.stack([np.ones(120), rng.normal(170, 10, 120), rng.exponential(1000, 120)], 1)
    return X, rng.poisson(np.exp(X @ [-3.0, 0.025, 2e-4]))


@data(raw_units)
def poisson_regression_in_raw_units(X, y):
    beta = numpyro.sample("beta", dist.Normal(0, jnp.array([10.0, 1.0, 0.1])).to_event(1))
    numpyro.sample("y", dist.Poisson(jnp.exp((X @ beta).clip(-20, 20))), obs=y)


@data(lambda rng: (x := rng.normal(size=60), rng.poisson(np.exp(1 + 0.5 * x + 0.6 * rng.normal(size=60)))))
def poisson_with_effects_of_observations(x, y):
    a, b, tau = sample(a=dist.Normal(0, 3), b=dist.Normal(0, 1), tau=dist.HalfNormal(1))
    with numpyro.plate("row", 60):
        effect = numpyro.sample("effect", dist.Normal(0, tau))
        numpyro.sample("y", dist.Poisson(jnp.exp(a + b * x + effect)), obs=y)


@data(lambda rng: (X := rng.normal(size=(200, 3)), rng.negative_binomial(2, 2 / (2 + np.exp(1 + X @ EFFECTS)))))
def negative_binomial_regression(X, y):
    a, phi = sample(a=dist.Normal(0, 5), phi=dist.Exponential(0.2))
    numpyro.sample("y", dist.NegativeBinomial2(jnp.exp(a + X @ normals(3)), phi), obs=y)


@data(lambda rng: (x := rng.normal(size=150), np.where(rng.random(150) < 0.3, 0, rng.poisson(np.exp(1 + 0.4 * x)))))
def zero_inflated_counts(x, y):
    a, b, gate = sample(a=dist.Normal(0, 2), b=dist.Normal(0, 2), gate=dist.Beta(1, 1))
    numpyro.sample("y", dist.ZeroInflatedPoisson(gate, jnp.exp(a + b * x)), obs=y)


def shares(rng):
    X = rng.normal(size=(100, 3))
    mean = expit(0.3 + X @ [0.6, -0.3, 0.1])
    return X, rng.beta(12 * mean, 12 * (1 - mean)).clip(1e-4, 1 - 1e-4)


@data(shares)
def beta_regression(X, y):
    mean = jax.nn.sigmoid(numpyro.sample("a", dist.Normal(0, 2)) + X @ normals(3))
    precision = numpyro.sample("precision", dist.Gamma(1, 0.05))
    numpyro.sample("y", dist.Beta(mean * precision, (1 - mean) * precision), obs=y)


@data(lambda rng: (X := rng.normal(size=(120, 4)), rng.gamma(3, np.exp(2 + X @ [0.3, 0.1, -0.2, 0.0]) / 3)))
def gamma_regression(X, y):
    mean = jnp.exp(numpyro.sample("a", dist.Normal(0, 5)) + X @ normals(4))
    shape = numpyro.sample("shape", dist.HalfNormal(10))
    numpyro.sample("y", dist.Gamma(shape, shape / mean), obs=y)


@data(lambda rng: (X := rng.normal(size=(200, 3)), np.digitize(X @ [1.0, -0.5, 0.2] + rng.logistic(size=200), CUTS)))
def ordered_logistic(X, y):
    cuts = ordered(3, "cuts")
    numpyro.sample("y", dist.OrderedLogistic(X @ normals(3), cuts), obs=y)


def classes(rng):
    X = rng.normal(size=(200, 3))
    logits = np.concatenate([np.zeros((200, 1)), X @ rng.normal(size=(3, 3))], 1)
    return X, [rng.choice(4, p=np.exp(row) / np.exp(row).sum()) for row in logits]


@data(classes)
def softmax_regression(X, y):
    W = numpyro.sample("W", dist.Normal(0, 2).expand([3, 3]).to_event(2))
    numpyro.sample("y", dist.Categorical(logits=jnp.concatenate([jnp.zeros((200, 1)), X @ W], 1)), obs=y)


def collinear(rng):
    base = rng.normal(size=(80, 1))
    X = base + 0.05 * rng.normal(size=(80, 5))
    return X, X @ rng.normal(size=5) + rng.normal(size=80)


@data(collinear)
def linear_regression_nearly_collinear(X, y):
    sigma = numpyro.sample("sigma", dist.HalfNormal(2))
    numpyro.sample("y", dist.Normal(X @ normals(5, 10), sigma), obs=y)


@data(lambda rng: [np.append(rng.normal(3, 1, 40), [15.0, -20.0, 30.0])])
def robust_location_and_scale(y):
    mu, sigma, nu = sample(mu=dist.Normal(0, 10), sigma=dist.HalfNormal(5), nu=dist.Gamma(2, 0.1))
    numpyro.sample("y", dist.StudentT(nu, mu, sigma), obs=y)


@data(lambda rng: (g := np.repeat(np.arange(20), 5), 2 + rng.normal(size=20)[g] * 0.8 + rng.normal(size=100)))
def varying_intercepts_centered(group, y):
    mu, tau = sample(mu=dist.Normal(0, 5), tau=dist.HalfCauchy(2))
    with numpyro.plate("group", 20):
        a = numpyro.sample("a", dist.Normal(mu, tau))
    numpyro.sample("y", dist.Normal(a[group], numpyro.sample("sigma", dist.HalfCauchy(2))), obs=y)


@data(lambda rng: (g := np.repeat(np.arange(12), 2), 0.1 * rng.normal(size=12)[g] + rng.normal(size=24)))
def varying_intercepts_few_data(group, y):
    mu, tau = sample(mu=dist.Normal(0, 5), tau=dist.HalfNormal(1))
    with numpyro.plate("group", 12):
        a = numpyro.sample("a", dist.Normal(mu, tau))
    numpyro.sample("y", dist.Normal(a[group], 1.0), obs=y)


def lines(rng):
    group, x = np.repeat(np.arange(15), 12), rng.normal(size=180)
    effects = rng.multivariate_normal([1.0, -0.5], [[0.5, 0.2], [0.2, 0.3]], 15)
    return group, x, effects[group, 0] + effects[group, 1] * x + rng.normal(size=180) * 0.7


@data(lines)
def varying_slopes_correlated(group, x, y):
    mean, scale = normals(2, 2, "mean"), half_normals(2, 1, "scale")
    corr = numpyro.sample("corr", dist.LKJCholesky(2, 2.0))
    with numpyro.plate("group", 15):
        z = normals(2, 1, "z")
    effect = mean + z @ (scale[:, None] * corr).T
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    numpyro.sample("y", dist.Normal(effect[group, 0] + effect[group, 1] * x, sigma), obs=y)


@data(lambda rng: (n := rng.integers(10, 40, 30), rng.binomial(n, rng.beta(2, 8, 30))))
def beta_binomial_hierarchy(n, y):
    mean, size = sample(mean=dist.Beta(1, 1), size=dist.Pareto(1.0, 1.5))
    with numpyro.plate("group", 30):
        theta = numpyro.sample("theta", dist.Beta(mean * size, (1 - mean) * size))
        numpyro.sample("y", dist.Binomial(n, theta), obs=y)


def crossed(rng):
    first, second = rng.integers(0, 15, 300), rng.integers(0, 10, 300)
    return first, second, rng.random(300) < expit(rng.normal(size=15)[first] + 0.7 * rng.normal(size=10)[second])


@data(crossed)
def crossed_effects(first, second, y):
    mu, one, other = sample(mu=dist.Normal(0, 2), one=dist.HalfNormal(1), other=dist.HalfNormal(1))
    with numpyro.plate("first", 15):
        a = numpyro.sample("a", dist.Normal(0, one))
    with numpyro.plate("second", 10):
        b = numpyro.sample("b", dist.Normal(0, other))
    numpyro.sample("y", dist.Bernoulli(logits=mu + a[first] + b[second]), obs=y)


def answers(rng):
    ability, difficulty, slope = rng.normal(size=60), rng.normal(size=12), np.exp(0.3 * rng.normal(size=12))
    return [rng.random((60, 12)) < expit(slope * (ability[:, None] - difficulty))]


@data(answers)
def item_response_two_parameters(y):
    with numpyro.plate("student", 60):
        ability = numpyro.sample("ability", dist.Normal(0, 1))
    with numpyro.plate("item", 12):
        difficulty, slope = sample(difficulty=dist.Normal(0, 2), slope=dist.LogNormal(0, 0.5))
    numpyro.sample("y", dist.Bernoulli(logits=slope * (ability[:, None] - difficulty)).to_event(2), obs=y)


def matches(rng):
    skill = rng.normal(size=12)
    i, j = np.array([rng.choice(12, 2, replace=False) for _ in range(150)]).T
    return i, j, rng.random(150) < expit(skill[i] - skill[j])


@data(matches)
def paired_comparisons(i, j, y):
    sd = numpyro.sample("sd", dist.HalfNormal(1))
    skill = normals(12, 1, "skill") * sd
    numpyro.sample("y", dist.Bernoulli(logits=skill[i] - skill[j]), obs=y)


@data(lambda rng: (X := rng.normal(size=(100, 20)), X[:, :3] @ [3.0, -2.0, 1.0] + rng.normal(size=100)))
def horseshoe_regression(X, y):
    tau = numpyro.sample("tau", dist.HalfCauchy(0.1))
    local = numpyro.sample("local", dist.HalfCauchy(1).expand([20]).to_event(1))
    z, sigma = normals(20, 1, "z"), numpyro.sample("sigma", dist.HalfNormal(2))
    numpyro.sample("y", dist.Normal(X @ (z * tau * local), sigma), obs=y)


@data(lambda rng: (X := rng.normal(size=(60, 12)), X[:, :2] @ [2.0, -1.0] + rng.normal(size=60)))
def lasso_regression(X, y):
    scale = numpyro.sample("scale", dist.HalfNormal(1))
    beta = numpyro.sample("beta", dist.Laplace(0, scale).expand([12]).to_event(1))
    numpyro.sample("y", dist.Normal(X @ beta, numpyro.sample("sigma", dist.HalfNormal(2))), obs=y)


def series(rng):
    y = np.zeros(200)
    for t in range(2, 200):
        y[t] = 0.5 * y[t - 1] + 0.3 * y[t - 2] + rng.normal()
    return [y]


@data(series)
def autoregression_of_order_two(y):
    c, sigma = sample(c=dist.Normal(0, 2), sigma=dist.HalfNormal(2))
    phi = normals(2, 1, "phi")
    numpyro.sample("y", dist.Normal(c + phi[0] * y[1:-1] + phi[1] * y[:-2], sigma), obs=y[2:])


@data(lambda rng: [1 + (e := rng.normal(size=151))[1:] + 0.6 * e[:-1]])
def moving_average(y):
    mu, sigma, theta = sample(mu=dist.Normal(0, 2), sigma=dist.HalfNormal(2), theta=dist.Uniform(-1, 1))

    def step(error, value):
        error = value - mu - theta * error
        return error, error

    errors = lax.scan(step, 0.0, y)[1]
    numpyro.factor("likelihood", dist.Normal(0, sigma).log_prob(errors).sum())


@data(lambda rng: [np.cumsum(0.3 * rng.normal(size=60)) + rng.normal(size=60)])
def local_level(y):
    step, noise = sample(step=dist.HalfNormal(1), noise=dist.HalfNormal(1))
    level = numpyro.sample("level", dist.GaussianRandomWalk(step, 60))
    numpyro.sample("y", dist.Normal(level, noise), obs=y)


def returns(rng):
    h = np.zeros(100)
    for t in range(1, 100):
        h[t] = 0.9 * h[t - 1] + 0.3 * rng.normal()
    return [np.exp(h / 2) * rng.normal(size=100)]


@data(returns)
def stochastic_volatility_of_one_hundred(y):
    mu, sigma, phi = sample(mu=dist.Normal(0, 2), sigma=dist.HalfNormal(0.5), phi=dist.Beta(20, 1.5))
    phi, z = phi * 2 - 1, normals(100, 1, "z")

    def step(h, z):
        h = phi * h + sigma * z
        return h, h

    first = sigma * z[0] / jnp.sqrt(1 - phi**2)
    h = jnp.append(first, lax.scan(step, first, z[1:])[1])
    numpyro.sample("y", dist.Normal(0, jnp.exp((mu + h) / 2)), obs=y)


def curve(rng):
    x = np.sort(rng.uniform(0, 5, 30))
    return (x[:, None] - x) ** 2, np.sin(2 * x) + 0.3 * rng.normal(size=30)


@data(curve)
def gaussian_process_regression(apart, y):
    length, amplitude = sample(length=dist.InverseGamma(5, 5), amplitude=dist.HalfNormal(1))
    noise = numpyro.sample("noise", dist.HalfNormal(1))
    K = amplitude**2 * jnp.exp(-apart / (2 * length**2)) + (noise**2 + 1e-5) * jnp.eye(30)
    numpyro.sample("y", dist.MultivariateNormal(jnp.zeros(30), K), obs=y)


DOSES = np.array([0.02, 0.06, 0.11, 0.22, 0.56, 1.1] * 2)


@data(lambda rng: (DOSES, 200 * DOSES / (0.06 + DOSES) + rng.normal(size=12) * 10))
def saturating_curve(x, y):
    top, half, sigma = sample(top=dist.LogNormal(5, 1), half=dist.LogNormal(-3, 1), sigma=dist.HalfNormal(20))
    numpyro.sample("y", dist.Normal(top * x / (half + x), sigma), obs=y)


def growth(rng):
    t, rate = np.arange(10.0), np.exp(-0.5 + 0.2 * rng.normal(size=6))
    return t, 10 / (1 + np.exp(-rate[:, None] * (t - 5))) + 0.3 * rng.normal(size=(6, 10))


@data(growth)
def logistic_growth_of_groups(t, y):
    top, middle = sample(top=dist.Normal(10, 3), middle=dist.Normal(5, 2))
    mean, sd = sample(mean=dist.Normal(0, 1), sd=dist.HalfNormal(0.5))
    with numpyro.plate("group", 6):
        rate = jnp.exp(numpyro.sample("log_rate", dist.Normal(mean, sd)))
    mean = top / (1 + jnp.exp(-rate[:, None] * (t - middle)))
    numpyro.sample("y", dist.Normal(mean, numpyro.sample("sigma", dist.HalfNormal(1))).to_event(2), obs=y)


@data(lambda rng: [np.append(rng.poisson(3.0, 60), rng.poisson(1.2, 50))])
def change_of_rate(y):
    early, late, when = sample(early=dist.Exponential(1.0), late=dist.Exponential(1.0), when=dist.Uniform(0, 110))
    share = jax.nn.sigmoid((jnp.arange(110) - when) / 2)
    numpyro.sample("y", dist.Poisson(early * (1 - share) + late * share), obs=y)


def times(rng):
    X = rng.normal(size=(150, 3))
    t = np.exp(1 + X @ [0.5, -0.3, 0.0]) * rng.weibull(1.5, 150)
    return X, t.clip(max=6), t > 6


@data(times)
def survival_with_censoring(X, t, censored):
    shape, a = sample(shape=dist.Gamma(2, 1), a=dist.Normal(0, 3))
    law = dist.Weibull(jnp.exp(a + X @ normals(3)), shape)
    hazard = -((t / law.scale) ** shape)
    numpyro.factor("likelihood", jnp.where(censored, hazard, law.log_prob(t)).sum())


@data(lambda rng: [np.append(rng.normal(-1.5, 0.7, 60), rng.normal(2, 1, 90))])
def mixture_of_two_ordered(y):
    share = numpyro.sample("share", dist.Beta(2, 2))
    center, sd = ordered(2, "center"), half_normals(2, 2, "sd")
    law = dist.MixtureSameFamily(dist.Categorical(jnp.stack([share, 1 - share])), dist.Normal(center, sd))
    numpyro.sample("y", law, obs=y)


@data(lambda rng: [np.outer(rng.normal(size=80), [1.0, 0.8, 0.6, -0.5]) + 0.6 * rng.normal(size=(80, 4))])
def one_factor(y):
    first = numpyro.sample("first", dist.HalfNormal(1))
    loading, sd = jnp.append(first, normals(3, 1, "others")), half_normals(4, 1, "sd")
    law = dist.MultivariateNormal(jnp.zeros(4), jnp.outer(loading, loading) + jnp.diag(sd**2))
    with numpyro.plate("row", 80):
        numpyro.sample("y", law, obs=y)


@data(lambda rng: [(root := rng.normal(size=(5, 5)) / 2, rng.normal(size=(60, 5)) @ root.T)[1]])
def covariance_of_five(y):
    scale, corr = half_normals(5, 2, "scale"), numpyro.sample("corr", dist.LKJCholesky(5, 1.0))
    law = dist.MultivariateNormal(jnp.zeros(5), scale_tril=scale[:, None] * corr)
    with numpyro.plate("row", 60):
        numpyro.sample("y", law, obs=y)


@data(lambda rng: (x := rng.normal(size=80), (rng.random(80) < expit(0.3 + x))[:, None] & (rng.random((80, 4)) < 0.4)))
def occupancy_of_sites(x, seen):
    a, b, detection = sample(a=dist.Normal(0, 2), b=dist.Normal(0, 2), detection=dist.Beta(1, 1))
    occupied, times = jax.nn.sigmoid(a + b * x), seen.sum(1)
    there = occupied * detection**times * (1 - detection) ** (4 - times)
    numpyro.factor("likelihood", jnp.log(there + (times == 0) * (1 - occupied) + 1e-30).sum())


@data(lambda rng: [[rng.multinomial(30, p) for p in rng.dirichlet([4.0, 2.0, 1.0], 20)]])
def shares_of_groups(y):
    center, size = sample(center=dist.Dirichlet(jnp.ones(3)), size=dist.HalfNormal(20))
    with numpyro.plate("group", 20):
        numpyro.sample("y", dist.DirichletMultinomial(center * size, 30), obs=y)


@data(lambda rng: ())
def banana():
    x = numpyro.sample("x", dist.Normal(0, 1.5))
    numpyro.sample("y", dist.Normal(x**2 - 1, 0.5))
