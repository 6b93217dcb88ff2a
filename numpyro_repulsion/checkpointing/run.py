"""A run of ``MCMC`` in pieces, in memory or in a directory."""

from __future__ import annotations

import os
import time

import jax
from jax import lax, random
import jax.numpy as jnp
import numpy as np
import tqdm

from numpyro.infer import MCMC
from numpyro.util import is_prng_key

from numpyro_repulsion.checkpointing.directory import Directory
from numpyro_repulsion.checkpointing.draws import plan
from numpyro_repulsion.checkpointing.identity import densities, identify
from numpyro_repulsion.checkpointing.loop import Loop, starts, unweakened
from numpyro_repulsion.checkpointing.program import trace
from numpyro_repulsion.checkpointing.shared import SharedDirectory
from numpyro_repulsion.checks import integer
from numpyro_repulsion.kernels import bound_of, kernel_of
from numpyro_repulsion.kernels.mcmc import arguments, jit_spread_arguments, set_arguments, set_results
from numpyro_repulsion.kernels.requirements import require_agreement
from numpyro_repulsion.processes import are_several, here, must_stop

__all__ = ["run_in_pieces"]

#: Limits, in seconds, of the time between moves of the progress bar.
_QUICK, _SLOW = 0.05, 0.5


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

    Warmup runs in pieces too. One compiled program serves all pieces, whatever their length. Afterwards
    ``get_samples``, ``get_extra_fields``, ``print_summary`` and ``last_state`` of the ``mcmc``, and
    :func:`~numpyro_repulsion.summary` and :func:`~numpyro_repulsion.to_inference_data`, are as after ``mcmc.run``, with
    draws that are NumPy arrays.

    With a ``directory`` every piece is saved when it is done. The same call, also in a new process, continues from the
    last saved piece, wherever the process was killed; if all pieces are saved it returns at once. Draws are then mapped
    from disk, read-only, and memory holds one piece of them. :func:`~numpyro_repulsion.load_draws` reads them without
    the model.

    :param mcmc: an ``MCMC`` with a kernel of this package. ``chain_method`` is ``"vectorized"``, or for kernels that
        do not interact ``"sequential"``, in which each piece runs one chain after the other.
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
    _check(mcmc, piece_size, extra_fields)
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
    start = mcmc.post_warmup_state if init_params is None else init_params
    pieces = {"piece_size": piece_size, "extra_fields": tuple(extra_fields), "directory": str(directory)}
    require_agreement(mcmc.sampler, mcmc, keys, mcmc.num_warmup, start, args, kwargs, **pieces)
    bound_of(mcmc).share_data()
    num_warmup = 0 if mcmc.post_warmup_state is not None else mcmc.num_warmup
    kind = SharedDirectory if are_several() else Directory
    store = _Memory() if directory is None else kind(directory, num_warmup + mcmc.num_samples)
    try:
        _run(mcmc, keys, piece_size, store, extra_fields, init_params, num_warmup)
    finally:
        store.close()


def _run(mcmc, keys, piece_size, store, extra_fields, init_params, num_warmup):
    def begin():
        return starts(mcmc, keys, init_params)

    if store.is_lasting:
        states, start = None, trace(begin, known=arguments(mcmc))
        like = start.output
    else:
        states = like = begin()
    loop = Loop(mcmc, extra_fields, num_warmup, like[0])
    files = plan(loop.prototype_of_chain, loop.fields[0], mcmc.num_chains, loop.num_rows)
    if store.is_lasting:
        programs = loop.trace(like[0]), start
        identity = identify(mcmc, keys, init_params, like[0], loop.prototype, programs)
        store.open(identity, files, lambda: densities(mcmc, like[0]), any(program.is_opaque for program in programs))
    else:
        store.open(files)
    done = 0
    if (saved := store.restore(like)) is not None:
        done, states = saved[0], jax.tree.map(unweakened, saved[1])
    elif states is None:
        states = begin()
    with _Bar(mcmc, num_warmup, loop, done) as bar:
        for number in range(-(-(loop.num_iterations - done) // piece_size)):
            stop = min(done + piece_size, loop.num_iterations)
            states, draws = _piece(loop, states, done, stop, piece_size, bar)
            store.save(stop, states, loop.rows(done), draws)
            done = stop
            if must_stop(number):
                kept = "The same call continues from there." if store.is_lasting else "Nothing is kept."
                raise SystemExit(f"A signal stopped the run after {done} of {loop.num_iterations} iterations. {kept}")
    found = jax.tree.unflatten(jax.tree.structure(loop.prototype), store.draws())
    last_state = states[0] if loop.is_joint else jax.tree.map(lambda *x: jnp.stack(x), *states)
    set_results(mcmc, {name: found[name] for name in loop.fields}, here(last_state))


def _piece(loop, states, first, stop, piece_size, bar):
    """Return the states after a piece, and its draws, ``(chains, draws, ...)`` each."""
    after, found = [], []
    for state in states:
        collected = loop.empty(piece_size)
        at = first
        while at < stop:
            to = min(at + bar.stride(piece_size), stop)
            state, collected = loop.advance(state, collected, at, to, first)
            bar.move(at, to, state)
            at = to
        after.append(state)
        found.append(loop.on_host(collected, loop.rows(stop) - loop.rows(first)))
    return tuple(after), [np.concatenate(x) if len(x) > 1 else x[0] for x in zip(*found, strict=True)]


class _Memory:
    """Draws in memory, with the methods of a :class:`Directory` that a run needs."""

    is_lasting = False

    def open(self, files):
        self._draws = [np.empty(file.shape, file.dtype) for file in files]

    def restore(self, like):
        return None

    def save(self, iteration, states, first_row, draws):
        for whole, piece in zip(self._draws, draws, strict=True):
            whole[:, first_row : first_row + piece.shape[1]] = piece

    def draws(self):
        return self._draws

    def close(self):
        pass


def _check(mcmc, piece_size, extra_fields):
    kernel_of(mcmc, "run_in_pieces")
    integer("`piece_size`", piece_size)
    if not isinstance(extra_fields, tuple | list):
        raise TypeError(f'`extra_fields` must be a tuple of names, such as ("gradient",); got {extra_fields!r}.')
    if mcmc.num_chains > 1 and mcmc.chain_method not in ("vectorized", "sequential"):
        raise ValueError(
            f'run_in_pieces needs chain_method="vectorized", or "sequential" for plain chains; got '
            f"{mcmc.chain_method!r}."
        )


class _Bar:
    """The progress bar of a run, if it has one, and the number of iterations between its moves."""

    def __init__(self, mcmc, num_warmup, loop, done):
        self._kernel, self._num_warmup = mcmc.sampler, num_warmup
        copies = 1 if loop.is_joint else mcmc.num_chains
        self._bar = None
        if mcmc.progress_bar and done < loop.num_iterations and jax.process_index() == 0:
            self._bar = tqdm.tqdm(total=copies * loop.num_iterations, initial=copies * done)
        self._rate, self._stride, self._since = mcmc.progress_rate, 1, None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self._bar is not None:
            self._bar.close()

    def stride(self, piece_size):
        if are_several():  # They must make the same calls, whatever their clocks say.
            return self._rate or piece_size
        return piece_size if self._bar is None else self._rate or self._stride

    def move(self, at, to, state):
        if self._bar is None:
            return
        text = self._kernel.progress(state)  # waits for the state
        now = time.perf_counter()
        if self._since is not None:  # The first time includes compilation.
            spent = now - self._since
            if spent < _QUICK:
                self._stride *= 2
            elif spent > _SLOW:
                self._stride = max(1, self._stride // 2)
        self._since = now
        self._bar.set_description("warmup" if at < self._num_warmup else "sample", refresh=False)
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.update(to - at)
