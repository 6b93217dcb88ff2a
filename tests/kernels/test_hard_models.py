"""Models at the edge of what can be sampled: they work, or are refused with the reason."""

import re
import warnings

import jax
from jax import random
import jax.numpy as jnp
from models import vectorized
import numpy as np
import pytest

import numpyro
import numpyro.distributions as dist
from numpyro.distributions import constraints

from numpyro_repulsion import SGLD, SGLDR
from numpyro_repulsion.gradients import ModelTarget

KEY = random.key(0)
Y = np.linspace(-1.0, 1.0, 12, dtype=np.float32)


def run(model):
    mcmc = vectorized(SGLDR(model, step_size=1e-3), 0, 4, 4)
    mcmc.run(KEY)
    return mcmc


def location(y=Y):
    z = numpyro.sample("z", dist.Normal(0, 1))
    numpyro.sample("y", dist.Normal(z, 1), obs=y)


# Data.


@pytest.mark.parametrize(
    "data",
    [np.arange(4), jnp.arange(4, dtype=jnp.int8), np.array([True, False]), jnp.ones(3, jnp.float16), np.ones(3)],
    ids=lambda x: str(x.dtype),
)
def test_data_of_any_number_type(data):
    def model(x):
        z = numpyro.sample("z", dist.Normal(0, 1))
        with numpyro.plate("rows", len(x), subsample_size=2) as i:
            numpyro.sample("y", dist.Normal(z, 1), obs=x[i])

    target = ModelTarget(model, (data,))
    energy = jax.jit(target.potential_energy)({"z": 0.3}, target.all_rows, KEY)
    exact = -dist.Normal(0, 1).log_prob(0.3) - dist.Normal(0.3, 1).log_prob(np.asarray(data, np.float32)).sum()
    # Half precision of the data is not that of the particles.
    np.testing.assert_allclose(energy, exact, rtol=1e-2 if data.dtype == jnp.float16 else 1e-5)
    assert target.prototype["z"].dtype == jnp.float32


def test_no_data_and_empty_data_give_the_prior():
    def model(y=None):
        z = numpyro.sample("z", dist.Normal(0, 1))
        if y is not None:
            numpyro.sample("y", dist.Normal(z, 1), obs=y)

    for args in ((), (jnp.zeros(0),)):
        energy = ModelTarget(model, args).potential_energy({"z": 0.3}, {}, KEY)
        np.testing.assert_allclose(energy, -dist.Normal(0, 1).log_prob(0.3), rtol=1e-6)


def test_a_minibatch_of_all_rows_is_no_minibatch():
    def model(y, size=None):
        z = numpyro.sample("z", dist.Normal(0, 1))
        with numpyro.plate("rows", len(y), subsample_size=size) as i:
            numpyro.sample("y", dist.Normal(z, 1), obs=y[i])

    assert ModelTarget(model, (Y, len(Y))).plates == {}
    with raises("The plate 'rows' has subsample_size=0. Write subsample_size=min"):
        ModelTarget(model, (Y, 0))
    # An empty plate NumPyro itself refuses.
    with pytest.raises((AssertionError, ValueError), match="positive"):
        ModelTarget(model, (Y[:0],))


# Particles.


def raises(message):
    return pytest.raises(ValueError, match=re.compile(message, re.DOTALL))


def test_latent_sites_without_elements():
    with raises(r"latent sites \['w'\] have no elements"):
        ModelTarget(lambda: numpyro.sample("w", dist.Normal(0, 1).expand([0]).to_event(1)))


# Priors that are no laws.


def test_directions_without_an_end_are_warned_of():
    def model():
        z = numpyro.sample("z", dist.ImproperUniform(constraints.real, (), (2,)))
        w = numpyro.sample("w", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(z[0] + w, 1), obs=Y)

    with pytest.warns(
        UserWarning, match=r"does not change with 1 of 3 coordinates, in the sites \['z'\].*proper prior"
    ):
        SGLDR(model, step_size=1e-3).init(random.split(KEY, 4), 0, None, (), {})
    with pytest.warns(UserWarning, match="does not change with 1 of 2 coordinates at any"):
        kernel = SGLD(potential_fn=lambda z: z[0] ** 2, step_size=0.1)
        kernel.init(random.split(KEY, 4), 0, random.normal(KEY, (4, 2)), (), {})


def test_improper_priors_of_proper_posteriors_are_not():
    def model():
        z = numpyro.sample("z", dist.ImproperUniform(constraints.real, (), ()))
        sd = numpyro.sample("sd", dist.ImproperUniform(constraints.positive, (), ()))
        numpyro.sample("y", dist.Normal(z, sd), obs=Y)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        samples = run(model).get_samples()
    assert np.isfinite(samples["z"]).all() and (samples["sd"] > 0).all()


def test_the_energy_inside_jit_of_a_model_made_there():
    @jax.jit
    def energy(z, y):
        return ModelTarget(location, (y,)).potential_energy({"z": z}, {}, KEY)

    np.testing.assert_allclose(
        energy(0.3, Y), ModelTarget(location, (Y,)).potential_energy({"z": 0.3}, {}, KEY), rtol=1e-6
    )
