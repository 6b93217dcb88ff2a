"""What warmup learned: all that sampling needs of it, and the figures that reports are made of."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Float, Integer
import numpy as np

from numpyro_repulsion.dynamics import Dynamics
from numpyro_repulsion.gradients import Centering, Reference
from numpyro_repulsion.rounding import AnyArray
from numpyro_repulsion.warmup.diagnosis import WarmupDiagnosis
from numpyro_repulsion.warmup.preconditioner import Preconditioner
from numpyro_repulsion.warmup.state import JumpsState, WarmupState

__all__ = ["Learned", "Measured", "Place"]


class Measured(NamedTuple):
    """What warmup measured since the scales last changed; scalars.

    - **typical_curvature**, **largest_curvature** - the curvature that one particle in ten exceeds, and the largest.
    - **typical_steepness** - how fast Γ changes.
    - **noise**, **isotropic_noise** - the variance of the gradient in use: the largest in any direction, and the mean.
    - **spread** - the largest variance of the positions in any direction, in units of the temperature.
    - **bias**, **mean_bias** - the relative inflation of variances that the step is expected to cause, at most and as
      the mean over directions; negative if unknown.
    """

    typical_curvature: float
    largest_curvature: float
    typical_steepness: float
    noise: float
    isotropic_noise: float
    spread: float
    bias: float
    mean_bias: float

    @staticmethod
    def of(warmup: WarmupState, dynamics: Dynamics) -> Measured:
        """Return what a warmup measured."""
        known = warmup.measurements
        return Measured(
            known.typical_curvature,
            known.largest_curvature,
            known.typical_steepness,
            warmup.noise,
            warmup.isotropic_noise,
            warmup.spread(dynamics),
            warmup.step.bias,
            warmup.step.mean_bias,
        )


class Place(NamedTuple):
    """Coordinates and control variates: where gradients are evaluated, as in a :class:`Learned`."""

    preconditioner: Preconditioner
    centering: Centering | None
    reference: Reference | None


class Learned(NamedTuple):
    """What a run learned before its first draw.

    It is constant while draws are made, except that jumps are counted and each particle's own reference (``SVRG``) is
    renewed. What is off is ``None``, and absent from the program.

    - **preconditioner** - the linear change of variables.
    - **centering** - how the entries of a particle are centered before that change; ``None`` as in the model.
    - **step_size** - the measured ε, or the first one of a schedule.
    - **bandwidth** - the bandwidth h; 0 if the interaction has none.
    - **gradient_limit** - from where gradients are clipped: their length, or with minibatches each coordinate; ``None``
      if their usual size is unknown.
    - **reference** - the reference points of control variates.
    - **jumps** - the state of the kernel's ``moves``, or of jumps that switched themselves on.
    - **measured** - the entries of :class:`Measured`, ``(8,)``; ``None`` if nothing was measured.
    - **diagnosis** - the entries of :class:`~numpyro_repulsion.warmup.WarmupDiagnosis`, ``(14,)``, negative where
      unknown; ``None`` likewise.
    - **data** - the identity of the data and the model, four words; zeros where it is unknown.
    - **start** - a start of the warmup, flat and unconstrained, followed by U there on a few rows, ``(d + 1,)``, which
      tells whether a run on data with another identity has other data; ``None`` without a warmup.
    """

    preconditioner: Preconditioner
    centering: Centering | None
    step_size: Float[AnyArray, ""]
    bandwidth: Float[AnyArray, ""]
    gradient_limit: Float[AnyArray, ""] | None = None
    reference: Reference | None = None
    jumps: JumpsState | None = None
    measured: Float[AnyArray, " _"] | None = None
    diagnosis: Float[AnyArray, " _"] | None = None
    data: Integer[AnyArray, 4] | None = None
    start: Float[AnyArray, " d"] | None = None

    @property
    def measurements(self) -> Measured | None:
        """What warmup measured, or ``None``."""
        return None if self.measured is None else Measured(*self.measured)

    @property
    def problems(self) -> WarmupDiagnosis | None:
        """The diagnosis at the end of warmup, on the host; or ``None``."""
        if self.diagnosis is None:
            return None
        numbers = np.asarray(self.diagnosis, float)
        return WarmupDiagnosis(*np.where(numbers < 0, np.nan, numbers))

    @staticmethod
    def of(warmup: WarmupState, gradient_limit: Float[AnyArray, ""] | None) -> Learned:
        """Return what a warmup has learned so far."""
        return Learned(
            preconditioner=warmup.preconditioner,
            centering=warmup.centering,
            step_size=warmup.step.size,
            bandwidth=warmup.bandwidth,
            gradient_limit=gradient_limit,
            reference=warmup.reference,
            jumps=warmup.jumps,
        )

    def completed(
        self, warmup: WarmupState, measured: AnyArray | None, diagnosis: AnyArray | None, on: tuple[int, bool]
    ) -> Learned:
        """Return what sampling needs, without what is off.

        :param on: the order of the control variates in use, and whether particles jump.
        """
        order, has_jumps = on
        start = None
        if warmup.data_fingerprint is not None:
            position, energy = warmup.data_fingerprint
            start = jnp.append(position, energy)
        reference = None
        if order and self.reference is not None:
            reference = self.reference._replace(order=None, hessian=self.reference.hessian if order == 2 else None)
        return self._replace(
            reference=reference,
            jumps=self.jumps if has_jumps else None,
            measured=measured,
            diagnosis=diagnosis,
            data=warmup.data,
            start=start,
        )
