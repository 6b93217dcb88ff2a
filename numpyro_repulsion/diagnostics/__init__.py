"""Effective sample sizes, standard errors, nested R-hat and Stein discrepancies for interacting particles."""

from numpyro_repulsion.diagnostics.convergence import nested_rhat
from numpyro_repulsion.diagnostics.ensembles import num_independent
from numpyro_repulsion.diagnostics.precision import KNOWN, MODES, SHORT, ensemble_ess, ensemble_mcse, why_unknown
from numpyro_repulsion.diagnostics.stein import ksd

__all__ = [
    "KNOWN",
    "MODES",
    "SHORT",
    "ensemble_ess",
    "ensemble_mcse",
    "ksd",
    "nested_rhat",
    "num_independent",
    "why_unknown",
]
