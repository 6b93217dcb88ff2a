"""Effective sample sizes, standard errors, nested R-hat, stray particles, and Stein's identity for draws of a run."""

from numpyro_repulsion.diagnostics.ensembles import (
    KNOWN,
    MODES,
    SHORT,
    ensemble_ess,
    ensemble_mcse,
    find_diverged_chains,
    mixing,
    nested_rhat,
    num_independent,
)
from numpyro_repulsion.diagnostics.stein import ControlledMeans, ksd, scores, stein_control_variates

__all__ = [
    "KNOWN",
    "MODES",
    "SHORT",
    "ControlledMeans",
    "ensemble_ess",
    "ensemble_mcse",
    "find_diverged_chains",
    "ksd",
    "mixing",
    "nested_rhat",
    "num_independent",
    "scores",
    "stein_control_variates",
]
