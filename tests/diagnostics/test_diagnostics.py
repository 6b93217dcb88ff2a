"""Effective sample sizes and nested R-hat of processes whose answers are known."""

from functools import cache, partial

import arviz
import jax
from jax import lax, random
import jax.numpy as jnp
from models import vectorized
import numpy as np
import pytest
from results import run
import xarray

import numpyro
from numpyro.diagnostics import effective_sample_size
import numpyro.distributions as dist

from numpyro_repulsion import (
    RBF,
    SGLD,
    SGLDR,
    SVGD,
    Antithetic,
    Archive,
    Balanced,
    Independent,
    Subsampled,
    ensemble_ess,
    nested_rhat,
    to_inference_data,
)
from numpyro_repulsion.diagnostics import MODES, SHORT, ensemble_mcse, mixing
from numpyro_repulsion.dynamics import Overdamped
from numpyro_repulsion.kernels.runs import coupling_of

LIMIT = 4.5
L, N, RHO, REPLICAS = 10, 500, 0.8, 300


def autoregression(key, noise, draws=N, rho=RHO):
    """Stationary AR(1) chains of unit variance, ``(L, N, replicas)``, whose noise is ``noise(key)`` of this shape."""
    return np.moveaxis(np.asarray(_autoregression(key, noise, draws, rho), np.float64), -1, 0)


@partial(jax.jit, static_argnums=(1, 2))
def _autoregression(key, noise, draws, rho):
    start_key, key = random.split(key)

    def update(x, key):
        x = rho * x + (1 - rho**2) ** 0.5 * noise(key)
        return x, x

    return lax.scan(update, noise(start_key), random.split(key, draws))[1]


@cache
def sized(noise, replicas, size):
    """The noise for so many replicas of so many particles."""
    return partial(noise, shape=(replicas, size))


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


@pytest.mark.parametrize("method", ["mean", pytest.param("bulk", marks=pytest.mark.slow)])
@pytest.mark.parametrize("noise", NOISES)
def test_interacting_particles_are_worth_what_their_mean_says(noise, method):
    x, expected = autoregression(random.key(1), noise), WORTH / NOISES[noise]
    # The truth is what the means do.
    assert abs(ratio_score(x.mean((0, 1)), 1 / expected)) < LIMIT

    def agrees(found, limit):
        # Estimated times of series as short as this are a few hundredths too short, and normal scores bend.
        error = found.std(ddof=1) / len(found) ** 0.5
        return abs(found.mean() - expected) < limit * error + 0.1 * expected

    assert agrees(ensemble_ess(x, method=method), LIMIT)
    # The control: what looks at particles one by one.
    assert noise is independent or not agrees(effective_sample_size(x), 2 * LIMIT)


@cache
def antithetic_draws():
    """Chains of SGLD on N(0, I₂) with antithetic noise, ``(run, particle, draw, coordinate)``."""
    dynamics, couple, step_size = Overdamped("lm"), Antithetic().couple, 0.1

    def energy_and_grad(z):
        return jnp.sum(z**2, -1) / 2, z

    @jax.jit
    def run(key):
        start_key, init_key, key = random.split(key, 3)
        cloud = dynamics.init(init_key, random.normal(start_key, (2 * L, 2)), energy_and_grad, couple)

        def update(cloud, key):
            cloud = dynamics.step(key, cloud, energy_and_grad, couple, step_size)
            return cloud, cloud.z

        return lax.scan(update, cloud, random.split(key, 1200))[1][200::2]

    found = jax.vmap(run)(random.split(random.key(3), 100))
    return np.asarray(found, float).swapaxes(1, 2)


@pytest.mark.parametrize(
    ("method", "estimate"), [("mean", np.mean), pytest.param("sd", np.std, marks=pytest.mark.slow)]
)
def test_errors_of_antithetic_noise_are_those_of_its_averages(method, estimate):
    runs = antithetic_draws()
    values = np.stack([estimate(x, axis=(0, 1)) for x in runs])
    errors = np.stack([ensemble_mcse(x, method=method) for x in runs])
    scores = (values - values.mean(0)) / errors
    # A tenth or two too large at this length; the root mean square of 200 scores has an error of 0.05.
    assert np.isnan(scores).mean() < 0.05
    assert 1 - LIMIT * 0.05 - 0.2 < np.sqrt(np.nanmean(scores**2)) < 1 + LIMIT * 0.05
    # The control: as if particles were independent chains.
    alone = np.stack([ensemble_mcse(x, 2 * L, method=method) for x in runs])
    assert np.sqrt(np.nanmean(((values - values.mean(0)) / alone) ** 2)) < 1 - LIMIT * 0.05 - 0.2


def scores(x, num_ensembles, method="mean"):
    """Errors in units of their standard error, NaN where there is none, of series whose mean is 0 and variance 1."""
    if method == "mean":
        return x.mean((0, 1)) / ensemble_mcse(x, num_ensembles)
    if method == "bulk":
        return x.mean((0, 1)) * ensemble_ess(x, num_ensembles) ** 0.5
    if method == "sd":
        return (x.std((0, 1)) - 1.0) / ensemble_mcse(x, num_ensembles, method="sd")
    below = (x < -1.6449).mean((0, 1)) - 0.05
    return below / (0.05 * 0.95 / ensemble_ess(x, num_ensembles, method="quantile", prob=0.05)) ** 0.5


def check_scores(found, case):
    """Standard errors are right wherever there are some; and how often there are."""
    known = found[np.isfinite(found)]
    # Draws that happen to look well mixed are rare, and few of them far off.
    assert (np.abs(known) > 4.0).sum() <= 0.01 * len(found) + 2, (case, known)
    if len(known) >= len(found) / 4:
        spread, error = (known**2).mean() ** 0.5, (0.5 / len(known)) ** 0.5
        assert 0.85 - 3.0 * error < spread < 1.25 + 3.0 * error, (case, spread, error)
    return len(known) / len(found)


#: Noise, particles, and how many groups of them are said to be independent.
GRID = [
    (noise, size, groups)
    for size in (2, 5, 20, 200)
    for noise, groups in ((independent, 1), (independent, size), (balanced, 1), (shared, 1))
]


def grid(cases, times, seed, draws=300, replicas=150, methods=("mean", "bulk")):
    share = {}
    for noise, size, groups in cases:
        for time in times:
            tau = draws / time
            count = replicas if size < 100 else replicas // 4
            x = autoregression(random.key(seed), sized(noise, count, size), draws=draws, rho=(tau - 1) / (tau + 1))
            for method in methods:
                case = (noise.__name__, size, groups, time, method)
                share[case] = check_scores(scores(x, groups, method), case)
    return share


def test_standard_errors_are_right_wherever_there_are_some():
    """From a tenth of an autocorrelation time in the run to a hundred."""
    share = grid([case for case in GRID if case[1] in (2, 20)], (0.1, 6.7, 100.0), 0, replicas=120, methods=["mean"])
    for (_, size, groups, time, _), found in share.items():
        if time <= 1.0:
            assert found < 0.03
        if time >= (6.7 if groups == 20 else 40.0):
            assert found > 0.5, (size, groups, time, found)


@pytest.mark.slow
@pytest.mark.parametrize("case", GRID, ids=lambda case: f"{case[0].__name__} {case[1]} {case[2]}")
def test_standard_errors_are_right_wherever_there_are_some_in_full(case):
    grid([case], (0.1, 0.3, 1.0, 3.0, 5.0, 6.7, 10.0, 20.0, 50.0, 100.0), 1, draws=400, replicas=400)


@pytest.mark.slow
@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("method", ["sd", "quantile"])
def test_standard_errors_of_spread_and_quantiles(noise, method):
    for size in (5, 20):
        share = grid([(noise, size, 1)], (0.1, 1.0, 6.7, 15.0, 40.0, 100.0), 3, 400, 400, [method])
        assert share[noise.__name__, size, 1, 100.0, method] > 0.9


def repelling(groups, size, draws, dim, bandwidth, step_size, num_steps):
    """Draws of a normal distribution, ``(size, draws, repeats)``: ensembles and coordinates repeat each other."""
    kernel = SGLDR(potential_fn=lambda z: jnp.sum(z**2) / 2, step_size=step_size, interaction=RBF(bandwidth),
                   num_ensembles=groups, num_steps=num_steps)  # fmt: skip
    starts = random.normal(random.key(0), (groups * size, dim))
    mcmc = run(kernel, key=1, num_samples=draws, num_chains=groups * size, init_params=starts)
    x = np.asarray(mcmc.get_samples(group_by_chain=True), float).reshape(groups, size, draws, dim)
    return np.moveaxis(x, 0, 2).reshape(size, draws, -1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "size, bandwidth, step_size, num_steps",
    # With the first, particles hardly get about, and their average does.
    [(20, 3.0, 0.02, 10), (20, 1.5, 0.05, 10), (5, 1.5, 0.1, 5), (20, 1.5, 0.05, 1), (50, 1.0, 0.02, 5)],
)
def test_standard_errors_of_particles_that_repel(size, bandwidth, step_size, num_steps):
    x = repelling(60, size, 300, 2, bandwidth, step_size, num_steps)
    share = check_scores(scores(x, 1), "mean")
    check_scores(scores(x, 1, "bulk"), "bulk")
    if num_steps > 1:
        if size == 50 and share <= 0.5:
            # Fifty particles keep each other in their places, and no figure is given for most averages.
            pytest.xfail(f"of the errors of averages over 50 particles that repel {share:.0%} are known, 50% wanted")
        assert share > 0.5
        # Far better than as many independent particles.
        assert np.nanmedian(ensemble_ess(x)) > 1.5 * np.median(effective_sample_size(x))


def test_an_average_may_be_known_of_particles_that_keep_their_order():
    """On a line particles that repel each other hardly change places; what is known of the coupling decides."""
    x = repelling(40, 20, 400, 1, 0.7, 0.01, 10)

    def errors(x):
        attributes = {"coupling": "interaction", "num_independent": 1}
        return ensemble_mcse(xarray.Dataset({"x": (("chain", "draw", "repeat"), x)}, attrs=attributes))["x"]

    found = x.mean((0, 1)) / errors(x)
    assert check_scores(found, "on a line") > 0.6 > 2 * np.isfinite(ensemble_mcse(x)).mean()
    # Modes are seen as before: within them the average varies too little.
    assert np.isnan(errors(x + 4.0 * (np.arange(20) % 2)[:, None, None])).all()


def test_well_mixed_particles_keep_their_figures():
    x = autoregression(random.key(5), sized(independent, 50, 20), draws=1000, rho=0.5)
    found, usual = ensemble_ess(x), effective_sample_size(x)
    assert np.isfinite(found).all() and 0.85 < np.median(found / usual) < 1.1
    found = ensemble_ess(x, 20)
    assert 0.93 < np.median(found / usual) < 1.07


def test_nothing_is_known_of_particles_in_separate_modes():
    key, side_key = random.split(random.key(0))
    within = 0.1 * np.asarray(random.normal(key, (20, 500, 10)), float)
    apart = within + np.asarray(random.rademacher(side_key, (20, 1, 10)), float)
    for groups in (1, 20):
        for method in ("mean", "bulk", "tail", "sd"):
            assert np.isnan(ensemble_ess(apart, groups, method=method)).all()
        assert (mixing(apart, groups, with_errors=False)["reason"] == MODES).all()
    # One stray among twenty is enough; and modes that overlap, where R-hat is 1.04.
    stray = within + 0.4 * (np.arange(20) == 3)[:, None, None]
    near = within + 0.03 * (apart - within)
    for x in (stray, near):
        assert (mixing(x, with_errors=False)["reason"] == MODES).all()
    assert (mixing(within, with_errors=False)["reason"] == 0).all()
    # Particles that change sides now and then are just slow.
    walk = np.asarray(random.normal(key, (20, 100, 10)), float).cumsum(1)
    assert (mixing(walk, with_errors=False)["reason"] == SHORT).all()


def test_what_rests_on_few_events_is_not_known():
    x = np.zeros((10, 500, 2))
    x[2, 100:120, 0] = 1.0  # one visit
    x[..., 1] = random.cauchy(random.key(0), (10, 500))  # whose mean does not exist
    assert np.isnan(ensemble_mcse(x)).all()
    found = ensemble_ess(x)
    assert np.isnan(found[0]) and found[1] > 3000


def test_an_average_that_never_moves_is_not_known():
    x = np.asarray(random.normal(random.key(0), (10, 500)), float)
    assert np.isnan(ensemble_mcse(x - x.mean(0)))


def test_ensembles_add_up():
    x = np.concatenate([autoregression(random.key(seed), shared) for seed in (3, 4)])
    one, two = np.nanmean(ensemble_ess(x[:L], method="mean")), ensemble_ess(x, 2, method="mean").mean()
    assert 1.8 < two / one < 2.2
    # As one ensemble of independent parts they are worth the same.
    assert 0.9 < np.nanmean(ensemble_ess(x, 1, method="mean")) / two < 1.1


def test_quantiles_and_deviations():
    x = np.asarray(random.normal(random.key(0), (L, N, 50)), float)
    for kwargs in ({"method": "sd"}, {"method": "quantile", "prob": 0.3}):
        found = ensemble_ess(x, **kwargs)
        assert 0.85 < found.mean() / (L * N) < 1.1
    assert (ensemble_ess(x, method="tail") <= ensemble_ess(x, method="quantile", prob=0.05) + 1e-6).all()


def test_opposed_series_have_a_finite_worth():
    x = np.where(np.arange(100) % 2, 1.0, -1.0) + 0.01 * np.asarray(random.normal(random.key(0), (4, 100)))
    assert 100 < ensemble_ess(x, method="mean") < np.inf


@pytest.mark.parametrize("value", [0.0, 0.1, 1e30, np.inf, -np.inf])
def test_what_does_not_vary_has_no_worth(value):
    x = np.full((4, 100, 2), value)
    x[..., 1] = np.asarray(random.normal(random.key(0), (4, 100)))
    found = ensemble_ess(x)
    assert np.isnan(found[0]) and found[1] > 100
    x[0, 0, 1] = np.nan
    assert np.isnan(ensemble_ess(x)).all() and np.isnan(ensemble_mcse(x, method="sd")).all()
    x[0, 0, 1] = np.inf
    assert np.isnan(ensemble_ess(x)).all() and np.isnan(nested_rhat(x, 2)).all()


def test_nested_rhat_sees_ensembles_apart():
    x = np.asarray(random.normal(random.key(0), (20, 100, 100)), float)
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


def test_rhat_is_that_of_arviz():
    x = np.asarray(random.normal(random.key(0), (8, 101, 3)), float) + np.repeat([0.0, 0.3, 0.1, 0.0], 2)[:, None, None]
    x[..., 1], x[0, 0, 2] = np.round(x[..., 1]), np.nan
    for draws in (x, x[:, :100]):
        expected = [float(arviz.rhat(draws[..., k])) for k in range(3)]
        np.testing.assert_allclose(mixing(draws)["r_hat"], expected, rtol=1e-9)
    assert np.isnan(mixing(x[:1])["r_hat"]).all() and np.isfinite(mixing(x[:1])["ess_mean"][0])


def test_nested_rhat_is_that_of_arviz():
    stats = pytest.importorskip("arviz_stats", reason="ArviZ 0.x has none")
    x = np.asarray(random.normal(random.key(0), (8, 101)), float) + np.repeat([0.0, 0.3, 0.1, 0.0], 2)[:, None]
    for method in ("rank", "identity"):
        expected = stats.rhat_nested(x, superchain_ids=np.repeat(np.arange(4), 2), method=method)
        np.testing.assert_allclose(nested_rhat(x, 4, method=method), expected, rtol=1e-5)


def test_inference_data_is_read(mcmc):
    data = to_inference_data(mcmc)
    found = ensemble_ess(data)
    draws = np.asarray(mcmc.get_samples(group_by_chain=True)["z"])
    np.testing.assert_allclose(found["z"], ensemble_ess(draws, 2), rtol=1e-4)
    assert nested_rhat(data)["z"].shape == (2,)
    assert not np.allclose(found["z"], ensemble_ess(draws, 1))
    assert data.posterior.attrs["coupling"] == "noise" and data.posterior.attrs["num_independent"] == 2
    data.posterior.attrs["num_independent"] = 1
    np.testing.assert_allclose(ensemble_ess(data)["z"], ensemble_ess(draws, 1), rtol=1e-4)
    assert nested_rhat(data)["z"].shape == (2,)
    # Fewer chains of independent particles are independent too.
    data.posterior.attrs["coupling"] = "none"
    assert ensemble_ess(data.posterior.isel(chain=slice(3)))["z"].shape == (2,)


def test_data_say_whether_particles_are_independent(mcmc):
    def coupling(kernel, chains=4):
        other = vectorized(kernel, 0, 5, chains)
        other._last_state, other._args, other._kwargs = mcmc.last_state, (), {}
        return coupling_of(other)

    def rows():
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with numpyro.plate("rows", 20, subsample_size=5) as i:
            numpyro.sample("y", dist.Normal(mu, 1), obs=jnp.arange(20.0)[i])

    given = {"potential_fn": lambda z: jnp.sum(z**2) / 2, "step_size": 0.1}
    free = Independent()
    assert coupling(SGLD(**given)) == ("noise", 1)
    assert coupling(SGLD(**given, interaction=free)) == ("none", 4)
    assert coupling(SGLD(**given, interaction=free, num_ensembles=2)) == ("none", 4)
    assert coupling(SGLDR(**given, num_ensembles=2)) == ("interaction", 2)
    assert coupling(SGLDR(**given, num_ensembles=2, interaction=Balanced(RBF()))) == ("interaction", 1)
    assert coupling(SGLD(**given), 1) == ("none", 1)
    assert coupling(SGLD(**given, interaction=free, moves=Archive())) == ("moves", 1)
    for shared, expected in ((False, ("none", 4)), (True, ("minibatches", 2))):
        kernel = SGLD(rows, step_size=1e-3, interaction=free, gradient=Subsampled(shared=shared), num_ensembles=2)
        assert coupling(kernel) == expected


def test_an_optimizer_has_no_worth(pretended):
    data = to_inference_data(pretended(lambda: numpyro.sample("z", dist.Normal(0, 1)), kernel=SVGD))
    for function in (ensemble_ess, ensemble_mcse, nested_rhat):
        with pytest.raises(ValueError, match="SVGD is an optimizer"):
            function(data)


@pytest.fixture(scope="module")
def mcmc():
    from benchmarks.problems.targets import gaussian

    return run(SGLD(gaussian, step_size=0.3, num_ensembles=2), num_warmup=10, num_samples=100, num_chains=8)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x: ensemble_ess(x, method="best"), "`method` must be one of"),
        (lambda x: ensemble_ess(x, method="quantile"), "`prob` must be between 0 and 1 for method"),
        (lambda x: ensemble_ess(x, prob=0.5), "`prob` must be between 0 and 1 for method"),
        (lambda x: ensemble_ess(x, 3), "must divide the number of chains"),
        (lambda x: ensemble_ess(x[:, :3]), "four draws or more"),
        (lambda x: nested_rhat(x), "two or more; got one"),
        (lambda x: nested_rhat(x, 2, method="best"), "`method` must be 'rank' or 'identity'"),
    ],
)
def test_bad_input_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call(np.asarray(random.normal(random.key(0), (4, 10))))
