"""What a warmup learns."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from numpyro_repulsion.dynamics import Cloud, Dynamics
from numpyro_repulsion.gradients import Reference
from numpyro_repulsion.schedules import BiasBudget
from numpyro_repulsion.warmup.arrival import ArrivalState
from numpyro_repulsion.warmup.curvature import Measurements
from numpyro_repulsion.warmup.preconditioner import Moments, Preconditioner
from numpyro_repulsion.warmup.scales import ScalesState
from numpyro_repulsion.warmup.step_size import StepState
from numpyro_repulsion.warmup.symptoms import Symptoms

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
    - **arrival** - how the particles arrive.
    - **scales** - the linear change of variables.
    - **step** - the step size and what it is measured from.
    - **bandwidth** - h, where an interaction learns it; 0 where none is in use.
    - **reference** - the reference points of control variates, or ``None``. Each particle's own go on being renewed.
    - **symptoms** - of a posterior that no linear scale suits; ``None`` where the step is not measured.
    - **jumps** - what jumps have learned, or ``None``.
    - **basins** - what jumps have learned that switch themselves on, or ``None`` where none could.
    - **data_fingerprint** - a start, flat and unconstrained, and U there on a few rows, by which a run on other data
      than those of the warmup is known; ``None`` without a warmup.
    """

    iteration: jax.Array
    num_warmup: jax.Array
    arrival: ArrivalState
    scales: ScalesState
    step: StepState
    bandwidth: jax.Array
    reference: Reference | None
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
    def moments(self) -> Moments:
        """Of the cloud in the current window. Only a state with a warmup has them."""
        if self.scales.moments is None:
            raise ValueError("This state is of a run with num_warmup=0, which learns no moments.")
        return self.scales.moments

    @property
    def measurements(self) -> Measurements:
        """Of curvature and noise since the scales were frozen. Only a state with a warmup has them."""
        if self.step.measurements is None:
            raise ValueError("This state is of a run with num_warmup=0, which measures nothing.")
        return self.step.measurements

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
        shape, dtype = cloud.z.shape, cloud.z.dtype
        particles, dimension = shape[0] * shape[1], shape[2]
        learns = num_warmup > 0
        reference = None
        if plan.epoch is not None:
            reference = Reference.none(shape, dtype, in_use=not (learns and plan.arrives))
        elif learns and plan.reference:
            reference = Reference.none(dimension, dtype)
        return WarmupState(
            iteration=jnp.zeros((), jnp.int32),
            num_warmup=jnp.asarray(num_warmup, jnp.int32),
            arrival=ArrivalState.start(shape, dtype, learns and plan.arrives and not plan.noise),
            scales=ScalesState(
                preconditioner, Moments.empty(dimension, dtype, plan.scale == "dense") if learns else None
            ),
            step=StepState.start(step_size, particles, dtype, learns),
            bandwidth=bandwidth,
            reference=reference,
            symptoms=Symptoms.empty(particles, dimension, dtype) if learns and plan.step_size else None,
            jumps=jumps,
            basins=basins,
        )
