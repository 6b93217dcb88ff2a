"""What is wrong with a model on some of its rows: indices of entries that do not exist, densities that are not finite.

Where an index lies beyond the end of an array, JAX takes another entry in silence. A model is run with such entries
replaced by numbers: whatever these change depends on an entry that does not exist.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import reduce
import math
from typing import Any

import jax
from jax import lax, random
import jax.numpy as jnp
import numpy as np

from numpyro.infer import init_to_sample, init_to_uniform

from numpyro_repulsion.gradients.target import FunctionTarget, Particle, Target, compiled, quickly
from numpyro_repulsion.processes import is_spread
from numpyro_repulsion.rows import TAKE_ROWS, Rows, losses

#: Primitives that call a program.
CALLS = {"jit", "pjit", "closed_call", "core_call", "remat2", "checkpoint", "custom_jvp_call", "custom_vjp_call"}
#: Of an index within an array: the distance beyond its end, the index, and the length of the axis.
WITHIN = np.zeros(3, np.int32)
#: Minibatches that are looked at, at most; of more pairs of plates that meet, all rows without all pairs.
MAX_MINIBATCHES = 1 << 20
#: Rows that are looked at one by one, and those of them that are looked at with further draws.
MAX_ROWS, MAX_DOUBTFUL = 10_000, 200


def check_indices(target: Any) -> None:
    """Raise ``ValueError`` for indices beyond the end of an axis, over all rows.

    Those that change no density are fine, as of rows that a mask hides. So are those whose treatment the model states,
    as in ``y.at[i].get(mode="clip")``.
    """
    lengths: set[int] = set()
    starts = _minibatches(target, pairs=False)
    largest = max([batch for _, batch in target.plates.values()], default=1)
    starts = _in_groups(starts, max(1, (1 << 16) // largest))

    def run(target, number, rows, fill):
        program, shapes = jax.make_jaxpr(lambda rows: target.at_point(number, rows), return_shape=True)(rows)
        found, worst = _run(program, jax.tree.leaves(rows), fill, lengths)
        return jax.tree.unflatten(jax.tree.structure(shapes), found), worst

    def overruns(target, starts):
        # Nothing but indices is computed: the rest of the program has no use.
        return _for_each(lambda start: run(target, 0, _rows(target, start), 0)[1], starts)

    worst = np.asarray(compiled(overruns, target, quickly())(starts)).reshape(-1, 3)
    changed = compiled(run, target, quickly())
    for chunk in np.flatnonzero(worst[:, 0])[:20]:
        rows = _rows(target, {name: jnp.asarray(start.reshape(-1)[chunk]) for name, start in starts.items()})
        found = [[changed(k, rows, fill) for fill in (0, 1)] for k in (0, 1)]
        # An index that depends on parameters differs from point to point.
        if (np.asarray(found[0][0][1]) != np.asarray(found[1][0][1])).any():
            continue
        moved = [_differ(*(values for values, _ in each)) for each in found]
        for name in moved[0]:
            if (where := moved[0][name] & moved[1][name]).any():
                _, index, length = worst[chunk]
                place = _places(target, where, target.dims[name], rows)
                raise ValueError(
                    f"The site '{name}' uses the entry {index} of an axis of length {length}, which does not "
                    f"exist{place and ', in ' + place}; JAX would silently use another entry. Number groups from 0, "
                    "and make plates as long as the data, `numpyro.plate(name, len(y), ...)`; if the last entry "
                    'should stand for those beyond it, write x.at[i].get(mode="clip").'
                )
    _check_negative(target, lengths)


def _minibatches(target, pairs):
    """Return by plate the first rows of minibatches, ``(T,)``, that cover all rows, and all pairs of plates that meet.
    Plates go on together; shorter ones begin again."""
    found: dict = {}
    for group in target.crossed_plates() if pairs else [[name] for name in target.plates]:
        first = [np.minimum(np.arange(0, n, batch), n - batch) for n, batch in (target.plates[name] for name in group)]
        if math.prod(map(len, first)) <= MAX_MINIBATCHES:
            first = [x.ravel() for x in np.meshgrid(*first, indexing="ij")]
        found |= dict(zip(group, first, strict=True))
    count = max(map(len, found.values()), default=0)
    found = {name: np.resize(x, count).astype(np.int32) for name, x in found.items()}
    if pairs or count <= MAX_MINIBATCHES:
        return found
    some = np.linspace(0, count - 1, MAX_MINIBATCHES).round().astype(np.int64)
    return {name: x[some] for name, x in found.items()}


def _in_groups(starts, together):
    """Return ``(T,)`` as ``(T / n, n)`` for groups of n, the last of which is filled: one program serves all."""
    count = len(next(iter(starts.values()), ()))
    return {name: np.resize(x, (-(-count // together), min(count, together))) for name, x in starts.items()}


def _for_each(look, starts):
    """Return what a function finds for the minibatches of each group; without plates, for the model."""
    return lax.map(jax.vmap(look), starts) if starts else look({})


def _rows(target, starts, step=1):
    return {name: start + step * jnp.arange(target.plates[name][1]) for name, start in starts.items()}


def _differ(one, other):
    pairs = {name: (np.asarray(one[name]), np.asarray(other[name])) for name in one}
    return {name: (a != b) & ~((a != a) & (b != b)) for name, (a, b) in pairs.items()}


def _places(target: Any, where: np.ndarray, dims: Mapping[str, int], rows: Mapping) -> str:
    """Return in words for which rows of plates, of these dimensions, the entries of a site are marked; without plates,
    which entries. The rows of a plate have these numbers, or are counted."""
    found = []
    for plate, dim in dims.items():
        if where.ndim >= -dim and (where.shape[dim] == len(rows[plate]) if plate in rows else where.shape[dim] > 1):
            marked = np.flatnonzero(where.any(tuple(k for k in range(where.ndim) if k != where.ndim + dim)))
            numbers = np.asarray(rows[plate])[marked] if plate in rows else marked
            found.append(f"row {_some(numbers)} of the plate '{plate}' of size {target.plate_sizes[plate]}")
    if not dims and where.size > 1 == where.ndim:
        found.append(f"entry {_some(np.flatnonzero(where))} of {where.size}")
    return " and ".join(found)


def _some(numbers):
    return ", ".join(map(str, numbers[:5])) + (", ..." if len(numbers) > 5 else "")


# --- Negative integers, which count from the end of an axis. ---


class _Moved:
    """An array whose negative numbers are moved up, as it is read."""

    def __init__(self, source, by):
        self.source, self.by, self.shape, self.dtype = source, by, source.shape, source.dtype

    def __getitem__(self, rows):
        found = np.asarray(self.source[rows])
        return np.where(found < 0, found + self.by, found)


def _check_negative(target, lengths):
    """Raise ``ValueError`` for negative integers in the arguments that count from the end of an axis: nothing changes
    with its length added."""
    given = {"args": target.args, "kwargs": dict(target.kwargs)}
    paths, structure = jax.tree.flatten_with_path(given, is_leaf=lambda leaf: isinstance(leaf, Rows))
    for number, (path, leaf) in enumerate(paths):
        if not len(entries := _negative(leaf)) or losses(leaf):
            continue
        rows = {
            name: jnp.asarray(np.resize(entries, batch) if len(leaf) == size else np.arange(batch))
            for name, (size, batch) in target.plates.items()
        }

        def run(target, value, number=number, rows=rows):
            leaves = [value if k == number else leaf for k, (_, leaf) in enumerate(paths)]
            given = jax.tree.unflatten(structure, leaves)
            return target.with_arguments(given["args"], given["kwargs"]).at_point(0, rows)

        program = compiled(run, target, quickly())
        with suppress(jax.errors.JAXTypeError, jax.errors.JAXIndexError):  # The model needs the values themselves.
            first = program(_moved(leaf, 0))
            for length in sorted(lengths):
                # Another entry must matter, or the effect says nothing.
                if _same(first, program(_moved(leaf, length))) and not _same(first, program(_moved(leaf, length - 1))):
                    raise ValueError(
                        f"The model's {path[0].key}{jax.tree_util.keystr(path[1:])} has negative integers (at "
                        f"{_some(entries)} of its first axis), and uses them as an index into an axis of length "
                        f"{length}: they count from its end, so missing codes become the last group. Leave these rows "
                        f"out, or write {length} - 1 for the last entry."
                    )


def _moved(leaf, by):
    return Rows(_Moved(leaf.source, by)) if isinstance(leaf, Rows) else jnp.where(leaf < 0, leaf + by, leaf)


def _same(one, other):
    return not any(moved.any() for moved in _differ(one, other).values())


def _negative(leaf):
    """Return where along its first axis an argument of signed integers has a negative one."""
    is_array = isinstance(leaf, np.ndarray | jax.Array) and leaf.ndim and not is_spread(leaf)
    if not (is_array or (isinstance(leaf, Rows) and leaf.is_on_host)) or np.dtype(leaf.dtype).kind != "i":
        return ()
    blocks = leaf.blocks() if isinstance(leaf, Rows) else [np.asarray(leaf)]
    return np.flatnonzero(np.concatenate([(block < 0).reshape(len(block), -1).any(1) for block in blocks]))


# --- A program with its missing entries replaced. ---


def program_of(equation: Any) -> Any:
    """Return the program that an equation of a jaxpr runs on its inputs; ``None`` if it runs none on just these."""
    found = next((equation.params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if key in equation.params), None)
    is_of_these = found is not None and len(getattr(found, "jaxpr", found).invars) == len(equation.invars)
    return found if is_of_these else None


def _run(program, inputs, fill, lengths):
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

    def run(program, *given):
        found, worst = _run(program, given, fill, lengths)
        return found, jnp.asarray(worst)

    if name in CALLS and (program := program_of(equation)) is not None:
        return _run(program, given, fill, lengths)
    if name == "scan" and (parts := _scan_parts(params, given)) is not None:
        constants, carry, scanned = parts

        def turn(carry, x):
            found, worst = run(params["jaxpr"], *constants, *carry, *x)
            return found[: len(carry)], (found[len(carry) :], worst)

        settings = {key: params[key] for key in ("length", "reverse")}
        carry, (rest, worst) = lax.scan(turn, list(carry), list(scanned), **settings)
        return [*carry, *rest], worst[jnp.argmax(worst[:, 0])] if params["length"] else WITHIN
    if name == "cond":
        branches = [lambda *given, program=program: run(program, *given) for program in params["branches"]]
        return lax.switch(given[0], branches, *given[1:])
    if name == "while":
        first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]

        def goes_on(state):
            return run(params["cond_jaxpr"], *given[:first], *state[0])[0][0]

        def body(state):
            found, worst = run(params["body_jaxpr"], *given[first:second], *state[0])
            return found, _worse(state[1], worst)

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
    room, length = jnp.asarray(room), jnp.asarray(length)
    beyond = jnp.maximum(position - room, -position)
    if not beyond.size:
        return found, WITHIN
    place = jnp.unravel_index(jnp.argmax(beyond), beyond.shape)
    # An index below zero is said as it is, one beyond the end with what a slice would take.
    number = position[place] + jnp.where(position[place] < 0, 0, (length - 1 - room)[place[-1]])
    worst = jnp.stack([jnp.maximum(beyond[place], 0), number, length[place[-1]]]).astype(jnp.int32)
    exists = jnp.expand_dims((beyond <= 0).all(-1), axes)
    return [jnp.where(exists, x, jnp.asarray(fill).astype(x.dtype)) for x in found], worst


def _index(name, params, given):
    """Return the indices ``(..., k)`` of a primitive that takes entries, by axis the last that exists and its length,
    and the axes of the result that are no axes of the indices; ``None`` where the model states what to do."""
    position = None
    if name == "gather":
        numbers, sizes, mode = params["dimension_numbers"], params["slice_sizes"], str(params["mode"])
        fill = params.get("fill_value")
        # Under `vmap` a slice, which never states anything, becomes a gather that clips.
        clips = "CLIP" in mode and numbers.collapsed_slice_dims
        if clips or ("FILL" in mode and fill is not None and np.isfinite(fill) and abs(fill) < 2**31 - 1):
            return None
        shape, axes, position, offset = given[0].shape, numbers.start_index_map, given[1], numbers.offset_dims
    elif name == "dynamic_slice" and len(given) > 1:
        shape, sizes, axes, offset = given[0].shape, params["slice_sizes"], range(len(given) - 1), range(len(given) - 1)
        position = jnp.stack([jnp.asarray(x, jnp.int32) for x in given[1:]])
    elif name == TAKE_ROWS.name:
        shape, sizes, axes, position = params["source"].shape, (1,), (0,), given[0][..., None]
        offset = range(given[0].ndim, given[0].ndim + len(shape) - 1)
    if position is None or not len(axes):
        return None
    length = tuple(int(shape[k]) for k in axes)
    room = tuple(n - sizes[k] for k, n in zip(axes, length, strict=True))
    return position.astype(jnp.int32), room, length, tuple(offset)


def _scan_parts(params, inputs):
    """Return what a scan closes over, carries and scans; ``None`` if this version of JAX stores it differently."""
    if "num_consts" in params:
        first = params["num_consts"]
        second = first + params["num_carry"]
        return inputs[:first], inputs[first:second], inputs[second:]
    if "ft_in" in params:  # JAX 0.11 and later
        return tuple(map(list, params["ft_in"].update(inputs).unpack()))
    return None


# --- Densities that are not finite. ---


def is_finite_on_all_rows(target: Target, z: Particle) -> bool:
    """Whether U and ∇U are finite at a particle for minibatches that cover all rows; true where that is unknown."""

    def look(target, z, starts):
        # U alone would not do: to NumPyro's Bernoulli distribution a NaN among its logits is a likelihood of 1.
        def each(start):
            return _is_finite(lambda z: target.potential_energy(z, _rows(target, start), random.key(0)), z)

        return jnp.all(_for_each(each, starts))

    with jax.debug_nans(False):
        found = compiled(look, target, quickly())(z, _in_groups(_minibatches(target, pairs=True), 20))
    return isinstance(found, jax.core.Tracer) or bool(found)


def sites_not_finite(target: Target, z: Particle, *, doubtful: bool = False) -> list[str]:
    """Return, in words, the sites whose log density, or its gradient, is finite at none of some particles, and where.

    :param z: the particles, each leaf with a leading axis of them.
    :param doubtful: whether to leave out rows with finite densities at draws from the prior or around zero: there the
        particles have had bad luck.
    """
    found: list[str] = []
    if isinstance(target, FunctionTarget):
        return found
    model: Any = target
    # Equal rows do not show in the usage.
    used = {name: model.usage.rows[name] | around for name, around in model.subsampled.items()}
    names = {name: [plate for plate in model.plates if plate in plates] for name, plates in used.items()}
    if model.discrete:  # Sums over them have no parts.
        names = {"": [*model.plates]}
    with jax.debug_nans(False):
        for name, plates in names.items():
            if plates and (rows := _rows_not_finite(model, name, plates, z, doubtful)):
                found.append(f"'{name}' ({rows})" if name else rows)
        if model.discrete or found or doubtful:
            return found
        run = compiled(lambda target, z, rows: jax.vmap(target.at_point, (0, None))(z, rows), model, quickly())
        values = run(z, model.first_rows)
    for name, plates in names.items():
        if (bad := ~np.isfinite(np.asarray(values[name])).any(0)).any():
            where = "" if plates else _places(model, bad, model.dims[name], {})
            found.append(f"'{name}'" + (f" ({where})" if where else ""))
    return found


def _is_finite(function: Callable, z: Particle) -> jax.Array:
    """Return whether a function and its gradient are finite."""
    value, gradient = jax.value_and_grad(function)(z)
    return jnp.isfinite(value) & jnp.stack([jnp.isfinite(x).all() for x in jax.tree.leaves(gradient)]).all()


def _rows_not_finite(target, name, plates, z, doubtful):
    """Return, in words, the rows of a site with which its log density or the gradient is not finite at any particle."""

    def density(target, z, rows):
        # With a name of no site, of all.
        return jnp.sum(target.at_point(z, rows)[name]) if name else target.potential_energy(z, rows, random.key(0))

    def look(target, z, chosen):
        def each(chosen):
            rows = dict(target.first_rows)
            for plate, (first, step) in chosen.items():
                rows |= _rows(target, {plate: first}, step)
            return ~jax.vmap(lambda z: _is_finite(lambda z: density(target, z, rows), z))(z).any()

        return lax.map(each, chosen)

    is_bad = compiled(look, target, quickly())

    # Minibatches are chosen by plate: their first rows, and the steps from one row to the next.
    def bad(chosen, limit, z=z):
        marked = np.flatnonzero(np.asarray(is_bad(z, jax.tree.map(jnp.asarray, chosen))))[:limit]
        return {plate: (first[marked], step[marked]) for plate, (first, step) in chosen.items()}

    starts = _minibatches(target, pairs=True)
    limit = max(20, MAX_ROWS // max(target.plates[plate][1] for plate in plates))
    chosen = bad({plate: (starts[plate], np.ones_like(starts[plate])) for plate in plates}, limit)
    named: list[str] = []
    for plate in plates:
        batch = target.plates[plate][1]
        # Each row alone, as often as a minibatch has rows.
        alone = {name: (np.repeat(first, batch), np.repeat(step, batch)) for name, (first, step) in chosen.items()}
        rows = (alone[plate][0].reshape(-1, batch) + np.arange(batch, dtype=np.int32)).ravel()
        alone[plate] = rows, np.zeros_like(rows)
        if not len(rows):
            return ""
        found = bad(alone, MAX_ROWS)
        # With all rows of one plate, it is those of another.
        if len(found[plate][0]) < len(rows) or (plate == plates[-1] and not named):
            chosen, named = found, [*named, plate]
    if doubtful:
        few = {name: (first[:MAX_DOUBTFUL], step[:MAX_DOUBTFUL]) for name, (first, step) in chosen.items()}
        chosen = bad(few, MAX_DOUBTFUL, _draws(target))
    numbers = {plate: np.unique(chosen[plate][0]) for plate in named}
    parts = (
        _places(target, np.ones(len(numbers[plate]), bool), {plate: -1}, numbers)
        for plate in named
        if len(numbers[plate])
    )
    return " and ".join(parts)


def _draws(target):
    """Return draws from the prior, and around zero."""

    def draw(target, keys):
        return [jax.vmap(lambda key, by=by: target.draw(key, by))(keys) for by in (init_to_sample, init_to_uniform)]

    both = compiled(draw, target, quickly())(random.split(random.key(0), 50))
    return jax.tree.map(lambda *x: jnp.concatenate(x), *both)
