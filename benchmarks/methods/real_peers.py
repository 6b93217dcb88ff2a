"""Samplers of others, and ours, on a posterior of real data: a whole run of each, from the model to scored draws.

Each function takes the problem's name and how many seconds it may run, and returns a row. A run that reaches its limit
stops, is scored by what it has, and says ``"unfinished"``. Gradients are counted as gradients of all rows for one
chain: of minibatches, rows looked at over rows. Those ``in_all`` include warmup, tuning and searches.

Kernels of NumPyro run in single precision, as they do unless asked; nutpie and Laplace in double precision, in which
nutpie keeps its positions and a mode can be found.
"""

import time
import warnings

import jax
from jax import lax, random
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
import numpy as np
from scipy.optimize import minimize

import numpyro
from numpyro.infer import NUTS, init_to_median
from numpyro.infer.util import initialize_model

from benchmarks.harness.runs import vectorized, warmup_gradients
from benchmarks.methods.current_peers import nutpie_model, nutpie_sampler, nutpie_steps
from benchmarks.problems import real
from benchmarks.problems.real import BATCH
from benchmarks.problems.real_scores import errors, mixing, scalars
from numpyro_repulsion import SGHMC, SGLD

PARTICLES, NUM_STEPS = 20, 10
#: Iterations between two looks at the clock.
PIECE = 10
#: Fewer draws of a chain than these are not scored.
FEWEST = 40
INDEPENDENT = 4000


def row(problem, draws, parameters, seconds, gradients, in_all, **more):
    """The scores of draws ``(chain, draw, ...)``, if there are enough."""
    found = scalars(draws, problem.quantities) if draws else {}
    num_draws = next(iter(found.values())).shape[2] if found else 0
    scores = {}
    if num_draws >= FEWEST:
        scores = errors(problem.name, found) | mixing(problem.name, found)
    return (
        {
            "parameters": int(parameters),
            "seconds": seconds,
            "gradients": float(gradients),
            "in_all": float(in_all),
            "draws": [int(next(iter(found.values())).shape[1]) if found else 0, int(num_draws)],
        }
        | scores
        | more
    )


# --- NumPyro -------------------------------------------------------------------------------------------------------


def in_pieces(kernel, kwargs, key, warmup, draws, until):
    """NUTS as ``MCMC`` runs it, a few iterations at a time: the draws there were time for, and gradients of all.

    :param until: when to stop, by the clock of ``time.perf_counter``.
    """
    state = kernel.init(key, warmup, None, (), kwargs)

    @jax.jit
    def piece(state):
        def iteration(state, _):
            state = kernel.sample(state, (), kwargs)
            return state, (state.z, state.num_steps)

        return lax.scan(iteration, state, length=PIECE)

    kept, used = [], []
    for _ in range((warmup + draws) // PIECE):
        if time.perf_counter() > until:
            break
        state, (z, num_steps) = jax.block_until_ready(piece(state))
        used.append(np.asarray(num_steps))
        if len(used) > warmup // PIECE:
            kept.append(jax.device_get(z))
    z = jax.tree.map(lambda *x: np.concatenate(x), *kept) if kept else None
    # Where there was no time for a first piece, nothing.
    return z, np.concatenate(used or [np.zeros((0,))])


def size_of(problem):
    """The number of unconstrained parameters."""
    info = initialize_model(random.key(0), problem.model, model_kwargs=problem.data, validate_grad=False)
    return sum(np.size(x) for x in info.param_info.z.values())


def nuts(name, limit):
    """On all rows: one chain of 300 + 300 where there are minibatches, else four vectorized ones of 500 + 500."""
    problem = real.load(name)
    parameters = size_of(problem)
    jax.clear_caches()
    chains, warmup, draws = (1, 300, 300) if problem.subsample_size else (4, 500, 500)
    began = time.perf_counter()
    kernel, key = NUTS(problem.model), random.key(0)
    key = random.split(key, chains) if chains > 1 else key
    z, used = in_pieces(kernel, problem.data, key, warmup, draws, began + limit)
    found = {}
    if z is not None:
        # Chains lie behind draws, and one has no axis.
        z = jax.tree.map(lambda x: x.reshape(-1, *x.shape[1 + (chains > 1) :]), z)
        sites = sites_of(problem, z, jax.jit(jax.vmap(kernel.postprocess_fn((), problem.data))))
        found = {s: np.moveaxis(x.reshape(-1, chains, *x.shape[1:]), 0, 1) for s, x in sites.items()}
    more = {}
    if len(used) < warmup + draws:
        more["unfinished"] = f"{len(used)} of {warmup} + {draws} iterations in {limit:.0f} s"
    seconds = time.perf_counter() - began
    return row(problem, found, parameters, seconds, used[warmup:].sum(), used.sum(), **more)


def sites_of(problem, flat, constrain):
    """Sites of unconstrained draws, as NumPy arrays."""
    return {site: np.asarray(x) for site, x in constrain(flat).items() if site in problem.quantities}


# --- A potential of all rows, in double precision ------------------------------------------------------------------


def potential_of(problem):
    """The potential of a flat position with its gradient, a start, and the sites of flat positions.

    The model, its data and all that is computed are in double precision.
    """
    numpyro.enable_x64()
    data = {k: x.astype(float) if jnp.issubdtype(x.dtype, jnp.floating) else x for k, x in problem.data.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        info = initialize_model(
            random.key(0), problem.model, init_strategy=init_to_median, model_kwargs=data, validate_grad=False
        )
    start, unravel = ravel_pytree(info.param_info.z)

    def potential(x):
        return info.potential_fn(unravel(x))

    def sites(x):
        """From ``(chain, draw, d)``."""
        constrain = jax.jit(jax.vmap(lambda x: info.postprocess_fn(unravel(x))))
        flat = sites_of(problem, x.reshape(-1, x.shape[-1]), constrain)
        return {site: values.reshape(*x.shape[:2], *values.shape[1:]) for site, values in flat.items()}

    return potential, np.asarray(start), sites


def nutpie(name, limit, low_rank):
    """Four chains with nutpie's settings: 1000 draws each, after 400 of tuning (800 with the metric of low rank)."""
    problem = real.load(name)
    began = time.perf_counter()
    potential, start, sites = potential_of(problem)
    value_and_grad = jax.jit(jax.value_and_grad(lambda x: -potential(x)))
    model = nutpie_model(value_and_grad, len(start), np.float64)
    jax.block_until_ready(value_and_grad(start))
    sampler = nutpie_sampler(model, 1, low_rank)
    more, finished = {}, True
    try:
        trace = sampler.wait(timeout=max(1.0, began + limit - time.perf_counter()))
    except TimeoutError:
        trace, finished = sampler.abort(), False
    tuning, steps = nutpie_steps(trace)
    z = trace["posterior"]["z"].values
    # Of a run that was stopped, chains that have about as many draws as the longest.
    lengths = np.isfinite(z).all(-1).sum(1)
    chains = np.full(len(z), True)
    if not finished:
        more["unfinished"] = f"{int(lengths.sum())} of {4 * 1000} draws in {limit:.0f} s"
        chains = lengths >= max(1, lengths.max() / 2)
    shortest = int(lengths[chains].min()) if chains.any() else 0
    z, gradients = z[chains, :shortest], steps[chains, :shortest].sum()
    found = sites(z) if z.size else {}
    seconds = time.perf_counter() - began
    in_all = gradients + tuning[chains if chains.any() else slice(None)].sum()
    return row(problem, found, len(start), seconds, gradients, in_all, **more)


def laplace(name, limit):
    """The mode by L-BFGS and Newton, and a Gaussian with the inverse Hessian there, pushed through the constraints."""
    problem = real.load(name)
    began = time.perf_counter()
    potential, start, sites = potential_of(problem)
    value_and_grad = jax.jit(jax.value_and_grad(potential))
    gradient = jax.grad(potential)
    evaluations = 0

    def function(x):
        nonlocal evaluations
        evaluations += 1
        value, slope = value_and_grad(x)
        return float(value), np.asarray(slope)

    @jax.jit
    def hessian(x):
        return lax.map(lambda v: jax.jvp(gradient, (x,), (v,))[1], jnp.eye(len(x)))

    mode = start
    # It stops where a likelihood is flat for being clipped; begun again, it goes on.
    for _ in range(5):
        ended = minimize(function, mode, jac=True, method="L-BFGS-B", options={"maxiter": 3000, "maxfun": 5000})
        mode = ended.x
        if np.abs(ended.jac).max() < 1e-3 or time.perf_counter() - began > limit / 2:
            break
    more, found = {}, {}
    for _ in range(20):
        value, slope = function(mode)
        curvature = np.asarray(hessian(mode))
        evaluations += len(start)
        curvature = (curvature + curvature.T) / 2
        low = np.linalg.eigvalsh(curvature)[0] if np.isfinite(curvature).all() else -np.inf
        if not low > 0:
            more["failed"] = f"the Hessian's least eigenvalue is {low:.2g} where L-BFGS ends"
            break
        step = np.linalg.solve(curvature, slope)
        if slope @ step < 1e-6:
            break
        length = 1.0
        while length > 1e-4 and not function(mode - length * step)[0] < value:
            length /= 2
        mode = mode - length * step
        if time.perf_counter() - began > limit:
            more["failed"] = f"no mode in {limit:.0f} s"
            break
    else:
        more["failed"] = "no mode in 20 steps of Newton"
    if "failed" not in more:
        root = np.linalg.cholesky(curvature)
        noise = np.random.default_rng(0).standard_normal((len(start), INDEPENDENT))
        draws = mode + np.linalg.solve(root.T, noise).T
        found = sites(draws[None])
    seconds = time.perf_counter() - began
    return row(problem, found, len(start), seconds, 0, evaluations, **more)


# --- Ours ----------------------------------------------------------------------------------------------------------


OURS = {"SGLD": SGLD, "SGHMC": SGHMC}


def gradients_used(name, kernel, iterations=1000):
    """Gradients of twenty particles in a run with as much warmup."""
    problem = real.load(name)
    minibatch = problem.subsample_size is not None
    share = BATCH / len(next(iter(problem.data.values()))) if minibatch else 1
    sampling = (2 if minibatch else 1) * NUM_STEPS * iterations
    warmup = warmup_gradients(OURS[kernel](problem.model), (), problem.kwargs, iterations, PARTICLES)
    return {"gradients": PARTICLES * share * sampling, "in_all": PARTICLES * share * (sampling + warmup)}


def ours(name, limit, kernel, iterations=1000):
    """Twenty particles, nothing set."""
    del limit  # A run cannot be stopped.
    problem = real.load(name)
    mcmc = vectorized(OURS[kernel](problem.model), iterations, iterations, PARTICLES)
    began = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mcmc.run(random.key(0), **problem.kwargs)
        draws = jax.block_until_ready(mcmc.get_samples(group_by_chain=True))
    seconds = time.perf_counter() - began
    parameters = sum(x[0].size for x in mcmc.last_state.z.values())
    used = gradients_used(name, kernel, iterations)
    return row(problem, draws, parameters, seconds, used["gradients"], used["in_all"])
