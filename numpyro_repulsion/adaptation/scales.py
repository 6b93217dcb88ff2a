"""The scales of the posterior, from the moments of the cloud over a window."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
from jax import lax
import jax.numpy as jnp

from numpyro_repulsion.adaptation.windows import Stage
from numpyro_repulsion.dynamics import Cloud

if TYPE_CHECKING:
    from numpyro_repulsion.adaptation.tuning import Tuning
    from numpyro_repulsion.adaptation.warmup import Sampler

__all__ = ["update_scales"]


def update_scales(key: jax.Array, stage: Stage, tuning: Tuning, cloud: Cloud, sampler: Sampler) -> tuple[Tuning, Cloud]:
    """The moments of the window, and at its end, until scales are frozen, coordinates in which the cloud is white."""
    del key
    known = tuning.moments

    def observe():
        fresh = jax.tree.map(lambda x: jnp.where(stage.window_starts, 0.0, x), known)
        return fresh.add(*(x.reshape(-1, x.shape[-1]) for x in (cloud.z, cloud.gradient)))

    tuning = tuning._replace(moments=lax.cond(stage.is_warmup, observe, lambda: known))
    if sampler.learned.scale is None:
        return tuning, cloud
    return lax.cond(
        stage.window_ends & stage.is_adapting, lambda: _rescale(stage, tuning, cloud), lambda: (tuning, cloud)
    )


def _rescale(stage, tuning, cloud):
    change = tuning.moments.shape(stage.uses_correlations)
    # The carried noise is white in any coordinates.
    cloud = cloud._replace(z=change.whiten(cloud.z), gradient=change.pull(cloud.gradient))
    preconditioner, moments = tuning.preconditioner.after(change), tuning.moments.after(change)
    return tuning._replace(preconditioner=preconditioner, moments=moments), cloud
