"""What warmup learns and freezes: the preconditioner, the step size, the bandwidth and the control variates.

Warmup has three parts. First every particle *arrives*, by Metropolis steps of its own size, whatever the scale; then
the sampler itself runs and its scales are *adapted* in growing windows; last, the scales are frozen and the step size
and the bandwidth *settle* on what is measured in them. All are constant from the end of warmup on: a quantity that
followed the particles while draws are kept would change the stationary law.
"""

from numpyro_repulsion.warmup.arrival import ArrivalState, Surroundings, arrive, left_behind, rescue, update_arrival
from numpyro_repulsion.warmup.bandwidth import best_bandwidth, gains, next_bandwidth, update_bandwidth
from numpyro_repulsion.warmup.curvature import Measurements, estimate_curvature, measure_steepness, summarize_curvature
from numpyro_repulsion.warmup.diagnosis import WarmupDiagnosis, diagnose_warmup
from numpyro_repulsion.warmup.learning import Learner, Sampler, warmup_update
from numpyro_repulsion.warmup.preconditioner import Moments, Preconditioner, first_scale, inverse_root, shrink
from numpyro_repulsion.warmup.reference import update_reference
from numpyro_repulsion.warmup.scales import ScalesState, update_scales
from numpyro_repulsion.warmup.state import WarmupPlan, WarmupState
from numpyro_repulsion.warmup.step_size import StepState, update_step_size
from numpyro_repulsion.warmup.symptoms import Symptoms, Widest, update_symptoms
from numpyro_repulsion.warmup.windows import ARRIVED, FREEZE, LAST_ADAPTED, Stage

__all__ = [
    "ArrivalState",
    "ScalesState",
    "StepState",
    "ARRIVED",
    "FREEZE",
    "LAST_ADAPTED",
    "LEARNERS",
    "WarmupPlan",
    "Learner",
    "Measurements",
    "Moments",
    "Preconditioner",
    "Sampler",
    "Stage",
    "Surroundings",
    "Symptoms",
    "WarmupState",
    "WarmupDiagnosis",
    "Widest",
    "arrive",
    "best_bandwidth",
    "first_scale",
    "gains",
    "inverse_root",
    "diagnose_warmup",
    "left_behind",
    "estimate_curvature",
    "measure_steepness",
    "rescue",
    "next_bandwidth",
    "shrink",
    "summarize_curvature",
    "warmup_update",
]

#: In the order in which they see an iteration: new scales come before what is measured in them.
LEARNERS: tuple[Learner, ...] = (
    update_symptoms,
    update_arrival,
    update_scales,
    update_reference,
    update_bandwidth,
    update_step_size,
)
