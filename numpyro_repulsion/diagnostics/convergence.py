"""The nested R-hat, which tells whether ensembles agree."""

from __future__ import annotations

from typing import Any

import numpy as np

from numpyro_repulsion.diagnostics.ensembles import each, normal_scores

__all__ = ["nested_rhat"]


def nested_rhat(draws: Any, num_ensembles: int | None = None, *, method: str = "rank") -> Any:
    r"""Return the nested :math:`\hat R`, with ensembles as superchains.

    .. math::
        \hat R = \sqrt{1 + B / W}

    B is the variance of the ensembles' means. W is the mean over ensembles of the variance within: the variance between
    its particles' means, plus the mean variance of each particle over time. Particles of an ensemble may interact,
    because ensembles do not. The method presumes that the particles of an ensemble start at one point; particles that
    stay where they started pass it, so check the plain R-hat of particles too. The numbers are those of
    ``arviz_stats.rhat_nested``, which ArviZ 0.x lacks.

    :param draws: as for :func:`ensemble_ess`.
    :param num_ensembles: as for :func:`ensemble_ess`; two or more.
    :param method: ``"rank"`` splits each particle's series into halves, and takes the larger of the values for the
        draws and for their distances from the median, both as normal scores of ranks. ``"identity"`` uses the draws as
        they are.
    :return: an array of the shape of one draw, NaN where draws do not vary or are not finite; or a dictionary of such.
    :raises ValueError: for a single ensemble, an unknown method, and as :func:`ensemble_ess` does.

    **References:**

    1. *Nested R-hat: Assessing the Convergence of Markov Chain Monte Carlo When Running Many Short Chains*,
       C. C. Margossian, M. D. Hoffman, P. Sountsov, L. Riou-Durand, A. Vehtari and A. Gelman,
       https://arxiv.org/abs/2110.13017

    **Example**

    .. doctest::

        >>> from jax import random
        >>> from numpyro_repulsion import nested_rhat
        >>> draws = random.normal(random.key(0), (20, 100))
        >>> f"{nested_rhat(draws, num_ensembles=4):.2f}"
        '1.00'
    """

    if method not in ("rank", "identity"):
        raise ValueError(f"`method` must be 'rank' or 'identity'; got {method!r}.")

    def ratio(x, groups):
        x = x.reshape(groups, -1, *x.shape[1:])
        within = x.var(2, ddof=1).mean(1)
        if x.shape[1] > 1:
            within = within + x.mean(2).var(1, ddof=1)
        between = x.mean((1, 2)).var(0, ddof=1)
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.sqrt(1.0 + between / within.mean(0))

    def rhat(x, groups, _):
        if groups < 2:
            raise ValueError(
                "nested_rhat compares ensembles and needs two or more; got one. Run the kernel with several, such as "
                "num_ensembles=4, or pass `num_ensembles`."
            )
        usable = np.isfinite(x).all((0, 1))
        x = np.where(usable, x, np.nan)
        if method == "identity":
            return ratio(x, groups)
        half = x.shape[1] // 2
        # The halves of a particle count as two particles of the same ensemble.
        x = np.stack((x[:, :half], x[:, -half:]), 1).reshape(-1, half, *x.shape[2:])
        folded = np.abs(x - np.median(x, (0, 1)))
        found = np.maximum(*(ratio(normal_scores(part), groups) for part in (x, folded)))
        return np.where(usable, found, np.nan)[()]

    # Balanced ensembles lie further apart than independent ones, so the value is conservative.
    return each(draws, num_ensembles, rhat, adds_up=False)
