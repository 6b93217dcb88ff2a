"""All learners of a run: those of warmup, and those of the jumps."""

from __future__ import annotations

import jax
from jax import lax, random

from numpyro_repulsion.moves import Basins
from numpyro_repulsion.warmup import LEARNERS, Learner, update_centring, update_prolongation

__all__ = ["ALL_LEARNERS", "BASINS", "NUM_KEYS", "counted", "keys_of_learners"]

#: Jumps that switch themselves on if warmup finds several basins.
BASINS = Basins()


def counted(tally, jumped):
    """Return the tally with one more jump: the number of jumps and the sum of their acceptance probabilities."""
    number, total = tally
    return number + 1, total + jumped.probability.mean()


def _update_jumps(key, stage, warmup, cloud, sampler):
    """Update what the kernel's ``moves`` have learned."""
    del key
    if (moves := sampler.bound.kernel.moves) is None:
        return warmup, cloud
    state = warmup.jumps
    jumps = lax.cond(
        stage.is_warmup,
        lambda: moves.learn(stage, state, warmup, cloud, sampler.dynamics.temperature),
        lambda: state,
    )
    return warmup._replace(jumps=jumps), cloud


def _update_basins(key, stage, warmup, cloud, sampler):
    """Update what the jumps between basins have learned."""
    del key
    if warmup.basins is None or not sampler.plan.basins:
        return warmup, cloud
    basins = BASINS.learn(stage, warmup.basins, warmup, cloud, sampler.dynamics.temperature)
    return warmup._replace(basins=basins), cloud


#: In calling order.
ALL_LEARNERS: tuple[Learner, ...] = (*LEARNERS, _update_jumps, _update_basins)

#: How many of them have a key of their own. That of centring derives from another one, for the models that need it, and
#: that of the prolongation is not used.
NUM_KEYS = len(ALL_LEARNERS) - 2


def keys_of_learners(keys: jax.Array, centres: bool) -> list[jax.Array]:
    """Return a key for each learner, from ``NUM_KEYS`` keys.

    :param centres: whether the learner of centring needs one.
    """
    own = iter(keys)
    others = dict.fromkeys((update_centring, update_prolongation), keys[0])
    if centres:
        others[update_centring] = random.fold_in(keys[0], 1)
    return [others[learner] if learner in others else next(own) for learner in ALL_LEARNERS]
