"""The learner of scales, which estimates them from the moments of the cloud over a window."""

from __future__ import annotations

import jax
from jax import lax
import jax.numpy as jnp

from numpyro_repulsion.dynamics import Cloud, CurvatureStats
from numpyro_repulsion.warmup.hessian import (
    calming,
    mean_diagonal,
    mean_hessian,
    noise_covariance,
    num_minibatches,
    num_noise_minibatches,
    whitening,
)
from numpyro_repulsion.warmup.learning import Sampler
from numpyro_repulsion.warmup.preconditioner import Preconditioner
from numpyro_repulsion.warmup.state import ScalesState, WarmupState
from numpyro_repulsion.warmup.windows import ARRIVED, FREEZE, Stage

__all__ = ["update_scales"]

#: Half the distance over which gradients are compared, in units of the scales.
WIDTH = 0.2


def update_scales(
    key: jax.Array, stage: Stage, warmup: WarmupState, cloud: Cloud, sampler: Sampler
) -> tuple[WarmupState, Cloud]:
    """Add the cloud to the moments; at the end of a window, until the scales are frozen, whiten the coordinates."""
    known = warmup.scales.moments

    def observe():
        fresh = jax.tree.map(lambda x: jnp.where(stage.window_starts, 0.0, x), known)
        return fresh.add(*(x.reshape(-1, x.shape[-1]) for x in (cloud.z, cloud.gradient)))

    moments = lax.cond(stage.is_warmup, observe, lambda: known)
    warmup = warmup._replace(scales=warmup.scales._replace(moments=moments))
    if sampler.plan.scale is None:
        return warmup, cloud
    if sampler.plan.noise:
        due, rescaled = stage.has_arrived, lambda: _rescale_by_curvature(key, stage, warmup, cloud, sampler)
    else:
        due, rescaled = True, lambda: _rescale(stage, warmup, cloud)
    return lax.cond(stage.window_ends & stage.is_adapting & due, rescaled, lambda: (warmup, cloud))


def _rescale(stage, warmup, cloud):
    return _changed(warmup, cloud, warmup.moments.to_preconditioner(stage.uses_correlations))


def _rescale_by_curvature(key, stage, warmup, cloud, sampler):
    """Whiten by the mean curvature over the cloud, because minibatch noise hides that of gradients' covariances."""
    is_dense = sampler.plan.scale == "dense"
    spread = jnp.sqrt(warmup.moments.variances())
    spread = jnp.where(jnp.isfinite(spread) & (spread > 0), spread, 1.0)
    change = Preconditioner(jnp.diag(spread) if is_dense else spread, warmup.moments.position)
    warmup, cloud = lax.cond(
        stage.done == stage.at(ARRIVED), lambda: _changed(warmup, cloud, change), lambda: (warmup, cloud)
    )

    def gradient_of(warmup, corrected):
        energy_and_grad = sampler.energy_and_grad(warmup)
        return lambda key, u: energy_and_grad(key, u, corrected)[1]

    groups, particles, dimension = cloud.z.shape
    rows = sampler.minibatch_size * groups * (1 if sampler.shares_minibatches else particles)
    measure = mean_hessian if is_dense else mean_diagonal
    # Control variates cancel in differences.
    gradient = gradient_of(warmup, jnp.zeros((), bool))
    curvature = measure(key, cloud.z, gradient, WIDTH, num_minibatches(dimension, rows, is_dense))
    # In the scales so far, the mean of the earlier curvatures is one.
    weight = stage.curvature_weight.astype(curvature.dtype)
    curvature = weight * curvature + (1.0 - weight) * (jnp.eye(dimension, dtype=curvature.dtype) if is_dense else 1.0)
    warmup, cloud = _changed(warmup, cloud, Preconditioner(whitening(curvature), warmup.moments.position))
    if not is_dense or sampler.plan.step_size is None:
        return warmup, cloud

    def calm():
        in_use = jnp.zeros((), bool) if warmup.reference is None else warmup.reference.in_use
        number = num_noise_minibatches(dimension, groups * particles)
        covariance = noise_covariance(key, cloud.z, gradient_of(warmup, in_use), number)
        scale, factor = calming(covariance, _allowed_noise(warmup, cloud, sampler))
        calmed, moved = _changed(warmup, cloud, Preconditioner(scale, warmup.moments.position))
        return calmed._replace(scales=calmed.scales._replace(calming=factor)), moved

    return lax.cond(stage.done == stage.at(FREEZE), calm, lambda: (warmup, cloud))


def _allowed_noise(warmup, cloud, sampler):
    """Return the gradient noise whose bias is within the tolerance at the longest step that the curvature allows."""
    error = sampler.dynamics.step_error(sampler.interaction.couple(cloud.z, warmup.bandwidth))
    one, nothing = jnp.ones((), cloud.z.dtype), jnp.zeros((), cloud.z.dtype)
    curvature = jnp.maximum(warmup.measurements.typical_curvature, one)

    def longest(curvature, noise):
        return error.max_step_for_bias(sampler.plan.step_size.tolerance, CurvatureStats(curvature, curvature, noise))

    tiny = jnp.finfo(cloud.z.dtype).eps
    return longest(tiny * one, one) / longest(curvature, nothing)


def _changed(warmup, cloud, change):
    """Return state and cloud after a further change of variables."""
    # The memory stays as it is, because carried noise is white in any coordinates.
    cloud = cloud._replace(z=change.whiten(cloud.z), gradient=change.whiten_gradient(cloud.gradient))
    preconditioner, moments = warmup.scales.preconditioner.compose(change), warmup.scales.moments.compose(change)
    scales = ScalesState(preconditioner, moments, jnp.ones_like(warmup.scales.calming))
    return warmup._replace(scales=scales), cloud
