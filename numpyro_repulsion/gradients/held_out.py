"""Rows that minibatches leave out, so that particles can be compared on rows that they have not seen."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from numpyro_repulsion.gradients.minibatch import Gradient
from numpyro_repulsion.gradients.target import Indices, Target

__all__ = ["HoldingOut", "rows_to_compare"]

#: On how many rows particles are compared, at most.
MOST_COMPARED = 1000


@dataclass(frozen=True)
class HoldingOut(Gradient):
    """A gradient without the last of every so many rows: the row before stands in for it.

    - **gradient** - which rows would be used otherwise.
    - **every** - one row in so many is held out, 2 or more.
    """

    gradient: Gradient
    every: int

    @property
    def shared(self):  # type: ignore[override]
        return self.gradient.shared

    def at(self, num_updates, seed):
        return HoldingOut(self.gradient.at(num_updates, seed), self.every)

    def rows(self, key, target, shape):
        indices, axes = self.gradient.rows(key, target, shape)
        return {name: self._kept(rows, target.plates[name][0]) for name, rows in indices.items()}, axes

    def _kept(self, rows, size):
        if rows.shape[-1] == size:
            return rows[..., np.flatnonzero(np.arange(size) % self.every != self.every - 1)]
        return rows - (rows % self.every == self.every - 1)


def rows_to_compare(target: Target, every: int | None) -> Indices:
    """Return rows of each plate, spread evenly over it, in minibatches ``(m, B)``.

    :param every: only the rows that :class:`HoldingOut` leaves out; ``None`` for any.
    """
    found = {}
    for name, (size, batch) in target.plates.items():
        rows = np.arange(size) if every is None else np.arange(every - 1, size, every)
        batch = min(batch, len(rows))
        found[name] = rows, batch
    number = max(1, min((min(len(rows), MOST_COMPARED) // batch for rows, batch in found.values()), default=1))
    return {
        name: jnp.asarray(rows[np.arange(number * batch) * len(rows) // (number * batch)].reshape(number, batch))
        for name, (rows, batch) in found.items()
    }
