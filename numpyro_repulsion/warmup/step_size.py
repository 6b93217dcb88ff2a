"""The learner of the step size, which measures curvature and gradient noise at the ends of windows."""

from __future__ import annotations

import jax
from jax import lax
import jax.numpy as jnp

from numpyro_repulsion.dynamics import Cloud
from numpyro_repulsion.warmup.arrival import rescue
from numpyro_repulsion.warmup.curvature import (
    UNKNOWN,
    estimate_curvature,
    measure_steepness,
    summarize_curvature,
)
from numpyro_repulsion.warmup.state import Sampler, WarmupState
from numpyro_repulsion.warmup.windows import Stage

__all__ = [
    "update_reference",
    "update_step_size",
]


def update_reference(
    key: jax.Array, stage: Stage, warmup: WarmupState, cloud: Cloud, sampler: Sampler
) -> tuple[WarmupState, Cloud]:
    """Move a common reference to the mean of the window, or each particle's own reference to its position."""
    known = warmup.reference
    if known is None:
        return warmup, cloud
    if sampler.plan.epoch is None:
        moves, position = (
            stage.references_move,
            warmup.scales.preconditioner.to_positions(warmup.moments.position),
        )
    else:
        moves = stage.references_move & stage.is_arriving
        position = warmup.scales.preconditioner.to_positions(cloud.z)
    moved = known._replace(position=jnp.where(moves, position, known.position), in_use=known.in_use | moves)
    size = cloud.potential_energy.size
    reference = lax.cond(moves, lambda: sampler.evaluate_reference(key, warmup, moved, size), lambda: moved)
    return warmup._replace(reference=reference), cloud


#: Half the distance over which gradients are compared, if u has unit scale.
WIDTH = 0.2


def update_step_size(
    key: jax.Array, stage: Stage, warmup: WarmupState, cloud: Cloud, sampler: Sampler
) -> tuple[WarmupState, Cloud]:
    """At the end of a window, measure once more and set the step size from all measurements in these coordinates.

    What the dynamics carries is adapted to it.
    """
    plan = sampler.plan
    if not plan.measures:
        return warmup, cloud

    def measured():
        found = _measured(key, stage, warmup, cloud, sampler)
        if plan.step_size is None:
            return found, cloud.memory
        found = _with_step_size(stage, found, cloud, sampler)
        return found, sampler.dynamics.settled(cloud, found.step.size, found.isotropic_noise).memory

    warmup, memory = lax.cond(stage.window_ends & stage.has_arrived, measured, lambda: (warmup, cloud.memory))
    return warmup, cloud._replace(memory=memory)


def _measured(key, stage, warmup, cloud, sampler):
    """Add a measurement, and use control variates only if they do not add noise."""
    plan = sampler.plan
    in_use = warmup.reference.in_use if plan.reference else jnp.zeros((), bool)
    width = WIDTH if plan.scale else WIDTH * jnp.sqrt(warmup.arrival.step_size if plan.arrives else warmup.step.size)
    # Curvature and noise around a particle that has run away may be a million times those around the others.
    measured = rescue(key, cloud.z, warmup.arrival.lost)
    curvature, noise, isotropic = estimate_curvature(
        key, measured, width, sampler.energy_and_grad(warmup), in_use, plan.reference
    )
    if not plan.noise:
        # Without minibatches, midpoints differ only by the third derivatives of U.
        noise = isotropic = jnp.zeros_like(noise)
    known = warmup.step.measurements
    measurements = known._replace(
        number=jnp.where(stage.is_adapting, 0, known.number),
        **{
            name: jnp.where(stage.is_adapting, UNKNOWN, getattr(known, name))
            for name in ("curvature", "noise", "isotropic_noise", "steepness")
        },
    )
    steepness = measure_steepness(key, sampler.interaction, cloud.z, warmup.bandwidth)
    measurements = measurements.add(curvature, noise, isotropic, steepness)
    warmup = warmup._replace(step=warmup.step._replace(measurements=measurements))
    if plan.reference:
        in_use = _prefers_reference(warmup, cloud, sampler)
        warmup = warmup._replace(reference=warmup.reference._replace(in_use=in_use))
    return warmup


def _prefers_reference(warmup, cloud, sampler):
    """Return whether control variates help: by their noise; in sweeps by the step, because they cost two gradients."""
    plan, dynamics = sampler.plan, sampler.dynamics
    known = warmup.step.measurements
    plain, corrected = known.mean_noise
    if plan.sweep is None or plan.step_size is None:
        return corrected <= plain
    coupling, spread = sampler.interaction.couple(cloud.z, warmup.bandwidth), warmup.spread(dynamics)
    error = dynamics.step_error(coupling)
    plain, corrected = zip(known.mean_noise, known.mean_isotropic_noise, strict=True)
    with_reference, without = (
        error.max_step_for_bias(plan.step_size.tolerance, _stats(warmup, noise, spread, coupling, sampler))
        for noise in (corrected, plain)
    )
    return with_reference >= 2.0 * without


def _stats(warmup, noise, spread, coupling, sampler):
    return summarize_curvature(
        warmup.step.measurements,
        noise,
        spread,
        coupling,
        sampler.dynamics,
        sampler.shares_minibatches,
        sampler.plan.sweep,
    )


def _with_step_size(stage, warmup, cloud, sampler):
    """Set the step size by the rule, and its expected bias and effective draws."""
    plan, dynamics = sampler.plan, sampler.dynamics
    coupling = sampler.interaction.couple(cloud.z, warmup.bandwidth)
    spread = warmup.spread(dynamics)
    share = stage.noise_share.astype(warmup.noise.dtype)
    noise = share * warmup.noise, share * warmup.isotropic_noise
    # Whitened by the mean curvature, some direction has one of 1, even if lost particles make the spread huge.
    widest = jnp.minimum(spread, 1.0) if plan.noise and plan.scale is not None else spread
    stats = _stats(warmup, noise, widest, coupling, sampler)
    rule = plan.step_size
    error = dynamics.step_error(coupling)
    # Not in integers, which overflow for many particles.
    num_updates = warmup.arrival.step_size.size * sampler.num_steps * stage.num_warmup.astype(cloud.z.dtype)
    draws_per_step = num_updates * error.relaxation_rate(spread) / 2.0
    # Only jumps move particles between basins, so a longer step gains no draws there. With minibatches, a longer step
    # must gain draws in most coordinates, because its bias is in all of them; and a cloud that has just arrived is too
    # wide, which would make the run look short.
    gains_none = warmup.has_basins | (stage.is_adapting & plan.noise)
    if warmup.symptoms is not None:
        keeps_apart = warmup.symptoms.widest.may_have_basins
        if stage.is_prolonged is not None:
            # Networks do too, and gain by longer steps all the same (below).
            keeps_apart &= ~stage.is_prolonged
        gains_none |= keeps_apart
    gained = draws_per_step
    if plan.noise and plan.scale is not None:
        typical = jnp.median(warmup.moments.variances()) / (dynamics.temperature or 1.0)
        if stage.is_prolonged is not None:
            # Most of the spread of networks is between modes, which no step crosses.
            typical = jnp.where(stage.is_prolonged, jnp.minimum(typical, 1.0), typical)
        gained = num_updates * error.relaxation_rate(typical) / 2.0
    step_size = rule.step_size(
        max_step_for_bias=error.max_step_for_bias(rule.tolerance, stats),
        # Half the limit of stability at typical particles.
        max_step_for_short_run=jnp.minimum(
            error.stability_limit(stats._replace(largest=stats.curvature)) / 2.0,
            error.max_step_for_short_run(stats, gained),
        ),
        stability_limit=error.stability_limit(stats),
        draws_per_step=jnp.where(gains_none, jnp.inf, gained) if dynamics.is_sampler and not plan.jumps else jnp.inf,
    )
    usable = jnp.isfinite(step_size) & (step_size > 0)
    # If nothing could be measured, as for particles that do not move, stay well below the steps of the arrival.
    accepted = jnp.exp(jnp.log(warmup.arrival.step_size).mean())
    step_size = jnp.where(usable, step_size, error.from_overdamped_step(0.1 * accepted))
    bias, effective_draws = error.bias(step_size, stats), step_size * draws_per_step
    remaining = error.remaining_noise(step_size, stats._replace(noise=jnp.ones_like(stats.noise)))
    found = {
        "size": step_size,
        "bias": jnp.where(jnp.isnan(bias), UNKNOWN, bias),
        "effective_draws": jnp.where(jnp.isnan(effective_draws), UNKNOWN, effective_draws),
        "noise_share": remaining,
    }
    found = {name: value.astype(cloud.z.dtype) for name, value in found.items()}
    return warmup._replace(step=warmup.step._replace(**found))
