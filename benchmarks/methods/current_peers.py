"""Samplers of others, and ours, on a posterior whose moments are known: one program for runs from any seed.

Each function takes a :class:`Problem` and returns a function of a seed. That returns the scalars of all draws
``(draw, scalar)`` and how many gradients of all rows the run took, warmup and tuning included.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
import os
from typing import Any

import blackjax
import jax
from jax import lax, random
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
import numpy as np
import optax

from numpyro.infer import NUTS, init_to_uniform
from numpyro.infer.util import initialize_model

from benchmarks.harness.runs import vectorized, warmup_gradients
from benchmarks.problems.posteriordb import Posterior
from numpyro_repulsion import SGHMC, SGLD, SGLDR, Antithetic

#: Particles of ours, and chains of the samplers that learn from many; chains of the others.
MANY, CHAINS = 20, 4
WARMUP, DRAWS, NUM_STEPS = 1000, 1000, 10


@dataclass(frozen=True)
class Problem:
    """A posterior, the order of its scalars, and how many rows there are for each in a minibatch (1 without)."""

    posterior: Posterior
    sites: tuple[str, ...]
    rows: float = 1.0

    def density(self) -> "Flat":
        return Flat(self.posterior.model, self.posterior.args, self.posterior.all_rows)

    def scalars(self, draws: dict) -> np.ndarray:
        return np.concatenate([np.asarray(draws[s], float).reshape(len(draws[s]), -1) for s in self.sites], 1)


def counted(problem: Problem, kernel: Callable, **settings) -> int:
    """The gradients of a warmup of ours; a run with a compilation of its own, which no run of a user has."""
    posterior = problem.posterior
    return warmup_gradients(kernel(posterior.model, **settings), posterior.args, posterior.kwargs, WARMUP, MANY)


def ours(problem: Problem, kernel: Callable, in_warmup: int = 0, **settings) -> Callable:
    """Nothing set but ``settings``; ``in_warmup`` is what `counted` returns."""
    posterior = problem.posterior
    made = kernel(posterior.model, **settings)
    given = posterior.args, posterior.kwargs
    mcmc = vectorized(made, WARMUP, DRAWS, MANY, progress_bar=True)
    # Two gradients of control variates in each update, of minibatches.
    of_all = (1 if problem.rows == 1 else 2) * DRAWS * NUM_STEPS
    gradients = MANY * (in_warmup + of_all) / problem.rows

    def run(seed):
        mcmc.run(random.key(seed), *given[0], **given[1])
        return problem.scalars(mcmc.get_samples()), gradients

    return run


def nuts(problem: Problem) -> Callable:
    """NumPyro's, vectorized."""
    mcmc = vectorized(NUTS(problem.posterior.model), WARMUP, DRAWS, CHAINS, progress_bar=True)

    def run(seed):
        given = problem.posterior.args, problem.posterior.all_rows
        mcmc.warmup(random.key(seed), *given[0], **given[1], collect_warmup=True, extra_fields=("num_steps",))
        gradients = mcmc.get_extra_fields()["num_steps"].sum()
        mcmc.run(random.key(seed + 1000), *given[0], **given[1], extra_fields=("num_steps",))
        return problem.scalars(mcmc.get_samples()), float(gradients + mcmc.get_extra_fields()["num_steps"].sum())

    return run


class Flat:
    """The log density of flat unconstrained positions, draws of NumPyro's starts, and sites of positions."""

    def __init__(self, model: Callable, args: tuple = (), kwargs: dict | None = None, init_strategy=init_to_uniform):
        given = {"model_args": args, "model_kwargs": kwargs, "init_strategy": init_strategy}
        self._started = partial(initialize_model, model=model, validate_grad=False, **given)
        info = self._started(random.key(0))
        self.start, self.unravel = ravel_pytree(info.param_info.z)
        self.dimension, self.potential, self.constrain = len(self.start), info.potential_fn, info.postprocess_fn

    def log_density(self, x):
        return -self.potential(self.unravel(x))

    def starts(self, key, number):
        return jnp.stack([ravel_pytree(self._started(k).param_info.z)[0] for k in random.split(key, number)])

    def sites(self, positions):
        """From ``(draw, d)``."""
        return jax.jit(partial(lax.map, lambda x: self.constrain(self.unravel(x)), batch_size=1000))(positions)


def run_chees(log_density: Callable, keys: Any, starts: jax.Array, warmup: int, draws: int) -> tuple:
    """ChEES-HMC with a diagonal metric: positions ``(draw, chain, d)``, and gradients of warmup and of draws.

    ``keys`` are those of warmup and of draws, ``starts`` are ``(chain, d)``.
    """
    chains = len(starts)
    adaptation = blackjax.chees_adaptation(log_density, chains, mass_matrix_estimation="diagonal")
    (states, found), tuning = adaptation.run(keys[0], starts, 0.1, optax.adam(0.05), warmup)
    step = jax.vmap(blackjax.dynamic_hmc(log_density, **found).step)

    def iterate(states, key):
        states, info = step(random.split(key, chains), states)
        return states, (states.position, info.num_integration_steps)

    _, (positions, steps) = lax.scan(iterate, states, random.split(keys[1], draws))
    return positions, tuning.info.num_integration_steps.sum(), steps.sum()


def chees(problem: Problem) -> Callable:
    """As many chains as we have particles."""
    flat = problem.density()
    program = jax.jit(lambda key, starts: run_chees(flat.log_density, random.split(key), starts, WARMUP, DRAWS))

    def run(seed):
        start_key, key = random.split(random.key(seed))
        positions, *gradients = program(key, flat.starts(start_key, MANY))
        return problem.scalars(flat.sites(positions.reshape(-1, flat.dimension))), float(sum(gradients))

    return run


def nutpie_model(value_and_grad: Callable, dimension: int, dtype: type) -> Any:
    """A compiled log density of flat positions, called from Python."""
    import nutpie as library

    def make_logp():
        def logp(x):
            value, gradient = value_and_grad(jnp.asarray(x, dtype))
            return float(value), np.asarray(gradient, np.float64, order="C")

        return logp

    def make_expand(seed1, seed2, chain):
        return lambda x: {"z": np.asarray(x, np.float64)}

    shapes = [np.dtype("float64")], [(dimension,)], ["z"]
    return library.compiled_pyfunc.from_pyfunc(dimension, make_logp, make_expand, *shapes)


def nutpie_sampler(model: Any, seed: int, low_rank: bool, **settings: Any) -> Any:
    """Four chains with nutpie's own settings, begun."""
    import nutpie as library

    cores = min(CHAINS, len(os.sched_getaffinity(0)))
    settings |= {"low_rank_modified_mass_matrix": low_rank, "blocking": False, "progress_bar": False}
    return library.sample(model, chains=CHAINS, cores=cores, seed=seed, **settings)


def nutpie_steps(trace: Any) -> tuple[np.ndarray, np.ndarray]:
    """Gradients ``(chain, draw)`` of tuning and of draws."""
    groups = ("warmup_sample_stats", "sample_stats")
    tuning, sampling = (np.nan_to_num(trace[group]["n_steps"].values) for group in groups)
    return tuning, sampling


def nutpie(problem: Problem, low_rank: bool) -> Callable:
    flat = problem.density()
    model = nutpie_model(jax.jit(jax.value_and_grad(flat.log_density)), flat.dimension, np.float32)

    def run(seed):
        trace = nutpie_sampler(model, seed, low_rank, save_warmup=True).wait()
        positions = trace["posterior"]["z"].values.reshape(-1, flat.dimension)
        gradients = float(sum(steps.sum() for steps in nutpie_steps(trace)))
        return problem.scalars(flat.sites(jnp.asarray(positions, jnp.float32))), gradients

    return run


#: What is run, and what each has to be told.
METHODS = {
    "`SGLD(model)`": (partial(ours, kernel=SGLD), "nothing"),
    "`SGLD(model, interaction=Antithetic())`": (partial(ours, kernel=SGLD, interaction=Antithetic()), "the noise"),
    "`SGLDR(model)`": (partial(ours, kernel=SGLDR), "nothing"),
    "`SGHMC(model)`": (partial(ours, kernel=SGHMC), "nothing"),
    "NumPyro NUTS": (nuts, "nothing"),
    "nutpie": (partial(nutpie, low_rank=False), "the potential and its gradient"),
    "nutpie, low rank": (partial(nutpie, low_rank=True), "the potential and its gradient"),
    "BlackJAX ChEES-HMC": (chees, "the potential, a first step, an optimizer"),
}
