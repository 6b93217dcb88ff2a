"""A kernel bound to the arguments of its model: what is static in a run, made once."""

from __future__ import annotations

from dataclasses import dataclass
import hashlib
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_repulsion.gradients import ControlVariates, FunctionTarget, Gradient, ModelTarget, Target
from numpyro_repulsion.kernels.settings import choose_gradient
from numpyro_repulsion.schedules import BiasBudget
from numpyro_repulsion.warmup import WarmupPlan

if TYPE_CHECKING:
    from numpyro_repulsion.kernels.base import ParticleKernel

__all__ = ["Binder", "BoundSampler"]


@dataclass(frozen=True, eq=False)
class BoundSampler:
    """A kernel, the posterior that it samples, and the gradient in use for it."""

    kernel: ParticleKernel
    target: Target
    gradient: Gradient

    @staticmethod
    def of(kernel: ParticleKernel, target: Target) -> BoundSampler:
        """A kernel with the gradient that was given, if it fits the target, or the one that fits it best."""
        return BoundSampler(kernel, target, choose_gradient(kernel.gradient, target))

    def plan(self, is_dense: bool) -> WarmupPlan:
        """What a warmup would learn; ``is_dense`` says whether scales are, unless the user decided it."""
        kernel, is_noisy = self.kernel, self.gradient.is_noisy(self.target)
        rule = kernel.step_size if isinstance(kernel.step_size, BiasBudget) else None
        scale = kernel.scale if isinstance(kernel.scale, str) else None
        if scale == "auto":
            # A given step means what it means in plain SGLD.
            scale = None if rule is None else "dense" if is_dense else "diagonal"
        return WarmupPlan(
            step_size=rule,
            scale=scale,
            bandwidth=kernel.interaction.learns_bandwidth,
            reference=isinstance(self.gradient, ControlVariates),
            epoch=self.gradient.epoch_length(self.target, kernel.num_steps),
            noise=is_noisy,
            jumps=kernel.moves is not None,
            basins=kernel._looks_for_basins and not is_noisy,
        )


class Binder:
    """Binds a kernel to arguments of its model, and analyses the model once for the same ones.

    It keeps the last arguments, for which NumPyro keeps a compiled program too.
    """

    def __init__(self, kernel: ParticleKernel):
        self._kernel = kernel
        self._last: tuple[Any, list, BoundSampler] | None = None

    def __call__(self, args: tuple, kwargs: dict | None) -> BoundSampler:
        kernel, kwargs = self._kernel, kwargs or {}
        if kernel.model is None:
            return BoundSampler.of(kernel, FunctionTarget(kernel._potential_fn))
        leaves, structure = jax.tree.flatten((args, kwargs))
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            return BoundSampler.of(kernel, ModelTarget(kernel.model, args, kwargs))
        # Of the precision in use, too.
        key = (structure, jnp.result_type(float))
        marks = [_mark(leaf) for leaf in leaves]
        if self._last is None or self._last[0] != key or not _same(self._last[1], marks):
            bound = BoundSampler.of(kernel, ModelTarget(kernel.model, args, kwargs))
            self._last = key, marks, bound
        return self._last[2]


def _mark(leaf):
    """What tells a leaf from others: itself, or the content of an array that can change."""
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufc":
        digest = hashlib.blake2b(leaf.tobytes(), digest_size=16).digest()
        return leaf.shape, leaf.dtype.str, digest
    return leaf


def _same(some, others):
    """Whether marks are the same ones: the same objects, or equal plain values."""
    return len(some) == len(others) and all(
        a is b or (type(a) is type(b) and isinstance(a, bool | int | float | complex | str | tuple) and a == b)
        for a, b in zip(some, others, strict=True)
    )
