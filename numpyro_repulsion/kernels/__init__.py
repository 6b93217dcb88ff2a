"""The kernels for NumPyro: one ``MCMCKernel`` whose chains are particles, and named choices of its parts."""

from numpyro_repulsion.kernels.base import ParticleKernel
from numpyro_repulsion.kernels.presets import SGHMC, SGHMCR, SGLD, SGLDR, SGNHT, SGNHTR, SVGD
from numpyro_repulsion.kernels.state import ParticleState

__all__ = ["SGHMC", "SGHMCR", "SGLD", "SGLDR", "SGNHT", "SGNHTR", "SVGD", "ParticleKernel", "ParticleState"]
