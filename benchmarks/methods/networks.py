"""Ways to fit the paper's network by 2000 updates with minibatches of 100 rows: samplers, SVGD and an ensemble, of 20
points each; the regression sets of its Tables 3 and 4 with their splits; and how predictions are scored.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
import time
from typing import NamedTuple

import jax
from jax import lax, random
import jax.numpy as jnp
from jax.scipy.special import logsumexp
from jax.scipy.stats import norm
import numpy as np
import optax

from numpyro.contrib.einstein import SVGD as NumPyroSVGD, RBFKernel
from numpyro.optim import Adagrad, Adam

from benchmarks.harness.runs import Runs, warmup_gradients
from benchmarks.problems.posteriordb import stored
from benchmarks.problems.targets import bayesian_neural_network as network, relu_network
from numpyro_repulsion import RBF, SGHMC, SGHMCR, SGLD, SGLDR, SGNHT, SVGD, SVRG, Independent, Subsampled
from numpyro_repulsion.dynamics import Descent, Overdamped
from numpyro_repulsion.gradients import ModelTarget, ravel_cloud
from numpyro_repulsion.interactions import median_bandwidth

PARTICLES, BATCH, UPDATES, NUM_STEPS = 20, 100, 2000, 10
#: Nothing set: how many iterations of 200 are warmup.
WARMUP = 160
MINIBATCHED = partial(network, subsample_size=BATCH)


class Method(NamedTuple):
    """A fit ``(step, key, X, y) -> draws``, and the steps it is tried with."""

    fit: Callable
    steps: tuple[float, ...] = ()
    adapts: bool = False  # whether its warmup learns something, outside of compiled programs


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


def by_hand(kernel, steps, *, last: bool = False, **settings):
    """A kernel with a given step on plain minibatches; of an optimizer of the cloud the ``last`` one."""
    adapts, half = isinstance(settings.get("interaction"), MedianRBF), UPDATES // NUM_STEPS // 2

    def made(step):
        settings_of_all = {"gradient": Subsampled(), "num_steps": NUM_STEPS}
        return Runs(kernel(MINIBATCHED, step_size=step, **settings_of_all, **settings), half, half, PARTICLES)

    runs = cache(made) if adapts else made

    def fit(step, key, X, y):
        start_key, key = random.split(key)
        draws = runs(step)(key, X, y, init_params=start(start_key, X.shape[1]))
        return jax.tree.map(lambda x: x[:, -1:], draws) if last else draws

    return Method(fit, steps, adapts)


def nothing_set(kernel, **settings):
    """A kernel with its own start and its defaults, but for the settings given."""
    runs = Runs(kernel(MINIBATCHED, **settings), WARMUP, UPDATES // NUM_STEPS - WARMUP, PARTICLES)
    return Method(lambda step, key, X, y: runs(key, X, y), adapts=True)


def adam_ensemble(step, key, X, y):
    """Networks that Adam brings to modes of the posterior by minibatches of their own: sites with an axis in front."""
    start_key, key = random.split(key)
    target = ModelTarget(network, (X, y), {"subsample_size": BATCH})
    z, unravel = ravel_cloud(start(start_key, X.shape[1]))
    optimizer = Adam(step)

    def update(state, key):
        _, gradient = Subsampled().energy_and_grad(key, target, unravel, optimizer.get_params(state)[None])
        return optimizer.update(gradient[0], state), None

    state, _ = lax.scan(update, optimizer.init(z), random.split(key, UPDATES))
    return jax.vmap(lambda z: target.constrain(unravel(z)))(optimizer.get_params(state))


def last_layer_laplace(step, key, X, y, draws=20):
    """MAP networks, each with the exact Gaussian posterior of its last layer, given the other layer and precisions."""
    networks = adam_ensemble(step, key, X, y)

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


def numpyro_svgd(step, key, X, y):
    """NumPyro's SVGD by Adagrad, from the common start."""
    start_key, key = random.split(key)
    svgd = NumPyroSVGD(network, Adagrad(step), RBFKernel(), num_stein_particles=PARTICLES)
    state = svgd.init(key, X, y, subsample_size=BATCH)
    points = {f"{name}_auto_loc": value for name, value in start(start_key, X.shape[1]).items()}
    state = state._replace(optim_state=svgd.optim.init(points))

    def update(state, _):
        return svgd.update(state, X, y, subsample_size=BATCH)[0], None

    state, _ = lax.scan(update, state, length=UPDATES)
    return {name.removesuffix("_auto_loc"): value[:, None] for name, value in svgd.get_params(state).items()}


#: Of SGLD's scale; a step of time goes as far as its square over two does there.
STEPS = (1e-7, 3e-7, 1e-6, 3e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3)
TIMES = (3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
#: NumPyro's Adagrad, which averages its directions.
ADAGRAD = Descent(optax.chain(optax.scale_by_rss(0.0), optax.ema(0.9, debias=False)))
RATES_OF_ADAM = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
RATES = (0.01, 0.03, 0.1, 0.3, 1.0)

METHODS = {
    "SGLD": by_hand(SGLD, STEPS, interaction=Independent(), dynamics=Overdamped(integrator="euler")),
    "SGLD+R": by_hand(SGLDR, STEPS, interaction=MedianRBF()),
    "SGHMC+R": by_hand(SGHMCR, TIMES, interaction=MedianRBF()),
    "SVGD": by_hand(SVGD, STEPS, interaction=MedianRBF(), last=True),
    "SVGD, Adagrad": by_hand(SVGD, RATES, interaction=MedianRBF(), dynamics=ADAGRAD, last=True),
    "20 networks, Adagrad": by_hand(SVGD, RATES, interaction=Independent(), dynamics=ADAGRAD, last=True),
    "NumPyro's SVGD": Method(numpyro_svgd, RATES),
    "20 MAP networks": Method(lambda *args: jax.tree.map(lambda x: x[:, None], adam_ensemble(*args)), RATES_OF_ADAM),
    "20 MAP networks, Laplace in the last layer": Method(last_layer_laplace, RATES_OF_ADAM),
    **{f"`{kernel.__name__}(model)`": nothing_set(kernel) for kernel in (SGLD, SGLDR, SGHMC, SGHMCR, SGNHT)},
    "`SGNHT(model, gradient=SVRG())`": nothing_set(SGNHT, gradient=SVRG()),
}


#: The kernels whose gradients are counted, and how many an update takes after warmup. The first was chosen by the
#: log-likelihood on validation rows of splits 10 to 14 of yacht and Boston, before any test row was scored; in the
#: second each particle has references of its own.
COUNTED = {"`SGNHT(model)`": (SGNHT(network), 1)}
COUNTED |= {"`SGNHT(model, gradient=SVRG())`": (SGNHT(network, gradient=SVRG()), 2)}


def gradients(name: str, label: str) -> dict:
    """A row: how many gradients a kernel with nothing set takes for each point, on a set's first split."""
    data = split(name, 0)
    X, y = (jnp.asarray(x, jnp.float32) for x in (data.X, data.y))
    kernel, afterwards = COUNTED[label]
    in_warmup = warmup_gradients(kernel, (X, y), {"subsample_size": BATCH}, WARMUP, PARTICLES)
    left = (UPDATES - NUM_STEPS * WARMUP) * afterwards
    return {"data": name, "split": 0, "counted": label, "gradients": in_warmup + left}


class Fits:
    """Fits of one set by all steps, compiled once for all splits; at once, unless warmup learns something."""

    def __init__(self):
        self.programs, self.score = {}, jax.jit(score)

    def __call__(self, label, steps, key, data):
        """Scores for each step, in the responses' units, and the seconds of compiling and of running."""
        arrays = [jnp.asarray(x, jnp.float32) for x in data[:4]]
        arguments = (jnp.asarray(steps, jnp.float32), key, *arrays)
        kind = (label, *(x.shape for x in arguments))
        began, is_new, adapts = time.perf_counter(), kind not in self.programs, METHODS[label].adapts
        if is_new:

            def one(step, key, X, y, X_test, y_test):
                return self.score(METHODS[label].fit(step, key, X, y), X_test, y_test)

            def one_by_one(steps, *rest):
                found = [one(float(step), *rest) for step in steps]
                return jax.tree.map(lambda *x: jnp.stack(x), *found)

            if adapts:
                self.programs[kind] = one_by_one
                jax.block_until_ready(one_by_one(*arguments))
            else:
                self.programs[kind] = jax.jit(jax.vmap(one, (0, *(None,) * 5))).lower(*arguments).compile()
        ready = time.perf_counter()
        scores = jax.block_until_ready(self.programs[kind](*arguments))
        running = time.perf_counter() - ready
        scores = {name: np.asarray(value, float) for name, value in scores.items()}
        scores["log_likelihood"] -= np.log(data.unit)
        scores["rmse"] *= data.unit
        # What adapts something compiles as it first runs.
        return scores, ready - began - (running if is_new and adapts else 0.0), running


def one(fits: Fits, name: str, number: int, label: str) -> dict:
    """A row: a method on a split, its step chosen on the training rows."""
    steps = METHODS[label].steps
    key, tuning_key = random.split(random.key(number))
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
    return row


def _finite(x):
    """A number for JSON, which has none for what diverged."""
    return float(x) if np.isfinite(x) else None


#: Short names.
SHOWN = {"yacht": "yacht", "bostonHousing": "Boston", "wine-quality-red": "wine", "kin8nm": "kin8nm"}
SHOWN |= {"naval-propulsion-plant": "naval", "protein-tertiary-structure": "protein"}
#: How many splits each set has.
UCI = {name: 5 if SHOWN[name] == "protein" else 20 for name in SHOWN}


class Split(NamedTuple):
    """Rows to fit and rows to score, standardized by the former, and the responses' standard deviation there."""

    X: np.ndarray
    y: np.ndarray
    X_test: np.ndarray
    y_test: np.ndarray
    unit: float


def split(name: str, number: int, validation: bool = False) -> Split:
    """One split; for validation its training rows alone, in an order by the split's number, the last fifth scored."""
    archive = stored("uci", name)
    X, y, test = archive["X"].astype(float), archive["y"].astype(float), archive[f"test_{number}"]
    train = np.setdiff1d(np.arange(len(X)), test)
    if validation:
        # The sets lie sorted in part, and the last rows of such a one would be another law.
        train = np.random.default_rng(number).permutation(train)
        train, test = np.split(train, [len(train) * 4 // 5])
    spread = X[train].std(0)
    X = (X - X[train].mean(0)) / np.where(spread > 0, spread, 1.0)
    unit = y[train].std()
    y = (y - y[train].mean()) / unit
    return Split(X[train], y[train], X[test], y[test], float(unit))


def score(draws: dict[str, jax.Array], X: jax.Array, y: jax.Array) -> dict[str, jax.Array]:
    """Log-likelihood and RMSE of the mixture over draws, and the share of responses in its central intervals.

    :param draws: of the network's sites, with two leading axes.
    """

    def add(total, some):
        fit = relu_network(some, X)
        scale = jnp.sqrt(some["noise_precision"])[:, None]
        z = scale * (y - fit)
        density = logsumexp(norm.logpdf(z) + jnp.log(scale), 0)
        return (jnp.logaddexp(total[0], density), total[1] + norm.cdf(z).mean(0), total[2] + fit.mean(0)), None

    zero = jnp.zeros_like(y)
    groups, size = draws["noise_precision"].shape
    (density, below, fit), _ = lax.scan(add, (zero - jnp.inf, zero, zero), draws)
    off_center = jnp.abs(below / groups - 0.5)
    covered = {f"coverage_{share}": jnp.mean(off_center <= share / 200) for share in (50, 90)}
    return {
        "log_likelihood": jnp.mean(density) - jnp.log(groups * size),
        "rmse": jnp.sqrt(jnp.mean((fit / groups - y) ** 2)),
    } | covered
