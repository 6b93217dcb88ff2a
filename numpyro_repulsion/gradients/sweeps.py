"""Minibatches without replacement: every row once, in a random order, and back again."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
import functools
import math

import jax
from jax import lax, random
import jax.numpy as jnp
from jaxtyping import Array, Integer
import numpy as np

from numpyro_repulsion.checks import boolean, keep
from numpyro_repulsion.gradients.control import ControlVariates

#: Rounds of the Feistel cipher that orders the rows. With so many, half-sums vary as in truly random orders.
ROUNDS = 6


@dataclass(frozen=True)
class Sweeps(ControlVariates):
    r"""Minibatches without replacement: each particle passes through all rows in an order of its own, and back.

    With minibatches :math:`B_1, \dots, B_M` of a random order of the rows, successive updates use

    .. math::
        \nabla U_{B_1}, \dots, \nabla U_{B_M}, \nabla U_{B_M}, \dots, \nabla U_{B_1},

    and then those of another order. The noise of minibatches sums to zero over a sweep, so it hardly moves a particle
    that is slower than a sweep. In a sweep of M updates with steps ε, along a direction of curvature λ, the bias of
    variances from noise of variance V is ``(εV/2) min(1, ελ(M+1)/3)`` for overdamped dynamics (where independent
    minibatches have ``εV/2``) and ``(εV/2C) min(1, ε²λ(M+1)²/12)`` with momenta and friction C. So the step for a bias
    of 5 % is about 5 times as long for ``SGLD`` and 10 times for ``SGHMC`` where a model fits its data. With balanced
    noise, means gain most.

    *Stationary distribution.* D, Q and Γ are those of the dynamics. Over a whole double sweep the particles are a
    homogeneous Markov chain, because each order is new and independent of the past. Given the past, single gradients
    are biased; the stationary distribution is that of exact gradients up to the bias above and, for minibatches that
    differ in curvature too, a shift of means by ``ε/2`` times a constant that does not grow with M. No theorem covers
    a K that depends on the particles.

    *When to use it.* In long runs without a useful reference point: likelihoods for which control variates add noise.
    Networks in short runs gain nothing. Warmup also measures control variates, and uses them if a step can then be more
    than twice as long, because they cost two gradients.

    *Cost.* As for :class:`~numpyro_repulsion.Subsampled`. Rows are computed from the number of the update by a small
    cipher, so nothing of size N is stored, and stored runs continue in their order. Until particles have arrived, and
    for what warmup measures, minibatches are independent.

    :param shared: whether the particles of an ensemble share an order. Cheaper and, unlike independent shared
        minibatches, still precise for means.
    :param block_size: the number of consecutive rows kept together in every order; the rows must be shuffled once, as
        for :class:`~numpyro_repulsion.Subsampled`. Orders are of blocks, so a large file is read in long pieces.
    :param control_variates: whether warmup may correct the gradients at a reference point. Without them every gradient
        is of ``subsample_size`` rows, as random likelihoods and sites that use rows from outside their plate require.
    :raises ValueError: for a thermostat (``SGNHT``), which would treat the noise within a sweep as heat, or a model in
        which subsampled plates meet in a site: minibatches of each would pass through its rows, but not all pairs.

    **References:**

    1. *Sampling from Bayesian Neural Network Posteriors with Symmetric Minibatch Splitting Langevin Dynamics*,
       D. Paulin, P. A. Whalley, N. K. Chada and B. Leimkuhler, https://arxiv.org/abs/2410.19780
    2. *Random Reshuffling for Stochastic Gradient Langevin Dynamics*, L. Shaw and P. A. Whalley,
       https://arxiv.org/abs/2501.16055

    **Example**

    .. doctest::

        >>> import numpyro
        >>> import numpyro.distributions as dist
        >>> from numpyro_repulsion import SGLD, Sweeps
        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     with numpyro.plate("rows", len(y), subsample_size=20) as i:
        ...         numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])
        >>> SGLD(model, gradient=Sweeps()).gradient
        Sweeps(shared=False, block_size=1, order=None, control_variates=True)
    """

    control_variates: bool = field(default=True, kw_only=True)

    def __post_init__(self):
        super().__post_init__()
        keep(self, "control_variates", boolean)

    has_reference = property(lambda self: self.control_variates)

    def check_rows(self, target):
        super().check_rows(target)
        for group in target.crossed_plates():
            if len(group) > 1:
                raise ValueError(
                    f"A site uses rows of all the subsampled plates {sorted(group)}, and {self!r} would visit every "
                    "row of each plate, but not every pair of rows: use gradient=ControlVariates() or Subsampled(), "
                    "or subsample only one of the plates."
                )

    def rows(self, key, target, shape):
        # Not from strata, as elsewhere: where the order of the rows matters, those hide noise that sweeps have.
        lead = shape[:1] if self.shared else shape
        indices = {}
        for i, (name, (size, batch)) in enumerate(target.plates.items()):
            place, tag = self._places(key, i, math.prod(lead), size, batch)
            row = in_order(place, tag, size, 1 if batch == size else self.block_size)
            indices[name] = row.astype(jnp.int32).reshape(*lead, batch)
        return indices, len(lead)

    def _places(self, key, i, number, size, batch):
        """Return places in orders of the plate i, ``(number, batch)``, and what chooses the order of each."""
        start, tag = random.bits(random.fold_in(key, i), (2, number, 1), jnp.uint32)
        place, _ = _advance(start % np.uint32(size), jnp.arange(batch, dtype=jnp.uint32), size)
        return place, jnp.broadcast_to(tag, place.shape)

    def sweep_length(self, target):
        return max(-(-size // batch) for size, batch in target.plates.values())

    def at(self, num_updates, seed):
        settings = {setting.name: getattr(self, setting.name) for setting in fields(Sweeps)}
        return _Update(**settings, num_updates=num_updates, seed=seed)


@dataclass(frozen=True, eq=False)
class _Update(Sweeps):
    """The minibatches of one update, by its number and the seed of the run."""

    num_updates: Integer[Array, ""] = field(kw_only=True)
    seed: Integer[Array, ""] = field(kw_only=True)

    def _places(self, key, i, number, size, batch):
        # Batches follow each other in a sequence of places 0, ..., N-1, N-1, ..., 0 for each order. Particles begin at
        # different places, so that their biases within a sweep cancel in means over particles.
        period, particle = 2 * size, jnp.arange(number, dtype=jnp.uint32)
        sweep, place = divide_product(jnp.asarray(self.num_updates, jnp.uint32), 2**31 - 1, batch, period)
        start = np.arange(number, dtype=np.int64) * period // number
        place, is_next = _advance(place, jnp.asarray(start, jnp.uint32), period)
        sweep = sweep + is_next
        place, is_next = _advance(place[:, None], jnp.arange(batch, dtype=jnp.uint32), period)
        tags = [_mix(_mix(_mix(self.seed + np.uint32(i)) + particle) + sweep + np.uint32(j)) for j in (0, 1)]
        tag = jnp.where(is_next, tags[1][:, None], tags[0][:, None])
        return jnp.where(place < size, place, np.uint32(period - 1) - place), tag


def divide_product(count: jax.Array, limit: int, factor: int, divisor: int) -> tuple[jax.Array, jax.Array]:
    """Return the quotient and the remainder of ``count * factor / divisor``, without the product where it overflows.

    :param count: unsigned 32-bit integers, at most ``limit``.
    :param factor: an integer below ``divisor``; both fit 32 bits.
    """
    if limit * factor < 2**32:
        product = count * np.uint32(factor)
        return product // np.uint32(divisor), product % np.uint32(divisor)
    # period · factor = divisor − remainder, with a remainder smaller than the factor.
    period = divisor // factor
    whole, left = count // np.uint32(period), count % np.uint32(period)
    excess, rest = divide_product(whole, limit // period, divisor - period * factor, divisor)
    product = left * np.uint32(factor)
    borrows = product < rest
    remainder = jnp.where(borrows, product + (np.uint32(divisor) - rest), product - rest)
    return whole - excess - borrows.astype(jnp.uint32), remainder


def in_order(place: jax.Array, tag: jax.Array, size: int, block: int = 1) -> jax.Array:
    """Return the rows at some places of an order of ``size`` rows.

    :param place: unsigned integers below ``size``.
    :param tag: chooses the order, of the same shape.
    :param block: how many consecutive rows stay together, where the first row follows the last.
    """
    count = size // block
    if count == 1:
        return place
    if block == 1:
        return _permuted(place, tag, size)
    # Rows beyond the last whole block come last. The order begins at any row, so these are not always the same.
    number, within = place // np.uint32(block), place % np.uint32(block)
    row = _permuted(jnp.minimum(number, np.uint32(count - 1)), tag, count) * np.uint32(block) + within
    row = jnp.where(number < count, row, place)
    return _advance(row, _mix(tag) % np.uint32(size), size)[0]


def _advance(place, steps, period):
    """Return places advanced by some steps in a cycle, and which of them passed its end; in 32 bits."""
    left = np.uint32(period) - steps
    passes = place >= left
    return jnp.where(passes, place - left, place + steps), passes.astype(jnp.uint32)


def _permuted(place, tag, size):
    """Return the images of places under a permutation of ``size`` that the tags choose.

    A Feistel cipher permutes the cells of a rectangle with few more cells than places. A place that lands in a cell
    beyond the last place moves on, by the same cipher, until it lands in a place.
    """
    width, height = _rectangle(size)

    def encrypt(x):
        left, right = x // np.uint32(height), x % np.uint32(height)
        for i in range(ROUNDS):
            left = (left + _mix(right + tag + np.uint32(2 * i + 1)) % np.uint32(width)) % np.uint32(width)
            right = (right + _mix((left ^ tag) + np.uint32(2 * i + 2)) % np.uint32(height)) % np.uint32(height)
        return left * np.uint32(height) + right

    image = encrypt(place)
    if width * height > size:
        image = lax.while_loop(lambda x: jnp.any(x >= size), lambda x: jnp.where(x >= size, encrypt(x), x), image)
    return image


@functools.cache
def _rectangle(size):
    """Return the sides of a nearly square rectangle with few more than ``size`` cells."""
    root = math.isqrt(size - 1) + 1
    # On fewer than 3 × 2 cells a cipher has too few permutations.
    widths = range(max(3, -(-3 * root // 4)), max(3, root) + 1)
    return min(((width, max(2, -(-size // width))) for width in widths), key=lambda sides: sides[0] * sides[1])


def _mix(x):
    """Return hashes of unsigned 32-bit integers (the finalizer of MurmurHash3)."""
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
