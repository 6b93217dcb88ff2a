"""Runs: through vectorized ``MCMC``, repeated with other seeds, timed in turns; and what errors they leave.

Programs that are timed are compiled first and then run in turns, so that what slows the machine down slows them all.
"""

from collections.abc import Callable, Mapping
from functools import partial
import statistics
import time
from typing import Any

import jax
from jax import lax, random
import jax.numpy as jnp
import numpy as np

from numpyro.infer import MCMC

from numpyro_repulsion.gradients.minibatch import Gradient


def vectorized(kernel: Any, num_warmup: int, num_samples: int, num_chains: int, progress_bar=False, **settings) -> MCMC:
    """An ``MCMC`` of vectorized chains; with its progress bar one compilation serves all runs."""
    settings |= {"num_warmup": num_warmup, "num_samples": num_samples, "num_chains": num_chains}
    return MCMC(kernel, chain_method="vectorized", progress_bar=progress_bar, **settings)


class Runs:
    """Runs of a kernel of this package, whose warmup has its own programs; one more samples, on all data of a shape.

    Called with a key, the model's arguments and starts, it returns draws by site, ``(particle, draw, ...)``.
    """

    def __init__(self, kernel: Any, num_warmup: int, num_samples: int, num_chains: int):
        self.kernel, self.num_warmup, self.num_chains = kernel, num_warmup, num_chains

        def sampled(state, args):
            def one(state, _):
                state = kernel.sample(state, args, {})
                return state, state.z

            z = lax.scan(one, state, length=num_samples)[1]
            draws = jax.vmap(jax.vmap(kernel.postprocess_fn(args, {})))(z)
            return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), draws)

        self.sampled = jax.jit(sampled)

    def __call__(self, key: jax.Array, *args: Any, init_params: Any = None) -> dict[str, jax.Array]:
        keys = random.split(key, self.num_chains)
        return self.sampled(self.kernel.init(keys, self.num_warmup, init_params, args, {}), args)


def repeats(make: Callable, *, start: Callable | None = None, adapts: bool = False, **settings: Any) -> Callable:
    """A function of a step size and of seeds: draws of ``z`` and the median seconds of a run.

    ``make`` returns a kernel from a step size; ``start`` starting particles from a key. Draws are
    ``(seed, particle, draw, ...)``. One program serves all steps, unless a kernel ``adapts`` something in its warmup,
    which runs outside of compiled programs.
    """

    def drawn(runs, key):
        return runs(key, init_params=None if start is None else {"z": start(random.fold_in(key, 1))})["z"]

    @jax.jit
    def traced(step, key):
        mcmc = vectorized(make(step), **settings)

        def runs(key, **starts):
            mcmc.run(key, **starts)
            return mcmc.get_samples(group_by_chain=True)

        return drawn(runs, key)

    def run(step, seeds):
        draws, seconds = [], []
        one = partial(drawn, Runs(make(float(step)), **settings)) if adapts else partial(traced, jnp.float32(step))
        for seed in seeds:
            began = time.perf_counter()
            draws.append(np.asarray(one(random.key(seed)), float))
            seconds.append(time.perf_counter() - began)
        return np.stack(draws), statistics.median(seconds)

    return run


def flat(draws: Mapping[str, Any]) -> np.ndarray:
    """All scalars ``(chain, draw, scalar)``, by the names of sites."""
    return np.concatenate([np.asarray(draws[s], float).reshape(*draws[s].shape[:2], -1) for s in sorted(draws)], 2)


def mean_and_error(values: Any) -> tuple[float, float]:
    """The mean over repeats, and its standard error; NaN of none, and the error of one."""
    values = np.asarray(list(values), float)
    if not len(values):
        return np.nan, np.nan
    return float(values.mean()), float(values.std(ddof=1) / len(values) ** 0.5) if len(values) > 1 else np.nan


def through_mcmc(kernel: Any, num_updates: int, num_chains: int, **kwargs: Any) -> Callable:
    """``MCMC.run`` without warmup, one compiled program ``(key, *args) -> samples``: the updates, not the compiler."""

    @jax.jit
    def run(key, *args):
        mcmc = vectorized(kernel, 0, num_updates // kernel.num_steps, num_chains)
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


def warmup_gradients(kernel: Any, args: tuple, kwargs: dict, num_warmup: int, num_chains: int) -> int:
    """How many gradients a warmup takes for each particle, counted as it runs; on a minibatch where there are any.

    Measurements and both gradients of a control variate count; its passes over all rows do not.
    """
    plain, count = Gradient.energy_and_grad, 0

    def counted(*arguments, **settings):
        def add():
            nonlocal count
            count += 1

        jax.debug.callback(add)
        return plain(*arguments, **settings)

    Gradient.energy_and_grad = counted
    try:
        jax.clear_caches()
        mcmc = vectorized(kernel, num_warmup, 1, num_chains)
        mcmc.warmup(random.key(0), *args, **kwargs)
        jax.block_until_ready(mcmc.last_state)
        jax.effects_barrier()
    finally:
        Gradient.energy_and_grad = plain
        jax.clear_caches()
    return count
