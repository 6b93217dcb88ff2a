"""Many effects of one unknown scale, about each of which the data say little."""

from dataclasses import replace

import jax
from jax import random
import jax.numpy as jnp
from models import moments, sites, warmed
import numpy as np
import pytest
from results import run

import numpyro
from numpyro.diagnostics import effective_sample_size, split_gelman_rubin
import numpyro.distributions as dist

from numpyro_repulsion import SGHMC, SGLD, SGLDR, SVRG, diagnose
from numpyro_repulsion.kernels.warmup_host import HostSampler
from numpyro_repulsion.warmup import Timetable, Window, adam, scales
from numpyro_repulsion.warmup.adam import ADAM
from numpyro_repulsion.warmup.arrival import update_arrival

SCALE, REPEATS = 0.35, 2


def effects(group, y, number, subsample_size, by_hand=False):
    """Effects of groups, a few rows each, whose errors have the standard deviation 1; standardized by hand or not."""
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    with numpyro.plate("groups", number):
        effect = numpyro.sample("effect", dist.Normal(0.0, 1.0 if by_hand else scale))
    effect = scale * effect if by_hand else effect
    with numpyro.plate("rows", len(y), subsample_size=subsample_size) as i:
        numpyro.sample("y", dist.Normal(effect[group[i]], 1.0), obs=y[i])


def data(number):
    rng = np.random.default_rng(number)
    group = np.repeat(np.arange(number), REPEATS)
    y = SCALE * rng.standard_normal(number)[group] + rng.standard_normal(len(group))
    return {"group": jnp.asarray(group), "y": jnp.asarray(y, jnp.float32), "number": number, "subsample_size": 100}


def exact(y, number, **_):
    """The mean and the standard deviation of log s, from the means of the groups."""
    log_scale = np.linspace(-5.0, 1.0, 2000)
    variance = np.exp(2 * log_scale) + 1 / REPEATS
    means = np.asarray(y, float).reshape(number, REPEATS).mean(1)[:, None]
    log_density = (-0.5 * np.log(variance) - means**2 / variance / 2).sum(0)
    mean, variance = moments(log_scale, log_density + log_scale - np.exp(2 * log_scale) / 2)
    return mean, variance**0.5


@pytest.mark.parametrize("settings", [{}, {"gradient": SVRG()}])
def test_particles_in_the_neck_do_not_send_for_the_others(settings, monkeypatch):
    kernel, known, number = SGLD(effects, **settings), data(60), 8
    state = warmed(kernel, random.split(random.key(0), number), 2, 100, **known)
    assert list(sites(kernel, state, **known)) == ["effect", "scale"]
    # Half of the particles, whose U is 300 lower and which fit the rows worse.
    log_scale = np.log(SCALE) - 5.0 * (np.arange(number) >= number // 2)
    effect = np.exp(log_scale)[:, None] * np.asarray(random.normal(random.key(1), (number, 60)))
    flat = np.concatenate((effect, log_scale[:, None]), 1).astype(np.float32)[None]
    warmup, cloud = jax.device_get((state.warmup, state.cloud))
    cloud = cloud._replace(z=warmup.preconditioner.whiten(flat))
    bound = kernel.bind((), known)
    sampler = HostSampler(bound, bound.plan(warmup.preconditioner.kind), kernel._programs, state)

    def in_neck():
        window = Window(Timetable(100), 5)
        moved = update_arrival(np.random.default_rng(0), window, warmup, cloud, sampler)[1]
        found = np.asarray(warmup.preconditioner.to_positions(moved.z))[0, :, -1]
        return int((found < np.log(SCALE) - 2.5).sum())

    assert in_neck() <= number // 2
    monkeypatch.setattr(HostSampler, "log_volume_gained", lambda sampler, warmup, u: 0.0)
    assert in_neck() == number


def test_likelihoods_are_compared_whatever_the_coordinates():
    kernel, known, number = SGLD(effects), data(60), 8
    state = warmed(kernel, random.split(random.key(0), number), 2, 100, **known)
    bound, warmup = kernel.bind((), known), jax.device_get(state.warmup)
    sampler = HostSampler(bound, bound.plan(warmup.preconditioner.kind), kernel._programs, state)
    flat = np.array(random.normal(random.key(1), (1, number, 61)))
    centered = warmup.centering._replace(share=np.ones_like(warmup.centering.share))
    standardized = warmup.centering._replace(share=np.zeros_like(warmup.centering.share))
    # s follows the effects, and is 1 for one of the particles: there, both are the same.
    flat[0, 0, -1] = 0.0
    one, other = sampler.energy_to_compare(centered, flat), sampler.energy_to_compare(standardized, flat)
    same = np.concatenate((flat[..., :-1] / np.exp(flat[..., -1:]), flat[..., -1:]), -1).astype(np.float32)
    np.testing.assert_allclose(sampler.energy_to_compare(standardized, same), one, rtol=1e-4)
    assert other[0, 0] == pytest.approx(one[0, 0], rel=1e-5) and not np.allclose(other, one, rtol=0.01)


def test_many_effects_are_centered_however_well_their_scale_is_known(monkeypatch):
    known = data(200)
    kernel, keys = SGLD(effects), random.split(random.key(0), 20)

    def shares():
        return np.asarray(warmed(kernel, keys, 60, 200, **known).warmup.centering.share)

    found = shares()
    mean, sd = exact(**known)
    assert sd < scales.CENTERING.sd
    variance = REPEATS * np.exp(2 * (mean + sd * np.array([-4, 4])))
    low, high = variance / (1 + variance)
    assert low < np.median(found) < high
    monkeypatch.setattr(scales, "CENTERING", replace(scales.CENTERING, effects=201))
    assert (shares() == 1).all()


def test_products_are_centered_from_the_first_window_on():
    kernel, known = SGLD(effects), data(60) | {"by_hand": True}
    state = warmed(kernel, random.split(random.key(0), 8), 2, 200, **known)
    assert state.warmup.centering.powers.tolist() == [1.0] and (state.warmup.centering.share == 1).all()
    # What is drawn is what the model has.
    z = sites(kernel, state, **known)
    assert abs(np.sqrt(np.mean(np.square(z["effect"]))) - 1) < 0.2
    assert not warmed(kernel, random.split(random.key(0), 8), 1, 200, **known).warmup.centering.powers.any()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "by_hand"), [(SGLD, False), (SGHMC, False), (SGLDR, False), (SGLD, True), (SGHMC, True)]
)
def test_the_scale_of_a_thousand_effects(kernel, by_hand):
    known = data(1000) | {"by_hand": by_hand}
    # Rows of products are not quadratic, so control variates of second order leave more noise, and steps are shorter.
    length = 300 * (1 + by_hand)
    mcmc = run(kernel(effects), num_warmup=length, num_samples=length, num_chains=20, **known)
    draws = np.log(np.asarray(mcmc.get_samples(group_by_chain=True)["scale"], float))
    mean, sd = exact(**known)
    number = float(effective_sample_size(draws))
    # With 20 particles and an ESS of 200, R-hat is √(1 + 2 · 20 / 200).
    assert number > 200 and split_gelman_rubin(draws) < (1.1 if by_hand else 1.05)
    # The step may move it by a tenth of its standard deviation.
    assert abs(draws.mean() - mean) < (4.5 / number**0.5 + 0.1) * sd
    assert abs(draws.std() / sd - 1) < 4.5 / (2 * number) ** 0.5 + 0.05
    assert not [finding for finding in diagnose(mcmc) if finding.severity == "error"]


@pytest.mark.slow
def test_without_any_of_it_the_scale_does_not_mix(monkeypatch):
    known = data(1000)
    monkeypatch.setattr(adam, "ADAM", replace(ADAM, course=-1.0))
    monkeypatch.setattr(HostSampler, "log_volume_gained", lambda sampler, warmup, u: 0.0)
    monkeypatch.setattr(scales, "CENTERING", replace(scales.CENTERING, effects=10**9))
    mcmc = run(SGLD(effects), num_warmup=300, num_samples=300, num_chains=20, **known)
    draws = np.log(np.asarray(mcmc.get_samples(group_by_chain=True)["scale"], float))
    assert split_gelman_rubin(draws) > 1.2 and diagnose(mcmc)
