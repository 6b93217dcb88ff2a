"""The windows of warmup, and what is due at their ends.

If the arrival is prolonged (``arrival.py``), its second half begins again at 25 % and ends at 80 %, or after
``WarmupPlan.late`` iterations; the windows that follow share what is left in the same proportions.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import NamedTuple

#: Fractions of warmup at which windows end: windows in which particles arrive, ...
ARRIVAL_ENDS = (0.01, 0.025, 0.05, 0.1, 0.15, 0.25)
#: With minibatches, the coordinates are first whitened by the curvature there, in the middle of the arrival.
FIRST_WHITENED = 0.15
#: ... in which the sampler runs and its scales are adapted, ...
ADAPTATION_ENDS = (0.3, 0.4, 0.6)
#: ... and in which the scales are frozen, and the step size and the bandwidth settle.
SETTLING_ENDS = (0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0)
#: (end of window, weight): the weight of the curvature measured there in the running mean; with 1 it replaces the
#: mean, as where the cloud has hardly arrived. A measurement before the first counts like that.
CURVATURE_WEIGHTS = ((0.25, 1.0), (0.3, 1.0), (0.4, 2 / 3), (0.6, 0.5))

#: How many measurements of the curvature count; another one, halfway through the arrival, is for the arrival only.
NUM_HESSIANS = len(CURVATURE_WEIGHTS)

FREEZE = ADAPTATION_ENDS[-1]
ARRIVED = ARRIVAL_ENDS[-1]
ENDS = (*ARRIVAL_ENDS, *ADAPTATION_ENDS, *SETTLING_ENDS)
#: Where the sums of a window begin: at half of a window of the arrival, at a quarter of a window of the adaptation,
#: and once in the settling part, at a quarter of it. What was added before, since the last end, is discarded; so the
#: windows of the settling part up to 70 % still see the moments from 45 % on.
#:
#: - moments, surroundings: from these beginnings; another centering empties the moments too, but for the present
#:   particles.
#: - symptoms: from 60 % on, those of the widest direction anew at each `Symptoms.next_window`.
#: - measurements: at ends of windows, replaced until 60 % and then added to.
BEGINNINGS = tuple(
    begins + (0.5 if ends <= ARRIVED else 0.25) * (ends - begins)
    for begins, ends in zip((0.0, *ARRIVAL_ENDS, *ADAPTATION_ENDS), (*ARRIVAL_ENDS, *ADAPTATION_ENDS, 1.0), strict=True)
)
#: Windows end at multiples of one part in so many of warmup.
PARTS = 4000
#: The share of warmup whose iterations give the final scales.
LAST_ADAPTED = FREEZE - BEGINNINGS[-2]


class Timetable(NamedTuple):
    """Where the windows of a warmup lie."""

    num_warmup: int  # how many iterations are warmup
    is_prolonged: bool = False  # whether the arrival is prolonged
    late: int | None = None  # as in `WarmupPlan`

    def at(self, fraction: float) -> int:
        """Return after how many iterations a mark of the timetable lies, a fraction of warmup; at least one."""
        # In integers, because 0.3 · 50 is not 15 in floating point.
        parts = round(fraction * PARTS)
        if self.is_prolonged:
            parts = self._when_prolonged(parts)
        return min(max(parts * self.num_warmup // PARTS, 1), self.num_warmup)

    def is_end(self, iteration: int) -> bool:
        """Return whether a window ends after so many iterations."""
        return iteration in map(self.at, ENDS)

    def is_beginning(self, iteration: int) -> bool:
        """Return whether the sums of a window begin after so many iterations."""
        return iteration in map(self.at, BEGINNINGS)

    def next_end(self, iteration: int) -> int:
        """Return the end of the window that contains an iteration, counted from 0."""
        return min((end for end in map(self.at, ENDS) if end > iteration), default=self.num_warmup)

    def next_stop(self, iteration: int) -> int:
        """Return after how many iterations a window or its sums begin or end next."""
        later = (stop for stop in map(self.at, BEGINNINGS) if stop > iteration)
        return min([*later, self.next_end(iteration)])

    def is_arriving(self, iteration: int) -> bool:
        """Return whether particles still arrive in an iteration, counted from 0."""
        return iteration < self.at(ARRIVED)

    def half_of_arrival(self, iteration: int) -> tuple[int, int]:
        """Return where the present half of the arrival begins and ends, before or after coordinates are whitened."""
        middle, end = self.at(FIRST_WHITENED), self.at(ARRIVED)
        return (0, middle) if iteration < middle else (middle, end)

    def _when_prolonged(self, parts):
        """Return where parts of warmup are if the arrival is prolonged, whose second half begins where it ended."""
        middle, arrived, latest = (round(fraction * PARTS) for fraction in (FIRST_WHITENED, ARRIVED, 0.8))
        if self.late is not None:
            latest = min(latest, arrived + -(-PARTS * self.late // max(self.num_warmup, 1)))

        def between(start, end, new_start, new_end):
            length = end - start
            return new_start + ((parts - start) * (new_end - new_start) + length // 2) // length

        if parts < middle:
            return between(0, middle, 0, arrived)
        if parts < arrived:
            return between(middle, arrived, arrived, latest)
        return between(arrived, PARTS, latest, PARTS)


class Window(NamedTuple):
    """A window that has ended, and what is due."""

    timetable: Timetable
    ends: int  # after how many iterations it ended

    def is_at(self, fraction: float) -> bool:
        """Whether it ended after a fraction of warmup."""
        return self.ends == self.timetable.at(fraction)

    @property
    def is_prolonged(self) -> bool:
        return self.timetable.is_prolonged

    @property
    def is_first(self) -> bool:
        return self.is_at(ARRIVAL_ENDS[0])

    @property
    def is_last(self) -> bool:
        return self.ends == self.timetable.num_warmup

    @property
    def was_arrival(self) -> bool:
        """Whether particles arrived in it; for the last such window, `has_arrived` holds too."""
        return self.ends <= self.timetable.at(ARRIVED)

    @property
    def has_arrived(self) -> bool:
        return self.ends >= self.timetable.at(ARRIVED)

    @property
    def is_adapting(self) -> bool:
        """Whether it may change the scales."""
        return self.ends <= self.timetable.at(FREEZE)

    @property
    def finds_lost(self) -> bool:
        """Whether lost particles are looked for: from the third window on, but for the last."""
        return self.timetable.at(ARRIVAL_ENDS[1]) < self.ends < self.timetable.num_warmup

    @property
    def may_replace(self) -> bool:
        """Whether they may then move to others: copies must separate before particles repel each other."""
        return not self.is_at(ARRIVED)

    @property
    def whitens(self) -> bool:
        """Whether it changes the scales by the curvature, if gradients are noisy."""
        return self.has_arrived or self.is_at(FIRST_WHITENED)

    @property
    def uses_correlations(self) -> bool:
        """Whether it also changes correlations: from the second window on."""
        return self.ends > self.timetable.at(ARRIVAL_ENDS[0])

    @property
    def moves_references(self) -> bool:
        """Whether it moves reference points."""
        return self.has_arrived and self.is_adapting

    @property
    def centers(self) -> bool:
        """Whether it changes how hierarchical sites are centered: at the end of the arrival, and once more."""
        return self.moves_references and self.ends <= self.timetable.at(ADAPTATION_ENDS[0])

    @property
    def num_settled(self) -> int:
        """How many windows have ended since the scales were frozen."""
        return sum(self.ends >= self.timetable.at(fraction) for fraction in SETTLING_ENDS)

    @property
    def curvature_weight(self) -> float:
        """The weight of the curvature measured at its end in the mean of all."""
        ends, weights = zip(*CURVATURE_WEIGHTS, strict=True)
        return (*weights, 0.0)[bisect_left([*map(self.timetable.at, ends)], self.ends)]

    @property
    def annealed_share(self) -> float:
        """The share of the gradient noise that limits the step; long steps first, to travel."""
        return (0.1, 0.15, 0.3, 1.0)[bisect_right([*map(self.timetable.at, ADAPTATION_ENDS)], self.ends)]
