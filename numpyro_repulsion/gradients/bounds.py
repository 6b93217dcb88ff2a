"""Indices beyond the ends of arrays, where JAX takes another entry in silence: a model is run with them replaced."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import reduce
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from numpyro_repulsion.gradients.target import Target, compiled, quickly
from numpyro_repulsion.processes import is_spread
from numpyro_repulsion.rows import TAKE_ROWS, Rows, losses

__all__ = ["CALLS", "check_indices", "places"]

#: Primitives that call a program.
CALLS = {"jit", "pjit", "closed_call", "core_call", "remat2", "checkpoint", "custom_jvp_call", "custom_vjp_call"}
#: Rows that are looked at together.
AT_ONCE = 1 << 16
#: Longer plates are looked at in so many places.
MAX_CHUNKS = 1 << 20
#: Two numbers for entries that do not exist: whatever they change depends on such an entry.
FILLS = 0, 1
#: Of an index within an array: the distance beyond its end, the index, and the length of the axis.
WITHIN = np.zeros(3, np.int32)


def check_indices(target: Target, evaluate: Callable, plates: Mapping, sizes: Mapping, dims: Mapping) -> None:
    """Raise ``ValueError`` for indices beyond the end of an axis, over all rows.

    Those that change no density are fine, as of rows that a mask hides. So are those whose treatment the model states,
    as in ``y.at[i].get(mode="clip")``.

    :param evaluate: ``(target, number of a point, rows) -> {site: density, or deterministic value}``.
    :param plates: ``{name: (size, subsample_size)}`` of the subsampled plates.
    :param sizes: the size of each plate.
    :param dims: by site, the dimension of each plate.
    """
    lengths: set[int] = set()

    def run(target, number, rows, fill):
        program, shapes = jax.make_jaxpr(lambda rows: evaluate(target, number, rows), return_shape=True)(rows)
        found, worst = _run(program, jax.tree.leaves(rows), fill, lengths)
        return jax.tree.unflatten(jax.tree.structure(shapes), found), worst

    counts = [-(-size // batch) for size, batch in plates.values()] or [1]
    chunks = np.unique(np.linspace(0, max(counts) - 1, min(max(counts), MAX_CHUNKS)).round().astype(np.int64))
    together = max(1, AT_ONCE // max([batch for _, batch in plates.values()] or [AT_ONCE]))
    chunks = np.resize(chunks, (-(-len(chunks) // together), min(together, len(chunks))))
    # Each plate begins again where it is shorter than the longest.
    starts = {
        name: np.minimum(chunks % count * batch, size - batch).astype(np.int32)
        for (name, (size, batch)), count in zip(plates.items(), counts, strict=False)
    }

    def rows_of(starts):
        return {name: start + jnp.arange(plates[name][1]) for name, start in starts.items()}

    def overruns(target, starts):
        # Nothing but indices is computed: the rest of the program has no use.
        def look(starts):
            return run(target, 0, rows_of(starts), 0)[1]

        return lax.map(jax.vmap(look), starts) if starts else look(starts)

    worst = np.asarray(compiled(overruns, target, quickly())(jax.tree.map(jnp.asarray, starts))).reshape(-1, 3)
    changed = compiled(run, target, quickly())
    for chunk in np.flatnonzero(worst[:, 0])[:20]:
        rows = rows_of({name: jnp.asarray(start.reshape(-1)[chunk]) for name, start in starts.items()})
        found = [[changed(k, rows, fill) for fill in FILLS] for k in (0, 1)]
        # An index that depends on parameters differs from point to point.
        if (np.asarray(found[0][0][1]) != np.asarray(found[1][0][1])).any():
            continue
        moved = [_differ(*(values for values, _ in each)) for each in found]
        for name in moved[0]:
            if (where := moved[0][name] & moved[1][name]).any():
                _, index, length = worst[chunk]
                place = places(where, dims[name], rows, sizes)
                raise ValueError(
                    f"The site '{name}' uses the entry {index} of an axis of length {length}, which does not exist"
                    f"{place and ', in ' + place}; JAX would take another entry in silence. Number "
                    "groups from 0, and make plates as long as the data, `numpyro.plate(name, len(y), ...)`; where an "
                    'end is meant to stand for what is beyond it, write x.at[i].get(mode="clip").'
                )
    _check_negative(target, evaluate, plates, lengths)


def _differ(one, other):
    pairs = {name: (np.asarray(one[name]), np.asarray(other[name])) for name in one}
    return {name: (a != b) & ~((a != a) & (b != b)) for name, (a, b) in pairs.items()}


def places(where: np.ndarray, dims: Mapping[str, int], rows: Mapping, sizes: Mapping[str, int]) -> str:
    """Return in words for which rows of plates the entries of a site are marked; without plates, which entries.

    :param dims: the dimension of each plate.
    :param rows: the numbers of the rows of a plate; without them they are counted.
    :param sizes: the size of each plate.
    """
    found = []
    for plate, dim in dims.items():
        if where.ndim >= -dim and (where.shape[dim] == len(rows[plate]) if plate in rows else where.shape[dim] > 1):
            marked = np.flatnonzero(where.any(tuple(k for k in range(where.ndim) if k != where.ndim + dim)))
            numbers = np.asarray(rows[plate])[marked] if plate in rows else marked
            found.append(f"row {_some(numbers)} of the plate '{plate}' of size {sizes[plate]}")
    if not dims and where.size > 1 == where.ndim:
        found.append(f"entry {_some(np.flatnonzero(where))} of {where.size}")
    return " and ".join(found)


def _some(numbers):
    return ", ".join(map(str, numbers[:5])) + (", ..." if len(numbers) > 5 else "")


class _Moved:
    """An array whose negative numbers are moved up, as it is read."""

    def __init__(self, source: Any, by: int):
        self.source, self.by, self.shape, self.dtype = source, by, source.shape, source.dtype

    def __getitem__(self, rows):
        found = np.asarray(self.source[rows])
        return np.where(found < 0, found + self.by, found)


def _check_negative(target, evaluate, plates, lengths):
    """Raise ``ValueError`` for negative integers in the arguments that count from the end of an axis.

    Such an index is known by its effect: with the length of the axis added, nothing changes.
    """
    given = {"args": target.args, "kwargs": dict(target.kwargs)}
    paths, structure = jax.tree.flatten_with_path(given, is_leaf=lambda leaf: isinstance(leaf, Rows))
    for number, (path, leaf) in enumerate(paths):
        if not len(entries := _negative(leaf)) or losses(leaf):
            continue
        rows = {
            name: jnp.asarray(np.resize(entries, batch) if len(leaf) == size else np.arange(batch))
            for name, (size, batch) in plates.items()
        }

        def run(target, value, number=number, rows=rows):
            leaves = [leaf for _, leaf in paths]
            leaves[number] = value
            given = jax.tree.unflatten(structure, leaves)
            return evaluate(target.with_arguments(given["args"], given["kwargs"]), 0, rows)

        program = compiled(run, target, quickly())
        with suppress(jax.errors.JAXTypeError, jax.errors.JAXIndexError):  # The model needs the values themselves.
            first = program(_moved(leaf, 0))
            for length in sorted(lengths):
                # Another entry must matter, or the effect says nothing.
                if _same(first, program(_moved(leaf, length))) and not _same(first, program(_moved(leaf, length - 1))):
                    raise ValueError(
                        f"The model's {path[0].key}{jax.tree_util.keystr(path[1:])} has negative integers (at "
                        f"{_some(entries)} of its first axis), and uses them as an index into an axis of length "
                        f"{length}: they count from its end, so missing codes are the last group. Leave these rows "
                        f"out, or write {length} - 1 for the last entry."
                    )


def _negative(leaf):
    """Return where along its first axis an argument of signed integers has a negative one."""
    is_array = isinstance(leaf, np.ndarray | jax.Array) and leaf.ndim and not is_spread(leaf)
    if not (is_array or (isinstance(leaf, Rows) and leaf.is_on_host)) or np.dtype(leaf.dtype).kind != "i":
        return ()
    blocks = leaf.blocks() if isinstance(leaf, Rows) else [np.asarray(leaf)]
    return np.flatnonzero(np.concatenate([(block < 0).reshape(len(block), -1).any(1) for block in blocks]))


def _moved(leaf, by):
    return Rows(_Moved(leaf.source, by)) if isinstance(leaf, Rows) else jnp.asarray(_Moved(leaf, by)[:])


def _same(one, other):
    return not any(moved.any() for moved in _differ(one, other).values())


def _run(program, inputs, fill, lengths) -> tuple[list, Any]:
    """Return the results of a jaxpr with ``fill`` for entries that do not exist, and the worst index."""
    jaxpr, worst = getattr(program, "jaxpr", program), [WITHIN]
    values = dict(zip(jaxpr.constvars, getattr(program, "consts", ()), strict=True))
    values |= dict(zip(jaxpr.invars, inputs, strict=True))
    for equation in jaxpr.eqns:
        given = [x.val if hasattr(x, "val") else values[x] for x in equation.invars]
        found, index = _apply(jaxpr, equation, given, fill, lengths)
        worst.append(index)
        values.update(zip(equation.outvars, found, strict=True))
    return [x.val if hasattr(x, "val") else values[x] for x in jaxpr.outvars], reduce(_worse, worst)


def _worse(one, other):
    if one is WITHIN or other is WITHIN:
        return other if one is WITHIN else one
    return jnp.where(one[0] >= other[0], one, other)


def _apply(jaxpr, equation, given, fill, lengths):
    """Return the results of an equation, and its worst index."""
    name, params = equation.primitive.name, equation.params
    nested = next((params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if key in params), None)
    if name in CALLS and nested is not None and len(getattr(nested, "jaxpr", nested).invars) == len(given):
        return _run(nested, given, fill, lengths)
    if name == "scan" and (parts := _scan_parts(params, given)) is not None:
        constants, carry, scanned = parts

        def turn(carry, x):
            found, worst = _run(params["jaxpr"], [*constants, *carry, *x], fill, lengths)
            return found[: len(carry)], (found[len(carry) :], jnp.asarray(worst))

        settings = {key: params[key] for key in ("length", "reverse")}
        carry, (rest, worst) = lax.scan(turn, list(carry), list(scanned), **settings)
        return [*carry, *rest], worst[jnp.argmax(worst[:, 0])] if params["length"] else WITHIN
    if name == "cond":

        def branch(program):
            def taken(*given):
                found, worst = _run(program, given, fill, lengths)
                return found, jnp.asarray(worst)

            return taken

        return lax.switch(given[0], [branch(program) for program in params["branches"]], *given[1:])
    if name == "while":
        first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]

        def goes_on(state):
            return _run(params["cond_jaxpr"], [*given[:first], *state[0]], fill, lengths)[0][0]

        def body(state):
            found, worst = _run(params["body_jaxpr"], [*given[first:second], *state[0]], fill, lengths)
            return found, jnp.asarray(_worse(state[1], worst))

        return lax.while_loop(goes_on, body, (list(given[second:]), jnp.asarray(WITHIN)))
    inputs = given
    if name == TAKE_ROWS.name:  # A host has no rows beyond the end.
        count = params["source"].shape[0]
        inputs = [jnp.clip(given[0], -count, count - 1)]
    variables = {x: value for x, value in zip(equation.invars, inputs, strict=True) if not hasattr(x, "val")}
    alone = jaxpr.replace(constvars=[], invars=list(variables), outvars=equation.outvars, eqns=[equation])
    found = jax.core.eval_jaxpr(alone, (), *variables.values())
    is_of_keys = any(jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in found)
    if is_of_keys or (index := _index(name, params, given)) is None:
        return found, WITHIN
    position, room, length, axes = index
    lengths.update(length)
    exists = ((position >= 0) & (position <= jnp.asarray(room))).all(-1)
    beyond = jnp.maximum(position - jnp.asarray(room), -position)
    place = jnp.unravel_index(jnp.argmax(beyond), beyond.shape) if beyond.size else None
    if place is None:
        return found, WITHIN
    # An index below zero is said as it is, one beyond the end with what a slice would take.
    number = jnp.where(
        position[place] < 0, position[place], position[place] + (jnp.asarray(length) - 1 - jnp.asarray(room))[place[-1]]
    )
    worst = jnp.stack([jnp.maximum(beyond[place], 0), number, jnp.asarray(length)[place[-1]]]).astype(jnp.int32)
    exists = jnp.expand_dims(exists, axes)
    return [jnp.where(exists, x, jnp.asarray(fill).astype(x.dtype)) for x in found], worst


def _index(name, params, given):
    """Return for a primitive that takes entries: indices ``(..., k)``; by axis, the last that exists and its length;

    and the axes of the result that are no axes of the indices. ``None`` where the model states what to do.
    """
    if name == "gather":
        numbers, sizes, mode = params["dimension_numbers"], params["slice_sizes"], str(params["mode"])
        fill = params.get("fill_value")
        # Under `vmap` a slice, which never states anything, becomes a gather that clips.
        clips = "CLIP" in mode and numbers.collapsed_slice_dims
        if clips or ("FILL" in mode and fill is not None and _is_plain(fill)):
            return None
        axes, position, shape = numbers.start_index_map, given[1], given[0].shape
        offset = numbers.offset_dims
    elif name == "dynamic_slice":
        shape, sizes, axes = given[0].shape, params["slice_sizes"], range(len(given) - 1)
        position = jnp.stack([jnp.asarray(x, jnp.int32) for x in given[1:]]) if len(given) > 1 else None
        offset = tuple(range(len(shape)))
    elif name == TAKE_ROWS.name:
        shape, sizes, axes, position = params["source"].shape, (1,), (0,), given[0][..., None]
        offset = tuple(range(given[0].ndim, given[0].ndim + len(shape) - 1))
    else:
        return None
    if position is None or not len(axes):
        return None
    length = tuple(int(shape[k]) for k in axes)
    return position.astype(jnp.int32), tuple(n - sizes[k] for k, n in zip(axes, length, strict=True)), length, offset


def _is_plain(fill):
    return bool(np.isfinite(fill)) and abs(fill) < 2**31 - 1


def _scan_parts(params, inputs):
    """Return what a scan closes over, carries and scans; ``None`` if this version of JAX stores it differently."""
    if "num_consts" in params:
        first = params["num_consts"]
        second = first + params["num_carry"]
        return inputs[:first], inputs[first:second], inputs[second:]
    if "ft_in" in params:  # JAX 0.11 and later
        return tuple(map(list, params["ft_in"].update(inputs).unpack()))
    return None
