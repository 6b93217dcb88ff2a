"""Sweeps: every row once, in an order of each particle's own, there and back, and the bias that is left."""

import itertools
import math

import jax
from jax import lax, random
import jax.numpy as jnp
from models import mean_of
import numpy as np
import pytest
from results import run
from scipy import stats

import numpyro
import numpyro.distributions as dist

from numpyro_repulsion import RBF, SGLD, SGNHT, SGNHTR, Independent, Subsampled, Sweeps
from numpyro_repulsion.dynamics import CurvatureStats, Overdamped, Underdamped
from numpyro_repulsion.gradients import FunctionTarget, sweeps

SEED = jnp.uint32(5)


class Rows(FunctionTarget):
    """Rows with gradients ``z + v``, in minibatches."""

    def __init__(self, plates, values=None):
        self.plates, self.values = plates, values

    def potential_energy(self, z, indices, key):
        return jnp.sum(z**2) / 2 + jnp.mean(self.values[indices["rows"]]) * jnp.sum(z)


def orders(size, batch, block=1, shape=(2, 3), shared=False, seed=SEED, sweeps=4):
    """The rows that each particle passes through from the first turn on where it begins a new order."""
    gradient, target = Sweeps(shared, block_size=block), Rows({"rows": (size, batch)})

    @jax.jit
    @jax.vmap
    def rows(number):
        return gradient.at(number, seed).rows(None, target, shape)[0]["rows"]

    number = -(-(sweeps + 2) * size // batch)
    seen = np.moveaxis(np.asarray(rows(jnp.arange(number))), 0, -2)
    seen = seen.reshape(-1, number * batch)
    starts = [-(i * 2 * size // len(seen)) % (2 * size) for i in range(len(seen))]
    return np.stack([rows[start:][: sweeps * size] for rows, start in zip(seen, starts, strict=True)])


SIZES = [(277, 100, 1), (2, 1, 1), (1003, 20, 4), (64, 8, 4), (9, 4, 4), (1, 1, 1)]


@pytest.mark.parametrize(("size", "batch", "block"), SIZES)
def test_a_sweep_has_every_row_once_and_goes_back(size, batch, block):
    found = orders(size, batch, block)
    for particle in found:
        there, back, again = particle[:size], particle[size : 2 * size], particle[2 * size : 3 * size]
        assert sorted(there) == list(range(size)) == sorted(again)
        assert (back == there[::-1]).all()
        if size > 10:
            assert (there != again).any()
        if size % block == 0:  # blocks stay together
            assert (np.diff(there.reshape(-1, block), axis=1) % size == 1).all()


def test_particles_and_runs_have_orders_of_their_own():
    found = orders(277, 100)
    assert len({tuple(order[:277]) for order in found}) == 6
    other = orders(277, 100, seed=jnp.uint32(6))
    assert not {tuple(order[:277]) for order in found} & {tuple(order[:277]) for order in other}
    assert len(orders(277, 100, shared=True)) == 2  # one for each group


def all_orders(size, number):
    tags = random.bits(random.key(size), (number, 1), jnp.uint32)
    places = jnp.arange(size, dtype=jnp.uint32)
    # Not by a program that another number of rounds would find.
    in_order = jax.jit(lambda places, tags: sweeps.in_order(places, tags, size))
    return np.asarray(in_order(*jnp.broadcast_arrays(places, tags))).astype(int)


def order_p_value(size, number=24_000):
    place = {order: i for i, order in enumerate(itertools.permutations(range(size)))}
    counts = np.bincount([place[tuple(order)] for order in all_orders(size, number)], minlength=math.factorial(size))
    return stats.chisquare(counts).pvalue


def test_all_orders_of_few_rows_occur(monkeypatch):
    assert all(len(set(map(tuple, all_orders(size, 24_000)))) == math.factorial(size) for size in (2, 3, 4, 5))
    assert all(order_p_value(size) > 1e-6 for size in (2, 3))
    monkeypatch.setattr(sweeps, "ROUNDS", 1)
    assert order_p_value(3) < 1e-6


@pytest.mark.parametrize("size", [20, 1000])
def test_sums_over_parts_of_an_order_have_the_right_variance(size, monkeypatch):
    number = 4000
    values = np.linspace(-1.0, 1.0, size)  # sorted data, the hardest

    def errors():
        """Of the variances of the sums over the first rows, in standard errors."""
        found = all_orders(size, number)
        for part in (size // 10, size // 2):
            squares = values[found[:, :part]].sum(1) ** 2
            expected = values.var() * size / (size - 1) * part * (1 - part / size)
            yield (squares.mean() - expected) / (squares.std() / number**0.5)

    assert max(map(abs, errors())) < 4.5
    monkeypatch.setattr(sweeps, "ROUNDS", 1)
    assert max(map(abs, errors())) > 4.5


def test_products_are_divided_beyond_32_bits():
    rng = np.random.default_rng(0)
    limit = 2**31 - 1
    for divisor, factor in ((2 * limit, 1000), (2 * 327_346, 500), (2 * 277, 277), (2**32 - 2, 2**20)):
        counts = np.append(rng.integers(0, limit, 20), [0, 1, limit]).astype(np.uint32)
        quotient, remainder = sweeps.divide_product(jnp.asarray(counts), limit, factor, divisor)
        expected = [divmod(int(count) * factor, divisor) for count in counts]
        assert remainder.tolist() == [r for _, r in expected]
        assert quotient.tolist() == [q % 2**32 for q, _ in expected]


def test_huge_plates_and_late_updates():
    size, batch = 2**31 - 1, 1000

    @jax.jit
    def drawn(number):
        return Sweeps().at(number, SEED).rows(None, Rows({"rows": (size, batch)}), (1, 2))[0]["rows"]

    for number in (0, 10**9, 2**31 - 1):
        rows = drawn(number)
        assert rows.dtype == jnp.int32 and (rows >= 0).all()
        assert all(len(set(particle)) == batch for particle in rows.reshape(2, batch).tolist())


MINIBATCHES = 50


def inflation(gradient, dynamics, steps, num_particles=400):
    """The variance that minibatches cause at a curvature of 1, with noise of variance 1, and its standard errors."""
    values = np.random.default_rng(1).standard_normal(MINIBATCHES)
    values = jnp.asarray((values - values.mean()) / values.std())
    target, couple = Rows({"rows": (MINIBATCHES, 1)}, values), Independent().couple

    @jax.jit
    def variances(step_size, key, number):
        def energy_and_grad(key, count):
            one = gradient.at(count, SEED)
            return lambda z: one.energy_and_grad(key, target, lambda flat: flat, z)

        def update(count, carry):
            cloud, total = carry
            own = random.fold_in(key, count)
            cloud = dynamics.step(own, cloud, energy_and_grad(own, count), couple, step_size)
            return cloud, total + jnp.where(count >= number - 4 * MINIBATCHES, jnp.mean(cloud.z**2, (0, 2)), 0.0)

        z = jnp.zeros((1, num_particles, 1))
        cloud = dynamics.init(key, z, energy_and_grad(key, 0), couple)
        cloud = cloud._replace(memory=tuple(jnp.zeros_like(x) for x in cloud.memory))
        return lax.fori_loop(0, number, update, (cloud, jnp.zeros(num_particles)))[1] / (4 * MINIBATCHES)

    found = []
    for step in steps:
        each = variances(jnp.asarray(step), random.key(2), int(8 / step) + 4 * MINIBATCHES)
        found.append((each.mean(), each.std() / num_particles**0.5))
    return np.array(found).T


def order(steps, found):
    """The exponent of the step, and its standard error."""
    mean, error = found
    x = np.log(steps) - np.log(steps).mean()
    return x @ np.log(mean) / (x @ x), np.sqrt((x**2 * (error / mean) ** 2).sum()) / (x @ x)


#: Dynamics whose only noise is that of minibatches, and the order of the bias with sweeps.
QUIET = {"overdamped": (Overdamped(noise=False), 2), "momenta": (Underdamped(temperature=1e-14), 4)}


@pytest.mark.parametrize("name", QUIET)
def test_the_order_of_the_bias(name):
    dynamics, expected = QUIET[name]
    steps = np.array([0.1, 0.2, 0.3]) / MINIBATCHES
    with jax.enable_x64():
        swept, independent = (inflation(gradient, dynamics, steps) for gradient in (Sweeps(), Subsampled()))
    exponent, error = order(steps, swept)
    # Short of its limit by the next order, which is a fortieth of the sweep's length.
    assert abs(exponent - expected) < 0.1 + 4 * error and error < 0.1
    exponent, error = order(steps, independent)
    assert abs(exponent - 1) < 0.05 + 4 * error < 0.5
    one = jnp.ones(())
    rule = (Overdamped("lm") if name == "overdamped" else Underdamped()).step_error(
        Independent().couple(jnp.zeros((1, 2, 1)))
    )
    for step, inflated, error, plain, plain_error in zip(steps, *swept, *independent, strict=True):
        stats = CurvatureStats(1e-9 * one, one, one, 0.0)
        np.testing.assert_allclose(rule.bias(step * one, stats), plain, atol=4.5 * plain_error, rtol=0.01)
        bound = float(rule.remaining_noise(step * one, CurvatureStats(one, one, one, 0.0, MINIBATCHES)))
        assert inflated < bound * plain + 4 * error


@pytest.mark.parametrize("name", ["overdamped", "momenta", "repulsion"])
def test_the_longest_step_has_the_tolerated_bias(name):
    interaction = RBF(1.0) if name == "repulsion" else Independent()
    dynamics = Underdamped() if name == "momenta" else Overdamped()
    rule = dynamics.step_error(interaction.couple(jnp.linspace(0.0, 4.0, 6)[:, None]))
    one, tolerance = jnp.ones(()), 0.05
    plain = CurvatureStats(one, one, 1000.0 * one, 0.0)
    swept = plain._replace(sweep=1000)
    steps = [rule.max_step_for_bias(tolerance, stats) for stats in (plain, swept)]
    assert steps[1] > 3 * steps[0]
    np.testing.assert_allclose(
        [rule.bias(*pair) for pair in zip(steps, (plain, swept), strict=True)], tolerance, rtol=0.06
    )
    # A sweep that takes longer than particles need to move cancels nothing.
    np.testing.assert_allclose(rule.max_step_for_bias(tolerance, plain._replace(sweep=10**9)), steps[0], rtol=1e-6)


SIZE, BATCH = 2000, 100
Y = jnp.asarray(np.random.default_rng(0).standard_normal(SIZE), jnp.float32)


model = mean_of(lambda mu: dist.Normal(mu, 1.0), BATCH)


def test_the_posterior_is_stationary_to_second_order():
    sd, number = SIZE**-0.5, 100
    step = 0.5 / (SIZE // BATCH) * sd**2
    starts = {"mu": Y.mean() + sd * random.normal(random.key(1), (number,))}

    def variance(gradient):
        kernel = SGLD(model, step_size=step, gradient=gradient)
        mcmc = run(kernel, Y, num_warmup=20, num_samples=200, num_chains=number, init_params=starts)
        mu = np.asarray(mcmc.get_samples(group_by_chain=True)["mu"], float)
        squares = ((mu - float(Y.mean())) ** 2).mean(1) / sd**2
        return squares.mean(), squares.std() / number**0.5

    mean, error = variance(Sweeps(control_variates=False))
    assert abs(mean - 1.04) < 4.5 * error < 0.15
    mean, error = variance(Subsampled())
    assert abs(mean - 1.04) > 4.5 * error  # 1.24


def test_orders_go_on_where_a_run_is_continued_and_keys_of_their_own_give_others():
    # Without noise, runs differ by their minibatches alone.
    kernel = SGLD(model, step_size=1e-5, gradient=Sweeps(), num_steps=3, dynamics=Overdamped(noise=False))
    whole, part = (run(kernel, Y, num_samples=number) for number in (10, 4))
    end = state = part.last_state
    for _ in range(6):
        end = jax.jit(lambda state: kernel.sample(state, (Y,), {}))(end)
    np.testing.assert_allclose(whole.last_state.z["mu"], end.z["mu"], rtol=1e-6)
    assert whole.last_state.row_seed[0] == state.row_seed[0]
    ends = []
    for seed in (1, 2, 2):
        part.post_warmup_state = state
        part.run(random.key(seed), Y)
        ends.append(part.last_state.z["mu"])
    assert (ends[0] != ends[1]).all() and (ends[1] == ends[2]).all()


def test_what_warmup_measures_has_the_noise_of_sweeps():
    # In sorted rows strata hide nearly all of it.
    size, batch, number = 203, 20, 20_000

    def drawn(gradient):
        draw = jax.jit(lambda key: gradient.rows(key, Rows({"rows": (size, batch)}), (1, number))[0]["rows"][0])
        return np.asarray(draw(random.key(0)))

    for block in (1, 4):
        rows = drawn(Sweeps(block_size=block))
        assert all(len(set(minibatch)) == batch for minibatch in rows[:100])
        share = np.bincount(rows.ravel(), minlength=size) / number
        assert np.abs(share - batch / size).max() < 4.5 * math.sqrt(batch / size / number)
    variance = np.var(np.arange(size), ddof=1) * (1 / batch - 1 / size)
    sweeps, strata = (np.var(drawn(gradient()).mean(-1)) / variance for gradient in (Sweeps, Subsampled))
    assert abs(sweeps - 1) < 4.5 * math.sqrt(2 / number)
    assert strata < 0.2


@pytest.mark.slow
def test_warmup_chooses_between_sweeps_and_control_variates():
    warmup = {"num_warmup": 200, "num_chains": 20}
    # A normal mean has the same noise everywhere, so control variates remove all of it.
    mcmc = run(SGLD(model, gradient=Sweeps()), Y, **warmup)
    assert mcmc.last_state.learned.reference is not None

    # Rows differ in how they curve, which an expansion between the modes does not tell: at the modes the gradients of
    # rows have a variance of 1.6, and of 1.3 less their expansions about 0. Sorted rows would hide it from strata.
    x = jnp.linspace(0.5, 1.5, SIZE)

    def two_modes(y):
        theta = numpyro.sample("theta", dist.Normal(0.0, 1.0))
        with numpyro.plate("rows", SIZE, subsample_size=BATCH) as i:
            numpyro.sample("y", dist.Normal(x[i] * theta**2, 1.0), obs=y[i])

    mcmc = run(SGLD(two_modes, gradient=Sweeps()), x + 0.6 * Y, **warmup)
    assert mcmc.last_state.learned.reference is None
    plain = run(SGLD(two_modes, gradient=Subsampled()), x + 0.6 * Y, **warmup)
    assert mcmc.last_state.learned.step_size > 2 * plain.last_state.learned.step_size
    without = run(SGLD(model, gradient=Sweeps(control_variates=False)), Y, **warmup)
    assert without.last_state.learned.reference is None


def test_thermostats_are_refused():
    for kernel in (SGNHT, SGNHTR):
        with pytest.raises(ValueError, match="Thermostat would misread it as temperature"):
            kernel(model, gradient=Sweeps())


def test_plates_that_meet_are_refused():
    def crossed(y):
        mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
        with numpyro.plate("a", 6, subsample_size=2, dim=-2) as i, numpyro.plate("b", 4, subsample_size=2) as j:
            numpyro.sample("y", dist.Normal(mu, 1.0), obs=y[i[:, None], j])

    with pytest.raises(ValueError, match=r"A site uses rows of all the subsampled plates \['a', 'b'\]"):
        run(SGLD(crossed, step_size=0.01, gradient=Sweeps()), jnp.ones((6, 4)))
