"""What the updates of one iteration are given, and what they change."""

from __future__ import annotations

from typing import NamedTuple

import jax
from jax import random

from numpyro_repulsion.dynamics import Cloud
from numpyro_repulsion.gradients import Reference

__all__ = ["Keys", "Progress"]


class Keys(NamedTuple):
    """The random keys of an iteration, all of one split, because each split takes a tenth of a second to compile.

    - **basins** - for jumps that switch themselves on.
    - **learners** - for each learner, ``(n,)``.
    - **updates** - for each update, ``(num_steps,)``.
    """

    basins: jax.Array
    learners: jax.Array
    updates: jax.Array

    @staticmethod
    def of(key: jax.Array, num_steps: int, num_learners: int) -> tuple[jax.Array, Keys]:
        """The key of the next iteration, and the keys of this one."""
        number = 2 + num_learners
        keys = random.split(key, number + num_steps)
        return keys[0], Keys(keys[1], keys[2:number], keys[number:])


class Progress(NamedTuple):
    """What updates change.

    - **cloud** - the particles.
    - **num_updates** - how many were done.
    - **flagged** - in how many updates of the iteration each particle was held or its gradient cut, ``(G, L)``.
    - **arrival** - the step sizes of the particles while they arrive, ``(G, L)``.
    - **reference** - the references of control variates, where they are renewed between updates, or ``None``.
    - **tally** - how many jumps there were, and the sum of their acceptances, or ``None``.
    """

    cloud: Cloud
    num_updates: jax.Array
    flagged: jax.Array
    arrival: jax.Array
    reference: Reference | None
    tally: tuple[jax.Array, jax.Array] | None
