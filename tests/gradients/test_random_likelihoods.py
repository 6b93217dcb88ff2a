"""Likelihoods that are estimates, `numpyro.prng_key()`, on a state-space model whose posterior is known.

x_t = a x_{t−1} + 0.5 ε_t, y_t = x_t + 0.7 η_t, with unknown a ~ N(0, 0.5²). The Kalman filter has the likelihood.
"""

import jax
from jax import lax, random
import jax.numpy as jnp
import numpy as np
import pytest
from results import run

import numpyro
from numpyro.contrib.control_flow import scan
import numpyro.distributions as dist

from numpyro_repulsion import SGLD, SGLDR, BiasBudget, ControlVariates, ensemble_mcse
from numpyro_repulsion.gradients import ModelTarget

STEP, NOISE, PRIOR = 0.5, 0.7, 0.5


def series(length=25):
    rng = np.random.default_rng(3)
    x, found = 0.0, []
    for _ in range(length):
        x = 0.7 * x + STEP * rng.normal()
        found.append(x + NOISE * rng.normal())
    return np.array(found, np.float32)


Y = series()


def kalman(a):
    def step(carry, y):
        mean, variance = a * carry[0], a**2 * carry[1] + STEP**2
        total = variance + NOISE**2
        gain = variance / total
        density = dist.Normal(mean, jnp.sqrt(total)).log_prob(y)
        return (mean + gain * (y - mean), (1 - gain) * variance), density

    return lax.scan(step, (0.0, 1.0), Y)[1].sum()


def ensemble_kalman(a, key, size):
    """The filter with perturbed observations; its noise is a function of parameters and standard normals."""
    first, key = random.split(key)

    def step(x, at):
        y, key = at
        move, observe = random.split(key)
        x = a * x + STEP * random.normal(move, x.shape)
        variance = x.var(ddof=1)
        total = variance + NOISE**2
        density = dist.Normal(x.mean(), jnp.sqrt(total)).log_prob(y)
        return x + variance / total * (y + NOISE * random.normal(observe, x.shape) - x), density

    return lax.scan(step, random.normal(first, (size,)), (Y, random.split(key, len(Y))))[1].sum()


def model(fixed=None, size=16):
    a = numpyro.sample("a", dist.Normal(0, PRIOR))
    key = numpyro.prng_key() if fixed is None else random.key(fixed)
    numpyro.factor("likelihood", ensemble_kalman(a, key, size))


def moments(log_density):
    """Mean and standard deviation of the posterior with a log likelihood, on a grid."""
    grid = jnp.linspace(-1.2, 1.2, 61)
    density = jnp.exp(jax.nn.log_softmax(lax.map(log_density, grid) + dist.Normal(0, PRIOR).log_prob(grid)))
    mean = (density * grid).sum()
    return float(mean), float(jnp.sqrt((density * (grid - mean) ** 2).sum()))


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "size"), [(SGLDR, 16), (SGLD, 128)])
def test_posterior_with_an_ensemble_kalman_filter(kernel, size):
    # With fresh randomness in every update the stationary law has the *average of the logarithm* of the estimate.
    keys = random.split(random.key(1), 4000)
    mean, sd = moments(jax.jit(lambda a: jax.vmap(lambda key: ensemble_kalman(a, key, size))(keys).mean()))

    def figures(*fixed):
        mcmc = run(kernel(model), *fixed, num_warmup=400, num_samples=2000, num_chains=20, size=size)
        draws = mcmc.get_samples(group_by_chain=True)["a"]
        return float(draws.mean()), float(draws.std()), ensemble_mcse(draws), ensemble_mcse(draws, method="sd")

    tolerance = BiasBudget().tolerance_for(False)
    found, spread, error, error_of_spread = figures()
    # The law itself has the error of its 4000 keys, 1.4 / sqrt(4000) in the gradient at 16 members.
    known = 1.4 * (16 / size) ** 0.5 / len(keys) ** 0.5 * sd**2
    assert abs(found - mean) < 4.5 * (error**2 + known**2) ** 0.5 + tolerance / 2 * sd
    assert abs(spread / sd - 1) < 4.5 * error_of_spread / sd + tolerance
    exact_mean, exact_sd = moments(kalman)
    if size == 128:
        # So many members leave a bias below a hundredth of a standard deviation.
        assert abs(mean - exact_mean) < 0.02 * exact_sd
        assert abs(found - exact_mean) < 4.5 * error + (tolerance / 2 + 0.02) * exact_sd
    else:
        # The control: the same key in every update gives the posterior of one draw of the noise.
        frozen, _, error, _ = figures(0)
        assert abs(frozen - mean) > 9 * (error**2 + known**2) ** 0.5 + tolerance / 2 * sd


def test_keys_inside_scan_make_the_likelihood_random():
    def body(x, y):
        noise = random.normal(numpyro.prng_key())
        numpyro.factor("f", -((y - x + noise) ** 2))
        return x, None

    def scanned():
        x = numpyro.sample("x", dist.Normal(0, 1))
        scan(body, x, jnp.asarray(Y))
        with numpyro.plate("rows", len(Y), subsample_size=5) as i:
            numpyro.sample("y", dist.Normal(x, 1), obs=jnp.asarray(Y)[i])

    assert ModelTarget(scanned).is_random and ModelTarget(model).is_random
    assert not ModelTarget(model, (0,)).is_random
    keys = random.split(random.key(0), 4)
    with pytest.raises(ValueError, match="likelihood of this model is random"):
        SGLDR(scanned, gradient=ControlVariates(), step_size=0.01).init(keys, 0, None, (), {})


def test_subsampled_plates_inside_scan_are_refused():
    def body(x, y):
        with numpyro.plate("rows", 6, subsample_size=2) as i:
            numpyro.sample("y", dist.Normal(x, 1), obs=y[i])
        return x, None

    def scanned():
        scan(body, numpyro.sample("x", dist.Normal(0, 1)), jnp.ones((3, 6)))

    with pytest.raises(ValueError, match=r"\['rows'\] lies inside `scan` or `cond`.*drop its `subsample_size`"):
        ModelTarget(scanned)


def test_keys_of_rows():
    """Each row takes its own of many keys, an index that the search for those beyond the end must leave alone."""

    def model(y):
        mean = numpyro.sample("mean", dist.Normal(0, 1))
        keys = random.split(numpyro.prng_key(), len(y))
        with numpyro.plate("rows", len(y), subsample_size=5) as i:
            numpyro.sample("y", dist.Normal(mean + jax.vmap(random.normal)(keys[i]), 1), obs=y[i])

    assert ModelTarget(model, (jnp.zeros(30),)).is_random
