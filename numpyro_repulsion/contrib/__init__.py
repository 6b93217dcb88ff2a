"""What the rest of the package does without: simulation-based calibration, and local posteriors of networks."""

from numpyro_repulsion.contrib.calibration import Calibration, calibrate
from numpyro_repulsion.contrib.local_posterior import LearningCoefficient, Localized, llc

__all__ = ["Calibration", "LearningCoefficient", "Localized", "calibrate", "llc"]
