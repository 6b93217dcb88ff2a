"""Scores of draws: NumPyro's own gradients. Discrepancies: sums by autodiff. Means with control variates: unbiased, far
more precise, with errors that are right; and not with wrong scores."""

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import pytest
from results import run

import numpyro
import numpyro.distributions as dist
from numpyro.infer.util import potential_energy

from numpyro_repulsion import SGLD, SVGD, Independent, Subsampled, ksd, stein_control_variates
from numpyro_repulsion.diagnostics import scores
from numpyro_repulsion.diagnostics.stein import _degree, _residuals, _variates

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


@pytest.mark.parametrize("degree", ["quadratic", "squares", "linear"])
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


def logistic(x, y, size=50):
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([2]).to_event(1))
    scale = numpyro.sample("scale", dist.LogNormal(0, 0.5))
    numpyro.deterministic("odds", jnp.exp(beta[0]))
    with numpyro.plate("rows", len(y), subsample_size=size) as i:
        numpyro.sample("y", dist.Bernoulli(logits=x[i] @ beta + jnp.log(scale)), obs=y[i])


@pytest.fixture(scope="module")
def mcmc():
    return run(SGLD(logistic, interaction=Independent()), X, Y, key=2, num_samples=400, num_chains=8, num_warmup=200)


def test_a_run(mcmc):
    found = stein_control_variates(mcmc, num_draws=3200)
    assert found.degree == "quadratic" and found.num_draws == 3200
    assert set(found.mean) == {"beta", "scale", "odds"} and found.mean["beta"].shape == (2,)
    for name in found.mean:
        error = np.hypot(found.mcse[name], found.plain_mcse[name])
        assert (np.abs(found.mean[name] - found.plain_mean[name]) < 4 * error).all(), name
        assert (found.mcse[name] < found.plain_mcse[name] / 2).all(), name


def test_a_function_of_draws(mcmc):
    found = stein_control_variates(mcmc, lambda draw: (draw["beta"] ** 2, {"first": draw["beta"][0]}), degree="squares")
    squares, first = found.mean
    assert squares.shape == (2,) and first["first"].shape == () and found.degree == "squares"
    whole = stein_control_variates(mcmc, degree="squares")
    np.testing.assert_allclose(first["first"], whole.mean["beta"][0], rtol=1e-6)


def test_gradients_of_minibatches_leave_less_to_gain(mcmc):
    exact = stein_control_variates(mcmc)
    noisy = stein_control_variates(mcmc, gradient=Subsampled(), rng_key=random.key(5))
    assert (exact.mcse["beta"] < noisy.mcse["beta"]).all()
    error = np.hypot(exact.mcse["beta"], noisy.mcse["beta"])
    assert (np.abs(exact.mean["beta"] - noisy.mean["beta"]) < 4 * error).all()


def test_scores_are_gradients_of_the_full_potential(mcmc):
    z, found = scores(mcmc, num_draws=400)

    def energy(flat):
        return potential_energy(logistic, (X, Y, None), {}, {"beta": flat[:2], "scale": flat[2]})

    np.testing.assert_allclose(found, -jax.jit(jax.vmap(jax.grad(energy)))(z), rtol=2e-3, atol=2e-3)
    # The last draw is the last particle's last.
    last = mcmc.last_state.z
    np.testing.assert_allclose(z[-1], [*last["beta"][-1], last["scale"][-1]], rtol=1e-4, atol=1e-5)
    # Those of minibatches scatter about them.
    _, noisy = scores(mcmc, num_draws=400, gradient=Subsampled(), rng_key=random.key(3))
    difference = np.asarray(noisy - found, np.float64)
    error = difference.std(0) / 20
    assert error.min() > 0 and np.abs(difference.mean(0) / error).max() < 4.5


def test_scores_of_an_optimizer_are_those_of_its_last_cloud():
    mcmc = run(SVGD(potential_fn=lambda z: jnp.sum(z**2) / 2, step_size=0.1), num_samples=5)
    z, found = scores(mcmc)
    np.testing.assert_allclose(z, mcmc.last_state.z, rtol=1e-6)
    np.testing.assert_allclose(found, -z, rtol=1e-6)


@pytest.mark.parametrize("exponent", [-0.5, -0.3])
def test_stein_discrepancy_is_the_sum_by_autodiff(exponent):
    x, s = random.normal(random.key(0), (2, 7, 3))
    c = jnp.array([0.5, 1.0, 2.0])

    def k(a, b):
        return (1 + jnp.sum(((a - b) / c) ** 2)) ** exponent

    @jax.jit
    def stein(a, sa, b, sb):
        mixed = jax.jacfwd(jax.grad(k, 0), 1)(a, b)
        # The distribution in units of c: what is a gradient there is c times the one here.
        return (
            jnp.sum(c**2 * sa * sb) * k(a, b)
            + jnp.sum(c**2 * sa * jax.grad(k, 1)(a, b))
            + jnp.sum(c**2 * sb * jax.grad(k, 0)(a, b))
            + jnp.sum(c**2 * jnp.diag(mixed))
        )

    expected = np.mean([[stein(a, sa, b, sb) for b, sb in zip(x, s, strict=True)] for a, sa in zip(x, s, strict=True)])
    np.testing.assert_allclose(ksd(x, s, scale=c, exponent=exponent) ** 2, expected, rtol=1e-4)


@pytest.mark.slow
def test_stein_discrepancy_falls_for_exact_draws_and_not_for_others():
    def of(size, spread, seed):
        x = spread * random.normal(random.key(seed), (size, 2))
        return float(ksd(x, -x))

    exact = [np.mean([of(size, 1.0, seed) for seed in range(8)]) for size in (50, 800)]
    assert 3.2 < exact[0] / exact[1] < 4.8  # the root of 16, and 8 seeds
    assert np.mean([of(800, 1.2, seed) for seed in range(4)]) > 2 * exact[1]


def test_misuse_is_refused(mcmc, pretended):
    for function in (scores, stein_control_variates):
        with pytest.raises(ValueError, match="`num_draws` must be an integer, 1 or more; got 0"):
            function(mcmc, num_draws=0)
        with pytest.raises(TypeError, match="such as FullData.. or Subsampled..; got 'full'"):
            function(mcmc, gradient="full")
        short = pretended(logistic, X, Y)
        del short._states["z"]["scale"]
        with pytest.raises(ValueError, match="all latent sites, and .'scale'. are missing"):
            function(short)
    with pytest.raises(ValueError, match="'quadratic', 'squares', 'linear' or None; got 'cubic'"):
        stein_control_variates(mcmc, degree="cubic")
    x = np.asarray(random.normal(random.key(0), (4, 10)))
    for call, words in (
        (lambda: ksd(x, x[:, :3]), r"must both be of shape \(n, d\)"),
        (lambda: ksd(x, x, exponent=0.5), "`exponent` must lie"),
        (lambda: ksd(x[:0], x[:0]), "one draw or more"),
        (lambda: ksd(x, x, scale=np.ones((4, 1))), "`scale` must be above 0"),
        (lambda: ksd(x, x, scale=0.0), "`scale` must be above 0"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
