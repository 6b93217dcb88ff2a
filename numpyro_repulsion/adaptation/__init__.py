"""What warmup learns and freezes: the preconditioner, the step size, the bandwidth and the control variates.

Warmup has three parts. First every particle *arrives*, by Metropolis steps of its own size, whatever the scale; then
the sampler itself runs and its scales are *adapted* in growing windows; last, the scales are frozen and the step size
and the bandwidth *settle* on what is measured in them. All are constant from the end of warmup on: a quantity that
followed the particles while draws are kept would change the stationary law.
"""

from numpyro_repulsion.adaptation.arrival import Surroundings, arrive, left_behind, rescue
from numpyro_repulsion.adaptation.bandwidth import best_bandwidth, gains, settle_bandwidth
from numpyro_repulsion.adaptation.learning import adapt
from numpyro_repulsion.adaptation.measurement import Measurements, measure, measure_steepness, survey
from numpyro_repulsion.adaptation.preconditioner import Moments, Preconditioner, first_scale, inverse_root, shrink
from numpyro_repulsion.adaptation.symptoms import Symptoms, Widest
from numpyro_repulsion.adaptation.timetable import (
    LAST_ADAPTED,
    at as iteration_at,
    is_arriving,
    is_due,
    is_settling,
    since_arrival,
    until_due,
)
from numpyro_repulsion.adaptation.tuning import Learned, Tuning
from numpyro_repulsion.adaptation.verdict import Verdict, judge

__all__ = [
    "LAST_ADAPTED",
    "Learned",
    "Measurements",
    "Moments",
    "Preconditioner",
    "Surroundings",
    "Symptoms",
    "Tuning",
    "Verdict",
    "Widest",
    "adapt",
    "arrive",
    "best_bandwidth",
    "first_scale",
    "inverse_root",
    "iteration_at",
    "gains",
    "is_arriving",
    "is_due",
    "is_settling",
    "judge",
    "left_behind",
    "measure",
    "measure_steepness",
    "rescue",
    "settle_bandwidth",
    "shrink",
    "since_arrival",
    "survey",
    "until_due",
]
