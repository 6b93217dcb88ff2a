"""Numbers of NumPy and JAX are taken wherever plain ones are, kept as these, and nothing else is."""

from importlib import metadata

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_repulsion import (
    IMQ,
    RBF,
    SGLD,
    SVRG,
    Archive,
    BiasBudget,
    ControlVariates,
    Cyclical,
    FullData,
    Independent,
    Polynomial,
    Subsampled,
    Sweeps,
)
from numpyro_repulsion.checks import check_jaxlib
from numpyro_repulsion.dynamics import Overdamped, Recipe, Relativistic, Thermostat, Underdamped
from numpyro_repulsion.interactions import Laplacian, RandomFeatures, RandomGroups


def kernel(**settings):
    """The settings of a kernel."""
    made = SGLD(potential_fn=lambda z: z**2, step_size=0.1, **settings)
    return {name: getattr(made, name) for name in settings}


#: Every integer that a part takes.
INTEGERS = {
    "num_steps": lambda n: kernel(num_steps=n),
    "num_ensembles": lambda n: kernel(num_ensembles=n),
    "RandomGroups": lambda n: RandomGroups(RBF(), size=n),
    "RandomFeatures": lambda n: RandomFeatures(num_features=n),
    "Subsampled": lambda n: Subsampled(block_size=n),
    "ControlVariates": lambda n: ControlVariates(block_size=n),
    "chunk_size": lambda n: FullData(chunk_size=n).chunk_size,
    "SVRG": lambda n: SVRG(epoch=n),
    "Recipe": lambda n: Recipe(abs, extra=n),
    "Cyclical": lambda n: Cyclical(0.1, length=n),
    "Archive": lambda n: Archive(n),
}
#: Every real number that a part takes.
NUMBERS = {
    "step_size": lambda x: SGLD(potential_fn=lambda z: z**2, step_size=x).schedule,
    "RBF": lambda x: RBF(x),
    "IMQ": lambda x: IMQ(nugget=x),
    "Laplacian": lambda x: Laplacian(RBF(), strength=x),
    "weight": lambda x: x * RBF() + x * Independent(),
    "RandomFeatures": lambda x: RandomFeatures(bandwidth=x, weight=x),
    "Overdamped": lambda x: Overdamped(temperature=x),
    "Underdamped": lambda x: Underdamped(friction=x, temperature=x),
    "Thermostat": lambda x: Thermostat(friction=x, temperature=x, inertia=x),
    "Relativistic": lambda x: Relativistic(x),
    "Recipe": lambda x: Recipe(abs, temperature=x),
    "BiasBudget": lambda x: BiasBudget(x, min_draws=x),
    "Polynomial": lambda x: Polynomial(x, offset=x, power=1.0),
    "Cyclical": lambda x: Cyclical(x, 20),
}


@pytest.mark.parametrize("part", INTEGERS)
def test_integers(part):
    make = INTEGERS[part]
    expected = repr(make(64))
    others = (np.int64(64), np.uint8(64), np.array(64), jnp.array(64), jnp.int32(64))
    # The repr is a part of the identity of a saved run.
    assert {repr(make(n)) for n in others} == {expected}
    for wrong in (64.0, np.float64(64), jnp.array(64.0), True, np.True_, jnp.array(True), "64", np.array([64]), 1j, -1):
        with pytest.raises(ValueError, match="must be .*; got"):
            make(wrong)


@pytest.mark.parametrize("part", NUMBERS)
def test_numbers(part):
    make = NUMBERS[part]
    expected = repr(make(0.25))
    others = (np.float64(0.25), np.float16(0.25), np.array(0.25), jnp.array(0.25), jnp.bfloat16(0.25))
    assert {repr(make(x)) for x in others} == {expected}
    for wrong in (True, np.True_, jnp.array(True), "0.25", np.array([0.25]), 0.25j, np.nan, jnp.array(jnp.inf), -0.25):
        with pytest.raises((ValueError, TypeError), match="must be .*; got"):
            make(wrong)


@pytest.mark.parametrize(
    "make", [lambda x: Overdamped(noise=x), lambda x: Subsampled(shared=x), lambda x: Sweeps(control_variates=x)]
)
def test_truth_values(make):
    for value in (True, False):
        assert {repr(make(x)) for x in (np.bool_(value), jnp.array(value))} == {repr(make(value))}
    for wrong in (1, 0, "False", None, np.array([True])):
        with pytest.raises(ValueError, match="must be True or False; got"):
            make(wrong)


@pytest.mark.parametrize(
    ("version", "said"), [("0.10.2", "hang wrong"), ("0.10.1", "hang"), ("0.9.2", ""), ("0.11.2", ""), ("0.100.0", "")]
)
def test_releases_that_fail_are_named_once(version, said, monkeypatch, recwarn):
    monkeypatch.setattr(metadata, "version", lambda name: version)
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    check_jaxlib.cache_clear()
    check_jaxlib()
    check_jaxlib()
    assert len(recwarn) == bool(said)
    assert all((word in str(one.message)) == (word in said.split()) for one in recwarn for word in ("hang", "wrong"))
