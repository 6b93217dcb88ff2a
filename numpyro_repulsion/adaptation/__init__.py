"""What warmup learns and freezes: the preconditioner, the step size, the bandwidth and the control variates.

Warmup has three parts. First every particle *arrives*, by Metropolis steps of its own size, whatever the scale; then
the sampler itself runs and its scales are *adapted* in growing windows; last, the scales are frozen and the step size
and the bandwidth *settle* on what is measured in them. All are constant from the end of warmup on: a quantity that
followed the particles while draws are kept would change the stationary law.
"""

from numpyro_repulsion.adaptation.arrival import arrive, rescue
from numpyro_repulsion.adaptation.bandwidth import best_bandwidth, gains, settle_bandwidth
from numpyro_repulsion.adaptation.measurement import Measurements, measure, measure_steepness, survey
from numpyro_repulsion.adaptation.preconditioner import Moments, Preconditioner, first_scale, shrink
from numpyro_repulsion.adaptation.timetable import is_arriving, is_due, is_settling, since_arrival, until_due
from numpyro_repulsion.adaptation.tuning import Learned, Tuning, adapt
from numpyro_repulsion.adaptation.verdict import Verdict, judge

__all__ = [
    "Learned",
    "Measurements",
    "Moments",
    "Preconditioner",
    "Tuning",
    "Verdict",
    "adapt",
    "arrive",
    "best_bandwidth",
    "first_scale",
    "gains",
    "is_arriving",
    "is_due",
    "is_settling",
    "judge",
    "measure",
    "measure_steepness",
    "rescue",
    "settle_bandwidth",
    "shrink",
    "since_arrival",
    "survey",
    "until_due",
]
