"""The timetable of warmup: its windows, and which of them an iteration belongs to."""

from __future__ import annotations

from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

__all__ = [
    "ANNEALING",
    "ARRIVED",
    "BEGINNINGS",
    "FIRST_DENSE",
    "FIRST_RESCUE",
    "FREEZE",
    "LAST_ADAPTED",
    "SETTLING_ENDS",
    "Progress",
    "at",
    "is_arriving",
    "is_due",
    "is_settling",
    "since_arrival",
    "until_due",
]

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


class Progress(Protocol):
    """How far warmup is: iterations done so far, and how many of them are warmup."""

    @property
    def iteration(self) -> jax.Array: ...

    @property
    def num_warmup(self) -> jax.Array: ...


def at(fraction: Any, progress: Progress) -> jax.Array:
    """The iteration at a fraction of warmup, at least the first."""
    # In integers, for in single precision 0.3 · 50 is not 15; in two parts, lest the product overflow.
    parts = np.round(np.asarray(fraction) * 4000).astype(np.int32)
    whole, rest = progress.num_warmup // 4000, progress.num_warmup % 4000
    return jnp.clip(parts * whole + parts * rest // 4000, 1, progress.num_warmup)


def is_arriving(progress: Progress) -> jax.Array:
    """Whether the coming iteration belongs to the part of warmup in which particles arrive."""
    return progress.iteration < at(ARRIVED, progress)


def is_settling(progress: Progress) -> jax.Array:
    """Whether scales are frozen and warmup goes on."""
    return (progress.iteration >= at(FREEZE, progress)) & (progress.iteration < progress.num_warmup)


def since_arrival(progress: Progress) -> jax.Array:
    """How many iterations were done since particles arrived; negative before."""
    return progress.iteration - at(ARRIVED, progress)


def is_due(progress: Progress) -> jax.Array:
    """Whether the iterations done so far complete a window of warmup."""
    done = progress.iteration
    return (done > 0) & (done <= progress.num_warmup) & jnp.any(done == at(ENDS, progress))


def until_due(progress: Progress) -> jax.Array:
    """How many more iterations complete the present window of warmup; after the last, a huge number."""
    left = at(ENDS, progress) - progress.iteration
    return jnp.min(jnp.where(left > 0, left, jnp.iinfo(left.dtype).max))
