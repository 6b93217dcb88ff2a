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
#: posteriors of `benchmarks/zero_tuning.py` that come out right; 66 or more for the centred eight schools.
MAX_CONDITION = 40.0
#: The curvature of the stiffest particle over the typical one, which is at most 13 where things come out right.
MAX_CURVATURE_RATIO = 25.0
#: Gradient noise in units of curvature beyond which it, and not the posterior, sets the step.
MAX_NOISE_RATIO = 5.0


class Verdict(NamedTuple):
    """What the end of warmup says about the run; scalars, NaN where there is nothing to say.

    - **effective_draws** - how many independent draws as many iterations as there were of warmup are worth, for the
      slowest direction.
    - **bias** - the relative inflation of variances to be expected, where it is more than tolerated.
    - **condition** - the typical curvature times the largest variance, after whitening.
    - **curvature_ratio** - the curvature at the stiffest particle over the typical one.
    - **noise_ratio** - variance of the gradient noise over the typical curvature.
    - **fell_back** - whether control variates were given up.
    - **stays** - whether jumps were given up.
    """

    effective_draws: jax.Array
    bias: jax.Array
    condition: jax.Array
    curvature_ratio: jax.Array
    noise_ratio: jax.Array
    fell_back: jax.Array
    stays: jax.Array

    def complaints(self) -> list[str]:
        """What is wrong, in sentences, each with its remedy."""
        found = []
        # A step that was raised until the run is worth just so many is no cause for complaint.
        if self.effective_draws < 0.99 * MIN_EFFECTIVE_DRAWS:
            found.append(
                "The slowest direction moves so little that as many draws as there were warmup iterations are worth "
                f"about {float(self.effective_draws):.0f} independent ones: raise `num_steps`, num_warmup and "
                "num_samples, or reparameterize."
            )
        if self.bias > 0:
            found.append(
                "The step was made longer than its tolerance, lest the particles hardly move: variances may come out "
                f"{100 * float(self.bias):.0f} % too large. More updates (`num_steps`, num_warmup and num_samples) let "
                "it be shorter."
            )
        if self.condition > MAX_CONDITION or self.curvature_ratio > MAX_CURVATURE_RATIO:
            found.append(
                "Curvature varies wildly over the posterior, so no step size suits all of it, and narrow parts, such "
                "as the neck of a funnel, may be missed: reparameterize (numpyro.infer.reparam.LocScaleReparam)."
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

    :param rule: how the step size was measured; of a given step only the control variates are judged.
    :param dynamics: how the particles move.
    """
    curvature = tuning.measurements.typical_curvature
    unknown = jnp.full_like(curvature, jnp.nan)
    fell_back = jnp.asarray(False if tuning.anchor is None else ~tuning.anchor.in_use)
    stays = jnp.asarray(False if tuning.jumps is None else tuning.jumps.kind == 0)
    if rule is None:
        return Verdict(unknown, unknown, unknown, unknown, unknown, fell_back, stays)
    is_sampler = dynamics.is_sampler
    # Where particles jump, the spread over all modes is no matter of updates.
    travels = is_sampler and tuning.jumps is None
    is_dense = tuning.jumps is None and tuning.moments.position_scatter.ndim == 2
    return Verdict(
        effective_draws=tuning.effective_draws if travels else unknown,
        bias=jnp.where(is_sampler & (tuning.bias > 1.01 * rule.tolerance), tuning.bias, jnp.nan),
        condition=curvature * tuning.spread(dynamics) if is_dense else unknown,
        curvature_ratio=tuning.measurements.largest_curvature / curvature,
        noise_ratio=tuning.noise / curvature,
        fell_back=fell_back,
        stays=stays,
    )
