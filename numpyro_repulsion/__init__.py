"""Stochastic-gradient MCMC with interacting particles, for NumPyro."""

from numpyro_repulsion.bias import StepBias, step_bias
from numpyro_repulsion.checkpointing import load_draws, run_in_pieces
from numpyro_repulsion.control_variates import ControlledMeans, control_variates
from numpyro_repulsion.diagnostics import ensemble_ess, ensemble_mcse, ksd, nested_rhat
from numpyro_repulsion.dynamics import Descent, Dynamics, Overdamped, Recipe, Relativistic, Thermostat, Underdamped
from numpyro_repulsion.extrapolation import ExtrapolatedMeans, extrapolate
from numpyro_repulsion.findings import Diagnosis, Finding
from numpyro_repulsion.gradients import SVRG, ControlVariates, FullData, Subsampled, Sweeps
from numpyro_repulsion.inference_data import all_rows, to_inference_data
from numpyro_repulsion.interactions import (
    IMQ,
    RBF,
    Antithetic,
    Balanced,
    Gram,
    Independent,
    Interaction,
    Laplacian,
    Radial,
    RandomFeatures,
    RandomGroups,
    Scheduled,
)
from numpyro_repulsion.kernels import SGHMC, SGHMCR, SGLD, SGLDR, SGNHT, SGNHTR, SVGD
from numpyro_repulsion.moves import Archive, Move
from numpyro_repulsion.plots import (
    animate_particles,
    plot_calibration,
    plot_particles,
    plot_running_estimates,
)
from numpyro_repulsion.predictions import Predictions, predict
from numpyro_repulsion.report import diagnose, summary
from numpyro_repulsion.rows import Rows
from numpyro_repulsion.schedules import BiasBudget, Cyclical, Polynomial
from numpyro_repulsion.scores import scores
from numpyro_repulsion.starts import init_around, init_from_guide, init_from_idata
from numpyro_repulsion.version import __version__ as __version__

__all__ = [
    "IMQ",
    "RBF",
    "SGHMC",
    "SGHMCR",
    "SGLD",
    "SGLDR",
    "SGNHT",
    "SGNHTR",
    "SVGD",
    "SVRG",
    "Antithetic",
    "Archive",
    "Balanced",
    "BiasBudget",
    "ControlVariates",
    "ControlledMeans",
    "Cyclical",
    "Descent",
    "Diagnosis",
    "Dynamics",
    "ExtrapolatedMeans",
    "Finding",
    "FullData",
    "Gram",
    "Independent",
    "Interaction",
    "Laplacian",
    "Move",
    "Overdamped",
    "Polynomial",
    "Predictions",
    "Radial",
    "RandomFeatures",
    "RandomGroups",
    "Recipe",
    "Relativistic",
    "Rows",
    "Scheduled",
    "StepBias",
    "Subsampled",
    "Sweeps",
    "Thermostat",
    "Underdamped",
    "all_rows",
    "animate_particles",
    "control_variates",
    "diagnose",
    "ensemble_ess",
    "ensemble_mcse",
    "extrapolate",
    "init_around",
    "init_from_guide",
    "init_from_idata",
    "ksd",
    "load_draws",
    "nested_rhat",
    "plot_calibration",
    "plot_particles",
    "plot_running_estimates",
    "predict",
    "run_in_pieces",
    "scores",
    "step_bias",
    "summary",
    "to_inference_data",
]


#: Where a name of an earlier version is now.
_MOVED = {name: f"numpyro_repulsion.contrib.{name}" for name in ("LearningCoefficient", "Localized", "llc")}
_MOVED["targets"] = "`benchmarks/problems/targets.py`, in the repository alone"
_MOVED["enable_live_warnings"] = (
    "out: kernels warn at the progress bar, and `diagnose` has all findings; for silence use `warnings.simplefilter`"
)
_MOVED["plot_gram"] = "`interaction.gram(u, bandwidth)`, to be drawn by matplotlib's `imshow`"


def __getattr__(name):
    if name in _MOVED:
        # An AttributeError would become "cannot import name" without another word.
        raise ImportError(f"numpyro_repulsion.{name} is now {_MOVED[name]}.")
    raise AttributeError(f"module 'numpyro_repulsion' has no attribute {name!r}")
