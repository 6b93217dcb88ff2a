"""The learner of scales: from the moments of the cloud, or from its mean curvature (minibatches, low rank)."""

from __future__ import annotations

import numpy as np
from numpy.random import Generator

from numpyro_repulsion.dynamics import Cloud, CurvatureStats
from numpyro_repulsion.warmup.arrival import rescue
from numpyro_repulsion.warmup.hessian import (
    extremes,
    num_minibatches,
    num_noise_pairs,
    shrink_noisy_directions,
    whitening,
)
from numpyro_repulsion.warmup.preconditioner import Moments, Preconditioner
from numpyro_repulsion.warmup.probes import hessian_and_noise, mean_diagonal, mean_product, minibatch
from numpyro_repulsion.warmup.state import Sampler, WarmupState
from numpyro_repulsion.warmup.windows import FREEZE, Window

__all__ = ["update_scales", "wide_direction"]

#: How many power iterations find the widest direction of the cloud.
NUM_POWER_ITERATIONS = 10
#: How far the noise of second order, which grows with the fourth power of distances, exceeds in its largest direction
#: what one cloud shows: measured with covariates of heavy tails.
NOISE_EXCESS = 3.0


def update_scales(
    rng: Generator, window: Window, warmup: WarmupState, cloud: Cloud, sampler: Sampler
) -> tuple[WarmupState, Cloud]:
    """Until the scales are frozen, whiten the coordinates."""
    plan = sampler.plan
    if plan.scale is None or not window.is_adapting:
        return warmup, cloud
    if plan.noise or (plan.scale == "low_rank" and window.has_arrived):
        if plan.noise and not window.whitens:
            return warmup, cloud
        adapt = _low_rank if plan.scale == "low_rank" else _whitened
        found, moved = adapt(rng, window, warmup, cloud, sampler)
        return found._replace(arrival=found.arrival.restarted(moved.z)), moved
    return _changed(warmup, cloud, warmup.moments.to_preconditioner(window.uses_correlations))


def _whitened(rng, window, warmup, cloud, sampler):
    """Whiten by the mean curvature over the cloud, because minibatch noise hides it in the gradients' covariance.

    Lost particles do not count: the curvature around one that has run away may be a million times that of the others.
    """
    is_dense = sampler.plan.scale == "dense"
    spread = _spread(window, warmup)
    first = Preconditioner(np.diag(spread) if is_dense else spread, warmup.moments.position)
    warmup, cloud = _changed(warmup, cloud, first)
    measured = rescue(rng, cloud.z, warmup.arrival.lost)
    dimension, weight = cloud.z.shape[-1], window.curvature_weight
    # In the scales so far, the mean of the earlier curvatures is one.
    if not is_dense:
        found = mean_diagonal(rng, measured, sampler.gradients(warmup))
        scale = whitening(weight * found + (1.0 - weight))
        return _changed(warmup, cloud, Preconditioner(scale, warmup.moments.position))
    # The noise limits the step, and matters for the last scales only.
    measures_step = sampler.plan.step_size is not None
    groups, particles = cloud.potential_energy.shape
    num_independent = groups if sampler.shares_minibatches else groups * particles
    num_updates = window.schedule.num_warmup * sampler.num_steps
    num_pairs = num_noise_pairs(dimension, num_independent, sampler.num_minibatches, num_updates)
    gradients = sampler.gradients(warmup)
    if window.is_prolonged:
        hessian, covariance = np.diag(mean_diagonal(rng, measured, gradients)), np.zeros((dimension, dimension))
    else:
        hessian, covariance = hessian_and_noise(
            rng,
            measured,
            gradients,
            num_minibatches(dimension, _num_rows(cloud, sampler)),
            num_pairs if measures_step and window.is_at(FREEZE) else 0,
            warmup.order,
        )
    scale, factor = whitening(weight * hessian + (1.0 - weight) * np.eye(dimension, dtype=hessian.dtype)), 1.0
    if measures_step:
        further, factor = shrink_noisy_directions(
            scale.T @ covariance @ scale, num_pairs * num_independent, _allowed_noise(warmup, cloud, sampler)
        )
        scale = scale @ further
    warmup, cloud = _changed(warmup, cloud, Preconditioner(scale, warmup.moments.position))
    return warmup._replace(scales=warmup.scales._replace(noise_shrinkage=factor)), cloud


def _low_rank(rng, window, warmup, cloud, sampler):
    """Scale the coordinates by the diagonal of the mean curvature, and then the directions of its extreme eigenvalues.

    Other than products of matrices, such scales cannot be multiplied, so they are found again from those of the
    coordinates alone.
    """
    old, weight = warmup.scales.preconditioner, window.curvature_weight
    positions, slope = old.to_positions(cloud.z), old.unwhiten_gradient(cloud.gradient)
    excess = 1.0 / (1.0 + old.stretch) ** 2 - 1.0  # of the earlier curvatures along V
    measured = rescue(rng, positions, warmup.arrival.lost)

    def along_coordinates(scale):
        change = old._replace(scale=scale, stretch=np.zeros_like(old.stretch))
        return warmup._replace(scales=warmup.scales._replace(preconditioner=change)), change.whiten(measured)

    scale = old.scale * _spread(window, warmup)
    plain, y = along_coordinates(scale)
    found = mean_diagonal(rng, y, sampler.gradients(plain))
    unit = whitening(weight * found + (1.0 - weight) * (1.0 + old.vectors**2 @ excess))
    scale = scale * unit
    plain, y = along_coordinates(scale)
    rank = old.vectors.shape[1]
    if window.is_prolonged:
        # Directions of a network differ from particle to particle, and cost hundreds of gradients of the cloud.
        vectors, values = np.zeros_like(old.vectors), np.ones_like(old.stretch)
    else:
        number = num_minibatches(y.shape[-1], _num_rows(cloud, sampler), rank)
        gradients, numbers = sampler.gradients(plain), [minibatch(rng) for _ in range(number)]

        def product(v):
            known = unit * v
            known = unit * (known + old.vectors @ (excess * (old.vectors.T @ known)))
            return weight * mean_product(y, v, gradients, numbers) + (1.0 - weight) * known

        vectors, values = extremes(wide_direction(rng, y), product, rank)
    center = old.to_positions(warmup.moments.position)
    change = Preconditioner(scale, center, vectors, values**-0.5 - 1.0)
    cloud = cloud._replace(z=change.whiten(positions), gradient=change.whiten_gradient(slope))
    # Variances along coordinates do not determine those along the new directions, which are about one.
    known = warmup.moments
    scatter, mean = np.full_like(known.position_scatter, known.number), np.zeros_like(known.position)
    moments = Moments(known.number, mean, mean, scatter, scatter)
    return warmup._replace(scales=warmup.scales._replace(preconditioner=change, moments=moments)), cloud


def wide_direction(rng: Generator, y: np.ndarray) -> np.ndarray:
    """Return a start for Lanczos's method: a random direction plus the widest of the cloud ``(G, L, d)``.

    From a random direction alone, the method is slow to find a flat direction among thousands.
    """
    flat = (y - y.mean((0, 1))).reshape(-1, y.shape[-1])
    flat = np.where(np.isfinite(flat), flat, 0.0)
    drawn = rng.standard_normal(y.shape[-1:]).astype(y.dtype)
    direction = drawn = drawn / np.linalg.norm(drawn)
    for _ in range(NUM_POWER_ITERATIONS):
        product = flat @ direction @ flat
        size = np.linalg.norm(product)
        direction = product / size if size > 0 else direction
    return drawn + direction


def _spread(window, warmup):
    """Return the standard deviations of the coordinates when particles have just arrived with noise, otherwise ones."""
    spread = np.sqrt(warmup.moments.variances())
    # In a prolonged arrival there is no noise, so that particles in the same basin come together, and only its
    # curvature tells the scales.
    if not window.was_arrival or window.is_prolonged:
        return np.ones_like(spread)
    return np.where(np.isfinite(spread) & (spread > 0), spread, 1.0)


def _num_rows(cloud, sampler):
    """Return the number of rows in one minibatch of every particle; 0 if all rows are used."""
    if not sampler.plan.noise:
        return 0
    groups, particles = cloud.potential_energy.shape
    return sampler.minibatch_size * groups * (1 if sampler.shares_minibatches else particles)


def _allowed_noise(warmup, cloud, sampler):
    """Return the gradient noise whose bias is within the tolerance at the longest step that the curvature allows."""
    error = sampler.dynamics.step_error(sampler.couple(cloud.z, warmup.bandwidth))
    curvature = np.maximum(warmup.measurements.typical_curvature, 1.0)
    tolerance = sampler.plan.tolerance(error, warmup.order)

    def longest(curvature, noise):
        return error.max_step_for_bias(tolerance, CurvatureStats(curvature, curvature, noise))

    step_size = longest(curvature, 0.0)
    remaining = error.remaining_noise(step_size, CurvatureStats(curvature, curvature, 1.0, 0.0, sampler.plan.sweep))
    tiny = np.finfo(cloud.z.dtype).eps
    return longest(tiny, 1.0) / step_size / remaining / (NOISE_EXCESS if warmup.order == 2 else 1.0)


def _changed(warmup, cloud, change):
    """Return state and cloud after a further change of variables."""
    # The memory stays as it is, because carried noise is white in any coordinates.
    cloud = cloud._replace(z=change.whiten(cloud.z), gradient=change.whiten_gradient(cloud.gradient))
    preconditioner, moments = warmup.scales.preconditioner.compose(change), warmup.scales.moments.compose(change)
    scales = warmup.scales._replace(preconditioner=preconditioner, moments=moments, noise_shrinkage=1.0)
    return warmup._replace(scales=scales), cloud
