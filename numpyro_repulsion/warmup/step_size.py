"""The learner of the step size, which measures curvature and gradient noise at the ends of windows."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import numpy as np
from numpy.random import Generator

from numpyro_repulsion.dynamics import Cloud, CurvatureStats, Dynamics
from numpyro_repulsion.dynamics.base import most_gained
from numpyro_repulsion.findings import MAX_SHIFT
from numpyro_repulsion.interactions.base import MOST_REPLACED
from numpyro_repulsion.warmup.arrival import without_lost
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
    """Constants of the choice of the step size."""

    #: By how many of its standard deviations the bias of many effects may move their scale.
    shift: float = 0.1
    #: Pairs of minibatches that compare the orders of control variates, and measure that shift; and how many
    #: differences give known noise, at least.
    pairs: int = 4
    differences: int = 80
    #: Effective draws of each particle up to which a short run may shift the scale of many effects by more. Of n
    #: in all, R-hat of L particles is about √(1 + 2L/n), so 1.05.
    draws: float = 20.0
    #: With fewer effective draws in all along most coordinates, even with a longer step, runs with minibatches keep the
    #: budget: they tell only about what moves fast, and that would be biased.
    least: float = 20.0
    #: Gradient noise that exceeds the allowed one by so much needs second order before the scales are frozen.
    excess: float = 100.0
    #: The share of the limit of stability up to which known noise lengthens steps, and, at typical particles, a short
    #: run raises them.
    stable: float = 0.5
    #: The share of known gradient noise that counts as unknown: of the direction with the most noise, and of the mean,
    #: in which errors of thousands of coordinates cancel.
    unknown: float = 0.5
    unknown_mean: float = 0.2
    #: Known noise lengthens steps until a kick of so many times what one in ten exceeds turns a particle back. Of
    #: 10,000 areas of counts one has 3.4 times that in 0.8 % of the updates; of 2,000 persons who answer 100 items one
    #: has 4.9 times that in 0.24 %.
    rare: float = 8.0
    #: The step if nothing could be measured, as for particles that do not move, in steps of the arrival.
    cautious: float = 0.1


STEP = StepConstants()


def update_reference(rng: Generator, window: Window, warmup: WarmupState, cloud: Cloud, sampler: Sampler) -> Found:
    """Move a common reference to the mean of the window, or each particle's own reference to its position."""
    known, is_common = warmup.reference, sampler.plan.epoch is None
    if known is None or not window.moves_references or not (is_common or window.was_arrival):
        return warmup, cloud
    u, has_hessian = warmup.moments.position if is_common else cloud.z, needs_hessian(window, warmup, cloud, sampler)
    known = known._replace(order=np.asarray(1 + has_hessian, np.int32))
    found = sampler.evaluate_reference(rng, warmup, known, u, has_hessian)
    if has_hessian and not found.hessian.is_known:
        # Over all rows it is not an arrow. NaN would be in corrections of first order too, even times 0.
        nothing = jax.tree.map(np.zeros_like, found.hessian)
        found = found._replace(hessian=nothing, order=np.asarray(1, np.int32))
    warmup = warmup._replace(reference=found)
    if (has_hessian and sampler.plan.kind != "arrow") or window.is_at(FREEZE):
        # The scales, which are next, shrink directions for the noise of this order, which `update_step_size` confirms
        # or replaces. Between two modes, that of second order may be hundreds of times the plain one.
        order = least_noisy_order(rng, int(found.order), warmup, cloud, sampler)
        warmup = warmup._replace(reference=found._replace(order=order))
    return warmup, cloud


def least_noisy_order(rng: Generator, highest: int, warmup: WarmupState, cloud: Cloud, sampler: Sampler) -> np.ndarray:
    """Return the order of control variates, up to the highest, with the least mean noise; of equal ones the
    highest."""
    points, gradients = without_lost(rng, cloud.z, warmup, sampler)
    orders = range(highest, -1, -1)
    noise = np.array([noise_by_coordinate(rng, points, gradients, STEP.pairs, order).mean() for order in orders])
    return np.asarray(orders[int(np.argmin(np.where(noise < 0, np.inf, noise)))], np.int32)


def needs_hessian(window: Window, warmup: WarmupState, cloud: Cloud, sampler: Sampler) -> bool:
    """Return whether a reference gets its Hessian at the end of this window."""
    if warmup.reference is None or warmup.reference.hessian is None:
        return False
    # That of an arrow gives the scales. A dense one costs a pass over the rows for each parameter, and noise limits the
    # steps until the last anyway; but so much of it keeps particles from arriving.
    if window.is_at(FREEZE) or sampler.plan.kind == "arrow" or warmup.order == 2:
        return True
    is_measured = sampler.plan.budget is not None
    return is_measured and bool(warmup.noise.largest > STEP.excess * allowed_noise(warmup, cloud, sampler))


def update_step_size(rng: Generator, window: Window, warmup: WarmupState, cloud: Cloud, sampler: Sampler) -> Found:
    """Measure once more and set the step size from all measurements in these coordinates.

    What the dynamics carries is adapted to it.
    """
    if not sampler.plan.measures or not window.has_arrived:
        return warmup, cloud
    found = _measured(rng, window, warmup, cloud, sampler)
    if sampler.plan.budget is None:
        return found, cloud
    if found.gradient_noise is not None:
        found = found._replace(gradient_noise=_known_noise(rng, window, warmup, found, cloud, sampler))
    found = _with_step_size(rng, window, found, cloud, sampler)
    return found, sampler.settled(cloud, found.step_size, found.noise.mean)


def _measured(rng, window, warmup, cloud, sampler):
    """Add a measurement, and use control variates only if they do not add noise."""
    plan = sampler.plan
    step_size = warmup.arrival.step_size if plan.arrives else warmup.step_size
    if warmup.arrival.adam is not None:
        step_size = _unit_of_adam(warmup)
    width = CURVATURE.width * (1.0 if plan.kind else np.sqrt(step_size))
    # Curvature and noise around a particle that has run away may be a million times that around the others.
    points, gradients = without_lost(rng, cloud.z, warmup, sampler)
    orders = [0]
    if plan.has_reference:
        in_use, hessian = int(warmup.reference.order), warmup.reference.hessian
        # Before the scales are frozen, the Hessian may be that of an earlier reference.
        has_hessian = in_use == 2 or not window.is_adapting or window.is_at(FREEZE) or plan.kind == "arrow"
        has_hessian = has_hessian and hessian is not None and hessian.is_known
        orders = [in_use, *(order for order in range(2 + has_hessian) if order != in_use)]
    keeps_apart = window.is_prolonged or warmup.may_have_basins
    curvature, noise = estimate_curvature(rng, points, width, gradients, orders, not keeps_apart)
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


def _known_noise(rng, window, before, warmup, cloud, sampler):
    """Return the variance of the gradient noise along each coordinate, as the mean since the scales were frozen, or
    since the control variates have another order, when the first measurement counts as all before it; zeros where it
    does not take the place of injected noise."""
    if window.is_adapting or not _replaces_noise(warmup, cloud, sampler):
        return np.zeros_like(before.gradient_noise)
    points, gradients = without_lost(rng, cloud.z, warmup, sampler)
    pairs = max(STEP.pairs, -(-STEP.differences // sampler.plan.num_independent(cloud)))
    noise = np.maximum(noise_by_coordinate(rng, points, gradients, pairs, warmup.order).mean(0), 0.0)
    if not before.gradient_noise.any():
        return noise
    # When the scales were frozen, the first of the measurements was of other figures.
    return before.gradient_noise + (noise - before.gradient_noise) / (warmup.measurements.number - 1)


def _unit_of_adam(warmup):
    """Return the unit of Adam's rates as steps, which they lack: the smallest variance of a coordinate."""
    variances = warmup.moments.variances()
    known = variances[np.isfinite(variances) & (variances > 0)]
    return known.min() if known.size else np.ones(())


def _best_order(warmup, cloud, sampler, orders):
    """Return the best order of control variates: by the noise; in sweeps by the step, because each costs gradients."""
    plan, dynamics = sampler.plan, sampler.dynamics
    known = warmup.measurements
    # Not one without a finite gradient.
    orders = [order for order in orders if (known.noise[:, 0, order] >= 0).any()] or [0]
    if plan.sweep is None or plan.budget is None:
        # Of thousands of coordinates one may be noisy by chance, so all count as much as it. Of equal ones the highest.
        both = known.mean_noise.largest * known.mean_noise.mean
        return min(sorted(orders, reverse=True), key=lambda order: both[order])
    coupling, variance = sampler.couple(cloud.z, warmup.bandwidth), warmup.largest_variance(dynamics)
    error = dynamics.step_error(coupling)

    def step(order):
        noise = known.mean_noise.largest[order], known.mean_noise.mean[order]
        stats = _stats(warmup, noise, variance, coupling, sampler)
        return error.max_step_for_bias(plan.tolerance(error, order), stats) / (2.0 if order else 1.0)

    return max(sorted(orders, reverse=True), key=step)


def _stats(warmup, noise, variance, coupling, sampler):
    plan, known = sampler.plan, warmup.measurements
    return summarize_curvature(known, noise, variance, coupling, sampler.dynamics, plan.shares_minibatches, plan.sweep)


def _longest_within_bias(rng, window, warmup, cloud, sampler, error, stats, needed):
    """Return the longest step whose bias is within the tolerance.

    :param needed: the step that a short run needs, whose bias may move scales of effects as far as no finding names.
    """
    tolerance, of_any = (f(error, warmup.order) for f in (sampler.plan.tolerance, sampler.plan.tolerance_of_any))
    shift = np.zeros(())
    if not window.is_adapting and sampler.plan.kind == "arrow":
        # The bias of thousands of effects, which is that of the mean noise, adds up to a shift of their scale.
        points, gradients = without_lost(rng, cloud.z, warmup, sampler)
        noise = warmup.gradient_noise
        if not _is_known(warmup):
            noise = noise_by_coordinate(rng, points, gradients, STEP.pairs, warmup.order).mean(0)
        sds = np.sqrt(warmup.moments.variances())
        shift = collective_shift(rng, points, np.where(np.isfinite(sds), sds, 1.0), noise, gradients)

    def longest(stats):
        of_all = stats._replace(noise=stats.isotropic_noise)
        longest = error.max_step_for_bias(of_any, stats)
        if of_any > tolerance:
            # As a mean over all directions, the bias is within the tolerance.
            longest = np.minimum(longest, error.max_step_for_bias(tolerance, of_all))
        if tolerance * shift <= STEP.shift:
            return longest
        within, most = (error.max_step_for_bias(limit / shift, of_all) for limit in (STEP.shift, MAX_SHIFT))
        return np.minimum(longest, np.maximum(within, np.minimum(needed, most)))

    if not (_is_known(warmup) and lengthens_steps(warmup, cloud, sampler)):
        return longest(stats)
    # Rare kicks should not turn them back.
    kick = np.sqrt(2.0 * most_gained(cloud.z.shape[-1], sampler.dynamics)) / STEP.rare
    most = np.minimum(STEP.stable * error.stability_limit(stats), kick / max(warmup.noise.extreme, 1e-6))
    return np.maximum(longest(stats), np.minimum(longest(without_known(stats)), most))


def _replaces_noise(warmup, cloud, sampler):
    """Whether known noise takes the place of injected noise: with ``K = I``, dynamics that can tell how much, and the
    little noise of control variates of second order."""
    is_possible = warmup.gradient_noise is not None and sampler.dynamics.heat(1.0, 1.0) is not None
    return is_possible and warmup.order == 2 and sampler.couple(cloud.z, warmup.bandwidth).is_identity


def lengthens_steps(warmup: WarmupState, cloud: Cloud, sampler: Sampler) -> bool:
    """Whether it also lengthens steps: they meet stiffer places than the particles have seen, where only those with
    momenta turn back."""
    has_momenta = type(sampler.dynamics).hamiltonian is not Dynamics.hamiltonian
    return has_momenta and _replaces_noise(warmup, cloud, sampler)


def _is_known(warmup):
    """Whether known gradient noise takes the place of injected noise."""
    return warmup.gradient_noise is not None and warmup.gradient_noise.any()


def allowed_noise(warmup: WarmupState, cloud: Cloud, sampler: Sampler) -> float:
    """Return the gradient noise whose bias is within the tolerance at the longest step that the curvature allows."""
    error = sampler.dynamics.step_error(sampler.couple(cloud.z, warmup.bandwidth))
    curvature = np.maximum(warmup.measurements.high_curvature, 1.0)
    tolerance = sampler.plan.tolerance_of_any(error, warmup.order)

    def longest(curvature, noise):
        return error.max_step_for_bias(tolerance, CurvatureStats(curvature, curvature, noise))

    step_size = longest(curvature, 0.0)
    remaining = error.remaining_noise(step_size, CurvatureStats(curvature, curvature, 1.0, 0.0, sampler.plan.sweep))
    tiny = np.finfo(cloud.z.dtype).eps
    # Of known noise only a share counts.
    unknown = STEP.unknown if lengthens_steps(warmup, cloud, sampler) else 1.0
    return longest(tiny, 1.0) / step_size / remaining / unknown


def without_known(stats: CurvatureStats, room: float = np.inf) -> CurvatureStats:
    """Return the statistics with the gradient noise that counts as unknown, or for which injected noise has no room."""
    pairs = (stats.noise, STEP.unknown), (stats.isotropic_noise, STEP.unknown_mean)
    noise, mean = (np.maximum(share * x, x - room) for x, share in pairs)
    return stats._replace(noise=noise, isotropic_noise=mean)


def _gains_draws(window, warmup, sampler):
    """Return whether a step above the budget would gain draws in a short run."""
    plan = sampler.plan
    # Only jumps move particles between basins. Networks keep apart too, and gain by longer steps all the same.
    keeps_apart = warmup.has_basins if window.is_prolonged else warmup.may_have_basins
    # With minibatches, a cloud that has just arrived is too wide, which would make the run look short.
    is_too_wide = window.is_adapting and plan.is_noisy
    return sampler.dynamics.is_sampler and not (plan.has_given_moves or keeps_apart or is_too_wide)


def _variance_to_cross(window, warmup, sampler):
    """Return the variance along which a longer step must gain draws: of the widest direction, or with minibatches of
    most coordinates, because its bias is in all of them."""
    plan = sampler.plan
    if not plan.is_noisy or plan.kind is None:
        return warmup.largest_variance(sampler.dynamics)
    typical = np.median(warmup.moments.variances()) / sampler.dynamics.unit_of_energy
    # Most of the spread of networks is between modes, which no step crosses.
    return np.minimum(typical, 1.0) if window.is_prolonged else typical


def _with_step_size(rng, window, warmup, cloud, sampler):
    """Set the step size by the budget, and its expected bias and effective draws."""
    plan, dynamics, size = sampler.plan, sampler.dynamics, cloud.potential_energy.size
    coupling = sampler.couple(cloud.z, warmup.bandwidth)
    error, variance = dynamics.step_error(coupling), warmup.largest_variance(dynamics)
    noise = tuple(window.annealed_share * x for x in warmup.noise[:2])
    # Whitened by the mean curvature, some direction has one of 1, even if lost particles make the variance huge.
    whitened = np.minimum(variance, 1.0) if plan.is_noisy and plan.kind is not None else variance
    stats = _stats(warmup, noise, whitened, coupling, sampler)

    def draws_per_step(variance):
        """How many effective draws a run as long as the warmup has along such a variance, for each unit of ε."""
        updates = float(size * plan.num_steps * window.timetable.num_warmup)
        return updates * error.relaxation_rate(variance) / 2.0

    of_widest, gained = draws_per_step(variance), draws_per_step(_variance_to_cross(window, warmup, sampler))
    longest_of_short_run = np.minimum(
        error.stability_limit(stats._replace(largest=stats.curvature)) * STEP.stable,
        error.max_step_for_short_run(stats, gained),
    )
    is_in_vain = plan.is_noisy and gained * longest_of_short_run < min(STEP.least, plan.budget.min_draws)
    gains = _gains_draws(window, warmup, sampler) and not is_in_vain
    wanted = np.maximum(plan.budget.min_draws, STEP.draws * size) if gains and plan.budget.min_draws else 0.0
    step_size = plan.budget.step_size(
        max_step_for_bias=_longest_within_bias(rng, window, warmup, cloud, sampler, error, stats, wanted / of_widest),
        max_step_for_short_run=longest_of_short_run,
        stability_limit=error.stability_limit(stats),
        # With draws for any step, none is raised.
        draws_per_step=gained if gains else np.inf,
    )
    if not (np.isfinite(step_size) and step_size > 0):
        unit = 1.0 if warmup.arrival.adam is None or plan.kind else _unit_of_adam(warmup)
        of_arrival = unit * np.exp(np.log(warmup.arrival.step_size).mean())
        step_size = error.from_overdamped_step(STEP.cautious * of_arrival)
    if _is_known(warmup):
        stats = without_known(stats, MOST_REPLACED / dynamics.heat(step_size, 1.0))
    bias, mean_bias, effective_draws = (
        UNKNOWN if np.isnan(x) else x
        for x in (error.bias(step_size, stats), error.mean_bias(step_size, stats), step_size * of_widest)
    )
    return warmup._replace(
        step_size=step_size,
        bias=bias,
        mean_bias=mean_bias,
        effective_draws=effective_draws,
        is_raised=bias > 1.01 * plan.tolerance_of_any(error, warmup.order),
        noise_share=error.remaining_noise(step_size, stats._replace(noise=1.0)),
    )
