"""Ways to fit the network of the digits: kernels with default settings, and optimized ensembles with a rate."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
import time
import warnings

import jax
from jax import random
import numpy as np
import optax

from numpyro.infer import MCMC

from benchmarks.harness.runs import vectorized
from benchmarks.problems.digits import Split, logits, network
from numpyro_repulsion import SGHMC, SGLD, SGLDR, SGNHT, SGNHTR, SVGD, Descent, Independent, Subsampled, predict

PARTICLES, BATCH, NUM_STEPS = 20, 100, 10


@dataclass(frozen=True)
class Method:
    """A kernel from a rate, the rates that it is tried with, and whether each network is scored alone."""

    make: Callable
    rates: tuple[float, ...] = ()
    alone: bool = False


def default(kernel: Callable) -> Method:
    """A kernel with its defaults."""
    return Method(lambda rate: kernel(network))


#: An optimizer takes plain minibatches: control variates are made for samplers.
_optimized = partial(SVGD, network, gradient=Subsampled(), num_steps=NUM_STEPS)


def adam(rate: float) -> SVGD:
    """MAP networks, each optimized alone."""
    return _optimized(interaction=Independent(), dynamics=Descent(optax.scale_by_adam()), step_size=rate)


def adagrad(rate: float) -> SVGD:
    """SVGD in the steps of NumPyro's Adagrad, which averages directions."""
    optimizer = optax.chain(optax.scale_by_rss(0.0), optax.ema(0.9, debias=False))
    return _optimized(dynamics=Descent(optimizer), step_size=rate)


RATES = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
METHODS = {
    "`SGLD(model)`": default(SGLD),
    "`SGLDR(model)`": default(SGLDR),
    "`SGHMC(model)`": default(SGHMC),
    "`SGNHT(model)`": default(SGNHT),
    "`SGNHTR(model)`": default(SGNHTR),
    "20 MAP networks": Method(adam, RATES),
    "one MAP network": Method(adam, RATES, alone=True),
    "SVGD, Adagrad": Method(adagrad, (0.01, 0.03, 0.1, 0.3, 1.0)),
}


def fitted(kernel, data: Split, seed: int, length: tuple[int, int]) -> tuple[MCMC, float]:
    """A run, and the core-seconds that it took, compilation included."""
    began = time.process_time()
    mcmc = vectorized(kernel, *length, PARTICLES, progress_bar=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mcmc.run(random.key(seed), data.X, data.y, subsample_size=BATCH)
    jax.block_until_ready(mcmc.last_state)
    return mcmc, time.process_time() - began


def probabilities(mcmc: MCMC, images: jax.Array, alone: bool = False) -> np.ndarray:
    """Probabilities of the classes under the mixture of all draws ``(1, rows, 9)``, or of each last network alone."""
    if not alone:
        return predict(mcmc, images, num_draws=2000).probabilities[None]
    networks = jax.tree.map(lambda x: x[:, -1], mcmc.get_samples(group_by_chain=True))
    return np.asarray(jax.nn.softmax(jax.vmap(lambda weights: logits(weights, images))(networks)))
