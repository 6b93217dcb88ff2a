"""The arrival of models whose gradients stay noisy: when it is prolonged, and where particles are then."""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import jax
from jax import random
import jax.numpy as jnp
from models import sites, warmed
import numpy as np
import pytest

import numpyro
import numpyro.distributions as dist

from benchmarks.problems.targets import bayesian_neural_network as network
from numpyro_repulsion import SGLD, SGLDR, SGNHT, SVRG, BiasBudget, Subsampled
from numpyro_repulsion.dynamics import Cloud
from numpyro_repulsion.kernels import warmup_programs
from numpyro_repulsion.warmup import Timetable, WarmupPlan, WarmupState, Window, arrival, scales
from numpyro_repulsion.warmup.preconditioner import first_scale
from numpyro_repulsion.warmup.windows import ARRIVED, FIRST_WHITENED

N, BATCH, PARTICLES = 200, 20, 8
X = random.normal(random.key(0), (N, 4))
Y = jnp.sin(2 * X[:, 0]) * X[:, 1] + 0.1 * random.normal(random.key(1), (N,))


def regression(X, y, subsample_size):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([4]).to_event(1))
    with numpyro.plate("rows", len(y), subsample_size=subsample_size) as i:
        numpyro.sample("y", dist.Normal(X[i] @ w, 0.3), obs=y[i])


def after(kernel, iterations, num_warmup=100, seed=2, hidden=None, y=Y, **others):
    """The state after so many iterations of a warmup, and the arguments of the model."""
    kwargs = {"subsample_size": BATCH} | others | ({} if hidden is None else {"hidden": hidden})
    return warmed(kernel, random.split(random.key(seed), PARTICLES), iterations, num_warmup, X, y, **kwargs), kwargs


@pytest.mark.parametrize(
    ("kernel", "scale"),
    [
        (SGNHT, "dense"),
        pytest.param(SGLDR, "low_rank", marks=pytest.mark.slow),
        pytest.param(SGLD, "diagonal", marks=pytest.mark.slow),
    ],
)
def test_networks_go_on_to_arrive_in_standardized_coordinates(kernel, scale, monkeypatch):
    sampler = kernel(network, preconditioner=scale)
    before, kwargs = after(sampler, int(100 * ARRIVED), hidden=10)
    warmup = before.warmup
    assert warmup.arrival.is_prolonged and not warmup.reference.order
    assert (warmup.centering.share == 0).all() and (warmup.arrival.adam.unit == 1).all()
    # In units of the prior's scale for weights, and of the spread of the starts for their precision.
    _, unravel = jax.flatten_util.ravel_pytree(jax.tree.map(lambda x: x[0], before.prototype))
    lengths = unravel(warmup.preconditioner.lengths())
    np.testing.assert_allclose(lengths["w1"], 1.0)
    assert (lengths["weight_precision"] == unravel(warmup.arrival.start_sds)["weight_precision"]).all()
    # Particles are where the first half of the arrival ended, and not where the mean curvature has sent them.
    halfway, _ = after(sampler, int(100 * FIRST_WHITENED), hidden=10)
    monkeypatch.setattr(arrival, "PROLONGATION", replace(arrival.PROLONGATION, stays_noisy=np.inf))
    usual, _ = after(sampler, int(100 * ARRIVED), hidden=10)
    assert not usual.warmup.arrival.is_prolonged
    there = sites(sampler, halfway, X, Y, **kwargs)
    for name, z in sites(sampler, before, X, Y, **kwargs).items():
        np.testing.assert_allclose(z, there[name], rtol=2e-4, atol=1e-5)
        assert not np.allclose(sites(sampler, usual, X, Y, **kwargs)[name], there[name], rtol=2e-4, atol=1e-5)
    monkeypatch.undo()
    end = sampler.warm(before, 75, 100, (X, Y), kwargs)
    assert end.warmup.arrival.is_prolonged and end.warmup.step_size > 0
    assert end.warmup.measurements.number > 1
    scales = end.warmup.preconditioner
    assert jax.tree.all(jax.tree.map(lambda x: np.isfinite(x).all(), (end.cloud, scales)))
    # Gradients of a unit's weights depend on its other weights, which is no funnel.
    assert end.warmup.symptoms.dependence > 0.5
    state = sampler.freeze(end, (X, Y), kwargs, False, 100)
    found = {f.name: f for f in sampler.findings(state) if f.severity == "error"}
    # Of so short a warmup, the step may be too long as well.
    assert "several_basins" in found and found.keys() <= {"several_basins", "step_bias"}
    assert "predict(mcmc, ...)" in found["several_basins"].remedy
    if scale == "dense":
        np.testing.assert_array_equal(scales.scale, np.diag(np.diag(scales.scale)))
    if scale == "low_rank":
        assert (scales.stretch == 0).all()


class Compared(NamedTuple):
    """A sampler, as far as the learner knows one: energies of the particles, halfway between them, and before."""

    energies: Iterator

    def energy_to_compare(self, centering, y):
        return np.broadcast_to(next(self.energies), y.shape[:2]).astype(float)


APART = 100.0 * np.arange(PARTICLES)


@pytest.mark.filterwarnings("ignore:All-NaN slice")
@pytest.mark.parametrize("scale", ["dense", "low_rank", "diagonal"])
@pytest.mark.parametrize(
    ("noise", "energies", "is_prolonged"),
    [
        ((1.0, 0.9), (0.0, 5.0, 0.0), True),  # networks, halfway between which is no good one
        ((1.0, 0.1), (0.0, 5.0, 0.0), False),  # a posterior that the data determine
        ((0.01, 0.01), (0.0, 5.0, 0.0), False),  # noise that hardly matters, as at a low inverse temperature ...
        ((0.01, 0.01), (APART, 1e4, APART), True),  # ... unless particles differ by far more than draws
        ((1.0, 0.9), (0.0, -5.0, 0.0), False),  # on their way to one mode
        ((1.0, 0.1), (1e3, -5.0, 0.0), True),  # sent far away by the scales
        ((1.0, 0.1), (np.nan, np.nan, 0.0), True),
    ],
)
def test_when_an_arrival_is_prolonged(scale, noise, energies, is_prolonged):
    rng, dtype = np.random.default_rng(0), np.float32
    z, halfway = rng.standard_normal((2, 1, PARTICLES, 3)).astype(dtype)
    plan = WarmupPlan(BiasBudget(), scale, False, True, is_noisy=True)
    cloud = Cloud(z, np.zeros(z.shape[:2], dtype), np.ones_like(z), ())
    change = first_scale(jnp.asarray(z[0]), jnp.asarray(z[0]), scale)
    warmup = jax.device_get(WarmupState.start(100, change, 1e-3, jnp.zeros(()), cloud, plan))
    variances = np.array([*noise, -1.0])
    measured = warmup.measurements.add(np.ones(PARTICLES), np.stack([variances] * 4), 0.0)
    warmup = warmup._replace(measurements=measured, arrival=warmup.arrival._replace(halfway=halfway))
    settings = rng, Window(Timetable(100), 25), warmup, cloud
    with np.errstate(all="ignore"):
        found, moved = arrival.update_prolongation(*settings, Compared(iter(energies)))
    assert found.arrival.is_prolonged == is_prolonged
    if not is_prolonged:
        assert moved is cloud
        return
    # They return to where that half began, in units of the spread of the starts.
    np.testing.assert_allclose(found.preconditioner.to_positions(moved.z), halfway, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found.preconditioner.lengths(), found.arrival.start_sds, rtol=1e-5)
    assert (found.arrival.adam.unit == 1).all() and not moved.gradient.any()


@pytest.mark.parametrize("settings", [{"gradient": Subsampled()}, {"gradient": SVRG()}, {"step_size": 1e-5}])
def test_without_a_common_reference_nothing_can_be_told(settings):
    def start(**settings):
        kernel, keys = SGLD(regression, **settings), random.split(random.key(2), PARTICLES)
        return jax.eval_shape(lambda: kernel.start(keys, 100, None, (X, Y, BATCH), {})).warmup

    assert start(**settings).arrival.is_prolonged is None and start().arrival.is_prolonged is not None


@pytest.mark.slow
def test_standardized_weights_have_no_neck(monkeypatch):
    """Where noise is large, the density of the weights themselves is highest at 0, and λ is in the thousands there."""
    noise = random.normal(random.key(5), (N,))
    # Networks fit noise worse than what lies between them, so the arrival would end as usual.
    monkeypatch.setattr(arrival, "PROLONGATION", replace(arrival.PROLONGATION, convex=1.1))

    def precision(seed, **settings):
        kernel = SGNHT(network, num_steps=10, preconditioner="diagonal", **settings)
        state, kwargs = after(kernel, 128, 160, seed, 50, noise)
        assert state.warmup.arrival.is_prolonged
        return np.exp(np.asarray(sites(kernel, state, X, noise, **kwargs)["weight_precision"]))

    assert np.median(precision(0)) < 200
    assert np.median(precision(0, reparam=None)) > 1000


@pytest.mark.slow
def test_particles_follow_the_direction_of_svgd_only_while_their_arrival_is_prolonged(monkeypatch):
    def positions(kernel, **settings):
        state, kwargs = after(kernel, 40, **settings)
        return sites(kernel, state, X, Y, **kwargs)

    def along_gradients():
        monkeypatch.setattr(warmup_programs, "svgd_direction", lambda u, gradient: gradient)

    def network_kernel():
        return SGNHT(network, preconditioner="diagonal")

    together, usual = positions(network_kernel(), hidden=5), positions(SGLD(regression))
    along_gradients()
    alone = positions(network_kernel(), hidden=5)
    assert not np.allclose(together["w1"], alone["w1"], rtol=1e-2)
    # Another program rounds differently.
    np.testing.assert_allclose(positions(SGLD(regression))["w"], usual["w"], rtol=1e-3, atol=1e-4)


def counts(X, y, subsample_size, prior=1.0):
    w = numpyro.sample("w", dist.Normal(0, prior).expand([4]).to_event(1))
    with numpyro.plate("rows", len(y), subsample_size=subsample_size) as i:
        numpyro.sample("y", dist.Poisson(jnp.exp(X[i] @ w)), obs=y[i])


@pytest.fixture(scope="module")
def before_arrival():
    """Just before the end of the arrival of a regression of counts: a usual state, and one with a lost particle."""
    y = random.poisson(random.key(3), jnp.exp(X @ jnp.array([0.5, -0.5, 0.2, 0.0]))).astype(jnp.float32)
    kwargs = {"subsample_size": BATCH}

    def states(scale):
        kernel = SGLD(counts, preconditioner=scale)
        state, _ = after(kernel, int(100 * ARRIVED) - 1, y=y)
        # Its expected counts are thousands, and so is the curvature there.
        change = state.warmup.preconditioner
        away = change.to_positions(state.cloud.z).at[0, 3, 0].add(3.0)
        lost = state._replace(cloud=state.cloud._replace(z=change.whiten(away)))
        return state, lost, lambda state: kernel.warm(state, 1, 100, (X, y), kwargs)

    return states


SCALES = ["dense", *(pytest.param(name, marks=pytest.mark.slow) for name in ("low_rank", "diagonal"))]


@pytest.mark.parametrize("scale", SCALES)
def test_a_lost_particle_does_not_set_the_scales_of_all(before_arrival, scale, monkeypatch):
    state, lost, sample = before_arrival(scale)
    found = sample(lost).warmup
    assert np.flatnonzero(found.arrival.lost).tolist() == [3] and not found.arrival.is_prolonged

    def lengths(state):
        """The logarithms of the scales, as means over minibatches."""
        keys = random.split(random.key(0), 8)
        states = (sample(state._replace(rng_key=key)) for key in keys)
        return np.mean([np.log(x.warmup.preconditioner.lengths()) for x in states], 0)

    usual = lengths(state)

    def drift():
        """How much the scales differ from the usual ones."""
        return np.abs(lengths(lost) - usual).max()

    without = drift()
    for module in (arrival, scales):  # those of the noise too
        monkeypatch.setattr(module, "replace_lost", lambda rng, particles, lost: particles)
    assert without < drift() / 2


@pytest.mark.slow
def test_a_lost_particle_neither_shortens_the_step_nor_prolongs_the_arrival(before_arrival, monkeypatch):
    state, lost, sample = before_arrival("dense")
    usual, found = sample(state).warmup, sample(lost).warmup
    np.testing.assert_allclose(found.step_size, usual.step_size, rtol=0.5)
    assert found.reference.order
    monkeypatch.setattr(arrival, "PROLONGATION", replace(arrival.PROLONGATION, convex=1.1))
    assert not sample(lost).warmup.arrival.is_prolonged
    monkeypatch.setattr(arrival, "replace_lost", lambda rng, particles, lost: particles)
    assert sample(lost).warmup.arrival.is_prolonged
