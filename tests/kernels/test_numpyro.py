"""What NumPyro asks of its own kernels, asked of these: posteriors with known answers."""

from itertools import product

from catalogue import PRESETS, having
import jax
from jax import random
import jax.numpy as jnp
from models import vectorized
import numpy as np
import pytest
from scipy import stats
import xarray

import numpyro
import numpyro.distributions as dist
from numpyro.distributions import constraints

from numpyro_repulsion import SGLD, SGLDR, SVGD, BiasBudget, ensemble_mcse

SAMPLERS = tuple(having(PRESETS, "sampler").values())
REPELS = tuple(having(PRESETS, "repels").values())


# Posteriors: each case gives a model or potential, its arguments, and functions of a draw with exact means and
# standard deviations.


def gaussian():
    def potential(z):
        return jnp.sum(((z - 1.0) / 0.5) ** 2) / 2

    return {"potential_fn": potential, "starts": random.normal(random.key(5), (20,))}, (), lambda z: z, 1.0, 0.5


def logistic_regression():
    X = random.normal(random.key(0), (500, 3))
    y = dist.Bernoulli(logits=X @ jnp.arange(1.0, 4.0)).sample(random.key(1))

    def model(X, y):
        beta = numpyro.sample("beta", dist.Normal(jnp.zeros(3), 1).to_event(1))
        numpyro.sample("y", dist.Bernoulli(logits=X @ beta), obs=y)

    def log_density(beta):
        return dist.Bernoulli(logits=X @ beta).log_prob(y).sum() - beta @ beta / 2

    # By importance sampling from Student's t around the mode.
    mode = jnp.zeros(3)
    for _ in range(20):
        mode -= jnp.linalg.solve(jax.hessian(log_density)(mode), jax.grad(log_density)(mode))
    root = jnp.linalg.cholesky(-jnp.linalg.inv(jax.hessian(log_density)(mode)))
    around = dist.MultivariateStudentT(6.0, mode, root)
    draws = around.sample(random.key(2), (100_000,))
    weights = jax.nn.softmax(jax.vmap(log_density)(draws) - around.log_prob(draws))
    mean = weights @ draws
    return {"model": model}, (X, y), lambda s: s["beta"], mean, jnp.sqrt(weights @ (draws - mean) ** 2)


def dirichlet_categorical():
    faces = dist.Categorical(jnp.array([0.1, 0.6, 0.3])).sample(random.key(1), (300,))

    def model(faces):
        p = numpyro.sample("p", dist.Dirichlet(jnp.ones(3)))
        numpyro.sample("faces", dist.Categorical(p), obs=faces)

    law = stats.dirichlet(1 + np.bincount(faces, minlength=3))
    return {"model": model}, (faces,), lambda s: s["p"], law.mean(), np.sqrt(law.var())


def rare_binomial():
    def model(n, x):
        p = numpyro.sample("p", dist.Beta(1, 1))
        numpyro.sample("x", dist.Binomial(n, probs=p), obs=x)

    n, x = 5_000_000, 3849
    # SciPy's variance of such a beta law is NaN.
    mean = (1 + x) / (2 + n)
    return {"model": model}, (n, x), lambda s: s["p"], mean, (mean * (1 - mean) / (3 + n)) ** 0.5


def improper():
    y = 1.0 + 2.0 * random.normal(random.key(1), (100,))

    def model(y):
        mean = numpyro.sample("mean", dist.Normal(0, 1).mask(False))
        sd = numpyro.sample("sd", dist.ImproperUniform(constraints.positive, (), ()))
        numpyro.sample("y", dist.Normal(mean, sd), obs=y)

    # With flat priors: Student's t for the mean, and an inverse gamma law for the variance.
    n, squares = len(y), float(((y - y.mean()) ** 2).sum())
    location = stats.t(n - 2, float(y.mean()), (squares / n / (n - 2)) ** 0.5)
    variance = stats.invgamma((n - 2) / 2, scale=squares / 2)
    means, sds = zip(*((law.mean(), law.std()) for law in (location, variance)), strict=True)
    return {"model": model}, (y,), lambda s: jnp.stack([s["mean"], s["sd"] ** 2], -1), np.array(means), np.array(sds)


CASES = (
    gaussian,
    logistic_regression,
    dirichlet_categorical,
    rare_binomial,
    improper,
)


def run(kernel, case, key):
    target, args, function, mean, sd = case()
    starts = target.pop("starts", None)
    mcmc = vectorized(kernel(**target), 400, 600, 20)
    mcmc.run(key, *args, init_params=starts)
    draws = np.asarray(jax.vmap(jax.vmap(function))(mcmc.get_samples(group_by_chain=True)))
    return draws, np.asarray(mean), np.asarray(sd)


#: Of every sampler on every case, those of `make test`.
QUICK = [(SGLD, gaussian), (SGLDR, dirichlet_categorical)]


@pytest.mark.parametrize(
    ("kernel", "case"),
    [pair if pair in QUICK else pytest.param(*pair, marks=pytest.mark.slow) for pair in product(SAMPLERS, CASES)],
)
def test_posterior(kernel, case):
    check(*run(kernel, case, random.key(2)), kernel in REPELS)


def check(draws, mean, sd, repels):
    """Means and standard deviations within their standard errors and the tolerated bias; and not those of others."""
    tolerance = BiasBudget().tolerance_for(False)
    if repels:
        dims = ("chain", "draw", "entry")[: draws.ndim]
        draws_of = xarray.Dataset({"f": (dims, draws)}, attrs={"coupling": "interaction", "num_independent": 1})
        error, error_of_sd = ensemble_mcse(draws_of)["f"], ensemble_mcse(draws_of, method="sd")["f"]
    else:
        error, error_of_sd = ensemble_mcse(draws), ensemble_mcse(draws, method="sd")
    # An unknown error allows nothing.
    error, error_of_sd = np.nan_to_num(error), np.nan_to_num(error_of_sd)
    # The budget is of variances; of means it has been seen to bound the bias in standard deviations.
    off = np.abs(draws.mean((0, 1)) - mean) - tolerance * sd
    assert (off < 4.5 * error).all()
    off_sd = np.abs(draws.std((0, 1)) - sd) - tolerance * sd
    assert (off_sd < 4.5 * error_of_sd).all()
    # The control: half a standard deviation off in the mean, or half as wide, would be seen.
    assert (0.5 * sd - off.clip(0) - tolerance * sd > 9 * error).all()
    assert (0.5 * sd - off_sd.clip(0) - tolerance * sd > 9 * error_of_sd).all()


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_the_last_cloud_of_svgd_has_its_mean_at_the_posterior(case):
    draws, mean, sd = run(SVGD, case, random.key(2))
    assert (np.abs(draws[:, -1].mean(0) - mean) < 0.3 * sd).all()
    assert (draws[:, -1].std(0) < 1.3 * sd).all()
