"""Ways to fit the paper's network by minibatches of 100 rows: samplers, SVGD and an ensemble, of 20 points each.

All make 2000 updates, unless ``updates`` says how many.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
import time

import blackjax
import jax
from jax import lax, random
import jax.numpy as jnp
import numpy as np
import optax

from numpyro.contrib.einstein import SVGD as NumPyroSVGD, RBFKernel
from numpyro.optim import Adagrad, Adam

from benchmarks.harness.runs import vectorized
from benchmarks.problems.uci import in_units, score, split
from numpyro_repulsion import (
    RBF,
    SGHMC,
    SGHMCR,
    SGLD,
    SGLDR,
    SGNHT,
    SVGD,
    SVRG,
    Descent,
    Independent,
    Overdamped,
    Scheduled,
    Subsampled,
)
from numpyro_repulsion.gradients import ModelTarget, ravel_cloud
from numpyro_repulsion.interactions import median_bandwidth
from numpyro_repulsion.targets import bayesian_neural_network as network

PARTICLES, BATCH, UPDATES, NUM_STEPS = 20, 100, 2000, 10
#: Nothing set: how many iterations of 200 are warmup.
WARMUP = 160


@dataclass(frozen=True)
class MedianRBF(RBF):
    """The paper's rule for the bandwidth, followed while no draws are kept."""

    def learn_bandwidth(self, u):
        return median_bandwidth(u)


def start(key: jax.Array, inputs: int, hidden: int = 50) -> dict[str, jax.Array]:
    """Where all methods with a step set by hand begin: weights N(0, 1 / fan-in), no biases, precisions of 1."""
    keys = random.split(key)
    return {
        "w1": random.normal(keys[0], (PARTICLES, inputs, hidden)) * inputs**-0.5,
        "b1": jnp.zeros((PARTICLES, hidden)),
        "w2": random.normal(keys[1], (PARTICLES, hidden)) * hidden**-0.5,
        "b2": jnp.zeros(PARTICLES),
        # Unconstrained, so logarithms.
        "weight_precision": jnp.zeros(PARTICLES),
        "noise_precision": jnp.zeros(PARTICLES),
    }


def sampled(make: Callable, key, X, y, updates: int, warmup: float, init_params=None):
    """The draws of a kernel after its ``warmup``, a share of the updates; of a longer run no more are kept."""
    iterations = updates // NUM_STEPS
    num_warmup = round(warmup * iterations)
    thinning = max(1, updates // UPDATES)
    mcmc = vectorized(make(network), num_warmup, iterations - num_warmup, PARTICLES, thinning=thinning)
    mcmc.run(key, X, y, subsample_size=BATCH, init_params=init_params)
    return mcmc.get_samples(group_by_chain=True)


def by_hand(kernel, *, last: bool = False, **settings):
    """A kernel with a given step on plain minibatches; of an optimizer of the cloud the ``last`` one."""

    def fit(step, key, X, y, updates=UPDATES):
        start_key, key = random.split(key)
        make = partial(kernel, step_size=step, gradient=Subsampled(), num_steps=NUM_STEPS, **settings)
        draws = sampled(make, key, X, y, updates, 0.5, start(start_key, X.shape[1]))
        return jax.tree.map(lambda x: x[:, -1:], draws) if last else draws

    return fit


def nothing_set(kernel, *, last: bool = False, **settings):
    """A kernel with its defaults, its own start among them, but for the settings given."""

    def fit(step, key, X, y, updates=UPDATES):
        del step
        draws = sampled(partial(kernel, **settings), key, X, y, updates, WARMUP * NUM_STEPS / UPDATES)
        return jax.tree.map(lambda x: x[:, -1:], draws) if last else draws

    return fit


def adam_ensemble(step, key, X, y, updates, dropout=0.0):
    """Networks that Adam brings to modes of the posterior, each by minibatches of its own.

    :param dropout: the probability that a hidden unit is left out of an update.
    :return: their sites, each with a leading axis for the networks.
    """
    start_key, key = random.split(key)
    target = ModelTarget(network, (X, y), {"subsample_size": BATCH})
    z, unravel = ravel_cloud(start(start_key, X.shape[1]))
    optimizer = Adam(step)

    def update(state, key):
        point = optimizer.get_params(state)
        mask = jnp.ones_like(point)
        if dropout:
            mask_key, key = random.split(key)
            mask = ravel_cloud(masked(mask_key, jax.vmap(unravel)(mask), dropout))[0]
        _, gradient = Subsampled().energy_and_grad(key, target, unravel, (mask * point)[None])
        return optimizer.update(mask * gradient[0], state), None

    state, _ = lax.scan(update, optimizer.init(z), random.split(key, updates))
    return jax.vmap(lambda z: target.constrain(unravel(z)))(optimizer.get_params(state))


def masked(key, networks: dict, dropout: float) -> dict:
    """Networks without some of their hidden units, the others weighing more."""
    kept = random.bernoulli(key, 1.0 - dropout, networks["w2"].shape)
    return networks | {"w2": jnp.where(kept, networks["w2"] / (1.0 - dropout), 0.0)}


def map_ensemble(step, key, X, y, updates=UPDATES):
    return jax.tree.map(lambda x: x[:, None], adam_ensemble(step, key, X, y, updates))


def mc_dropout(step, key, X, y, updates=UPDATES, *, dropout, masks=20):
    """Networks fitted with dropout, and predictions with it (Gal and Ghahramani, 2016)."""
    networks = adam_ensemble(step, key, X, y, updates, dropout)
    found = [masked(random.fold_in(key, k), networks, dropout) for k in range(masks)]
    return jax.tree.map(lambda *x: jnp.stack(x, 1), *found)


def last_layer_laplace(step, key, X, y, updates=UPDATES, draws=20):
    """MAP networks, each with the exact Gaussian posterior of its last layer, given the other layer and precisions."""
    networks = adam_ensemble(step, key, X, y, updates)

    def around(key, one):
        units = jnp.maximum(X @ one["w1"] + one["b1"], 0.0)
        design = jnp.concatenate([units, jnp.ones((len(X), 1))], 1)
        size = design.shape[1]
        precision = one["noise_precision"] * design.T @ design + one["weight_precision"] * jnp.eye(size)
        root = jnp.linalg.cholesky(precision)
        mean = jax.scipy.linalg.cho_solve((root, True), one["noise_precision"] * design.T @ y)
        white = random.normal(key, (draws, size))
        last = mean + jax.scipy.linalg.solve_triangular(root, white.T, lower=True, trans=1).T
        rest = jax.tree.map(lambda x: jnp.broadcast_to(x, (draws, *x.shape)), one)
        return rest | {"w2": last[:, :-1], "b2": last[:, -1]}

    return jax.vmap(around)(random.split(random.fold_in(key, 1), PARTICLES), networks)


def blackjax_sghmc(step, key, X, y, updates=UPDATES):
    """BlackJAX's SGHMC, ten gradients of one minibatch in each step; the last half of the steps is kept."""
    start_key, key = random.split(key)
    target = ModelTarget(network, (X, y), {"subsample_size": BATCH})
    z, unravel = ravel_cloud(start(start_key, X.shape[1]))

    def gradient(point, key):
        # BlackJAX goes up the log-density.
        return -Subsampled().energy_and_grad(key, target, unravel, point[None, None])[1][0, 0]

    inner = blackjax.sghmc(gradient, num_integration_steps=NUM_STEPS)

    def iterate(z, key):
        move_key, batch_key = random.split(key)
        keys = random.split(move_key, PARTICLES), random.split(batch_key, PARTICLES)
        z = jax.vmap(lambda z, move, batch: inner.step(move, z, batch, step))(z, *keys)
        return z, z

    iterations = updates // NUM_STEPS
    _, draws = lax.scan(iterate, z, random.split(key, iterations))
    return jax.vmap(jax.vmap(lambda z: target.constrain(unravel(z))))(draws[iterations // 2 :].swapaxes(0, 1))


def numpyro_svgd(step, key, X, y, updates=UPDATES):
    """NumPyro's SVGD by Adagrad, from the common start."""
    start_key, key = random.split(key)
    svgd = NumPyroSVGD(network, Adagrad(step), RBFKernel(), num_stein_particles=PARTICLES)
    state = svgd.init(key, X, y, subsample_size=BATCH)
    points = {f"{name}_auto_loc": value for name, value in start(start_key, X.shape[1]).items()}
    state = state._replace(optim_state=svgd.optim.init(points))

    def update(state, _):
        return svgd.update(state, X, y, subsample_size=BATCH)[0], None

    state, _ = lax.scan(update, state, length=updates)
    return {name.removesuffix("_auto_loc"): value[:, None] for name, value in svgd.get_params(state).items()}


@dataclass(frozen=True)
class Method:
    """A fit ``(step, key, X, y, updates=2000) -> draws``, the steps it is tried with, and those of the short form."""

    fit: Callable
    steps: tuple[float, ...] = ()
    few: tuple[float, ...] = ()


#: Of SGLD's scale; a step of time goes as far as its square over two does there.
STEPS = (1e-7, 3e-7, 1e-6, 3e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3)
FEW = (1e-5, 3e-5, 1e-4)
TIMES = (3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
FEW_TIMES = (3e-4, 1e-3, 3e-3)
#: NumPyro's Adagrad, which averages its directions.
ADAGRAD = Descent(optax.chain(optax.scale_by_rss(0.0), optax.ema(0.9, debias=False)))
#: The same at a rate that a tournament chooses by a tenth of the rows.
RATE_CHOSEN = Descent(ADAGRAD.optimizer, validation=0.1)
RATES_OF_ADAM = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
RATES = (0.01, 0.03, 0.1, 0.3, 1.0)

METHODS = {
    "SGLD": Method(by_hand(SGLD, interaction=Independent(), dynamics=Overdamped(integrator="euler")), STEPS, FEW),
    "SGLD+R": Method(by_hand(SGLDR, interaction=MedianRBF()), STEPS, FEW),
    "SGLD+R, off for the last half": Method(
        by_hand(SGLDR, interaction=Scheduled(MedianRBF(), lambda count: jnp.where(count < UPDATES // 2, 1.0, 0.0))),
        STEPS,
        FEW,
    ),
    "SGHMC+R": Method(by_hand(SGHMCR, interaction=MedianRBF()), TIMES, FEW_TIMES),
    "SVGD": Method(by_hand(SVGD, interaction=MedianRBF(), last=True), STEPS, FEW),
    "SVGD, Adagrad": Method(by_hand(SVGD, interaction=MedianRBF(), dynamics=ADAGRAD, last=True), RATES, RATES),
    "20 networks, Adagrad": Method(by_hand(SVGD, interaction=Independent(), dynamics=ADAGRAD, last=True), RATES, RATES),
    "NumPyro's SVGD": Method(numpyro_svgd, RATES),
    "20 MAP networks": Method(map_ensemble, RATES_OF_ADAM, (3e-3, 1e-2, 3e-2)),
    "MC dropout of 1 %, 20 networks": Method(partial(mc_dropout, dropout=0.01), RATES_OF_ADAM),
    "MC dropout of 5 %, 20 networks": Method(partial(mc_dropout, dropout=0.05), RATES_OF_ADAM),
    "20 MAP networks, Laplace in the last layer": Method(last_layer_laplace, RATES_OF_ADAM),
    "BlackJAX's SGHMC": Method(blackjax_sghmc, (*TIMES, 1e-1)),
    "`SGLD(model)`": Method(nothing_set(SGLD)),
    "`SGLDR(model)`": Method(nothing_set(SGLDR)),
    "`SGHMC(model)`": Method(nothing_set(SGHMC)),
    "`SGHMCR(model)`": Method(nothing_set(SGHMCR)),
    "`SGNHT(model)`": Method(nothing_set(SGNHT)),
    "`SGNHT(model, gradient=SVRG())`": Method(nothing_set(SGNHT, gradient=SVRG())),
    "`SVGD(model)`, Adagrad": Method(nothing_set(SVGD, dynamics=RATE_CHOSEN, last=True)),
}


class Fits:
    """Fits of one set by all steps at once, compiled once for all splits."""

    def __init__(self, updates: int = UPDATES):
        self.updates, self.programs = updates, {}

    def __call__(self, label, steps, key, data):
        """Scores for each step, in the responses' units, and the seconds of compiling and of running."""
        arrays = [jnp.asarray(x, jnp.float32) for x in data[:4]]
        arguments = (jnp.asarray(steps, jnp.float32), key, *arrays)
        kind = (label, *(x.shape for x in arguments))
        began = time.perf_counter()
        if kind not in self.programs:
            fit = partial(METHODS[label].fit, updates=self.updates)
            self.programs[kind] = jax.jit(partial(_fit_and_score, fit)).lower(*arguments).compile()
        ready = time.perf_counter()
        scores = jax.block_until_ready(self.programs[kind](*arguments))
        return in_units(scores, data.unit), ready - began, time.perf_counter() - ready


def _fit_and_score(fit, steps, key, X, y, X_test, y_test):
    return jax.vmap(lambda step: score(fit(step, key, X, y), X_test, y_test))(steps)


def one(fits: Fits, name: str, number: int, label: str, short: bool) -> dict:
    """A row: a method on a split, its step chosen on the training rows."""
    method = METHODS[label]
    key, tuning_key = random.split(random.key(number))
    steps = method.few if short else method.steps
    row = {"data": name, "split": number, "method": label, "step": None, "compile_seconds": 0.0}
    if steps:
        found, compiling, row["tuning_seconds"] = fits(label, steps, tuning_key, split(name, number, validation=True))
        likelihoods = found["log_likelihood"]
        best = int(np.argmax(np.where(np.isfinite(likelihoods), likelihoods, -np.inf)))
        row |= {"step": steps[best], "at_edge": best in (0, len(steps) - 1), "compile_seconds": compiling}
        row |= {"steps": list(steps), "validation": [_finite(x) for x in likelihoods]}
    chosen = (steps[best],) if steps else (0.0,)
    scores, compiling, row["seconds"] = fits(label, chosen, key, split(name, number))
    row["compile_seconds"] += compiling
    row |= {measure: _finite(value[0]) for measure, value in scores.items()}
    step = "" if row["step"] is None else f", step {row['step']:g}{' at the edge' if row['at_edge'] else ''}"
    print(f"{name} {number} {label}: {row['log_likelihood']} {row['rmse']}{step}, {row['seconds']:.1f} s", flush=True)
    return row


def _finite(x):
    """A number for JSON, which has none for what diverged."""
    return float(x) if np.isfinite(x) else None
