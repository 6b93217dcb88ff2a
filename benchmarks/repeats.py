"""Many runs of one kernel, compiled once: what standard errors over repeats ask for."""

from collections.abc import Callable
import statistics
import time
from typing import Any

import jax
from jax import random
import jax.numpy as jnp
import numpy as np

from numpyro.infer import MCMC


def repeats(make: Callable[[Any], Any], *, start: Callable | None = None, **settings: Any) -> Callable:
    """A program of whole runs through ``MCMC``.

    :param make: a kernel from a step size, which is traced, so that one program serves all steps.
    :param start: starting particles from a key; ``None`` leaves them to the kernel.
    :param settings: of ``MCMC``.
    :return: a function of a step size and of seeds. It returns the draws of the site ``z``,
        ``(seed, particle, draw, ...)``, and the median seconds of a run: with some seeds, those of a compiled one.
    """
    settings = {"chain_method": "vectorized", "progress_bar": False} | settings

    @jax.jit
    def one(step, seed):
        mcmc = MCMC(make(step), **settings)
        key = random.key(seed)
        mcmc.run(key, init_params=None if start is None else {"z": start(random.fold_in(key, 1))})
        return mcmc.get_samples(group_by_chain=True)["z"]

    def run(step, seeds):
        draws, seconds = [], []
        for seed in seeds:
            began = time.perf_counter()
            draws.append(np.asarray(one(jnp.float32(step), seed), float))
            seconds.append(time.perf_counter() - began)
        return np.stack(draws), statistics.median(seconds)

    return run


def mean_and_error(values: Any) -> tuple[float, float]:
    """The mean over repeats, and its standard error."""
    values = np.asarray(values, float)
    return float(values.mean()), float(values.std(ddof=1) / len(values) ** 0.5)
