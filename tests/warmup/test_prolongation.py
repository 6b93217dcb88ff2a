"""The arrival of models whose gradients stay noisy: when it is prolonged, and where particles are then."""

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import pytest

import numpyro
import numpyro.distributions as dist

from benchmarks.problems.targets import bayesian_neural_network as network
from numpyro_repulsion import SGLD, SGLDR, SGNHT, SVRG, Subsampled
from numpyro_repulsion.kernels import iteration
from numpyro_repulsion.warmup import ARRIVED, FIRST_WHITENED, arrival, scales, step_size
from numpyro_repulsion.warmup.adam import LATE_RATE

N, BATCH, PARTICLES = 200, 20, 8
X = random.normal(random.key(0), (N, 4))
Y = jnp.sin(2 * X[:, 0]) * X[:, 1] + 0.1 * random.normal(random.key(1), (N,))


def regression(X, y, subsample_size):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([4]).to_event(1))
    with numpyro.plate("rows", len(y), subsample_size=subsample_size) as i:
        numpyro.sample("y", dist.Normal(X[i] @ w, 0.3), obs=y[i])


def warmed(kernel, iterations, num_warmup=100, seed=2, hidden=None, num_particles=PARTICLES, y=Y, **others):
    """The kernel, its state after so many iterations of a warmup, and the arguments of the model."""
    kwargs = {"subsample_size": BATCH} | others | ({} if hidden is None else {"hidden": hidden})
    keys = random.split(random.key(seed), num_particles)
    state = kernel.init(keys, num_warmup, None, (X, y), kwargs)
    sample = jax.jit(lambda state: kernel.sample(state, (X, y), kwargs))
    for _ in range(iterations):
        state = sample(state)
    return state, kwargs


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
    before, kwargs = warmed(sampler, int(100 * ARRIVED), hidden=10)
    warmup = before.warmup
    assert warmup.arrival.is_prolonged and not warmup.reference.in_use
    assert (warmup.scales.centering.share == 0).all() and (warmup.arrival.adam.unit == 1).all()
    # In units of the prior's scale for weights, and of the spread of the starts for their precision.
    _, unravel = jax.flatten_util.ravel_pytree(jax.tree.map(lambda x: x[0], before.z))
    lengths = unravel(warmup.scales.preconditioner.lengths())
    np.testing.assert_allclose(lengths["w1"], 1.0)
    assert (lengths["weight_precision"] == unravel(warmup.arrival.spread)["weight_precision"]).all()
    # Particles are where the first half of the arrival ended, and not where the mean curvature has sent them.
    halfway, _ = warmed(kernel(network, preconditioner=scale), int(100 * FIRST_WHITENED), hidden=10)
    monkeypatch.setattr(arrival, "STAYS_NOISY", np.inf)
    usual, _ = warmed(kernel(network, preconditioner=scale), int(100 * ARRIVED), hidden=10)
    assert not usual.warmup.arrival.is_prolonged
    for name in before.z:
        np.testing.assert_allclose(before.z[name], halfway.z[name], rtol=2e-4, atol=1e-5)
        assert not np.allclose(usual.z[name], halfway.z[name], rtol=2e-4, atol=1e-5)
    after = before
    sample = jax.jit(lambda state: sampler.sample(state, (X, Y), kwargs))
    for _ in range(80):
        after = sample(after)
    assert after.warmup.arrival.is_prolonged and after.warmup.step.size > 0
    assert after.warmup.step.measurements.number > 1
    scales = after.warmup.scales.preconditioner
    assert jax.tree.all(jax.tree.map(lambda x: np.isfinite(x).all(), (after.z, scales)))
    # Gradients of a unit's weights depend on its other weights, which is no funnel.
    assert after.warmup.symptoms.dependence > 0.5
    found = {f.name: f for f in sampler.findings(after) if f.severity == "error"}
    # Of so short a warmup, the step may be too long as well.
    assert "several_basins" in found and found.keys() <= {"several_basins", "step_bias"}
    assert "predict(mcmc, ...)" in found["several_basins"].remedy
    if scale == "dense":
        np.testing.assert_array_equal(scales.scale, np.diag(np.diag(scales.scale)))
    if scale == "low_rank":
        assert (scales.stretch == 0).all()


def test_posteriors_that_the_data_determine_arrive_as_usual():
    state, _ = warmed(SGLD(regression), 30)
    assert not state.warmup.arrival.is_prolonged and state.warmup.reference.in_use


@pytest.mark.slow
def test_noise_that_hardly_matters_prolongs_nothing(monkeypatch):
    """As in a tempered posterior, if U hardly differs between particles."""
    monkeypatch.setattr(arrival, "MIN_NOISE", 1e3)
    monkeypatch.setattr(arrival, "spread_of_energies", lambda dimension: 1e6)
    kernel = SGLD(network, preconditioner="diagonal")
    state, _ = warmed(kernel, 25, hidden=5)
    assert not state.warmup.arrival.is_prolonged
    plain, corrected = state.warmup.measurements.mean_isotropic_noise
    assert 0.1 < plain < 1e3 and corrected > 0.5 * plain
    # The curvature around a few lost networks hides the noise, but not that others have not arrived either.
    monkeypatch.setattr(arrival, "spread_of_energies", lambda dimension: 0.0)
    state, _ = warmed(kernel, 25, hidden=5)
    assert state.warmup.arrival.is_prolonged


@pytest.mark.parametrize("settings", [{"gradient": Subsampled()}, {"gradient": SVRG()}, {"step_size": 1e-5}])
def test_without_a_common_reference_nothing_can_be_told(settings):
    state, _ = warmed(SGLD(network, **settings), 1, hidden=5)
    assert state.warmup.arrival.is_prolonged is None


@pytest.mark.slow
def test_standardized_weights_have_no_neck(monkeypatch):
    """Where noise is large, the density of the weights themselves is highest at 0, and λ is in the thousands there."""
    noise = random.normal(random.key(5), (N,))
    # Networks fit noise worse than what lies between them, so the arrival would end as usual.
    monkeypatch.setattr(arrival, "CONVEX", 1.1)

    def precision(seed, **settings):
        kernel = SGNHT(network, num_steps=10, preconditioner="diagonal", **settings)
        keys = random.split(random.key(seed), PARTICLES)
        kwargs = {"subsample_size": BATCH, "hidden": 50}
        state = kernel.init(keys, 160, None, (X, noise), kwargs)
        sample = jax.jit(lambda state: kernel.sample(state, (X, noise), kwargs))
        for _ in range(128):
            state = sample(state)
        assert state.warmup.arrival.is_prolonged
        return np.exp(np.asarray(state.z["weight_precision"]))

    assert np.median(precision(0)) < 200
    assert np.median(precision(0, reparam=None)) > 1000


@pytest.mark.slow
def test_a_long_second_half_ends_after_a_number_of_passes(monkeypatch):
    """With 200 rows and minibatches of 20, one pass takes one iteration of ten updates."""

    def arriving(iterations):
        state, _ = warmed(SGNHT(network, preconditioner="diagonal"), iterations, hidden=5)
        assert state.warmup.arrival.is_prolonged
        return (np.asarray(state.step_size) == np.float32(LATE_RATE)).all()

    assert arriving(30)
    monkeypatch.setattr(arrival, "MAX_PASSES", 2)
    assert arriving(27) and not arriving(30)


def test_particles_follow_the_direction_of_svgd_only_while_their_arrival_is_prolonged(monkeypatch):
    def positions(kernel, **settings):
        return warmed(kernel, 40, **settings)[0].z

    def along_gradients():
        monkeypatch.setattr(iteration, "svgd_direction", lambda u, gradient: gradient)

    network_kernel = SGNHT(network, preconditioner="diagonal")
    together, usual = positions(network_kernel, hidden=5), positions(SGLD(regression))
    along_gradients()
    alone = positions(network_kernel, hidden=5)
    assert not np.allclose(together["w1"], alone["w1"], rtol=1e-2)
    # Another program rounds differently.
    np.testing.assert_allclose(positions(SGLD(regression))["w"], usual["w"], rtol=1e-3, atol=1e-4)


def counts(X, y, subsample_size, prior=1.0):
    w = numpyro.sample("w", dist.Normal(0, prior).expand([4]).to_event(1))
    with numpyro.plate("rows", len(y), subsample_size=subsample_size) as i:
        numpyro.sample("y", dist.Poisson(jnp.exp(X[i] @ w)), obs=y[i])


@pytest.mark.filterwarnings("ignore:num_warmup=20 is too short")
@pytest.mark.parametrize("seed", [4, 5])
def test_particles_on_their_way_to_one_mode_arrive_as_usual(seed, monkeypatch):
    """Their gradients differ far more than at the mode, but U is convex between them."""
    y = random.poisson(random.key(3), jnp.exp(X @ jnp.array([0.5, -0.5, 0.2, 0.0]))).astype(jnp.float32)

    def arrived():
        state, _ = warmed(SGLD(counts), round(20 * ARRIVED), 20, seed, y=y, prior=2.0)
        return bool(state.warmup.arrival.is_prolonged)

    assert not arrived()
    monkeypatch.setattr(arrival, "CONVEX", 1.1)
    assert arrived()


@pytest.mark.parametrize(
    "scale", ["dense", *(pytest.param(name, marks=pytest.mark.slow) for name in ("low_rank", "diagonal"))]
)
def test_particles_that_the_scales_sent_away_return_and_arrive_longer(scale, monkeypatch):
    """So far away U may be convex between networks, which says nothing of where they came from."""
    monkeypatch.setattr(arrival, "CONVEX", 0.0)
    kernel = SGNHT(network, preconditioner=scale)
    state, kwargs = warmed(kernel, int(100 * ARRIVED) - 1, hidden=5)
    halfway = state.warmup.arrival.halfway
    sample = jax.jit(lambda state: kernel.sample(state, (X, Y), kwargs))
    positions, energy = state.coordinates
    away = state._replace(coordinates=(30.0 * positions, energy))
    assert not sample(state).warmup.arrival.is_prolonged
    found = sample(away)
    assert found.warmup.arrival.is_prolonged
    _, unravel = jax.flatten_util.ravel_pytree(jax.tree.map(lambda x: x[0], state.z))
    for name, back in jax.vmap(unravel)(halfway.reshape(PARTICLES, -1)).items():
        np.testing.assert_allclose(found.z[name], back, rtol=2e-4, atol=1e-5)


@pytest.fixture(scope="module")
def before_arrival():
    """Just before the end of the arrival of a regression of counts: a usual state, and one with a lost particle."""
    y = random.poisson(random.key(3), jnp.exp(X @ jnp.array([0.5, -0.5, 0.2, 0.0]))).astype(jnp.float32)
    kwargs = {"subsample_size": BATCH}

    def states(scale):
        kernel = SGLD(counts, preconditioner=scale)
        state = kernel.init(random.split(random.key(2), PARTICLES), 100, None, (X, y), kwargs)
        sample = jax.jit(lambda state: kernel.sample(state, (X, y), kwargs))
        for _ in range(int(100 * ARRIVED) - 1):
            state = sample(state)
        # Its expected counts are thousands, and so is the curvature there.
        lost = state._replace(z={"w": state.z["w"].at[3, 0].add(3.0)})

        # Compiled anew after a change of the package.
        return state, lost, lambda state: jax.jit(lambda state: kernel.sample(state, (X, y), kwargs))(state)

    return states


SCALES = ["dense", *(pytest.param(name, marks=pytest.mark.slow) for name in ("low_rank", "diagonal"))]


@pytest.mark.parametrize("scale", SCALES)
def test_a_lost_particle_does_not_set_the_scales_of_all(before_arrival, scale, monkeypatch):
    state, lost, sample = before_arrival(scale)
    usual, found = sample(state), sample(lost)
    assert np.flatnonzero(found.warmup.arrival.lost).tolist() == [3] and not found.warmup.arrival.is_prolonged

    def drift(state):
        """How much the scales differ from the usual ones."""
        there, here = (x.warmup.scales.preconditioner.lengths() for x in (state, usual))
        return float(jnp.abs(jnp.log(there / here)).max())

    without = drift(found)
    monkeypatch.setattr(scales, "rescue", lambda key, particles, lost: particles)
    assert without < drift(sample(lost)) / 2


@pytest.mark.slow
def test_a_lost_particle_neither_shortens_the_step_nor_prolongs_the_arrival(before_arrival, monkeypatch):
    state, lost, sample = before_arrival("dense")
    usual, found = sample(state).warmup, sample(lost).warmup
    np.testing.assert_allclose(found.step.size, usual.step.size, rtol=0.5)
    assert found.reference.in_use
    monkeypatch.setattr(arrival, "CONVEX", 1.1)
    assert not sample(lost).warmup.arrival.is_prolonged
    monkeypatch.setattr(step_size, "rescue", lambda key, particles, lost: particles)
    assert sample(lost).warmup.arrival.is_prolonged
