"""Step sizes by the update count."""

import re

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


def test_cyclical_values(x64):
    schedule = Cyclical(0.3, length=40)
    for count in (0, 1, 20, 39, 40, 41, 123_456_789):
        expected = 0.15 * (np.cos(np.pi * (count % 40) / 40) + 1.0)
        assert float(schedule(count)) == pytest.approx(expected, rel=1e-9)
    counts = jnp.arange(100)
    np.testing.assert_allclose(jax.jit(schedule)(counts), [schedule(int(count)) for count in counts], rtol=1e-12)
    # The second half of a cycle lasts as long as stated.
    schedule = Cyclical(0.3, length=10_000)
    assert float(schedule(jnp.arange(5_000, 10_000)).sum()) == pytest.approx(0.09 * 0.3 * 10_000, rel=0.01)


def test_cyclical_steps_keep_their_precision_at_the_end_of_a_cycle():
    expected = np.sin(np.pi / 2 / 10**5) ** 2
    assert float(Cyclical(1.0, length=10**5)(10**5 - 1)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "name", "values", "expected"),
    [
        (Polynomial, "power", (0.5, 0.0, -1.0, 1.0001, np.nan), r"(0.5, 1]"),
        (Polynomial, "offset", (0.0, None), "a positive, finite number"),
        (Cyclical, "length", (1, 0, None), "an integer, 2 or more"),
        (BiasBudget, "tolerance", (0.0, 1.0, np.inf, None), "between 0 and 1"),
    ],
)
def test_numbers_out_of_range_are_refused(kind, name, values, expected):
    good = {Polynomial: {"step_size": 0.1}, Cyclical: {"step_size": 0.1, "length": 100}, BiasBudget: {}}[kind]
    for value in values:
        with pytest.raises(ValueError, match=f"`{name}` must be .*{re.escape(expected)}"):
            kind(**good | {name: value})
    assert float(Polynomial(0.1, power=0.500001)(0)) == float(Polynomial(0.1, power=1)(0)) == pytest.approx(0.1)


def test_numbers_are_constant_schedules_and_callables_are_schedules_as_they_are():
    for number in (0.01, 1, jnp.array(0.25)):
        schedule = as_schedule(number)
        assert float(schedule(0)) == float(schedule(jnp.asarray(10**6))) == float(number)
    # The last one begins at 0.
    for schedule in (Polynomial(0.1), optax.warmup_cosine_decay_schedule(0.0, 0.1, 10, 100)):
        assert as_schedule(schedule) is schedule


def test_steps_can_be_traced():
    """As where several are tried side by side: each run is the one with that step."""
    start = {"z": random.normal(random.key(0), (5, 2))}

    def run(step_size, key):
        mcmc = vectorized(SGLD(gaussian, step_size=step_size, num_steps=2), 0, 3, 5)
        mcmc.run(key, init_params=start)
        return mcmc.get_samples()["z"]

    key, steps = random.key(1), jnp.array([0.02, 0.2])
    expected = run(0.2, key)
    together = jax.jit(jax.vmap(run, (0, None)))(steps, key)
    np.testing.assert_allclose(together[1], expected, rtol=1e-4, atol=1e-5)
    assert not np.allclose(together[0], expected)
    # As a schedule too.
    one = jax.jit(lambda step, key: run(lambda count: step, key))(steps[1], key)
    np.testing.assert_allclose(one, expected, rtol=1e-4, atol=1e-5)


def test_what_is_no_step_is_refused():
    for bad in (0, 0.0, -0.1, np.nan, np.inf, np.array(np.nan), jnp.array(-1.0)):
        with pytest.raises(ValueError, match="must be positive and finite"):
            as_schedule(bad)
    for first in (-0.1, np.nan, np.inf, np.array([0.1, 0.2])):
        with pytest.raises(ValueError, match="at update 0"):
            as_schedule(lambda count, first=first: first)
    for bad in ("0.1", [0.1], (0.1,), {"step_size": 0.1}, jnp.array([0.1]), 1j):
        with pytest.raises(TypeError, match="callable of the update count"):
            as_schedule(bad)
