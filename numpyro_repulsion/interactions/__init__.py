"""Interactions between particles: the matrix K, its divergence Γ, and noise with covariance K.

A cloud of L particles in d dimensions is an array ``u`` of shape ``(L, d)``, or ``(G, L, d)`` for G groups that do
not interact. :meth:`Interaction.couple` returns a :class:`Coupling`, which holds all that the dynamics needs: the
product with K, the repulsion Γ, a draw with covariance K, and a bound on the largest eigenvalue of K.
"""

from numpyro_repulsion.interactions.balanced import Antithetic, Balanced
from numpyro_repulsion.interactions.base import Coupling, Gram, Independent, Interaction, Sum
from numpyro_repulsion.interactions.radial import IMQ, RBF, Laplacian, Radial, median_bandwidth
from numpyro_repulsion.interactions.redrawn import RandomFeatures, RandomGroups, Scheduled

__all__ = [
    "IMQ",
    "RBF",
    "Antithetic",
    "Balanced",
    "Coupling",
    "Gram",
    "Independent",
    "Interaction",
    "Laplacian",
    "Radial",
    "RandomFeatures",
    "RandomGroups",
    "Scheduled",
    "Sum",
    "median_bandwidth",
]
