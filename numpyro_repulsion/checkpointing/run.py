"""A run of ``MCMC`` in pieces, in memory or in a directory."""

from __future__ import annotations

import itertools
import os

import jax
from jax import lax, random
import jax.numpy as jnp
import numpy as np
import tqdm

from numpyro.infer import MCMC
from numpyro.util import is_prng_key

from numpyro_repulsion.checkpointing.directory import Directory, plan
from numpyro_repulsion.checkpointing.identity import digest_of_warmup, identify, trace
from numpyro_repulsion.checkpointing.loop import Loop, frozen, start, ways_to_freeze
from numpyro_repulsion.checks import integer
from numpyro_repulsion.kernels import bound_of, kernel_of
from numpyro_repulsion.kernels.mcmc import arguments, jit_spread_arguments, set_arguments, set_results
from numpyro_repulsion.kernels.programs import unweakened
from numpyro_repulsion.kernels.requirements import require_agreement
from numpyro_repulsion.kernels.warming import Warming
from numpyro_repulsion.processes import here, must_stop

#: How often the progress bar moves in a run.
NUM_MOVES = 200


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
    if init_params is not None and mcmc.num_chains > 1:
        shapes = jax.tree.map(jnp.shape, init_params)
        if any(np.shape(leaf)[:1] != (mcmc.num_chains,) for leaf in jax.tree.leaves(init_params)):
            raise ValueError(
                f"`init_params` must have one start for each chain, a leading axis of {mcmc.num_chains}; got "
                f"shapes {shapes}."
            )
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
    def begin():
        return start(mcmc, keys, init_params)

    state, beginning = None, ""
    if store.is_lasting:
        beginning, like = trace(begin, known=arguments(mcmc))
    else:
        state = like = begin()
    warms = isinstance(like, Warming)
    likes = list(itertools.islice(ways_to_freeze(mcmc, like), None if store.is_lasting else 1)) if warms else [like]
    loop = Loop(mcmc, extra_fields, num_warmup, likes[0])
    files = plan(loop.prototype, loop.fields[0], mcmc.num_chains, loop.num_rows)
    if store.is_lasting:
        warmup = digest_of_warmup(mcmc, like) if warms else ""
        programs = loop.digest(likes[0]), warmup, beginning
        store.open(identify(mcmc, keys, init_params, likes[0], loop.prototype, programs), files)
    else:
        store.open(files)
    done = 0
    if (saved := store.restore(*([like] if warms else []), *likes)) is not None:
        done, state = saved[0], mcmc.sampler.resumed(jax.tree.map(unweakened, saved[1]), *arguments(mcmc))
    elif state is None:
        state = begin()
    ends = (num_warmup, loop.num_iterations) if warms else (loop.num_iterations,)
    with _Bar(mcmc, num_warmup, loop, done, piece_size) as bar:
        for number in itertools.count():
            if done == loop.num_iterations:
                break
            stop = min(done + piece_size, *(end for end in ends if end > done))
            if isinstance(state, Warming):
                state = _warmed(mcmc, state, done, stop, bar)
                state = frozen(mcmc, state) if stop == num_warmup else state
                draws = loop.nothing()
            else:
                state, draws = _piece(loop, state, done, stop, piece_size, bar)
            store.save(stop, state, loop.rows(done), draws)
            if warms and stop == num_warmup:
                mcmc.sampler.warn_of_warmup(state)
            done = stop
            if must_stop(number):
                kept = "The same call continues from there." if store.is_lasting else "Nothing is kept."
                raise SystemExit(f"A signal stopped the run after {done} of {loop.num_iterations} iterations. {kept}")
    found = jax.tree.unflatten(jax.tree.structure(loop.prototype), store.draws())
    set_results(mcmc, {name: found[name] for name in loop.fields}, here(state))


def _warmed(mcmc, state, first, stop, bar):
    """Return the state after a piece of warmup."""
    at = first
    while at < stop:
        to = min(at + bar.stride, stop)
        state = mcmc.sampler.warm(state, to - at, mcmc.num_warmup, *arguments(mcmc))
        bar.move(at, to, state)
        at = to
    return state


def _piece(loop, state, first, stop, piece_size, bar):
    """Return the state after a piece, and its draws, ``(chains, draws, ...)`` each."""
    collected = loop.empty(piece_size)
    at = first
    while at < stop:
        to = min(at + bar.stride, stop)
        state, collected = loop.advance(state, collected, at, to, first)
        bar.move(at, to, state)
        at = to
    return state, loop.on_host(collected, loop.rows(stop) - loop.rows(first))


class _Memory:
    """Draws in memory, with the methods of a :class:`Directory` that a run needs."""

    is_lasting = False

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


class _Bar:
    """The progress bar of a run, if it has one, and the number of iterations between its moves."""

    def __init__(self, mcmc, num_warmup, loop, done, piece_size):
        self._kernel, self._num_warmup = mcmc.sampler, num_warmup
        is_shown = mcmc.progress_bar and done < loop.num_iterations
        # Processes must make the same calls, whether they show the bar or not.
        self.stride = mcmc.progress_rate or max(1, loop.num_iterations // NUM_MOVES) if is_shown else piece_size
        is_shown &= jax.process_index() == 0
        self._bar = tqdm.tqdm(total=loop.num_iterations, initial=done) if is_shown else None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self._bar is not None:
            self._bar.close()

    def move(self, at, to, state):
        if self._bar is not None:
            self._bar.set_description("warmup" if at < self._num_warmup else "sample", refresh=False)
            if not isinstance(jax.block_until_ready(state), Warming):
                self._bar.set_postfix_str(self._kernel.progress(state), refresh=False)
            self._bar.update(to - at)
