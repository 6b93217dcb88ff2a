"""What force is felt: the potential energy of a NumPyro model, and its gradient on all or some of the data.

A :class:`Target` is the posterior as samplers see it, one unconstrained particle at a time. A :class:`Gradient` says
which rows of the subsampled plates each particle looks at in each update.
"""

from numpyro_repulsion.gradients.control import SVRG, ControlVariates, anchored, fingerprint, full_gradient
from numpyro_repulsion.gradients.dependence import influenced
from numpyro_repulsion.gradients.minibatch import Anchor, FullData, Gradient, Subsampled, draw_indices, ravel_cloud
from numpyro_repulsion.gradients.posterior import ModelTarget
from numpyro_repulsion.gradients.target import FunctionTarget, Target

__all__ = [
    "SVRG",
    "Anchor",
    "ControlVariates",
    "FullData",
    "FunctionTarget",
    "Gradient",
    "ModelTarget",
    "Subsampled",
    "Target",
    "anchored",
    "draw_indices",
    "fingerprint",
    "full_gradient",
    "influenced",
    "ravel_cloud",
]
