"""The iterations of a run, any number at a time, in one compiled program."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
import itertools
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from numpyro.infer import MCMC
from numpyro.util import cached_by, nested_attrgetter

from numpyro_repulsion.checkpointing.identity import trace
from numpyro_repulsion.kernels.mcmc import arguments, collected_fields, compiled_functions, jits_arguments
from numpyro_repulsion.kernels.programs import unweakened
from numpyro_repulsion.kernels.state import ParticleState, check_chains
from numpyro_repulsion.kernels.warming import Frozen, Warming
from numpyro_repulsion.layout import place_everywhere


class Loop:
    """Does what ``MCMC.run`` does in each iteration, with the same warmup, draws and thinning.

    Iterations are counted from 0, warmup first. Row r of the draws is the result of iteration ``offset + (r + 1) *
    thinning - 1``, as in NumPyro.

    :param mcmc: the run; its model's arguments are set.
    :param extra_fields: fields to collect in addition to the kernel's own, or with "~" to leave out.
    :param num_warmup: number of iterations whose draws are not kept.
    :param state: a state of the run, or its shapes.
    """

    def __init__(self, mcmc: MCMC, extra_fields, num_warmup: int, state):
        field, default_fields = collected_fields(mcmc)
        names = (field, *default_fields, *extra_fields)
        self.removed = tuple(dict.fromkeys(x[len(field) + 2 :] for x in names if x.startswith(f"~{field}.")))
        self.fields = tuple(dict.fromkeys(x for x in names if not x.startswith(f"~{field}.")))
        self.mcmc = mcmc
        self.thinning = mcmc.thinning
        self.num_rows = mcmc.num_samples // mcmc.thinning
        self.num_iterations = num_warmup + mcmc.num_samples
        self.offset = num_warmup + mcmc.num_samples % mcmc.thinning
        self._key = self.fields, self.removed, mcmc.num_chains > 1
        self._collect = _collector(compiled_functions(mcmc)[1], *self._key)
        #: Shapes and types of one draw of the chains, by field.
        self.prototype = jax.eval_shape(self._collect, self._value(state))

    def rows(self, iteration: int) -> int:
        """Return how many draws are complete before an iteration."""
        return max(0, (iteration - self.offset) // self.thinning)

    def advance(self, state, collected, first: int, stop: int, begin: int):
        """Return the state after iterations ``first`` to ``stop`` of a piece from ``begin``, and the collected draws.

        :param collected: of :meth:`empty`, or of the previous call; its buffer is donated.
        """
        scalars = map(np.int32, (first, stop, self.rows(begin), self.offset, self.thinning))
        before = int(state.num_flagged_updates)
        value, collected = self._program(*scalars, self._value(state), collected)
        self.mcmc.sampler.warn_of_flagged(value[0], before)
        return value[0], collected

    def digest(self, state) -> str:
        """Return the digest of the program of one iteration, with what it collects.

        :param state: a state, or its shapes.
        """

        def iterate(value):
            value = compiled_functions(self.mcmc)[0](value)
            return value, self._collect(value)

        return trace(iterate, self._value(state), known=arguments(self.mcmc))[0]

    def nothing(self) -> list[np.ndarray]:
        """Return no draws, as of a piece of warmup."""
        leaves = jax.tree.leaves(self.prototype)
        return [np.empty((x.shape[0], 0, *x.shape[1:]), x.dtype) for x in leaves]

    def empty(self, piece_size: int) -> dict[str, Any]:
        """Return buffers for the draws of a piece of ``piece_size`` iterations."""
        # The last row of a piece may begin in it and be completed in the next.
        size = -(-(min(piece_size, self.num_iterations) - 1) // self.thinning) + 1
        return jax.tree.map(lambda x: jnp.zeros((size, *x.shape), x.dtype), self.prototype)

    def on_host(self, collected, num_rows: int) -> list[np.ndarray]:
        """Return the draws collected with one state, as NumPy arrays ``(chains, num_rows, ...)``."""
        return [np.asarray(x)[:num_rows].swapaxes(0, 1) for x in jax.tree.leaves(collected)]

    def _value(self, state):
        mcmc = self.mcmc
        return (state, *arguments(mcmc)) if jits_arguments(mcmc) else (state,)

    @cached_property
    def _program(self):
        sample, postprocess = compiled_functions(self.mcmc)
        collect = self._collect

        # As long as NumPyro caches its own programs, this one serves further runs on the same arguments.
        @cached_by(Loop, sample, postprocess, *self._key)
        def advance(first, stop, base, offset, thinning, value, collected):
            def iterate(i, carry):
                value, collected = carry
                value = sample(value)
                row = (i - offset) // thinning

                def put(rows, new):
                    return lax.cond(row >= 0, lambda: rows.at[row - base].set(new), lambda: rows)

                return value, jax.tree.map(put, collected, collect(value))

            (state, *given), collected = lax.fori_loop(first, stop, iterate, (value, collected))
            return (place_everywhere(state), *given), place_everywhere(collected)

        return jax.jit(advance, donate_argnums=6)


def _collector(postprocess, fields, removed, has_chains):
    """Return a function that collects the fields of a value of the program, ``(chains, ...)`` each."""

    def collect(value):
        found = {name: nested_attrgetter(name)(value[0]) for name in fields}
        sites = postprocess(found[fields[0]], *value[1:])
        if removed:
            sites = {name: site for name, site in sites.items() if name not in removed}
        found |= {fields[0]: sites}
        return found if has_chains else jax.tree.map(lambda x: jnp.asarray(x)[None], found)

    return collect


def start(mcmc: MCMC, rng_key, init_params) -> Warming | ParticleState:
    """Return the state before the first iteration.

    :param rng_key: the key of the run, or one for each chain.
    """
    stored, kernel = mcmc.post_warmup_state, mcmc.sampler
    if stored is None:
        state = kernel.start(rng_key, mcmc.num_warmup, init_params, *arguments(mcmc))
    else:
        check_chains(stored, mcmc)
        state = kernel.resumed(stored, *arguments(mcmc))
        state = state._replace(rng_key=rng_key if mcmc.num_chains == 1 else rng_key[0])
    return jax.tree.map(unweakened, state)


def frozen(mcmc: MCMC, state: Warming) -> ParticleState:
    """Return the state from which draws are made, after the last iteration of warmup."""
    # As that of ``MCMC.run``, after NumPyro's iterations of warmup have passed.
    return mcmc.sampler.freeze(state, *arguments(mcmc), mcmc.num_chains == 1, mcmc.num_warmup, True)


def ways_to_freeze(mcmc: MCMC, state: Warming) -> Iterator[ParticleState]:
    """Return the shapes of all states that a warmup may become, that with all it may switch on first.

    :param state: the shapes of a state of the warmup.
    """
    warmup, kernel = state.warmup, mcmc.sampler
    reference = warmup.reference
    orders = (0,) if reference is None else (1, 0) if reference.hessian is None else (2, 1, 0)
    for on in itertools.product(
        orders,
        (True, False) if warmup.jumps is not None else (False,),
        (True, False) if warmup.basins is not None else (False,),
    ):
        how = Frozen(on, True, True, mcmc.num_warmup, mcmc.num_chains == 1)
        yield jax.eval_shape(lambda state, how=how: kernel.frozen_as(how, state, *arguments(mcmc)), state)
