"""The learner of scales: from the moments of the cloud, or from its mean curvature (minibatches, low rank)."""

from __future__ import annotations

import jax
from jax import lax, random
import jax.numpy as jnp
from jaxtyping import Array, Float

from numpyro_repulsion.dynamics import Cloud, CurvatureStats
from numpyro_repulsion.noise import signs
from numpyro_repulsion.rounding import matmul
from numpyro_repulsion.warmup.arrival import rescue
from numpyro_repulsion.warmup.hessian import (
    NUM_PROBES,
    extremes,
    hessian_and_noise,
    mean_diagonal,
    mean_product,
    num_minibatches,
    num_noise_pairs,
    shrink_noisy_directions,
    whitening,
)
from numpyro_repulsion.warmup.preconditioner import Moments, Preconditioner
from numpyro_repulsion.warmup.state import Sampler, WarmupState
from numpyro_repulsion.warmup.windows import ARRIVED, FREEZE, Stage

__all__ = ["update_scales", "wide_direction"]

#: Half the distance over which gradients are compared, in units of the scales.
WIDTH = 0.2
#: How many power iterations find the widest direction of the cloud.
NUM_POWER_ITERATIONS = 10


def update_scales(
    key: jax.Array, stage: Stage, warmup: WarmupState, cloud: Cloud, sampler: Sampler
) -> tuple[WarmupState, Cloud]:
    """Add the cloud to the moments; at the end of a window, until the scales are frozen, whiten the coordinates."""
    fresh = jax.tree.map(lambda x: jnp.where(stage.window_starts, 0.0, x), warmup.scales.moments)
    moments = fresh.add(*(x.reshape(-1, x.shape[-1]) for x in (cloud.z, cloud.gradient)))
    warmup = warmup._replace(scales=warmup.scales._replace(moments=moments))
    plan = sampler.plan
    if plan.scale is None:
        return warmup, cloud

    def by_moments():
        return _changed(warmup, cloud, warmup.moments.to_preconditioner(stage.uses_correlations))

    def by_curvature():
        adapt = _low_rank if plan.scale == "low_rank" else _whitened
        found, moved = adapt(key, stage, warmup, cloud, sampler)
        return found._replace(arrival=found.arrival.restarted(moved.z)), moved

    due = stage.window_ends & stage.is_adapting
    if plan.noise:
        return lax.cond(due & stage.whitens, by_curvature, lambda: (warmup, cloud))
    if plan.scale != "low_rank":
        return lax.cond(due, by_moments, lambda: (warmup, cloud))
    which = jnp.where(due, jnp.where(stage.has_arrived, 2, 1), 0)
    return lax.switch(which, (lambda: (warmup, cloud), by_moments, by_curvature))


def _whitened(key, stage, warmup, cloud, sampler):
    """Whiten by the mean curvature over the cloud, because minibatch noise hides it in the gradients' covariance.

    Lost particles do not count: the curvature around one that has run away may be a million times that of the others.
    """
    is_dense = sampler.plan.scale == "dense"
    spread = _spread(stage, warmup)
    first = Preconditioner(jnp.diag(spread) if is_dense else spread, warmup.moments.position)
    warmup, cloud = _changed(warmup, cloud, first)
    measured = rescue(key, cloud.z, warmup.arrival.lost)
    dimension, weight = cloud.z.shape[-1], stage.curvature_weight.astype(cloud.z.dtype)
    # In the scales so far, the mean of the earlier curvatures is one.
    if not is_dense:
        found = mean_diagonal(key, measured, _gradient(warmup, sampler), WIDTH, NUM_PROBES)
        scale = whitening(weight * found + (1.0 - weight))
        return _changed(warmup, cloud, Preconditioner(scale, warmup.moments.position))
    # The noise limits the step, and matters for the last scales only.
    is_last = (stage.done == stage.at(FREEZE)) if sampler.plan.step_size is not None else jnp.zeros((), bool)
    in_use = jnp.zeros((), bool) if warmup.reference is None else warmup.reference.in_use
    groups, particles = cloud.potential_energy.shape
    num_independent = groups if sampler.shares_minibatches else groups * particles
    num_pairs = num_noise_pairs(dimension, num_independent)
    only_diagonal = False if warmup.arrival.is_prolonged is None else warmup.arrival.is_prolonged
    hessian, covariance = hessian_and_noise(
        key,
        measured,
        lambda key, u, is_noise: sampler.energy_and_grad(warmup)(key, u, is_noise & in_use)[1],
        WIDTH,
        num_minibatches(dimension, _num_rows(cloud, sampler)),
        jnp.where(is_last & jnp.logical_not(only_diagonal), num_pairs, 0),
        only_diagonal,
    )
    scale = whitening(weight * hessian + (1.0 - weight) * jnp.eye(dimension, dtype=weight.dtype))
    factor = jnp.ones_like(warmup.scales.noise_shrinkage)
    if sampler.plan.step_size is not None:
        further, factor = shrink_noisy_directions(
            matmul(matmul(scale.T, covariance), scale),
            num_pairs * num_independent,
            _allowed_noise(warmup, cloud, sampler),
        )
        scale = matmul(scale, further)
    warmup, cloud = _changed(warmup, cloud, Preconditioner(scale, warmup.moments.position))
    return warmup._replace(scales=warmup.scales._replace(noise_shrinkage=factor)), cloud


def _low_rank(key, stage, warmup, cloud, sampler):
    """Scale the coordinates by the diagonal of the mean curvature, and then the directions of its extreme eigenvalues.

    Other than products of matrices, such scales cannot be multiplied, so they are found again from those of the
    coordinates alone.
    """
    old, weight = warmup.scales.preconditioner, stage.curvature_weight.astype(cloud.z.dtype)
    positions, slope = old.to_positions(cloud.z), old.unwhiten_gradient(cloud.gradient)
    excess = 1.0 / (1.0 + old.stretch) ** 2 - 1.0  # of the earlier curvatures along V
    measured = rescue(key, positions, warmup.arrival.lost)
    diagonal_key, key = random.split(key)

    def along_coordinates(scale):
        change = old._replace(scale=scale, stretch=jnp.zeros_like(old.stretch))
        plain = warmup._replace(scales=warmup.scales._replace(preconditioner=change))
        return change.whiten(measured), _gradient(plain, sampler)

    scale = old.scale * _spread(stage, warmup)
    y, gradient = along_coordinates(scale)
    found = mean_diagonal(diagonal_key, y, gradient, WIDTH, NUM_PROBES)
    unit = whitening(weight * found + (1.0 - weight) * (1.0 + matmul(old.vectors**2, excess)))
    scale = scale * unit
    y, gradient = along_coordinates(scale)
    rank = old.vectors.shape[1]
    number = num_minibatches(y.shape[-1], _num_rows(cloud, sampler), rank)

    def product(v):
        new = mean_product(key, y, v, gradient, WIDTH, number)
        known = unit * v
        known = unit * (known + matmul(old.vectors, excess * matmul(old.vectors.T, known)))
        return weight * new + (1.0 - weight) * known

    def along_directions():
        return extremes(wide_direction(diagonal_key, y), product, rank)

    is_prolonged = warmup.arrival.is_prolonged
    if is_prolonged is None:
        vectors, values = along_directions()
    else:
        # Directions of a network differ from particle to particle, and cost hundreds of gradients of the cloud.
        nothing = jnp.zeros_like(old.vectors), jnp.ones_like(old.stretch)
        vectors, values = lax.cond(is_prolonged, lambda: nothing, along_directions)
    center = old.to_positions(warmup.moments.position)
    change = Preconditioner(scale, center, vectors, values**-0.5 - 1.0)
    cloud = cloud._replace(z=change.whiten(positions), gradient=change.whiten_gradient(slope))
    # Variances along coordinates do not determine those along the new directions, which are about one.
    known = warmup.moments
    scatter, mean = jnp.full_like(known.position_scatter, known.number), jnp.zeros_like(known.position)
    moments = Moments(known.number, mean, mean, scatter, scatter)
    return warmup._replace(scales=warmup.scales._replace(preconditioner=change, moments=moments)), cloud


def wide_direction(key: jax.Array, y: Float[Array, "*particles d"]) -> Float[Array, " d"]:
    """Return a start for Lanczos's method: a random direction plus the widest of the cloud ``(G, L, d)``.

    From a random direction alone, the method is slow to find a flat direction among thousands.
    """
    flat = (y - y.mean((0, 1))).reshape(-1, y.shape[-1])
    flat = jnp.where(jnp.isfinite(flat), flat, 0.0)
    random_direction = signs(key, y.shape[-1:], y.dtype) / jnp.sqrt(y.shape[-1])

    def iterate(_, direction):
        product = matmul(matmul(flat, direction), flat)
        size = jnp.linalg.norm(product)
        return jnp.where(size > 0, product / jnp.where(size > 0, size, 1.0), direction)

    return random_direction + lax.fori_loop(0, NUM_POWER_ITERATIONS, iterate, random_direction)


def _gradient(warmup, sampler):
    """Return ``(key, u) -> ∇U`` without control variates, which cancel in differences."""
    energy_and_grad = sampler.energy_and_grad(warmup)
    return lambda key, u: energy_and_grad(key, u, jnp.zeros((), bool))[1]


def _spread(stage, warmup):
    """Return the standard deviations of the coordinates when particles have just arrived with noise, otherwise ones."""
    spread = jnp.sqrt(warmup.moments.variances())
    usable = jnp.isfinite(spread) & (spread > 0) & (stage.done <= stage.at(ARRIVED))
    if stage.is_prolonged is not None:
        # Without noise, particles in the same basin come together, and only its curvature tells the scales.
        usable &= ~stage.is_prolonged
    return jnp.where(usable, spread, 1.0)


def _num_rows(cloud, sampler):
    """Return the number of rows in one minibatch of every particle; 0 if all rows are used."""
    if not sampler.plan.noise:
        return 0
    groups, particles = cloud.potential_energy.shape
    return sampler.minibatch_size * groups * (1 if sampler.shares_minibatches else particles)


def _allowed_noise(warmup, cloud, sampler):
    """Return the gradient noise whose bias is within the tolerance at the longest step that the curvature allows."""
    error = sampler.dynamics.step_error(sampler.interaction.couple(cloud.z, warmup.bandwidth))
    one, nothing = jnp.ones((), cloud.z.dtype), jnp.zeros((), cloud.z.dtype)
    curvature = jnp.maximum(warmup.measurements.typical_curvature, one)

    def longest(curvature, noise):
        return error.max_step_for_bias(sampler.plan.step_size.tolerance, CurvatureStats(curvature, curvature, noise))

    step_size = longest(curvature, nothing)
    remaining = error.remaining_noise(step_size, CurvatureStats(curvature, curvature, one, 0.0, sampler.plan.sweep))
    tiny = jnp.finfo(cloud.z.dtype).eps
    return longest(tiny * one, one) / step_size / remaining


def _changed(warmup, cloud, change):
    """Return state and cloud after a further change of variables."""
    # The memory stays as it is, because carried noise is white in any coordinates.
    cloud = cloud._replace(z=change.whiten(cloud.z), gradient=change.whiten_gradient(cloud.gradient))
    preconditioner, moments = warmup.scales.preconditioner.compose(change), warmup.scales.moments.compose(change)
    one = jnp.ones_like(warmup.scales.noise_shrinkage)
    scales = warmup.scales._replace(preconditioner=preconditioner, moments=moments, noise_shrinkage=one)
    return warmup._replace(scales=scales), cloud
