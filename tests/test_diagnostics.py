"""Effective sample sizes, nested R-hat and Stein discrepancies of processes whose answers are known."""

import jax
from jax import lax, random
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro.diagnostics import effective_sample_size

from numpyro_repulsion import SGLD, ensemble_ess, ksd, nested_rhat, to_inference_data
from numpyro_repulsion.diagnostics import ensemble_mcse

LIMIT = 4.5
L, N, RHO, REPLICAS = 10, 500, 0.8, 300


def autoregression(key, noise, shape=(REPLICAS, L), draws=N, rho=RHO):
    """Stationary AR(1) chains of unit variance, ``(L, N, replicas)``, whose noise is ``noise(key)`` of this shape."""
    start_key, key = random.split(key)

    def update(x, key):
        x = rho * x + (1 - rho**2) ** 0.5 * noise(key)
        return x, x

    _, x = lax.scan(update, noise(start_key), random.split(key, draws))
    return np.moveaxis(np.asarray(x, np.float64), -1, 0)


def independent(key, shape=(REPLICAS, L)):
    return random.normal(key, shape)


def balanced(key, shape=(REPLICAS, L)):
    """Nine tenths of the noise balanced over particles."""
    own, rest = random.split(key)
    x = random.normal(own, shape)
    x = (shape[1] / (shape[1] - 1)) ** 0.5 * (x - x.mean(1, keepdims=True))
    return 0.9**0.5 * x + 0.1**0.5 * random.normal(rest, shape)


def shared(key, shape=(REPLICAS, L)):
    """Half of the noise common to all particles."""
    own, common = random.split(key)
    return 0.5**0.5 * (random.normal(own, shape) + random.normal(common, (shape[0], 1)))


#: The variance of the ensemble's average, of particles of unit variance.
NOISES = {independent: 1 / L, balanced: 0.1 / L, shared: 0.5 + 0.5 / L}
#: What one series of N is worth, by the variance of its mean.
WORTH = N**2 / (N + 2 * sum((N - k) * RHO**k for k in range(1, N)))


def ratio_score(found, expected):
    """How far the replicas' variance of the overall mean is from what was said of it, in standard errors."""
    ratio = found.var(ddof=1) / expected
    return (ratio - 1) / (2 / (len(found) - 1)) ** 0.5


@pytest.mark.parametrize("noise", NOISES)
def test_the_truth_is_what_the_means_do(noise):
    x = autoregression(random.key(0), noise)
    assert abs(ratio_score(x.mean((0, 1)), NOISES[noise] / WORTH)) < LIMIT


@pytest.mark.parametrize("method", ["mean", pytest.param("bulk", marks=pytest.mark.slow)])
@pytest.mark.parametrize("noise", NOISES)
def test_interacting_particles_are_worth_what_their_mean_says(noise, method):
    found = ensemble_ess(autoregression(random.key(1), noise), method=method)
    expected = WORTH / NOISES[noise]
    # Estimated times of series as short as this are a few hundredths too short, and normal scores bend.
    error = found.std(ddof=1) / len(found) ** 0.5
    assert abs(found.mean() - expected) < LIMIT * error + 0.1 * expected, (found.mean(), expected, error)


@pytest.mark.parametrize("noise", [balanced, shared])
def test_the_sum_over_chains_is_not_it(noise):
    # The control: what looks at particles one by one.
    found = effective_sample_size(autoregression(random.key(1), noise))
    expected = WORTH / NOISES[noise]
    error = found.std(ddof=1) / len(found) ** 0.5
    assert abs(found.mean() - expected) > 2 * LIMIT * error + 0.1 * expected


@pytest.mark.slow
def test_the_standard_error_is_that_of_the_mean():
    for noise in NOISES:
        x = autoregression(random.key(2), noise)
        stated = np.mean(ensemble_mcse(x) ** 2)
        # The stated variance is a few hundredths off, as above.
        assert abs(ratio_score(x.mean((0, 1)), stated)) < LIMIT + 0.1 / (2 / (REPLICAS - 1)) ** 0.5


def test_ensembles_add_up():
    x = np.concatenate([autoregression(random.key(seed), shared) for seed in (3, 4)])
    one, two = ensemble_ess(x[:L], method="mean").mean(), ensemble_ess(x, 2, method="mean").mean()
    assert 1.8 < two / one < 2.2
    # As one ensemble of independent parts they are worth the same.
    assert 0.9 < ensemble_ess(x, 1, method="mean").mean() / two < 1.1


def test_quantiles_and_deviations():
    x = np.asarray(random.normal(random.key(0), (L, N, 200)), float)
    for kwargs in ({"method": "sd"}, {"method": "quantile", "prob": 0.3}):
        found = ensemble_ess(x, **kwargs)
        assert 0.85 < found.mean() / (L * N) < 1.1
    assert (ensemble_ess(x, method="tail") <= ensemble_ess(x, method="quantile", prob=0.05) + 1e-6).all()


def test_opposed_series_have_a_finite_worth():
    x = np.where(np.arange(100) % 2, 1.0, -1.0) + 0.01 * np.asarray(random.normal(random.key(0), (4, 100)))
    assert 100 < ensemble_ess(x, method="mean") < np.inf


def test_what_does_not_vary_has_no_worth():
    x = np.zeros((4, 100, 2))
    x[..., 1] = np.asarray(random.normal(random.key(0), (4, 100)))
    found = ensemble_ess(x)
    assert np.isnan(found[0]) and found[1] > 100
    x[0, 0, 1] = np.nan
    assert np.isnan(ensemble_ess(x)).all()


def test_nested_rhat_sees_ensembles_apart():
    x = np.asarray(random.normal(random.key(0), (20, 100, 300)), float)
    together = nested_rhat(x, 4)
    assert abs(together - 1).max() < 0.05
    apart = x + np.repeat(np.arange(4.0), 5)[:, None, None]
    # Means 0, 1, 2, 3 have the variance 5/3, and each ensemble has 1 over time.
    np.testing.assert_allclose(nested_rhat(apart, 4, method="identity"), (1 + 5 / 3) ** 0.5, rtol=0.05)
    assert (nested_rhat(apart, 4) > 1.4).all()
    # Ensembles of one mean and other widths: ranks see them, means do not.
    wider = x * np.repeat([1.0, 1.0, 1.0, 3.0], 5)[:, None, None]
    assert (nested_rhat(wider, 4) > 1.1).all() and (nested_rhat(wider, 4, method="identity") < 1.05).all()
    # Particles that never move, the same places in every ensemble: it passes, as its docstring says.
    still = np.tile(np.arange(5.0), 4)[:, None] + 1e-3 * x[..., 0]
    assert nested_rhat(still, 4) < 1.01


def test_nested_rhat_is_that_of_arviz():
    stats = pytest.importorskip("arviz_stats", reason="ArviZ 0.x has none")
    x = np.asarray(random.normal(random.key(0), (8, 101)), float) + np.repeat([0.0, 0.3, 0.1, 0.0], 2)[:, None]
    for method in ("rank", "identity"):
        expected = stats.rhat_nested(x, superchain_ids=np.repeat(np.arange(4), 2), method=method)
        np.testing.assert_allclose(nested_rhat(x, 4, method=method), expected, rtol=1e-5)


@pytest.mark.parametrize("exponent", [-0.5, -0.3])
def test_stein_discrepancy_is_the_sum_by_autodiff(exponent):
    x, s = random.normal(random.key(0), (2, 7, 3))
    c = jnp.array([0.5, 1.0, 2.0])

    def k(a, b):
        return (1 + jnp.sum(((a - b) / c) ** 2)) ** exponent

    def stein(a, sa, b, sb):
        mixed = jax.jacfwd(jax.grad(k, 0), 1)(a, b)
        # The law in units of c: what is a gradient there is c times the one here.
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


def test_inference_data_is_read(mcmc):
    data = to_inference_data(mcmc)
    found = ensemble_ess(data)
    draws = np.asarray(mcmc.get_samples(group_by_chain=True)["z"])
    np.testing.assert_allclose(found["z"], ensemble_ess(draws, 2), rtol=1e-4)
    assert nested_rhat(data)["z"].shape == (2,)
    assert not np.allclose(found["z"], ensemble_ess(draws, 1))
    data.posterior.attrs["interaction"] = "Balanced(interaction=RBF(bandwidth=1.0, nugget=0.001))"
    np.testing.assert_allclose(ensemble_ess(data)["z"], ensemble_ess(draws, 1), rtol=1e-4)
    assert nested_rhat(data)["z"].shape == (2,)


@pytest.fixture(scope="module")
def mcmc():
    from numpyro.infer import MCMC

    from numpyro_repulsion.targets import gaussian

    mcmc = MCMC(
        SGLD(gaussian, step_size=0.3, num_ensembles=2),
        num_warmup=10,
        num_samples=100,
        num_chains=8,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.key(0))
    return mcmc


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x: ensemble_ess(x, method="best"), "`method` must be one of"),
        (lambda x: ensemble_ess(x, method="quantile"), "`prob` is the probability"),
        (lambda x: ensemble_ess(x, prob=0.5), "`prob` is the probability"),
        (lambda x: ensemble_ess(x, 3), "must divide the number of chains"),
        (lambda x: ensemble_ess(x[:, :3]), "four draws or more"),
        (lambda x: nested_rhat(x), "two or more; got one"),
        (lambda x: nested_rhat(x, 2, method="best"), "`method` must be 'rank' or 'identity'"),
        (lambda x: ksd(x, x[:, :3]), r"must both be of shape \(n, d\)"),
        (lambda x: ksd(x, x, exponent=0.5), "`exponent` must lie"),
    ],
)
def test_bad_input_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call(np.asarray(random.normal(random.key(0), (4, 10))))
