"""A kernel bound to the arguments of its model: the static parts of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
import hashlib
from typing import Protocol

import jax
from jax import lax, random
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from numpyro_repulsion.digests import digest, digest_of_program
from numpyro_repulsion.dynamics import Dynamics
from numpyro_repulsion.gradients import FunctionTarget, Gradient, ModelTarget, Particle, Target
from numpyro_repulsion.interactions import Interaction
from numpyro_repulsion.kernels.hints import hinting
from numpyro_repulsion.kernels.settings import choose_gradient
from numpyro_repulsion.moves import Move
from numpyro_repulsion.processes import is_spread
from numpyro_repulsion.rows import Rows
from numpyro_repulsion.schedules import BiasBudget, Schedule
from numpyro_repulsion.warmup import WarmupPlan, most_late_iterations

__all__ = ["Binder", "BoundSampler", "Settings"]

#: From so many bytes on an array is large.
LARGE_BYTES = 1 << 22


class Settings(Protocol):
    """The settings of a kernel that a run depends on; see :class:`~numpyro_repulsion.kernels.ParticleKernel`."""

    interaction: Interaction
    dynamics: Dynamics
    gradient: Gradient | None
    moves: Move | None
    step_size: float | Callable | BiasBudget | None
    schedule: Schedule | None
    preconditioner: ArrayLike | None
    scale: str | np.ndarray | None
    reparam: str | None
    num_steps: int
    num_ensembles: int
    looks_for_basins: bool

    @property
    def model(self) -> Callable | None: ...

    @property
    def potential_fn(self) -> Callable | None: ...


@dataclass(frozen=True, eq=False)
class BoundSampler:
    """A kernel, the posterior that it samples, and the gradient that it uses."""

    kernel: Settings
    target: Target
    gradient: Gradient
    _data: list[np.ndarray] = field(default_factory=list)

    @staticmethod
    def of(kernel: Settings, target: Target) -> BoundSampler:
        """Bind a kernel to a target; raise ``ValueError`` if the kernel's gradient does not fit the target."""
        return BoundSampler(kernel, target, choose_gradient(kernel.gradient, target))

    @property
    def centres_partly(self) -> bool:
        """Whether a warmup learns how to centre the hierarchical sites of the model."""
        kernel, plan = self.kernel, self.plan("diagonal")
        learns = kernel.reparam is not None and plan.step_size is not None and plan.scale is not None
        suits = kernel.dynamics.is_sampler and not plan.jumps and plan.epoch is None
        return learns and suits and bool(self.target.location_scale or self.target.num_products)

    def data(self, z: Particle = None) -> np.ndarray | None:
        """Return what tells this posterior from those of other data or models: four words, none of them 0, of a digest
        of the arguments and of the program of U; ``None`` where arguments have no values.

        Energies would not do, because another program may round them differently. What a model calls back in Python is
        known by the arguments alone.

        :param z: particles ``(L, ...)`` of a function; a model knows its own.
        """
        target, given = self.target, (self.target.args, self.target.kwargs)
        leaves = jax.tree.leaves(given)
        if not self._data and not any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x)[1:], jnp.result_type(x)), z)
            one = target.prototype if isinstance(target, ModelTarget) else one
            rows = {name: jnp.arange(batch) for name, (_, batch) in target.plates.items()}
            # Of which no process has the whole, so that they must be inputs.
            spread = {place: leaf for place, leaf in enumerate(leaves) if is_spread(leaf)}

            def energy(spread, *particle):
                return (self._with(spread) if spread else target).potential_energy(*particle)

            program = jax.make_jaxpr(energy)(spread, one, rows, random.key(0))
            leaves = jax.tree.leaves(given, is_leaf=lambda leaf: isinstance(leaf, Rows))
            with jax.ensure_compile_time_eval():
                found = [leaf.digest() if isinstance(leaf, Rows) else digest(leaf) for leaf in leaves]
                known = found, digest_of_program(program, leaves)
            words = hashlib.blake2b(str(known).encode(), digest_size=16).digest()
            self._data.append(np.frombuffer(words, np.uint32) | np.uint32(1))
        return self._data[0] if self._data else None

    def within(self, number: jax.Array) -> BoundSampler:
        """Return the same for use in the program that has this number, with large arguments behind a barrier.

        NumPyro makes arguments constants of its programs, and XLA copies constants into each loop and branch that uses
        them: of 400 MB it made 9 GB, and took twice as long. What a barrier returns is no constant. Arguments whose
        values the model needs stay as they are.
        """
        if not isinstance(number, jax.core.Tracer):
            return self
        leaves = jax.tree.leaves((self.target.args, self.target.kwargs))
        # Arrays of NumPy stay too: with them a model may compute in double precision.
        large = {place: leaf for place, leaf in enumerate(leaves) if _is_large(leaf)}
        large = {place: leaf for place, leaf in large.items() if not self._needs_values({place: leaf})}
        return replace(self, target=self._with(lax.optimization_barrier(large))) if large else self

    def _with(self, arrays):
        """Return the target with other arrays at some places of the flat arguments."""
        leaves, structure = jax.tree.flatten((self.target.args, self.target.kwargs))
        leaves = [arrays.get(place, leaf) for place, leaf in enumerate(leaves)]
        return self.target.with_arguments(*jax.tree.unflatten(structure, leaves))

    def _needs_values(self, arrays):
        """Return whether the model asks for the values of arrays, and not only computes with them."""
        target = self.target
        if not isinstance(target, ModelTarget):
            return True

        def energy(arrays, z):
            return self._with(arrays).potential_energy(z, target.first_rows, random.key(0))

        try:
            jax.eval_shape(energy, arrays, target.prototype)
        except Exception:  # Whatever libraries raise. A fault of the model itself is raised again, with the values.
            return True
        return False

    def share_data(self) -> None:
        """Put rows of the data on the devices for rows of a mesh, if there are any.

        :raises ValueError: for minibatches that these devices cannot share.
        """
        self.gradient.share(self.target)

    def plan(self, automatic: str) -> WarmupPlan:
        """Return what a warmup would learn; ``automatic`` is the kind of scales of ``preconditioner="auto"``."""
        kernel, is_noisy = self.kernel, self.gradient.is_noisy(self.target)
        rule = kernel.step_size if isinstance(kernel.step_size, BiasBudget) else None
        scale = kernel.scale if isinstance(kernel.scale, str) else None
        if scale == "auto":
            # A given step is that of plain SGLD.
            scale = None if rule is None else automatic
        return WarmupPlan(
            step_size=rule,
            scale=scale,
            bandwidth=kernel.interaction.learns_bandwidth,
            reference=self.gradient.has_reference,
            epoch=self.gradient.epoch_length(self.target, kernel.num_steps),
            sweep=self.gradient.sweep_length(self.target),
            late=most_late_iterations(self.target.plates, kernel.num_steps),
            noise=is_noisy,
            jumps=kernel.moves is not None,
            basins=kernel.looks_for_basins and rule is not None and not is_noisy,
        )


class Binder:
    """Bind a kernel to arguments of its model, and analyse the model once for equal arguments.

    It keeps only the last arguments, like NumPyro, which keeps their compiled program.
    """

    def __init__(self, kernel: Settings):
        self._kernel = kernel
        self._last: tuple[tuple, list, BoundSampler, list] | None = None

    def __call__(self, args: tuple, kwargs: dict | None) -> BoundSampler:
        kernel, kwargs = self._kernel, kwargs or {}
        if kernel.model is None:
            return BoundSampler.of(kernel, FunctionTarget(kernel.potential_fn))
        leaves, structure = jax.tree.flatten((args, kwargs))
        # The analysis also depends on the precision in use.
        key = (structure, jnp.result_type(float))
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            known = self._last
            if known is None or known[0] != key or not _fits(known[3], leaves):
                return self._analysed(args, kwargs)
            # What the first state was made for: an analysis of traced values may find less.
            return BoundSampler(kernel, known[2].target.with_arguments(args, kwargs), known[2].gradient)
        marks = [_mark(leaf) for leaf in leaves]
        if self._last is None or self._last[0] != key or not _same(self._last[1], marks):
            bound = self._analysed(args, kwargs)
            self._last = key, marks, bound, leaves
        return self._last[2]

    def _analysed(self, args, kwargs):
        kernel = self._kernel
        with hinting(kernel.model, args, kwargs):
            return BoundSampler.of(kernel, ModelTarget(kernel.model, args, kwargs))


def _is_large(leaf):
    is_here = isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)
    return is_here and leaf.nbytes >= LARGE_BYTES


def _fits(known, leaves):
    """Return whether traced leaves have the shapes and types of known ones, and all others are the same."""
    numbers = jax.Array | np.ndarray | np.generic | bool | int | float | complex

    def fits(one, leaf):
        if not isinstance(leaf, jax.core.Tracer):
            return _same([_mark(one)], [_mark(leaf)])
        same_shape = isinstance(one, numbers) and jnp.shape(one) == leaf.shape
        return same_shape and jnp.result_type(one) == leaf.dtype

    return len(known) == len(leaves) and all(map(fits, known, leaves))


def _mark(leaf):
    """Return what identifies a leaf: the leaf itself, or a digest of an array that can change in place."""
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufc":
        digest = hashlib.blake2b(leaf.tobytes(), digest_size=16).digest()
        return leaf.shape, leaf.dtype.str, digest
    return leaf


def _same(some, others):
    """Return whether all marks are the same objects or equal plain values."""
    return len(some) == len(others) and all(
        a is b or (type(a) is type(b) and isinstance(a, bool | int | float | complex | str | tuple) and a == b)
        for a, b in zip(some, others, strict=True)
    )
