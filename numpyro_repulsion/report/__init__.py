"""Reports on a run: a summary table, and the problems found."""

from numpyro_repulsion.report.diagnosis import diagnose
from numpyro_repulsion.report.table import summary

__all__ = ["diagnose", "summary"]
