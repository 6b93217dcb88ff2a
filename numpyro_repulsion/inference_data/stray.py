"""Particles that have left the others, or stand still, recognized from their draws."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import numpy as np

from numpyro_repulsion.warmup import NUM_DEVIATIONS

__all__ = ["stray_particles"]

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
#: Entries of the draws that are looked at, and draws of each particle that show how large its place is.
MAX_ENTRIES, MAX_FOLLOWED = 500, 50


def stray_particles(
    draws: Mapping[str, jax.Array | np.ndarray],
    energy: jax.Array | np.ndarray,
    dimension: int,
    in_basins: bool = False,
    unconstrain: Callable | None = None,
) -> np.ndarray:
    """Return which particles have left the others or stand still, ``(chain,)``.

    A particle has left if its mean energy is far above the median of all particles, or not finite. If most particles
    differ that much, the lowest energies take the place of the median. Particles in other modes of a posterior do not
    count: their energies are similar, or higher by the logarithm of how much larger their place is: the sum of the
    logarithms of standard deviations over time. If most of them were that far up in the first half
    of the draws, compared with the second, they have not arrived. Entries that are not finite for most particles are
    those of the model, such as padding.

    :param draws: those of latent sites, ``(chain, draw, ...)`` by variable.
    :param energy: potential energies in units of the temperature, ``(chain, draw)``; estimates on minibatches may do.
    :param dimension: the number of parameters.
    :param in_basins: whether particles are in basins of different depth, as networks are. Then a particle has left only
        if its mean energy is ``NUM_DEVIATIONS`` median absolute deviations above the median too.
    :param unconstrain: maps such draws to the coordinates of the energies; ``None`` for draws that have these.
    """
    size, number = energy.shape
    entries = [np.asarray(x).reshape(size, number, -1) for x in draws.values()]
    step = -(-sum(x.shape[-1] for x in entries) // MAX_ENTRIES)
    flat = np.concatenate([x[..., ::step] for x in entries], -1)
    finite = np.isfinite(flat).all(1)
    finite = finite[:, finite.mean(0) > 0.5]
    strayed = ~(finite.all(1) & np.isfinite(energy).all(1))
    if size < MIN_PARTICLES or number < MIN_DRAWS or strayed.all():
        return strayed
    strayed |= (flat[:, 1:] == flat[:, :-1]).all(-1).mean(1) > STILL
    usable = np.flatnonzero(np.isfinite(energy).all(1))
    energy = np.asarray(energy, float)[usable]
    parts = np.stack([part.mean(1) for part in np.array_split(energy, MIN_DRAWS, axis=1)])
    # The standard deviation of noise from its second differences, in which a fall cancels.
    noise = 1.48 * np.median(np.abs(np.diff(parts, 2, axis=0))) / 6**0.5
    limit = FIRST + PER_ROOT * dimension**0.5 + ERRORS * noise / len(parts) ** 0.5

    def is_far(values, others, farthest):
        """Whether the values are far above the middle of the others."""
        reference = np.median(others)
        if in_basins:
            farthest = max(farthest, NUM_DEVIATIONS * np.median(np.abs(others - reference)))
        elif np.subtract(*np.quantile(others, (0.75, 0.25))) > farthest:
            # No majority has arrived.
            reference = np.quantile(others, LOW)
        return values > reference + farthest

    means = parts.mean(0)
    if (above := is_far(means, means, limit)).any():
        every = -(-number // MAX_FOLLOWED)
        some = {name: np.asarray(x)[usable, ::every] for name, x in draws.items()}
        free = means - _log_volumes(some if unconstrain is None else unconstrain(some))
        above &= is_far(free, free, limit)
    first, second = (half.mean(0) for half in np.array_split(parts, 2))
    if np.mean(fell := is_far(first, second, limit + ERRORS * noise)) > 0.5:
        above |= fell
    strayed[usable] |= above
    return strayed


def _log_volumes(draws):
    """Return the sums over coordinates of the logarithms of each particle's standard deviations over time."""
    parts = [np.asarray(x, float).reshape(*x.shape[:2], -1) for x in draws.values()]
    spread = np.concatenate(parts, -1).std(1)
    # One that does not move has no volume; padding is the same for all.
    return np.log(np.where(np.isfinite(spread), np.maximum(spread, np.finfo(np.float32).tiny), 1.0)).sum(-1)
