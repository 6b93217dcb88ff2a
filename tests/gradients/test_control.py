"""Control variates: the pass over all rows, and gradients corrected by it."""

from dataclasses import replace
import warnings

from enumerated import means
import jax
from jax import random
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
from models import mean_of, student, vectorized, warmed
import numpy as np
import pytest
from results import run

import numpyro
import numpyro.distributions as dist

from numpyro_repulsion import SGLD, SVRG, ControlVariates, Subsampled, Sweeps, to_inference_data
from numpyro_repulsion.gradients import CenteredTarget, Centering, ModelTarget, Reference, Units, evaluate_reference
from numpyro_repulsion.gradients.control import chunks, full_gradient

KEY = random.key(0)


def rows_model(size, batch):
    """One plate: a regression with a quartic in it."""
    x = jnp.sin(jnp.arange(size) * 1.7)

    def model():
        slope = numpyro.sample("slope", dist.Normal(0, 1).expand([2]).to_event(1))
        scale = numpyro.sample("scale", dist.LogNormal(0, 1))
        with numpyro.plate("rows", size, subsample_size=batch) as i:
            numpyro.sample("y", dist.Normal(slope[0] * x[i] + slope[1] ** 2, scale), obs=jnp.cos(x[i]))

    return model


def crossed():
    """Two plates whose rows meet in one site."""
    x = jnp.sin(jnp.arange(7 * 5.0)).reshape(7, 5)

    def model():
        a = numpyro.sample("a", dist.Normal(0, 1))
        b = numpyro.sample("b", dist.LogNormal(0, 1))
        outer = numpyro.plate("outer", 7, subsample_size=2, dim=-2)
        inner = numpyro.plate("inner", 5, subsample_size=2, dim=-1)
        with outer as i, inner as j:
            numpyro.sample("y", dist.Normal(a, b), obs=x[i][:, j])

    return model


def disjoint():
    """Two plates with a site each, and a third that meets the second through a value alone."""
    x, y, w = jnp.sin(jnp.arange(9.0)), jnp.cos(jnp.arange(11.0)), jnp.tanh(jnp.arange(6.0))

    def model():
        a = numpyro.sample("a", dist.Normal(0, 1))
        with numpyro.plate("xs", 9, subsample_size=3) as i:
            numpyro.sample("x", dist.Normal(a, 1), obs=x[i])
        with numpyro.plate("ws", 6, subsample_size=2) as k:
            weights = w[k]
        with numpyro.plate("ys", 11, subsample_size=4) as j:
            # As an estimate from rows of "ws" it is linear in them, so an average over minibatches is right.
            numpyro.factor("y", -((y[j] - a) ** 2) * weights.mean())

    return model


def flat(target, seed=0):
    z = target.draw(random.key(seed), numpyro.infer.init_to_uniform)
    return ravel_pytree(z)


def on_all_rows(target, unravel):
    return lambda z: target.potential_energy(unravel(z), target.all_rows, KEY)


def exact(target, z, unravel):
    return jax.jit(jax.value_and_grad(on_all_rows(target, unravel)))(z)


def drawn(target, unravel, reference, gradient=None):
    """U and ∇U on minibatches of a key, at a cloud."""
    gradient = gradient or ControlVariates()
    return jax.jit(lambda key, z: gradient.energy_and_grad(key, target, unravel, z, reference))


@pytest.mark.parametrize(
    ("model", "size", "with_hessian"),
    [
        (rows_model(23, 4), 1, True),
        (rows_model(23, 4), 8, False),
        (rows_model(24, 4), 8, False),
        (rows_model(24, 23), 1000, True),
        (crossed(), 1, True),
        (crossed(), 8, True),
        (disjoint(), 1, False),
        (disjoint(), 1000, True),
    ],
)
def test_the_pass_in_chunks_is_that_on_all_rows(model, size, with_hessian):
    target = ModelTarget(model)
    z, unravel = flat(target)
    units = Units(len(z)) if with_hessian else None
    found = jax.jit(lambda z: full_gradient(KEY, target, unravel, z, size, units))(z)
    expected = exact(target, z, unravel)
    if with_hessian:
        expected = *expected, jax.jit(jax.hessian(on_all_rows(target, unravel)))(z)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-4), found, expected)


def test_a_model_that_insists_on_its_number_of_rows_gets_chunks_of_that():
    x = jnp.sin(jnp.arange(25.0))

    def model():
        a = numpyro.sample("a", dist.Normal(0, 1))
        with numpyro.plate("rows", 25, subsample_size=6) as i:
            numpyro.sample("x", dist.Normal(a + jnp.zeros(6), 1), obs=x[i])

    target = ModelTarget(model)
    z, unravel = flat(target)
    found = jax.jit(lambda z: full_gradient(KEY, target, unravel, z, 100))(z)
    expected = z**2 / 2 + jnp.sum((x - z) ** 2) / 2 + 26 * jnp.log(2 * jnp.pi) / 2
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    np.testing.assert_allclose(found[1], z + 25 * z - x.sum(), rtol=1e-4)


def test_plates_are_crossed_where_a_term_sees_rows_of_both():
    def groups(model):
        return sorted(ModelTarget(model).crossed_plates())

    assert groups(rows_model(23, 4)) == [["rows"]]
    assert groups(crossed()) == [["inner", "outer"]]
    # "ws" has no site of its own but enters that of "ys".
    assert groups(disjoint()) == [["ws", "ys"], ["xs"]]


@pytest.mark.parametrize(("total", "batch"), [(20_011, 50), (97, 10), (1_000_003, 1000), (2, 1)])
def test_memory_is_bounded_and_few_chunks_are_needed(total, batch):
    target = ModelTarget(rows_model(total, batch))
    lengths, weights, starts, counts = chunks(target, 20)
    length = lengths["rows"]
    assert length <= 20 * batch
    assert len(weights) <= 2 * total / min(total, 20 * batch) + np.log2(20 * batch)
    counted = np.zeros(total)
    for weight, start, count in zip(weights, starts["rows"], counts["rows"], strict=True):
        np.add.at(counted, start + np.arange(length) % count, weight * total / length)
    np.testing.assert_allclose(counted, 1.0, rtol=1e-9)


def reference_at(target, z, unravel, order=1):
    empty = Reference.none(z.shape, z.dtype, order, Units(len(z)) if order == 2 else None)._replace(position=z)
    return jax.jit(lambda empty: evaluate_reference(KEY, target, unravel, empty, 20))(empty)


@pytest.mark.parametrize("order", [1, 2])
def test_corrected_gradients_are_unbiased_by_enumeration(order):
    target = ModelTarget(rows_model(6, 2))
    z, unravel = flat(target)
    point, _ = flat(target, 1)
    reference = reference_at(target, point, unravel, order)
    expected = exact(target, z, unravel)
    for given in (reference, reference._replace(order=None)):
        energy, slope = means(ControlVariates, target, unravel, z[None], given)
        np.testing.assert_allclose(energy[0], expected[0], rtol=1e-4)
        np.testing.assert_allclose(slope[0], expected[1], rtol=1e-4, atol=1e-4)
    # What is not exact is a bias: of the Hessian a missing entry, that of some rows, or that at another point.
    some = ModelTarget(rows_model(5, 2))
    wrong = [] if order == 1 else [replace(reference.hessian, rest=reference.hessian.rest.at[0, 1].set(0.0))]
    wrong += [] if order == 1 else [reference_at(*at, unravel, 2).hessian for at in ((some, point), (target, z))]
    for hessian in wrong:
        _, slope = means(ControlVariates, target, unravel, z[None], reference._replace(hessian=hessian))
        assert not np.allclose(slope[0], expected[1], rtol=1e-4, atol=1e-4)


def effects(y, by_hand=False):
    """Effects of three groups, with Gaussian rows; standardized by hand or not."""
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    theta = numpyro.sample("theta", dist.Normal(jnp.zeros(3), 1.0 if by_hand else tau).to_event(1))
    theta = tau * theta if by_hand else theta
    with numpyro.plate("rows", 6, subsample_size=2) as i:
        numpyro.sample("y", dist.Normal(theta[i % 3], 0.5), obs=y[i])


@pytest.mark.parametrize(
    ("share", "order", "by_hand"), [(0.6, 1, False), (0.6, 2, False), (0.0, 2, False), (0.6, 1, True), (0.6, 2, True)]
)
def test_in_a_centering_corrections_are_those_in_centered_coordinates(share, order, by_hand):
    target = ModelTarget(effects, (jnp.cos(jnp.arange(6.0)), by_hand))
    y, unravel = flat(target)
    none = Centering.none(target, len(y), y.dtype)
    none = none._replace(powers=jnp.ones_like(none.powers))
    shares = jnp.where(ravel_pytree({"tau": 0.0, "theta": jnp.ones(3)})[0] > 0, share, 1.0)
    centered = CenteredTarget(target, none._replace(share=shares), unravel)
    # In these, second order leaves no noise; in its own, which multiply by a scale, it would.
    assert (centered.base is target) != by_hand
    reference = reference_at(centered.base, flat(target, 1)[0], unravel, order)
    expected = jax.jit(lambda y: full_gradient(KEY, centered, unravel, y, 20))(y)
    energy, slope = means(ControlVariates, centered, unravel, y[None], reference)
    np.testing.assert_allclose(energy[0], expected[0], rtol=1e-4)
    np.testing.assert_allclose(slope[0], expected[1], rtol=1e-4, atol=1e-4)
    own = reference_at(centered, flat(target, 1)[0], unravel, order)
    in_own = jax.jit(lambda key, z: ControlVariates()._corrected(key, centered, unravel, z, own))
    both = (draw(KEY, y[None, None])[1][0, 0] for draw in (drawn(centered, unravel, reference), in_own))
    noise = [np.abs(x - expected[1]).max() for x in both]
    assert (noise[0] < 1e-3) == (order == 2) and noise[1] > 0.05, noise


@pytest.mark.parametrize(("shared", "order"), [(False, 1), (False, 2), (True, 1)])
def test_at_the_reference_there_is_no_noise_and_far_off_there_is(shared, order):
    target = ModelTarget(rows_model(40, 4))
    point, unravel = flat(target)
    reference = reference_at(target, point, unravel, order)
    corrected, plain = (drawn(target, unravel, reference, kind(shared)) for kind in (ControlVariates, Subsampled))
    z = jnp.broadcast_to(point, (2, 3, 3))
    energy, slope = corrected(random.key(7), z)
    expected = exact(target, point, unravel)
    np.testing.assert_allclose(energy, jnp.full((2, 3), expected[0]), rtol=1e-5)
    np.testing.assert_allclose(slope, jnp.broadcast_to(expected[1], z.shape), rtol=1e-4, atol=1e-3)

    def noise(draw, z):
        return float(np.var([draw(key, z)[1] for key in random.split(KEY, 40)], 0).sum(-1).mean())

    # The standard deviation of the noise is linear in the distance from the reference, or quadratic.
    near, far = 0.05, 0.2
    small, large = noise(corrected, z + near), noise(corrected, z + far)
    assert small < 1e-1 * noise(plain, z + 0.01) and abs(np.log(large / small) / np.log(far / near) / 2 - order) < 0.35


def test_of_gaussian_rows_second_order_leaves_no_noise():
    x = jnp.sin(jnp.arange(60.0)).reshape(20, 3)

    def model():
        slope = numpyro.sample("slope", dist.Normal(0, 1).expand([3]).to_event(1))
        with numpyro.plate("rows", 20, subsample_size=2) as i:
            numpyro.sample("y", dist.Normal(x[i] @ slope, 0.5), obs=jnp.cos(jnp.arange(20.0))[i])

    target = ModelTarget(model)
    point, unravel = flat(target)
    z = point + 3.0 * random.normal(KEY, (1, 5, 3))
    expected = jax.jit(jax.vmap(jax.value_and_grad(on_all_rows(target, unravel))))(z[0])
    for order, is_exact in ((2, True), (1, False)):
        energy, slope = drawn(target, unravel, reference_at(target, point, unravel, order))(KEY, z)
        assert np.allclose(energy[0], expected[0], rtol=1e-4) == is_exact
        assert np.allclose(slope[0], expected[1], rtol=1e-4, atol=1e-3) == is_exact


def test_without_a_reference_it_is_the_plain_minibatch():
    target = ModelTarget(rows_model(40, 4))
    z, unravel = flat(target)
    cloud = z + 0.1 * random.normal(KEY, (1, 5, 3))
    plain = drawn(target, unravel, None, Subsampled())(KEY, cloud)
    unused = [reference_at(target, z, unravel, order)._replace(order=jnp.asarray(0)) for order in (1, 2)]
    for reference in (None, *unused, Reference.none(3, z.dtype)):
        found = drawn(target, unravel, reference)(KEY, cloud)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, plain)


@pytest.mark.parametrize("order", [1, 2])
def test_energy_is_that_of_the_gradient(order):
    target = ModelTarget(rows_model(40, 4))
    point, unravel = flat(target)
    reference = reference_at(target, point, unravel, order)
    z = point + jnp.array([0.3, -0.2, 0.1])
    draw = drawn(target, unravel, reference)

    def energy(z):
        return draw(KEY, z[None, None])[0][0, 0]

    step = 1e-2 * jnp.eye(3)
    numerical = jnp.array([(energy(z + e) - energy(z - e)) / 2e-2 for e in step])
    np.testing.assert_allclose(numerical, draw(KEY, z[None, None])[1][0, 0], rtol=5e-3, atol=0.1)


def test_rows_are_spread_over_the_whole_plate():
    target = ModelTarget(rows_model(199, 100))
    (rows,) = target.spread_rows().values()
    (more,) = target.spread_rows(dict.fromkeys(target.plates, 150)).values()
    for found, number in ((rows, 100), (more, 150)):
        assert len(set(found.tolist())) == number and found[0] == 0 and found[-1] >= 197


def test_which_order_warmup_may_take():
    few, many = (ModelTarget(rows_model(size, 4)) for size in (40, 1_000_000))
    dense = {(few, 3): True, (many, 3): True, (many, 200): False, (few, 600): False}
    for (target, dimension), is_cheap in dense.items():
        assert ControlVariates().hessian_units(target, dimension) == (Units(dimension) if is_cheap else None)
        assert ControlVariates(order=2).hessian_units(target, dimension) == Units(dimension)
        assert ControlVariates(order=1).hessian_units(target, dimension) is None
        assert SVRG().hessian_units(target, dimension) is None
    with pytest.raises(ValueError, match="Sweeps: `order` must be 1, 2 or None .* got 3"):
        Sweeps(order=3)


students = mean_of(student)


@pytest.mark.parametrize(
    ("order", "words"), [(None, "second order"), pytest.param(1, "first order", marks=pytest.mark.slow)]
)
def test_warmup_takes_the_order_with_the_least_noise(order, words):
    y = 5.0 + random.normal(random.key(1), (400,))
    kernel = SGLD(students, gradient=ControlVariates(order=order))
    mcmc = run(kernel, y, num_warmup=200, num_samples=300, num_chains=10)
    learned = mcmc.last_state.learned
    assert (learned.reference.hessian is not None) == (words == "second order")
    # Rows with tails are not quadratic, but nearly so within a posterior as narrow as this.
    assert (float(learned.figures.noise) < 1e-3) == (words == "second order")
    assert to_inference_data(mcmc).posterior.attrs["control_variates"] == words
    draws = np.asarray(mcmc.get_samples(group_by_chain=True)["mu"], float)
    assert draws.std() == pytest.approx((8 / 6 / 400) ** 0.5, rel=0.15)  # of Fisher's information of a Student-t


def short_run(model, *args, mcmc=None, jit=False):
    """A run of a few iterations of one update each, or its continuation."""
    if mcmc is None:
        kernel = SGLD(model, step_size=1e-4, num_steps=1, preconditioner="diagonal")
        mcmc = vectorized(kernel, 12, 2, 4, jit_model_args=jit)
    else:
        mcmc.post_warmup_state = mcmc.last_state
        if model is not None:
            mcmc.sampler = SGLD(model, step_size=1e-4, num_steps=1, preconditioner="diagonal")
            mcmc._cache.clear()
    # Near the mode, where the reference helps.
    starts = {"mu": 0.1 * random.normal(random.key(7), (4,))}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mcmc.run(random.key(0), *args, init_params=starts if mcmc.post_warmup_state is None else None)
    return mcmc, mcmc.last_state.learned.reference


def is_same(one, other):
    return jax.tree.all(jax.tree.map(np.array_equal, one, other))


MORE = [pytest.param(given, marks=pytest.mark.slow) for given in ("fewer arguments", "a closure")]


@pytest.mark.parametrize("given", ["arguments", "inputs of the program", *MORE])
def test_one_other_row_is_recognized(given):
    y = random.normal(random.key(1), (400,))
    # In no minibatch of evenly spread rows.
    other = y.at[7].set(50.0)[: 300 if given == "fewer arguments" else 400]

    def model_of(y):
        return lambda: students(y)

    is_closure, jit = given == "a closure", given == "inputs of the program"
    mcmc, before = short_run(model_of(y) if is_closure else students, *[y] * (not is_closure), jit=jit)
    _, same = short_run(None, *[y] * (not is_closure), mcmc=mcmc)
    assert is_same(before, same) and before.posterior_id.all()
    _, after = short_run(model_of(other) if is_closure else None, *[other] * (not is_closure), mcmc=mcmc)
    target = ModelTarget(students, (other,))
    _, gradient = jax.jit(lambda z: full_gradient(KEY, target, lambda z: {"mu": z[0]}, z, 10))(before.position)
    np.testing.assert_array_equal(after.position, before.position)
    np.testing.assert_allclose(after.gradient, gradient, rtol=1e-4)
    assert not np.allclose(before.gradient, gradient, rtol=1e-3)
    assert (after.posterior_id != before.posterior_id).any()
    # Evaluated once, not in every iteration.
    _, same = short_run(None, *[other] * (not is_closure), mcmc=mcmc)
    assert is_same(after, same)


@pytest.mark.filterwarnings("ignore:num_warmup")
def test_a_warmup_of_one_iteration_finds_a_reference():
    y = 5.0 + random.normal(random.key(1), (400,))
    kernel = SGLD(students, step_size=1e-3)
    mcmc = run(kernel, y, num_warmup=1, num_samples=400, num_chains=10)
    warmup = warmed(kernel, random.split(random.key(0), 10), 1, 1, y).warmup
    assert np.any(warmup.reference.gradient != 0)
    draws = np.asarray(mcmc.get_samples(group_by_chain=True)["mu"][:, 200:])
    assert abs(draws.mean() - float(jnp.median(y))) < 0.2
