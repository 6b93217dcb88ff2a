"""Effective sample sizes, standard errors, nested R-hat, stray particles, and Stein's identity for draws of a run."""

from numpyro_repulsion.diagnostics.convergence import find_diverged_chains, nested_rhat
from numpyro_repulsion.diagnostics.precision import (
    KNOWN,
    MODES,
    SHORT,
    ensemble_ess,
    ensemble_mcse,
    num_independent,
    why_unknown,
)
from numpyro_repulsion.diagnostics.stein import ControlledMeans, ksd, scores, stein_control_variates

__all__ = [
    "KNOWN",
    "MODES",
    "SHORT",
    "ControlledMeans",
    "stein_control_variates",
    "ensemble_ess",
    "ensemble_mcse",
    "ksd",
    "nested_rhat",
    "num_independent",
    "scores",
    "find_diverged_chains",
    "why_unknown",
]
