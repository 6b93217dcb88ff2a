"""Step sizes by the update count."""

import jax
from jax import random
import jax.numpy as jnp
from models import vectorized
import numpy as np
import optax
import pytest

from benchmarks.problems.targets import gaussian
from numpyro_repulsion import SGLD, BiasBudget, Cyclical, Polynomial
from numpyro_repulsion.schedules import as_schedule


def test_polynomial_values(x64):
    schedule = Polynomial(0.3, offset=50.0, power=0.7)
    for count in (0, 1, 50, 10_000):
        assert float(schedule(count)) == pytest.approx(0.3 * (1 + count / 50) ** -0.7, rel=1e-12)
    counts = jnp.arange(5)
    np.testing.assert_allclose(jax.jit(schedule)(counts), [schedule(int(count)) for count in counts], rtol=1e-12)


def test_polynomial_decreases_and_its_logarithmic_slope_is_the_power():
    schedule = Polynomial(1.0, offset=10.0, power=0.6)
    values = np.array([float(schedule(count)) for count in (0, 1, 10, 10**6, 10**8)])
    assert (np.diff(values) < 0).all()
    assert np.log(values[-1] / values[-2]) / np.log(100) == pytest.approx(-0.6, abs=1e-4)


@pytest.mark.parametrize("power", [0.5, 0.0, -1.0, 1.0001, float("nan")])
def test_polynomial_refuses_powers_outside_robbins_monro(power):
    with pytest.raises(ValueError, match=r"power.*\(0\.5, 1\]"):
        Polynomial(0.1, power=power)


@pytest.mark.parametrize("power", [0.500001, 1.0, 1])
def test_polynomial_takes_powers_of_robbins_monro(power):
    assert float(Polynomial(0.1, power=power)(0)) == pytest.approx(0.1)


@pytest.mark.parametrize("name", ["step_size", "offset"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), "0.1", None])
def test_polynomial_refuses_what_is_not_positive(name, value):
    with pytest.raises(ValueError, match=rf"`{name}` must be a positive, finite number"):
        Polynomial(**{"step_size": 0.1, name: value})


def test_cyclical_values(x64):
    schedule = Cyclical(0.3, length=40)
    for count in (0, 1, 20, 39, 40, 41, 123_456_789):
        expected = 0.15 * (np.cos(np.pi * (count % 40) / 40) + 1.0)
        assert float(schedule(count)) == pytest.approx(expected, rel=1e-9)
    counts = jnp.arange(100)
    np.testing.assert_allclose(jax.jit(schedule)(counts), [schedule(int(count)) for count in counts], rtol=1e-12)


def test_cyclical_steps_keep_their_precision_at_the_end_of_a_cycle():
    expected = np.sin(np.pi / 2 / 10**5) ** 2
    assert float(Cyclical(1.0, length=10**5)(10**5 - 1)) == pytest.approx(expected, rel=1e-5)


def test_the_second_half_of_a_cycle_lasts_as_long_as_stated(x64):
    schedule = Cyclical(0.3, length=10_000)
    assert float(schedule(jnp.arange(5_000, 10_000)).sum()) == pytest.approx(0.09 * 0.3 * 10_000, rel=0.01)


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        *(({"step_size": value}, "`step_size` must be a positive") for value in (0.0, -1.0, np.nan, "0.1")),
        *(({"length": value}, "`length` must be an integer") for value in (1, 0, 20.0, True, None)),
    ],
)
def test_cyclical_refuses_numbers_out_of_range(kwargs, match):
    with pytest.raises(ValueError, match=match):
        Cyclical(**{"step_size": 0.1, "length": 100} | kwargs)


@pytest.mark.parametrize("tolerance", [0.0, -0.1, 1.0, float("nan"), float("inf"), "0.1", None])
def test_bias_budget_refuses_tolerances_outside_0_and_1(tolerance):
    with pytest.raises(ValueError, match="between 0 and 1"):
        BiasBudget(tolerance)


def test_settings_are_values():
    assert Cyclical(np.float32(0.5), np.int64(20)) == Cyclical(0.5, 20) != Cyclical(0.5, 21)
    assert Polynomial(0.1) == Polynomial(0.1, 1000.0, 0.55) != Polynomial(0.2)
    assert len({BiasBudget(), BiasBudget("auto"), BiasBudget(0.05), BiasBudget(0.1)}) == 3


@pytest.mark.parametrize("number", [0.01, 1, np.float32(0.25), np.float64(0.25), np.array(0.25), jnp.array(0.25)])
def test_numbers_are_constant_schedules(number):
    schedule = as_schedule(number)
    assert float(schedule(0)) == float(schedule(jnp.asarray(10**6))) == float(number)


@pytest.mark.parametrize(
    "schedule",
    [
        lambda count: 0.1 / (1 + count),
        Polynomial(0.1),
        optax.constant_schedule(0.1),
        optax.exponential_decay(0.1, 100, 0.5),
        optax.warmup_cosine_decay_schedule(0.0, 0.1, 10, 100),  # begins at 0
    ],
)
def test_callables_are_schedules_as_they_are(schedule):
    assert as_schedule(schedule) is schedule
    assert float(jax.jit(as_schedule(schedule))(7)) == pytest.approx(float(schedule(7)), rel=1e-6)


def test_steps_can_be_traced():
    """As where several are tried side by side: each run is the one with that step."""
    start = {"z": random.normal(random.key(0), (5, 2))}

    def run(step_size, key):
        mcmc = vectorized(SGLD(gaussian, step_size=step_size, num_steps=2), 0, 3, 5)
        mcmc.run(key, init_params=start)
        return mcmc.get_samples()["z"]

    key, steps = random.key(1), jnp.array([0.02, 0.2])
    expected = jnp.stack([run(float(step), key) for step in steps])
    together = jax.jit(jax.vmap(run, (0, None)))(steps, key)
    np.testing.assert_allclose(together, expected, rtol=1e-4, atol=1e-5)
    # As a schedule too.
    one = jax.jit(lambda step, key: run(lambda count: step, key))(steps[1], key)
    np.testing.assert_allclose(one, expected[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bad", [0, 0.0, -0.1, float("nan"), float("inf"), np.array(np.nan), jnp.array(-1.0)])
def test_numbers_that_are_no_step_are_refused(bad):
    with pytest.raises(ValueError, match="must be positive and finite"):
        as_schedule(bad)


@pytest.mark.parametrize("first", [-0.1, float("nan"), float("inf"), np.array([0.1, 0.2])])
def test_callables_with_a_bad_first_step_are_refused(first):
    with pytest.raises(ValueError, match="at update 0"):
        as_schedule(lambda count: first)


@pytest.mark.parametrize("bad", ["0.1", [0.1], (0.1,), {"step_size": 0.1}, jnp.array([0.1]), 1j])
def test_other_things_are_no_schedule(bad):
    with pytest.raises(TypeError, match="callable of the update count"):
        as_schedule(bad)
