"""The learner of scales, which estimates them from the moments of the cloud over a window."""

from __future__ import annotations

import jax
from jax import lax
import jax.numpy as jnp

from numpyro_repulsion.dynamics import Cloud
from numpyro_repulsion.warmup.learning import Sampler
from numpyro_repulsion.warmup.state import ScalesState, WarmupState
from numpyro_repulsion.warmup.windows import Stage

__all__ = ["update_scales"]


def update_scales(
    key: jax.Array, stage: Stage, warmup: WarmupState, cloud: Cloud, sampler: Sampler
) -> tuple[WarmupState, Cloud]:
    """Add the cloud to the moments; at the end of a window, until the scales are frozen, whiten the coordinates."""
    del key
    known = warmup.scales.moments

    def observe():
        fresh = jax.tree.map(lambda x: jnp.where(stage.window_starts, 0.0, x), known)
        return fresh.add(*(x.reshape(-1, x.shape[-1]) for x in (cloud.z, cloud.gradient)))

    moments = lax.cond(stage.is_warmup, observe, lambda: known)
    warmup = warmup._replace(scales=warmup.scales._replace(moments=moments))
    if sampler.plan.scale is None:
        return warmup, cloud
    return lax.cond(
        stage.window_ends & stage.is_adapting, lambda: _rescale(stage, warmup, cloud), lambda: (warmup, cloud)
    )


def _rescale(stage, warmup, cloud):
    change = warmup.scales.moments.to_preconditioner(stage.uses_correlations)
    # The memory stays as it is, because carried noise is white in any coordinates.
    cloud = cloud._replace(z=change.whiten(cloud.z), gradient=change.whiten_gradient(cloud.gradient))
    preconditioner, moments = warmup.scales.preconditioner.compose(change), warmup.scales.moments.compose(change)
    return warmup._replace(scales=ScalesState(preconditioner, moments)), cloud
