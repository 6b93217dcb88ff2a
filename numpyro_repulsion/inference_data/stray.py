"""Particles that have left the others, or stand still, recognized from their draws."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

__all__ = ["stray_particles"]

#: A particle stands still if its standard deviations are less than this share of the other particles'.
STILL = 0.02
#: The energy above the others' from which a particle has left, in units of T: the first number, and the second times
#: the square root of the number of parameters, for energies of draws have a standard deviation of about that root.
FIRST, PER_ROOT = 10.0, 5.0
#: How many standard errors of a mean energy count as chance.
ERRORS = 5.0
#: Fewer particles or draws show no majority, and no motion.
MIN_PARTICLES, MIN_DRAWS = 4, 10
#: Entries of the draws that are looked at.
MAX_ENTRIES = 500


def stray_particles(draws: Mapping[str, np.ndarray], energy: np.ndarray, dimension: int) -> np.ndarray:
    """Return which particles have left the others or stand still, ``(chain,)``.

    A particle has left if its mean energy is far above the median of all particles, or not finite. Particles in other
    modes of a posterior have similar energies and do not count.

    :param draws: ``(chain, draw, ...)`` by variable.
    :param energy: potential energies in units of the temperature, ``(chain, draw)``; estimates on minibatches may do.
    :param dimension: the number of parameters.
    """
    size, number = energy.shape
    flat = np.concatenate([np.asarray(x, float).reshape(size, number, -1) for x in draws.values()], -1)
    strayed = ~(np.isfinite(flat).all((1, 2)) & np.isfinite(energy).all(1))
    if size < MIN_PARTICLES or number < MIN_DRAWS or strayed.all():
        return strayed
    usable = np.flatnonzero(~strayed)
    flat, energy = flat[usable, :, :: -(-flat.shape[-1] // MAX_ENTRIES)], np.asarray(energy, float)[usable]
    deviations = flat.std(1)
    typical = np.median(deviations, 0)
    moves = typical > 0.0
    if moves.any():
        strayed[usable] |= np.median(deviations[:, moves] / typical[moves], 1) < STILL
    parts = np.stack([part.mean(1) for part in np.array_split(energy, MIN_DRAWS, axis=1)])
    error = np.median(parts.std(0, ddof=1)) / len(parts) ** 0.5
    above = energy.mean(1) - np.median(energy.mean(1))
    strayed[usable] |= above > FIRST + PER_ROOT * dimension**0.5 + ERRORS * error
    return strayed
