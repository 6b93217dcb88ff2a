"""Pictures of particles, by matplotlib, which is imported when one is drawn."""

from numpyro_repulsion.pictures.animation import animate_particles
from numpyro_repulsion.pictures.estimates import plot_running_estimates
from numpyro_repulsion.pictures.gram import plot_gram
from numpyro_repulsion.pictures.particles import plot_particles

__all__ = ["animate_particles", "plot_gram", "plot_particles", "plot_running_estimates"]
