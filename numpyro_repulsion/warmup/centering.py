"""The learner of partial centering, from the curvature that the data add to each entry of a hierarchical site."""

from __future__ import annotations

import jax
import numpy as np
from numpy.random import Generator

from numpyro_repulsion.dynamics import Cloud
from numpyro_repulsion.warmup.preconditioner import Preconditioner
from numpyro_repulsion.warmup.probes import mean_diagonal, minibatch
from numpyro_repulsion.warmup.state import Sampler, WarmupState
from numpyro_repulsion.warmup.windows import Window

__all__ = ["MIN_PARTICLES", "update_centering"]

#: With fewer particles, the scales of new coordinates are unknown.
MIN_PARTICLES = 4
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
    if warmup.centering is None or not window.moves_references or window.curvature_weight < 1.0:
        return warmup, cloud
    known = warmup.centering
    learned, found = sampler.recover(warmup, cloud.z, learns=True)
    can_change = np.std(np.log(found.scale), (0, 1)) > MIN_SPREAD
    # The curvature in coordinates in which all that may change is standardized, ...
    plain = learned._replace(share=np.where(can_change, 0.0, 1.0).astype(known.share.dtype))
    trial, u = _rescaled(warmup, sampler.to_coordinates(plain, found), plain)
    curvature = mean_diagonal(rng, u, sampler.gradients(trial)) / trial.preconditioner.lengths() ** 2
    # ... which says how to center.
    share = np.where(can_change, 1.0 - 1.0 / np.maximum(curvature, 1.0), 1.0)
    centering = learned._replace(share=np.where(np.isfinite(share), share, known.share))
    is_other = np.abs(centering.share - known.share).max() > MIN_CHANGE
    if not is_other and np.array_equal(centering.powers, known.powers) and np.array_equal(centering.bases, known.bases):
        return warmup, cloud
    new, moved = _rescaled(warmup, sampler.to_coordinates(centering, found), centering)
    energy, gradient = sampler.energy_and_grad(new, minibatch(rng), moved)
    if not all(np.isfinite(x).all() for x in (moved, energy, gradient)):
        return warmup, cloud
    moments = jax.tree.map(np.zeros_like, warmup.moments).add(*(x.reshape(-1, x.shape[-1]) for x in (moved, gradient)))
    new = new._replace(scales=new.scales._replace(moments=moments))
    return new, cloud._replace(z=moved, potential_energy=energy, gradient=gradient)


def _rescaled(warmup, y, centering):
    """Return the state with other coordinates, scaled by the spread of the particles along each, and these in them."""
    flat = y.reshape(-1, y.shape[-1])
    spread = np.std(flat, 0)
    spread = np.where(np.isfinite(spread) & (spread > 0), spread, 1.0)
    old = warmup.preconditioner
    stretch = None if old.stretch is None else np.zeros_like(old.stretch)
    scale = np.diag(spread) if old.kind == "dense" else spread
    change = Preconditioner(scale, flat.mean(0), old.vectors, stretch)
    scales = warmup.scales._replace(preconditioner=change, centering=centering)
    return warmup._replace(scales=scales), change.whiten(y)
