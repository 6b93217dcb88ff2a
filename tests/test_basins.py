"""Several basins: particles jump between them by themselves where that is exact, and words say so where they do not."""

import warnings

import jax
from jax import random
import jax.numpy as jnp
from models import vectorized
import numpy as np
import pytest

import numpyro
import numpyro.distributions as dist

from numpyro_repulsion import SGLD, SGLDR, SGNHT, SVGD, ensemble_mcse, extrapolate, to_inference_data
from numpyro_repulsion.dynamics import Cloud, Overdamped
from numpyro_repulsion.moves import DENSITY, Basins

LIMIT = 4.5
WORDS = "several_basins"


def oscillation():
    """A wave whose frequency and phase are unknown, fitted with the wrong number of turns in a second basin."""
    t = jnp.linspace(0.0, 10.0, 40)
    y = 1.5 * jnp.cos(2.1 * t + 0.7) + 0.5 * random.normal(random.key(3), (40,))
    amplitude = numpyro.sample("amplitude", dist.LogNormal(0, 1))
    frequency = numpyro.sample("frequency", dist.Uniform(1.0, 3.5))
    phase = numpyro.sample("phase", dist.Normal(0, 1))
    numpyro.sample("y", dist.Normal(amplitude * jnp.cos(frequency * t + phase), 0.5).to_event(1), obs=y)


def damped():
    """A damped oscillator, with basins of too low and too high a frequency."""
    t = jnp.linspace(0.0, 8.0, 50)
    y = 3.0 * jnp.exp(-0.3 * t) * jnp.sin(3.0 * t) + 0.3 * random.normal(random.key(4), (50,))
    amplitude = numpyro.sample("amplitude", dist.HalfNormal(5))
    frequency = numpyro.sample("frequency", dist.LogNormal(0.7, 0.5))
    damping = numpyro.sample("damping", dist.HalfNormal(1))
    noise = numpyro.sample("noise", dist.HalfNormal(1))
    wave = amplitude * jnp.exp(-damping * t) * jnp.sin(frequency * t)
    numpyro.sample("y", dist.Normal(wave, noise).to_event(1), obs=y)


def labels():
    """A mixture of two normals whose labels may be exchanged."""
    mean = numpyro.sample("mean", dist.Normal(0, 5).expand([2]).to_event(1))
    scale = numpyro.sample("scale", dist.HalfNormal(2))
    y = jnp.concatenate([-2.0 + random.normal(random.key(5), (60,)), 2.0 + random.normal(random.key(6), (60,))])
    mixture = dist.MixtureSameFamily(dist.Categorical(probs=jnp.ones(2) / 2), dist.Normal(mean, scale))
    with numpyro.plate("row", 120):
        numpyro.sample("y", mixture, obs=y)


def regressions():
    """A mixture of two regressions."""
    x = random.normal(random.key(7), (150,))
    first = random.bernoulli(random.key(8), 0.5, (150,))
    y = jnp.where(first, 1.0 + 2.0 * x, -1.0 - x) + 0.5 * random.normal(random.key(9), (150,))
    intercept = numpyro.sample("intercept", dist.Normal(0, 3).expand([2]).to_event(1))
    slope = numpyro.sample("slope", dist.Normal(0, 3).expand([2]).to_event(1))
    noise = numpyro.sample("noise", dist.HalfNormal(1))
    lines = dist.Normal(intercept + x[:, None] * slope, noise)
    with numpyro.plate("row", 150):
        numpyro.sample("y", dist.MixtureSameFamily(dist.Categorical(probs=jnp.ones((150, 2)) / 2), lines), obs=y)


def contaminated(z, scale):
    return dist.MixtureSameFamily(
        dist.Categorical(probs=jnp.array([0.95, 0.05])), dist.Normal(z, jnp.array([scale, 10.0]))
    )


def conflict():
    """Two measurements that contradict each other, either of which may be an outlier."""
    z = numpyro.sample("z", dist.Normal(0, 10))
    numpyro.sample("other", dist.Normal(z, 1))
    numpyro.sample("y", contaminated(z, 0.3), obs=3.0)
    numpyro.sample("x", contaminated(z, 0.4), obs=-3.0)


def spike_and_slab():
    """A narrow normal beside a wide one."""
    both = dist.Normal(jnp.array([0.0, 5.0]), jnp.array([0.05, 1.0]))
    numpyro.sample("z", dist.MixtureSameFamily(dist.Categorical(probs=jnp.array([0.3, 0.7])), both))
    numpyro.sample("other", dist.Normal(0, 1).expand([2]).to_event(1))


def weight_of_conflict():
    z = np.linspace(-40.0, 40.0, 400_001)

    def density(y, scale):
        return sum(w * np.exp(-(((y - z) / s) ** 2) / 2) / s for w, s in ((0.95, scale), (0.05, 10.0)))

    mass = np.exp(-(z**2) / 200) * density(3.0, 0.3) * density(-3.0, 0.4)
    return mass[z < 0].sum() / mass.sum()


#: By model: whether a draw is in the basin, and the basin's weight.
BASINS = {
    oscillation: (lambda x: np.abs(x["frequency"] - 2.1) < 0.15, 1.0),
    damped: (lambda x: np.abs(x["frequency"] - 3.0) < 0.15, 1.0),
    labels: (lambda x: x["mean"][..., 0] < x["mean"][..., 1], 0.5),
    regressions: (lambda x: x["slope"][..., 0] < x["slope"][..., 1], 0.5),
    conflict: (lambda x: x["z"] < 0, weight_of_conflict()),
    spike_and_slab: (lambda x: x["z"] < 1.0, 0.3),
}


def runs(model, seeds, kernel=SGLD, num_warmup=1000, num_samples=1000, **kwargs):
    """Runs for some seeds, by one compiled program: the draws, and what warmup finds wrong."""
    mcmc = vectorized(kernel(model, **kwargs), num_warmup, num_samples, 20)
    for seed in seeds:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            mcmc.run(random.key(seed))
        yield mcmc.get_samples(group_by_chain=True), " ".join(map(str, mcmc.sampler.findings(mcmc.last_state))), mcmc


def check(model, draws, words):
    inside, weight = BASINS[model]
    here = np.asarray(inside(draws), float)
    error = np.nan_to_num(np.asarray(ensemble_mcse(here)), nan=0.0)
    # A thousand iterations know no weight better than to a few in a thousand.
    assert WORDS in words or abs(here.mean() - weight) < LIMIT * max(error, 0.005)


@pytest.fixture(scope="module")
def spiked():
    """A run with a spike and a slab."""
    ((draws, words, mcmc),) = runs(spike_and_slab, [1])
    return draws, words, mcmc


def test_the_weights_of_a_spike_and_a_slab_are_right(spiked):
    draws, words, _ = spiked
    check(spike_and_slab, draws, words)
    assert words == ""


@pytest.mark.slow
@pytest.mark.parametrize("model", BASINS)
def test_weights_are_right_or_the_words_are(model):
    for draws, words, _ in runs(model, range(20)):
        check(model, draws, words)


def test_without_jumps_the_weights_are_those_of_the_start_and_the_words_say_so():
    inside, weight = BASINS[spike_and_slab]
    ((draws, words, mcmc),) = runs(spike_and_slab, [1], moves=False, num_samples=200)
    assert WORDS in words and "moves=Archive()" in words and mcmc.last_state.learned.jumps is None
    assert abs(np.asarray(inside(draws)).mean() - weight) > 0.05
    # Longer steps would not help, so that warmup does not take them.
    assert "too large" not in words


def test_a_single_basin_is_left_alone():
    def normal():
        numpyro.sample("z", dist.Normal(0, 1).expand([5]).to_event(1))

    draws, states = [], []
    for moves in ("auto", False):
        ((found, words, mcmc),) = runs(normal, [0], num_warmup=100, num_samples=20, moves=moves)
        draws.append(np.asarray(found["z"]))
        states.append(mcmc.last_state)
        assert words == ""
    # The same draws, but that two programs round differently.
    np.testing.assert_allclose(*draws, atol=1e-3)
    assert states[0].learned.jumps is None


def begun(kernel, *args):
    """The shapes of a kernel's first state."""
    return jax.eval_shape(lambda: kernel.start(random.split(random.key(0), 4), 100, None, args, {}))


@pytest.mark.parametrize(
    ("kernel", "settings"),
    [
        (SGLDR, {}),  # Averaged noise that is correlated by K cannot be carried over a jump.
        (SGLD, {"step_size": 0.1}),  # With a given step nothing is measured.
        (SVGD, {"step_size": 0.1}),
        (SGLD, {"moves": False}),
    ],
)
def test_where_jumps_would_not_be_exact_or_are_not_wanted_there_are_none(kernel, settings):
    state = begun(kernel(labels, **settings))
    assert not hasattr(state, "warmup") or state.warmup.jumps is None


def test_momenta_and_kernels_with_other_dynamics_may_jump():
    for kernel in (SGNHT(labels), SGLDR(labels, dynamics=Overdamped("euler"))):
        assert begun(kernel).warmup.jumps is not None


def test_minibatches_do_not_jump():
    def model(y):
        z = numpyro.sample("z", dist.Normal(0, 1))
        with numpyro.plate("rows", len(y), subsample_size=5) as i:
            numpyro.sample("y", dist.Normal(z**2, 1), obs=y[i])

    assert begun(SGLD(model), jnp.arange(20.0)).warmup.jumps is None


def test_a_kernel_that_never_jumps_does_not_go_on_jumping(spiked):
    state = spiked[-1].last_state
    assert state.learned.jumps.kind == DENSITY

    def tally_after(state):
        return jax.jit(lambda state: SGLD(spike_and_slab).sample(state, (), {}))(state).learned.jumps

    assert float(tally_after(state).tally[0]) == float(state.learned.jumps.tally[0]) + 1
    assert tally_after(state._replace(learned=state.learned._replace(jumps=None))) is None


def test_jumps_that_nobody_asked_for_are_told(spiked):
    _, _, mcmc = spiked
    assert "Basins" in to_inference_data(mcmc).posterior.attrs["moves"]
    with pytest.raises(ValueError, match="Jumps between basins are exact for any step size"):
        extrapolate(mcmc)


def test_jumps_that_nobody_asked_for_take_little_memory():
    def size(dimension):
        z = jax.ShapeDtypeStruct((1, 20, dimension), jnp.float32)
        state = jax.eval_shape(lambda z: Basins().start(Cloud(z, z[..., 0], z), 1000, False), z)
        return len(state.components)

    assert [size(dimension) for dimension in (3, 1000, 100_000)] == [1024, 1024, 32]
