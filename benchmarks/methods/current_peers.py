"""Samplers of others, and ours, on a posterior whose moments are known: one program for runs from any seed.

Each function takes a :class:`Problem` and returns a function of a seed. That returns the scalars of all draws
``(draw, scalar)`` and how many gradients of all rows the run took, warmup and tuning included.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
import os
import warnings

import blackjax
import blackjax.adaptation.laps
import jax
from jax import lax, random
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
import numpy as np
import optax
from scipy.optimize import minimize

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
    """A posterior, and the order of its scalars.

    - **rows** - how many rows there are for each in a minibatch; 1 without minibatches.
    """

    posterior: Posterior
    sites: tuple[str, ...]
    rows: float = 1.0

    def scalars(self, draws: dict) -> np.ndarray:
        """Values ``(draw, scalar)`` of sites ``(draw, ...)``."""
        return np.concatenate([np.asarray(draws[s], float).reshape(len(draws[s]), -1) for s in self.sites], 1)

    @property
    def all_rows(self) -> dict:
        """The keyword arguments of the model without a minibatch."""
        return {name: value for name, value in self.posterior.kwargs.items() if name != "subsample_size"}


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
        given = problem.posterior.args, problem.all_rows
        mcmc.warmup(random.key(seed), *given[0], **given[1], collect_warmup=True, extra_fields=("num_steps",))
        gradients = mcmc.get_extra_fields()["num_steps"].sum()
        mcmc.run(random.key(seed + 1000), *given[0], **given[1], extra_fields=("num_steps",))
        return problem.scalars(mcmc.get_samples()), float(gradients + mcmc.get_extra_fields()["num_steps"].sum())

    return run


class Flat:
    """The log density of flat unconstrained positions, draws of NumPyro's starts, and scalars of positions."""

    def __init__(self, problem: Problem):
        posterior = problem.posterior
        self.problem = problem

        def started(key):
            return initialize_model(
                key,
                posterior.model,
                model_args=posterior.args,
                model_kwargs=problem.all_rows,
                init_strategy=init_to_uniform,
                validate_grad=False,
            )

        info = started(random.key(0))
        flat, self.unravel = ravel_pytree(info.param_info.z)
        self.dimension, self.potential, self.constrain = len(flat), info.potential_fn, info.postprocess_fn
        self._started = started

    def log_density(self, x):
        return -self.potential(self.unravel(x))

    def starts(self, key, number):
        return jnp.stack([ravel_pytree(self._started(k).param_info.z)[0] for k in random.split(key, number)])

    def scalars(self, positions):
        """From ``(draw, d)``."""
        draws = jax.jit(partial(lax.map, lambda x: self.constrain(self.unravel(x)), batch_size=1000))(positions)
        return self.problem.scalars(draws)


def chees(problem: Problem) -> Callable:
    """ChEES-HMC with a diagonal metric, as many chains as we have particles."""
    flat = Flat(problem)

    @jax.jit
    def program(key, starts):
        warmup_key, key = random.split(key)
        warmup = blackjax.chees_adaptation(flat.log_density, MANY, mass_matrix_estimation="diagonal")
        (states, parameters), info = warmup.run(warmup_key, starts, 0.1, optax.adam(0.05), WARMUP)
        step = jax.vmap(blackjax.dynamic_hmc(flat.log_density, **parameters).step)

        def iterate(states, key):
            states, info = step(random.split(key, MANY), states)
            return states, (states.position, info.num_integration_steps)

        _, (positions, steps) = lax.scan(iterate, states, random.split(key, DRAWS))
        return positions, steps.sum() + info.info.num_integration_steps.sum()

    return _of(flat, program, MANY)


def meads(problem: Problem) -> Callable:
    """Generalized HMC whose parameters come from other folds of chains."""
    flat = Flat(problem)
    many = 2 * MANY

    @jax.jit
    def program(key, starts):
        warmup_key, key = random.split(key)
        (states, parameters), _ = blackjax.meads_adaptation(flat.log_density, many).run(warmup_key, starts, WARMUP)
        step = jax.vmap(blackjax.ghmc(flat.log_density, **parameters).step)

        def iterate(states, key):
            states, _ = step(random.split(key, many), states)
            return states, states.position

        # One gradient in each: draws are thinned, so that there are as many as of others.
        def draw(states, key):
            states, positions = lax.scan(iterate, states, random.split(key, NUM_STEPS))
            return states, positions[-1]

        _, positions = lax.scan(draw, states, random.split(key, DRAWS // 2))
        return positions, many * (WARMUP + DRAWS // 2 * NUM_STEPS)

    return _of(flat, program, many)


def mclmc(problem: Problem, adjusted: bool) -> Callable:
    """Microcanonical Langevin dynamics, each chain tuned by itself; unadjusted, or with Metropolis."""
    flat = Flat(problem)
    steps = 20_000 if not adjusted else 10_000

    def unadjusted(key, start):
        first, tune, key = random.split(key, 3)
        state = blackjax.mcmc.mclmc.init(start, flat.log_density, first)
        kernel = blackjax.mcmc.mclmc.build_kernel()
        state, found, tuning = blackjax.mclmc_find_L_and_step_size(
            kernel, steps, state, tune, logdensity_fn=flat.log_density
        )

        def iterate(state, key):
            state, _ = kernel(key, state, flat.log_density, found.inverse_mass_matrix, found.L, found.step_size)
            return state, state.position

        _, positions = lax.scan(iterate, state, random.split(key, steps))
        return positions[::NUM_STEPS], 2 * (steps + tuning)

    def with_metropolis(key, start):
        first, tune, key = random.split(key, 3)
        state = blackjax.mcmc.adjusted_mclmc_dynamic.init(start, flat.log_density, first)

        def number(key, average):
            return jnp.ceil(random.uniform(key) * 2.0 * average - 0.5).astype(int).clip(1)

        kernel = blackjax.mcmc.adjusted_mclmc_dynamic.build_kernel(integration_steps_fn=number)

        def tuned(rng_key, state, logdensity_fn, step_size, inverse_mass_matrix, integration_steps_params):
            return kernel(
                rng_key,
                state,
                logdensity_fn,
                step_size,
                inverse_mass_matrix=inverse_mass_matrix,
                integration_steps_params=integration_steps_params,
            )

        state, found, _ = blackjax.adjusted_mclmc_find_L_and_step_size(
            tuned, flat.log_density, steps, state, tune, target=0.9
        )

        def iterate(state, key):
            state, info = tuned(
                key,
                state,
                flat.log_density,
                found.step_size,
                found.inverse_mass_matrix,
                (found.L / found.step_size,),
            )
            return state, (state.position, info.num_integration_steps)

        _, (positions, taken) = lax.scan(iterate, state, random.split(key, steps))
        # Tuning has a fifth as many steps, of about the same length.
        return positions[::5], 2.4 * taken.sum()

    @jax.jit
    def program(key, starts):
        positions, gradients = jax.vmap(with_metropolis if adjusted else unadjusted)(random.split(key, CHAINS), starts)
        return positions, gradients.sum()

    return _of(flat, program, CHAINS)


def _of(flat, program, number):
    def run(seed):
        start_key, key = random.split(random.key(seed))
        positions, gradients = program(key, flat.starts(start_key, number))
        return flat.scalars(positions.reshape(-1, flat.dimension)), float(gradients)

    return run


def laps(problem: Problem) -> Callable:
    """A thousand chains of microcanonical dynamics, unadjusted at first; the last positions are the draws."""
    flat, chains, unadjusted, adjusted = Flat(problem), 1000, 200, 300
    mesh = jax.make_mesh((1,), ("chains",), axis_types=(jax.sharding.AxisType.Auto,))

    def start(key):
        # It draws starts by itself: these are NumPyro's, without a look at whether they are finite.
        return random.uniform(key, (flat.dimension,), minval=-2.0, maxval=2.0)

    def run(seed):
        *_, state = blackjax.adaptation.laps.laps(
            flat.log_density,
            start,
            flat.dimension,
            unadjusted,
            adjusted,
            chains,
            mesh,
            random.key(seed),
            diagnostics=False,
        )
        # Unadjusted steps and those of paths take two gradients of the integrator.
        return flat.scalars(state.position), 2.0 * chains * (unadjusted + adjusted)

    return run


def pathfinder(problem: Problem) -> Callable:
    """Draws of the best approximations on twenty paths, resampled by importance."""
    flat = Flat(problem)
    algorithm = blackjax.multipathfinder(flat.log_density)

    def run(seed):
        start_key, key, draw_key = random.split(random.key(seed), 3)
        state, _ = algorithm.init(key, flat.starts(start_key, MANY))
        return flat.scalars(algorithm.sample(draw_key, state, 2000)), float("nan")

    return run


def nutpie(problem: Problem, low_rank: bool) -> Callable:
    """Its own settings, four chains; the gradient is a compiled function of JAX, called from Python."""
    import nutpie as library

    flat = Flat(problem)
    value_and_grad = jax.jit(jax.value_and_grad(flat.log_density))

    def make_logp():
        def logp(x):
            value, gradient = value_and_grad(jnp.asarray(x, jnp.float32))
            return float(value), np.asarray(gradient, np.float64, order="C")

        return logp

    model = library.compiled_pyfunc.from_pyfunc(
        flat.dimension,
        make_logp,
        lambda seed1, seed2, chain: lambda x: {"z": np.asarray(x, np.float64)},
        [np.dtype("float64")],
        [(flat.dimension,)],
        ["z"],
    )

    def run(seed):
        trace = library.sample(
            model,
            chains=CHAINS,
            cores=min(CHAINS, len(os.sched_getaffinity(0))),
            seed=seed,
            progress_bar=False,
            low_rank_modified_mass_matrix=low_rank,
            save_warmup=True,
        )
        stats = "warmup_sample_stats", "sample_stats"
        gradients = sum(float(np.nan_to_num(trace[group]["n_steps"].values).sum()) for group in stats)
        positions = trace["posterior"]["z"].values.reshape(-1, flat.dimension)
        return flat.scalars(jnp.asarray(positions, jnp.float32)), gradients

    return run


def laplace(problem: Problem) -> Callable:
    """The mode by L-BFGS from the first start, and a Gaussian with the inverse Hessian there."""
    flat = Flat(problem)
    value_and_grad = jax.jit(jax.value_and_grad(lambda x: -flat.log_density(x)))
    hessian = jax.jit(jax.hessian(lambda x: -flat.log_density(x)))

    def run(seed):
        start_key, key = random.split(random.key(seed))
        start = np.asarray(flat.starts(start_key, 1)[0], float)

        def function(x):
            value, gradient = value_and_grad(jnp.asarray(x, jnp.float32))
            return float(value), np.asarray(gradient, float)

        found = minimize(function, start, jac=True, method="L-BFGS-B", options={"maxiter": 3000})
        values, vectors = np.linalg.eigh(np.asarray(hessian(jnp.asarray(found.x, jnp.float32)), float))
        root = vectors / np.sqrt(np.maximum(values, 1e-8))
        draws = found.x + np.asarray(random.normal(key, (4000, len(start)))) @ root.T
        return flat.scalars(jnp.asarray(draws, jnp.float32)), float(found.nfev + len(start))

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
    "BlackJAX MEADS": (meads, "the potential"),
    "BlackJAX MCLMC": (partial(mclmc, adjusted=False), "the potential, a number of steps"),
    "BlackJAX MCLMC, adjusted": (partial(mclmc, adjusted=True), "the potential, an acceptance rate, lengths of paths"),
    "BlackJAX LAPS, 1,000 chains": (laps, "the potential, numbers of chains and steps"),
    "BlackJAX Pathfinder, 20 paths": (pathfinder, "the potential"),
    "Laplace": (laplace, "the potential"),
}


def finished(run: Callable, seed: int):
    """A run without its warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return run(seed)
