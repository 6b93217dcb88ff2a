"""The learner of control variates' reference points: where the particles are when a window ends."""

from __future__ import annotations

import jax
from jax import lax
import jax.numpy as jnp

from numpyro_repulsion.dynamics import Cloud
from numpyro_repulsion.warmup.learning import Sampler
from numpyro_repulsion.warmup.state import WarmupState
from numpyro_repulsion.warmup.windows import Stage

__all__ = ["update_reference"]


def update_reference(
    key: jax.Array, stage: Stage, warmup: WarmupState, cloud: Cloud, sampler: Sampler
) -> tuple[WarmupState, Cloud]:
    """Move a common reference to the mean of the window, or each particle's own reference to its position."""
    known = warmup.reference
    if known is None:
        return warmup, cloud
    if sampler.plan.epoch is None:
        moves, position = (
            stage.references_move,
            warmup.scales.preconditioner.to_positions(warmup.moments.position),
        )
    else:
        moves = stage.references_move & stage.is_arriving
        position = warmup.scales.preconditioner.to_positions(cloud.z)
    moved = known._replace(position=jnp.where(moves, position, known.position), in_use=known.in_use | moves)
    reference = lax.cond(
        moves | known.is_stale, lambda: sampler.evaluate_reference(key, warmup, moved, cloud), lambda: moved
    )
    return warmup._replace(reference=reference), cloud
