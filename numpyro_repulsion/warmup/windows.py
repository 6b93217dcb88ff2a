"""The windows of warmup, and where among them an iteration is.

0      1 % 2.5 % 5 % 10 % 15 %   25 % 30 %   40 %       60 % 65 % 70 % ...                  100 %
|  ·   |   |     |   |    |       |    |      |          |    |    |                          |
particles arrive                  | scales are adapted   | step size and bandwidth settle     | sampling
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["ARRIVED", "BEGINNINGS", "ENDS", "FREEZE", "LAST_ADAPTED", "SETTLING_ENDS", "Stage"]

#: Fractions of warmup at which windows end, in which particles arrive, ...
ARRIVAL_ENDS = (0.01, 0.025, 0.05, 0.1, 0.15, 0.25)
#: ... the sampler runs and scales are adapted, ...
ADAPTATION_ENDS = (0.3, 0.4, 0.6)
#: ... and with these frozen the step size and the bandwidth settle.
SETTLING_ENDS = (0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0)
#: Correlations are used from the second window on, lost particles rescued from the third one on.
FIRST_DENSE, FIRST_RESCUE = 0.02, 0.04
#: The share of the gradient noise that counts in the first windows of the sampler: first travel, then cool.
ANNEALING = ((0.3, 0.0), (0.4, 0.03), (0.6, 0.2))

FREEZE = ADAPTATION_ENDS[-1]
ARRIVED = ARRIVAL_ENDS[-1]
ENDS = np.array(ARRIVAL_ENDS + ADAPTATION_ENDS + SETTLING_ENDS)
#: Where the moments of a window begin to count: in its second half while particles arrive, after a quarter later on,
#: and at last, with frozen scales, over three quarters of what is left.
_STARTS = np.array((0.0, *ARRIVAL_ENDS, *ADAPTATION_ENDS))
_LAST = np.array((*ARRIVAL_ENDS, *ADAPTATION_ENDS, 1.0))
BEGINNINGS = _STARTS + np.where(_LAST <= ARRIVED, 0.5, 0.25) * (_LAST - _STARTS)
#: The share of warmup from which the final scales are learned.
LAST_ADAPTED = float(FREEZE - BEGINNINGS[-2])


class Stage(NamedTuple):
    """Where in its warmup a run is at one iteration; computed once for it. Scalars.

    - **done** - iterations done, with this one.
    - **num_warmup** - how many of them are warmup.
    - **is_warmup** - whether this one is.
    - **is_arriving** - whether particles still arrive in it.
    - **is_settling** - whether scales are frozen in it, and warmup goes on.
    - **window_starts** - whether the sums of a window begin with it.
    - **window_ends** - whether a window ends with it.
    - **until_end** - how many more iterations, with this one, complete the window; after the last, a huge number.
    - **has_arrived** - whether particles have arrived, after it.
    - **may_rescue** - whether lost particles may be sent back after it. Not at the last: copies must part before
      particles repel each other.
    - **is_adapting** - whether a window that ends with it changes scales.
    - **uses_correlations** - whether it changes correlations, too.
    - **references_move** - whether a window that ends with it moves reference points.
    - **num_settled** - how many windows have ended since scales were frozen.
    - **noise_share** - the share of the gradient noise that counts.
    """

    done: jax.Array
    num_warmup: jax.Array
    is_warmup: jax.Array
    is_arriving: jax.Array
    is_settling: jax.Array
    window_starts: jax.Array
    window_ends: jax.Array
    until_end: jax.Array
    has_arrived: jax.Array
    may_rescue: jax.Array
    is_adapting: jax.Array
    uses_correlations: jax.Array
    references_move: jax.Array
    num_settled: jax.Array
    noise_share: jax.Array

    @staticmethod
    def of(iteration: jax.Array, num_warmup: jax.Array) -> Stage:
        """That of the iteration that follows so many."""
        done = iteration + 1

        def at(fraction):
            return _iteration_at(fraction, num_warmup)

        arrived, frozen = at(ARRIVED), at(FREEZE)
        left = at(ENDS) - iteration
        until_end = jnp.min(jnp.where(left > 0, left, jnp.iinfo(left.dtype).max))
        is_warmup, window_ends = iteration < num_warmup, until_end == 1
        noise_ends, shares = (np.array(column) for column in zip(*ANNEALING, strict=True))
        return Stage(
            done=done,
            num_warmup=num_warmup,
            is_warmup=is_warmup,
            is_arriving=iteration < arrived,
            is_settling=(iteration >= frozen) & is_warmup,
            window_starts=jnp.any(iteration == at(BEGINNINGS)),
            window_ends=window_ends,
            until_end=until_end,
            has_arrived=done >= arrived,
            may_rescue=(done > at(FIRST_RESCUE)) & (done < arrived),
            is_adapting=done <= frozen,
            uses_correlations=done > at(FIRST_DENSE),
            references_move=window_ends & ((done == arrived) | (done == frozen)),
            num_settled=jnp.sum(done >= at(np.array(SETTLING_ENDS))),
            noise_share=jnp.asarray([*shares, 1.0])[jnp.searchsorted(at(noise_ends), done, side="right")],
        )

    def at(self, fraction: Any) -> jax.Array:
        """How many iterations a fraction of warmup has, at least one."""
        return _iteration_at(fraction, self.num_warmup)


def _iteration_at(fraction, num_warmup):
    # In integers, for in single precision 0.3 · 50 is not 15; in two parts, so that the product does not overflow.
    parts = np.round(np.asarray(fraction) * 4000).astype(np.int32)
    whole, rest = num_warmup // 4000, num_warmup % 4000
    return jnp.clip(parts * whole + parts * rest // 4000, 1, num_warmup)
