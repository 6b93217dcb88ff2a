"""What warmup thinks of the run to come."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from numpyro_repulsion.adaptation.tuning import Tuning

__all__ = ["Verdict", "judge"]

#: Effective draws below which a posterior's standard deviations are not known to a tenth.
MIN_EFFECTIVE_DRAWS = 200.0
#: Beyond this share of the stiffest particle's curvature over the typical one, no step suits the whole posterior.
MAX_CURVATURE_RATIO = 25.0
#: Gradient noise in units of curvature beyond which it, and not the posterior, sets the step.
MAX_NOISE_RATIO = 5.0


class Verdict(NamedTuple):
    """What the end of warmup says about the run; scalars.

    - **effective_draws** - how many independent draws as many iterations as there were of warmup are worth, for the
      slowest direction.
    - **curvature_ratio** - the curvature at the stiffest particle over the typical one.
    - **noise_ratio** - variance of the gradient noise over the typical curvature.
    - **fell_back** - whether control variates were given up.
    """

    effective_draws: jax.Array
    curvature_ratio: jax.Array
    noise_ratio: jax.Array
    fell_back: jax.Array

    def complaints(self) -> list[str]:
        """What is wrong, in sentences, each with its remedy."""
        found = []
        if self.effective_draws < MIN_EFFECTIVE_DRAWS:
            found.append(
                f"The slowest direction moves so little that as many draws as there were warmup iterations are worth "
                f"about {float(self.effective_draws):.0f} independent ones: raise `num_steps`, and reparameterize "
                "(numpyro.infer.reparam.LocScaleReparam) or enlarge the minibatch."
            )
        if self.curvature_ratio > MAX_CURVATURE_RATIO:
            found.append(
                f"The posterior is {float(self.curvature_ratio):.0f} times stiffer in some places than in most, so no "
                "step size suits all of it, and narrow parts, such as the neck of a funnel, may be missed: "
                "reparameterize (numpyro.infer.reparam.LocScaleReparam)."
            )
        if self.noise_ratio > MAX_NOISE_RATIO:
            found.append(
                f"Minibatch noise, {float(self.noise_ratio):.0f} times the curvature, makes the step short: enlarge "
                "`subsample_size`."
            )
        if self.fell_back:
            found.append(
                "Control variates add noise here, as with several modes, and are not in use; `gradient=Subsampled()` "
                "does without them from the start."
            )
        return found


def judge(tuning: Tuning, num_steps: int, num_draws: jax.Array | int) -> Verdict:
    """The verdict at the end of warmup on ``num_draws`` draws of ``num_steps`` updates each."""
    measurements = tuning.measurements
    curvature = measurements.typical_curvature
    return Verdict(
        effective_draws=tuning.effective_draws(tuning.step_size, num_steps),
        curvature_ratio=jnp.where(curvature > 0, measurements.largest_curvature / curvature, 1.0),
        noise_ratio=jnp.where(curvature > 0, tuning.noise / curvature, 0.0),
        fell_back=jnp.asarray(False if tuning.anchor is None else ~tuning.anchor.in_use),
    )
