"""The learner of the step size, which measures curvature and gradient noise at the ends of windows."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import numpy as np
from numpy.random import Generator

from numpyro_repulsion.dynamics import Cloud
from numpyro_repulsion.findings import MAX_SHIFT
from numpyro_repulsion.warmup.arrival import rescue
from numpyro_repulsion.warmup.curvature import (
    CURVATURE,
    UNKNOWN,
    collective_shift,
    estimate_curvature,
    noise_by_coordinate,
    summarize_curvature,
)
from numpyro_repulsion.warmup.state import Found, Sampler, WarmupState
from numpyro_repulsion.warmup.windows import FREEZE, Window


@dataclass(frozen=True)
class StepConstants:
    """What the choice of the step size chose."""

    #: By how many of its standard deviations the bias of many effects may move their scale.
    shift: float = 0.1
    #: Pairs of minibatches that compare the orders of control variates, and measure that shift.
    pairs: int = 4
    #: Effective draws of each particle that a short run shall have. Of n in all, R-hat of L particles is about
    #: √(1 + 2L/n), so 1.05.
    draws: float = 20.0
    #: The share of the limit of stability at typical particles up to which a short run may raise the step.
    stable: float = 0.5
    #: The step if nothing could be measured, as for particles that do not move, in steps of the arrival.
    cautious: float = 0.1


STEP = StepConstants()


def update_reference(rng: Generator, window: Window, warmup: WarmupState, cloud: Cloud, sampler: Sampler) -> Found:
    """Move a common reference to the mean of the window, or each particle's own reference to its position."""
    known, is_common = warmup.reference, sampler.plan.epoch is None
    if known is None or not window.moves_references or not (is_common or window.was_arrival):
        return warmup, cloud
    position = warmup.moments.position if is_common else cloud.z
    has_hessian = _has_hessian(window, known, sampler)
    moved = known._replace(position=position, order=np.asarray(1 + has_hessian, np.int32))
    found = sampler.evaluate_reference(rng, warmup, moved, has_hessian)
    if has_hessian and found.hessian is not None and not found.hessian.is_known:
        # Over all rows it is not an arrow. NaN would be in corrections of first order too, even times 0.
        nothing = jax.tree.map(np.zeros_like, found.hessian)
        found = found._replace(hessian=nothing, order=np.asarray(1, np.int32))
    warmup = warmup._replace(reference=found)
    if window.is_at(FREEZE):
        # The scales, which are next, shrink directions for the noise of the order that is used from now on. Between two
        # modes, that of second order may be hundreds of times the plain one.
        order = least_noisy_order(rng, int(found.order), warmup, cloud, sampler)
        warmup = warmup._replace(reference=found._replace(order=order))
    return warmup, cloud


def least_noisy_order(rng: Generator, highest: int, warmup: WarmupState, cloud: Cloud, sampler: Sampler) -> np.ndarray:
    """Return the order of control variates, up to the highest, with the least mean noise; of equal ones the last."""
    points, gradients = rescue(rng, cloud.z, warmup.arrival.lost), sampler.gradients(warmup)
    orders = range(highest, -1, -1)
    noise = [noise_by_coordinate(rng, points, gradients, STEP.pairs, order).mean() for order in orders]
    return np.asarray(orders[int(np.argmin(noise))], np.int32)


def _has_hessian(window, reference, sampler):
    """Return whether a reference has its Hessian at the end of this window."""
    # A dense one costs a pass over the rows for each parameter, and noise limits the steps until the last anyway. That
    # of an arrow costs less, and gives the scales.
    is_due = window.is_at(FREEZE) or sampler.plan.kind == "arrow"
    return reference.hessian is not None and (is_due or not window.is_adapting)


def update_step_size(rng: Generator, window: Window, warmup: WarmupState, cloud: Cloud, sampler: Sampler) -> Found:
    """Measure once more and set the step size from all measurements in these coordinates.

    What the dynamics carries is adapted to it.
    """
    if not sampler.plan.measures or not window.has_arrived:
        return warmup, cloud
    found = _measured(rng, window, warmup, cloud, sampler)
    if sampler.plan.rule is None:
        return found, cloud
    found = _with_step_size(rng, window, found, cloud, sampler)
    return found, sampler.settled(cloud, found.step_size, found.isotropic_noise)


def _measured(rng, window, warmup, cloud, sampler):
    """Add a measurement, and use control variates only if they do not add noise."""
    plan = sampler.plan
    step_size = warmup.arrival.step_size if plan.arrives else warmup.step_size
    width = CURVATURE.width * (1.0 if plan.kind else np.sqrt(step_size))
    # Curvature and noise around a particle that has run away may be a million times that around the others.
    measured = rescue(rng, cloud.z, warmup.arrival.lost)
    orders = [0]
    if plan.has_reference:
        has_hessian = _has_hessian(window, warmup.reference, sampler) and warmup.reference.hessian.is_known
        in_use = int(warmup.reference.order)
        orders = [in_use, *(order for order in range(2 + has_hessian) if order != in_use)]
    keeps_apart = window.is_prolonged or warmup.may_have_basins
    curvature, noise = estimate_curvature(rng, measured, width, sampler.gradients(warmup), orders, not keeps_apart)
    if not plan.is_noisy:
        # Without minibatches, midpoints differ only by the third derivatives of U.
        noise = np.zeros_like(noise)
    known = warmup.measurements
    if window.is_adapting:
        known = type(known)(np.zeros_like(known.number), *(np.full_like(x, UNKNOWN) for x in known[1:]))
    known = known.add(curvature, noise, sampler.steepness(cloud.z, warmup.bandwidth))
    warmup = warmup._replace(measurements=known)
    if plan.has_reference:
        order = np.asarray(_best_order(warmup, cloud, sampler, orders), np.int32)
        warmup = warmup._replace(reference=warmup.reference._replace(order=order))
    return warmup


def _best_order(warmup, cloud, sampler, orders):
    """Return the best order of control variates: by the noise; in sweeps by the step, because each costs gradients."""
    plan, dynamics = sampler.plan, sampler.dynamics
    known = warmup.measurements
    if plan.sweep is None or plan.rule is None:
        # Of equal ones the highest.
        return min(sorted(orders, reverse=True), key=lambda order: known.mean_noise[order])
    coupling, spread = sampler.couple(cloud.z, warmup.bandwidth), warmup.spread(dynamics)
    error = dynamics.step_error(coupling)

    def step(order):
        noise = known.mean_noise[order], known.mean_isotropic_noise[order]
        stats = _stats(warmup, noise, spread, coupling, sampler)
        return error.max_step_for_bias(plan.tolerance(error, order), stats) / (2.0 if order else 1.0)

    return max(sorted(orders, reverse=True), key=step)


def _stats(warmup, noise, spread, coupling, sampler):
    plan = sampler.plan
    measured = warmup.measurements, noise, spread, coupling
    return summarize_curvature(*measured, sampler.dynamics, plan.shares_minibatches, plan.sweep)


def _max_step_for_sums(rng, window, warmup, cloud, sampler, error, stats, needed):
    """Return the step whose bias in thousands of effects does not add up to a shift of their scale; else infinity.

    :param needed: the step that a short run needs, which may move the scale as far as no finding names it.
    """
    if window.is_adapting or sampler.plan.kind != "arrow":
        return np.inf
    points, gradients = rescue(rng, cloud.z, warmup.arrival.lost), sampler.gradients(warmup)
    noise = noise_by_coordinate(rng, points, gradients, STEP.pairs, warmup.order).mean(0)
    sds = np.sqrt(warmup.moments.variances())
    shift = collective_shift(rng, points, np.where(np.isfinite(sds), sds, 1.0), noise, gradients)
    if sampler.plan.tolerance(error, warmup.order) * shift <= STEP.shift:
        return np.inf
    # Their bias is that of the mean noise.
    of_all = stats._replace(noise=stats.isotropic_noise)
    within, most = (error.max_step_for_bias(limit / shift, of_all) for limit in (STEP.shift, MAX_SHIFT))
    return np.maximum(within, np.minimum(needed, most))


def _with_step_size(rng, window, warmup, cloud, sampler):
    """Set the step size by the rule, and its expected bias and effective draws."""
    plan, dynamics = sampler.plan, sampler.dynamics
    coupling = sampler.couple(cloud.z, warmup.bandwidth)
    spread = warmup.spread(dynamics)
    noise = window.annealed_share * warmup.noise, window.annealed_share * warmup.isotropic_noise
    # Whitened by the mean curvature, some direction has one of 1, even if lost particles make the spread huge.
    widest = np.minimum(spread, 1.0) if plan.is_noisy and plan.kind is not None else spread
    stats = _stats(warmup, noise, widest, coupling, sampler)
    rule = plan.rule
    error = dynamics.step_error(coupling)
    tolerance, of_any = plan.tolerance(error, warmup.order), plan.tolerance_of_any(error, warmup.order)
    num_particle_updates = float(cloud.potential_energy.size * plan.num_steps * window.timetable.num_warmup)
    draws_per_step = num_particle_updates * error.relaxation_rate(spread) / 2.0
    # Only jumps move particles between basins, so a longer step gains no draws there. With minibatches, a longer step
    # must gain draws in most coordinates, because its bias is in all of them; and a cloud that has just arrived is too
    # wide, which would make the run look short.
    # Networks keep apart too, and gain by longer steps all the same (below).
    keeps_apart = warmup.has_basins if window.is_prolonged else warmup.may_have_basins
    gains_none = keeps_apart or (window.is_adapting and plan.is_noisy)
    gained = draws_per_step
    if plan.is_noisy and plan.kind is not None:
        typical = np.median(warmup.moments.variances()) / (dynamics.temperature or 1.0)
        if window.is_prolonged:
            # Most of the spread of networks is between modes, which no step crosses.
            typical = np.minimum(typical, 1.0)
        gained = num_particle_updates * error.relaxation_rate(typical) / 2.0
    may_be_raised = dynamics.is_sampler and not plan.has_moves and not gains_none
    enough = STEP.draws * cloud.potential_energy.size
    draws = np.maximum(rule.min_draws, enough) if may_be_raised and rule.min_draws else 0.0
    sums = _max_step_for_sums(rng, window, warmup, cloud, sampler, error, stats, draws / draws_per_step)
    longest = error.max_step_for_bias(of_any, stats)
    if of_any > tolerance:
        # As a mean over all directions, the bias is within the tolerance.
        longest = np.minimum(longest, error.max_step_for_bias(tolerance, stats._replace(noise=stats.isotropic_noise)))
    step_size = rule.step_size(
        max_step_for_bias=np.minimum(longest, sums),
        max_step_for_short_run=np.minimum(
            error.stability_limit(stats._replace(largest=stats.curvature)) * STEP.stable,
            error.max_step_for_short_run(stats, gained),
        ),
        stability_limit=error.stability_limit(stats),
        draws_per_step=gained if may_be_raised else np.inf,
    )
    if not (np.isfinite(step_size) and step_size > 0):
        step_size = error.from_overdamped_step(STEP.cautious * np.exp(np.log(warmup.arrival.step_size).mean()))
    bias, effective_draws = error.bias(step_size, stats), step_size * draws_per_step
    mean_bias = error.mean_bias(step_size, stats)
    remaining = error.remaining_noise(step_size, stats._replace(noise=1.0))
    return warmup._replace(
        step_size=step_size,
        bias=UNKNOWN if np.isnan(bias) else bias,
        mean_bias=UNKNOWN if np.isnan(mean_bias) else mean_bias,
        effective_draws=UNKNOWN if np.isnan(effective_draws) else effective_draws,
        is_raised=bias > 1.01 * of_any,
        noise_share=remaining,
    )
