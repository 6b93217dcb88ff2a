"""Jumps between updates: Metropolis steps with proposals frozen after warmup, for posteriors with several modes."""

from numpyro_repulsion.moves.archive import DENSITY, DIFFERENCES, Archive, Jumps
from numpyro_repulsion.moves.base import Jumped, Move, Proposal
from numpyro_repulsion.moves.basins import BasinJumps, Basins

__all__ = ["DENSITY", "DIFFERENCES", "Archive", "BasinJumps", "Basins", "Jumped", "Jumps", "Move", "Proposal"]
