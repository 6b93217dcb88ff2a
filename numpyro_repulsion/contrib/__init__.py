"""What the rest of the package does without: the local posterior of a network, and its learning coefficient."""

from numpyro_repulsion.contrib.learning_coefficient import LearningCoefficient, llc
from numpyro_repulsion.contrib.localized import Localized

__all__ = ["LearningCoefficient", "Localized", "llc"]
