"""Hints on what an error in a model comes from: notes that Python shows below the error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import jax
from jax import random
import numpy as np

from numpyro.handlers import seed
from numpyro.primitives import Messenger

from numpyro_repulsion.rows import Rows

__all__ = ["hinting"]

#: Modules of tables, which a compiled program cannot index.
_TABLES = ("pandas", "polars", "pyarrow")


@contextmanager
def hinting(model: Callable | None, args: tuple, kwargs: dict) -> Iterator[None]:
    """Add notes to an error that a model raises: on arguments that are no arrays, and on rows of a subsampled plate.

    Instead of JAX's error, raise that of the `Rows` that a program could not read.
    """
    named = jax.tree.leaves_with_path({"args": args, "kwargs": kwargs}, is_leaf=lambda leaf: isinstance(leaf, Rows))
    rows = [(path, leaf) for path, leaf in named if isinstance(leaf, Rows)]
    for _, leaf in rows:
        leaf.failure = None
    try:
        yield
    except Exception as error:
        for (first, *path), leaf in rows:
            if isinstance(error, jax.errors.JaxRuntimeError) and (failure := leaf.failure) is not None:
                where = f"The model's {first.key}{jax.tree_util.keystr(tuple(path))}"
                raise type(failure)(f"{where}: {failure}") from None
        if isinstance(error, NotImplementedError) and "vmap_method" in str(error):
            raise ValueError(
                "The model calls jax.pure_callback without a rule for jax.vmap, by which all particles are evaluated "
                'at once. Write jax.pure_callback(..., vmap_method="sequential"), or vmap_method="expand_dims" if its '
                "function takes arrays with one more axis in front."
            ) from error
        notes = list(_of_arguments(args, kwargs, error))
        if not notes and isinstance(error, jax.errors.TracerArrayConversionError):
            notes = [
                "NumPy arrays from outside of a model cannot be taken by rows. Pass them as arguments of the model."
            ]
        for note in notes or _of_rows(model, args, kwargs, error):
            error.add_note(note)
        raise


def _of_arguments(args, kwargs, error):
    is_of_index = isinstance(error, TypeError) and "ind" in str(error)  # index, indices
    named = [(f"args[{i}]", value) for i, value in enumerate(args)] + [(f"{k}=", v) for k, v in kwargs.items()]
    for name, value in named:
        package = type(value).__module__.split(".")[0]
        if package in _TABLES:
            yield f"The model's {name} is a {type(value).__name__} of {package}. Pass arrays: x.to_numpy()."
        elif (
            is_of_index and isinstance(value, list) and value and all(isinstance(x, bool | int | float) for x in value)
        ):
            yield f"The model's {name} is a list. Pass an array: np.asarray(x)."
        elif isinstance(value, np.ndarray) and value.dtype.kind not in "biufc":
            yield f"The model's {name} is an array of dtype {value.dtype}. Encode its values as numbers."


class _Plates(Messenger):
    """Records the subsampled plates of a model, up to an error."""

    def __init__(self, fn):
        super().__init__(fn)
        self.found: dict[str, tuple[int, int]] = {}

    def process_message(self, msg):
        if msg["type"] == "plate" and len(msg["args"]) > 1 and msg["args"][1] and msg["args"][1] < msg["args"][0]:
            self.found[msg["name"]] = msg["args"][:2]


def _of_rows(model, args, kwargs, error):
    """If arrays do not fit together, the commonest reason is that not all of them are taken by rows."""
    if not any(word in str(error) for word in ("broadcast", "shapes")):
        return
    plates = _Plates(seed(model, random.key(0)))
    with suppress(Exception):  # The same error.
        jax.eval_shape(lambda: plates(*args, **kwargs) and None)
    for name, (size, batch) in plates.found.items():
        yield (
            f"The plate '{name}' draws {batch} of {size} rows. Take these rows of all data, inside the plate: `with "
            f"numpyro.plate('{name}', {size}, subsample_size={batch}) as i:`, then x[i] and y[i]."
        )
