"""Means extrapolated to a step of size zero, on chains with a stationary distribution in closed form."""

from collections import OrderedDict

from jax import random
import jax.numpy as jnp
import numpy as np
import pytest
from results import run as ran

import numpyro
import numpyro.distributions as dist

from numpyro_repulsion import (
    RBF,
    SGLD,
    Antithetic,
    Archive,
    Balanced,
    Cyclical,
    Independent,
    Subsampled,
    bias,
    extrapolate,
)
from numpyro_repulsion.dynamics import Overdamped
from numpyro_repulsion.interactions import RandomGroups
from numpyro_repulsion.kernels.halving import _Summed

CHAINS, SCALES = 20, jnp.array([1.0, 0.5])


def gaussian(z):
    return jnp.sum((z / SCALES) ** 2) / 2


def square(z):
    return (z / SCALES) ** 2


def run(kernel, num_samples=300, starts=None, args=(), **kwargs):
    if starts is None and kernel.model is None:
        starts = SCALES * random.normal(random.key(1), (CHAINS, 2))
    return ran(kernel, *args, num_samples=num_samples, num_chains=CHAINS, init_params=starts, **kwargs)


def euler(step_size=0.2, **settings):
    return SGLD(potential_fn=gaussian, step_size=step_size, dynamics=Overdamped("euler"), **settings)


#: The stationary variance of Euler's chain, over that of the posterior, ``1 / (1 − ελ / 2)``.
EULER = 1.0 / (1.0 - 0.2 / SCALES**2 / 2)


@pytest.mark.parametrize("interaction", [pytest.param(Independent(), marks=pytest.mark.slow), Antithetic()], ids=repr)
def test_the_bias_of_eulers_chain_is_removed(interaction):
    found = extrapolate(run(euler(interaction=interaction), num_samples=600), square, num_samples=200)
    # By half the step, Euler's bias falls to a share of this in its stiffest direction, and by about half in others.
    assert abs(found.fall - (1 / 0.8 - 1) / (1 / 0.6 - 1)) < 1e-3
    halved = 1.0 / (1.0 - 0.1 / SCALES**2 / 2)
    expected = (halved - EULER) / (1.0 - found.fall)
    z = (found.shift - expected) / found.shift_mcse
    assert np.abs(z).max() < 4, z
    assert np.abs((found.mean - (EULER + expected)) / found.mcse).max() < 4
    # The control: without extrapolation the means are far off, and the errors would show it.
    assert ((found.plain_mean - 1) / found.plain_mcse > 5).all()
    # The error is less than that of one variance by as many draws, though it is that of a difference, divided by 1 − r.
    assert (found.shift_mcse < found.plain_mcse * (600 / 200) ** 0.5).all()


def test_more_levels_remove_more():
    mcmc = run(euler(0.3), num_samples=2000)
    one, two = (extrapolate(mcmc, square, num_samples=150, levels=levels, rng_key=random.key(2)) for levels in (1, 2))
    # The share that halving for the last time leaves, in the stiffest direction.
    first, half, quarter = (1.0 / (1.0 - step / SCALES**2 / 2) for step in (0.3, 0.15, 0.075))
    for found, share in ((one, (half - 1) / (first - 1)), (two, (quarter - 1) / (half - 1))):
        assert abs(found.fall - share[1]) < 1e-3
    expected = half - first + (quarter - half) / (1 - (quarter - 1)[1] / (half - 1)[1])
    assert np.abs((two.shift - expected) / two.shift_mcse).max() < 4
    # In that direction the prediction is exact, so the posterior's variance is found.
    assert abs(expected[1] + first[1] - 1) < 1e-3
    # The control: a single level removes less in the direction for which its share is not made.
    assert ((one.shift - expected) / one.shift_mcse)[0] > 4


Y = random.normal(random.key(3), (100,))


def minibatched(y):
    mu = numpyro.sample("mu", dist.Normal(0, 0.1))
    numpyro.deterministic("twice", 2 * mu)
    with numpyro.plate("rows", 100, subsample_size=5) as i:
        numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])


@pytest.mark.slow
def test_the_bias_of_minibatches_is_removed():
    mcmc = run(SGLD(minibatched, step_size=1e-3, gradient=Subsampled()), num_warmup=100, args=(Y,))
    center = Y.sum() / 200

    def function(draw):
        return {"mean": draw["mu"], "variance": 200 * (draw["twice"] / 2 - center) ** 2}

    found = extrapolate(mcmc, function, num_samples=1500, levels=2)
    assert found.fall == 0.5  # Averaged noise itself has no bias of first order.
    assert abs(found.mean["mean"] - center) < 4 * found.mcse["mean"]
    # Noise of variance V adds ε V / (2 − ε λ), so a part of second order remains. One of 20 rows comes from each of 5
    # strata, so V is the sum of the variances of their rows' gradients, 20 times as large as those of single rows.
    noise = 20**2 * np.asarray(Y).reshape(5, 20).var(1).sum()
    full, half, quarter = (step * noise / (2 - step * 200) for step in (1e-3, 5e-4, 2.5e-4))
    expected = half - full + 2 * (quarter - half)
    error = found.shift_mcse["variance"]
    assert abs(found.shift["variance"] - expected) < 4 * error
    # The controls: no extrapolation beyond the smallest step, and the plain mean.
    assert abs(found.shift["variance"] - (quarter - full)) > 4 * error
    assert found.plain_mean["variance"] > 1 + 5 * found.plain_mcse["variance"]


def test_standard_errors_are_right():
    """Of many estimates, each in its standard error, the mean square is about 1."""
    many = 12
    kernel = SGLD(potential_fn=lambda z: jnp.sum(z**2) / 2, step_size=0.4, dynamics=Overdamped("euler"))
    mcmc = run(kernel, num_samples=20, starts=random.normal(random.key(1), (CHAINS, many)))
    expected = (1 / 0.9 - 1 / 0.8) / (1 - (1 / 0.9 - 1) / (1 / 0.8 - 1))
    estimates = [extrapolate(mcmc, lambda z: z**2, num_samples=100, rng_key=random.key(seed)) for seed in range(6)]
    z = np.array([(found.shift - expected) / found.shift_mcse for found in estimates])
    # 72 squares of about normal numbers; their errors are estimates from about 20 independent parts: a tenth more.
    spread = 4 * (2 / z.size) ** 0.5
    mean_square = np.mean(z**2)
    assert 1 - spread < mean_square < 1.1 + spread, mean_square
    # The controls: errors half as large, and twice as large.
    assert np.mean((2 * z) ** 2) > 1.1 + spread
    assert np.mean((z / 2) ** 2) < 1 - spread


def test_large_values_do_not_round():
    kernel = SGLD(potential_fn=lambda z: jnp.sum(((z - 1000.0) / 0.01) ** 2) / 2, step_size=2e-5,
                  dynamics=Overdamped("euler"))  # fmt: skip
    mcmc = run(kernel, starts=1000.0 + 0.01 * random.normal(random.key(1), (CHAINS, 2)))
    found = extrapolate(mcmc, lambda z: {"z": z, "one": jnp.ones(())}, num_samples=200)
    # Single precision knows positions near 1000 to 6e-5; no mean may be off by more than a part of that.
    assert np.abs(found.shift["z"]).max() < 2e-5
    assert found.shift["one"] == found.shift_mcse["one"] == 0.0


def test_positions_in_an_order_of_their_own():
    def energy(z):
        return (z["b"] / 2) ** 2 / 2 + z["a"] ** 2 / 2

    keys = random.split(random.key(1))
    starts = OrderedDict(b=2 * random.normal(keys[0], (CHAINS,)), a=random.normal(keys[1], (CHAINS,)))
    mcmc = run(SGLD(potential_fn=energy, step_size=0.2, dynamics=Overdamped("euler")), starts=starts)
    assert list(extrapolate(mcmc, num_samples=8).mean) == ["b", "a"]
    found = extrapolate(mcmc, lambda z: {"a": z["a"] ** 2, "b": z["b"] ** 2}, num_samples=100)
    assert abs(found.plain_mean["b"] / 4 - 1 / (1 - 0.1 / 4)) < 0.5
    assert found.shift["a"] < 0 and found.shift_mcse["a"] < found.shift_mcse["b"]


def test_thinned_draws_count_as_iterations():
    mcmc = run(euler(), num_samples=1800, thinning=10)
    by_default, given = (extrapolate(mcmc, square, num_samples=number) for number in (None, 200))
    np.testing.assert_array_equal(by_default.shift, given.shift)


@pytest.mark.parametrize("interaction", [Balanced(), RBF(bandwidth=1.0), RandomGroups(RBF(bandwidth=1.0), size=5)])
def test_the_noise_of_two_half_steps_is_that_of_one(interaction):
    u = random.normal(random.key(0), (10, 3))
    interaction = interaction.at(random.key(9), 0)
    plain, summed = interaction.couple(u), _Summed(interaction).couple(u)
    key = random.key(1)
    np.testing.assert_allclose(summed.draw(key), sum(plain.draw(k) for k in random.split(key)) / 2**0.5, atol=1e-6)


def test_all_sites_by_default_and_only_those_of_the_run():
    mcmc = run(SGLD(minibatched, step_size=1e-3), args=(Y,), num_samples=40)
    found = extrapolate(mcmc)
    assert set(found.mean) == {"mu", "twice"} and found.step_size == pytest.approx(1e-3)
    np.testing.assert_allclose(found.shift["twice"], 2 * found.shift["mu"], rtol=1e-4, atol=1e-7)
    del mcmc._states["z"]["twice"]  # as by extra_fields=("~z.twice",)
    assert set(extrapolate(mcmc, num_samples=8).mean) == {"mu"}
    with pytest.raises(ValueError, match=r"no site 'twice'; it kept \['mu'\]"):
        extrapolate(mcmc, lambda draw: draw["twice"])


def test_misuse_is_refused(monkeypatch):
    mcmc = run(euler(), num_samples=4)
    plain = mcmc.sampler
    mcmc.sampler = SGLD(potential_fn=gaussian, step_size=Cyclical(0.4, length=10))
    with pytest.raises(ValueError, match="no single step size to extrapolate"):
        extrapolate(mcmc)
    mcmc.sampler = SGLD(potential_fn=gaussian, step_size=0.1, interaction=Independent(), moves=Archive())
    with pytest.raises(ValueError, match="Jumps between basins are exact for any step size"):
        extrapolate(mcmc)
    mcmc.sampler = plain
    monkeypatch.setattr(bias, "predict_bias", lambda *_: lambda: (3.1, 0.0))
    with pytest.raises(ValueError, match="more than 300% too large by estimate.*Run with a tenth of `step_size`"):
        extrapolate(mcmc)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="the function returns nothing"):
        extrapolate(mcmc, lambda z: {})
    with pytest.raises(ValueError, match="must return real numbers"):
        extrapolate(mcmc, lambda z: z + 1j)
    monkeypatch.setattr(bias, "device_memory", lambda: 100)
    with pytest.raises(ValueError, match="2 values in 8 iterations would take.*Give a `function`"):
        extrapolate(mcmc)
    monkeypatch.undo()
    for number in (0, 7, 1.5):
        with pytest.raises(ValueError, match=f"`num_samples` must be .*8 or more; got {number}"):
            extrapolate(mcmc, num_samples=number)
    with pytest.raises(ValueError, match="`levels` must be"):
        extrapolate(mcmc, levels=0)
    mcmc._states["z"] = mcmc._states["z"][:, :3]
    with pytest.raises(ValueError, match="at least four draws of each particle; the run has 3"):
        extrapolate(mcmc)


def test_errors_know_what_a_long_step_leaves():
    # Of log g, whose bias is 18 % of the shift after the extrapolation, in every run.
    kernel = SGLD(lambda: numpyro.sample("g", dist.Gamma(2.0, 1.0)), step_size=0.5)
    mcmc = run(kernel, num_samples=2000, num_warmup=100)
    found = extrapolate(mcmc, lambda draw: jnp.log(draw["g"]), num_samples=2000, rng_key=random.key(100))
    error = float(found.mean - 0.42278)
    chance = float(jnp.hypot(found.plain_mcse, found.shift_mcse))
    assert abs(error) < 2.0 * found.mcse and abs(error) > 2.0 * chance and found.mcse < 0.05
