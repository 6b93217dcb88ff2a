"""The learners of coordinates: scales, from the moments of the cloud or its mean curvature, and partial centering."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import numpy as np
from numpy.random import Generator

from numpyro_repulsion.dynamics import Cloud
from numpyro_repulsion.gradients import ArrowRoot
from numpyro_repulsion.rounding import cholesky, eigh
from numpyro_repulsion.warmup.arrival import replace_lost, without_lost
from numpyro_repulsion.warmup.curvature import (
    draw_seed,
    hessian_and_noise,
    mean_diagonal,
    mean_product,
    noise_by_coordinate,
    widest,
)
from numpyro_repulsion.warmup.preconditioner import Moments, Preconditioner, inverse_root, usable
from numpyro_repulsion.warmup.state import Found, Sampler, WarmupState
from numpyro_repulsion.warmup.step_size import allowed_noise
from numpyro_repulsion.warmup.windows import FREEZE, Window


@dataclass(frozen=True)
class ScalesConstants:
    """Constants of the learner of scales, chosen by measurement."""

    #: The smallest curvature, relative to those along the coordinates; smaller ones are noise.
    smallest: float = 1e-3
    #: The smallest along a coordinate, relative to that so far: the scales so far are wider than the posterior at
    #: worst, so smaller ones are errors of the estimate.
    smallest_along: float = 0.1
    #: Rows for each parameter: they estimate a curvature to about a tenth in any direction, and fewer suffice for a
    #: few eigenvectors; but not more gradients of the cloud than so many.
    rows: int = 200
    rows_of_few: int = 20
    gradients: int = 2000
    #: Draws of the noise for each parameter, from so many pairs at most, and for each minibatch of the data: a few rows
    #: may make nearly all of the noise, so a long warmup meets each row about 40 times.
    draws: int = 3
    pairs: int = 100
    draws_of_rows: int = 20
    #: Pairs of minibatches that measure the noise of each coordinate of an arrow.
    pairs_of_arrow: int = 50
    #: Eigenvectors whose residual is smaller have converged, relative to what scaling by the eigenvalue tolerates.
    converged: float = 0.3
    #: By what the allowed noise of second order is divided for a dense preconditioner. It grows with the fourth power
    #: of distances, and with covariates of heavy tails exceeded in its largest direction by a factor of 3 what one
    #: cloud shows. Directions that are allowed more, so that a short run mixes, send particles far off, where they
    #: have still more.
    caution: float = 3.0


@dataclass(frozen=True)
class CenteringConstants:
    """Constants of the learner of partial centering, chosen by measurement."""

    #: With fewer particles, the scales of new coordinates are unknown.
    particles: int = 4
    #: The smallest standard deviation of log s for which centering matters: below it, the change is nearly linear.
    sd: float = 0.3
    #: From so many effects of one scale on it matters however well that is known. U is about linear along each effect,
    #: but the bend along s adds up over all: the mean curvature of centered ones along s is 2I(2c - 1), which may be
    #: negative, and that of the posterior 2I c².
    effects: int = 50
    #: The smallest change of a share that is worth scales that must be learned again.
    change: float = 0.1


SCALES = ScalesConstants()
CENTERING = CenteringConstants()


def update_scales(rng: Generator, window: Window, warmup: WarmupState, cloud: Cloud, sampler: Sampler) -> Found:
    """Until the scales are frozen, whiten the coordinates."""
    plan = sampler.plan
    if plan.kind is None or not window.is_adapting:
        return warmup, cloud
    if plan.is_noisy or (plan.kind == "low_rank" and window.has_arrived):
        if plan.is_noisy and not window.whitens:
            return warmup, cloud
        adapt = {"low_rank": _low_rank, "arrow": _arrow}.get(plan.kind, _whitened)
        found, moved = adapt(rng, window, warmup, cloud, sampler)
        return found._replace(arrival=found.arrival.restarted(moved.z)), moved
    return _changed(warmup, cloud, warmup.moments.to_preconditioner(window.uses_correlations))


def _whitened(rng, window, warmup, cloud, sampler):
    """Whiten by the mean curvature over the cloud, because minibatch noise hides it in the gradients' covariance."""
    first = warmup.preconditioner.along_coordinates(_sds(window, warmup), warmup.moments.position)
    warmup, cloud = _changed(warmup, cloud, first)
    # The curvature around a particle that has run away may be a million times that around the others.
    points, gradients = without_lost(rng, cloud.z, warmup, sampler)
    dimension, weight = cloud.z.shape[-1], window.curvature_weight
    # In the scales so far, the mean of the earlier curvatures is one.
    if sampler.plan.kind != "dense":
        found = mean_diagonal(rng, points, gradients)
        scale = whitening(weight * found + (1.0 - weight))
        return _changed(warmup, cloud, Preconditioner(scale, warmup.moments.position))
    # The noise limits the step, and matters for the last scales only.
    measures_noise = sampler.plan.budget is not None and window.is_at(FREEZE)
    num_pairs, num_independent = _num_noise_pairs(window, cloud, sampler.plan)
    if window.is_prolonged:
        hessian, covariance = np.diag(mean_diagonal(rng, points, gradients)), np.zeros((dimension, dimension))
    else:
        numbers = _num_for_curvature(cloud, sampler.plan), num_pairs * measures_noise
        hessian, covariance = hessian_and_noise(rng, points, gradients, *numbers, warmup.order)
    scale, factor = whitening(weight * hessian + (1.0 - weight) * np.eye(dimension, dtype=hessian.dtype)), 1.0
    if covariance.any():
        allowed = allowed_noise(warmup, cloud, sampler) / (SCALES.caution if warmup.order == 2 else 1.0)
        whitened = scale.T @ covariance @ scale
        further, factor = shrink_noisy_directions(whitened, num_pairs * num_independent, allowed)
        scale = scale @ further
    warmup, cloud = _changed(warmup, cloud, Preconditioner(scale, warmup.moments.position))
    return warmup._replace(noise_shrinkage=factor), cloud


def _low_rank(rng, window, warmup, cloud, sampler):
    """Scale the coordinates by the diagonal of the mean curvature, then the directions of its extreme eigenvalues."""
    old, weight = warmup.preconditioner, window.curvature_weight
    excess = 1.0 / (1.0 + old.stretch) ** 2 - 1.0  # of the earlier curvatures along V
    points = replace_lost(rng, old.to_positions(cloud.z), warmup.arrival.lost)
    scale = old.scale * _sds(window, warmup)
    plain, y = _trial(warmup, old.along_coordinates(scale, old.center), points)
    found = mean_diagonal(rng, y, sampler.gradients(plain))
    unit = whitening(weight * found + (1.0 - weight) * (1.0 + old.vectors**2 @ excess))
    scale = scale * unit
    plain, y = _trial(warmup, old.along_coordinates(scale, old.center), points)
    rank = old.vectors.shape[1]
    if window.is_prolonged:
        # Directions of a network differ from particle to particle, and cost hundreds of gradients of the cloud.
        vectors, values = np.zeros_like(old.vectors), np.ones_like(old.stretch)
    else:
        number = _num_for_curvature(cloud, sampler.plan, rank)
        gradients, seeds = sampler.gradients(plain), [draw_seed(rng) for _ in range(number)]

        def product(v):
            known = unit * v
            known = unit * (known + old.vectors @ (excess * (old.vectors.T @ known)))
            return weight * mean_product(y, v, gradients, seeds) + (1.0 - weight) * known

        vectors, values = extremes(wide_direction(rng, y), product, rank)
    center = old.to_positions(warmup.moments.position)
    return _found_again(warmup, cloud, Preconditioner(scale, center, vectors, values**-0.5 - 1.0))


def _arrow(rng, window, warmup, cloud, sampler):
    """Whiten by an arrow: the curvature of the likelihood over all rows at the reference, and of the prior over the
    cloud, each direction of the globals and of the units."""
    old, reference = warmup.preconditioner, warmup.reference
    points = replace_lost(rng, old.to_positions(cloud.z), warmup.arrival.lost)
    center = old.to_positions(warmup.moments.position)
    change = old.along_coordinates(old.lengths() * _sds(window, warmup), center)
    is_known, root = window.has_arrived and reference.hessian.is_known, None
    if is_known:
        # So far the root is the identity, by which products would cost most.
        found = sampler.mean_curvature(*_trial(warmup, change._replace(root=None), points))
        # Not in coordinates in which units depend on each other, or with a particle whose curvature overflows.
        if all(np.isfinite(x).all() for x in (found.rest, found.cross, found.blocks)):
            root = ArrowRoot.of(found, whitening)
    if root is None:
        trial, y = _trial(warmup, change, points)
        change = change._replace(scale=change.scale * whitening(mean_diagonal(rng, y, sampler.gradients(trial))))
    else:
        change = change._replace(root=root)
    factor = 1.0
    if is_known and sampler.plan.budget is not None and window.is_at(FREEZE):
        trial, y = _trial(warmup, change, points)
        noise = noise_by_coordinate(rng, y, sampler.gradients(trial), SCALES.pairs_of_arrow, warmup.order)
        # Each noisy coordinate by itself takes shorter steps, rather than all.
        allowed = allowed_noise(warmup, cloud, sampler)
        factors = pooled_factors(np.maximum(noise / allowed, 1.0), change.root.units)
        factors /= factors.min()
        factor = factors.max()
        change = change._replace(root=change.root.scaled(factors**-0.5))
    return _found_again(warmup, cloud, change, factor)


def pooled_factors(halves, units):
    """Return factors for the coordinates from those of two halves of the particles, ``(2, d)``.

    Of thousands of units some are noisy only because one particle is far from the reference there. A unit's factor is
    its own as far as the halves agree on which units are noisy, and otherwise that of all units.
    """
    rest, own = units.split(halves)
    logs = np.log(own)
    deviations = logs - logs.mean(1, keepdims=True)
    scale = np.sqrt(np.square(deviations).sum(1).prod(0))
    agreement = np.maximum((deviations[0] * deviations[1]).sum(0) / np.where(scale > 0, scale, 1.0), 0.0)
    mean = own.mean(0)
    center = np.log(mean).mean(0)
    # By the formula of Spearman and Brown, from the reliability of one half to that of both.
    pooled = np.exp(center + 2.0 * agreement / (1.0 + agreement) * (np.log(mean) - center))
    return units.join(rest.mean(0), pooled * mean.mean(0) / pooled.mean(0))


def _trial(warmup, change, positions):
    """Return the state with other scales, and positions in them."""
    return warmup._replace(preconditioner=change), change.whiten(positions)


def _found_again(warmup, cloud, change, factor=1.0):
    """Return state and cloud in scales of directions, which cannot be multiplied by further ones."""
    old, moments = warmup.preconditioner, warmup.moments
    positions, slope = old.to_positions(cloud.z), old.unwhiten_gradient(cloud.gradient)
    cloud = cloud._replace(z=change.whiten(positions), gradient=change.whiten_gradient(slope))
    # Variances along coordinates do not determine those along the new directions, which are about one.
    scatter, mean = np.full_like(moments.position_scatter, moments.number), np.zeros_like(moments.position)
    moments = Moments(moments.number, mean, mean, scatter, scatter)
    return warmup._replace(preconditioner=change, moments=moments, noise_shrinkage=factor), cloud


def wide_direction(rng: Generator, y: np.ndarray) -> np.ndarray:
    """Return a start for Lanczos's method: a random direction plus the widest of the cloud ``(G, L, d)``."""
    # From a random direction alone, the method is slow to find a flat direction among thousands.
    flat = (y - y.mean((0, 1))).reshape(-1, y.shape[-1])
    flat = np.where(np.isfinite(flat), flat, 0.0)
    drawn = rng.standard_normal(y.shape[-1:]).astype(y.dtype)
    drawn = drawn / np.linalg.norm(drawn)
    return drawn + widest(flat, drawn, 10)


def _sds(window, warmup):
    """Return the standard deviations of the coordinates when particles have just arrived with noise, otherwise ones."""
    sds = np.sqrt(warmup.moments.variances())
    # In a prolonged arrival there is no noise, so that particles in the same basin come together, and only its
    # curvature tells the scales.
    if not window.was_arrival or window.is_prolonged:
        return np.ones_like(sds)
    return usable(sds)


def _num_for_curvature(cloud, plan, rank=None):
    """Return on how many minibatches of each particle to measure the curvature, for all eigenvectors or so many."""
    if not plan.is_noisy:
        return 1
    dimension, rows = cloud.z.shape[-1], plan.minibatch_size * plan.num_independent(cloud)
    wanted = -(-(SCALES.rows if rank is None else SCALES.rows_of_few) * dimension // rows)
    return max(1, min(wanted, SCALES.gradients // (2 * (dimension if rank is None else 2 * rank))))


def _num_noise_pairs(window, cloud, plan):
    """Return on how many pairs of minibatches of each particle to measure the covariance of the noise, and how many
    particles have minibatches of their own."""
    number = plan.num_independent(cloud)
    few = max(1, min(-(-SCALES.draws * cloud.z.shape[-1] // number), SCALES.pairs))
    most = window.timetable.num_warmup * plan.num_steps // 100
    return max(few, min(-(-SCALES.draws_of_rows * plan.num_minibatches // number), most)), number


def _changed(warmup, cloud, change):
    # The memory stays as it is, because carried noise is white in any coordinates.
    cloud = cloud._replace(z=change.whiten(cloud.z), gradient=change.whiten_gradient(cloud.gradient))
    preconditioner, moments = warmup.preconditioner.compose(change), warmup.moments.compose(change)
    return warmup._replace(preconditioner=preconditioner, moments=moments, noise_shrinkage=1.0), cloud


def extremes(
    start: np.ndarray, product: Callable[[np.ndarray], np.ndarray], rank: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the eigenvectors, ``(d, rank)``, and absolute eigenvalues, ``(rank,)``, that differ most from 1.

    They come from Lanczos's method with full reorthogonalization. A pair that has not converged is replaced by a zero
    vector and 1, because scaling by it would couple its direction to others.

    :param start: a random vector, ``(d,)``.
    :param product: the product of a symmetric matrix with a unit vector.
    """
    steps, v = min(2 * rank, len(start)), start / np.linalg.norm(start)
    basis = np.zeros((steps, len(start)), start.dtype)
    diagonal, beside = np.zeros((2, steps), start.dtype)
    for i in range(steps):
        basis[i], image = v, product(v)
        diagonal[i] = v @ image
        for _ in range(2):
            image = image - basis @ image @ basis
        beside[i] = np.linalg.norm(image)
        v = image / (beside[i] if beside[i] > 0 else 1.0)
    values, weights = eigh(np.diag(diagonal) + np.diag(beside[:-1], 1) + np.diag(beside[:-1], -1))
    absolute = np.maximum(np.abs(values), SCALES.smallest)
    residual = np.abs(beside[-1] * weights[-1])
    converged = (residual < SCALES.converged * np.sqrt(absolute)) & np.isfinite(absolute)
    extremity = np.where(converged, np.abs(np.log(absolute)), 0.0)
    chosen = np.argsort(-extremity, kind="stable")[:rank]
    usable = converged[chosen]
    return np.where(usable, (weights.T @ basis)[chosen].T, 0.0), np.where(usable, absolute[chosen], 1.0)


def whitening(curvature: np.ndarray) -> np.ndarray:
    """Return S, lower triangular or ``(d,)``, with ``S Sᵀ`` the inverse of a curvature made positive.

    Negative eigenvalues count by their absolute value, as in a saddle, whose scale they give as well as positive ones.

    :param curvature: ``(d, d)``, or its diagonal ``(d,)``.
    """
    diagonal = np.abs(curvature if curvature.ndim == 1 else curvature.diagonal())
    if curvature.ndim == 1:
        return np.maximum(np.where(np.isfinite(diagonal), diagonal, 1.0), SCALES.smallest_along) ** -0.5
    unit = usable(diagonal) ** -0.5
    relative = curvature * np.outer(unit, unit)
    if np.isfinite(cholesky(relative - SCALES.smallest * np.eye(len(unit)))).all():
        return unit[:, None] * inverse_root(relative)  # Hundreds of times as fast.
    values, vectors = eigh(relative)
    values = np.maximum(np.abs(values), SCALES.smallest)
    return _root(np.outer(unit, unit) * (vectors / values @ vectors.T), unit)


def shrink_noisy_directions(covariance: np.ndarray, num_draws: int, allowed: float) -> tuple[np.ndarray, float]:
    """Return S, lower triangular, that rescales noisy directions until their gradient noise is at most the allowed one.

    The bias of a step is largest along the direction with the most noise, and would limit the step of all. Only the
    ratios of the directions matter, so the least noisy one keeps its scale.

    :param covariance: that of the gradient noise in whitened coordinates, ``(d, d)``.
    :param num_draws: the number of draws that it was estimated from.
    :param allowed: the largest variance tolerated at the longest stable step.
    :return: S, and the largest factor by which a variance grows in the new coordinates.
    """
    values, vectors = eigh(covariance)
    # An estimate from few draws spreads equal eigenvalues by a factor of ten. They move toward their mean by the oracle
    # approximating shrinkage (Chen, Wiesel, Eldar and Hero, 2010).
    dimension, total, square = len(values), values.sum(), np.sum(values**2)
    weight = (num_draws + 1 - 2 / dimension) * (square - total**2 / dimension)
    share = min(1.0, ((1 - 2 / dimension) * square + total**2) / weight) if weight > 0 else 1.0
    values = (1.0 - share) * values + share * total / dimension
    factor = np.maximum(values / allowed, 1.0)
    factor = factor / factor.min()
    return _root(vectors / factor @ vectors.T, np.ones_like(values)), factor.max()


def _root(matrix, otherwise):
    """Return the lower Cholesky factor of a matrix, or a diagonal where it is not finite."""
    scale = cholesky((matrix + matrix.T) / 2.0)
    return scale if np.isfinite(scale).all() else np.diag(otherwise)


def update_centering(rng: Generator, window: Window, warmup: WarmupState, cloud: Cloud, sampler: Sampler) -> Found:
    """At the ends of the first windows after the arrival, center each entry by what the data say.

    An entry x with prior location m and scale s has the curvature ``1 + h s²`` in its form ``(x − m) / s``, if the
    likelihood has the curvature h. It is centered by ``h s² / (1 + h s²)``, the share of what is known of x that
    the data say: the correlation of x with m and s is then least for a Gaussian. Where s is known well and has few
    effects, x stays as it is, because its likelihood does not depend on s, and minibatches add no noise to the gradient
    with respect to s. An effect that the model itself multiplies by s is treated likewise, once gradients have told the
    power of s: with minibatches at the end of the first window.
    """
    known = warmup.centering
    if known is not None and window.is_first and sampler.plan.can_prolong:
        return _with_products(rng, warmup, cloud, sampler)
    # Later, scales are averages over windows, which need the same coordinates.
    if known is None or not window.centers:
        return warmup, cloud
    lost = warmup.arrival.lost
    learned, found = sampler.recover_and_center(warmup, replace_lost(rng, cloud.z, lost), learns=True)
    sd = np.std(np.log(found.scale), (0, 1))
    _, of, counts = np.unique(found.scale[0, 0], return_inverse=True, return_counts=True)
    # In networks, the mean curvature is that of different functions, and says nothing of single weights.
    adds_up = (counts[of] >= CENTERING.effects) & (sd > 0) & (not window.is_prolonged)
    can_change = (sd > CENTERING.sd) | adds_up
    # The curvature in coordinates in which all that may change is standardized, ...
    plain = learned._replace(share=np.where(can_change, 0.0, 1.0).astype(known.share.dtype))
    trial, u = _rescaled(rng, warmup, sampler.to_coordinates(plain, found), plain)
    curvature = mean_diagonal(rng, u, sampler.gradients(trial)) / trial.preconditioner.lengths() ** 2
    # ... which says how to center.
    share = np.where(can_change, 1.0 - 1.0 / np.maximum(curvature, 1.0), 1.0)
    centering = learned._replace(share=np.where(np.isfinite(share), share, known.share))
    is_other = np.abs(centering.share - known.share).max() > CENTERING.change
    if not is_other and np.array_equal(centering.powers, known.powers) and np.array_equal(centering.bases, known.bases):
        return warmup, cloud
    if lost.any():
        found = sampler.recover_and_center(warmup, cloud.z, learns=True)[1]
    return _recentered(rng, warmup, cloud, sampler, centering, found)


def _with_products(rng, warmup, cloud, sampler):
    """Center the effects of products, once their powers are known: noisy Adam moves their scale faster."""
    if not warmup.centering.powers.size:
        return warmup, cloud
    learned, found = sampler.recover_and_center(warmup, cloud.z, learns=True)
    if not learned.powers.any():
        return warmup, cloud
    centering = warmup.centering._replace(powers=learned.powers)
    new, moved = _recentered(rng, warmup, cloud, sampler, centering, found)
    return new._replace(arrival=new.arrival.restarted(moved.z)), moved


def _recentered(rng, warmup, cloud, sampler, centering, found):
    """Return state and cloud in coordinates of another centering; as they are where something is not finite there."""
    new, moved = _rescaled(rng, warmup, sampler.to_coordinates(centering, found), centering)
    energy, gradient = sampler.energy_and_grad(new, draw_seed(rng), moved)
    if not all(np.isfinite(x).all() for x in (moved, energy, gradient)):
        return warmup, cloud
    moments = jax.tree.map(np.zeros_like, warmup.moments).add(*(x.reshape(-1, x.shape[-1]) for x in (moved, gradient)))
    return new._replace(moments=moments), cloud._replace(z=moved, potential_energy=energy, gradient=gradient)


def _rescaled(rng, warmup, y, centering):
    """Return the state with other coordinates, scaled by the spread of the particles along each, and these in them."""
    flat = replace_lost(rng, y, warmup.arrival.lost).reshape(-1, y.shape[-1])
    change = warmup.preconditioner.along_coordinates(usable(np.std(flat, 0)), flat.mean(0))
    return warmup._replace(preconditioner=change, centering=centering), change.whiten(y)
