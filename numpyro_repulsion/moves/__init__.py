"""Jumps between updates: Metropolis steps that read what warmup has frozen, for posteriors of several modes."""

from numpyro_repulsion.moves.archive import DENSITY, DIFFERENCES, Archive, Jumps
from numpyro_repulsion.moves.basins import BasinJumps, jump_between_basins, learn_basins

__all__ = ["DENSITY", "DIFFERENCES", "Archive", "BasinJumps", "Jumps", "jump_between_basins", "learn_basins"]
