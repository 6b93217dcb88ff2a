"""Timing: programs compiled first, then run in turns, so that what slows the machine down slows them all."""

from collections.abc import Callable, Mapping
import time
from typing import Any

import jax
from jax import random
import numpy as np


def through_mcmc(kernel: Any, num_updates: int, num_chains: int, **kwargs: Any) -> Callable:
    """``MCMC.run`` without warmup, one compiled program ``(key, *args) -> samples``: the updates, not the compiler."""
    # Here, for some programs are timed in an environment without it.
    from numpyro.infer import MCMC

    @jax.jit
    def run(key, *args):
        mcmc = MCMC(
            kernel,
            num_warmup=0,
            num_samples=num_updates // kernel.num_steps,
            num_chains=num_chains,
            chain_method="vectorized",
            progress_bar=False,
        )
        mcmc.run(key, *args, **kwargs)
        return mcmc.get_samples()

    return run


def in_turns(programs: Mapping[str, Callable], args: tuple, rounds: int) -> dict[str, list[float]]:
    """Seconds of each call, ``rounds`` of them for each program, each with a key of its round's."""
    for run in programs.values():
        jax.block_until_ready(run(random.key(0), *args))
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for round_ in range(rounds):
        for name, run in programs.items():
            began = time.perf_counter()
            jax.block_until_ready(run(random.key(round_), *args))
            seconds[name].append(time.perf_counter() - began)
    return seconds


def middle(values: Any) -> tuple[float, float]:
    """A median and its standard error, which is that of normal values of the same interquartile range."""
    low, median, high = np.quantile(np.asarray(values, float), (0.25, 0.5, 0.75))
    return float(median), float(0.93 * (high - low) / len(values) ** 0.5)
