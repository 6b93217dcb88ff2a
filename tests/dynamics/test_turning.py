"""Particles with momenta that gain far too much energy turn back."""

from jax import random
import jax.numpy as jnp
from models import warmed
import numpy as np
import pytest
from results import run

import numpyro
import numpyro.distributions as dist

from numpyro_repulsion import SGHMC, SGNHT, ControlVariates, Independent
from numpyro_repulsion.dynamics import Cloud, Overdamped, Relativistic, Thermostat, Underdamped
from numpyro_repulsion.dynamics.base import turn_back

MOMENTA = [Underdamped(), Underdamped(kinetic=Relativistic(2.0)), Thermostat()]


def clouds(dynamics, rise, size=6, dimension=3):
    """A cloud, and a proposal with the same momenta and energies that are higher by ``rise``."""
    z = random.normal(random.key(0), (1, size, dimension))
    cloud = dynamics.init(random.key(1), z, lambda z: (jnp.sum(z**2, -1) / 2, z), Independent().couple)
    return cloud, cloud._replace(z=z + 1.0, potential_energy=cloud.potential_energy + rise)


@pytest.mark.parametrize("dynamics", MOMENTA, ids=repr)
def test_only_large_gains_turn_back(dynamics):
    rise = jnp.array([[0.0, -1e6, 10.0, 1e3, jnp.inf, 20.0]])
    cloud, proposal = clouds(dynamics, rise)
    found, turned = turn_back(cloud, proposal, dynamics, jnp.zeros((1, 6), bool))
    assert turned.tolist() == [[False, False, False, True, True, False]]
    np.testing.assert_array_equal(found.z[turned], cloud.z[turned])
    np.testing.assert_array_equal(found.memory[0][turned], -cloud.memory[0][turned])
    np.testing.assert_array_equal(found.z[~turned], proposal.z[~turned])
    # Never twice: the energy before may be that of other data.
    found, turned = turn_back(cloud, proposal, dynamics, jnp.ones((1, 6), bool))
    assert not turned.any() and (found.z == proposal.z).all()


def test_dynamics_without_momenta_do_not_turn():
    cloud, proposal = clouds(Overdamped(), 1e9)
    found, turned = turn_back(cloud, proposal, Overdamped(), jnp.zeros((1, 6), bool))
    assert not turned.any() and isinstance(found, Cloud) and (found.z == proposal.z).all()


def model(y):
    mu = numpyro.sample("mu", dist.Normal(0.0, 10.0))
    numpyro.sample("y", dist.Normal(mu, 1.0).expand([len(y)]).to_event(1), obs=y)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kernel", [SGHMC, SGNHT])
def test_a_run_goes_on_on_other_data(kernel):
    y = random.normal(random.key(3), (100,))
    mcmc = run(kernel(model), y, num_warmup=300, num_samples=200, num_chains=8)
    assert mcmc.last_state.num_flagged_updates == 0  # ordinary updates never gain as much
    mcmc.post_warmup_state = mcmc.last_state
    other = 1.8 * y + 0.3
    mcmc.run(random.key(1), other)
    draws = np.asarray(mcmc.get_samples(group_by_chain=True)["mu"], float)
    assert all(len(np.unique(particle)) > 150 for particle in draws)
    expected = float(other.sum() / (100 + 0.01))
    assert abs(draws[:, 50:].mean() - expected) < 0.05  # half of a posterior standard deviation


def in_minibatches(y):
    mu = numpyro.sample("mu", dist.Normal(0.0, 10.0))
    with numpyro.plate("rows", len(y), subsample_size=10) as i:
        numpyro.sample("y", dist.Normal(mu, 1.0), obs=y[i])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("order", "turns"), [(2, True), pytest.param(1, False, marks=pytest.mark.slow)])
def test_with_minibatches_they_turn_where_energies_are_hardly_noisy(order, turns):
    y = random.normal(random.key(3), (100,))
    kernel = SGHMC(in_minibatches, gradient=ControlVariates(order=order), num_steps=1)
    state = run(kernel, y, num_warmup=300, num_samples=1, num_chains=8).last_state
    # As if it came from a place with so much less energy.
    after = kernel.sample(state._replace(potential_energy=state.potential_energy.at[0].add(-1e3)), (y,), {})
    assert (abs(after.z["mu"][0] - state.z["mu"][0]) < 1e-6) == turns
    assert after.num_flagged_updates - state.num_flagged_updates == turns


@pytest.mark.parametrize("order", [1, 2])
def test_in_warmup_they_turn_if_second_order_is_in_use(order):
    y = random.normal(random.key(3), (100,))
    kernel = SGHMC(in_minibatches, num_steps=1)
    state = warmed(kernel, random.split(random.key(0), 8), 60, 100, y)
    warmup, cloud = state.warmup, state.cloud
    assert warmup.reference.hessian.is_known
    reference = warmup.reference._replace(order=jnp.asarray(order, jnp.int32))
    cloud = cloud._replace(potential_energy=cloud.potential_energy.at[0, 0].add(-1e3))
    state = state._replace(warmup=warmup._replace(reference=reference), cloud=cloud)
    after = kernel.warm(state, 1, 100, (y,), {})
    assert (abs(after.cloud.z[0, 0, 0] - cloud.z[0, 0, 0]) < 1e-6) == (order == 2)
