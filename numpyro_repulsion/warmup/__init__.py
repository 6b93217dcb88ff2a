"""Warmup: particles reach the posterior, and the run learns its scales, references, bandwidth and step size.

``docs/warmup.md`` describes its three parts, arrival, adaptation and settling, and shows when each learner acts. A
learner is a function of the state and the cloud, called at the end of each window (``windows.py``), on arrays of the
host; it does nothing if the run does not need what it learns (``WarmupPlan``). The sums that it needs grow in the
programs between (``kernels/warmup_programs.py``). In calling order:

===================  =============  =======================================  =========================================
learner              file           reads                                    writes
===================  =============  =======================================  =========================================
update_symptoms      learned.py     its sums                                 symptoms
update_arrival       arrival.py     energies, gradients                      arrival; positions of lost particles
update_centering     scales.py      curvature of hierarchical sites          centering, scales; the cloud in the new
                                                                              coordinates
update_reference     step_size.py   moments of the scales, or positions      reference
update_scales        scales.py      positions, gradients; or curvature and   scales; the cloud in the new coordinates
                                    noise (curvature.py)
update_bandwidth     bandwidth.py   positions, bias of the step              bandwidth
update_step_size     step_size.py   curvature and noise (curvature.py), and  step; the order of control variates in
                                    what the other learners wrote            use; the memory of the dynamics
update_prolongation  arrival.py     the noise with and without control       arrival, scales, reference; the cloud in
                                    variates                                 the new coordinates
===================  =============  =======================================  =========================================

The kernels add learners of jumps (``kernels/warmup_host.py``). Everything that warmup learned is constant afterwards
(``learned.py``); only jumps are still counted, and each particle's own reference (``SVRG``) renewed after every epoch.
"""

from numpyro_repulsion.warmup.adam import descend, svgd_direction
from numpyro_repulsion.warmup.arrival import (
    NUM_DEVIATIONS,
    arrive,
    most_late_iterations,
    update_arrival,
    update_prolongation,
)
from numpyro_repulsion.warmup.bandwidth import best_bandwidth, measure_steepness, update_bandwidth
from numpyro_repulsion.warmup.curvature import (
    UNKNOWN,
    Gradients,
    Measurements,
    draw_seed,
    estimate_curvature,
    summarize_curvature,
)
from numpyro_repulsion.warmup.learned import (
    MIN_WARMUP,
    Coordinates,
    Learned,
    Measured,
    WarmupDiagnosis,
    diagnose_warmup,
    update_symptoms,
)
from numpyro_repulsion.warmup.preconditioner import Moments, Preconditioner, first_scale, inverse_root, shrink
from numpyro_repulsion.warmup.scales import MIN_PARTICLES, MIN_SPREAD, update_centering, update_scales
from numpyro_repulsion.warmup.state import (
    ArrivalState,
    JumpsState,
    Learner,
    Sampler,
    StepState,
    WarmupPlan,
    WarmupState,
)
from numpyro_repulsion.warmup.step_size import update_reference, update_step_size
from numpyro_repulsion.warmup.windows import ARRIVED, FREEZE, LAST_ADAPTED, NUM_HESSIANS, Timetable, Window

__all__ = [
    "ARRIVED",
    "FREEZE",
    "LAST_ADAPTED",
    "LEARNERS",
    "MIN_PARTICLES",
    "MIN_SPREAD",
    "MIN_WARMUP",
    "NUM_DEVIATIONS",
    "NUM_HESSIANS",
    "UNKNOWN",
    "ArrivalState",
    "Gradients",
    "JumpsState",
    "Learned",
    "Learner",
    "Measured",
    "Measurements",
    "Moments",
    "Coordinates",
    "Preconditioner",
    "Sampler",
    "Timetable",
    "StepState",
    "WarmupDiagnosis",
    "WarmupPlan",
    "WarmupState",
    "Window",
    "arrive",
    "best_bandwidth",
    "descend",
    "diagnose_warmup",
    "estimate_curvature",
    "first_scale",
    "inverse_root",
    "measure_steepness",
    "draw_seed",
    "most_late_iterations",
    "shrink",
    "summarize_curvature",
    "svgd_direction",
]

#: In calling order: lost particles return by energies in the old coordinates, so other coordinates come after that, and
#: before a reference in them. New scales come after the reference, whose noise they account for, and before what is
#: measured in them.
LEARNERS: tuple[Learner, ...] = (
    update_symptoms,
    update_arrival,
    update_centering,
    update_reference,
    update_scales,
    update_bandwidth,
    update_step_size,
    update_prolongation,
)
