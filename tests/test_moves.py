"""Jumps leave the posterior alone, one by one and between updates, and bring particles to all modes.

Statistics are compared with their standard errors; each comparison has a control that must fail.
"""

from functools import partial

import jax
from jax import lax, random
import jax.numpy as jnp
from models import vectorized
import numpy as np
import pytest

import numpyro
import numpyro.distributions as dist
from numpyro.infer import init_to_uniform

from benchmarks.problems.targets import gaussian_mixture
from numpyro_repulsion import SGHMCR, SGLD, SGLDR, SVGD, Archive, Balanced, FullData, moves
from numpyro_repulsion.dynamics import Cloud, Overdamped

LIMIT = 4.5
CENTERS = jnp.array([-1.5, 1.5])


def energy(z):
    """½ N(−1.5, ½) + ½ N(1.5, ½) along the first axis, and a wide Gaussian along the second."""
    return -jax.nn.logsumexp(-((z[0] - CENTERS) ** 2)) + z[1] ** 2 / 4.0


energy_and_grad = jnp.vectorize(jax.value_and_grad(energy), signature="(d)->(),(d)")


def exact(key, shape):
    side_key, key = random.split(key)
    side = CENTERS[random.randint(side_key, shape, 0, 2)]
    z = random.normal(key, (*shape, 2)) * jnp.array([0.5**0.5, 2.0**0.5])
    return z.at[..., 0].add(side)


FUNCTIONS = {
    "E x": (lambda z: z[..., 0], 0.0),
    "E x²": (lambda z: z[..., 0] ** 2, 1.5**2 + 0.5),
    "E y²": (lambda z: z[..., 1] ** 2, 2.0),
    "E xy": (lambda z: z[..., 0] * z[..., 1], 0.0),
    "P(|x| > 1.5)": (lambda z: (jnp.abs(z[..., 0]) > 1.5).astype(float), 0.5 + 1.1e-5),
}


def z_score(samples, mean):
    samples = np.asarray(samples, np.float64)
    return (samples.mean() - mean) / (samples.std(ddof=1) / len(samples) ** 0.5)


def filled(kind, size=32):
    """An archive that is no good: off the center, lopsided and of the wrong width."""
    components = random.normal(random.key(5), (size, 2)) + jnp.array([0.7, -0.5])
    start = Archive(32).start(Cloud(jnp.zeros((1, 4, 2)), *energy_and_grad(jnp.zeros((1, 4, 2)))), 100, True)
    scale = jnp.array([[0.8, 0.0], [0.3, 1.2]])
    return start._replace(components=components, scale=scale, variance=jnp.array(0.6), kind=jnp.array(kind))


def scores_after_jumps(kind, stratified, seed=0, temperature=1.0, replicas=20_000, size=4, turns=4):
    jumps = filled(kind)

    def warm(z):  # at its temperature the same law
        return jax.tree.map(lambda x: temperature * x, energy_and_grad(z))

    @jax.jit
    def run(key):
        draw_key, key = random.split(key)
        z = exact(draw_key, (replicas, size))

        def turn(cloud, key):
            cloud, _, probability = Archive().jump(key, cloud, jumps, warm, temperature, stratified)
            return cloud, probability.mean()

        cloud, probability = lax.scan(turn, Cloud(z, *warm(z)), random.split(key, turns))
        return cloud.z, probability

    z, probability = run(random.key(seed))
    assert 0.1 < probability.mean() < 0.9
    return {name: z_score(f(z).mean(-1), mean) for name, (f, mean) in FUNCTIONS.items()}


KINDS = [(moves.DENSITY, True), (moves.DENSITY, False), (moves.DIFFERENCES, False)]


OTHERS = [pytest.param(*others, marks=pytest.mark.slow) for others in ((1, 1.0), (2, 0.5), (3, 2.0))]


@pytest.mark.parametrize(("seed", "temperature"), [(0, 1.0), *OTHERS])
@pytest.mark.parametrize(("kind", "stratified"), KINDS)
def test_jumps_leave_exact_draws_exact(kind, stratified, seed, temperature):
    scores = scores_after_jumps(kind, stratified, seed, temperature)
    assert max(map(abs, scores.values())) < LIMIT, scores


@pytest.mark.parametrize(("kind", "name"), [(2, "_from_density"), (1, "_by_differences")])
def test_jumps_without_the_way_back_are_not_exact(monkeypatch, kind, name):
    propose = getattr(moves, name)

    def forgetful(*args):
        proposal, there, _ = propose(*args)
        return proposal, there, there

    monkeypatch.setattr(moves, name, forgetful)
    scores = scores_after_jumps(kind, False)
    assert max(map(abs, scores.values())) > 2 * LIMIT, scores


@pytest.mark.parametrize("distance", [1.0, 3000.0])
def test_densities_are_right_where_modes_are_far(distance):
    u, components = distance + random.normal(random.key(0), (2, 40, 3))
    found = moves._squared_distances(u[None], components)[0]
    exact = ((np.asarray(u, float)[:, None] - np.asarray(components, float)) ** 2).sum(-1)
    np.testing.assert_allclose(found, exact, rtol=1e-5)
    # The control: an expanded square.
    expanded = (u**2).sum(-1)[:, None] + (components**2).sum(-1) - 2.0 * u @ components.T
    assert (np.abs(expanded - exact).max() > 1.0) == (distance > 1.0)


def test_each_component_is_as_likely_as_any_other():
    for size in (3, 4, 20):
        draw = jax.jit(jax.vmap(lambda key, size=size: moves._indices(key, (1, size), 32, True)))
        indices = np.asarray(draw(random.split(random.key(0), 6000)))
        first = np.bincount(indices[:, 0, 0], minlength=32)
        error = (6000 / 32 * (1 - 1 / 32)) ** 0.5
        assert np.abs(first - 6000 / 32).max() < LIMIT * error
        # An ensemble shares them out: no stratum is met by more than one particle.
        spread = np.sort(indices[:, 0] * size // 32, -1)
        assert (np.diff(spread, axis=-1) >= 0).all()
        assert (np.abs(spread - np.arange(size)) <= 1).all()


def test_strata_of_many_particles_are_counted_in_32_bits():
    cloud = Cloud(jnp.zeros((1, 4096, 1)), jnp.zeros((1, 4096)), jnp.zeros((1, 4096, 1)))
    jumps = jax.eval_shape(lambda: Archive(2**20).start(cloud, 10_000, False))
    size = len(jumps.components)
    assert size * 4096 < 2**31
    indices = moves._indices(random.key(0), (1, 4096), size, True)
    assert (indices >= 0).all() and int(indices.max()) > 0.99 * size


@pytest.mark.parametrize("temperature", [1e-6, 1.0, 100.0])
def test_the_density_is_as_wide_as_the_temperature_makes_modes(temperature):
    v = temperature**0.5 * random.normal(random.key(0), (256, 2))
    _, variance = moves._likeliest(v, v, jnp.arange(256) % 8, temperature)
    assert 0.5 < variance / temperature < 2.0


def test_gradients_too_long_to_be_squared_leave_their_scale_alone():
    gradient = np.array(random.normal(random.key(0), (64, 2)))
    gradient[0, 1] = 1e30
    jumps = Archive(64).start(Cloud(jnp.zeros((1, 4, 2)), *energy_and_grad(jnp.zeros((1, 4, 2)))), 100, False)
    with np.errstate(over="ignore"):  # as learners run
        scale = moves._within(gradient, jumps, 1.0).scale
    assert scale[1] == 1.0 and 0.5 < scale[0] < 2.0


def test_neighbors_in_the_archive_are_neighbors_in_space():
    u = random.normal(random.key(0), (256, 3))
    order = moves._order_in_space(u)
    assert sorted(order.tolist()) == list(range(256))
    near = jnp.linalg.norm(jnp.diff(u[order], axis=0), axis=1).mean()
    assert near < 0.5 * jnp.linalg.norm(jnp.diff(u, axis=0), axis=1).mean()


def variances(dynamics, jumped, seed=0, replicas=200, size=6, updates=600):
    """Of N(0, I₂) over time, with a jump in every other update; one for each replica."""

    def slope(z):
        return 0.5 * jnp.sum(z**2, -1), z

    jumps = filled(moves.DENSITY)._replace(scale=jnp.eye(2))
    couple = Balanced().couple

    @jax.jit
    def run(key):
        draw_key, init_key, key = random.split(key, 3)
        z = random.normal(draw_key, (replicas, size, 2))
        cloud = dynamics.init(init_key, z, slope, couple)

        def update(cloud, keys):
            cloud = dynamics.step(keys[0], cloud, slope, couple, 0.2)
            moved, which, _ = Archive().jump(keys[1], cloud, jumps, slope, 1.0, True)
            cloud = jumped(moved, which)
            return cloud, jnp.mean(cloud.z**2, (-1, -2))

        return lax.scan(update, cloud, random.split(key, (updates, 2)))[1].mean(0)

    return run(random.key(seed))


@pytest.mark.slow
def test_averaged_noise_is_begun_anew_after_a_jump():
    # Of what LM does to a Gaussian nothing is left but the first step after a jump: (ελ/4)² of the variance.
    dynamics = Overdamped("lm")
    square = variances(dynamics, dynamics.jumped)
    assert abs(z_score(square, 1.0)) < LIMIT + 0.05**2 / (np.std(square) / len(square) ** 0.5)
    # The control: the carried noise kept.
    assert z_score(variances(dynamics, lambda cloud, which: cloud), 1.0) < -2 * LIMIT


def run(kernel, seed=0, num_warmup=50, num_samples=50, size=20, **kwargs):
    mcmc = vectorized(kernel, num_warmup, num_samples, size, **kwargs)
    mcmc.run(random.key(seed))
    return mcmc


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [SGLD, SGLDR, SGHMCR])
def test_all_modes_are_met_at_their_width(kernel):
    kernel = kernel(gaussian_mixture, moves=Archive(), init_strategy=init_to_uniform)

    @jax.jit
    def sample(state):
        return lax.scan(lambda state, _: (kernel.sample(state, (), {}),) * 2, state, length=50)[1]

    def statistics(seed):
        state = kernel.init(random.split(random.key(seed), 20), 50)
        states = sample(state)
        assert int(state.learned.jumps.kind) == moves.DENSITY
        # Nothing is learned once draws are kept.
        frozen = zip(*(jax.tree.leaves(x.learned.jumps._replace(tally=())) for x in (state, states)), strict=True)
        assert all(np.array_equal(jnp.broadcast_to(x, y.shape), y) for x, y in frozen)
        z = np.asarray(states.z["z"], float).reshape(-1, 2)
        center = 2 * np.clip(np.round(z / 2), -1, 1)
        corners = (np.abs(center).sum(-1) == 4).mean()
        return (*z.mean(0), ((z - center) ** 2).mean(), corners)

    found = np.array([statistics(seed) for seed in range(16)])
    # Points cut off at the middle between modes, √10 of them away, lower the variance by 1 %.
    expected = (0.0, 0.0, 0.1, 4 / 9)
    slack = (0.0, 0.0, 0.002, 0.0)
    error = found.std(0, ddof=1) / len(found) ** 0.5
    assert (np.abs(found.mean(0) - expected) < LIMIT * error + slack).all(), (found.mean(0), error)
    # Where particles stay in their modes, the share of the corners varies as that of 20 draws.
    alone = 4 / 9 * 5 / 9 / 20
    assert found[:, 3].var(ddof=1) < alone / 10


def test_what_works_best_is_chosen():
    def chosen(differences, density):
        jumps = jax.device_get(filled(moves.DENSITY))._replace(acceptance=np.array([0.0, differences, density]))
        return int(Archive()._choose(jumps, None).kind)

    assert chosen(0.5, 0.12) == moves.DENSITY
    assert chosen(0.5, 0.05) == moves.DIFFERENCES
    assert chosen(0.03, 0.05) == moves.DENSITY
    assert chosen(0.01, 0.015) == moves.NONE


def wide(d=200):
    """Two modes that no density of a few hundred points covers, by chance neither."""
    shift = jnp.zeros(d).at[0].set(4.0)
    heavy = dist.StudentT(4.0, jnp.stack([-shift, shift]), 1.0).to_event(1)
    numpyro.sample("z", dist.MixtureSameFamily(dist.Categorical(probs=jnp.ones(2) / 2), heavy))


def test_a_failed_archive_is_spoken_of():
    mcmc = run(SGLD(wide, moves=Archive(16), step_size=0.3), size=4, num_samples=2)
    assert mcmc.last_state.learned.jumps is None
    (finding,) = mcmc.sampler.findings(mcmc.last_state)
    assert finding.name == "jumps_off" and "almost never accepted" in finding.message


def model(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("rows", len(y), subsample_size=2) as i:
        numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])


@pytest.mark.parametrize(
    ("make", "kwargs", "words"),
    [
        (partial(SVGD, gaussian_mixture), {}, "need a sampler"),
        (partial(SGLDR, gaussian_mixture, dynamics=Overdamped("lm")), {}, "averaged over two updates"),
        (partial(SGLD, gaussian_mixture, step_size=0.1), {"num_warmup": 0}, "set num_warmup"),
        (partial(SGLD, gaussian_mixture), {"size": 1}, "2 particles or more"),
    ],
)
def test_what_cannot_be_exact_is_refused(make, kwargs, words):
    with pytest.raises(ValueError, match=words):
        run(make(moves=Archive()), **kwargs)


def test_minibatches_are_refused_and_all_rows_are_not():
    y = jnp.arange(6.0)
    with pytest.raises(ValueError, match=r"gradient=FullData\(\)"):
        SGLD(model, moves=Archive()).init(random.split(random.key(0), 4), 50, None, (y,), {})
    kernel = SGLD(model, moves=Archive(), gradient=FullData())
    jax.eval_shape(lambda: kernel.start(random.split(random.key(0), 4), 50, None, (y,), {}))


def noisy():
    z = numpyro.sample("z", dist.Normal(0, 1))
    numpyro.factor("estimate", -(z**2) + random.normal(numpyro.prng_key()))


def test_random_likelihoods_are_refused_whatever_the_gradient():
    for gradient in ("auto", FullData()):
        with pytest.raises(ValueError, match=r"likelihood of this model is random \(numpyro.prng_key\): drop `moves`"):
            SGLD(noisy, moves=Archive(), gradient=gradient).init(random.split(random.key(0), 4), 50, None, (), {})


@pytest.mark.parametrize("size", [3, 100, 16.0, True])
def test_sizes_that_cannot_be_halved_are_refused(size):
    assert Archive(np.int64(32)) == Archive(32)
    with pytest.raises(ValueError, match="power of two"):
        Archive(size)
    with pytest.raises(TypeError, match=r"such as Archive\(\)"):
        SGLD(gaussian_mixture, moves=Archive)
