"""Means with control variates: unbiased, far more precise, with errors that are right; and not with wrong scores."""

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import pytest
from results import run as ran

import numpyro
import numpyro.distributions as dist

from numpyro_repulsion import SGHMC, SGLD, Independent, Subsampled, stein_control_variates
from numpyro_repulsion.diagnostics.stein import DEGREES, _degree, _residuals, _variates

RNG = np.random.default_rng(0)
#: z1 is the logarithm of a Gamma(5) variable, z2 normal with mean z1^2 / 4: skewed and curved.
REPEATS, COUNT = 300, 400


def exact(rng):
    """Draws and scores of that distribution, in two chains."""
    x = rng.gamma(5.0, size=COUNT)
    first = np.log(x)
    second = first**2 / 4 + rng.normal(size=COUNT)
    off = second - first**2 / 4
    return np.stack([first, second], 1), np.stack([5.0 - x + off * first / 2, -off], 1)


def functions(z):
    return np.stack([np.exp(z[:, 0]), np.exp(2 * z[:, 0]), z[:, 1]], 1)


#: Their means; the last is E[z1^2] / 4, with the variance and the mean of the logarithm of a Gamma(5) variable.
TRUE = np.array([5.0, 30.0, (0.2213229557 + 1.5061176684**2) / 4])


@pytest.mark.parametrize("degree", DEGREES)
def test_means_are_unbiased_and_more_precise(degree):
    controlled, plain, errors = [], [], []
    for seed in range(REPEATS):
        z, score = exact(np.random.default_rng(seed))
        found = _residuals(functions(z), _variates(z, score, degree), (2, COUNT // 2))
        controlled.append(found.mean(0))
        errors.append(found.std(0) / COUNT**0.5)
        plain.append(functions(z).mean(0))
    error = np.std(controlled, 0)
    assert (np.abs(np.mean(controlled, 0) - TRUE) < 4 * error / REPEATS**0.5).all()
    # What the residuals say of the error is right, within that of two spreads of so many repeats and of the tails.
    assert (np.abs(np.sqrt(np.mean(np.square(errors), 0)) / error - 1) < 0.25).all()
    gain = np.var(plain, 0) / np.var(controlled, 0)
    assert (gain > {"linear": 2.0, "squares": 3.0, "quadratic": 5.0}[degree]).all(), gain


def test_wrong_scores_show():
    """The control: gradients of another posterior."""
    means = []
    for seed in range(REPEATS):
        z, score = exact(np.random.default_rng(seed))
        wrong = score + np.array([0.5, 0.0])
        means.append(_residuals(functions(z), _variates(z, wrong, "quadratic"), (2, COUNT // 2)).mean(0))
    assert (np.abs(np.mean(means, 0) - TRUE) > 8 * np.std(means, 0) / REPEATS**0.5).any()


def test_means_and_squares_of_a_gaussian_are_exact():
    """Whatever the draws, as long as there are enough."""
    covariance = np.array([[2.0, 0.9], [0.9, 0.5]])
    mean = np.array([10.0, -3.0])
    z = mean + 3.0 * RNG.standard_t(4, size=(60, 2))
    score = -(z - mean) @ np.linalg.inv(covariance)
    values = np.stack([z[:, 0], z[:, 1], z[:, 0] ** 2, z[:, 0] * z[:, 1]], 1)
    found = _residuals(values, _variates(z, score, "quadratic"), (3, 20)).mean(0)
    np.testing.assert_allclose(found, [10.0, -3.0, 102.0, -30.0 + 0.9], rtol=1e-9)
    linear = _residuals(values, _variates(z, score, "linear"), (3, 20)).mean(0)
    np.testing.assert_allclose(linear[:2], mean, rtol=1e-9)
    assert abs(linear[2] - 102) > 0.1


def test_coefficients_are_those_of_the_other_half():
    z, score = exact(RNG)
    variates = _variates(z, score, "linear")
    values = functions(z)[:, :1]
    found = _residuals(values, variates, (2, COUNT // 2))
    half = np.tile(np.arange(COUNT // 2) < COUNT // 4, 2)
    changed = values.copy()
    changed[half] *= 2
    again = _residuals(changed, variates, (2, COUNT // 2))
    np.testing.assert_allclose(again[half] - changed[half], found[half] - values[half])
    assert np.abs((again - changed)[~half] - (found - values)[~half]).max() > 0.1


def test_as_many_coefficients_as_draws_allow():
    assert _degree(None, 8 * 20, 5) == "quadratic"
    assert _degree(None, 8 * 20 - 1, 5) == "squares"
    assert _degree(None, 8 * 10 - 1, 5) == "linear"
    assert _degree("linear", 1000, 5) == "linear"
    for degree in (None, "quadratic"):
        with pytest.raises(ValueError, match="too few for .* coefficients"):
            _degree(degree, 39, 5)


X = random.normal(random.key(0), (400, 2))
Y = random.bernoulli(random.key(1), jax.nn.sigmoid(X @ jnp.array([1.0, -0.5]))).astype(int)


def logistic(x, y):
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([2]).to_event(1))
    scale = numpyro.sample("scale", dist.LogNormal(0, 0.5))
    numpyro.deterministic("odds", jnp.exp(beta[0]))
    with numpyro.plate("rows", len(y), subsample_size=50) as i:
        numpyro.sample("y", dist.Bernoulli(logits=x[i] @ beta * scale), obs=y[i])


def run(kernel, num_samples=200, num_warmup=200, **given):
    return ran(kernel, X, Y, key=2, num_samples=num_samples, num_chains=8, num_warmup=num_warmup, **given)


@pytest.fixture(scope="module")
def mcmc():
    return run(SGLD(logistic, interaction=Independent()), num_samples=400)


def test_a_run(mcmc):
    found = stein_control_variates(mcmc, num_draws=3200)
    assert found.degree == "quadratic" and found.num_draws == 3200
    assert set(found.mean) == {"beta", "scale", "odds"} and found.mean["beta"].shape == (2,)
    for name in found.mean:
        error = np.hypot(found.mcse[name], found.plain_mcse[name])
        assert (np.abs(found.mean[name] - found.plain_mean[name]) < 4 * error).all(), name
        assert (found.mcse[name] < found.plain_mcse[name] / 2).all(), name
    fewer = stein_control_variates(mcmc, num_draws=400)
    assert fewer.num_draws == 400
    error = np.hypot(fewer.mcse["beta"], found.mcse["beta"])
    assert (np.abs(fewer.mean["beta"] - found.mean["beta"]) < 4 * error).all()


def test_a_function_of_draws(mcmc):
    found = stein_control_variates(mcmc, lambda draw: (draw["beta"] ** 2, {"first": draw["beta"][0]}), degree="squares")
    squares, first = found.mean
    assert squares.shape == (2,) and first["first"].shape == () and found.degree == "squares"
    whole = stein_control_variates(mcmc, degree="squares")
    np.testing.assert_allclose(first["first"], whole.mean["beta"][0], rtol=1e-6)


def test_gradients_of_minibatches_leave_less_to_gain(mcmc):
    exact, noisy = (
        stein_control_variates(mcmc),
        stein_control_variates(mcmc, gradient=Subsampled(), rng_key=random.key(5)),
    )
    assert (exact.mcse["beta"] < noisy.mcse["beta"]).all()
    error = np.hypot(exact.mcse["beta"], noisy.mcse["beta"])
    assert (np.abs(exact.mean["beta"] - noisy.mean["beta"]) < 4 * error).all()


def test_what_has_no_means(mcmc):
    with pytest.raises(ValueError, match="'quadratic', 'squares', 'linear' or None; got 'cubic'"):
        stein_control_variates(mcmc, degree="cubic")
    with pytest.raises(TypeError, match="FullData"):
        stein_control_variates(mcmc, gradient="all")
    with pytest.raises(ValueError, match="num_draws"):
        stein_control_variates(mcmc, num_draws=0)
    with pytest.raises(ValueError, match="too few"):
        stein_control_variates(mcmc, num_draws=8, degree="quadratic")
    with pytest.raises(ValueError, match="'scale'.*missing"):
        stein_control_variates(run(SGHMC(logistic, step_size=0.01), 20, 0, extra_fields=("~z.scale",)))
