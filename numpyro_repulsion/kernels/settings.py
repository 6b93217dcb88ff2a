"""Settings of a kernel in the forms that a run uses."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from numpyro_repulsion.dynamics import Dynamics
from numpyro_repulsion.gradients import ControlVariates, FullData, Gradient, Subsampled, Target
from numpyro_repulsion.schedules import BiasBudget, Cyclical, Schedule, as_schedule
from numpyro_repulsion.warmup import LAST_ADAPTED, NUM_HESSIANS, Preconditioner, WarmupPlan, first_scale

__all__ = [
    "Fixed",
    "automatic_scale",
    "choose_gradient",
    "first_preconditioner",
    "preconditioner_scale",
    "step_rule",
    "step_schedule",
]

#: Bounds on the default limit of dense scales: above it, products with them take longer than most gradients.
DENSE_LIMITS = (64, 512)
#: Of more parameters, the 40 directions of low-rank scales take more memory than several particles.
LOW_RANK_LIMIT = 1_000_000


class Fixed:
    """An object whose settings, the attributes without a leading underscore, can be set only once.

    Compiled programs contain the settings, and would ignore a change.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if not name.startswith("_") and name in self.__dict__:
            kind = type(self).__name__
            raise AttributeError(
                "The settings of a kernel cannot change, because compiled programs contain them. Make a new kernel, "
                f"{kind}(..., {name}={value!r}); to continue a run with it, set mcmc.post_warmup_state = state."
            )
        super().__setattr__(name, value)


def step_rule(
    step_size: float | Callable | BiasBudget | None, dynamics: Dynamics
) -> float | Callable | BiasBudget | None:
    """Return the given step size, that of an optimizer, or the rule by which warmup finds it."""
    if step_size is None:
        return BiasBudget() if dynamics.default_step is None else dynamics.default_step
    if dynamics.default_step is not None and isinstance(step_size, BiasBudget):
        raise ValueError(
            "The steps of an optimizer have no bias that could be measured: give a learning rate, such as "
            f"step_size=0.01, or leave out `step_size`; got {step_size!r}."
        )
    return step_size


def step_schedule(step_size: float | Callable | BiasBudget | None, num_steps: int) -> Schedule | None:
    """Return the step size as a schedule, checked against ``num_steps``, or ``None`` if warmup finds it."""
    if step_size is None or isinstance(step_size, BiasBudget):
        return None
    schedule = as_schedule(step_size)
    if isinstance(schedule, Cyclical):
        schedule.check(num_steps)
    return schedule


def preconditioner_scale(value: ArrayLike | None) -> str | np.ndarray | None:
    """Return how to learn the scales, or S with ``P = S Sᵀ`` for a given P, or ``None`` for the identity."""
    if value is None:
        return None
    if isinstance(value, str):
        if value not in ("auto", "diagonal", "dense", "low_rank"):
            raise ValueError(
                f"`preconditioner` must be 'auto', 'diagonal', 'dense', 'low_rank', None or an array; got {value!r}."
            )
        return value
    matrix = np.asarray(value)
    if matrix.dtype.kind not in "fiu" or matrix.ndim not in (1, 2) or not np.isfinite(matrix).all():
        raise ValueError(f"`preconditioner` must be a finite array of shape (d,) or (d, d); got {value!r}.")
    if matrix.ndim == 1:
        if (matrix <= 0).any():
            raise ValueError(f"A diagonal `preconditioner` holds variances and must be positive; got {value!r}.")
        return np.sqrt(matrix)
    if matrix.shape[0] != matrix.shape[1]:
        raise ValueError(f"A dense `preconditioner` must be of shape (d, d); got shape {matrix.shape}.")
    if not np.allclose(matrix, matrix.T):
        gap = np.abs(matrix - matrix.T).max()
        raise ValueError(
            f"A dense `preconditioner` P must be symmetric; P - P.T has entries up to {gap:.2g}. Give (P + P.T) / 2."
        )
    try:
        return np.linalg.cholesky(matrix)
    except np.linalg.LinAlgError as error:
        smallest = np.linalg.eigvalsh(matrix)[0]
        raise ValueError(
            f"A dense `preconditioner` must be positive definite; its smallest eigenvalue is {smallest:.2g}."
        ) from error


def automatic_scale(dimension: int, size: int, num_warmup: int, num_steps: int, is_noisy: bool) -> str:
    """Return the kind of scales that ``preconditioner="auto"`` learns.

    Correlations are learned of a limited number of parameters. With exact gradients, this is the number of positions of
    ``size`` particles in the last window that adapts scales, because as many gradients and positions together give the
    covariance of a Gaussian exactly. With minibatches, it is the number at which measuring the curvature takes as many
    gradients as warmup takes updates.
    """
    learned = num_warmup * num_steps / NUM_HESSIANS / 2 if is_noisy else size * num_warmup * LAST_ADAPTED
    if dimension <= int(np.clip(round(learned), *DENSE_LIMITS)):
        return "dense"
    return "low_rank" if dimension <= LOW_RANK_LIMIT else "diagonal"


def first_preconditioner(
    scale: str | np.ndarray | None, plan: WarmupPlan | None, flat: jax.Array, gradient: jax.Array
) -> Preconditioner:
    """Return the first change of variables, for starts ``(L, d)`` and the gradients there.

    :param scale: the result of :func:`preconditioner_scale`.
    :param plan: what the warmup will learn, or ``None`` without a warmup.
    """
    if plan is not None and plan.scale is not None:
        return first_scale(flat, gradient, plan.scale)
    if scale is None or isinstance(scale, str):
        return Preconditioner()
    if scale.shape[0] != flat.shape[1]:
        raise ValueError(
            f"`preconditioner` has shape {scale.shape}, but a particle has {flat.shape[1]} unconstrained parameters; "
            f"expected ({flat.shape[1]},) or ({flat.shape[1]}, {flat.shape[1]})."
        )
    return Preconditioner(jnp.asarray(scale, flat.dtype))


def choose_gradient(gradient: Gradient | None, target: Target) -> Gradient:
    """Return the given gradient, or the default one of the target; raise ``ValueError`` if they do not fit."""
    if gradient is None:
        if not target.plates:
            return FullData()
        return Subsampled() if target.is_random or target.rows_outside else ControlVariates()
    gradient.check_rows(target)
    if isinstance(gradient, Subsampled) and not target.plates:
        raise ValueError(
            f"gradient={gradient!r} needs a model with a subsampled plate, `numpyro.plate(name, size, "
            "subsample_size=...)` with subsample_size < size; this one has none. Drop `gradient`."
        )
    if gradient.has_reference and target.is_random:
        raise ValueError(
            "Control variates need a full gradient as a reference, and the likelihood of this model is random "
            "(numpyro.prng_key): use gradient=Subsampled(), its default, or Sweeps(control_variates=False)."
        )
    return gradient
