"""The learner of partial centering, from the curvature that the data add to each entry of a hierarchical site."""

from __future__ import annotations

from typing import Any

import jax
from jax import lax, random
import jax.numpy as jnp
from numpy.random import Generator

from numpyro_repulsion.dynamics import Cloud, select
from numpyro_repulsion.noise import signs
from numpyro_repulsion.warmup.preconditioner import Preconditioner
from numpyro_repulsion.warmup.probes import NUM_PROBES, particle_mean
from numpyro_repulsion.warmup.state import Sampler, WarmupState
from numpyro_repulsion.warmup.windows import Window

__all__ = ["MIN_PARTICLES", "recentered", "update_centering"]

#: With fewer particles, the scales of new coordinates are unknown.
MIN_PARTICLES = 4
#: Half the distance over which gradients are compared, in standard deviations of the particles.
WIDTH = 0.2
#: The smallest standard deviation of log s for which centering matters: below it, the change of variables is linear.
MIN_SPREAD = 0.3
#: Smaller changes are not worth scales that must be learned again.
MIN_CHANGE = 0.1


def update_centering(
    rng: Generator, window: Window, warmup: WarmupState, cloud: Cloud, sampler: Sampler
) -> tuple[WarmupState, Cloud]:
    """At the ends of the first windows after the arrival, center each entry by what the data say.

    An entry x with prior location m and scale s has the curvature ``1 + h s²`` in its form ``(x − m) / s``, if the
    likelihood has the curvature h. It is centered by ``h s² / (1 + h s²)``, the share of what is known of x that
    the data say: the correlation of x with m and s is then least for a Gaussian. Where s is known well, x stays as it
    is, because its likelihood does not depend on s, and minibatches add no noise to the gradient with respect to s.
    An effect that the model itself multiplies by s is treated likewise, once gradients have told the power of s.
    """
    # Later, scales are averages over windows, which need the same coordinates.
    is_due = window.moves_references and window.curvature_weight == 1.0
    return sampler.recenter(rng, warmup, cloud) if is_due and warmup.centering is not None else (warmup, cloud)


def recentered(key: jax.Array, warmup: WarmupState, cloud: Cloud, iteration: Any) -> tuple[WarmupState, Cloud]:
    """Return the state and the cloud with other centering, in a program; unchanged if the centering hardly changes.

    :param iteration: that of the kernel, ``WarmupIteration``.
    """
    found = iteration.recover(warmup, cloud.z)
    known, shape = warmup.scales.centering, cloud.z.shape
    flat = jax.tree.map(lambda x: x.reshape(-1, shape[-1]), found)
    learned, flat = iteration.centered(known).structure_at(flat, MIN_SPREAD)
    found = jax.tree.map(lambda x: x.reshape(shape), flat)
    can_change = jnp.std(jnp.log(flat.scale), 0) > MIN_SPREAD
    plain = learned._replace(share=jnp.where(can_change, 0.0, 1.0).astype(known.share.dtype))
    y = iteration.centered(plain).to_coordinates(found)
    trial, change = _rescaled(warmup, y, plain)
    u, (probe_key, gradient_key) = change.whiten(y), random.split(key)

    def adopted(curvature):
        """Return the centering by a curvature of U in the coordinates u, and the state and particles with it."""
        curvature = curvature / change.lengths() ** 2
        share = jnp.where(can_change, 1.0 - 1.0 / jnp.maximum(curvature, 1.0), 1.0)
        centering = learned._replace(share=jnp.where(jnp.isfinite(share), share, known.share))
        y = iteration.centered(centering).to_coordinates(found)
        new, own_change = _rescaled(warmup, y, centering)
        return centering, new, own_change.whiten(y)

    def evaluate(i, carry):
        curvature, _, before = carry
        _, new, moved = adopted(curvature)
        is_last, number, side = i == 2 * NUM_PROBES, i // 2, 1.0 - 2.0 * (i % 2)
        probe = signs(probe_key, u.shape, u.dtype, number)
        scales, point = select(is_last, (new.scales, moved), (trial.scales, u + WIDTH * side * probe))
        energy_and_grad = iteration.energy_and_grad(trial._replace(scales=scales))
        energy, gradient = energy_and_grad(random.fold_in(gradient_key, number), point)
        product = probe * (before - gradient) / (2.0 * WIDTH)
        added = jnp.where(is_last | (side > 0), 0.0, particle_mean(product) / NUM_PROBES)
        return curvature + added, energy, gradient

    # A loop over the two sides of each probe, and the particles in the new coordinates at last, so that the gradient is
    # compiled once.
    nothing = jnp.zeros(shape[-1], u.dtype), jnp.zeros_like(cloud.potential_energy), jnp.zeros_like(u)
    curvature, energy, gradient = lax.fori_loop(0, 2 * NUM_PROBES + 1, evaluate, nothing)
    centering, new, moved = adopted(curvature)
    moments = jax.tree.map(jnp.zeros_like, warmup.moments)
    moments = moments.add(*(x.reshape(-1, x.shape[-1]) for x in (moved, gradient)))
    new = new._replace(scales=new.scales._replace(moments=moments))
    is_other = jnp.abs(centering.share - known.share).max() > MIN_CHANGE
    for one, other in ((centering.powers, known.powers), (centering.bases, known.bases)):
        is_other |= (one != other).any()
    usable = jnp.isfinite(energy).all() & jnp.isfinite(gradient).all() & jnp.isfinite(moved).all()
    new_cloud = cloud._replace(z=moved, potential_energy=energy, gradient=gradient)
    return lax.cond(is_other & usable, lambda: (new, new_cloud), lambda: (warmup, cloud))


def _rescaled(warmup, y, centering):
    """Return the state with other coordinates, scaled by the spread of the particles along each of them."""
    flat = y.reshape(-1, y.shape[-1])
    spread = jnp.std(flat, 0)
    spread = jnp.where(jnp.isfinite(spread) & (spread > 0), spread, 1.0)
    old = warmup.scales.preconditioner
    scale = jnp.diag(spread) if old.kind == "dense" else spread
    stretch = None if old.stretch is None else jnp.zeros_like(old.stretch)
    if warmup.reference is not None:
        # It is in the old coordinates until it moves, at the end of the same window.
        warmup = warmup._replace(reference=warmup.reference._replace(in_use=jnp.zeros((), bool)))
    change = Preconditioner(scale, jnp.mean(flat, 0), old.vectors, stretch)
    return warmup._replace(scales=warmup.scales._replace(preconditioner=change, centering=centering)), change
