"""Conversion of a finished run to ArviZ: InferenceData on ArviZ 0.x, a DataTree on 1.x.

Deterministic sites, observations, log likelihoods and predictions cover all rows of subsampled plates.
"""

from numpyro_repulsion.inference_data.conversion import named_draws, to_inference_data
from numpyro_repulsion.inference_data.rows import all_rows, in_chunks, map_draws, visible

__all__ = ["all_rows", "in_chunks", "map_draws", "named_draws", "to_inference_data", "visible"]
