"""What a run predicts for one site: a mixture over its draws."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from numpyro_repulsion.checks import number

__all__ = ["Predictions"]


@dataclass(frozen=True, eq=False, repr=False)
class Predictions:
    r"""Predictions of a site, :math:`p(y^*) = \frac1n \sum_s p(y^* \mid \theta_s)` over n draws, as NumPy arrays.

    - **site** - the name of the site.
    - **replicates** - one random value of the site for each draw, ``(draws, ...)``.
    - **observed** - the observations, or ``None``. NaN are missing, as those that a mask hides are.
    - **mean**, **sd** - of the mixture, with the shape of the site: ``sd`` joins the noise of the site with the
      disagreement of the draws. For a deterministic site it is the disagreement alone. ``None`` for classes.
    - **probabilities** - of each class, in a last axis, for a categorical site; otherwise ``None``.
    - **log_likelihood** - the log density of each observation under the mixture, if the data for which predictions
      were made have observations; otherwise ``None``. Its mean, ``np.nanmean`` if some are missing, is the usual test
      log likelihood.

    :func:`~numpyro_repulsion.predict` makes it.

    **Example**

    .. doctest::

        >>> import numpy as np
        >>> from numpyro_repulsion.predictions import Predictions
        >>> rng = np.random.default_rng(0)
        >>> found = Predictions("y", replicates=rng.normal(size=(200, 50)), observed=3.0 * rng.normal(size=50))
        >>> found.quantile([0.05, 0.95]).shape
        (2, 50)
        >>> found.coverage(0.9) < 0.8  # too narrow
        True
    """

    site: str
    replicates: np.ndarray
    observed: np.ndarray | None = None
    mean: np.ndarray | None = None
    sd: np.ndarray | None = None
    probabilities: np.ndarray | None = None
    log_likelihood: np.ndarray | None = None

    def __repr__(self) -> str:
        count, *shape = self.replicates.shape
        parts = [f"{self.site!r}", f"{count} draws", f"shape {tuple(shape)}"]
        if self.log_likelihood is not None:
            known = self.log_likelihood[~np.isnan(self.log_likelihood)]
            parts.append(f"mean log likelihood {known.mean() if known.size else np.nan:.4g}")
            if known.size < self.log_likelihood.size:
                parts.append(f"{known.size} of {self.log_likelihood.size} observed")
        return f"Predictions({', '.join(parts)})"

    def quantile(self, q: Any) -> np.ndarray:
        """Return quantiles of the mixture, estimated from the replicates.

        :param q: one share or several, between 0 and 1.
        :return: an array of the shape of the site, with the axes of ``q`` before it.
        :raises ValueError: for shares out of range.
        """
        shares = np.asarray(q)
        if shares.dtype.kind not in "iuf" or not ((shares >= 0) & (shares <= 1)).all():
            raise ValueError(f"`q` must be one or more numbers from 0 to 1; got {q!r}.")
        return np.quantile(self.replicates, shares, axis=0)

    def pit(self) -> np.ndarray:
        """Return the probability integral transform of each observation: the share of the mixture below it.

        It is uniform between 0 and 1 where predictions are calibrated. Ties with replicates, as for counts, are broken
        at random, from a fixed seed.

        :raises ValueError: without observations, and for classes.

        **References:**

        1. *Predictive model assessment for count data*, C. Czado, T. Gneiting and L. Held, Biometrics 65, 2009
        """
        if self.probabilities is not None:
            raise ValueError(f"The classes of '{self.site}' have no order; compare `probabilities` with `observed`.")
        observed = self.require_observed()
        below = (self.replicates < observed).sum(0)
        ties = (self.replicates == observed).sum(0)
        share = (below + np.random.default_rng(0).uniform(size=observed.shape) * (ties + 1)) / (
            len(self.replicates) + 1
        )
        return np.where(np.isnan(observed), np.nan, share)

    def coverage(self, prob: float = 0.9) -> float:
        """Return the share of observations inside the central interval that should hold the share ``prob`` of them.

        :raises ValueError: without observations, for classes, and for a ``prob`` that is not between 0 and 1.
        """
        prob = number("`prob`", prob, "a number between 0 and 1", lambda x: 0.0 < x < 1.0)
        share = self.pit()
        return float((np.abs(share[~np.isnan(share)] - 0.5) <= prob / 2.0).mean())

    def require_observed(self) -> np.ndarray:
        """Return the observations.

        :raises ValueError: without any.
        """
        if self.observed is None or np.isnan(self.observed).all():
            raise ValueError(
                f"These predictions of '{self.site}' have no observations to compare with; pass the observed values "
                "as predict(mcmc, ...) passes them to the model."
            )
        return self.observed
