"""What to think of a run: a table and the problems found."""

from numpyro_repulsion.report.table import summary
from numpyro_repulsion.report.verdict import diagnose

__all__ = ["diagnose", "summary"]
