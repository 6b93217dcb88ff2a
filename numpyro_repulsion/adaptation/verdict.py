"""What warmup thinks of the run to come."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from numpyro_repulsion.adaptation.tuning import Tuning
from numpyro_repulsion.dynamics import Dynamics
from numpyro_repulsion.schedules import BiasBudget

__all__ = ["Verdict", "judge"]

#: Effective draws below which a posterior's standard deviations are not known to a tenth.
MIN_EFFECTIVE_DRAWS = 200.0
#: The typical curvature times the largest variance is 1 for a Gaussian in whitened coordinates, and at most 10 for the
#: posteriors of `benchmarks/studies/zero_tuning.py` that come out right; 66 or more for the centred eight schools.
MAX_CONDITION = 40.0
#: The curvature of the stiffest particle over the typical one, which is at most 13 where things come out right.
MAX_CURVATURE_RATIO = 25.0
#: By how much squared gradients depend on a coordinate: 0.8 to 1.9 was found for funnels of 10 to 500 dimensions, at
#: most 0.3 elsewhere.
MAX_DEPENDENCE = 0.5
#: Fourth moments, and the condition along the widest direction, beyond which tails are heavy: Student's t with three
#: degrees of freedom has a condition of 1.8, Cauchy's distribution 15 or more.
MAX_KURTOSIS, MAX_WIDEST_CONDITION = 8.0, 5.0
#: Below this acceptance jumps between basins do not tell their weights.
MIN_ACCEPTANCE = 0.02
#: Gradient noise in units of curvature beyond which it, and not the posterior, sets the step.
MAX_NOISE_RATIO = 5.0


class Verdict(NamedTuple):
    """What the end of warmup says about the run; scalars, NaN where there is nothing to say.

    - **effective_draws** - how many independent draws as many iterations as there were of warmup are worth, for the
      slowest direction; unknown where particles are in several basins.
    - **bias** - the relative inflation of variances to be expected, where it is more than tolerated.
    - **condition** - the typical curvature times the largest variance, after whitening.
    - **curvature_ratio** - the curvature at the stiffest particle over the typical one.
    - **dependence** - by how much squared gradients depend on a coordinate, as in a funnel.
    - **has_heavy_tails** - whether the widest direction has them.
    - **has_basins** - whether particles are in several basins, between which they hardly move.
    - **is_diagonal** - whether scales are without correlations.
    - **noise_ratio** - variance of the gradient noise over the typical curvature.
    - **fell_back** - whether control variates were given up.
    - **stays** - whether jumps were given up.
    """

    effective_draws: jax.Array
    bias: jax.Array
    condition: jax.Array
    curvature_ratio: jax.Array
    dependence: jax.Array
    has_heavy_tails: jax.Array
    has_basins: jax.Array
    is_diagonal: jax.Array
    noise_ratio: jax.Array
    fell_back: jax.Array
    stays: jax.Array

    def complaints(self) -> list[str]:
        """What is wrong, in sentences, each with its remedy."""
        found = []
        if self.has_basins:
            found.append(
                "The particles are in several basins (modes, or labels that may be exchanged) and do not move between "
                "them, so the weights of the basins are not known: use moves=Archive() with gradient=FullData(), or "
                "order the labels."
            )
        # A step that was raised until the run is worth just so many is no cause for complaint.
        if self.effective_draws < 0.99 * MIN_EFFECTIVE_DRAWS:
            worth = f"are worth about {float(self.effective_draws):.0f} independent ones"
            found.append(
                "Correlated parameters move so slowly together that as many draws as there were warmup iterations "
                f'{worth}: set preconditioner="dense".'
                if self.is_diagonal and not self.dependence > MAX_DEPENDENCE
                else "The slowest direction moves so little that as many draws as there were warmup iterations "
                f"{worth}: raise `num_steps`, num_warmup and num_samples, or reparameterize."
            )
        if self.bias > 0:
            found.append(
                "The step exceeds the bias tolerance because the run is short: variances may come out "
                f"{100 * float(self.bias):.0f} % too large. More updates (`num_steps`, num_warmup and num_samples) let "
                "it be shorter."
            )
        varies = self.condition > MAX_CONDITION or self.curvature_ratio > MAX_CURVATURE_RATIO
        if self.dependence > MAX_DEPENDENCE:
            found.append(
                "Curvature varies wildly along a coordinate, as in a funnel, so no step size suits all of the "
                "posterior and its narrow part may be missed: reparameterize (numpyro.infer.reparam.LocScaleReparam)."
            )
        elif self.has_heavy_tails:
            found.append(
                "The posterior has heavy tails, in which particles move too slowly: give these parameters a prior with "
                "lighter tails, or transform them (numpyro.infer.reparam.TransformReparam)."
            )
        elif varies:
            found.append(
                "Curvature varies wildly over the posterior, so no step size suits all of it and narrow parts may be "
                "missed: reparameterize (numpyro.infer.reparam.LocScaleReparam)."
            )
        if self.noise_ratio > MAX_NOISE_RATIO:
            found.append(
                f"Gradient noise, {float(self.noise_ratio):.0f} times the curvature, makes the step short: enlarge "
                "`subsample_size`, or estimate a random likelihood (numpyro.prng_key) more precisely."
            )
        if self.fell_back:
            found.append(
                "Control variates add noise here, as with several modes, or references left far behind, and are not in "
                "use; `gradient=Subsampled()` does without them from the start."
            )
        if self.stays:
            found.append(
                "Jumps are hardly ever accepted and were given up: particles stay in the modes they are in. A longer "
                "warmup, or more particles, gives a better archive."
            )
        return found


def judge(tuning: Tuning, rule: BiasBudget | None, dynamics: Dynamics) -> Verdict:
    """The verdict at the end of warmup.

    :param rule: how the step size was measured; of a given step only the control variates and jumps are judged.
    :param dynamics: how the particles move.
    """
    curvature = tuning.measurements.typical_curvature
    unknown, no = jnp.full_like(curvature, jnp.nan), jnp.asarray(False)
    found = Verdict(
        effective_draws=unknown,
        bias=unknown,
        condition=unknown,
        curvature_ratio=unknown,
        dependence=unknown,
        has_heavy_tails=no,
        has_basins=no,
        is_diagonal=no,
        noise_ratio=unknown,
        fell_back=no if tuning.anchor is None else ~tuning.anchor.in_use,
        stays=no if tuning.jumps is None else tuning.jumps.kind == 0,
    )
    symptoms = tuning.symptoms
    if rule is None or symptoms is None:
        return found
    widest = symptoms.widest
    is_sampler, is_dense = dynamics.is_sampler, tuning.moments.position_scatter.ndim == 2
    # Where particles jump, the spread over all modes is no matter of updates.
    stays = tuning.jumps is None
    travels = is_sampler and stays
    spread = tuning.spread(dynamics)
    # Diagonal scales leave directions that vary more than any coordinate.
    share = spread / jnp.maximum(widest.variance / (dynamics.temperature or 1.0), spread)
    # What is alike between several basins and a funnel is called a funnel, which is harder to see by other means.
    dependence = symptoms.dependence if is_sampler else unknown
    has_basins = tuning.has_basins & travels & ~(dependence > MAX_DEPENDENCE)
    is_known = travels & ~has_basins & (tuning.effective_draws >= 0)
    jumps_well = jnp.zeros((), bool) if tuning.basins is None else tuning.basins.acceptance > MIN_ACCEPTANCE
    return found._replace(
        effective_draws=jnp.where(is_known, share * tuning.effective_draws, jnp.nan),
        bias=jnp.where(is_sampler & (tuning.bias > 1.01 * rule.tolerance), tuning.bias, jnp.nan),
        # Between basins all of this varies, without harm.
        condition=jnp.where(has_basins, jnp.nan, curvature * spread) if stays and is_dense else unknown,
        curvature_ratio=jnp.where(has_basins, jnp.nan, tuning.measurements.largest_curvature / curvature),
        dependence=dependence,
        has_heavy_tails=(symptoms.kurtosis > MAX_KURTOSIS)
        & (widest.condition > MAX_WIDEST_CONDITION)
        & travels
        & ~has_basins,
        has_basins=has_basins & ~jumps_well,
        is_diagonal=jnp.asarray(not tuning.preconditioner.is_dense),
        noise_ratio=tuning.noise / curvature,
    )
