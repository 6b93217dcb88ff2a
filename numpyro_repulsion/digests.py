"""Digests: what tells values from others, the same in every process."""

from __future__ import annotations

import hashlib
import re
from typing import Any

import jax
from jax import lax, random
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
import jax.numpy as jnp
import numpy as np

__all__ = ["digest", "digest_of_program", "has_parts", "words"]

#: Parameters of operations that do not affect what these compute.
_NAMES = {"name", "debug_info", "inline", "ctx_mesh", "donated_invars"}
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
            leaf = np.asarray(_checksums(leaf) if has_parts(leaf) or _is_large(leaf) else leaf)
            found.update(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8).data)
        else:
            found.update(f"{name} {words(leaf)}".encode())
    if len(leaves) == 1 and isinstance(leaves[0][1], bool | int | float | str):
        return repr(leaves[0][1])
    return f"digest {found.hexdigest()}"


def words(part: object) -> str:
    """Return the ``repr`` of a part without addresses, which differ between processes."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(part))


def has_parts(x: object) -> bool:
    """Return whether devices have parts of an array, which other processes or meshes have in other parts."""
    return isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and not x.is_fully_replicated


def _is_large(x):
    return isinstance(x, jax.Array) and x.nbytes >= _LARGE


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


def digest_of_program(program: ClosedJaxpr, known: Any = ()) -> tuple[str, bool]:
    """Return the digest of a program and its constants, and whether it calls back into Python, which that leaves out.

    :param known: arrays whose values need no digest here, because they have one elsewhere.
    """
    # Known arrays are recognized by identity, not by value.
    names = {id(x): f"known {i}" for i, x in enumerate(jax.tree.leaves(known)) if isinstance(x, jax.Array | np.ndarray)}
    digester = _Digester(names)
    return f"digest {digester.closed(program)}", digester.is_opaque


class _Digester:
    """Digests of programs within a program; each is made once."""

    def __init__(self, names):
        self._names = names
        self._done: dict[int, tuple[Any, str]] = {}
        self.is_opaque = False

    def closed(self, program: ClosedJaxpr) -> str:
        """Return the digest of a program and its constants."""
        return _digest([self.open(program.jaxpr), *map(self._value, program.consts)])

    def open(self, program: Jaxpr) -> str:
        """Return the digest of a program, with its variables numbered in order of appearance."""
        if id(program) in self._done:
            return self._done[id(program)][1]
        numbers: dict[Any, int] = {}

        def atom(x):
            if isinstance(x, Literal):
                return f"{_kind(x.aval)} {self._value(x.val)}"
            return f"{numbers.setdefault(x, len(numbers))} {_kind(x.aval)}"

        parts = [*map(atom, program.constvars), "|", *map(atom, program.invars)]
        for equation in program.eqns:
            self.is_opaque |= "callback" in equation.primitive.name
            parts += ["\n", equation.primitive.name, *map(atom, equation.invars), "->", *map(atom, equation.outvars)]
            parts += [f"{k}={self._parameter(v)}" for k, v in sorted(equation.params.items()) if k not in _NAMES]
        found = _digest([*parts, "\n", *map(atom, program.outvars)])
        self._done[id(program)] = (program, found)  # Kept, so that no other object gets its address.
        return found

    def _parameter(self, value):
        if isinstance(value, ClosedJaxpr):
            return self.closed(value)
        if isinstance(value, Jaxpr):
            return self.open(value)
        if isinstance(value, tuple | list) and type(value) in (tuple, list):
            return f"({', '.join(map(self._parameter, value))})"
        if isinstance(value, frozenset | set):
            return f"{{{', '.join(sorted(map(self._parameter, value)))}}}"
        if isinstance(value, dict):
            return f"{{{', '.join(f'{k}: {self._parameter(v)}' for k, v in value.items())}}}"
        if isinstance(value, np.ndarray | np.generic | jax.Array):
            return self._value(value)
        # Functions are derivative rules, which tracing has already applied.
        return "a function" if callable(value) and not isinstance(value, type) else words(value)

    def _value(self, value):
        """Return the digest of a constant."""
        if id(value) in self._names:
            return self._names[id(value)]
        if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            return f"{value.dtype} {self._value(jax.random.key_data(value))}"
        if not hasattr(value, "dtype"):
            return f"{type(value).__name__} {value!r}"
        array = np.ascontiguousarray(value)
        return f"{array.dtype}{array.shape} {_digest([array.reshape(-1).view(np.uint8).data])}"


def _digest(parts):
    found = hashlib.blake2b(digest_size=16)
    for part in parts:
        found.update(part.encode() if isinstance(part, str) else part)
        found.update(b"\0")
    return found.hexdigest()


def _kind(kind):
    """Return the type of a variable as text."""
    return f"{kind.str_short()}{'~' if getattr(kind, 'weak_type', False) else ''}"
