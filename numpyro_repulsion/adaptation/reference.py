"""The reference points of control variates: where the particles are when a window ends."""

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

__all__ = ["update_reference"]


def update_reference(
    key: jax.Array, stage: Stage, tuning: Tuning, cloud: Cloud, sampler: Sampler
) -> tuple[Tuning, Cloud]:
    """A reference common to all at the mean of the window; one for each particle where it is."""
    known = tuning.anchor
    if known is None:
        return tuning, cloud
    if sampler.learned.epoch is None:
        moves, position = stage.references_move, tuning.preconditioner.colour(tuning.moments.position)
    else:
        moves = stage.references_move & stage.is_arriving
        position = tuning.preconditioner.colour(cloud.z)
    moved = known._replace(position=jnp.where(moves, position, known.position), in_use=known.in_use | moves)
    reference = lax.cond(moves | known.is_stale, lambda: sampler.evaluate_reference(key, moved, cloud), lambda: moved)
    return tuning._replace(anchor=reference), cloud
