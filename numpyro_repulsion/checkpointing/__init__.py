"""Long runs, cut in pieces: draws leave the device as they come, and what is saved survives a kill."""

from numpyro_repulsion.checkpointing.directory import Draws, load_draws
from numpyro_repulsion.checkpointing.run import run_in_pieces

__all__ = ["Draws", "load_draws", "run_in_pieces"]
