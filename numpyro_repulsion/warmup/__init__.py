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
update_reference     step_size.py   mean of the window, or positions         reference
update_scales        scales.py      positions, gradients; or curvature and   scales; the cloud in the new coordinates
                                    noise (curvature.py)
update_bandwidth     bandwidth.py   positions, bias of the step              bandwidth
update_step_size     step_size.py   curvature and noise (curvature.py), and  step; the order of control variates in
                                    what the other learners wrote            use; the memory of the dynamics
update_prolongation  arrival.py     the noise with and without control       arrival, scales, centering, reference;
                                    variates                                 the cloud in the new coordinates
===================  =============  =======================================  =========================================

``kernels/warmup_host.py`` calls them, and jumps after them. Everything that warmup learned is constant afterwards
(``learned.py``); only jumps are still counted, and each particle's own reference (``SVRG``) renewed after every epoch.
"""

from numpyro_repulsion.warmup.curvature import Measurements
from numpyro_repulsion.warmup.learned import Coordinates, Learned, MeasuredFigures, WarmupDiagnosis
from numpyro_repulsion.warmup.preconditioner import Moments, Preconditioner
from numpyro_repulsion.warmup.state import ArrivalState, WarmupPlan, WarmupState
from numpyro_repulsion.warmup.windows import Timetable, Window

__all__ = [
    "ArrivalState",
    "Coordinates",
    "Learned",
    "MeasuredFigures",
    "Measurements",
    "Moments",
    "Preconditioner",
    "Timetable",
    "WarmupDiagnosis",
    "WarmupPlan",
    "WarmupState",
    "Window",
]
