"""The step size, from curvature and gradient noise measured at the ends of windows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
from jax import lax, random
import jax.numpy as jnp

from numpyro_repulsion.adaptation.measurement import UNKNOWN, measure, measure_steepness, survey
from numpyro_repulsion.adaptation.windows import Stage
from numpyro_repulsion.dynamics import Cloud

if TYPE_CHECKING:
    from numpyro_repulsion.adaptation.tuning import Tuning
    from numpyro_repulsion.adaptation.warmup import Sampler

__all__ = ["update_step_size"]

#: Half the distance over which gradients are compared, where u has unit scale.
WIDTH = 0.2


def update_step_size(
    key: jax.Array, stage: Stage, tuning: Tuning, cloud: Cloud, sampler: Sampler
) -> tuple[Tuning, Cloud]:
    """Where a window ends, one more measurement, and the step size from all of those in these coordinates."""
    learned = sampler.learned
    if not learned.measures:
        return tuning, cloud

    def measured():
        found = _measured(key, stage, tuning, cloud, sampler)
        return found if learned.step_size is None else _with_step_size(stage, found, cloud, sampler)

    return lax.cond(stage.window_ends & stage.has_arrived, measured, lambda: tuning), cloud


def _measured(key, stage, tuning, cloud, sampler):
    """The measurements with one more; and whether control variates are in use."""
    learned = sampler.learned
    in_use = tuning.anchor.in_use if learned.anchor else jnp.zeros((), bool)
    width = WIDTH if learned.scale else WIDTH * jnp.sqrt(tuning.arrival if learned.arrives else tuning.step_size)
    curvature, noise = measure(key, cloud.z, width, sampler.force(tuning), in_use, learned.anchor)
    if not learned.noise:
        # Without minibatches, midpoints differ by the third derivatives of U alone.
        noise = jnp.zeros_like(noise)
    known = tuning.measurements
    measurements = known._replace(
        number=jnp.where(stage.is_adapting, 0, known.number),
        **{
            name: jnp.where(stage.is_adapting, UNKNOWN, getattr(known, name))
            for name in ("curvature", "noise", "steepness")
        },
    )
    steepness = measure_steepness(random.fold_in(key, 1), sampler.interaction, cloud.z, tuning.bandwidth)
    tuning = tuning._replace(measurements=measurements.add(curvature, noise, steepness))
    if learned.anchor:
        plain, corrected = tuning.measurements.mean_noise
        tuning = tuning._replace(anchor=tuning.anchor._replace(in_use=corrected <= plain))
    return tuning


def _with_step_size(stage, tuning, cloud, sampler):
    """The step size that the rule takes from the measurements, with the bias and the draws that it is worth."""
    learned, dynamics = sampler.learned, sampler.dynamics
    coupling = sampler.interaction.couple(cloud.z, tuning.bandwidth)
    spread = tuning.spread(dynamics)
    noise = stage.noise_share.astype(tuning.noise.dtype) * tuning.noise
    landscape = survey(tuning.measurements, noise, spread, coupling, dynamics, sampler.shares_minibatches)
    rule = learned.step_size
    num_updates = tuning.arrival.size * sampler.num_steps * stage.num_warmup
    draws_per_step = num_updates * dynamics.rate(spread, coupling) / 2.0
    step_size = rule.step_size(
        tolerated=dynamics.tolerated(rule.tolerance, landscape, coupling),
        # Half the limit of stability at typical particles.
        moderate=jnp.minimum(
            dynamics.stable(landscape._replace(largest=landscape.curvature), coupling) / 2.0,
            dynamics.worthwhile(landscape, draws_per_step),
        ),
        stable=dynamics.stable(landscape, coupling),
        # No step of this kind moves between basins; jumps do.
        draws_per_step=jnp.where(tuning.has_basins, jnp.inf, draws_per_step)
        if dynamics.is_sampler and not learned.jumps
        else jnp.inf,
    )
    usable = jnp.isfinite(step_size) & (step_size > 0)
    # Of particles that do not move nothing was measured: stay well below the steps that Metropolis accepted.
    accepted = jnp.exp(jnp.log(tuning.arrival).mean())
    step_size = jnp.where(usable, step_size, dynamics.comparable(0.1 * accepted))
    bias, effective_draws = dynamics.bias(step_size, landscape, coupling), step_size * draws_per_step
    found = {
        "step_size": step_size,
        "bias": jnp.where(jnp.isnan(bias), UNKNOWN, bias),
        "effective_draws": jnp.where(jnp.isnan(effective_draws), UNKNOWN, effective_draws),
    }
    return tuning._replace(**{name: value.astype(cloud.z.dtype) for name, value in found.items()})
