"""Particles that have left the others, or stand still, recognized from their draws."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import numpy as np

from numpyro_repulsion.warmup import NUM_DEVIATIONS

__all__ = ["find_diverged_chains"]

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


def find_diverged_chains(
    draws: Mapping[str, jax.Array | np.ndarray],
    energy: jax.Array | np.ndarray,
    dimension: int,
    in_basins: bool = False,
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
