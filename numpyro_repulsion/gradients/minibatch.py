"""Which rows of the subsampled plates a particle uses, and the gradient computed from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
import math
from typing import NamedTuple

import jax
from jax import lax, random
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer
import numpy as np

from numpyro_repulsion.checks import boolean, integer, keep
from numpyro_repulsion.gradients.subsampling import on_shares, share, shares_rows
from numpyro_repulsion.gradients.target import Indices, Particle, Target
from numpyro_repulsion.noise import integers_below
from numpyro_repulsion.rounding import AnyArray, unrounded


class Reference(NamedTuple):
    """The reference point of control variates, one for all particles or one for each.

    - **position** - ẑ in the coordinates of the model, unconstrained and flat, ``(d,)`` or ``(G, L, d)``.
    - **potential_energy** - U(ẑ) over all rows, a scalar or ``(G, L)``.
    - **gradient** - ∇U(ẑ) over all rows, ``(d,)`` or ``(G, L, d)``.
    - **data** - the identity of the data and the model that it was computed from, four words; zeros if there is no
      reference yet.
    - **order** - that of the correction of gradients: 0 for none, 1 or 2; ``None`` after warmup, if the highest that is
      known.
    - **hessian** - ∇²U(ẑ) over all rows, ``(d, d)``; ``None`` if there are no corrections of second order.
    - **age** - the number of updates since the last renewal; ``None`` for a common reference, which is not renewed.
    """

    position: Float[AnyArray, "*references d"]
    potential_energy: Float[AnyArray, "*references"]
    gradient: Float[AnyArray, "*references d"]
    data: Integer[AnyArray, 4]
    order: Integer[AnyArray, ""] = None
    age: Integer[AnyArray, ""] = None
    hessian: Float[AnyArray, "d d"] | None = None

    @staticmethod
    def none(shape: int | tuple[int, ...], dtype, order: int = 0, has_hessian: bool = False) -> Reference:
        """Return an empty reference for positions of a shape ``(d,)`` or ``(G, L, d)``."""
        zero = jnp.zeros(shape, dtype)
        age = jnp.zeros((), jnp.int32) if zero.ndim == 3 else None
        hessian = jnp.zeros((len(zero), len(zero)), dtype) if has_hessian else None
        data = jnp.zeros(4, jnp.uint32)
        return Reference(zero, zero[..., 0], zero, data, jnp.asarray(order, jnp.int32), age, hessian)


class Gradient:
    """Base class: chooses the rows of the subsampled plates that each particle uses in each update."""

    #: Whether the particles of a group share their rows: where `rows` returns fewer than 2 axes.
    shared: bool = False
    #: How many consecutive rows are drawn together.
    block_size: int = 1

    def is_noisy(self, target: Target) -> bool:
        """Whether U and ∇U are estimates that differ from update to update; true unless a subclass knows better."""
        return True

    @property
    def splits(self) -> bool:
        """Whether equal parts of a minibatch come from equal parts of the plate, so that devices can share its rows."""
        return False

    @property
    def keeps_subsample_size(self) -> bool:
        """Whether all its minibatches have exactly ``subsample_size`` rows."""
        return False

    @property
    def has_reference(self) -> bool:
        """Whether it corrects gradients at reference points, with gradients over all rows there."""
        return False

    def has_hessian(self, target: Target, dimension: int) -> bool:
        """Whether it corrects gradients of so many parameters by the Hessian over all rows at a reference point."""
        return False

    def at(self, num_updates: Integer[Array, ""], seed: Integer[Array, ""]) -> Gradient:
        """Return the gradient to use in one update; the same unless successive minibatches depend on each other.

        :param num_updates: how many updates were done before.
        :param seed: an unsigned integer that the run drew once.
        """
        return self

    @property
    def depends_on_updates(self) -> bool:
        """Whether the gradient of an update depends on how many were done before."""
        return type(self).at is not Gradient.at

    def sweep_length(self, target: Target) -> int | None:
        """Return the number of updates that pass through all rows once; ``None`` for independent minibatches."""
        return None

    def check_rows(self, target: Target) -> None:
        """Raise ``ValueError`` for models of which this gradient would sample another posterior.

        :raises ValueError: for a site that uses rows of a subsampled plate from outside, scaled by hand with a factor
            that is only right for minibatches of ``subsample_size`` rows.
        """
        if target.rows_outside and not self.keeps_subsample_size:
            name, plates = next(iter(target.rows_outside.items()))
            raise ValueError(
                f"The site '{name}' uses rows of the subsampled plate '{plates[0]}' outside of that plate, with a log "
                f"density for minibatches of `subsample_size` rows, but {self!r} also uses other numbers of rows. "
                "Put the site into the plate, scale it for any number of rows, `with numpyro.handlers.scale("
                "scale=N / len(i)): ...`, or use gradient=Subsampled(), the default for such models."
            )

    def batches(self, target: Target) -> dict[str, int]:
        """Return the number of rows in a minibatch of each plate."""
        return {name: batch for name, (_, batch) in target.plates.items()}

    def share(self, target: Target) -> None:
        """Put rows of the model on the devices for rows of the mesh of ``jax.set_mesh``, if it has any.

        :raises ValueError: for minibatches that these devices cannot share.
        """
        if shares_rows():
            share(target, self.batches(target) if self.splits else None, self.block_size)

    def epoch_length(self, target: Target, num_steps: int) -> int | None:
        """Return the number of updates, in whole iterations of ``num_steps``, after which each particle renews its
        reference; ``None`` if particles have no references."""
        return None

    def rows(self, key: jax.Array, target: Target, shape: tuple[int, ...]) -> tuple[Indices, int]:
        """Return row indices for a cloud of ``shape = (G, L)`` particles.

        :return: ``{plate: indices}``, and how many axes of the cloud each array begins with: 2 if each particle has its
            rows, 1 if each group has its rows, 0 for the same rows everywhere.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement `rows`.")

    def energy_and_grad(
        self,
        key: jax.Array,
        target: Target,
        unravel: Callable,
        z: Float[Array, "*particles d"],
        reference: Reference | None = None,
    ) -> tuple[Float[Array, "*particles"], Float[Array, "*particles d"]]:
        """Return ``(U, ∇U)`` of shapes ``(G, L)`` and ``(G, L, d)`` at the particles ``z`` of shape ``(G, L, d)``.

        :param reference: the reference points, for gradients with control variates.
        """
        # Each split takes a tenth of a second to compile.
        rows_key, model_key = random.split(key) if target.is_random else (key, key)
        indices, axes = self.rows(rows_key, target, z.shape[:2])
        are_all = all(indices[name].shape[-1] == size for name, (size, _) in target.plates.items())
        if axes < 2 and not (self.shared or are_all) and z.shape[1] > 1:
            raise ValueError(
                f"{type(self).__name__}.rows returns rows that particles share ({axes} axes), and its `shared` is "
                "False: set shared = True in the class, or return rows for each particle, with 2 axes."
            )
        keys = random.split(model_key, z.shape[:2]) if target.is_random else model_key
        if self.splits and target.plates and shares_rows():
            evaluate = partial(self._evaluate, unravel=unravel, axes=axes)
            return on_shares(evaluate, target, z, indices, axes, keys)
        return self._evaluate(target, z, indices, keys, unravel, axes)

    @staticmethod
    @unrounded()
    def _evaluate(target, z, indices, keys, unravel, axes):
        """Return ``(U, ∇U)`` on given rows, with a key for each particle where likelihoods are random."""

        def energy(flat, rows, key):
            return target.potential_energy(unravel(flat), rows, key).astype(flat.dtype)

        energy_and_grad, over = jax.value_and_grad(energy), 0 if target.is_random else None
        if axes == 1 and z.shape[0] > 1:
            return jax.vmap(jax.vmap(energy_and_grad, (0, None, over)), (0, 0, over))(z, indices, keys)
        # One flat axis of particles if the rows allow it, because an axis of length one slows matrix products down.
        count = z.shape[0] * z.shape[1]
        if axes:
            indices = jax.tree.map(lambda rows: rows[0] if axes == 1 else rows.reshape(count, *rows.shape[2:]), indices)
        keys = keys.reshape(count, *keys.shape[2:]) if target.is_random else keys
        batched = jax.vmap(energy_and_grad, (0, 0 if axes == 2 else None, over))
        value, gradient = batched(z.reshape(count, -1), indices, keys)
        return value.reshape(z.shape[:2]), gradient.reshape(z.shape)


@dataclass(frozen=True)
class FullData(Gradient):
    """All rows in every update, including those of subsampled plates.

    **Example**

    .. doctest::

        >>> from numpyro_repulsion import FullData, SGLDR
        >>> kernel = SGLDR(potential_fn=lambda z: z**2 / 2, step_size=0.1, gradient=FullData())
    """

    @property
    def splits(self):
        return type(self).rows is FullData.rows

    def batches(self, target):
        return {name: size for name, (size, _) in target.plates.items()}

    def is_noisy(self, target):
        return target.is_random

    def rows(self, key, target, shape):
        return {name: jnp.arange(size) for name, (size, _) in target.plates.items()}, 0


@dataclass(frozen=True)
class Subsampled(Gradient):
    """A new minibatch in every update, with each plate's ``subsample_size`` rows.

    One row is drawn from each of ``subsample_size`` strata of equal size. All rows are equally likely, so the gradient
    is unbiased. Its variance is at most that of draws with replacement, the cost does not grow with the size of the
    plate, and a batch of all rows has every row once.

    :param shared: whether the particles of an ensemble share a minibatch. By default each has its own: a shared
        minibatch gives all particles the same gradient noise, which averaging over particles does not remove, and which
        repulsion accumulates over neighbors. Measured on N(0, I₂) with 20 particles, RBF bandwidth 2, step size 0.02
        and gradient noise of variance 4 (the exact values are 1 and 1):

        ==================  =================  =======================================
        ..                  marginal variance  20 × variance of the ensemble's mean
        ==================  =================  =======================================
        SGLD, shared        1.05               1.83
        SGLD, own           1.05               1.04
        SGLDR, shared       1.23               7.48
        SGLDR, own          1.03               1.39
        ==================  =================  =======================================

        A shared minibatch is cheaper: one gather and one matrix product for all particles.
    :param block_size: the number of consecutive rows drawn together; it must divide each ``subsample_size``. Memory is
        read in lines, so long blocks are fetched several times faster if there are many rows. All rows stay equally
        likely, and gradients are unbiased for any order of the rows. Similar neighbors add to the noise, however, so
        the rows must be in random order (shuffle them once). In sorted data the noise is far larger; warmup measures
        it and shortens the steps.
    :raises ValueError: unless ``block_size`` is an integer of 1 or more.

    **Example**

    .. doctest::

        >>> from numpyro_repulsion import Subsampled
        >>> Subsampled(shared=True)
        Subsampled(shared=True, block_size=1)
    """

    shared: bool = False
    block_size: int = field(default=1, kw_only=True)

    def __post_init__(self):
        keep(self, "shared", boolean)
        keep(self, "block_size", integer, expected="a number of rows, an integer of 1 or more")

    @property
    def keeps_subsample_size(self):
        return True

    @property
    def splits(self):
        # Rows that a subclass draws may come from anywhere.
        return type(self).rows is Subsampled.rows

    def rows(self, key, target, shape):
        shape = shape[:1] if self.shared else shape
        return draw_indices(key, target.plates, shape, self.block_size), len(shape)


def draw_indices(
    key: jax.Array, plates: Mapping[str, tuple[int, int]], shape: tuple[int, ...] = (), block_size: int = 1
) -> Indices:
    """Return minibatches: for each plate, one row or block of rows from each stratum, with strata of equal size.

    :param plates: ``{name: (size, subsample_size)}``.
    :param shape: the number of independent minibatches.
    :param block_size: the number of consecutive rows drawn together, where the first row follows the last.
    :return: ``{name: indices of shape (*shape, subsample_size)}``, ascending for single rows.
    :raises ValueError: if ``block_size`` does not divide a minibatch.
    """
    indices = {}
    keys = random.split(key, len(plates)) if len(plates) > 1 else [key]
    for name, plate_key in zip(plates, keys, strict=False):
        size, batch = plates[name]
        # With all rows, blocks make no difference.
        block = 1 if batch == size else block_size
        if batch % block:
            raise ValueError(
                f"`block_size` must divide the rows of a minibatch; got {block} for plate {name!r} with "
                f"subsample_size={batch}. Use block_size={math.gcd(batch, block)}."
            )
        count = batch // block
        # floor((j·size + r) / count) for r uniform on 0..size-1: over all (j, r) each row occurs `count` times, so rows
        # are equally likely even if `count` does not divide `size`. It is split so that no number exceeds size + count,
        # which fits unsigned integers for all plates.
        start = np.arange(count, dtype=np.int64) * size
        drawn = integers_below(plate_key, (*shape, count), size)
        # Not `//`, because its sign handling would be repeated for every number that these indices gather.
        beyond = lax.div(drawn + jnp.asarray(start % count, jnp.uint32), jnp.asarray(count, jnp.uint32))
        first = jnp.asarray(start // count, jnp.int32) + beyond.astype(jnp.int32)
        if block > 1:
            within = jnp.arange(block, dtype=first.dtype)
            # Compared before it is added, because a sum can exceed 32 bits.
            left, first = size - within, first[..., None]
            first = jnp.where(first >= left, first - left, first + within).reshape(*shape, batch)
        indices[name] = first
    return indices


def ravel_cloud(z: Particle) -> tuple[Float[Array, "L d"], Callable]:
    """Return a pytree of arrays ``(L, ...)`` as an array ``(L, d)``, and the inverse for one particle ``(d,)``."""
    _, unravel = ravel_pytree(jax.tree.map(lambda x: x[0], z))
    return jax.vmap(lambda particle: ravel_pytree(particle)[0])(z), unravel


def rows_to_compare(target: Target) -> Indices:
    """Return up to 1,000 rows of each plate, spread evenly over it, in minibatches ``(m, B)``."""
    counts = [min(size, 1000) // batch for size, batch in target.plates.values()]
    number = max(1, min(counts, default=1))
    return {
        name: jnp.asarray((np.arange(number * batch) * size // (number * batch)).reshape(number, batch))
        for name, (size, batch) in target.plates.items()
    }
