"""Warmup: particles reach the posterior, and the run learns its scales, references, bandwidth and step size.

Warmup has three parts, each divided into windows (``windows.py``):

1. *Arrival.* Each particle moves by itself: with exact gradients by Metropolis-adjusted Langevin updates with a step
   size of its own, with minibatches by Adam with Langevin noise, at a rate of its own. It reaches the posterior
   whatever its scale; lost particles move to others. A run skips the arrival if neither the step size nor the scales
   are learned (``WarmupPlan.arrives``), and prolongs it if gradients stay noisy, as those of networks, whose
   particles then follow the direction of SVGD.
2. *Adaptation.* The sampler itself runs. At the end of each window, scales are estimated again, and the step size is
   measured in the new coordinates.
3. *Settling.* The scales are frozen. The step size and the bandwidth average over all windows of this part.

Everything that warmup learned is constant afterwards (``learned.py``), because a quantity that follows the particles
while draws are kept changes the stationary distribution. Only jumps are still counted, and each particle's own
reference (``SVRG``) renewed after every epoch.

With ``num_warmup=1000`` the windows end at these iterations, and the learners act as marked::

                     |            arrival            |   adaptation   |      settling       | sampling
    window ends at   |   10   25   50  100  150  250 |  300  400  600 |  650  700  ... 1000 |
    moments reset at |    5   17   37   75  125  200 |  262  325  450 |       700           |
    -----------------+-------------------------------+----------------+---------------------+---------
    update_symptoms  |                               |                |   D    D   ...   D  |
    update_arrival   |              R    R    R      |  (R)  (R)  (R) |  (R)  (R)  ...      |
    update_centering  |                            Y  |   Y            |                     |
    update_reference |                            X  |   X    X    X  |                     |
    update_scales    |   S    C    C    C    C    C  |   C    C    C  |                     |
       by curvature  |                       B    B  |   B    B    B  |                     |
    update_bandwidth |                            H  | HHHHHHHHHHHHHH |   A    A   ...   A  |
    update_step_size |                            E  |   E    E    E  |   M    M   ...   M  |
    prolongation     |                            P  |                |                     |

    D  updates the direction of largest variance (sums grow in every iteration of settling; with minibatches only at 650
       to 800 and at 1000)
    R  moves lost particles to others; with minibatches also after the arrival
    Y  other shares by which hierarchical sites are centered, if they differ much, with new diagonal scales
    X  moves the common reference to the mean of the window; each particle's own reference moves at 250 only
    S  new diagonal scales; C also new correlations, if the scales are dense
    B  with minibatches, and for scales of low rank from 250 on: new scales from the mean curvature of U over the cloud
       (with minibatches also at 150, where Adam starts again in them); at 600 dense scales also from the gradient noise
    H  the bandwidth by the interaction's rule, in every iteration from 250 to 600 (from 1 without an arrival)
    A  the geometric mean of the best bandwidths since 600, or the rule again if the interaction does not tune it
    E  the step size from one measurement; only 10, 15 and 30 % of the noise limit it at 250, 300 and 400
    M  the step size from all measurements since 600; also whether control variates reduce the noise, as at E
    P  whether the arrival is prolonged; then 150 to 250 begins again and ends at 800, or after 500 passes through the
       rows, where all marks of 250 but P are due again, the windows that follow share what is left, and scales are
       diagonal

A learner is a function of the state and the cloud, called at the end of each window, on arrays of the host; it does
nothing if the run does not need what it learns (``WarmupPlan``). The sums that it needs grow in the programs between
(``kernels/warming.py``). Each writes its own part of ``WarmupState``:

===================  ===============  ========================================  ========================================
learner              file             reads                                     writes
===================  ===============  ========================================  ========================================
update_symptoms      diagnosis.py     positions, gradients, scales              symptoms
update_arrival       arrival.py       energies, gradients                       arrival; positions of lost particles
update_centering     centering.py     curvature of hierarchical sites           scales; the cloud in the new coordinates
update_reference     step_size.py     moments of the scales, or positions       reference
update_scales        scales.py        positions, gradients; or curvature and    scales; the cloud in the new coordinates
                                      noise (hessian.py)
update_bandwidth     bandwidth.py     positions, bias of the step               bandwidth
update_step_size     step_size.py     curvature and noise (probes.py), and      step; whether the reference is in use
                                      what the other learners wrote
update_prolongation  arrival.py       the noise with and without control        arrival, scales, reference; the cloud in
                                      variates                                  the new coordinates
===================  ===============  ========================================  ========================================

The kernels add learners of jumps (``kernels/learning.py``). The last state gives the diagnosis (``diagnosis.py``).
"""

from numpyro_repulsion.warmup.adam import Adam, Surroundings, descend, svgd_direction
from numpyro_repulsion.warmup.arrival import (
    NUM_DEVIATIONS,
    arrive,
    left_behind,
    most_late_iterations,
    rescue,
    update_arrival,
    update_prolongation,
)
from numpyro_repulsion.warmup.bandwidth import best_bandwidth, gains, measure_steepness, update_bandwidth
from numpyro_repulsion.warmup.centering import MIN_PARTICLES, MIN_SPREAD, update_centering
from numpyro_repulsion.warmup.curvature import UNKNOWN, Measurements, summarize_curvature
from numpyro_repulsion.warmup.diagnosis import MIN_WARMUP, WarmupDiagnosis, diagnose_warmup, update_symptoms
from numpyro_repulsion.warmup.learned import Learned, Measured, Place
from numpyro_repulsion.warmup.preconditioner import Moments, Preconditioner, first_scale, inverse_root, shrink
from numpyro_repulsion.warmup.probes import Gradients, estimate_curvature, minibatch
from numpyro_repulsion.warmup.scales import update_scales
from numpyro_repulsion.warmup.state import (
    ArrivalState,
    JumpsState,
    Learner,
    Sampler,
    ScalesState,
    StepState,
    WarmupPlan,
    WarmupState,
)
from numpyro_repulsion.warmup.step_size import update_reference, update_step_size
from numpyro_repulsion.warmup.symptoms import Symptoms, Widest
from numpyro_repulsion.warmup.windows import (
    ARRIVED,
    FIRST_WHITENED,
    FREEZE,
    LAST_ADAPTED,
    NUM_HESSIANS,
    Schedule,
    Window,
)

__all__ = [
    "Adam",
    "ArrivalState",
    "JumpsState",
    "ScalesState",
    "StepState",
    "ARRIVED",
    "FIRST_WHITENED",
    "FREEZE",
    "Gradients",
    "LAST_ADAPTED",
    "NUM_DEVIATIONS",
    "NUM_HESSIANS",
    "UNKNOWN",
    "LEARNERS",
    "MIN_PARTICLES",
    "MIN_SPREAD",
    "WarmupPlan",
    "MIN_WARMUP",
    "Learned",
    "Learner",
    "Measured",
    "Measurements",
    "Moments",
    "Place",
    "Preconditioner",
    "Sampler",
    "Schedule",
    "Surroundings",
    "Symptoms",
    "WarmupState",
    "WarmupDiagnosis",
    "Widest",
    "Window",
    "arrive",
    "best_bandwidth",
    "first_scale",
    "gains",
    "inverse_root",
    "descend",
    "estimate_curvature",
    "diagnose_warmup",
    "left_behind",
    "measure_steepness",
    "minibatch",
    "most_late_iterations",
    "rescue",
    "shrink",
    "summarize_curvature",
    "svgd_direction",
    "update_centering",
    "update_prolongation",
    "update_step_size",
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
