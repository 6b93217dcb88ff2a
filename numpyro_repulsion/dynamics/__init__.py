"""How the cloud moves: the blocks D and Q of the complete recipe, and one update.

A dynamics is a pair of pure functions on a cloud of particles: :meth:`Dynamics.init` and :meth:`Dynamics.step`. It
sees the target through a force, ``force(z) -> (U, ∇U)``, and the other particles through a coupling. It also says how
long its steps may be.
"""

from numpyro_repulsion.dynamics.base import (
    Cloud,
    Couple,
    CurvatureStats,
    Dynamics,
    EnergyAndGrad,
    reject_nonfinite,
    select,
)
from numpyro_repulsion.dynamics.descent import Descent
from numpyro_repulsion.dynamics.overdamped import Overdamped
from numpyro_repulsion.dynamics.recipe import Recipe
from numpyro_repulsion.dynamics.underdamped import Relativistic, Thermostat, Underdamped

__all__ = [
    "Cloud",
    "Couple",
    "Descent",
    "Dynamics",
    "EnergyAndGrad",
    "CurvatureStats",
    "Overdamped",
    "Recipe",
    "Relativistic",
    "Thermostat",
    "Underdamped",
    "reject_nonfinite",
    "select",
]
