"""Arrival, and what is lost on the way."""

from types import SimpleNamespace
from typing import NamedTuple

import jax
from jax import lax, random
import jax.numpy as jnp
from models import generator
import numpy as np
import pytest

from numpyro_repulsion import BiasBudget
from numpyro_repulsion.dynamics import Cloud, Dynamics, Overdamped
from numpyro_repulsion.warmup import Preconditioner, Timetable, Window
from numpyro_repulsion.warmup.adam import Surroundings
from numpyro_repulsion.warmup.arrival import arrive, left_behind, replace_lost, update_arrival, without_lost
from numpyro_repulsion.warmup.state import WarmupPlan, WarmupState


def arrived(energy_and_grad, u, length):
    """Particles, their U and ∇U, and their steps after so many updates."""

    def update(carry, key):
        return arrive(key, *carry, energy_and_grad), None

    start = (u, *energy_and_grad(u)), jnp.full(u.shape[:2], 0.05)
    return jax.jit(lambda start: lax.scan(update, start, random.split(random.key(1), length))[0])(start)


@pytest.mark.parametrize("scale", [1e-4, 1e3])
def test_particles_arrive_whatever_the_scale(scale):
    def energy_and_grad(u):
        return 0.5 * jnp.sum((u / scale - 3.0) ** 2, -1), (u / scale - 3.0) / scale

    (u, energy, gradient), step_size = arrived(energy_and_grad, 30.0 * random.normal(random.key(0), (1, 500, 2)), 1500)
    standard = np.asarray(u / scale - 3.0).ravel()
    assert abs(standard.mean()) < 4.5 * len(standard) ** -0.5
    assert abs(standard.var() - 1) < 4.5 * (2 / len(standard)) ** 0.5
    assert (step_size > 0.1 * scale**2).all() and (step_size < 30 * scale**2).all()
    np.testing.assert_allclose(energy, energy_and_grad(u)[0], rtol=1e-4)
    np.testing.assert_allclose(gradient, energy_and_grad(u)[1], rtol=1e-3, atol=1e-5 / scale)


def test_arrival_stays_where_the_energy_is_finite():
    def energy_and_grad(u):
        inside = jnp.abs(u[..., 0]) < 1.0
        return jnp.where(inside, 0.0, jnp.nan), jnp.where(inside[..., None], 0.0 * u, jnp.nan)

    (u, energy, gradient), _ = arrived(energy_and_grad, jnp.zeros((1, 50, 1)), 200)
    assert (jnp.abs(u) < 1.0).all() and jnp.isfinite(energy).all() and jnp.isfinite(gradient).all()
    assert len(np.unique(u)) == 50


def test_lost_particles_are_rescued_and_others_left_alone():
    u = random.normal(random.key(0), (2, 10, 3))
    energy = jnp.zeros((2, 10)).at[1, 4].set(100.0).at[0, 2].set(12.0)
    u, energy = np.asarray(u), np.asarray(energy)
    lost = left_behind(energy, 3)
    particles = u, energy, 2.0 * u, np.arange(20.0).reshape(2, 10)
    moved, found, gradient, steps = replace_lost(generator(), particles, lost)
    changed = np.argwhere((moved != u).any(-1)).tolist()
    assert changed == [[1, 4]] and found[0, 2] == 12.0
    home = np.argwhere((u == moved[1, 4]).all(-1))
    assert len(home) == 1 and steps[1, 4] == 10 * home[0, 0] + home[0, 1]
    np.testing.assert_array_equal(gradient, 2.0 * moved)
    # Where all are lost there is nowhere to go.
    moved, *_ = replace_lost(generator(), particles, np.ones((2, 10), bool))
    np.testing.assert_array_equal(moved, u)


def test_noisy_energies_have_a_wider_limit():
    # Linear noise of variance V, the same for all particles: energies of exact draws differ by sqrt(V d).
    d, noise = 100, 400.0
    u = random.normal(random.key(0), (50, 20, d))
    slopes = noise**0.5 * random.normal(random.key(1), (50, 1, d))
    energy = 0.5 * jnp.sum(u**2, -1) + jnp.sum(slopes * u, -1)
    assert left_behind(energy[0][None], d).mean() > 0.2
    assert not any(left_behind(one[None], d, noise).any() for one in energy)
    assert left_behind(energy[0][None].at[0, 3].add(1e4), d, noise)[0, 3]


def test_what_is_not_finite_is_left_behind():
    energy = np.zeros((1, 40))
    energy[0, [7, 9]] = 1e5, np.nan
    assert np.argwhere(left_behind(energy, 3)).tolist() == [[0, 7], [0, 9]]


def test_networks_in_basins_of_different_depth_are_not_lost():
    depth = 1000.0 * random.normal(random.key(0), (1, 20))
    energy = depth.at[0, 4].set(1e5)
    lost = left_behind(energy, 100, 0.0, True)
    assert np.argwhere(lost).tolist() == [[0, 4]]
    # Without basins all would be, but the deepest.
    assert left_behind(energy, 100).sum() > 5
    # Particles in one basin are lost as usual.
    near = random.normal(random.key(1), (1, 20)).at[0, 7].set(100.0)
    np.testing.assert_array_equal(left_behind(near, 100, 0.0, jnp.asarray(True)), left_behind(near, 100))


def around(u, energy, gradient, length=40):
    """The surroundings of particles that see draws ``(time, 1, L, d)``."""
    surroundings = Surroundings.empty(u.shape[1:], u.dtype)
    for i in range(length):
        surroundings = surroundings.add(energy[i], gradient[i])
    return jax.device_get(surroundings)


def test_most_particles_leave_a_basin_that_is_lost():
    # Thirteen of twenty particles in a basin whose floor is 40 higher, and not wider.
    u = random.normal(random.key(0), (40, 1, 20, 5))
    higher = jnp.where(jnp.arange(20) < 13, 40.0, 0.0)
    energy = 0.5 * jnp.sum(u**2, -1) + higher
    assert around(u, energy, u).is_lost()[0].tolist() == [True] * 13 + [False] * 7
    assert not around(u, energy, u).is_lost(10.0).any()
    # By energies against the median none is left behind.
    assert not left_behind(energy[-1], 5).any()


@pytest.mark.parametrize("dimension", [5, 100])
def test_the_neck_of_a_funnel_does_not_attract(dimension):
    # v is fixed at each particle: energies are lower by up to (d − 1) v / 2 in the neck, and the mass is alike.
    v = jnp.linspace(-6.0, 6.0, 20)
    x = random.normal(random.key(0), (40, 1, 20, dimension - 1)) * jnp.exp(v / 2)[:, None]
    energy = jnp.sum(x**2, -1) / (2 * jnp.exp(v)) + (dimension - 1) * v / 2 + v**2 / 18
    gradient = jnp.concatenate((x / jnp.exp(v)[:, None], jnp.ones((40, 1, 20, 1))), -1)
    assert not around(gradient, energy, gradient).is_lost().any()
    # By energy alone the neck would take in those who are in the wide part.
    assert (energy.mean(0) > energy.mean(0).min() + 10.0 + 2.0 * dimension**0.5).any()


@pytest.mark.parametrize("narrow", [1, 100])
def test_a_narrow_basin_and_a_wide_one_of_the_same_weight_both_stay(narrow):
    # Ten of the particles are in a basin that is twenty times narrower in some of 100 coordinates.
    width = jnp.where(jnp.arange(100) < narrow, jnp.where(jnp.arange(20) < 10, 0.05, 1.0)[:, None], 1.0)
    u = random.normal(random.key(0), (40, 1, 20, 100)) * width
    energy = 0.5 * jnp.sum((u / width) ** 2, -1) + jnp.sum(jnp.log(width), -1)
    assert not around(u, energy, u / width**2).is_lost().any()


def test_a_particle_that_does_not_move_does_not_attract():
    u = random.normal(random.key(0), (40, 1, 20, 100))
    u = u.at[:, 0, 3].set(u[0, 0, 3])
    assert not around(u, 0.5 * jnp.sum(u**2, -1), u).is_lost().any()


class Energies(NamedTuple):
    """A sampler on minibatches, as far as the learner of the arrival knows one."""

    plan: WarmupPlan
    energy: np.ndarray
    dynamics: Dynamics = Overdamped()

    def energy_on_common_rows(self, warmup, u):
        return self.energy

    def log_volume_gained(self, warmup, u):
        return 0.0


@pytest.mark.parametrize(("ends", "moves", "coincide"), [(30, True, True), (50, False, False), (60, True, False)])
def test_lost_particles_move_to_others_but_not_where_they_would_coincide(ends, moves, coincide):
    # At the end of the arrival, after 50 of 200 iterations, copies must part again before repulsion begins.
    u = random.normal(random.key(0), (1, 10, 3))
    plan = WarmupPlan(BiasBudget(), None, False, False, is_noisy=True)
    cloud = Cloud(u, jnp.zeros(u.shape[:2]), jnp.zeros_like(u), ())
    warmup, cloud = jax.device_get(
        (WarmupState.start(200, Preconditioner(), 1e-3, jnp.asarray(jnp.nan), cloud, plan), cloud)
    )
    energy = np.where(np.arange(10) == 4, 1e4, 0.0)[None]
    found, moved = update_arrival(generator(), Window(Timetable(200), ends), warmup, cloud, Energies(plan, energy))
    assert np.flatnonzero((moved.z != cloud.z).any(-1)).tolist() == ([4] if moves else [])
    assert np.flatnonzero(found.arrival.lost).tolist() == ([] if moves else [4])
    assert (len(np.unique(moved.z, axis=1)[0]) < 10) == coincide
    if moves:
        nearest = np.delete(np.linalg.norm(moved.z[0] - moved.z[0, 4], axis=-1), 4).min()
        assert nearest == pytest.approx(0.0 if coincide else 0.1 * 3**0.5, abs=1e-6)


@pytest.mark.parametrize(("temperature", "number"), [(25.0, 0), (None, 6)])
def test_exact_draws_of_a_hot_posterior_are_not_lost(temperature, number):
    u = 5.0 * random.normal(random.key(0), (1, 20, 10))
    plan = WarmupPlan(BiasBudget(), None, False, False, is_noisy=True)
    cloud = Cloud(u, jnp.zeros(u.shape[:2]), jnp.zeros_like(u), ())
    start = WarmupState.start(200, Preconditioner(), 1e-3, jnp.asarray(jnp.nan), cloud, plan)
    warmup, cloud = jax.device_get((start, cloud))
    dynamics = Overdamped() if temperature is None else Overdamped(temperature=temperature)
    sampler = Energies(plan, np.asarray(jnp.sum(u**2, -1) / 2), dynamics)
    moved = update_arrival(generator(), Window(Timetable(200), 60), warmup, cloud, sampler)[1]
    assert (moved.z != cloud.z).any(-1).sum() == number


def lost_one():
    """A warmup whose particles have references of their own, with a lost one, number 4 of 10."""
    u = random.normal(random.key(0), (1, 10, 3))
    plan = WarmupPlan(BiasBudget(), None, False, True, is_noisy=True, epoch=10)
    cloud = Cloud(u, jnp.zeros(u.shape[:2]), jnp.zeros_like(u), ())
    start = WarmupState.start(200, Preconditioner(), 1e-3, jnp.asarray(jnp.nan), cloud, plan)
    start = start._replace(reference=start.reference._replace(position=u + 7.0))
    warmup, cloud = jax.device_get((start, cloud))
    return warmup, cloud, Energies(plan, np.where(np.arange(10) == 4, 1e4, 0.0)[None])


def test_particles_take_their_references_along():
    warmup, cloud, sampler = lost_one()
    found, moved = update_arrival(generator(), Window(Timetable(200), 30), warmup, cloud, sampler)
    assert np.argwhere(moved.z != cloud.z)[:, 1].tolist() == 3 * [4]
    np.testing.assert_allclose(found.reference.position, moved.z + 7.0, atol=0.1001)
    # Where lost particles stay, measurements leave them out, and see others with their references.
    found, moved = update_arrival(generator(), Window(Timetable(200), 50), warmup, cloud, sampler)
    assert moved is cloud and found.arrival.lost[0, 4]
    points, gradients = without_lost(generator(), moved.z, found, SimpleNamespace(gradients=lambda warmup: warmup))
    assert (points[0, 4] != moved.z[0, 4]).all()
    np.testing.assert_array_equal(gradients.reference.position, points + np.float32(7.0))


def test_a_prolonged_arrival_does_not_return_to_where_a_particle_was_lost():
    warmup, cloud, sampler = lost_one()
    warmup = warmup._replace(arrival=warmup.arrival._replace(halfway=np.zeros_like(cloud.z)))
    found, moved = update_arrival(generator(), Window(Timetable(200), 30), warmup, cloud, sampler)
    np.testing.assert_array_equal(found.arrival.halfway, moved.z)
    assert (moved.z[0, 4] != cloud.z[0, 4]).all()


def test_exact_draws_are_hardly_ever_lost():
    u = random.normal(random.key(0), (1, 20_000, 2))
    # A chi-squared of two degrees of freedom exceeds its median by 2 · 17 in one draw of 5·10⁷.
    assert not left_behind(0.5 * jnp.sum(u**2, -1), 2).any()
