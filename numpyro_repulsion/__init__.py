"""Stochastic-gradient MCMC with interacting particles, for NumPyro.

Base classes, rare parts and what functions return are in submodules: ``dynamics``, ``interactions``, ``moves``,
``plots``, ``findings`` and others.
"""

from numpyro_repulsion.bias import extrapolate, step_bias
from numpyro_repulsion.checkpointing import load_draws, run_in_pieces
from numpyro_repulsion.diagnostics import ensemble_ess, ensemble_mcse, ksd, nested_rhat, stein_control_variates
from numpyro_repulsion.from_full import minibatch
from numpyro_repulsion.gradients import SVRG, ControlVariates, FullData, Subsampled, Sweeps
from numpyro_repulsion.inference_data import all_rows, to_inference_data
from numpyro_repulsion.interactions import IMQ, RBF, Antithetic, Balanced, Independent
from numpyro_repulsion.kernels import SGHMC, SGHMCR, SGLD, SGLDR, SGNHT, SGNHTR, SVGD
from numpyro_repulsion.moves import Archive
from numpyro_repulsion.predictions import predict
from numpyro_repulsion.report import diagnose, summary
from numpyro_repulsion.rows import Rows
from numpyro_repulsion.schedules import BiasBudget, Cyclical, Polynomial
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
    "Cyclical",
    "FullData",
    "Independent",
    "Polynomial",
    "Rows",
    "Subsampled",
    "Sweeps",
    "all_rows",
    "diagnose",
    "ensemble_ess",
    "ensemble_mcse",
    "extrapolate",
    "init_around",
    "init_from_guide",
    "init_from_idata",
    "ksd",
    "load_draws",
    "minibatch",
    "nested_rhat",
    "predict",
    "run_in_pieces",
    "stein_control_variates",
    "step_bias",
    "summary",
    "to_inference_data",
]

_NOW_IN = {
    "bias": "ExtrapolatedMeans StepBias",
    "contrib": "LearningCoefficient Localized llc",
    "diagnostics": "ControlledMeans scores",
    "dynamics": "Descent Dynamics Overdamped Recipe Relativistic Thermostat Underdamped",
    "findings": "Diagnosis Finding",
    "interactions": "Gram Interaction Laplacian Radial RandomFeatures RandomGroups Scheduled",
    "moves": "Move",
    "plots": "animate_particles plot_calibration plot_particles plot_running_estimates",
    "predictions": "Predictions",
}
#: Where a name of an earlier version is now.
_MOVED = {name: f"numpyro_repulsion.{room}.{name}" for room, names in _NOW_IN.items() for name in names.split()}
_MOVED["control_variates"] = "numpyro_repulsion.stein_control_variates"
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
