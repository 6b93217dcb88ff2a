"""What the processes of a run on several hosts, ``jax.distributed``, do together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
import hashlib
from typing import Any, TypeVar

import jax
from jax import random
from jax.experimental import multihost_utils
import jax.numpy as jnp
import numpy as np

IN_ALL = "Call this in all processes, inside of `with jax.set_mesh(mesh):` as the run."

Tree = TypeVar("Tree")
Result = TypeVar("Result")


def are_several() -> bool:
    """Whether several processes make a run together."""
    return jax.process_count() > 1


def is_spread(x: Any) -> bool:
    """Return whether ``x`` is an array of which no process has the whole."""
    is_known = isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)
    return is_known and not x.is_fully_addressable and not x.is_fully_replicated


def here(tree: Tree) -> Tree:
    """Return arrays that lie whole on the devices of all processes as arrays of this process alone.

    What is computed from them then needs no other process, as in ``if jax.process_index() == 0: summary(mcmc)``.
    """

    def own(x):
        if not isinstance(x, jax.Array) or x.is_fully_addressable or is_spread(x):
            return x
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            return random.wrap_key_data(jnp.asarray(np.asarray(random.key_data(x))), impl=random.key_impl(x))
        return np.asarray(x)

    return jax.tree.map(own, tree)


def agree(values: Mapping[str, str]) -> None:
    """Raise ``ValueError`` in all processes if a value, or its digest, is not the same in all of them, and name it."""
    if not are_several():
        return
    digests = [hashlib.blake2b(f"{name}: {value}".encode(), digest_size=8).digest() for name, value in values.items()]
    found = multihost_utils.process_allgather(np.stack([np.frombuffer(one, np.uint8) for one in digests]))
    different = (found != found[0]).any((0, 2))
    if different.any():
        names = [name for name, yes in zip(values, different, strict=True) if yes]
        process = int(np.flatnonzero((found != found[0]).any((1, 2)))[0])
        raise ValueError(
            f"On process {process}, {', '.join(names)} differ{'s' * (len(names) == 1)} from process 0. All processes "
            "of a run need the same values; each may have a part of one data array, made by "
            "jax.make_array_from_process_local_data."
        )


def broadcast(data: bytes) -> bytes:
    """Return the bytes that the first process has, in all of them."""
    if not are_several():
        return data
    size = int(multihost_utils.broadcast_one_to_all(np.asarray(len(data), np.int32)))
    buffer = np.zeros(size, np.uint8)
    if jax.process_index() == 0:
        buffer[:] = np.frombuffer(data, np.uint8)
    return multihost_utils.broadcast_one_to_all(buffer).astype(np.uint8).tobytes()


def by_the_first(function: Callable[[], Result]) -> Result | None:
    """Return what a function returns in the first process, ``None`` in the others; its errors are raised in all."""
    if not are_several():
        return function()
    result, error = None, None
    if jax.process_index() == 0:
        try:
            result = function()
        except Exception as raised:
            error = raised
    words = broadcast(b"" if error is None else f"{type(error).__name__} in process 0: {error}".encode())
    if error is not None:
        raise error
    if words:
        raise RuntimeError(words.decode())
    return result


def must_stop(step: int) -> bool:
    """Return whether SIGTERM told a process to stop, in all processes at the same step; steps have no gaps."""
    # A process that belongs to no run of several is ended by the signal itself.
    if not are_several():
        return False
    try:
        return multihost_utils.reached_preemption_sync_point(step)
    except RuntimeError:  # JAX was told not to catch the signal.
        return False
