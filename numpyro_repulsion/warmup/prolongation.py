"""The learner that prolongs the arrival, if gradients stay as noisy as they were far from the posterior."""

from __future__ import annotations

import jax
from jax import lax
import jax.numpy as jnp

from numpyro_repulsion.dynamics import Cloud
from numpyro_repulsion.warmup.learning import Sampler
from numpyro_repulsion.warmup.preconditioner import Preconditioner
from numpyro_repulsion.warmup.state import WarmupState
from numpyro_repulsion.warmup.windows import ARRIVED, Stage

__all__ = ["update_prolongation"]

#: The share of the variance of minibatch gradients that control variates leave where particles still have to arrive.
STAYS_NOISY = 0.5
#: The smallest noise that matters, in whitened coordinates, where the variance of exact gradients is 1. Networks on a
#: few hundred rows have about 1; a local posterior at a low inverse temperature has 0.01.
MIN_NOISE = 0.1
#: The share by which hierarchical sites are centred meanwhile: not at all.
SHARE = 0.0


def update_prolongation(
    key: jax.Array, stage: Stage, warmup: WarmupState, cloud: Cloud, sampler: Sampler
) -> tuple[WarmupState, Cloud]:
    """At the end of the arrival, begin its second half again if gradients of particles and of their mean differ much.

    Near a posterior that the data determine, gradients on the same rows hardly differ between particles, and control
    variates remove their noise. The particles of a network are different functions instead, each of which can still
    improve, and an update by Adam improves it more than one by the sampler. So the arrival takes 80 % of warmup in
    place of 25 %.

    Meanwhile particles move without noise and in units of the spread of the starts. Hierarchical sites are standardized
    then, because the density of weights ``N(0, 1/λ)`` and of λ is highest where all weights are 0 and λ is in the
    thousands; that of the standardized weights is not.
    """
    del key
    arrival, reference = warmup.arrival, warmup.reference
    spread, is_prolonged = arrival.spread, arrival.is_prolonged
    if spread is None or is_prolonged is None or reference is None:
        return warmup, cloud
    plain, corrected = warmup.measurements.mean_isotropic_noise
    due = stage.window_ends & (stage.done == stage.at(ARRIVED)) & ~is_prolonged

    def prolong():
        found, centring, unit = sampler.recover(warmup, cloud.z), warmup.scales.centring, spread
        y = found.z
        if centring is not None:
            centring = centring._replace(share=jnp.full_like(centring.share, SHARE))
            y = sampler.centred(centring).to_coordinates(found)
            # Standardized sites have a prior of unit scale.
            is_standardized = ((found.scale != 1.0) | (found.location != 0.0)).any((0, 1))
            unit = jnp.where(is_standardized, 1.0, unit)
        old = warmup.scales.preconditioner
        stretch = None if old.stretch is None else jnp.zeros_like(old.stretch)
        scale = jnp.diag(unit) if old.kind == "dense" else unit
        change = Preconditioner(scale, jnp.mean(y, (0, 1)), old.vectors, stretch)
        scales = warmup.scales._replace(
            preconditioner=change,
            moments=jax.tree.map(jnp.zeros_like, warmup.moments),
            noise_shrinkage=jnp.ones_like(warmup.scales.noise_shrinkage),
            centring=centring,
        )
        # With a gradient of 0, the first update only evaluates the gradient in the new coordinates.
        moved = cloud._replace(z=change.whiten(y), gradient=jnp.zeros_like(cloud.gradient))
        unknown = type(reference).none(reference.position.shape, reference.position.dtype)
        return warmup._replace(arrival=arrival.prolonged(moved.z), scales=scales, reference=unknown), moved

    stays_noisy = (plain > MIN_NOISE) & (corrected > STAYS_NOISY * plain)
    return lax.cond(due & stays_noisy, prolong, lambda: (warmup, cloud))
