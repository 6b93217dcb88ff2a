"""Particles that have left the others or stand still: found, named, and left out on request."""

import re
import warnings

from jax import random
import jax.numpy as jnp
import numpy as np
import pytest
from results import made

from numpyro_repulsion import SGLD, diagnose, summary, to_inference_data
from numpyro_repulsion.diagnostics import find_diverged_chains

SIZE, NUMBER, DIMENSION = 20, 200, 8


def normal(seed=0, size=SIZE, dimension=DIMENSION):
    """Exact draws of a standard normal distribution, and their energies."""
    z = np.random.default_rng(seed).standard_normal((size, NUMBER, dimension))
    return z, (z**2).sum(-1) / 2


def diverged(z, energy, dimension=DIMENSION):
    return np.flatnonzero(find_diverged_chains({"z": z}, energy, dimension)[0]).tolist()


@pytest.mark.parametrize("dimension", [1, 8, 300])
def test_particles_of_the_posterior_are_not_called_stray(dimension):
    for seed in range(10):
        z, energy = normal(seed, dimension=dimension)
        assert diverged(z, energy, dimension) == []
        # Estimates of energies have noise that is far larger than what they estimate.
        noise = 1e4 * np.random.default_rng(seed).standard_normal(energy.shape)
        assert diverged(z, energy + noise, dimension) == []


def test_a_particle_that_left():
    z, energy = normal()
    z[3] += 10.0
    assert diverged(z, (z**2).sum(-1) / 2) == [3]
    assert diverged(z, energy) == []  # in another mode, as deep as this one


def test_networks_in_basins_of_different_depth_have_not_left():
    z, energy = normal()
    energy += 1000.0 * np.random.default_rng(1).standard_normal((SIZE, 1))
    energy[3] += 1e5
    assert len(diverged(z, energy)) > 5
    assert np.flatnonzero(find_diverged_chains({"z": z}, energy, DIMENSION, in_basins=True)[0]).tolist() == [3]
    z, energy = normal()
    energy[3] += 100.0
    assert np.flatnonzero(find_diverged_chains({"z": z}, energy, DIMENSION, in_basins=True)[0]).tolist() == [3]


@pytest.mark.parametrize("seed", range(2))
def test_if_most_have_not_arrived_all_but_the_lowest_are_marked(seed):
    rng = np.random.default_rng(seed)
    z, energy = normal(seed)
    heights = np.concatenate([np.zeros(4), rng.uniform(300.0, 1000.0, SIZE - 4)])
    assert diverged(z, energy + heights[:, None]) == list(range(4, SIZE))
    # Energies of particles that do not mix at all differ no more than exact draws.
    still = rng.standard_normal((SIZE, 1, DIMENSION)) + 0.01 * z
    assert diverged(still, (still**2).sum(-1) / 2) == []


@pytest.mark.parametrize("in_basins", [False, True])
@pytest.mark.parametrize("shape", [np.linspace(1, 0.7, NUMBER), np.exp(-np.linspace(0, 5, NUMBER))])
def test_particles_that_still_come_down_have_not_arrived(shape, in_basins):
    # From starts where the data are not, all come down alike, so that no particle is far above the others.
    z, energy = normal()
    assert find_diverged_chains({"z": z}, energy + 1e4 * shape, DIMENSION, in_basins)[0].all()
    # Up is no arrival, and noise no fall.
    noise = 1e4 * np.random.default_rng(0).standard_normal(energy.shape)
    for others in (-1e4 * shape, 1e4 * shape + 20 * noise):
        assert not find_diverged_chains({"z": z}, energy + others, DIMENSION, in_basins)[0].any()


def test_particles_that_stand_still_or_are_not_finite():
    z, energy = normal()
    z[5] = z[5, :1]
    z[7, 100:, 2] = np.nan
    energy[9, 3] = np.inf
    assert diverged(z, energy) == [5, 7, 9]


def test_particles_of_a_narrow_mode_and_padding_are_not_called_stray():
    z, _ = normal()
    energy = (z**2).sum(-1) / 2
    z[:5] *= 0.01
    assert diverged(z, energy) == []
    z[..., 3] = np.nan
    assert diverged(z, energy) == []


def test_slow_particles_are_not_called_still():
    steps = 0.01 * np.random.default_rng(0).standard_normal((SIZE, NUMBER, DIMENSION))
    walks = np.random.default_rng(1).standard_normal((SIZE, 1, DIMENSION)) + steps.cumsum(1)
    assert diverged(walks, (walks**2).sum(-1) / 2) == []


def test_few_particles_and_short_runs_show_nothing():
    z, energy = normal()
    z[1] += 10.0
    energy = (z**2).sum(-1) / 2
    assert diverged(z[:3], energy[:3]) == [] == diverged(z[:, :5], energy[:, :5])
    z[2, 1] = np.nan
    assert diverged(z[:3], energy[:3]) == [2]


@pytest.fixture(scope="module")
def run():
    """A run with one particle in a place from which it cannot return: a ledge far above the others."""

    def potential(z):
        ledge = 500.0 + 50.0 * jnp.sum((z - 100.0) ** 2)
        return -jnp.logaddexp(-jnp.sum(z**2) / 2, -ledge)

    mcmc = made(SGLD(potential_fn=potential, step_size=0.01), num_samples=500, num_chains=6)
    starts = random.normal(random.key(1), (6, 2)).at[4].set(100.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mcmc.run(random.key(0), init_params=starts)
    return mcmc


def test_inference_data_mark_them(run, tmp_path):
    data = to_inference_data(run)
    for group in ("posterior", "sample_stats"):
        assert data[group]["diverged_chains"].values.tolist() == [False, False, False, False, True, False]
        assert data[group]["diverged_chains"].dims == ("chain",)
    data.to_netcdf(str(tmp_path / "run.nc"))


def test_the_diagnosis_names_them_first_with_a_remedy_by_their_number(run):
    data = to_inference_data(run)
    for marked, message, remedy in (
        (0, r"1 of 6 particles \(chain 4\)", "exclude_diverged"),
        (3, "4 of 6 particles.*have not reached the posterior", "`num_warmup`"),
        (6, "All 6 particles have stopped moving", "init_strategy="),
    ):
        data["posterior"]["diverged_chains"][:marked] = True
        found = diagnose(data)[0]
        assert found.name == "diverged_chains" and found.severity == "error"
        assert re.match(message, found.message) and remedy in found.remedy


def test_a_summary_leaves_them_out_on_request(run):
    with_it = summary(run, round_to=6)
    assert "diverged_chains" in str(with_it)
    without = summary(run, exclude_diverged=True, round_to=6)
    assert "diverged_chains" not in str(without)
    assert float(with_it["mean"].iloc[0]) > 10 > 1 > abs(float(without["mean"].iloc[0]))
    chosen = summary(run, exclude_diverged=True, coords={"chain": [1, 4]}, round_to=6)
    assert abs(float(chosen["mean"].iloc[0])) < 2
    with pytest.raises(ValueError, match="leaves no particles"):
        summary(run, exclude_diverged=True, coords={"chain": [4]})
    with pytest.raises(ValueError, match="must be True or False"):
        summary(run, exclude_diverged="yes")


@pytest.mark.parametrize("name", ["z", "scale"])
def test_a_wide_mode_that_holds_as_much_as_a_narrow_one_has_not_strayed(name):
    z, energy = normal()
    width = np.where(np.arange(SIZE) < 14, 1.0, 0.01)
    energy += DIMENSION * np.log(width)[:, None]
    draws = width[:, None, None] * z
    if name == "scale":  # a positive site, whose logarithm is sampled
        draws = np.exp(draws + 3.0 * np.arange(SIZE)[:, None, None])
    strays, wide = find_diverged_chains({name: draws}, energy, DIMENSION)
    assert not strays.any() and wide == 14
    # Without a narrow mode that makes up for it, the same energies are those of particles that have left.
    strays, wide = find_diverged_chains({"z": z}, energy, DIMENSION)
    assert np.flatnonzero(strays).tolist() == list(range(14)) and wide == 0
    # All widths between are those of a funnel, which has no gap.
    width = np.geomspace(0.01, 1.0, SIZE)
    energy = normal()[1] + DIMENSION * np.log(width)[:, None]
    strays, wide = find_diverged_chains({"z": width[:, None, None] * z}, energy, DIMENSION)
    assert not strays.any() and wide == 0
