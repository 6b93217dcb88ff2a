"""The random keys of one iteration, and the quantities that its updates change."""

from __future__ import annotations

from typing import NamedTuple

import jax
from jax import random

from numpyro_repulsion.dynamics import Cloud
from numpyro_repulsion.shapes import Count, Counts, Flags, Scalar
from numpyro_repulsion.warmup import ArrivalState

__all__ = ["Keys", "Progress"]


class Keys(NamedTuple):
    """The random keys of an iteration, all from one split, because each split takes a tenth of a second to compile.

    - **basins** - the key for jumps that switch themselves on.
    - **learners** - one key for each learner but those of centring and of the prolongation, ``(n,)``.
    - **updates** - one key for each update, ``(num_steps,)``.
    """

    basins: jax.Array
    learners: jax.Array
    updates: jax.Array

    @staticmethod
    def of(key: jax.Array, num_steps: int, num_learners: int) -> tuple[jax.Array, Keys]:
        """Return the key of the next iteration, and the keys of this one."""
        number = 2 + num_learners
        keys = random.split(key, number + num_steps)
        return keys[0], Keys(keys[1], keys[2:number], keys[number:])


class Progress(NamedTuple):
    """The quantities that updates change.

    - **cloud** - the particles.
    - **num_updates** - how many updates are done.
    - **flagged** - how many updates of the iteration were rejected, turned back or had a clipped gradient, ``(G, L)``.
    - **has_turned** - which particles were turned back in the last update, ``(G, L)``.
    - **arrival** - how particles arrive.
    - **tally** - the number of jumps and the sum of their acceptance probabilities, or ``None``.
    """

    cloud: Cloud
    num_updates: Count
    flagged: Counts
    has_turned: Flags
    arrival: ArrivalState
    tally: tuple[Scalar, Scalar] | None
