"""A run of ``MCMC`` in pieces, in memory or in a directory."""

from __future__ import annotations

from functools import cached_property
import itertools
import os

import jax
from jax import lax, random
import jax.numpy as jnp
import numpy as np
import tqdm

from numpyro.infer import MCMC
from numpyro.util import cached_by, is_prng_key, nested_attrgetter

from numpyro_repulsion.checkpointing.directory import Directory, plan
from numpyro_repulsion.checkpointing.identity import identify, trace
from numpyro_repulsion.checks import integer
from numpyro_repulsion.kernels.mcmc import (
    arguments,
    collected_fields,
    compiled_functions,
    jit_spread_arguments,
    jits_arguments,
    set_arguments,
    set_results,
)
from numpyro_repulsion.kernels.programs import unweakened
from numpyro_repulsion.kernels.requirements import require_agreement
from numpyro_repulsion.kernels.runs import bound_of, kernel_of
from numpyro_repulsion.kernels.state import check_chains
from numpyro_repulsion.kernels.warmup_host import iterations_of
from numpyro_repulsion.kernels.warmup_programs import Frozen, WarmupRun
from numpyro_repulsion.layout import place_everywhere
from numpyro_repulsion.processes import here, must_stop


def run_in_pieces(
    mcmc: MCMC,
    rng_key,
    *args,
    piece_size: int = 100,
    directory: str | os.PathLike | None = None,
    extra_fields=(),
    init_params=None,
    **kwargs,
) -> None:
    """Run ``mcmc.run(rng_key, *args, ...)`` in pieces: the same draws, bit for bit, move to the host after each piece.

    Warmup runs in pieces too, and one compiled program serves all pieces of each, whatever their length. Afterwards
    ``get_samples``, ``get_extra_fields``, ``print_summary`` and ``last_state`` of the ``mcmc``, and
    :func:`~numpyro_repulsion.summary` and :func:`~numpyro_repulsion.to_inference_data`, are as after ``mcmc.run``, with
    draws that are NumPy arrays.

    With a ``directory`` every piece is saved when it is done. The same call, also in a new process, continues from the
    last saved piece, wherever the process was killed; if all pieces are saved it returns at once. Draws are then mapped
    from disk, read-only, and memory holds one piece of them. :func:`~numpyro_repulsion.load_draws` reads them without
    the model.

    :param mcmc: an ``MCMC`` with a kernel of this package. ``chain_method`` is ``"vectorized"``.
    :param rng_key: a key of either style, or one for each chain.
    :param args: arguments of the model.
    :param piece_size: iterations in a piece, including those of warmup and those that thinning drops. A killed process
        loses at most one piece, and the device stores the draws of one piece. It does not change the draws, and may
        change when a run continues.
    :param directory: where to save, made if it does not exist; ``None`` keeps draws in memory. Room for all draws is
        reserved at the start.
    :param extra_fields: as in ``mcmc.run``.
    :param init_params: as in ``mcmc.run``.
    :param kwargs: keyword arguments of the model.
    :raises TypeError: if ``mcmc`` is not an ``MCMC`` with a kernel of this package.
    :raises ValueError: for a wrong ``piece_size`` or ``chain_method``; for a directory of another run (the message says
        what differs), or one whose files are damaged beyond the last piece.
    :raises OSError: if the directory cannot be written to or the disk is full; earlier pieces stay intact.
    :raises RuntimeError: if another process is writing to the directory.

    **Example**

    .. doctest::

        >>> import tempfile
        >>> from jax import random
        >>> import numpyro
        >>> import numpyro.distributions as dist
        >>> from numpyro.infer import MCMC
        >>> from numpyro_repulsion import SGLDR, run_in_pieces

        >>> def model():
        ...     numpyro.sample("x", dist.Normal(0, 1))

        >>> mcmc = MCMC(SGLDR(model, step_size=0.1), num_warmup=10, num_samples=20, num_chains=4,
        ...             chain_method="vectorized", progress_bar=False)
        >>> run_in_pieces(mcmc, random.key(0), piece_size=8, directory=tempfile.mkdtemp())
        >>> mcmc.get_samples(group_by_chain=True)["x"].shape
        (4, 20)
    """
    kernel_of(mcmc, "run_in_pieces")
    integer("`piece_size`", piece_size)
    if not isinstance(extra_fields, tuple | list):
        raise TypeError(f'`extra_fields` must be a tuple of names, such as ("gradient",); got {extra_fields!r}.')
    if mcmc.num_chains > 1 and mcmc.chain_method != "vectorized":
        raise ValueError(f'run_in_pieces needs chain_method="vectorized"; got {mcmc.chain_method!r}.')
    set_arguments(mcmc, args, kwargs)
    init_params = jax.tree.map(lambda x: lax.convert_element_type(x, jnp.result_type(x)), init_params)
    jit_spread_arguments(mcmc)
    keys = random.split(rng_key, mcmc.num_chains) if mcmc.num_chains > 1 and is_prng_key(rng_key) else rng_key
    given = mcmc.post_warmup_state if init_params is None else init_params
    pieces = {"piece_size": piece_size, "extra_fields": tuple(extra_fields), "directory": str(directory)}
    require_agreement(mcmc.sampler, mcmc, keys, mcmc.num_warmup, given, args, kwargs, **pieces)
    bound = bound_of(mcmc)
    bound.gradient.share(bound.target)
    # Of several processes, rows that were shared are other inputs, and no program can look through them.
    bound_of(mcmc)
    num_warmup = 0 if mcmc.post_warmup_state is not None else mcmc.num_warmup
    store = _Memory() if directory is None else Directory(directory, num_warmup + mcmc.num_samples)
    try:
        _run(mcmc, keys, piece_size, store, extra_fields, init_params, num_warmup)
    finally:
        store.close()


def _run(mcmc, keys, piece_size, store, extra_fields, init_params, num_warmup):
    kernel, given, is_lasting = mcmc.sampler, arguments(mcmc), isinstance(store, Directory)

    def begin():
        stored = mcmc.post_warmup_state
        if stored is None:
            return jax.tree.map(unweakened, kernel.start(keys, mcmc.num_warmup, init_params, *given))
        check_chains(stored, mcmc)
        key = keys if mcmc.num_chains == 1 else keys[0]
        return jax.tree.map(unweakened, kernel.resumed(stored, *given)._replace(rng_key=key))

    state, beginning = None, ""
    if is_lasting:
        beginning, like = trace(begin, known=given)
    else:
        state = like = begin()
    warms = isinstance(like, WarmupRun)
    likes = list(itertools.islice(_frozen(mcmc, like), None if is_lasting else 1)) if warms else [like]
    loop = _Loop(mcmc, extra_fields, num_warmup, likes[0])
    files = plan(loop.prototype, loop.fields[0], mcmc.num_chains, loop.num_rows)
    if is_lasting:
        warmup = ""
        if warms:
            steps = iterations_of(bound_of(mcmc), like)
            warmup, _ = trace(lambda state: [step(state) for step in steps], like, known=given)
        programs = loop.digest(likes[0]), warmup, beginning
        store.open(identify(mcmc, keys, init_params, likes[0], loop.prototype, programs), files)
    else:
        store.open(files)
    done = 0
    if (saved := store.restore(*([like] if warms else []), *likes)) is not None:
        done, state = saved[0], kernel.resumed(jax.tree.map(unweakened, saved[1]), *given)
    elif state is None:
        state = begin()
    is_shown = mcmc.progress_bar and done < loop.num_iterations
    # Processes must make the same calls, whether they show the bar or not.
    stride = mcmc.progress_rate or max(1, loop.num_iterations // 200) if is_shown else piece_size
    is_shown &= jax.process_index() == 0
    ends = (num_warmup, loop.num_iterations) if warms else (loop.num_iterations,)
    with tqdm.tqdm(total=loop.num_iterations, initial=done, disable=not is_shown) as bar:
        for number in itertools.count():
            if done == loop.num_iterations:
                break
            stop = min(done + piece_size, *(end for end in ends if end > done))
            is_warmup = isinstance(state, WarmupRun)
            collected = loop.empty(1 if is_warmup else piece_size)
            for at in range(done, stop, stride):
                to = min(at + stride, stop)
                if is_warmup:
                    state = kernel.warm(state, to - at, mcmc.num_warmup, *given)
                else:
                    state, collected = loop.advance(state, collected, at, to, done)
                if is_shown:
                    bar.set_description("warmup" if at < num_warmup else "sample", refresh=False)
                    if not isinstance(jax.block_until_ready(state), WarmupRun):
                        bar.set_postfix_str(kernel.progress(state), refresh=False)
                bar.update(to - at)
            if is_warmup and stop == num_warmup:
                # As after ``MCMC.run``, where NumPyro's iterations of warmup have passed.
                state = kernel.freeze(state, *given, mcmc.num_chains == 1, mcmc.num_warmup, True)
            first, last = loop.rows(done), loop.rows(stop)
            draws = [np.asarray(x)[: last - first].swapaxes(0, 1) for x in jax.tree.leaves(collected)]
            store.save(stop, state, first, draws)
            if warms and stop == num_warmup:
                kernel.warn_of_warmup(state)
            done = stop
            if must_stop(number):
                kept = "The same call continues from there." if is_lasting else "Nothing is kept."
                raise SystemExit(f"A signal stopped the run after {done} of {loop.num_iterations} iterations. {kept}")
    found = jax.tree.unflatten(jax.tree.structure(loop.prototype), store.draws())
    set_results(mcmc, {name: found[name] for name in loop.fields}, here(state))


def _frozen(mcmc, state):
    """Yield the shapes of all states that a warmup may become, that with all it may switch on first."""
    warmup, kernel = state.warmup, mcmc.sampler
    reference = warmup.reference
    orders = (0,) if reference is None else (1, 0) if reference.hessian is None else (2, 1, 0)
    for on in itertools.product(orders, (False,) if warmup.jumps is None else (True, False)):
        how = Frozen(on, True, mcmc.num_warmup, mcmc.num_chains == 1)
        yield jax.eval_shape(lambda state, how=how: kernel.frozen_as(how, state, *arguments(mcmc)), state)


class _Loop:
    """Does what ``MCMC.run`` does in each iteration, with the same warmup, draws and thinning, in one program for any
    number of them.

    Iterations are counted from 0, warmup first. Row r of the draws is the result of iteration ``offset + (r + 1) *
    thinning - 1``, as in NumPyro.

    :param num_warmup: number of iterations whose draws are not kept.
    :param state: a state of the run, or its shapes.
    """

    def __init__(self, mcmc, extra_fields, num_warmup, state):
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

    def rows(self, iteration):
        """Return how many draws are complete before an iteration."""
        return max(0, (iteration - self.offset) // self.thinning)

    def advance(self, state, collected, first, stop, begin):
        """Return the state and the draws, whose buffer is donated, after iterations of a piece from ``begin``."""
        scalars = map(np.int32, (first, stop, self.rows(begin), self.offset, self.thinning))
        before = int(state.num_flagged_updates)
        value, collected = self._program(*scalars, self._value(state), collected)
        self.mcmc.sampler.warn_of_flagged(value[0], before)
        return value[0], collected

    def digest(self, state):
        """Return the digest of the program of one iteration, with what it collects."""

        def iterate(value):
            value = compiled_functions(self.mcmc)[0](value)
            return value, self._collect(value)

        return trace(iterate, self._value(state), known=arguments(self.mcmc))[0]

    def empty(self, piece_size):
        """Return buffers for the draws of a piece of ``piece_size`` iterations."""
        # The last row of a piece may begin in it and be completed in the next.
        size = -(-(min(piece_size, self.num_iterations) - 1) // self.thinning) + 1
        return jax.tree.map(lambda x: jnp.zeros((size, *x.shape), x.dtype), self.prototype)

    def _value(self, state):
        mcmc = self.mcmc
        return (state, *arguments(mcmc)) if jits_arguments(mcmc) else (state,)

    @cached_property
    def _program(self):
        sample, postprocess = compiled_functions(self.mcmc)
        collect = self._collect

        # As long as NumPyro caches its own programs, this one serves further runs on the same arguments.
        @cached_by(_Loop, sample, postprocess, *self._key)
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


class _Memory:
    """Draws in memory, with the methods of a :class:`Directory` that a run needs."""

    def open(self, files):
        self._draws = [np.empty(file.shape, file.dtype) for file in files]

    def restore(self, *likes):
        return None

    def save(self, iteration, states, first_row, draws):
        for whole, piece in zip(self._draws, draws, strict=True):
            whole[:, first_row : first_row + piece.shape[1]] = piece

    def draws(self):
        return self._draws

    def close(self):
        pass
