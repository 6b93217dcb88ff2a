"""Samplers of others, and ours, on a posterior of real data: a whole run of each, from the model to scored draws.

Each function takes the problem's name and how many seconds it may run, and returns a row. A run that reaches its limit
stops, is scored by what it has, and says ``"unfinished"``. Gradients are counted as gradients of all rows for one
chain: of minibatches, rows looked at over rows. Those ``in_all`` include warmup, tuning and searches.

Kernels of NumPyro run in single precision, as they do unless asked; nutpie and Laplace in double precision, in which
nutpie keeps its positions and a mode can be found.
"""

import time

import jax
from jax import lax, random
import jax.numpy as jnp
import numpy as np
from scipy.optimize import minimize

import numpyro
from numpyro.infer import NUTS, init_to_median

from benchmarks.harness.runs import vectorized, warmup_gradients
from benchmarks.methods.current_peers import Flat, nutpie_model, nutpie_sampler, nutpie_steps
from benchmarks.problems import real
from benchmarks.problems.real import BATCH, errors, mixing, scalars
from numpyro_repulsion import SGHMC, SGLD, diagnose

PARTICLES, NUM_STEPS = 20, 10
#: Iterations between two looks at the clock, and how many draws of a chain are scored at least.
PIECE, FEWEST = 10, 40
INDEPENDENT = 4000


def row(problem, began, draws, parameters, gradients, in_all, **more):
    """The scores of draws ``(chain, draw, ...)``, if there are enough."""
    seconds = time.perf_counter() - began
    found = scalars(draws, problem.quantities) if draws else {}
    _, chains, number = next(iter(found.values())).shape if found else (0, 0, 0)
    scores = errors(problem.name, found) | mixing(problem.name, found) if number >= FEWEST else {}
    counts = {"gradients": float(gradients), "in_all": float(in_all), "draws": [int(chains), int(number)]}
    return {"parameters": int(parameters), "seconds": seconds} | counts | scores | more


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


def nuts(name, limit):
    """On all rows: one chain of 300 + 300 where there are minibatches, else four vectorized ones of 500 + 500."""
    problem = real.PROBLEMS[name]()
    parameters = Flat(problem.model, kwargs=problem.data).dimension
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
        sites = jax.jit(jax.vmap(kernel.postprocess_fn((), problem.data)))(z)
        found = {s: np.moveaxis(by_chain(sites[s], -1, chains), 0, 1) for s in problem.quantities}
    short = len(used) < warmup + draws
    more = {"unfinished": f"{len(used)} of {warmup} + {draws} iterations in {limit:.0f} s"} if short else {}
    return row(problem, began, found, parameters, used[warmup:].sum(), used.sum(), **more)


def by_chain(x, *shape):
    return np.asarray(x).reshape(*shape, *x.shape[1:])


def in_double(problem):
    """The log density of flat positions; the model, its data and all that is computed are in double precision."""
    numpyro.enable_x64()
    data = {k: x.astype(float) if jnp.issubdtype(x.dtype, jnp.floating) else x for k, x in problem.data.items()}
    return Flat(problem.model, kwargs=data, init_strategy=init_to_median)


def sites(problem, flat, x):
    """Of flat positions ``(chain, draw, d)``."""
    found = flat.sites(jnp.asarray(x.reshape(-1, x.shape[-1])))
    return {site: by_chain(found[site], *x.shape[:2]) for site in problem.quantities}


def nutpie(name, limit, low_rank):
    """Four chains with nutpie's settings: 1000 draws each, after 400 of tuning (800 with the metric of low rank)."""
    problem = real.PROBLEMS[name]()
    began = time.perf_counter()
    flat = in_double(problem)
    value_and_grad = jax.jit(jax.value_and_grad(flat.log_density))
    model = nutpie_model(value_and_grad, flat.dimension, np.float64)
    jax.block_until_ready(value_and_grad(flat.start))
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
    in_all = gradients + tuning[chains if chains.any() else slice(None)].sum()
    return row(problem, began, sites(problem, flat, z) if z.size else {}, flat.dimension, gradients, in_all, **more)


def laplace(name, limit):
    """The mode by L-BFGS and Newton, and a Gaussian with the inverse Hessian there, pushed through the constraints."""
    problem = real.PROBLEMS[name]()
    began = time.perf_counter()
    flat = in_double(problem)
    mode, dimension, evaluations = np.asarray(flat.start), flat.dimension, 0
    gradient = jax.grad(lambda x: -flat.log_density(x))
    value_and_grad = jax.jit(jax.value_and_grad(lambda x: -flat.log_density(x)))

    def function(x):
        nonlocal evaluations
        evaluations += 1
        value, slope = value_and_grad(x)
        return float(value), np.asarray(slope)

    @jax.jit
    def hessian(x):
        return lax.map(lambda v: jax.jvp(gradient, (x,), (v,))[1], jnp.eye(dimension))

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
        evaluations += dimension
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
        noise = np.random.default_rng(0).standard_normal((dimension, INDEPENDENT))
        draws = mode + np.linalg.solve(np.linalg.cholesky(curvature).T, noise).T
        found = sites(problem, flat, draws[None])
    return row(problem, began, found, dimension, 0, evaluations, **more)


OURS = {"SGLD": SGLD, "SGHMC": SGHMC}


def gradients_used(name, kernel, iterations=1000):
    """Gradients of twenty particles in a run with as much warmup."""
    problem = real.PROBLEMS[name]()
    minibatch = problem.subsample_size is not None
    share = BATCH / len(next(iter(problem.data.values()))) if minibatch else 1
    sampling = (2 if minibatch else 1) * NUM_STEPS * iterations
    warmup = warmup_gradients(OURS[kernel](problem.model), (), problem.kwargs, iterations, PARTICLES)
    return {"gradients": PARTICLES * share * sampling, "in_all": PARTICLES * share * (sampling + warmup)}


def ours(name, kernel, seed=0, iterations=1000):
    """Twenty particles, nothing set, and what ``diagnose`` says."""
    problem = real.PROBLEMS[name]()
    jax.clear_caches()
    mcmc = vectorized(OURS[kernel](problem.model), iterations, iterations, PARTICLES)
    began = time.process_time()
    mcmc.run(random.key(seed), **problem.kwargs)
    draws = jax.block_until_ready(mcmc.get_samples(group_by_chain=True))
    seconds = time.process_time() - began
    findings = [finding.name for finding in diagnose(mcmc) if finding.severity != "note"]
    parameters = int(sum(x[0].size for x in mcmc.last_state.z.values()))
    row = {"problem": name, "kernel": kernel, "seed": seed, "parameters": parameters, "seconds": seconds}
    row["findings"] = findings
    found = scalars(draws, problem.quantities)
    step = float(mcmc.last_state.learned.step_size)
    return row | {"draws": [PARTICLES, iterations], "step": step} | errors(name, found) | mixing(name, found)


def counted(name, limit, kernel, iterations):
    """Such a run with its gradients; it cannot be stopped at the limit."""
    return ours(name, kernel, iterations=iterations) | gradients_used(name, kernel, iterations)
