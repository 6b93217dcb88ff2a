"""The state of a warmup, and the plan of what it learns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax.numpy as jnp
from jaxtyping import Bool, Float, Integer
import numpy as np
from numpy.random import Generator

from numpyro_repulsion.dynamics import Cloud, Dynamics, StepError
from numpyro_repulsion.gradients import Centering, Reference, Units
from numpyro_repulsion.rounding import AnyArray, xp
from numpyro_repulsion.schedules import BiasBudget
from numpyro_repulsion.warmup.adam import ADAM, Adam, Surroundings, first_rates
from numpyro_repulsion.warmup.curvature import UNKNOWN, Measurements, NoiseFigures
from numpyro_repulsion.warmup.preconditioner import Moments, Preconditioner
from numpyro_repulsion.warmup.symptoms import Symptoms
from numpyro_repulsion.warmup.windows import SETTLING_ENDS, Window

#: The state of a move: a ``NamedTuple`` with a field ``tally``, the number of jumps and the sum of their acceptance
#: probabilities.
JumpsState: TypeAlias = Any


class WarmupPlan(NamedTuple):
    """What a warmup learns, and what is constant in it; static. Updates also read what it says of the gradient."""

    budget: BiasBudget | None  # by which warmup measures the step size; ``None`` if the user gave a step size
    kind: str | None  # of the preconditioner, as in `Preconditioner.kind`; ``None`` if scales are not learned
    learns_bandwidth: bool  # whether the interaction learns a bandwidth
    has_reference: bool  # whether the gradient has control variates
    is_noisy: bool = False  # whether gradients are noisy
    has_given_moves: bool = False  # whether the user gave ``moves``; those that warmup takes by itself do not count
    epoch: int | None = None  # after how many updates each particle's own reference is renewed; ``None`` without such
    sweep: int | None = None  # how many updates pass through all rows once; ``None`` if minibatches are independent
    late: int | None = None  # how many iterations the second half of a prolonged arrival has at most
    num_steps: int = 10  # updates of an iteration
    tunes_bandwidth: bool = True  # whether warmup chooses the bandwidth by its measured gain
    shares_minibatches: bool = False  # whether the particles of a group share their minibatch
    minibatch_size: int = 1  # its number of rows
    num_minibatches: int = 1  # how many there are in the data

    @property
    def arrives(self) -> bool:
        """Whether particles first move with step sizes of their own: if the step size or the scales are learned."""
        return self.budget is not None or self.kind is not None

    @property
    def learns(self) -> bool:
        return self.arrives or self.learns_bandwidth or self.has_reference or self.has_given_moves

    def tolerance(self, error: StepError, order: int) -> float:
        """Return δ of the bias budget, for control variates of an order; 0 for none."""
        return (self.budget or BiasBudget()).tolerance_for(error.is_second_order and (order == 2 or not self.is_noisy))

    def tolerance_of_any(self, error: StepError, order: int) -> float:
        """Return δ for the coordinate with the most noise; of thousands, few are as noisy."""
        return (
            (self.budget or BiasBudget()).tolerance_for(False) if self.kind == "arrow" else self.tolerance(error, order)
        )

    @property
    def measures(self) -> bool:
        """Whether warmup measures curvature and gradient noise."""
        return self.budget is not None or self.has_reference

    @property
    def replaces_noise(self) -> bool:
        """Whether known gradient noise takes the place of injected noise, if the dynamics can tell how much; of
        thousands of effects, whose bias adds up."""
        return self.kind == "arrow" and self.budget is not None and self.sweep is None

    def num_independent(self, cloud: Cloud) -> int:
        """Return how many minibatches an update has."""
        return cloud.z.shape[0] if self.shares_minibatches else cloud.potential_energy.size

    @property
    def can_prolong(self) -> bool:
        """Whether the arrival may be prolonged: if scales are learned, and minibatches have common control variates, by
        which warmup decides it. Where each particle has control variates of its own, they remove noise anywhere."""
        is_common = self.has_reference and self.epoch is None
        return self.is_noisy and is_common and self.kind is not None


class ArrivalState(NamedTuple):
    """The state of the arrival.

    - **step_size** - ε of each particle, ``(G, L)``; the rate of Adam if gradients are noisy.
    - **lost** - which particles are far behind the others and have not moved to one of them, ``(G, L)``.
    - **surroundings** - sums over the current window; ``None`` if gradients are noisy.
    - **adam** - the state of Adam; ``None`` if gradients are exact.
    - **start_sds** - the standard deviation of the starts in each coordinate of the model, ``(d,)``; ``None`` if the
      arrival cannot be prolonged.
    - **halfway** - the positions in the coordinates of the model where the first half of the arrival ended,
      ``(G, L, d)``; ``None`` if the arrival cannot be prolonged.
    - **is_prolonged** - whether the arrival is prolonged; ``None`` if it cannot be.
    """

    step_size: Float[AnyArray, "*particles"]
    lost: Bool[AnyArray, "*particles"]
    surroundings: Surroundings | None
    adam: Adam | None = None
    start_sds: Float[AnyArray, " d"] | None = None
    halfway: Float[AnyArray, "*particles d"] | None = None
    is_prolonged: Bool[AnyArray, ""] | None = None

    @staticmethod
    def start(u: Float[AnyArray, "*particles d"], change: Preconditioner, plan: WarmupPlan) -> ArrivalState:
        """Return the state for particles ``(G, L, d)`` at their starts."""
        lost = jnp.zeros(u.shape[:2], bool)
        if not (plan.arrives and plan.is_noisy):
            surroundings = Surroundings.empty(u.shape, u.dtype) if plan.arrives else None
            return ArrivalState(jnp.full(u.shape[:2], 0.05, u.dtype), lost, surroundings)
        # A single particle has no spread, and first scales from its gradient, which may be anything.
        adam = Adam.start(u, 1.0 / change.lengths())
        state = ArrivalState(first_rates(u.shape, u.dtype), lost, None, adam)
        if not plan.can_prolong:
            return state
        sds = adam.unit * change.lengths()
        return state._replace(start_sds=sds, halfway=u, is_prolonged=jnp.zeros((), bool))

    @property
    def temperature(self) -> Float[AnyArray, ""] | float:
        """The variance of Adam's noise, in units of that of Langevin dynamics."""
        # While the arrival is prolonged, sites are standardized, so that densities have no necks, and noise would only
        # delay the particles.
        return 1.0 if self.is_prolonged is None else xp.where(self.is_prolonged, 0.0, 1.0)

    def restarted(self, u: Float[AnyArray, "*particles d"]) -> ArrivalState:
        """Return the state for particles in whitened coordinates, whose unit is a standard deviation."""
        return self if self.adam is None else self._replace(adam=Adam.start(u))

    def prolonged(self, u: Float[AnyArray, "*particles d"]) -> ArrivalState:
        """Return the state where the second half begins again, for particles in units of the sds of the starts."""
        rates = np.full(u.shape[:2], ADAM.late_rate, u.dtype)
        adam = Adam.start(u)._replace(unit=np.ones(u.shape[-1:], u.dtype))
        lost = np.zeros_like(self.lost)
        return self._replace(adam=adam, step_size=rates, lost=lost, is_prolonged=np.ones((), bool))


class WarmupState(NamedTuple):
    """What warmup has learned so far, and the sums it learns from.

    It ends with the warmup; :class:`~numpyro_repulsion.warmup.Learned` is what remains of it.

    - **iteration** - how many MCMC iterations are done.
    - **num_warmup** - how many iterations are warmup.
    - **arrival** - how particles arrive.
    - **moments** - moments of the cloud since the last of the ``BEGINNINGS`` (``windows.py``).
    - **noise_shrinkage** - the largest factor by which the variance of a noisy direction exceeds 1 in whitened
      coordinates.
    - **step_size** - the measured ε.
    - **bias** - the relative inflation of variances that this ε is expected to cause; negative if unknown.
    - **mean_bias** - the same as the mean over directions; negative if unknown.
    - **effective_draws** - how many independent draws a run as long as the warmup is worth with this ε, for the
      direction that moves slowest; negative if the step is not measured.
    - **is_raised** - whether the bias exceeds the tolerance, because the run is short.
    - **noise_share** - the share of the gradient noise that successive minibatches do not cancel: 1 unless they depend
      on each other.
    - **measurements** - curvature and noise since the scales last changed.
    - **symptoms** - symptoms of a posterior that no linear scale suits; ``None`` if the step is not measured.
    - **preconditioner**, **bandwidth**, **reference**, **centering**, **gradient_noise**, **jumps**,
      **posterior_id**, **data_fingerprint** - as in :class:`~numpyro_repulsion.warmup.Learned`, so far; the last one as
      a pair.
    """

    iteration: Integer[AnyArray, ""]
    num_warmup: Integer[AnyArray, ""]
    arrival: ArrivalState
    preconditioner: Preconditioner
    moments: Moments
    noise_shrinkage: Float[AnyArray, ""]
    centering: Centering | None
    step_size: Float[AnyArray, ""]
    bias: Float[AnyArray, ""]
    mean_bias: Float[AnyArray, ""]
    effective_draws: Float[AnyArray, ""]
    is_raised: Bool[AnyArray, ""]
    noise_share: Float[AnyArray, ""]
    measurements: Measurements
    bandwidth: Float[AnyArray, ""]
    reference: Reference | None
    symptoms: Symptoms | None
    gradient_noise: Float[AnyArray, " d"] | None = None
    jumps: JumpsState | None = None
    posterior_id: Integer[AnyArray, 4] | None = None
    data_fingerprint: tuple[Float[AnyArray, " d"], Float[AnyArray, ""]] | None = None

    @property
    def has_basins(self) -> bool:
        """Whether warmup found several basins, between which updates do not move, or particles jump."""
        # Once particles jump between basins, the symptoms disappear.
        if self.jumps is not None and self.jumps.tally[0] > 0:
            return True
        # In the mouth of a funnel few particles keep apart from the others.
        symptoms, is_network = self.symptoms, bool(self.arrival.is_prolonged)
        return symptoms is not None and bool(symptoms.widest.has_basins) and (is_network or not symptoms.has_funnel)

    @property
    def may_have_basins(self) -> bool:
        """Whether particles are in several basins, or keep apart and no force is seen to pull them together."""
        return self.has_basins or bool(self.symptoms is not None and self.symptoms.widest.may_have_basins)

    @property
    def noise(self) -> NoiseFigures:
        """The noise of the gradient in use."""
        return NoiseFigures(*(by_order[self.order] for by_order in self.measurements.mean_noise))

    @property
    def order(self) -> int:
        """The order of the control variates in use; 0 for none."""
        return 0 if self.reference is None else int(self.reference.order)

    def largest_variance(self, dynamics: Dynamics) -> float:
        """Return the largest variance of the positions in any direction, in units of the temperature."""
        return self.moments.largest_variance() / dynamics.unit_of_energy

    @staticmethod
    def start(
        num_warmup: int,
        preconditioner: Preconditioner,
        step_size: Float[AnyArray, ""] | float,
        bandwidth: Float[AnyArray, ""],
        cloud: Cloud,
        plan: WarmupPlan,
        units: Units | None = None,
        centering: Centering | None = None,
        **others: Any,
    ) -> WarmupState:
        """Return the state before the first iteration.

        :param units: those of the Hessian, if control variates may be of second order.
        :param others: the fields that are ``None`` by default.
        """
        shape, dtype = cloud.z.shape, cloud.z.dtype
        particles, dimension = shape[0] * shape[1], shape[2]
        unknown, one, reference = jnp.asarray(UNKNOWN, dtype), jnp.ones((), dtype), None
        if plan.epoch is not None:
            reference = Reference.none(shape, dtype, order=int(not plan.arrives))
        elif plan.has_reference:
            reference = Reference.none(dimension, dtype, units=units)
        return WarmupState(
            iteration=jnp.zeros((), jnp.int32),
            num_warmup=jnp.asarray(num_warmup, jnp.int32),
            arrival=ArrivalState.start(cloud.z, preconditioner, plan),
            preconditioner=preconditioner,
            moments=Moments.empty(dimension, dtype, plan.kind == "dense"),
            noise_shrinkage=one,
            centering=centering,
            step_size=jnp.asarray(step_size, dtype),
            bias=unknown,
            mean_bias=unknown,
            effective_draws=unknown,
            is_raised=jnp.zeros((), bool),
            noise_share=one,
            measurements=Measurements.empty(1 + len(SETTLING_ENDS), particles, dtype),
            bandwidth=bandwidth,
            reference=reference,
            symptoms=Symptoms.empty(particles, dimension, dtype) if plan.budget else None,
            gradient_noise=jnp.zeros(dimension, dtype) if plan.replaces_noise else None,
            **others,
        )


Found = tuple[WarmupState, Cloud]
#: What learners may use of the sampler: ``HostSampler`` in ``kernels/warmup_host.py``.
Sampler: TypeAlias = Any
#: ``(rng, window, warmup, cloud, sampler) -> (warmup, cloud)``, at the end of each window, on arrays of the host.
Learner = Callable[[Generator, Window, WarmupState, Cloud, Sampler], Found]
