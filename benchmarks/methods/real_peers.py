"""Samplers of others, and ours, on a posterior of real data: a whole run of each, from the model to scored draws.

Each function takes the problem's name and how many seconds it may run, and returns a row. A run that reaches its limit
stops, is scored by what it has, and says ``"unfinished"``. Gradients are counted as gradients of all rows for one
chain: of minibatches, rows looked at over rows. Those ``in_all`` include warmup, tuning and searches.

Kernels of NumPyro run in single precision, as they do unless asked; nutpie and Laplace in double precision, in which
nutpie keeps its positions and a mode can be found.
"""

from functools import partial
import os
import time
import warnings

import blackjax
import jax
from jax import lax, random
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
import numpy as np
import optax
from scipy.optimize import minimize

import numpyro
from numpyro import handlers
from numpyro.infer import HMCECS, NUTS, SVI, Trace_ELBO, init_to_median, init_to_value
from numpyro.infer.autoguide import AutoDelta
from numpyro.infer.util import initialize_model, potential_energy, unconstrain_fn
from numpyro.optim import optax_to_numpyro

from benchmarks.harness.runs import vectorized, warmup_gradients
from benchmarks.problems import real
from benchmarks.problems.real import BATCH
from benchmarks.problems.real_scores import errors, mixing, scalars
from benchmarks.problems.references import in_double
from numpyro_repulsion import SGHMC, SGLD, ensemble_ess

PARTICLES, NUM_STEPS = 20, 10
#: Iterations between two looks at the clock.
PIECE = 10
#: Fewer draws of a chain than these are not scored.
FEWEST = 40
#: Of the search for a point to expand about: steps of Adam, whose rate falls from the first to the second.
SEARCH, RATES = 3000, (0.05, 0.0005)
#: The first two steps that are tried, as powers of ten; others follow where the better one is, until one is worse.
GRID = (-6.0, -5.0)
UPDATES, THINNING = 20_000, 10
INDEPENDENT = 4000


def load(name):
    """The problem; ``NAME, all rows`` has no minibatches."""
    problem = real.load(name.removesuffix(", all rows"))
    if name.endswith(", all rows"):
        problem = real.Problem(**vars(problem) | {"subsample_size": None})
    return problem


def number_of_rows(problem):
    return next(iter(problem.data.values())).shape[0]


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


def in_pieces(kernel, kwargs, key, warmup, draws, until, steps):
    """A kernel as ``MCMC`` runs it, a few iterations at a time: the draws there were time for, and all of ``steps``.

    :param until: when to stop, by the clock of ``time.perf_counter``.
    :param steps: the number of gradients from a state.
    """
    state = kernel.init(key, warmup, None, (), kwargs)

    @jax.jit
    def piece(state):
        def iteration(state, _):
            state = kernel.sample(state, (), kwargs)
            return state, (state.z, steps(state), getattr(state, "accept_prob", 0.0))

        return lax.scan(iteration, state, length=PIECE)

    kept, used, accepted = [], [], []
    for _ in range((warmup + draws) // PIECE):
        if time.perf_counter() > until:
            break
        state, found = piece(state)
        z, num_steps, accept = jax.device_get(found)
        used.append(num_steps)
        accepted.append(accept)
        if len(used) > warmup // PIECE:
            kept.append(z)
    z = jax.tree.map(lambda *x: np.concatenate(x), *kept) if kept else None
    # Where there was no time for a first piece, nothing.
    nothing = [np.zeros((0,))]
    return z, np.concatenate(used or nothing), np.concatenate(accepted or nothing)


def constrained(kernel, kwargs, z):
    """Draws of the model's sites, from a tree of ``(..., draw)`` in front."""
    return jax.device_get(jax.jit(jax.vmap(kernel.postprocess_fn((), kwargs)))(z))


def numpyro_run(problem, kernel, kwargs, chains, warmup, draws, began, limit, steps):
    """Draws ``(chain, draw, ...)``, gradients of each iteration and chain, acceptance, and what is missing."""
    key = random.key(0)
    key = random.split(key, chains) if chains > 1 else key
    z, used, accepted = in_pieces(kernel, kwargs, key, warmup, draws, began + limit, steps)
    found = {}
    if z is not None:
        if chains > 1:
            flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), z)
            sites = constrained(kernel, kwargs, flat)
            found = {
                site: np.moveaxis(sites[site].reshape(-1, chains, *sites[site].shape[1:]), 0, 1)
                for site in problem.quantities
            }
        else:
            sites = constrained(kernel, kwargs, z)
            found = {site: sites[site][None] for site in problem.quantities}
    more = {}
    if len(used) < warmup + draws:
        more["unfinished"] = f"{len(used)} of {warmup} + {draws} iterations in {limit:.0f} s"
    return found, used, accepted, more


def size_of(problem):
    """The number of unconstrained parameters."""
    info = initialize_model(random.key(0), problem.model, model_kwargs=problem.data, validate_grad=False)
    return sum(np.size(x) for x in info.param_info.z.values())


def nuts(name, limit):
    """On all rows: one chain of 300 + 300 where there are minibatches, else four vectorized ones of 500 + 500."""
    problem = load(name)
    parameters = size_of(problem)
    jax.clear_caches()
    chains, warmup, draws = (1, 300, 300) if problem.subsample_size else (4, 500, 500)
    began = time.perf_counter()
    found, used, _, more = numpyro_run(
        problem, NUTS(problem.model), problem.data, chains, warmup, draws, began, limit, lambda state: state.num_steps
    )
    seconds = time.perf_counter() - began
    return row(problem, found, parameters, seconds, used[warmup:].sum(), used.sum(), **more)


def near_the_mode(problem):
    """A point to expand about: ``AutoDelta`` on minibatches, by Adam, and the gradients it took."""
    rate = optax.exponential_decay(RATES[0], SEARCH, RATES[1] / RATES[0])
    guide = AutoDelta(problem.model)
    svi = SVI(problem.model, guide, optax_to_numpyro(optax.adam(rate)), Trace_ELBO())
    found = svi.run(random.key(1), SEARCH, progress_bar=False, **problem.kwargs)
    return guide.median(found.params), SEARCH * BATCH / number_of_rows(problem)


def hmcecs(name, limit):
    """One chain of 1000 + 1000, from a point that Adam finds, with the Taylor proxy of second order about it."""
    problem = load(name)
    parameters = size_of(problem)
    jax.clear_caches()
    began = time.perf_counter()
    centre, searched = near_the_mode(problem)
    inner = NUTS(problem.model, init_strategy=init_to_value(values=centre))
    kernel = HMCECS(inner, num_blocks=10, proxy=HMCECS.taylor_proxy(centre))
    warmup = draws = 1000
    found, used, accepted, more = numpyro_run(
        problem, kernel, problem.kwargs, 1, warmup, draws, began, limit, lambda state: state.hmc_state.num_steps
    )
    seconds = time.perf_counter() - began
    # A refreshed gradient in each iteration; the Hessian over all rows is as many gradients as there are parameters.
    each = (used + 1) * BATCH / number_of_rows(problem)
    in_all = each.sum() + searched + parameters
    if len(accepted) > warmup:
        more["accepted"] = float(accepted[warmup:].mean())
    return row(problem, found, parameters, seconds, each[warmup:].sum(), in_all, **more)


# --- BlackJAX ------------------------------------------------------------------------------------------------------


def sites_of(problem, flat, constrain):
    """Sites of unconstrained draws, as NumPy arrays."""
    return {site: np.asarray(x) for site, x in constrain(flat).items() if site in problem.quantities}


def sgld_control_variates(name, limit):
    """Twenty chains of 20,000 updates from a point that Adam finds; the best step of a grid, by the reference.

    The limit is three times as long, for there are many runs.
    """
    problem = load(name)
    jax.clear_caches()
    rows = number_of_rows(problem)
    began = time.perf_counter()
    centre, searched = near_the_mode(problem)
    centre = unconstrain_fn(problem.model, (), problem.data, centre)

    def log_density(z, indices):
        model = handlers.substitute(problem.model, data={"rows": indices})
        return -potential_energy(model, (), problem.data | {"subsample_size": indices.shape[0]}, z)

    estimate = blackjax.sgmcmc.gradients.control_variates(jax.grad(log_density), centre, jnp.arange(rows))
    kernel = blackjax.sgld(estimate)

    def update(step_size, z, key):
        rows_key, key = random.split(key)
        indices = random.randint(rows_key, (PARTICLES, BATCH), 0, rows)
        keys = random.split(key, PARTICLES)
        return jax.vmap(lambda key, z, i: kernel.step(key, z, i, step_size))(keys, z, indices), None

    def draw(step_size, z, key):
        z, _ = lax.scan(partial(update, step_size), z, random.split(key, THINNING))
        return z, z

    def run(step_size, key):
        starts = jax.tree.map(lambda x: jnp.broadcast_to(x, (PARTICLES, *jnp.shape(x))), centre)
        return lax.scan(partial(draw, step_size), starts, random.split(key, UPDATES // THINNING))[1]

    key = random.key(0)
    program = jax.jit(run).lower(jnp.float32(1e-6), key).compile()
    prepared = time.perf_counter() - began
    kept = UPDATES // THINNING * 2 // 3
    info = initialize_model(random.key(0), problem.model, model_kwargs=problem.data, validate_grad=False)
    constrain = jax.jit(jax.vmap(info.postprocess_fn))
    tried = {}

    def attempt(power):
        start = time.perf_counter()
        z = jax.block_until_ready(program(jnp.float32(10**power), key))
        flat = jax.tree.map(lambda x: jnp.moveaxis(x[-kept:], 1, 0).reshape(-1, *x.shape[2:]), z)
        finite = all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(flat))
        found, error = {}, float("inf")
        if finite:
            sites = sites_of(problem, flat, constrain)
            found = {site: sites[site].reshape(PARTICLES, kept, *sites[site].shape[1:]) for site in problem.quantities}
            gaps = errors(problem.name, scalars(found, problem.quantities))
            error = max(gaps[kind][0] for kind in ("mean", "few mean") if kind in gaps)
        tried[power] = (error, time.perf_counter() - start, found)
        print(f"{name}: step 10^{power}, worst mean {error:.3g}, {tried[power][1]:.0f} s", flush=True)
        for other in tried:
            if other != best():
                tried[other] = (*tried[other][:2], {})

    def best():
        return min(tried, key=lambda power: tried[power][0])

    more = {}
    for power in GRID:
        attempt(power)
    while best() in (min(tried), max(tried)) and "unfinished" not in more:
        attempt(best() - 1 if best() == min(tried) else best() + 1)
        if time.perf_counter() - began > 3 * limit:
            more["unfinished"] = f"steps from 10^{min(tried):.0f} to 10^{max(tried):.0f} in {3 * limit:.0f} s"
    for power in (best() - 0.5, best() + 0.5):
        if "unfinished" not in more:
            attempt(power)
    error, spent, found = tried[best()]
    more |= {"step": 10 ** best(), "searched_seconds": time.perf_counter() - began}
    if not np.isfinite(error):
        found, more["failed"] = {}, "no step of the grid leaves finite draws"
    gradients = 2 * PARTICLES * BATCH / rows * UPDATES
    parameters = sum(np.size(x) for x in centre.values())
    in_all = gradients + searched + 1
    return row(problem, found, parameters, prepared + spent, gradients * 2 / 3, in_all, **more)


# --- A potential of all rows, in double precision ------------------------------------------------------------------


def potential_of(problem):
    """The potential of a flat position with its gradient, a start, and the sites of flat positions.

    The model, its data and all that is computed are in double precision.
    """
    numpyro.enable_x64()
    data = in_double(problem.data)
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
    import nutpie as library

    problem = load(name)
    began = time.perf_counter()
    potential, start, sites = potential_of(problem)
    value_and_grad = jax.jit(jax.value_and_grad(lambda x: -potential(x)))

    def make_logp():
        def logp(x):
            value, gradient = value_and_grad(x)
            return float(value), np.asarray(gradient, np.float64, order="C")

        return logp

    model = library.compiled_pyfunc.from_pyfunc(
        len(start),
        make_logp,
        lambda seed1, seed2, chain: lambda x: {"z": np.asarray(x, np.float64)},
        [np.dtype("float64")],
        [(len(start),)],
        ["z"],
    )
    jax.block_until_ready(value_and_grad(start))
    sampler = library.sample(
        model,
        chains=4,
        cores=min(4, len(os.sched_getaffinity(0))),
        seed=1,
        progress_bar=False,
        low_rank_modified_mass_matrix=low_rank,
        blocking=False,
    )
    more, finished = {}, True
    try:
        trace = sampler.wait(timeout=max(1.0, began + limit - time.perf_counter()))
    except TimeoutError:
        trace, finished = sampler.abort(), False
    steps = {group: np.nan_to_num(trace[group]["n_steps"].values) for group in ("warmup_sample_stats", "sample_stats")}
    z = trace["posterior"]["z"].values
    # Of a run that was stopped, chains that have about as many draws as the longest.
    lengths = np.isfinite(z).all(-1).sum(1)
    chains = np.full(len(z), True)
    if not finished:
        more["unfinished"] = f"{int(lengths.sum())} of {4 * 1000} draws in {limit:.0f} s"
        chains = lengths >= max(1, lengths.max() / 2)
    shortest = int(lengths[chains].min()) if chains.any() else 0
    z, gradients = z[chains, :shortest], steps["sample_stats"][chains, :shortest].sum()
    tuning = steps["warmup_sample_stats"][chains if chains.any() else slice(None)].sum()
    found = sites(z) if z.size else {}
    seconds = time.perf_counter() - began
    return row(problem, found, len(start), seconds, gradients, gradients + tuning, **more)


def laplace(name, limit):
    """The mode by L-BFGS and Newton, and a Gaussian with the inverse Hessian there, pushed through the constraints."""
    problem = load(name)
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
    problem = load(name)
    minibatch = problem.subsample_size is not None
    share = BATCH / number_of_rows(problem) if minibatch else 1
    sampling = (2 if minibatch else 1) * NUM_STEPS * iterations
    warmup = warmup_gradients(OURS[kernel](problem.model), (), problem.kwargs, iterations, PARTICLES)
    return {"gradients": PARTICLES * share * sampling, "in_all": PARTICLES * share * (sampling + warmup)}


def ours(name, limit, kernel, iterations=1000):
    """Twenty particles, nothing set."""
    del limit  # A run cannot be stopped.
    problem = load(name)
    mcmc = vectorized(OURS[kernel](problem.model), iterations, iterations, PARTICLES)
    began = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mcmc.run(random.key(0), **problem.kwargs)
        draws = jax.block_until_ready(mcmc.get_samples(group_by_chain=True))
    seconds = time.perf_counter() - began
    found = scalars(draws, problem.quantities)
    parameters = sum(x[0].size for x in mcmc.last_state.z.values())
    more = {}
    for what, method in (("ensemble", "mean"), ("ensemble_square", "sd")):
        worth = {site: ensemble_ess(np.moveaxis(xs, 0, -1), method=method) for site, xs in found.items()}
        flat = [(float(x), f"{site}[{i}]") for site, xs in worth.items() for i, x in enumerate(xs)]
        known = [pair for pair in flat if np.isfinite(pair[0])]
        more |= {what: min(known) if known else None, f"{what}_unknown": len(flat) - len(known)}
    used = gradients_used(name, kernel, iterations)
    return row(problem, draws, parameters, seconds, used["gradients"], used["in_all"], **more)
