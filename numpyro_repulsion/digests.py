"""Digests: what tells values from others, the same in every process."""

from __future__ import annotations

from collections.abc import Iterator
import hashlib
import re
from typing import Any

import jax
from jax import lax, random
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
import jax.numpy as jnp
import numpy as np

#: Addresses of objects, which differ between processes.
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
#: From so many bytes on, devices compute checksums of their arrays, which take a tenth of the time.
_LARGE = 1 << 28


def digest(tree: Any) -> str | None:
    """Return a digest of a pytree: values, shapes and types of arrays, and other leaves in words."""
    if tree is None:
        return None
    found = hashlib.blake2b(digest_size=16)
    leaves = jax.tree.leaves_with_path(tree)
    for path, leaf in leaves:
        name = jax.tree_util.keystr(path)
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            found.update(str(leaf.dtype).encode())
            leaf = random.key_data(leaf)
        if isinstance(leaf, jax.Array | np.ndarray | np.generic) and leaf.dtype.kind != "O":
            found.update(f"{name} {leaf.shape} {leaf.dtype}".encode())
            is_large = isinstance(leaf, jax.Array) and leaf.nbytes >= _LARGE
            leaf = np.asarray(_checksums(leaf) if has_parts(leaf) or is_large else leaf)
            found.update(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8).data)
        else:
            found.update(f"{name} {words(leaf)}".encode())
    if len(leaves) == 1 and isinstance(leaves[0][1], bool | int | float | str):
        return repr(leaves[0][1])
    return f"digest {found.hexdigest()}"


def words(part: object) -> str:
    """Return the ``repr`` of a part without addresses."""
    return _ADDRESS.sub("", repr(part))


def has_parts(x: object) -> bool:
    """Return whether devices have parts of an array, which other processes or meshes have in other parts."""
    return isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and not x.is_fully_replicated


@jax.jit
def _checksums(x):
    """Return checksums of all values and their places, however they are spread over devices."""
    if jnp.iscomplexobj(x):
        x = jnp.stack([x.real, x.imag], -1)
    if x.dtype.itemsize == 8:
        bits = lax.bitcast_convert_type(x, jnp.uint32)  # two words each
    elif jnp.issubdtype(x.dtype, jnp.floating):
        bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    else:
        bits = x.astype(jnp.uint32)
    places = jnp.arange(bits.size, dtype=jnp.uint32).reshape(bits.shape)
    # Sums of words are exact in any order; the multiplier is odd, so that each place has a weight of its own.
    mixed = (bits ^ (bits >> 15)) * (2 * places + 1)
    return jnp.stack([bits.sum(), mixed.sum(), (mixed ^ (mixed >> 13)).sum()])


def digest_of_program(program: ClosedJaxpr, known: Any = ()) -> str:
    """Return the digest of a program and its constants, but for known arrays and what it calls back in Python."""
    # Known arrays are recognized by identity, not by value.
    names = {id(x): f"known {i}" for i, x in enumerate(jax.tree.leaves(known)) if isinstance(x, jax.Array | np.ndarray)}
    text = program.jaxpr.pretty_print(use_color=False)
    found = hashlib.blake2b(_ADDRESS.sub("", text).encode(), digest_size=16)
    for constant in _constants(program, set()):
        found.update((names.get(id(constant)) or digest(constant) or "").encode())
    return f"digest {found.hexdigest()}"


def _constants(program: Any, seen: set[int]) -> Iterator[Any]:
    """Yield the arrays in a program and in those that it calls, which its text leaves out."""
    yield from getattr(program, "consts", ())
    program = getattr(program, "jaxpr", program)
    if id(program) in seen:
        return
    seen.add(id(program))
    for equation in program.eqns:
        yield from (x.val for x in equation.invars if isinstance(x, Literal) and np.ndim(x.val))
        for part in jax.tree.leaves(list(equation.params.values())):
            if isinstance(part, Jaxpr | ClosedJaxpr):
                yield from _constants(part, seen)
            elif isinstance(part, np.ndarray | jax.Array):
                yield part
