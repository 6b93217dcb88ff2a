"""Values of small arrays in a JAX program, computed by NumPy, to find the indices that are computed from rows."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["evaluate"]

#: Larger arrays are not evaluated.
MAX_SIZE = 1 << 20

_UFUNCS = {
    "abs": np.abs,
    "add": np.add,
    "and": np.bitwise_and,
    "ceil": np.ceil,
    "eq": np.equal,
    "floor": np.floor,
    "ge": np.greater_equal,
    "gt": np.greater,
    "le": np.less_equal,
    "lt": np.less,
    "max": np.maximum,
    "min": np.minimum,
    "mul": np.multiply,
    "ne": np.not_equal,
    "neg": np.negative,
    "not": np.invert,
    "or": np.bitwise_or,
    "rem": np.fmod,
    "sign": np.sign,
    "sub": np.subtract,
    "xor": np.bitwise_xor,
}


def evaluate(equation, values: list) -> np.ndarray | None:
    """Return the single output of a jaxpr equation if NumPy computes it as JAX does, otherwise ``None``.

    :param values: the values of the inputs.
    """
    output = equation.outvars[0].aval
    dtype = getattr(output, "dtype", None)
    if getattr(dtype, "kind", "") not in "biuf" or np.prod(output.shape) > MAX_SIZE:
        return None
    if any(isinstance(value, np.ma.MaskedArray) for value in values):
        return None
    with np.errstate(all="ignore"):
        found = _value(equation.primitive.name, equation.params, values, output)
    return None if found is None else np.asarray(found).astype(dtype).reshape(output.shape)


def _value(name: str, params: dict, values: list, output) -> Any:
    if name in _UFUNCS:
        return _UFUNCS[name](*values)
    if name in ("convert_element_type", "copy", "stop_gradient", "reshape", "squeeze"):
        return None if params.get("dimensions") is not None and name == "reshape" else values[0]
    if name == "div":
        # Integers are rounded towards zero, as in C.
        quotient = np.trunc if output.dtype.kind in "iu" else np.asarray
        if output.dtype.kind in "iu":
            top, bottom = np.broadcast_arrays(*values)
            safe = np.where(bottom == 0, 1, bottom)
            return np.where(bottom == 0, -1, (top - np.fmod(top, safe)) // safe)
        return quotient(values[0] / values[1])
    if name == "clamp":
        return np.minimum(np.maximum(values[1], values[0]), values[2])
    if name == "select_n":
        which, *cases = np.broadcast_arrays(*values)
        return np.choose(which.astype(int), cases) if len(cases) <= 32 else None
    if name == "iota":
        shape = [1] * len(output.shape)
        shape[params["dimension"]] = -1
        return np.broadcast_to(np.arange(output.shape[params["dimension"]]).reshape(shape), output.shape)
    if name == "broadcast_in_dim":
        shape = [1] * len(output.shape)
        for axis, size in zip(params["broadcast_dimensions"], values[0].shape, strict=True):
            shape[axis] = size
        return np.broadcast_to(values[0].reshape(shape), output.shape)
    if name == "transpose":
        return np.transpose(values[0], params["permutation"])
    if name == "slice":
        strides = params["strides"] or (None,) * values[0].ndim
        return values[0][tuple(map(slice, params["start_indices"], params["limit_indices"], strides))]
    if name == "concatenate":
        return np.concatenate(values, params["dimension"])
    if name == "stack":
        return np.stack(values, params["axis"])
    return None
