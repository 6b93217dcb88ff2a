"""Dynamics of the cloud: the blocks D and Q of the complete recipe, and one update.

A dynamics is a pair of pure functions on a cloud of particles: :meth:`Dynamics.init` and :meth:`Dynamics.step`. It
accesses the target through ``energy_and_grad(z) -> (U, ∇U)`` and the other particles through a coupling. Its
:class:`StepError` states how long its steps may be.
"""

from numpyro_repulsion.dynamics.base import Cloud, Dynamics, EnergyAndGrad, acceptance, reject_nonfinite, select
from numpyro_repulsion.dynamics.descent import Descent
from numpyro_repulsion.dynamics.overdamped import Overdamped
from numpyro_repulsion.dynamics.recipe import Recipe
from numpyro_repulsion.dynamics.step_error import (
    AveragedError,
    CurvatureStats,
    EulerError,
    MomentumError,
    StepError,
    UnknownError,
)
from numpyro_repulsion.dynamics.underdamped import Relativistic, Thermostat, Underdamped

__all__ = [
    "AveragedError",
    "EulerError",
    "MomentumError",
    "StepError",
    "UnknownError",
    "Cloud",
    "Descent",
    "Dynamics",
    "EnergyAndGrad",
    "CurvatureStats",
    "Overdamped",
    "Recipe",
    "Relativistic",
    "Thermostat",
    "Underdamped",
    "acceptance",
    "reject_nonfinite",
    "select",
]
