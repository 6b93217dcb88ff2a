"""What `test_shapes.py` runs with checks of shapes: parts by themselves, short runs, and parts with wrong shapes.

As a program it installs the checks first, and prints as JSON which functions were checked and what the wrong parts
raised.
"""

import json
import sys
import warnings

if __name__ == "__main__":
    import shape_checks

    shape_checks.install()

from catalogue import DYNAMICS, GRADIENTS, INTERACTIONS, having
import jax
from jax import random
import jax.numpy as jnp
from models import programs_of, vectorized

import numpyro
import numpyro.distributions as dist

from numpyro_repulsion import RBF, SGHMC, SGLD, SGLDR, SVRG, Archive, Balanced, FullData, Sweeps
from numpyro_repulsion.dynamics import Cloud, Dynamics, Overdamped, StepError
from numpyro_repulsion.gradients import Gradient, ModelTarget, Reference, Subsampled, Target, ravel_cloud
from numpyro_repulsion.interactions import Coupling, Interaction
from numpyro_repulsion.moves import Move
from numpyro_repulsion.warmup import Moments

#: Two groups of six particles with two coordinates, whose gradients are the same.
CLOUD = random.normal(random.key(0), (2, 6, 2))
Y = jnp.arange(20.0) / 10.0


def quadratic(z):
    return jnp.sum(z**2, -1) / 2.0


def energy_and_grad(z):
    return quadratic(z), z


def rows(y):
    mu = numpyro.sample("mu", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    with numpyro.plate("rows", len(y), subsample_size=4) as i:
        numpyro.sample("y", dist.Normal(mu.sum(), 1.0), obs=y[i])


def groups(y):
    mu, tau = numpyro.sample("mu", dist.Normal(0.0, 5.0)), numpyro.sample("tau", dist.HalfNormal(5.0))
    with numpyro.plate("groups", 4):
        theta = numpyro.sample("theta", dist.Normal(mu, tau))
    with numpyro.plate("rows", len(y), subsample_size=4) as i:
        numpyro.sample("y", dist.Normal(theta[i % 4], 1.0), obs=y[i])


def trace(function, *args):
    """Run a function without computing anything, which tells all shapes."""
    return jax.eval_shape(function, *args)


# Parts by themselves


def couple(interaction):
    def everything(key, u):
        coupling = interaction.at(key if interaction.is_redrawn else None, 0).couple(u, 1.0)
        return coupling.apply(u), coupling.repulsion, coupling.draw(key), coupling.bound, coupling.diagonal

    trace(everything, random.key(1), CLOUD)


def step(dynamics, interaction):
    def update(key, u):
        cloud = dynamics.init(key, u, energy_and_grad, interaction.couple)
        return dynamics.step(key, cloud, energy_and_grad, interaction.couple, 0.1)

    trace(update, random.key(1), CLOUD)


def estimate(gradient):
    target = ModelTarget(rows, (Y,))
    _, unravel = ravel_cloud({"mu": CLOUD[0]})
    reference = Reference.none(CLOUD.shape, CLOUD.dtype, in_use=True) if gradient.has_reference else None

    def at(key, count):
        now = gradient.at(count, jnp.zeros((), jnp.uint32))
        return now.energy_and_grad(key, target, unravel, CLOUD, *[reference] * gradient.has_reference)

    trace(at, random.key(1), jnp.zeros((), jnp.int32))


def run_parts():
    for interaction in having(INTERACTIONS).values():
        couple(interaction)
    for dynamics in having(DYNAMICS).values():
        step(dynamics, having(INTERACTIONS)["independent"])
    for dynamics in having(DYNAMICS, but=["alone"]).values():
        step(dynamics, RBF(1.0))
    for gradient in having(GRADIENTS).values():
        estimate(gradient)


# Runs


def sample(kernel, *args, num_chains=4, init_params=None):
    """Pass once through the programs of an iteration of warmup, and of one after it."""
    for function, state in programs_of(
        kernel, random.split(random.key(0), num_chains), 50, *args, init_params=init_params
    ):
        trace(function, state)


def run_rooms():
    mcmc = vectorized(SGLDR(potential_fn=quadratic), 50, 2, 6)
    mcmc.run(random.key(0), init_params=CLOUD[0])
    mcmc.sampler.findings(mcmc.last_state)
    sample(SGHMC(rows, preconditioner="dense"), Y)
    sample(SGLDR(rows, preconditioner="low_rank", gradient=Sweeps()), Y)
    sample(SGLD(rows, interaction=Balanced(RBF("learned")), num_ensembles=2, gradient=SVRG()), Y)
    sample(SGHMC(groups), Y)
    sample(SGLD(rows, moves=Archive(), gradient=FullData()), Y, num_chains=6)


# Parts with wrong shapes, which run nevertheless


class Common(Interaction):
    """One noise for all particles of a group."""

    def couple(self, u, bandwidth=None):
        return Coupling.identity(lambda key: random.normal(key, (*u.shape[:-2], 1, u.shape[-1])))


class Averaging(Overdamped):
    """One energy for all particles of a group."""

    def step(self, key, cloud, energy_and_grad, couple, step_size):
        moved = super().step(key, cloud, energy_and_grad, couple, step_size)
        return moved._replace(potential_energy=moved.potential_energy.mean(-1))


class Constant(Subsampled):
    """One gradient for all particles of a group."""

    def energy_and_grad(self, key, target, unravel, z, reference=None):
        energy, gradient = super().energy_and_grad(key, target, unravel, z, reference)
        return energy, gradient.mean(-2, keepdims=True)


def of_noise():
    step(Overdamped("euler"), Common())


def of_noise_in_a_run():
    kernel = SGLD(potential_fn=quadratic, dynamics=Overdamped("euler"), interaction=Common(), step_size=0.1)
    sample(kernel, num_chains=6, init_params=CLOUD[0])


def of_energies():
    step(Averaging("euler"), having(INTERACTIONS)["independent"])


def of_gradients():
    estimate(Constant())


def of_what_is_handed_over():
    coupling = having(INTERACTIONS)["independent"].couple
    Overdamped("euler").init(random.key(0), CLOUD, lambda z: (quadratic(z)[..., None], z), coupling)


def of_what_warmup_sums():
    Moments.empty(2, CLOUD.dtype, False).add(CLOUD, CLOUD)


def of_fields():
    Overdamped("euler").jumped(Cloud(CLOUD, quadratic(CLOUD), CLOUD[..., :1]), jnp.ones((2, 6), bool))


def of_types():
    Overdamped("euler").jumped(Cloud(CLOUD, *energy_and_grad(CLOUD)), jnp.ones((2, 6), int))


WRONG = {
    function.__name__: function
    for function in (
        of_noise,
        of_noise_in_a_run,
        of_energies,
        of_gradients,
        of_what_is_handed_over,
        of_what_warmup_sums,
        of_fields,
        of_types,
    )
}


def main():
    warnings.simplefilter("ignore")
    shape_checks.inherit_all(Dynamics, Interaction, Gradient, Target, StepError, Move)
    run_parts()
    run_rooms()
    raised = {}
    for name, run_wrong in WRONG.items():
        try:
            run_wrong()
        except Exception as error:
            raised[name] = str(error)
    json.dump({"checked": sorted(shape_checks.CHECKED), "raised": raised}, sys.stdout)


if __name__ == "__main__":
    main()
