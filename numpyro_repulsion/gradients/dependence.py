"""Dependence analysis of a JAX program: its jaxpr is read equation by equation, without running it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_repulsion.gradients.folding import evaluate
from numpyro_repulsion.processes import is_spread
from numpyro_repulsion.rows import TAKE_ROWS

__all__ = ["CALLS", "EQUAL", "OTHER", "POSITION", "Fact", "Overrun", "Reader", "influenced"]

#: What makes an array vary along an axis, as a set: nothing; an unknown cause; or position alone, as in data that were
#: not indexed by rows. Inputs may have other labels.
Kind = frozenset[Any]
EQUAL: Kind = frozenset()
OTHER: Kind = frozenset(["other"])
POSITION: Kind = frozenset(["position"])
#: The largest constant, in entries, of which the entries are compared with each other.
MAX_CONSTANT = 4096

CALLS = {"jit", "pjit", "closed_call", "core_call", "remat2", "checkpoint", "custom_jvp_call", "custom_vjp_call"}
_ENTRYWISE_NAMES = """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp
    convert_element_type copy cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt igamma
    igamma_grad_a igammac imag integer_pow is_finite le lgamma log log1p logistic lt max min mul ne neg nextafter
    not or polygamma pow random_gamma_grad real reduce_precision regularized_incomplete_beta rem round rsqrt
    select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient sub tan
    tanh xor zeta
"""
_ENTRYWISE = frozenset(_ENTRYWISE_NAMES.split())


class Fact(NamedTuple):
    """What is known about an array in a program.

    - **causes** - the labels of the inputs that it depends on.
    - **axes** - what makes it vary along each axis.
    - **value** - its value at the given values of the inputs, if they determine it and it is cheap to compute.
    """

    causes: frozenset
    axes: tuple[Kind, ...]
    value: Any = None

    @classmethod
    def of(cls, shape: tuple[int, ...], causes: Iterable = (), kind: Kind = POSITION, value: Any = None) -> Fact:
        """Return the fact of an array that varies in one way along all axes, except those of length one."""
        return cls(frozenset(causes), tuple(kind if size > 1 else EQUAL for size in shape), value)


class Overrun(NamedTuple):
    """An index beyond the end of an axis, where JAX takes the last entry."""

    causes: frozenset
    largest: int
    length: int


class Reader:
    """Reads JAX programs.

    It follows dependences output by output into nested programs, including loops. With an unknown primitive, each
    output depends on each input.

    - **overruns** - the indices that are too large at the values of the inputs.
    """

    def __init__(self) -> None:
        self.overruns: dict[Overrun, None] = {}

    def read(self, fn: Callable, inputs: Any, facts: Any) -> Any:
        """Return the facts of the outputs of ``fn(*inputs)``, as a pytree of the same structure.

        :param inputs: abstract or concrete arguments.
        :param facts: the facts of their leaves, as a pytree of the same structure.
        """
        program, shapes = jax.make_jaxpr(fn, return_shape=True)(*inputs)
        given = jax.tree.leaves(facts, is_leaf=lambda x: isinstance(x, Fact))
        return jax.tree.unflatten(jax.tree.structure(shapes), self._program(program, given))

    def _program(self, program, inputs):
        """Return the facts of the outputs of a jaxpr, closed or without constants."""
        jaxpr = getattr(program, "jaxpr", program)
        constants = map(_constant, getattr(program, "consts", ()))
        facts = dict(zip(jaxpr.constvars, constants, strict=True)) | dict(zip(jaxpr.invars, inputs, strict=True))

        def look(variable):
            return _constant(variable.val) if hasattr(variable, "val") else facts[variable]

        for equation in jaxpr.eqns:
            found = self._equation(equation, [look(variable) for variable in equation.invars])
            facts.update(zip(equation.outvars, found, strict=True))
        return [look(variable) for variable in jaxpr.outvars]

    def _equation(self, equation, inputs):
        name, params = equation.primitive.name, equation.params
        if name in CALLS:
            program = next((params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if key in params), None)
            if program is not None and len(getattr(program, "jaxpr", program).invars) == len(inputs):
                return self._program(program, inputs)
        if name == "scan" and (parts := _scan_parts(params, inputs)) is not None:
            return self._scan(params["jaxpr"], *parts)
        if name == "while" and "cond_nconsts" in params:
            return self._while(params, inputs)
        if name == "cond" and "branches" in params:
            return self._cond(params["branches"], inputs[0], inputs[1:])
        self._check_indices(equation, inputs)
        causes = frozenset().union(*(fact.causes for fact in inputs), _mixed(equation, inputs))
        values: list[Any] = [None] * len(equation.outvars)
        if len(values) == 1 and all(fact.value is not None for fact in inputs):
            values = [evaluate(equation, [fact.value for fact in inputs])]
        elif name == "concatenate":
            values = [_partly_known(equation, inputs)]
        shapes = [tuple(getattr(variable.aval, "shape", ())) for variable in equation.outvars]
        axes = _axes(equation, inputs, shapes[0], bool(causes)) if len(shapes) == 1 else None
        if axes is None or len(axes) != len(shapes[0]):
            return [Fact.of(shape, causes, OTHER) for shape in shapes]
        axes = tuple(axis if size > 1 else EQUAL for axis, size in zip(axes, shapes[0], strict=True))
        return [Fact(causes, axes, values[0])]

    def _cond(self, branches, which, inputs):
        found, known = [], self.overruns
        taken = known
        chosen = None if which.value is None else int(which.value.clip(0, len(branches) - 1))
        for number, branch in enumerate(branches):
            self.overruns = dict(known)
            found.append(self._program(branch, inputs))
            # A branch that is not taken may guard against its own index, so only the taken one counts.
            taken = self.overruns if number == chosen else taken
        self.overruns = taken
        return [_joined(facts, which.causes) for facts in zip(*found, strict=True)]

    def _scan(self, jaxpr, consts, carry, scanned):
        # The last scanned entry represents all, because the last row is the one that may not exist.
        slices = [
            Fact(fact.causes, fact.axes[1:], None if fact.value is None or not len(fact.value) else fact.value[-1])
            for fact in scanned
        ]
        carry, found = self._settle(lambda carry: self._program(jaxpr, [*consts, *carry, *slices]), carry)
        return carry + [Fact(fact.causes, (OTHER, *fact.axes)) for fact in found[len(carry) :]]

    def _while(self, params, inputs):
        first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        of_cond, of_body, carry = inputs[:first], inputs[first:second], inputs[second:]
        carry, _ = self._settle(lambda carry: self._program(params["body_jaxpr"], [*of_body, *carry]), carry)
        (test,) = self._program(params["cond_jaxpr"], [*of_cond, *carry])
        # Solvers share tolerances and lengths of steps, which hardly matter.
        causes = [frozenset(label for label in fact.causes | test.causes if label[0] != "mixed") for fact in carry]
        return [Fact(own, fact.axes) for own, fact in zip(causes, carry, strict=True)]

    def _settle(self, body, carry):
        """Return the facts of the loop carry, joined over its turns, and those of the body's outputs."""
        carry = [_joined([fact]) for fact in carry]
        while True:
            found = body(carry)
            joined = [_joined(pair) for pair in zip(carry, found[: len(carry)], strict=True)]
            if joined == carry:
                return carry, found
            carry = joined

    def _check_indices(self, equation, inputs):
        name, params = equation.primitive.name, equation.params
        if name == "gather":
            if _asks_for_filling(params):
                return
            shape, sizes = equation.invars[0].aval.shape, params["slice_sizes"]
            dims, index = params["dimension_numbers"].start_index_map, inputs[1]
            found = [] if index.value is None else [(dim, index, index.value[..., k]) for k, dim in enumerate(dims)]
        elif name == "dynamic_slice":
            shape, sizes = equation.invars[0].aval.shape, params["slice_sizes"]
            found = [(dim, fact, fact.value) for dim, fact in enumerate(inputs[1:]) if fact.value is not None]
        elif name == TAKE_ROWS.name:
            shape, sizes = params["source"].shape, (1,)
            found = [] if inputs[0].value is None else [(0, inputs[0], inputs[0].value)]
        else:
            return
        for dim, fact, value in found:
            if fact.causes and value.size and (largest := np.ma.max(value)) is not np.ma.masked:
                last = int(largest) + sizes[dim] - 1
                if last >= shape[dim]:
                    self.overruns[Overrun(fact.causes, last, shape[dim])] = None


def influenced(fn: Callable, cause, *rest) -> list[bool]:
    """Return for each output of ``fn(cause, *rest)`` whether it depends on ``cause``, by the program's structure."""
    facts = [
        [Fact.of(jnp.shape(leaf), ["cause"] if is_cause else ()) for leaf in jax.tree.leaves(tree)]
        for tree, is_cause in ((cause, True), (rest, False))
    ]
    found = Reader().read(fn, (cause, *rest), facts)
    return [bool(fact.causes) for fact in jax.tree.leaves(found, is_leaf=lambda x: isinstance(x, Fact))]


def _scan_parts(params, inputs):
    """Return what a scan closes over, carries and scans; ``None`` if this version of JAX stores it differently."""
    if "num_consts" in params:
        first = params["num_consts"]
        second = first + params["num_carry"]
        return inputs[:first], inputs[first:second], inputs[second:]
    if "ft_in" in params:  # JAX 0.11 and later
        return tuple(map(list, params["ft_in"].update(inputs).unpack()))
    return None


def _constant(value):
    shape = tuple(jnp.shape(value))
    is_here = not isinstance(value, jax.core.Tracer) and not is_spread(value)
    is_known = is_here and np.prod(shape) <= MAX_CONSTANT
    if not (is_known and getattr(getattr(value, "dtype", np.result_type(type(value))), "kind", "V") in "biuf"):
        return Fact.of(shape)
    value = np.asarray(value)
    kinds = (EQUAL if (value == value.take([0], axis)).all() else POSITION for axis in range(value.ndim) if value.size)
    return Fact(frozenset(), tuple(kinds) if value.size else (EQUAL,) * value.ndim, value)


def _joined(facts, causes=frozenset()):
    """Return the fact of an array that is one of several."""
    axes = tuple(EQUAL.union(*kinds) for kinds in zip(*(fact.axes for fact in facts), strict=True))
    return Fact(causes.union(*(fact.causes for fact in facts)), axes)


def _partly_known(equation, inputs):
    """Concatenate several indices, and mask those that are unknown."""
    if all(fact.value is None for fact in inputs):
        return None
    parts = [
        np.ma.masked_all(variable.aval.shape, int) if fact.value is None else np.ma.asarray(fact.value)
        for variable, fact in zip(equation.invars, inputs, strict=True)
    ]
    return np.ma.concatenate(parts, equation.params["dimension"])


def _asks_for_filling(params):
    """Whether a gather itself specifies the values of entries beyond the end."""
    mode, fill = str(params["mode"]), params.get("fill_value")
    if "CLIP" in mode:
        # Under `vmap` a slice of one entry, which never specifies it, becomes a gather that clips.
        return bool(params["dimension_numbers"].collapsed_slice_dims)
    return "FILL" in mode and fill is not None and bool(np.isfinite(fill)) and abs(fill) < 2**31 - 1


def _axes(equation, inputs, shape, depends):
    """Return how the output of a primitive varies along its axes; ``None`` if that is unknown."""
    name, params = equation.primitive.name, equation.params
    if name in _ENTRYWISE:
        arrays = [fact.axes for fact in inputs if fact.axes]
        return tuple(EQUAL.union(*kinds) for kinds in zip(*arrays, strict=True)) if arrays else ()
    if name == "iota":
        return tuple(POSITION if axis == params["dimension"] else EQUAL for axis in range(len(shape)))
    if name == "gather":
        return _gathered(equation, inputs, shape, depends)
    if name == TAKE_ROWS.name:
        return [_taken(kind, depends) for kind in inputs[0].axes] + [POSITION] * (len(shape) - len(inputs[0].axes))
    if not inputs:
        return None
    axes, old = inputs[0].axes, equation.invars[0].aval.shape
    if name == "broadcast_in_dim":
        found = [EQUAL] * len(shape)
        for axis, kind, size in zip(params["broadcast_dimensions"], axes, old, strict=True):
            found[axis] = kind if size == shape[axis] else EQUAL
        return found
    if name == "reshape" and params.get("dimensions") is None:
        return _reshaped(axes, old, shape)
    if name == "squeeze":
        gone = {axis % len(old) for axis in params["dimensions"]}
        return [kind for axis, kind in enumerate(axes) if axis not in gone]
    if name == "transpose":
        return [axes[axis] for axis in params["permutation"]]
    if name == "slice":
        return axes
    if name == "dynamic_slice":
        moved = any(fact.causes for fact in inputs[1:])
        return [OTHER if moved and size < full else kind for kind, size, full in zip(axes, shape, old, strict=True)]
    if name in ("concatenate", "stack"):
        along = params.get("dimension", params.get("axis"))
        found = [EQUAL.union(*kinds) for kinds in zip(*(fact.axes for fact in inputs), strict=True)]
        return [*found[:along], OTHER, *found[along + (name == "concatenate") :]]
    if name.startswith(("reduce_", "arg")) and "axes" in params:
        return [kind for axis, kind in enumerate(axes) if axis not in params["axes"]]
    if name == "dot_general":
        (summed, other_summed), (batch, other_batch) = params["dimension_numbers"]
        other = inputs[1].axes
        found = [axes[i] | other[j] for i, j in zip(batch, other_batch, strict=True)]
        found += [kind for axis, kind in enumerate(axes) if axis not in (*summed, *batch)]
        return found + [kind for axis, kind in enumerate(other) if axis not in (*other_summed, *other_batch)]
    return None


def _mixed(equation, inputs):
    """Return labels ``("mixed", plate)`` if a primitive makes one number of several rows of a minibatch."""
    name, params, summed = equation.primitive.name, equation.params, []
    if name in ("reduce_sum", "reduce_prod", "cumsum", "cumprod", "cumlogsumexp"):
        summed = [inputs[0].axes[axis] for axis in params.get("axes", [params.get("axis")])]
    elif name == "dot_general":
        summed = [fact.axes[k] for fact, axes in zip(inputs, params["dimension_numbers"][0], strict=True) for k in axes]
    return [("mixed", label[1]) for label in EQUAL.union(*summed) if isinstance(label, tuple) and label[0] == "rows"]


def _gathered(equation, inputs, shape, depends):
    numbers, sizes = equation.params["dimension_numbers"], equation.params["slice_sizes"]
    operand, full = inputs[0].axes, equation.invars[0].aval.shape
    gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    kept = iter(dim for dim in range(len(full)) if dim not in gone)
    along = iter(inputs[1].axes[:-1])
    found = []
    for axis in range(len(shape)):
        if axis in numbers.offset_dims:
            dim = next(kept)
            found.append(operand[dim] if sizes[dim] == full[dim] else OTHER)
        else:
            found.append(_taken(next(along), depends))
    return found


def _taken(kind, depends):
    """Return how entries vary that are taken at indices of a kind."""
    # Entries taken at positions may be rows, as in `logits[arange(n), label[i]]`.
    return (kind - POSITION) | OTHER if depends else kind


def _reshaped(axes, old, new):
    """Return the axes of a reshaped array: unchanged axes, and the joint variation of split or merged ones."""
    found: list[Kind] = []
    i = j = 0
    while i < len(old) or j < len(new):
        first, last, size, wanted = i, j, 1, 1
        if i < len(old):
            size, i = old[i], i + 1
        if j < len(new):
            wanted, j = new[j], j + 1
        while size != wanted:
            if size < wanted and i < len(old):
                size, i = size * old[i], i + 1
            elif j < len(new):
                wanted, j = wanted * new[j], j + 1
            else:
                return None
        block = [kind for kind, length in zip(axes[first:i], old[first:i], strict=True) if length > 1]
        lengths = [length for length in new[last:j] if length > 1]
        kind = EQUAL if all(kind == EQUAL for kind in block) else OTHER  # Merged or split axes have no single kind.
        if len(block) == len(lengths) == 1:
            kind = block[0]
        found += [kind] * (j - last)
    return found
