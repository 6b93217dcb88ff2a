"""Traced programs, as tests look through them."""

from collections.abc import Iterator

import jax


def equations(jaxpr) -> Iterator:
    """The equations of a program, those of its inner programs included."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda p: hasattr(p, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def shapes(jaxpr) -> Iterator[tuple[int, ...]]:
    """The shapes of all intermediate values of a program."""
    for equation in equations(jaxpr):
        for variable in equation.outvars:
            yield variable.aval.shape
