"""The potential energy of a NumPyro model, and its gradient on all or some of the data.

A :class:`Target` is the posterior in the form that samplers use, one unconstrained particle at a time. A
:class:`Gradient` chooses the rows of the subsampled plates that each particle uses in each update.
"""

from numpyro_repulsion.gradients.all_rows import is_finite_on_all_rows, sites_not_finite
from numpyro_repulsion.gradients.arrow import Arrow, ArrowRoot, Units
from numpyro_repulsion.gradients.centering import CenteredTarget, Centering, Recovered
from numpyro_repulsion.gradients.control import SVRG, ControlVariates, evaluate_reference, fingerprint
from numpyro_repulsion.gradients.minibatch import FullData, Gradient, Reference, Subsampled, draw_indices, ravel_cloud
from numpyro_repulsion.gradients.posterior import ModelTarget, likelihood_energies
from numpyro_repulsion.gradients.structure import check_values, influenced
from numpyro_repulsion.gradients.sweeps import Sweeps
from numpyro_repulsion.gradients.target import FunctionTarget, Particle, Target, compiled, is_traced, quickly

__all__ = [
    "SVRG",
    "Arrow",
    "ArrowRoot",
    "CenteredTarget",
    "Centering",
    "Recovered",
    "Reference",
    "ControlVariates",
    "FullData",
    "FunctionTarget",
    "Gradient",
    "ModelTarget",
    "Particle",
    "Subsampled",
    "Sweeps",
    "Target",
    "Units",
    "check_values",
    "compiled",
    "evaluate_reference",
    "draw_indices",
    "fingerprint",
    "influenced",
    "is_finite_on_all_rows",
    "sites_not_finite",
    "likelihood_energies",
    "is_traced",
    "quickly",
    "ravel_cloud",
]
