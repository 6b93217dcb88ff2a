"""What warmup learned: all that sampling needs of it, the figures that reports are made of, and the diagnosis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from jaxtyping import Float, Integer
import numpy as np
from numpy.random import Generator

from numpyro_repulsion.dynamics import Cloud, Dynamics
from numpyro_repulsion.findings import LARGE_BIAS, MAX_MEAN_SHIFT, Finding
from numpyro_repulsion.gradients import Centering, Particle, Reference
from numpyro_repulsion.rounding import AnyArray
from numpyro_repulsion.schedules import BiasBudget
from numpyro_repulsion.warmup.preconditioner import Preconditioner
from numpyro_repulsion.warmup.state import Found, JumpsState, Sampler, WarmupState
from numpyro_repulsion.warmup.symptoms import SYMPTOMS
from numpyro_repulsion.warmup.windows import Window


@dataclass(frozen=True)
class DiagnosisConstants:
    """From where on a problem is named."""

    #: With fewer iterations, warmup has too few draws to learn from.
    warmup: int = 50
    #: Effective draws in as many iterations as warmup: from 200, variances are known to a tenth.
    draws: float = 200.0
    #: Of posteriors that come out right, the condition is at most 10 and the ratio of curvatures at most 13; the
    #: condition of the centered eight schools is 66 or more.
    condition: float = 40.0
    curvature_ratio: float = 25.0
    #: The variance of the gradient noise over the typical curvature.
    noise_ratio: float = 5.0
    #: The share of jumps between basins that must be accepted, or the weights of the basins are unknown.
    accepted: float = 0.02


DIAGNOSIS = DiagnosisConstants()


class WarmupDiagnosis(NamedTuple):
    """The diagnosis of the run at the end of warmup; scalars, NaN where unknown or without a problem.

    - **num_warmup** - how many iterations were warmup, if it measured the step size.
    - **effective_draws** - how many independent draws ``num_warmup`` iterations are worth, for the slowest direction;
      unknown if the particles are in several basins.
    - **bias** - the expected relative inflation of variances, if it exceeds the tolerance.
    - **condition** - the typical curvature times the largest variance, after whitening.
    - **curvature_ratio** - the curvature at the stiffest particle over the typical one.
    - **dependence** - how strongly squared gradients depend on a coordinate, as in a funnel.
    - **has_heavy_tails** - whether a coordinate has heavy tails.
    - **has_basins** - whether the particles are in several basins, between which they hardly move.
    - **is_diagonal** - whether the scales have no correlations.
    - **noise_ratio** - the variance of the gradient noise over the typical curvature.
    - **control_variates_off** - whether warmup switched control variates off.
    - **jumps_off** - whether warmup switched jumps off.
    - **is_prolonged** - whether the arrival was prolonged, as for networks.
    - **thermostat_helps** - whether the same particles with a thermostat could make longer steps.
    - **rounding** - by how many of its standard deviations rounded gradients may shift a mean.
    """

    num_warmup: float = np.nan
    effective_draws: float = np.nan
    bias: float = np.nan
    condition: float = np.nan
    curvature_ratio: float = np.nan
    dependence: float = np.nan
    has_heavy_tails: bool = False
    has_basins: bool = False
    is_diagonal: bool = False
    noise_ratio: float = np.nan
    control_variates_off: bool = False
    jumps_off: bool = False
    is_prolonged: bool = False
    thermostat_helps: bool = False
    rounding: float = np.nan

    def findings(self) -> list[Finding]:
        """Return the problems, each with its remedy."""
        found = []

        def add(name, message, remedy, figure=np.nan, is_error=False):
            figure = float(figure) if np.isfinite(figure) else None
            found.append(Finding(name, "error" if is_error else "warning", figure, message, remedy))

        if self.num_warmup < DIAGNOSIS.warmup:
            add(
                "short_run",
                f"Warmup has only {int(self.num_warmup)} iterations, too few to adapt the step size and "
                "preconditioner or to detect problems, so the quality of these draws is unknown.",
                f"Set num_warmup=1000, and at least {DIAGNOSIS.warmup}.",
                self.num_warmup,
                is_error=True,
            )
            return found
        if self.has_basins:
            add(
                "several_basins",
                "At the end of warmup particles are in several modes (or label permutations) and do not move between "
                "them, so the weights of the modes are unknown.",
                "Order the labels of a mixture; judge a neural network by its predictions, predict(mcmc, ...), not by "
                "its weights."
                if self.is_prolonged
                else "Set moves=Archive(), with gradient=FullData() if rows are subsampled, or order the labels.",
                is_error=True,
            )
        longer = "`num_steps`, `num_warmup` and `num_samples`"
        # Half the noise would allow a longer step.
        noisy = "`subsample_size`, because gradient noise limits the step size, or"
        is_noisy = self.noise_ratio > 1.0
        # The step may have been raised until the run is worth as many, which is no problem.
        if self.effective_draws < 0.99 * DIAGNOSIS.draws:
            correlated = self.is_diagonal and not self.dependence > SYMPTOMS.dependence
            more = f"Raise {noisy} `num_steps`" if is_noisy else f"Raise {longer}"
            if is_noisy and self.thermostat_helps:
                more = "Use SGNHT, because gradient noise limits the step size, or raise `subsample_size`"
            add(
                "slow_directions",
                f"{'Correlated parameters mix' if correlated else 'The slowest direction mixes'} slowly: a run as long "
                f"as warmup would give an ESS of only about {float(self.effective_draws):.0f}.",
                'Set preconditioner="dense".' if correlated else f"{more}, or reparameterize.",
                self.effective_draws,
            )
        if self.bias > 0:
            excess = float(np.sqrt(1.0 + self.bias) - 1.0)
            add(
                "step_bias",
                "Because the run is short, warmup chose a step size above the bias budget; posterior sds may be "
                f"about {100 * excess:.0f}% too large.",
                f"Raise {noisy} {longer}." if is_noisy else f"Raise {longer}, which allows a smaller step size.",
                excess,
                is_error=self.bias > LARGE_BIAS,
            )
        reparameterize = "Reparameterize, for example with numpyro.infer.reparam.LocScaleReparam."
        varying = np.fmax(self.condition / DIAGNOSIS.condition, self.curvature_ratio / DIAGNOSIS.curvature_ratio)
        if self.dependence > SYMPTOMS.dependence:
            add(
                "funnel",
                "Curvature varies strongly along one coordinate, as in a funnel, so the run may miss the narrow part "
                "of the posterior.",
                reparameterize,
                self.dependence,
                is_error=True,
            )
        elif self.has_heavy_tails:
            add(
                "heavy_tails",
                "The posterior has heavy tails, from which particles return too slowly.",
                "Use a prior with lighter tails, or transform the parameters with "
                "numpyro.infer.reparam.TransformReparam.",
            )
        elif varying > 1.0:
            add(
                "varying_curvature",
                "Curvature varies strongly over the posterior, so no single step size suits all of it, and the run "
                "may miss narrow parts.",
                reparameterize,
                varying,
            )
        if self.noise_ratio > DIAGNOSIS.noise_ratio:
            instead = "Use SGNHT, whose thermostat removes most of it, or raise" if self.thermostat_helps else "Raise"
            add(
                "gradient_noise",
                f"Gradient noise ({float(self.noise_ratio):.0f} times the curvature) limits the step size.",
                "Set gradient=SVRG(), which has a reference for each particle, or raise `subsample_size`."
                if self.is_prolonged
                else f"{instead} `subsample_size`; estimate a random likelihood more precisely.",
                self.noise_ratio,
            )
        if self.rounding > MAX_MEAN_SHIFT:
            add(
                "rounding",
                "Errors of rounded gradients add up over the rows, and may shift posterior means by about "
                f"{float(self.rounding):.2g} posterior sds.",
                'Set jax.config.update("jax_enable_x64", True) before the data are made.',
                self.rounding,
                is_error=self.rounding > 5 * MAX_MEAN_SHIFT,
            )
        # Those of networks always add noise, and warmup needs them to tell.
        if self.control_variates_off and not self.is_prolonged:
            add(
                "control_variates_off",
                "Control variates increased the gradient noise, so warmup switched them off. Several modes or a "
                "distant reference can cause this.",
                "Set gradient=SVRG(), which has a reference for each particle, or gradient=Sweeps(), whose noise "
                "nearly cancels in long runs.",
            )
        if self.jumps_off:
            add(
                "jumps_off",
                "Jumps between modes were almost never accepted, so warmup switched them off and particles stay in "
                "their modes.",
                "Raise `num_warmup` or `num_chains`, which improves the archive.",
            )
        return found


class MeasuredFigures(NamedTuple):
    """What warmup measured since the scales last changed; scalars.

    - **high_curvature**, **largest_curvature** - the curvature that one particle in ten exceeds, and the largest.
    - **typical_steepness** - how fast Γ changes.
    - **noise**, **isotropic_noise** - the variance of the gradient in use: the largest in any direction, and the mean.
    - **largest_variance** - that of the positions in any direction, in units of the temperature.
    - **bias**, **mean_bias** - the relative inflation of variances that the step is expected to cause, at most and as
      the mean over directions; negative if unknown.
    """

    high_curvature: float
    largest_curvature: float
    typical_steepness: float
    noise: float
    isotropic_noise: float
    largest_variance: float
    bias: float
    mean_bias: float


class Coordinates(NamedTuple):
    """Coordinates and control variates, as in a :class:`Learned`, and a particle ``(1, ...)`` that tells shapes."""

    preconditioner: Preconditioner
    centering: Centering | None
    reference: Reference | None
    prototype: Particle


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
    - **packed** - the entries of :class:`MeasuredFigures` and :class:`WarmupDiagnosis` as one array, because each leaf
      of a state costs time in every iteration, negative where unknown; ``None`` if nothing was measured.
    - **posterior_id** - the identity of the data and the model, four words; zeros where it is unknown.
    - **data_fingerprint** - a start of the warmup, flat and unconstrained, followed by U there on a few rows,
      ``(d + 1,)``, which tells whether a run on data with another identity has other data; ``None`` without a warmup.
    - **gradient_noise** - with the preconditioner of an arrow, the variance of minibatch gradients along each whitened
      coordinate, by whose heat updates inject less noise, ``(d,)``: zeros where they do not, or ``None``.
    """

    preconditioner: Preconditioner
    centering: Centering | None
    step_size: Float[AnyArray, ""]
    bandwidth: Float[AnyArray, ""]
    gradient_limit: Float[AnyArray, ...] | None = None
    reference: Reference | None = None
    jumps: JumpsState | None = None
    packed: Float[AnyArray, " _"] | None = None
    posterior_id: Integer[AnyArray, 4] | None = None
    data_fingerprint: Float[AnyArray, " d"] | None = None
    gradient_noise: Float[AnyArray, " d"] | None = None

    @property
    def figures(self) -> MeasuredFigures | None:
        """What warmup measured, or ``None``."""
        return None if self.packed is None else MeasuredFigures(*self.packed[: len(MeasuredFigures._fields)])

    @property
    def diagnosis(self) -> WarmupDiagnosis | None:
        """The diagnosis at the end of warmup, on the host; or ``None``."""
        if self.packed is None:
            return None
        numbers = np.asarray(self.packed, float)[len(MeasuredFigures._fields) :]
        return WarmupDiagnosis(*np.where(numbers < 0, np.nan, numbers))


def update_symptoms(rng: Generator, window: Window, warmup: WarmupState, cloud: Cloud, sampler: Sampler) -> Found:
    """While settling, update the direction of largest variance, from the sums over the window."""
    # Minibatches need shorter steps and so a longer last window, or slow particles look like particles in other basins.
    is_short = sampler.plan.is_noisy and window.num_settled > 4 and not window.is_last
    if warmup.symptoms is None or window.is_adapting or is_short:
        return warmup, cloud
    return warmup._replace(symptoms=warmup.symptoms.next_window(sampler.dynamics.unit_of_energy)), cloud


def diagnose_warmup(
    warmup: WarmupState,
    budget: BiasBudget | None,
    dynamics: Dynamics,
    is_jumping: bool | None = None,
    is_swept: bool = False,
) -> WarmupDiagnosis:
    """Diagnose the run at the end of warmup.

    :param budget: by which the step size was measured; with a given step (``None``), only control variates and jumps
        are diagnosed.
    :param is_jumping: whether jumps by ``moves`` are in use; ``None`` without ``moves``.
    :param is_swept: whether the gradient passes through all rows in turn, which reduces noise without references.
    """
    reference, is_prolonged, unknown = warmup.reference, bool(warmup.arrival.is_prolonged), np.nan
    found = WarmupDiagnosis(
        control_variates_off=reference is not None and not is_swept and not reference.order,
        jumps_off=is_jumping is not None and not is_jumping,
        is_prolonged=is_prolonged,
        thermostat_helps=not is_swept and dynamics.is_sampler and not dynamics.absorbs_noise,
    )
    symptoms = warmup.symptoms
    if budget is None or symptoms is None:
        return found
    curvature, widest = warmup.measurements.high_curvature, symptoms.widest
    is_sampler, is_dense = dynamics.is_sampler, warmup.moments.position_scatter.ndim == 2
    # If particles jump, the updates need not cross the spread over all modes.
    has_no_moves = is_jumping is None
    travels = is_sampler and has_no_moves
    variance = warmup.largest_variance(dynamics)
    # With diagonal scales, some direction may vary more than any coordinate.
    share = variance / np.maximum(widest.variance / dynamics.unit_of_energy, variance)
    # Basins of different widths look like a funnel too, whether particles jump between them or not. In a network the
    # gradients of a unit's weights depend on its other weights without a funnel. Heavy tails make gaps between
    # particles, and their own symptoms are rarer.
    has_heavy_tails = travels and not is_prolonged and bool(symptoms.has_heavy_tails)
    # Networks, between which U is not convex, are in basins if they keep apart, explored or not.
    keeps_apart = warmup.has_basins or (is_prolonged and widest.share > SYMPTOMS.share)
    has_basins = bool(travels and not has_heavy_tails and keeps_apart)
    number, accepted = (0.0, 0.0) if warmup.jumps is None else warmup.jumps.tally
    jumps_well = accepted > DIAGNOSIS.accepted * np.maximum(number, 1.0)
    # Noisy directions are wide in whitened coordinates by intent.
    condition = curvature * variance / warmup.noise_shrinkage
    is_known = travels and not has_basins and warmup.effective_draws >= 0
    # Curvature and spread vary harmlessly between basins.
    return found._replace(
        num_warmup=warmup.num_warmup,
        effective_draws=share * warmup.effective_draws if is_known else unknown,
        bias=warmup.bias if is_sampler and warmup.is_raised else unknown,
        condition=condition if has_no_moves and is_dense and not has_basins else unknown,
        curvature_ratio=unknown if has_basins else warmup.measurements.largest_curvature / curvature,
        dependence=symptoms.dependence if is_sampler and not (is_prolonged or has_basins) else unknown,
        has_heavy_tails=has_heavy_tails,
        has_basins=has_basins and not jumps_well,
        is_diagonal=warmup.preconditioner.kind == "diagonal",
        noise_ratio=warmup.noise_share * warmup.noise.largest / curvature,
    )
