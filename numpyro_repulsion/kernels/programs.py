"""Programs outside of NumPyro's loop: compiled once for all data of the same shapes, with options of their own."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar
import weakref

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from numpyro_repulsion.gradients import Gradient, Target, is_traced, quickly
from numpyro_repulsion.kernels.bound import BoundSampler, Settings
from numpyro_repulsion.layout import place_everywhere

#: How many of the kernels in use last keep their programs. JAX and NumPyro keep every kernel that has run, and XLA
#: takes hundreds of memory maps for its programs, of which Linux allows a process 65,530.
NUM_KEPT = 8


def compiler_options(bound: BoundSampler, num_updates: int, num_particles: int, dimension: int) -> dict[str, Any]:
    """Return XLA's options for a program that makes updates, from shapes alone, so that a resumed run has the same.

    On CPUs the fusion emitters double the time of compilation and gain nothing in these programs. Without optimization
    compilation takes a third, and updates run up to ten times as long, which pays where there are few of them.
    """
    if jax.default_backend() != "cpu":
        return {}
    target = bound.target
    batches = bound.gradient.batches(target)
    share = min((batches[name] / size for name, (size, _) in target.plates.items()), default=1.0)
    more = max((batches[name] / size for name, (_, size) in target.plates.items()), default=1.0)
    leaves = jax.tree.leaves((target.args, dict(target.kwargs)))
    rows = max((np.shape(leaf)[0] for leaf in leaves if np.ndim(leaf)), default=0)
    # Products of matrices are as fast without optimization, so their entries hardly count.
    terms = target.work * max(share * rows, more * target.num_terms) + dimension * min(dimension, 100) / 20
    options = quickly()
    # So many terms take less time in two runs without optimization than the optimizing takes: these are equal at about
    # 3e7 to 4e7 in logistic and probit regressions, 1.5e8 in Gaussian ones, and 1.5e7 in negative binomial ones.
    if bound.kernel._num_runs * num_updates * num_particles * terms < 2.5e7:
        return options
    return {name: value for name, value in options.items() if name != "xla_backend_optimization_level"}


@dataclass(frozen=True)
class _Static:
    """The static input of a program."""

    settings: Hashable
    treedef: jax.tree_util.PyTreeDef
    is_array: tuple[bool, ...]
    others: tuple  # the leaves of the model's arguments that are not arrays
    structure: Hashable
    gradient: Gradient
    #: Without arguments, so that it keeps no data; its structure stands for it in comparisons.
    target: Target = field(compare=False)


class Programs:
    """The compiled functions ``(bound, settings, *arrays)`` of one kernel, with the model's arguments as inputs.

    A model that needs the values of its arguments, and not only their shapes, has them in its programs. The programs of
    a kernel that was not used for a while are dropped, and compiled again if they are needed. What a function returns
    is placed on all devices if these belong to several processes.
    """

    _in_use: ClassVar[list[weakref.ref[Programs]]] = []

    def __init__(self, kernel: Settings):
        self._kernel = kernel
        self._forget()

    def _forget(self):
        self._compiled: dict[tuple, Callable] = {}
        self._concrete: dict[Callable, tuple[tuple, Callable]] = {}
        self._need_values: set[tuple[Callable, _Static]] = set()

    def __call__(
        self, function: Callable, bound: BoundSampler, settings: Hashable, *arrays: Any, options: dict[str, Any]
    ) -> Any:
        if is_traced():
            return place_everywhere(function(bound, settings, *arrays))
        self._remember()
        leaves, treedef = jax.tree.flatten((bound.target.args, dict(bound.target.kwargs)))
        if "is_array" not in bound.known:
            bound.known["is_array"] = tuple(map(_may_be_input, leaves))
        is_array = bound.known["is_array"]
        data = [leaf for leaf, yes in zip(leaves, is_array, strict=True) if yes]
        others = tuple(leaf for leaf, yes in zip(leaves, is_array, strict=True) if not yes)
        target = bound.target.with_arguments((), {})
        static = _Static(settings, treedef, is_array, others, target.structure, bound.gradient, target)
        key, is_hashable = tuple(options.items()), True
        try:
            hash(static)
        except TypeError:
            is_hashable = False
        if is_hashable and (function, static) not in self._need_values:
            if (function, key) not in self._compiled:
                on_arrays = partial(self._on_arrays, function)
                self._compiled[function, key] = jax.jit(on_arrays, static_argnums=0, compiler_options=options)
            try:
                return self._compiled[function, key](static, data, *arrays)
            except (jax.errors.JAXTypeError, jax.errors.JAXIndexError):
                self._need_values.add((function, static))
        known = self._concrete.get(function)
        if known is None or known[0] != (settings, bound, key):
            program = jax.jit(partial(self._concretely, function, bound, settings), compiler_options=options)
            self._concrete[function] = known = (settings, bound, key), program
        return known[1](*arrays)

    def _remember(self):
        """Count this kernel as the one in use last, and drop the programs of the oldest."""
        others = [known for known in self._in_use if known() not in (None, self)]
        for known in others[: -NUM_KEPT + 1]:
            if (programs := known()) is not None:
                programs._forget()
        self._in_use[:] = [*others[-NUM_KEPT + 1 :], weakref.ref(self)]

    def _on_arrays(self, function, static, data, *arrays):
        found, others = iter(data), iter(static.others)
        leaves = [next(found) if yes else next(others) for yes in static.is_array]
        args, kwargs = jax.tree.unflatten(static.treedef, leaves)
        bound = BoundSampler(self._kernel, static.target.with_arguments(args, kwargs), static.gradient)
        return self._concretely(function, bound, static.settings, *arrays)

    def _concretely(self, function, bound, settings, *arrays):
        return jax.tree.map(unweakened, place_everywhere(function(bound, settings, *arrays)))


def unweakened(x: Any) -> jax.Array:
    """Return an array without weak type, so that no other program is compiled for both."""
    x = jnp.asarray(x)
    return x if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else lax.convert_element_type(x, x.dtype)


def _may_be_input(leaf):
    """Return whether a model computes the same with a leaf as an input of its program as with its value.

    With arrays of NumPy it may compute in double precision, as in ``(t - t.mean()) / t.std()`` of times in seconds, and
    inputs are narrowed.
    """
    if not isinstance(leaf, np.ndarray):
        return isinstance(leaf, jax.Array)
    narrow = jax.dtypes.canonicalize_dtype(leaf.dtype)
    if leaf.dtype.kind not in "biufc" or narrow == leaf.dtype:
        return leaf.dtype.kind in "biufc"
    known = np.where(np.isfinite(leaf), leaf, 0)
    with np.errstate(all="ignore"):
        rounding = np.abs(known.astype(narrow).astype(leaf.dtype) - known)
    spread = known.std(0) if leaf.ndim and leaf.size else 0.0
    varies = spread > 1e-12 * np.abs(known)  # but for the rounding of a mean
    return bool((rounding <= 1e-6 * np.where(varies, spread, np.abs(known))).all())
