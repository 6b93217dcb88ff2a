"""The diagnosis of a run at the end of its warmup."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.random import Generator

from numpyro_repulsion.dynamics import Cloud, Dynamics
from numpyro_repulsion.findings import LARGE_BIAS, Finding
from numpyro_repulsion.schedules import BiasBudget
from numpyro_repulsion.warmup.state import Sampler, WarmupState
from numpyro_repulsion.warmup.symptoms import BASINS_SHARE
from numpyro_repulsion.warmup.windows import Window

__all__ = ["MIN_WARMUP", "WarmupDiagnosis", "diagnose_warmup", "update_symptoms"]

#: With fewer iterations, warmup has too few draws to learn from.
MIN_WARMUP = 50
#: With fewer effective draws, the posterior's variances are not known to a tenth.
MIN_EFFECTIVE_DRAWS = 200.0
#: The typical curvature times the largest variance is 1 for a Gaussian in whitened coordinates, at most 10 for the
#: small posteriors that come out right, and 66 or more for the centered eight schools.
MAX_CONDITION = 40.0
#: The curvature at the stiffest particle over the typical one is at most 13 for posteriors that come out right.
MAX_CURVATURE_RATIO = 25.0
#: The dependence of squared gradients on a coordinate was 0.8 to 1.9 for funnels of 10 to 500 dimensions, and at most
#: 0.3 elsewhere.
MAX_DEPENDENCE = 0.5
#: Below this acceptance, jumps between basins do not determine the weights of the basins.
MIN_ACCEPTANCE = 0.02
#: Above this ratio to the curvature, the gradient noise limits the step, not the posterior.
MAX_NOISE_RATIO = 5.0
#: Above this ratio, half the noise allows a longer step.
LIMITING_NOISE_RATIO = 1.0
#: How many windows of the settling have symptoms of their own with minibatches; the last one has the rest.
NUM_SHORT_WINDOWS = 4
REPARAMETERIZE = "Reparameterize, for example with numpyro.infer.reparam.LocScaleReparam."


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
    """

    num_warmup: float
    effective_draws: float
    bias: float
    condition: float
    curvature_ratio: float
    dependence: float
    has_heavy_tails: bool
    has_basins: bool
    is_diagonal: bool
    noise_ratio: float
    control_variates_off: bool
    jumps_off: bool
    is_prolonged: bool
    thermostat_helps: bool

    def findings(self) -> list[Finding]:
        """Return the problems, each with its remedy."""
        found = []

        def add(name, severity, figure, message, remedy):
            figure = None if figure is None or not np.isfinite(figure) else float(figure)
            found.append(Finding(name, severity, figure, message, remedy))

        if self.num_warmup < MIN_WARMUP:
            message = (
                f"{int(self.num_warmup)} iterations of warmup are too few to learn the step size and the scales, or "
            )
            message += "to see the shape of the posterior, so nothing is known of these draws."
            remedy = f"Set num_warmup=1000, and at least {MIN_WARMUP}."
            return [Finding("short_run", "error", float(self.num_warmup), message, remedy)]
        if self.has_basins:
            add(
                "several_basins",
                "error",
                None,
                "The particles are in several modes, or label permutations, and do not move between them, so the "
                "weights of the modes are unknown.",
                "Order the labels of a mixture; judge a network by its predictions, with predict(mcmc, ...), and not "
                "by its weights."
                if self.is_prolonged
                else "Set moves=Archive(), with gradient=FullData() if rows are subsampled, or order the labels.",
            )
        # The step may have been raised until the run is worth just this many draws, which is no problem.
        if self.effective_draws < 0.99 * MIN_EFFECTIVE_DRAWS:
            correlated = self.is_diagonal and not self.dependence > MAX_DEPENDENCE
            more = "Raise `num_steps`, `num_warmup` and `num_samples`"
            if self.noise_ratio > LIMITING_NOISE_RATIO:
                more = "Raise `subsample_size`, because gradient noise limits the step, or `num_steps`"
                if self.thermostat_helps:
                    more = "Take SGNHT, because gradient noise limits the step, or raise `subsample_size`"
            add(
                "slow_directions",
                "warning",
                self.effective_draws,
                f"{'Correlated parameters move' if correlated else 'The slowest direction moves'} so slowly that a "
                f"run as long as warmup is worth only about {float(self.effective_draws):.0f} independent draws.",
                'Set preconditioner="dense".' if correlated else f"{more}, or reparameterize.",
            )
        if self.bias > 0:
            add(
                "step_bias",
                "error" if self.bias > LARGE_BIAS else "warning",
                np.sqrt(1.0 + self.bias) - 1.0,
                "The step exceeds the bias tolerance because the run is short, and may make posterior sds about "
                f"{100 * float(np.sqrt(1.0 + self.bias) - 1.0):.0f} % too large.",
                "Raise `num_steps`, `num_warmup` and `num_samples`, which allows a shorter step.",
            )
        if self.dependence > MAX_DEPENDENCE:
            add(
                "funnel",
                "error",
                self.dependence,
                "Curvature varies strongly along one coordinate, as in a funnel, so the run may miss the narrow part "
                "of the posterior.",
                REPARAMETERIZE,
            )
        elif self.has_heavy_tails:
            add(
                "heavy_tails",
                "warning",
                None,
                "The posterior has heavy tails, in which particles move too slowly.",
                "Choose a prior with lighter tails, or transform the parameters with "
                "numpyro.infer.reparam.TransformReparam.",
            )
        elif self.condition > MAX_CONDITION or self.curvature_ratio > MAX_CURVATURE_RATIO:
            add(
                "varying_curvature",
                "warning",
                np.fmax(self.condition / MAX_CONDITION, self.curvature_ratio / MAX_CURVATURE_RATIO),
                "Curvature varies strongly over the posterior, so no step size suits all of it and the run may miss "
                "narrow parts.",
                REPARAMETERIZE,
            )
        if self.noise_ratio > MAX_NOISE_RATIO:
            instead = "Take SGNHT, whose thermostat removes most of it, or raise" if self.thermostat_helps else "Raise"
            add(
                "gradient_noise",
                "warning",
                self.noise_ratio,
                f"Gradient noise, {float(self.noise_ratio):.0f} times the curvature, forces a short step.",
                "Set gradient=SVRG(), with references for each particle, or raise `subsample_size`."
                if self.is_prolonged
                else f"{instead} `subsample_size`; estimate a random likelihood more precisely.",
            )
        # Those of networks always add noise, and warmup needs them to tell.
        if self.control_variates_off and not self.is_prolonged:
            add(
                "control_variates_off",
                "warning",
                None,
                "Control variates add noise here, as with several modes or a distant reference, so warmup switched "
                "them off.",
                "Set gradient=SVRG(), with references for each particle, or gradient=Sweeps(), whose noise nearly "
                "cancels in long runs.",
            )
        if self.jumps_off:
            add(
                "jumps_off",
                "warning",
                None,
                "Jumps are hardly ever accepted, so warmup switched them off and particles stay in their modes.",
                "Raise `num_warmup` or `num_chains`, which improves the archive.",
            )
        return found


def update_symptoms(
    rng: Generator, window: Window, warmup: WarmupState, cloud: Cloud, sampler: Sampler
) -> tuple[WarmupState, Cloud]:
    """While settling, update the direction of largest variance, from the sums over the window."""
    del rng
    # Short steps need a longer last window, or slow particles look like particles in different basins.
    is_short = sampler.plan.noise and window.num_settled > NUM_SHORT_WINDOWS and not window.is_last
    if warmup.symptoms is None or window.is_adapting or is_short:
        return warmup, cloud
    return warmup._replace(symptoms=warmup.symptoms.next_window(sampler.dynamics.temperature or 1.0)), cloud


def diagnose_warmup(
    warmup: WarmupState,
    rule: BiasBudget | None,
    dynamics: Dynamics,
    is_jumping: bool | None = None,
    needs_reference: bool = True,
) -> WarmupDiagnosis:
    """Diagnose the run at the end of warmup.

    :param rule: how the step size was measured; with a given step (``None``), only control variates and jumps are
        diagnosed.
    :param dynamics: how the particles move.
    :param is_jumping: whether jumps by ``moves`` are in use; ``None`` without ``moves``.
    :param needs_reference: whether a gradient with control variates has none of the other ways to reduce noise.
    """
    reference, is_prolonged = warmup.reference, bool(warmup.arrival.is_prolonged)
    unknown = np.nan
    found = WarmupDiagnosis(
        num_warmup=unknown,
        effective_draws=unknown,
        bias=unknown,
        condition=unknown,
        curvature_ratio=unknown,
        dependence=unknown,
        has_heavy_tails=False,
        has_basins=False,
        is_diagonal=False,
        noise_ratio=unknown,
        control_variates_off=reference is not None and needs_reference and not reference.order,
        jumps_off=is_jumping is not None and not is_jumping,
        is_prolonged=is_prolonged,
        thermostat_helps=needs_reference and dynamics.is_sampler and not dynamics.absorbs_noise,
    )
    symptoms = warmup.symptoms
    if rule is None or symptoms is None:
        return found
    curvature, step = warmup.measurements.typical_curvature, warmup.step
    widest = symptoms.widest
    is_sampler, is_dense = dynamics.is_sampler, warmup.moments.position_scatter.ndim == 2
    # If particles jump, the updates need not cross the spread over all modes.
    has_no_moves = is_jumping is None
    travels = is_sampler and has_no_moves
    spread = warmup.spread(dynamics)
    # With diagonal scales, some direction may vary more than any coordinate.
    share = spread / np.maximum(widest.variance / (dynamics.temperature or 1.0), spread)
    # Basins of different widths look like a funnel too, whether particles jump between them or not. In a network the
    # gradients of a unit's weights depend on its other weights without a funnel. Heavy tails make gaps between
    # particles, and their own symptoms are rarer.
    has_heavy_tails = travels and not is_prolonged and bool(symptoms.has_heavy_tails)
    # Networks, between which U is not convex, are in basins if they keep apart, explored or not.
    keeps_apart = warmup.has_basins or (is_prolonged and widest.share > BASINS_SHARE)
    has_basins = bool(travels and not has_heavy_tails and keeps_apart)
    number, accepted = (0.0, 0.0) if warmup.jumps is None else warmup.jumps.tally
    jumps_well = accepted > MIN_ACCEPTANCE * np.maximum(number, 1.0)
    # Noisy directions are wide in whitened coordinates by intent.
    condition = curvature * spread / warmup.scales.noise_shrinkage
    is_known = travels and not has_basins and step.effective_draws >= 0
    # Curvature and spread vary harmlessly between basins.
    return found._replace(
        num_warmup=warmup.num_warmup,
        effective_draws=share * step.effective_draws if is_known else unknown,
        bias=step.bias if is_sampler and step.is_raised else unknown,
        condition=condition if has_no_moves and is_dense and not has_basins else unknown,
        curvature_ratio=unknown if has_basins else warmup.measurements.largest_curvature / curvature,
        dependence=symptoms.dependence if is_sampler and not (is_prolonged or has_basins) else unknown,
        has_heavy_tails=has_heavy_tails,
        has_basins=has_basins and not jumps_well,
        is_diagonal=warmup.scales.preconditioner.kind == "diagonal",
        noise_ratio=step.noise_share * warmup.noise / curvature,
    )
