"""What the rest of the package does without: the local posterior of a network, and its learning coefficient."""

from numpyro_repulsion.contrib.local_posterior import LearningCoefficient, Localized, llc

__all__ = ["LearningCoefficient", "Localized", "llc"]
