"""Digests of traced programs: equal in every process, different for another model or setting."""

from __future__ import annotations

from collections.abc import Callable
import hashlib
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
import jax.numpy as jnp
import numpy as np

from numpyro_repulsion.digests import words
from numpyro_repulsion.kernels.callbacks import silenced

__all__ = ["Program", "trace"]

#: Parameters of operations that do not affect what these compute.
_NAMES = {"name", "debug_info", "inline", "ctx_mesh", "donated_invars"}


class Program(NamedTuple):
    """A function, traced but not run.

    - **digest** - the digest of its operations and the values of its constants.
    - **is_opaque** - whether it calls back into Python, which the digest does not cover.
    - **output** - shapes and types of its results.
    """

    digest: str
    is_opaque: bool
    output: Any


def trace(function: Callable, *args: Any, known: Any = ()) -> Program:
    """Return the program of a function, without the warnings that kernels give while they run.

    :param args: arguments, or their shapes and types.
    :param known: arrays whose values need no digest here, because they have one elsewhere.
    """
    with silenced():
        program, output = jax.make_jaxpr(function, return_shape=True)(*args)
    # Known arrays are recognized by identity, not by value.
    names = {id(x): f"known {i}" for i, x in enumerate(jax.tree.leaves(known)) if isinstance(x, jax.Array | np.ndarray)}
    digester = _Digester(names)
    return Program(f"digest {digester.closed(program)}", digester.is_opaque, output)


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
