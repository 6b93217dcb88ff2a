"""Digests of traced programs: equal in every process, different for another model or setting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from numpyro_repulsion.digests import digest_of_program

__all__ = ["Program", "trace"]


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
    """Return the program of a function.

    :param args: arguments, or their shapes and types.
    :param known: arrays whose values need no digest here, because they have one elsewhere.
    """
    program, output = jax.make_jaxpr(function, return_shape=True)(*args)
    return Program(*digest_of_program(program, known), output)
