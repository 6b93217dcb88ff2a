"""Long runs in pieces: draws move to the host after each piece, and saved pieces survive a kill."""

from numpyro_repulsion.checkpointing.directory import Draws, load_draws
from numpyro_repulsion.checkpointing.run import run_in_pieces

__all__ = ["Draws", "load_draws", "run_in_pieces"]
