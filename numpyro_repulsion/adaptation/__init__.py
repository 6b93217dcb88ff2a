"""What warmup learns and freezes: the preconditioner, the step size, the bandwidth and the control variates.

Warmup has three parts. First every particle *arrives*, by Metropolis steps of its own size, whatever the scale; then
the sampler itself runs and its scales are *adapted* in growing windows; last, the scales are frozen and the step size
and the bandwidth *settle* on what is measured in them. All are constant from the end of warmup on: a quantity that
followed the particles while draws are kept would change the stationary law.
"""

from numpyro_repulsion.adaptation.arrival import Surroundings, arrive, left_behind, rescue, update_arrival
from numpyro_repulsion.adaptation.bandwidth import best_bandwidth, gains, settle_bandwidth, update_bandwidth
from numpyro_repulsion.adaptation.measurement import Measurements, measure, measure_steepness, survey
from numpyro_repulsion.adaptation.preconditioner import Moments, Preconditioner, first_scale, inverse_root, shrink
from numpyro_repulsion.adaptation.reference import update_reference
from numpyro_repulsion.adaptation.scales import update_scales
from numpyro_repulsion.adaptation.step_size import update_step_size
from numpyro_repulsion.adaptation.symptoms import Symptoms, Widest, update_symptoms
from numpyro_repulsion.adaptation.tuning import Learned, Tuning
from numpyro_repulsion.adaptation.verdict import Verdict, judge
from numpyro_repulsion.adaptation.warmup import Learner, Sampler, warmup_update
from numpyro_repulsion.adaptation.windows import ARRIVED, FREEZE, LAST_ADAPTED, Stage

__all__ = [
    "ARRIVED",
    "FREEZE",
    "LAST_ADAPTED",
    "LEARNERS",
    "Learned",
    "Learner",
    "Measurements",
    "Moments",
    "Preconditioner",
    "Sampler",
    "Stage",
    "Surroundings",
    "Symptoms",
    "Tuning",
    "Verdict",
    "Widest",
    "arrive",
    "best_bandwidth",
    "first_scale",
    "gains",
    "inverse_root",
    "judge",
    "left_behind",
    "measure",
    "measure_steepness",
    "rescue",
    "settle_bandwidth",
    "shrink",
    "survey",
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
