"""Plots of particles by matplotlib, which is imported when one is drawn."""

from numpyro_repulsion.plots.calibration import plot_calibration
from numpyro_repulsion.plots.estimates import plot_running_estimates
from numpyro_repulsion.plots.particles import animate_particles, plot_particles

__all__ = ["animate_particles", "plot_calibration", "plot_particles", "plot_running_estimates"]
