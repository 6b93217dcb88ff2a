"""The kernels for NumPyro: one ``MCMCKernel`` whose chains are particles, and named choices of its parts."""

from numpyro_repulsion.kernels.base import ParticleKernel
from numpyro_repulsion.kernels.halving import halved_series
from numpyro_repulsion.kernels.mcmc import arguments
from numpyro_repulsion.kernels.presets import SGHMC, SGHMCR, SGLD, SGLDR, SGNHT, SGNHTR, SVGD
from numpyro_repulsion.kernels.runs import (
    bound_of,
    chosen_draws,
    coupling_of,
    evenly_spread,
    flat_values,
    has_other_data,
    is_warmup,
    kernel_of,
    kernel_of_run,
    latent_draws,
    require_draws,
    share_flagged,
)
from numpyro_repulsion.kernels.state import ParticleState

__all__ = [
    "SGHMC",
    "SGHMCR",
    "SGLD",
    "SGLDR",
    "SGNHT",
    "SGNHTR",
    "SVGD",
    "ParticleKernel",
    "ParticleState",
    "arguments",
    "bound_of",
    "chosen_draws",
    "coupling_of",
    "evenly_spread",
    "flat_values",
    "halved_series",
    "has_other_data",
    "is_warmup",
    "kernel_of",
    "kernel_of_run",
    "latent_draws",
    "require_draws",
    "share_flagged",
]
