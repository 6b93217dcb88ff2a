"""What depends on what in a model: read from its program, on abstract values."""

from __future__ import annotations

from collections.abc import Callable

import jax

from numpyro.distributions import constraints
from numpyro.primitives import Messenger

__all__ = ["Watch", "influenced", "may_be_empty"]


class Watch(Messenger):
    """Sees what a model asks for, also in the bodies of ``scan`` and ``cond``, which other handlers do not.

    - **asks_for_keys** - whether there is a ``numpyro.prng_key()``.
    - **hidden_plates** - the subsampled plates in those bodies.
    """

    def __init__(self):
        super().__init__(None)
        self.asks_for_keys = False
        self.hidden_plates: list[str] = []
        self._depth = 0

    def process_message(self, msg):
        if msg["type"] == "prng_key":
            self.asks_for_keys = True
        elif msg["type"] == "plate":
            size, batch = msg["args"]
            if batch == 0:
                raise ValueError(f"The plate '{msg['name']}' has subsample_size=0; a minibatch needs one row or more.")
            if self._depth and batch is not None and batch < size:
                self.hidden_plates.append(msg["name"])
        elif msg["type"] == "control_flow":
            msg["args"] = tuple(self._watched(arg) if callable(arg) else arg for arg in msg["args"])

    def _watched(self, body):
        def watched(*args):
            self._depth += 1
            try:
                with self:
                    return body(*args)
            finally:
                self._depth -= 1

        return watched


def influenced(fn: Callable, cause, *rest) -> list[bool]:
    """Whether each output of ``fn(cause, *rest)`` depends on ``cause``, by the structure of the program."""
    program = jax.make_jaxpr(fn)(cause, *rest).jaxpr
    tainted = {id(variable) for variable in program.invars[: len(jax.tree.leaves(cause))]}
    for equation in program.eqns:
        if any(id(variable) in tainted for variable in equation.invars):
            tainted.update(id(variable) for variable in equation.outvars)
    return [id(variable) in tainted for variable in program.outvars]


def may_be_empty(law) -> bool:
    """Whether NumPyro's transforms and densities take values without elements."""
    is_whole = 0 not in law.batch_shape and getattr(law.support, "base_constraint", None) is constraints.real
    return law.support is constraints.real or is_whole
