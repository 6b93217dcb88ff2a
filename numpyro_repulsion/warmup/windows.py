"""The windows of warmup, and the position of an iteration among them.

0      1 % 2.5 % 5 % 10 % 15 %   25 % 30 %   40 %       60 % 65 % 70 % ...                  100 %
|  ·   |   |     |   |    |       |    |      |          |    |    |                          |
particles arrive                  | scales are adapted   | step size and bandwidth settle     | sampling

If the arrival is prolonged (``arrival.py``), its second half begins again at 25 % and ends at 80 %, or after
``WarmupPlan.late`` iterations; the windows that follow share what is left in the same proportions.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Integer
import numpy as np

__all__ = [
    "ARRIVED",
    "BEGINNINGS",
    "ENDS",
    "FIRST_WHITENED",
    "FREEZE",
    "LAST_ADAPTED",
    "NUM_HESSIANS",
    "SETTLING_ENDS",
    "Stage",
]

#: Fractions of warmup at which windows end: windows in which particles arrive, ...
ARRIVAL_ENDS = (0.01, 0.025, 0.05, 0.1, 0.15, 0.25)
#: With minibatches, the coordinates are first whitened by the curvature there, in the middle of the arrival.
FIRST_WHITENED = 0.15
#: Where the second half of a prolonged arrival ends at the latest.
LATEST = 0.8
#: ... in which the sampler runs and its scales are adapted, ...
ADAPTATION_ENDS = (0.3, 0.4, 0.6)
#: ... and in which the scales are frozen, and the step size and the bandwidth settle.
SETTLING_ENDS = (0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0)
#: Scales use correlations from the second window on; lost particles are rescued from the third window on.
FIRST_DENSE, FIRST_RESCUE = 0.02, 0.04
#: (end of window, share): the share of the gradient noise that limits the step until then; long steps first, to travel.
ANNEALING = ((0.3, 0.1), (0.4, 0.15), (0.6, 0.3))
#: (end of window, weight): the weight of the curvature measured there in the mean of all; the first are of a cloud that
#: has hardly arrived.
CURVATURE_WEIGHTS = ((0.25, 1.0), (0.3, 1.0), (0.4, 2 / 3), (0.6, 0.5))

#: How many measurements of the curvature count; another one, halfway through the arrival, is for the arrival only.
NUM_HESSIANS = len(CURVATURE_WEIGHTS)

FREEZE = ADAPTATION_ENDS[-1]
ARRIVED = ARRIVAL_ENDS[-1]
ENDS = np.array(ARRIVAL_ENDS + ADAPTATION_ENDS + SETTLING_ENDS)
#: Where the moments of a window begin: at half of a window of the arrival, at a quarter of a window of the adaptation,
#: and once in the settling part, at a quarter of it.
_STARTS = np.array((0.0, *ARRIVAL_ENDS, *ADAPTATION_ENDS))
_LAST = np.array((*ARRIVAL_ENDS, *ADAPTATION_ENDS, 1.0))
BEGINNINGS = _STARTS + np.where(_LAST <= ARRIVED, 0.5, 0.25) * (_LAST - _STARTS)
#: Windows end at multiples of one part in so many of warmup.
_PARTS = 4000
#: More iterations than this never shorten a prolonged arrival, and would overflow.
_MANY = 500_000
#: The share of warmup whose iterations give the final scales.
LAST_ADAPTED = float(FREEZE - BEGINNINGS[-2])


class Stage(NamedTuple):
    """The stage of warmup at one iteration, computed once per iteration; scalars.

    - **done** - how many iterations are done, including this one.
    - **num_warmup** - how many iterations are warmup.
    - **is_prolonged** - whether the arrival is prolonged; ``None`` if it cannot be.
    - **latest** - after how many parts of warmup a prolonged arrival ends; ``None`` if it cannot be prolonged.
    - **is_arriving** - whether particles still arrive.
    - **is_settling** - whether the scales are frozen.
    - **window_starts** - whether the sums of a window start with this iteration.
    - **window_ends** - whether a window ends with this iteration.
    - **until_end** - how many iterations, including this one, complete the window.
    - **has_arrived** - whether particles have arrived after this iteration.
    - **finds_lost** - whether lost particles are looked for after this iteration, if a window ends.
    - **may_rescue** - whether they may then move to others. Not at the end of the last window of the arrival, because
      copies must separate before particles repel each other.
    - **is_adapting** - whether a window that ends with this iteration changes the scales.
    - **whitens** - whether it changes them by the curvature, if gradients are noisy.
    - **uses_correlations** - whether it also changes correlations.
    - **references_move** - whether a window ends with this iteration and moves reference points.
    - **num_settled** - how many windows have ended since the scales were frozen.
    - **curvature_weight** - the weight of the curvature measured at the end of this window in the mean of all.
    - **noise_share** - the share of the gradient noise that limits the step.
    """

    done: Integer[Array, ""]
    num_warmup: Integer[Array, ""]
    is_prolonged: Bool[Array, ""] | None
    latest: Integer[Array, ""] | None
    is_arriving: Bool[Array, ""]
    is_settling: Bool[Array, ""]
    window_starts: Bool[Array, ""]
    window_ends: Bool[Array, ""]
    until_end: Integer[Array, ""]
    has_arrived: Bool[Array, ""]
    finds_lost: Bool[Array, ""]
    may_rescue: Bool[Array, ""]
    is_adapting: Bool[Array, ""]
    whitens: Bool[Array, ""]
    uses_correlations: Bool[Array, ""]
    references_move: Bool[Array, ""]
    num_settled: Integer[Array, ""]
    curvature_weight: Float[Array, ""]
    noise_share: Float[Array, ""]

    @staticmethod
    def of(
        iteration: Integer[Array, ""],
        num_warmup: Integer[Array, ""],
        is_prolonged: Bool[Array, ""] | None = None,
        late: int | None = None,
    ) -> Stage:
        """Return the stage of the iteration that follows ``iteration`` others.

        :param late: how many iterations the second half of a prolonged arrival has at most; ``None`` for no limit.
        """
        done = iteration + 1
        latest = None if is_prolonged is None else _latest(num_warmup, late)

        def at(fraction):
            return _iteration_at(fraction, num_warmup, is_prolonged, latest)

        arrived, frozen = at(ARRIVED), at(FREEZE)
        left = at(ENDS) - iteration
        until_end = jnp.min(jnp.where(left > 0, left, jnp.iinfo(left.dtype).max))
        window_ends = until_end == 1
        noise_ends, shares = (np.array(column) for column in zip(*ANNEALING, strict=True))
        curvature_ends, weights = (np.array(column) for column in zip(*CURVATURE_WEIGHTS, strict=True))
        return Stage(
            done=done,
            num_warmup=num_warmup,
            is_prolonged=is_prolonged,
            latest=latest,
            is_arriving=iteration < arrived,
            is_settling=iteration >= frozen,
            window_starts=jnp.any(iteration == at(BEGINNINGS)),
            window_ends=window_ends,
            until_end=until_end,
            has_arrived=done >= arrived,
            finds_lost=(done > at(FIRST_RESCUE)) & (done < num_warmup),
            may_rescue=done != arrived,
            is_adapting=done <= frozen,
            whitens=(done >= arrived) | (done == at(FIRST_WHITENED)),
            uses_correlations=done > at(FIRST_DENSE),
            references_move=window_ends & (done >= arrived) & (done <= frozen),
            num_settled=jnp.sum(done >= at(np.array(SETTLING_ENDS))),
            curvature_weight=jnp.asarray([*weights, 0.0])[jnp.searchsorted(at(curvature_ends), done)],
            noise_share=jnp.asarray([*shares, 1.0])[jnp.searchsorted(at(noise_ends), done, side="right")],
        )

    @property
    def share_of_approach(self) -> Float[Array, ""]:
        """How much of the present half of the arrival is done, before and after the coordinates are whitened."""
        middle, end, done = self.at(FIRST_WHITENED), self.at(ARRIVED), self.done - 1
        is_first = done < middle
        return jnp.where(is_first, done / middle, (done - middle) / jnp.maximum(end - middle, 1))

    def at(self, fraction: float) -> Integer[Array, ""]:
        """Return how many iterations a fraction of warmup has, at least one."""
        return _iteration_at(fraction, self.num_warmup, self.is_prolonged, self.latest)


def _iteration_at(fraction, num_warmup, is_prolonged, latest):
    # In integers, because 0.3 · 50 is not 15 in single precision; in two parts, so that the product does not overflow.
    parts: np.ndarray | jax.Array = np.round(np.asarray(fraction) * _PARTS).astype(np.int32)
    if is_prolonged is not None:
        parts = jnp.where(is_prolonged, _when_prolonged(parts, latest), parts)
    whole, rest = num_warmup // _PARTS, num_warmup % _PARTS
    return jnp.clip(parts * whole + parts * rest // _PARTS, 1, num_warmup)


def _latest(num_warmup, late):
    """Return after how many parts of warmup a prolonged arrival ends."""
    arrived, latest = round(ARRIVED * _PARTS), jnp.full((), round(LATEST * _PARTS), jnp.int32)
    if late is None:
        return latest
    added = -(-_PARTS * min(late, _MANY) // jnp.maximum(num_warmup, 1))
    return jnp.minimum(latest, arrived + added).astype(jnp.int32)


def _when_prolonged(parts, latest):
    """Return where the parts of warmup are if the arrival is prolonged, whose second half begins where it ended."""
    middle, arrived = round(FIRST_WHITENED * _PARTS), round(ARRIVED * _PARTS)

    def between(start, end, new_start, new_end):
        length = end - start
        return new_start + ((parts - start) * (new_end - new_start) + length // 2) // length

    later = jnp.where(
        parts < arrived, between(middle, arrived, arrived, latest), between(arrived, _PARTS, latest, _PARTS)
    )
    return jnp.where(parts < middle, between(0, middle, 0, arrived), later)
