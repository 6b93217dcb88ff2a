"""Whether particles are where they belong: whether ensembles agree, and which particles have left the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from numpyro_repulsion.diagnostics.precision import each, normal_scores
from numpyro_repulsion.warmup import NUM_DEVIATIONS

#: A particle stands still if more than this share of its draws repeat the draw before.
STILL = 0.5
#: The energy above the others' from which a particle has left, in units of T: the first number, and the second times
#: the square root of the number of parameters, for energies of draws have a standard deviation of about that root.
FIRST, PER_ROOT = 10.0, 5.0
#: How many standard errors of a mean energy count as chance.
ERRORS = 5.0
#: If the middle half of the particles differs by more than that, they are compared with this quantile instead of the
#: median: the others have not arrived yet.
LOW = 0.1
#: Fewer particles or draws show no majority, and no motion.
MIN_PARTICLES, MIN_DRAWS = 4, 10
#: Entries of the draws that are looked at.
MAX_ENTRIES = 500


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


def find_diverged_chains(
    draws: Mapping[str, jax.Array | np.ndarray], energy: jax.Array | np.ndarray, dimension: int, in_basins: bool = False
) -> tuple[np.ndarray, int]:
    """Return which particles have left the others or stand still, ``(chain,)``; and how many are in a wider mode.

    A particle has left if its mean energy is far above the median of all particles, or not finite. If most particles
    differ that much, the lowest energies take the place of the median. If most were that much higher in the first half
    of their draws than in the second, they have not arrived. Entries that are not finite for most particles
    are those of the model, such as padding.

    Particles in other modes of a posterior do not count. A wide mode has a higher energy than a narrow one that holds
    as much of the posterior, so the energy less the logarithm of the volume that a particle visits must be far above
    the others' too. Where it is not, and two particles or more are on either side of a gap in energy, they are in modes
    of different widths.

    :param draws: those of latent sites, ``(chain, draw, ...)`` by variable.
    :param energy: potential energies in units of the temperature, ``(chain, draw)``; estimates on minibatches may do.
    :param dimension: the number of parameters.
    :param in_basins: whether particles are in basins of different depth, as networks are. Then a particle has left only
        if its mean energy is ``NUM_DEVIATIONS`` median absolute deviations above the median too.
    """
    size, number = energy.shape
    parts = [np.asarray(x).reshape(size, number, -1) for x in draws.values()]
    step = -(-sum(part.shape[-1] for part in parts) // MAX_ENTRIES)
    flat = np.concatenate([part[..., ::step] for part in parts], -1)
    finite = np.isfinite(flat).all(1)
    flat, finite = flat[..., finite.mean(0) > 0.5], finite[:, finite.mean(0) > 0.5]
    diverged = ~(finite.all(1) & np.isfinite(energy).all(1))
    if size < MIN_PARTICLES or number < MIN_DRAWS or diverged.all():
        return diverged, 0
    diverged |= (flat[:, 1:] == flat[:, :-1]).all(-1).mean(1) > STILL
    usable = np.flatnonzero(~diverged)
    if not usable.size:
        return diverged, 0
    energy, flat = np.asarray(energy, float)[usable], np.asarray(flat, float)[usable]
    times = np.stack([part.mean(1) for part in np.array_split(energy, MIN_DRAWS, axis=1)])
    # From second differences, in which a fall cancels.
    noise = 1.48 * np.median(np.abs(np.diff(times, 2, axis=0))) / 6**0.5
    means, limit = energy.mean(1), FIRST + PER_ROOT * dimension**0.5 + ERRORS * noise / len(times) ** 0.5
    if in_basins:
        limit = max(limit, NUM_DEVIATIONS * np.median(np.abs(means - np.median(means))))
    # Positive entries are sampled as their logarithms.
    positive = (flat > 0).all((0, 1))
    flat = np.where(positive, np.log(np.where(positive, flat, 1.0)), flat)
    volume = np.log(flat.std(1) + np.finfo(float).tiny).sum(-1) * (dimension / max(flat.shape[-1], 1))
    is_high, is_light = (_far_above(x, limit, in_basins) for x in (means, means - volume))
    gone = is_high & is_light
    first, second = (half.mean(0) for half in np.array_split(times, 2))
    if np.mean(falls := first > np.median(second) + limit + ERRORS * noise) > 0.5:
        gone |= falls
    diverged[usable] |= gone
    if in_basins:
        return diverged, 0
    ordered = np.sort(means[~gone])
    gaps = np.diff(ordered)[1:-1]
    wide = 0 if not gaps.size or gaps.max() < limit else len(ordered) - 2 - int(gaps.argmax())
    return diverged, wide


def _far_above(x, limit, in_basins):
    """Return which numbers are further above the others than the limit."""
    reference = np.median(x)
    if not in_basins and np.subtract(*np.quantile(x, (0.75, 0.25))) > limit:
        # No majority has arrived.
        reference = np.quantile(x, LOW)
    return x > reference + limit
