"""Predictions of a site for new data."""

from numpyro_repulsion.predictions.mixture import Predictions
from numpyro_repulsion.predictions.prediction import predict

__all__ = ["Predictions", "predict"]
