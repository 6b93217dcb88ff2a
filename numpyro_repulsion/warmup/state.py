"""What a warmup learns."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from numpyro_repulsion.dynamics import Cloud, Dynamics
from numpyro_repulsion.gradients import Reference
from numpyro_repulsion.schedules import BiasBudget
from numpyro_repulsion.warmup.arrival import Surroundings
from numpyro_repulsion.warmup.curvature import UNKNOWN, Measurements
from numpyro_repulsion.warmup.preconditioner import Moments, Preconditioner
from numpyro_repulsion.warmup.symptoms import Symptoms
from numpyro_repulsion.warmup.windows import SETTLING_ENDS

__all__ = ["WarmupPlan", "WarmupState"]


class WarmupPlan(NamedTuple):
    """What a warmup learns; static.

    - **step_size** - the rule for the step size, or ``None`` where it is given.
    - **scale** - ``"diagonal"`` or ``"dense"``, or ``None`` where the preconditioner is given.
    - **bandwidth** - whether the interaction leaves one to be learned.
    - **anchor** - whether the gradient has control variates.
    - **noise** - whether gradients are noisy.
    - **jumps** - whether particles jump between modes.
    - **basins** - whether they may jump between basins that warmup finds.
    - **epoch** - after how many updates each particle's own reference is renewed; ``None`` where control variates have
      a common one.
    """

    step_size: BiasBudget | None
    scale: str | None
    bandwidth: bool
    reference: bool
    noise: bool = False
    jumps: bool = False
    basins: bool = False
    epoch: int | None = None

    @property
    def arrives(self) -> bool:
        """Whether particles move at steps of their own at first: where no step that suits them is given."""
        return self.step_size is not None or self.scale is not None

    @property
    def measures(self) -> bool:
        """Whether curvature and gradient noise are measured."""
        return self.step_size is not None or self.reference


class WarmupState(NamedTuple):
    """What warmup has learned so far, and what it learns from. Constant after warmup but for the count.

    - **iteration** - MCMC iterations done so far.
    - **num_warmup** - how many of them are warmup.
    - **preconditioner** - the linear change of variables in use.
    - **step_size** - ε, where it is measured.
    - **bias** - the relative inflation of variances that this ε is expected to cause; negative where it is not known.
    - **effective_draws** - how many independent draws a run as long as the warmup is then worth, for the direction that
      moves slowest; negative where the step is not measured.
    - **bandwidth** - h, where an interaction learns it; 0 where none is in use.
    - **anchor** - the reference points of control variates, or ``None``. Each particle's own go on being renewed.
    - **arrival** - the step sizes of the particles while they arrive, ``(G, L)``.
    - **surroundings** - of particles that arrive, in the current window; ``None`` where gradients are noisy.
    - **moments** - of the cloud in the current window; ``None`` without a warmup.
    - **measurements** - curvature and noise since the scales were frozen; ``None`` without a warmup.
    - **symptoms** - of a posterior that no linear scale suits; ``None`` where the step is not measured.
    - **jumps** - what jumps have learned, or ``None``.
    - **basins** - what jumps have learned that switch themselves on, or ``None`` where none could.
    - **mark** - a start, flat and unconstrained, and U there on a few rows, by which a run on other data than those of
      the warmup is known; ``None`` without a warmup.
    """

    iteration: jax.Array
    num_warmup: jax.Array
    preconditioner: Preconditioner
    step_size: jax.Array
    bias: jax.Array
    effective_draws: jax.Array
    bandwidth: jax.Array
    reference: Reference | None
    arrival: jax.Array
    surroundings: Surroundings | None
    moments: Moments
    measurements: Measurements
    symptoms: Symptoms | None
    jumps: Any
    basins: Any
    data_fingerprint: tuple[jax.Array, jax.Array] | None = None

    @property
    def has_basins(self) -> jax.Array:
        """Whether warmup found several basins, between which updates do not move."""
        found = jnp.zeros((), bool) if self.symptoms is None else self.symptoms.widest.has_basins
        # Once particles jump, nothing lies between them any more.
        return found if self.basins is None else found | self.basins.is_on

    @property
    def noise(self) -> jax.Array:
        """The largest variance of the gradient in use, in any direction."""
        plain, corrected = self.measurements.mean_noise
        return plain if self.reference is None else jnp.where(self.reference.in_use, corrected, plain)

    def spread(self, dynamics: Dynamics) -> jax.Array:
        """The largest variance in any direction, in units of the temperature."""
        return self.moments.spread() / (dynamics.temperature or 1.0)

    @staticmethod
    def start(
        num_warmup: int,
        preconditioner: Preconditioner,
        step_size: float,
        bandwidth: jax.Array,
        cloud: Cloud,
        plan: WarmupPlan,
        jumps: Any = None,
        basins: Any = None,
    ) -> WarmupState:
        """Nothing learned yet."""
        groups, size, dimension = cloud.z.shape
        nothing: Any = None
        dtype = cloud.z.dtype
        learns = num_warmup > 0
        reference = nothing
        if plan.epoch is not None:
            reference = Reference.none(cloud.z.shape, dtype, in_use=not (learns and plan.arrives))
        elif learns and plan.reference:
            reference = Reference.none(dimension, dtype)
        return WarmupState(
            iteration=jnp.zeros((), jnp.int32),
            num_warmup=jnp.asarray(num_warmup, jnp.int32),
            preconditioner=preconditioner,
            step_size=jnp.asarray(step_size, dtype),
            bias=jnp.asarray(UNKNOWN, dtype),
            effective_draws=jnp.asarray(UNKNOWN, dtype),
            bandwidth=bandwidth,
            reference=reference,
            arrival=jnp.full((groups, size), 0.05, dtype),
            surroundings=Surroundings.empty(cloud.z.shape, dtype)
            if learns and plan.arrives and not plan.noise
            else None,
            moments=Moments.empty(dimension, dtype, plan.scale == "dense") if learns else nothing,
            measurements=Measurements.empty(1 + len(SETTLING_ENDS), groups * size, dtype) if learns else nothing,
            symptoms=Symptoms.empty(groups * size, dimension, dtype) if learns and plan.step_size else None,
            jumps=jumps,
            basins=basins,
        )
