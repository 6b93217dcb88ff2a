"""The potential energy against NumPyro's, and minibatches by enumerating them all."""

from functools import cache, partial
import itertools

import jax
from jax import random
from jax.example_libraries import stax
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
import numpy as np
from programs import shapes
import pytest
from scipy import stats

import numpyro
from numpyro import handlers
from numpyro.contrib.module import eqx_module
import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.infer import init_to_feasible, init_to_sample, init_to_uniform, init_to_value
from numpyro.infer.reparam import LocScaleReparam
from numpyro.infer.util import initialize_model

from numpyro_repulsion import SGLD
from numpyro_repulsion.gradients import (
    FullData,
    FunctionTarget,
    Gradient,
    ModelTarget,
    Subsampled,
    draw_indices,
    likelihood_energies,
)

KEY = random.key(0)


# --- Which rows: the law of a minibatch, written out, and the draws' agreement with it. ---


def minibatches(size, batch, block=1):
    """All minibatches of one plate, equally likely: stratum j of k gives a block from floor((j·size + r) / k), r = 0..
    size−1, in a circle."""
    count = batch // block
    strata = [[(j * size + r) // count for r in range(size)] for j in range(count)]
    first = np.array(list(itertools.product(*strata)))
    return ((first[..., None] + np.arange(block)) % size).reshape(len(first), batch)


@pytest.mark.parametrize(
    ("size", "batch", "block"), [(7, 3, 1), (6, 3, 1), (4, 1, 1), (5, 4, 1), (7, 4, 2), (5, 3, 3), (8, 6, 2)]
)
def test_draws_follow_the_law_by_which_rows_are_equally_likely(size, batch, block):
    rows, counts = np.unique(minibatches(size, batch, block), return_counts=True)
    assert rows.tolist() == list(range(size)) and len(set(counts)) == 1
    law, counts = np.unique(minibatches(size, batch, block), axis=0, return_counts=True)
    number = 20_000
    rows = draw_indices(KEY, {"rows": (size, batch)}, (number // 4, 4), block)["rows"]
    given, observed = np.unique(rows.reshape(number, batch), axis=0, return_counts=True)
    assert given.tolist() == law.tolist()
    assert stats.chisquare(observed, counts / counts.sum() * number).pvalue > 1e-6


def test_blocks_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="plate 'rows' with subsample_size=6. Use block_size=2"):
        draw_indices(KEY, {"rows": (9, 6)}, (), 4)


def test_blocks_of_a_huge_plate_go_round():
    size, batch = 2**31 - 2, 2**16
    keys = random.split(KEY, 2**18)
    # A single block begins with the row that would be drawn alone; few begin so late that they must go round.
    first = jax.vmap(lambda key: draw_indices(key, {"rows": (size, 1)})["rows"][0])(keys)
    late = np.flatnonzero(np.asarray(first) > size - batch)
    assert 0 < len(late) < 50
    for i in late[:3]:
        rows = np.asarray(draw_indices(keys[i], {"rows": (size, batch)}, (), batch)["rows"], np.int64)
        assert rows.tolist() == ((int(first[i]) + np.arange(batch)) % size).tolist()


def test_plates_are_drawn_independently():
    draw = jax.vmap(lambda key: draw_indices(key, {"a": (2, 1), "b": (2, 1)}))
    indices = draw(random.split(KEY, 20_000))
    table = np.histogram2d(indices["a"][:, 0], indices["b"][:, 0], bins=2)[0].ravel()
    assert stats.chisquare(table).pvalue > 1e-6


def test_cost_does_not_grow_with_the_data():
    size, batch = 10**7, 16

    def model(X, y):
        z = numpyro.sample("z", dist.Normal(0, 1).expand([2]).to_event(1))
        with numpyro.plate("rows", size, subsample_size=batch) as i:
            numpyro.sample("y", dist.Normal(take(X, i) @ z, 1), obs=y[i])

    def energy_and_grad(key, X, y, z):
        target = ModelTarget(model, (X, y))
        return Subsampled().energy_and_grad(key, target, lambda flat: {"z": flat}, z)

    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((size, 2), (size,), (1, 3, 2))]
    program = jax.make_jaxpr(energy_and_grad)(KEY, *arguments)
    found = [np.prod(shape) for shape in shapes(program.jaxpr)]
    assert 3 * batch * 2 <= max(found) < size


# --- Unbiased: the average over all minibatches is the gradient on all data. ---

RNG = np.random.default_rng(0)
X, Y, GROUPS = RNG.normal(size=(7, 2)), RNG.normal(size=7), np.array([0, 1, 2, 0, 1, 2, 2])
X2, Y2, TABLE = RNG.normal(size=(5, 2)), RNG.normal(size=5), RNG.normal(size=(4, 3))


def take(array, rows):
    """Rows of captured data, in the precision of the test."""
    return jnp.asarray(array)[rows]


def coefficients():
    return numpyro.sample("z", dist.Normal(0, 2).expand([2]).to_event(1))


def indexed(batch=3):
    z = coefficients()
    with numpyro.plate("rows", 7, subsample_size=batch) as i:
        numpyro.sample("y", dist.Normal(take(X, i) @ z, jnp.exp(z[0])), obs=take(Y, i))


def subsampled(batch=3):
    z, scale = coefficients(), numpyro.sample("scale", dist.HalfNormal(1))
    with numpyro.plate("rows", 7, subsample_size=batch):
        x, y = numpyro.subsample(X, event_dim=1), numpyro.subsample(Y, event_dim=0)
        numpyro.sample("y", dist.Normal(x @ z, scale), obs=y)


def two_plates(batch=2, batch2=3):
    z = coefficients()
    with numpyro.plate("rows", 7, subsample_size=batch) as i:
        numpyro.sample("y", dist.StudentT(3.0, take(X, i) @ z, 1.0), obs=take(Y, i))
    with numpyro.plate("more", 5, subsample_size=batch2) as i:
        numpyro.sample("y2", dist.StudentT(5.0, take(X2, i) @ z, 1.0), obs=take(Y2, i))


def nested(batch=2, batch2=2):
    z = coefficients()
    with numpyro.plate("columns", 3, subsample_size=batch) as j, numpyro.plate("rows", 4, subsample_size=batch2) as i:
        numpyro.sample("y", dist.Cauchy(z[0] + z[1] * j, 1), obs=take(TABLE, (i[:, None], j)))


def beside_a_full_plate(batch=3):
    level = numpyro.sample("level", dist.Normal(0, 1))
    with numpyro.plate("groups", 3):
        z = numpyro.sample("z", dist.Normal(level, 1))
    with numpyro.plate("rows", 7, subsample_size=batch) as i:
        numpyro.sample("y", dist.Logistic(z[take(GROUPS, i)], 1), obs=take(Y, i))


def scaled_and_masked(batch=3):
    z = coefficients()
    rows = numpyro.plate("rows", 7, subsample_size=batch)
    with rows as i, handlers.scale(scale=0.3), handlers.mask(mask=take(Y > 0, i)):
        numpyro.sample("y", dist.Cauchy(take(X, i) @ z, 1), obs=take(Y, i))


def factored(batch=3):
    z = coefficients()
    with numpyro.plate("rows", 7, subsample_size=batch) as i:
        numpyro.factor("penalty", -jnp.log1p((take(X, i) @ z - take(Y, i)) ** 2))


def scoped(batch=3):
    return handlers.scope(indexed, prefix="a")(batch)


MODELS = [indexed, subsampled, two_plates, nested, beside_a_full_plate, scaled_and_masked, factored, scoped]


def without_minibatches(model):
    return partial(model, **dict.fromkeys(model.__code__.co_varnames[: model.__code__.co_argcount]))


def enumerated_indices(target):
    """All outcomes of the minibatches of all plates, equally likely."""
    parts = [minibatches(*sizes) for sizes in target.plates.values()]
    outcomes = list(itertools.product(*parts))
    return {name: jnp.array([outcome[k] for outcome in outcomes]) for k, name in enumerate(target.plates)}


def energy_and_gradient(target):
    return jax.jit(lambda z, rows: jax.value_and_grad(target.potential_energy)(z, rows, KEY))


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_the_average_minibatch_gradient_is_that_of_all_data(x64, model):
    target = ModelTarget(model)
    assert target.plates
    z = target.draw(random.key(1), init_to_uniform)
    each = jax.vmap(energy_and_gradient(target), (None, 0))(z, enumerated_indices(target))
    average = jax.tree.map(lambda x: x.mean(0), each)
    plain = ModelTarget(without_minibatches(model))
    assert plain.plates == {}
    full = energy_and_gradient(plain)(z, {})
    for given in (average, energy_and_gradient(target)(z, target.all_rows)):
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-11, atol=1e-11), given, full)
    # Minibatches differ, or the average would say nothing.
    assert ravel_pytree(jax.tree.map(lambda x: x.std(0), each))[0].max() > 1e-2


# --- Gradient rules: who looks at which rows. ---


def fingerprint():
    """A model whose energy at z = 1, and gradient, tell which rows were seen."""
    z = numpyro.sample("z", dist.ImproperUniform(constraints.real, (), ()))
    with numpyro.plate("rows", 8, subsample_size=2) as i:
        numpyro.factor("f", -z * 2.0**i / 4)


@cache
def fingerprint_force(gradient):
    target = ModelTarget(fingerprint)
    return jax.jit(lambda key, z: gradient.energy_and_grad(key, target, lambda flat: {"z": flat[0]}, z))


def seen(gradient, shape, key=KEY):
    """The sets of rows that the particles of a cloud saw, as bits."""
    energy, slope = fingerprint_force(gradient)(key, jnp.ones((*shape, 1)))
    assert energy.shape == shape and slope.shape == (*shape, 1)
    np.testing.assert_allclose(energy, slope[..., 0])
    return np.asarray(energy).astype(int)


def test_own_minibatches():
    rows = seen(Subsampled(), (3, 40))
    assert all(bin(value).count("1") == 2 for value in rows.ravel())
    # 4 × 4 minibatches; 120 particles of which the next shares one's by chance.
    assert (rows.ravel()[1:] == rows.ravel()[:-1]).mean() < 0.3


def test_shared_minibatches_are_those_of_a_group():
    rows = seen(Subsampled(shared=True), (40, 3))
    assert (rows == rows[:, :1]).all()
    assert (rows[1:, 0] == rows[:-1, 0]).mean() < 0.4
    (single,) = seen(Subsampled(shared=True), (1, 3))
    assert len(set(single)) == 1 and bin(single[0]).count("1") == 2
    assert (seen(Subsampled(shared=True), (3, 1)) > 0).all()


def test_full_data_sees_all_rows():
    # The scale is 1 instead of 4.
    assert (seen(FullData(), (2, 3)) == 255 // 4).all()


def test_minibatches_are_fresh_for_each_key_and_the_same_for_the_same_key():
    for gradient in (Subsampled(), Subsampled(shared=True)):
        first, again, other = (seen(gradient, (4, 5), random.key(seed)) for seed in (0, 0, 1))
        assert (first == again).all() and (first != other).any()


@pytest.mark.parametrize(
    ("gradient", "shape"),
    [
        (Subsampled(), (2, 3)),
        (Subsampled(shared=True), (2, 3)),
        (FullData(), (2, 3)),
        (Subsampled(chunk_size=4), (2, 3)),
        (Subsampled(shared=True, chunk_size=2), (2, 3)),
        (FullData(chunk_size=4), (2, 3)),
    ],
)
def test_force_is_the_gradient_at_each_particle(x64, gradient, shape):
    target = ModelTarget(indexed)
    z = random.normal(random.key(1), (*shape, 2))
    indices, axes = gradient.rows(KEY, target, shape)
    energy, slope = jax.jit(lambda z: gradient.energy_and_grad(KEY, target, lambda flat: {"z": flat}, z))(z)
    alone = energy_and_gradient(target)
    for place in itertools.product(*map(range, shape)):
        rows = {name: values[place[:axes]] for name, values in indices.items()}
        expected, gradient_there = alone({"z": z[place]}, rows)
        np.testing.assert_allclose(energy[place], expected, rtol=1e-12)
        np.testing.assert_allclose(slope[place], gradient_there["z"], rtol=1e-12)


def test_memory_is_that_of_a_chunk():
    def wide(z):
        return jnp.sum(jnp.sin(z[0] * jnp.arange(4096)) ** 2)

    def largest(size):
        target, gradient = FunctionTarget(wide), FullData(chunk_size=size)
        program = jax.jit(lambda z: gradient.energy_and_grad(KEY, target, lambda flat: flat, z))
        return program.lower(jnp.zeros((1, 64, 1))).compile().memory_analysis().temp_size_in_bytes

    assert largest(4) < 0.2 * largest(None)


def test_precision_follows_the_particles_in_64_bit(x64):
    target = ModelTarget(indexed)
    assert target.prototype["z"].dtype == jnp.float64
    for dtype in (jnp.float32, jnp.float64):
        z = jax.ShapeDtypeStruct((2, 3, 2), dtype)
        force = jax.eval_shape(lambda z: Subsampled().energy_and_grad(KEY, target, lambda flat: {"z": flat}, z), z)
        assert [x.dtype for x in force] == [dtype, dtype]


def test_randomness_in_the_likelihood_is_fresh():
    def model():
        z = numpyro.sample("z", dist.Normal(0, 1))
        numpyro.factor("noise", z * random.normal(numpyro.prng_key()))

    target = ModelTarget(model)
    energy, slope = FullData().energy_and_grad(KEY, target, lambda flat: {"z": flat[0]}, jnp.ones((1, 5, 1)))
    assert len(set(energy.ravel().tolist())) == len(set(slope.ravel().tolist())) == 5
    values = [float(target.potential_energy({"z": 1.0}, {}, random.key(seed))) for seed in (0, 0, 1)]
    assert values[0] == values[1] != values[2]


# --- The energy and the constrained values are NumPyro's. ---


def positive():
    scale = numpyro.sample("scale", dist.HalfCauchy(2))
    rate = numpyro.sample("rate", dist.Gamma(2, scale))
    numpyro.sample("y", dist.Poisson(rate), obs=jnp.array([1, 4, 2]))


def correlation():
    L = numpyro.sample("L", dist.LKJCholesky(3, 2.0))
    scale = numpyro.sample("scale", dist.LogNormal(0, 1).expand([3]).to_event(1))
    numpyro.sample("y", dist.MultivariateNormal(0.0, scale_tril=scale[:, None] * L), obs=jnp.array([1.0, -1.0, 0.5]))


def dynamic_support():
    top = numpyro.sample("top", dist.Exponential(1))
    x = numpyro.sample("x", dist.Uniform(0, top))
    numpyro.sample("y", dist.Normal(x, 1), obs=0.4)


def with_param():
    a = numpyro.param("a", 1.7, constraint=constraints.positive)
    numpyro.sample("z", dist.Normal(0, a))


def deterministic():
    z = numpyro.sample("z", dist.Normal(jnp.zeros(2), 1).to_event(1))
    square = numpyro.deterministic("square", z**2)
    numpyro.sample("y", dist.Normal(square.sum(), 1), obs=0.3)


def schools():
    mu, tau = numpyro.sample("mu", dist.Normal(0, 5)), numpyro.sample("tau", dist.HalfCauchy(5))
    with numpyro.plate("schools", 3):
        theta = numpyro.sample("theta", dist.Normal(mu, tau))
        numpyro.sample("y", dist.Normal(theta, 10), obs=jnp.array([28.0, 8.0, -3.0]))


decentered = handlers.reparam(schools, {"theta": LocScaleReparam(0.3)})


def equinox_parameters():
    eqx = pytest.importorskip("equinox")
    net = eqx_module("net", eqx.nn.Linear(2, "scalar", key=random.key(3)))
    z = numpyro.sample("z", dist.Normal(0, 1))
    numpyro.sample("y", dist.Normal(z + jax.vmap(net)(jnp.asarray(X)), 1), obs=jnp.asarray(Y))


HOST_MODELS = [positive, correlation, dynamic_support, with_param, deterministic, decentered, equinox_parameters]


@pytest.mark.parametrize("model", HOST_MODELS, ids=lambda model: getattr(model, "__name__", "decentered"))
def test_energy_and_constrained_values_are_those_of_numpyro(x64, model):
    target = ModelTarget(model)
    z = target.draw(random.key(1), init_to_uniform)
    host = initialize_model(random.key(2), model, validate_grad=False)
    assert jax.tree.map(jnp.shape, z) == jax.tree.map(jnp.shape, host.param_info.z)
    expected = jax.jit(jax.value_and_grad(host.potential_fn))(z)
    given = energy_and_gradient(target)(z, {})
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-12), given, expected)
    constrained, wanted = target.constrain(z), host.postprocess_fn(z)
    shown = {*target.latent, *target.deterministic}
    assert set(constrained) == shown and set(z) == set(target.latent)
    jax.tree.map(
        partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-12), constrained, {name: wanted[name] for name in shown}
    )
    assert shown == set(wanted)


def test_random_initial_parameters_stay_as_they_are():
    def model():
        net = numpyro.module("net", stax.Dense(1), input_shape=(2,))
        z = numpyro.sample("z", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(z + net(jnp.asarray(X))[:, 0], 1), obs=jnp.asarray(Y))

    values = [ModelTarget(model).potential_energy({"z": 0.3}, {}, random.key(seed)) for seed in range(3)]
    jitted = jax.jit(lambda key: ModelTarget(model).potential_energy({"z": 0.3}, {}, key))(random.key(4))
    assert float(values[0]) == float(values[1]) == float(values[2]) == pytest.approx(float(jitted), rel=1e-6)


def test_draws_are_those_of_the_init_strategy():
    values = {"scale": jnp.array(0.7), "rate": jnp.array(2.5)}
    target = ModelTarget(positive)
    z = target.draw(KEY, init_to_value(values=values))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), z, jax.tree.map(jnp.log, values))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), target.constrain(z), values)
    assert set(ravel_pytree(target.draw(KEY, init_to_feasible()))[0].tolist()) == {0.0}
    prior = jax.vmap(lambda key: target.draw(key, init_to_sample))(random.split(KEY, 2_000))
    assert stats.kstest(np.exp(prior["scale"]), stats.halfcauchy(scale=2).cdf).pvalue > 1e-6


# --- Deterministic sites and observations under minibatching. ---


def rich():
    z = coefficients()
    numpyro.deterministic("square", z**2)
    with numpyro.plate("rows", 7, subsample_size=3) as i:
        mean = numpyro.deterministic("mean", take(X, i) @ z)
        numpyro.sample("y", dist.Normal(mean, 1), obs=take(Y, i))
    numpyro.deterministic("center", mean.mean())
    numpyro.deterministic("mean again", jnp.where(z[0] > 0, mean, 0.0))


def test_deterministic_sites_that_look_at_rows_are_set_apart(x64):
    target = ModelTarget(rich)
    assert target.deterministic == ["square"]
    assert sorted(target.minibatched) == ["center", "mean", "mean again"]
    z = {"z": jnp.array([0.4, -1.0])}
    constrained = target.constrain(z)
    assert set(constrained) == {"z", "square"}
    np.testing.assert_allclose(constrained["square"], z["z"] ** 2)
    values = target.minibatched_values(constrained)
    assert set(values) == {"center", "mean", "mean again"}
    np.testing.assert_allclose(values["mean"], X @ z["z"])
    np.testing.assert_allclose(values["mean again"], X @ z["z"])
    np.testing.assert_allclose(values["center"], (X @ z["z"]).mean())


# --- What is refused, and what is not. ---


def no_latent():
    numpyro.sample("y", dist.Normal(0, 1), obs=1.0)


def only_discrete():
    numpyro.sample("c", dist.Bernoulli(0.3))


def delta():
    z = numpyro.sample("z", dist.Normal(0, 1))
    numpyro.sample("copy", dist.Delta(z))


def constrained_nothing():
    coefficients()
    numpyro.sample("none", dist.Beta(2.0, 2.0).expand([0]))


def enumerated_beside_a_batch_without_a_plate():
    z = numpyro.sample("z", dist.Normal(0, 1).expand([3]))
    c = numpyro.sample("c", dist.Bernoulli(0.3), infer={"enumerate": "parallel"})
    numpyro.sample("y", dist.Normal(z.sum() + c, 1), obs=1.0)


def only_deterministic_looks():
    z = coefficients()
    with numpyro.plate("rows", 7, subsample_size=3) as i:
        numpyro.deterministic("mean", take(X, i) @ z)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (no_latent, r"no continuous latent site.*without `obs`"),
        (only_discrete, r"no continuous latent site.*'c'"),
        (delta, r"'copy' has a delta distribution.*numpyro.deterministic"),
        (only_deterministic_looks, "'rows' draws"),
        (constrained_nothing, r"'none' has shape \(0,\) and so no elements.*leave the site out"),
        (
            enumerated_beside_a_batch_without_a_plate,
            r"'c'\] cannot be summed over.*Every batch dimension.*numpyro.plate",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_refusals_name_the_site_and_the_remedy(model, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        ModelTarget(model)


def test_data_whose_rows_are_all_equal_are_no_reason_to_refuse():
    def model(y):
        z = numpyro.sample("z", dist.Normal(0, 1))
        with numpyro.plate("rows", 7, subsample_size=3) as i:
            numpyro.sample("y", dist.Normal(z, 1), obs=y[i])

    for y in (jnp.zeros(7), jnp.ones(7)):
        assert ModelTarget(model, (y,)).plates == {"rows": (7, 3)}
        # Under `jit` the rows are unknown as well.
        jax.jit(lambda y: ModelTarget(model, (y,)).potential_energy({"z": 0.1}, {"rows": jnp.arange(3)}, KEY))(y)


class Every(Gradient):
    """A gradient of a user's own, on rows that it draws."""

    def rows(self, key, target, shape):
        return draw_indices(key, target.plates, shape), 2


def test_a_gradient_of_ones_own_is_noisy_unless_it_says_otherwise():
    target = ModelTarget(indexed)
    assert Every().is_noisy(target) and Subsampled().is_noisy(target) and not FullData().is_noisy(target)
    # Jumps would accept by energies of minibatches.
    kernel = SGLD(indexed, gradient=Every())
    assert kernel.bind(()).moves is None and SGLD(indexed, gradient=FullData()).bind(()).moves is not None


def test_shared_rows_must_be_called_so():
    class Common(Every):
        def rows(self, key, target, shape):
            return draw_indices(key, target.plates, shape[:1]), 1

    target, z = ModelTarget(indexed), jnp.zeros((2, 3, 2))
    with pytest.raises(ValueError, match="Common.rows returns rows that particles share .1 axes., but its `shared`"):
        Common().energy_and_grad(KEY, target, lambda flat: {"z": flat}, z)
    Common.shared = True
    assert Common().energy_and_grad(KEY, target, lambda flat: {"z": flat}, z)[0].shape == (2, 3)


def test_energies_to_compare_are_of_the_likelihood_alone():
    x, y = jnp.cos(jnp.arange(600.0)).reshape(200, 3), jnp.sin(jnp.arange(200.0))

    def model():
        w = numpyro.sample("w", dist.Normal(0, 10).expand([3]).to_event(1))
        with numpyro.plate("rows", 200, subsample_size=30) as i:
            numpyro.sample("y", dist.Normal(x[i] @ w, 0.3), obs=y[i])

    target, w = ModelTarget(model), random.normal(random.key(4), (5, 3))
    chosen = np.arange(180) * 200 // 180  # six minibatches
    found = likelihood_energies(target, {"w": w})
    expected = -200 * jax.vmap(lambda w: dist.Normal(x[chosen] @ w, 0.3).log_prob(y[chosen]).mean())(w)
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    prior = -jax.vmap(lambda w: dist.Normal(0, 10).log_prob(w).sum())(w)
    assert not np.allclose(found, expected + prior, rtol=1e-4)
