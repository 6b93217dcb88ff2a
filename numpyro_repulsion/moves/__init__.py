"""Jumps between updates: Metropolis steps with proposals frozen after warmup, for posteriors with several modes."""

from numpyro_repulsion.moves.archive import DENSITY, DIFFERENCES, Archive, ArchiveState
from numpyro_repulsion.moves.base import Jumped, Move, Proposal
from numpyro_repulsion.moves.basins import Basins, BasinsState

__all__ = ["DENSITY", "DIFFERENCES", "Archive", "BasinsState", "Basins", "Jumped", "ArchiveState", "Move", "Proposal"]
