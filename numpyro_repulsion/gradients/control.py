"""Control variates: minibatch gradients corrected at reference points, where the full gradient is known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
import itertools
import math

import jax
from jax import lax
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
from jaxtyping import Array, Float
import numpy as np

from numpyro_repulsion.checks import integer, keep
from numpyro_repulsion.gradients.arrow import DENSE, Arrow, Units, find_units
from numpyro_repulsion.gradients.minibatch import Reference, Subsampled
from numpyro_repulsion.gradients.target import Target, Wrapped, compiled
from numpyro_repulsion.rounding import unrounded


@dataclass(frozen=True)
class ControlVariates(Subsampled):
    r"""Minibatches with most of their noise removed: the default for models with subsampled plates.

    .. math::
        \hat g(z) = \nabla U_B(z) - \nabla U_B(\hat z) + \nabla U(\hat z)

    with the minibatch estimate :math:`U_B` of the potential energy U, and a reference point ẑ that warmup finds
    (the mean of the particles) and freezes. The estimate is unbiased for any ẑ. Its noise falls as z approaches ẑ, in
    proportion to the distance divided by the width of the *prior*, so a posterior much narrower than its prior is
    explored almost without gradient noise. To second order,

    .. math::
        \hat g(z) = \nabla U_B(z) - \nabla U_B(\hat z) + \nabla U(\hat z)
                     + \bigl(\nabla^2 U(\hat z) - \nabla^2 U_B(\hat z)\bigr) (z - \hat z)

    is unbiased too, because the Hessian is that of all rows, and its noise falls with the square of that distance; rows
    with a Gaussian likelihood of known scale leave none.

    An update costs two gradients on its minibatch, of which the one at ẑ comes with its derivative along z - ẑ for the
    second order. Warmup makes four passes over all rows, and for the Hessian one for each parameter, once, when scales
    are frozen, and before that if noise keeps particles from arriving; for an arrow one for each parameter outside of
    the large group, four times. Warmup measures the noise of
    all orders, takes the best, and reports if it is none, the plain minibatch gradient (distant modes have no common
    reference; :class:`~numpyro_repulsion.SVRG` has one for each particle). A run that continues with other data than
    its warmup recomputes what it needs at the reference. For a random likelihood (``numpyro.prng_key()``), and a site
    that uses rows of a subsampled plate from outside, scaled by hand for minibatches of one size, the default is
    :class:`~numpyro_repulsion.Subsampled`.

    In a logistic regression the errors of posterior means were :ref:`about a tenth <control-variates>` of those without
    control variates, at a step ten times longer.

    :param shared: as for :class:`~numpyro_repulsion.Subsampled`. With balanced noise and a nearly Gaussian posterior a
        shared minibatch is faster and makes means more precise: the noise common to all particles is that of their
        mean, which stays at ẑ.
    :param block_size: as for :class:`~numpyro_repulsion.Subsampled`.
    :param order: the highest order that warmup may take, 1 or 2. ``None`` is 2 if the Hessian costs little: up to
        512 parameters d and 2e10 products N d² for N rows; with more parameters, if it is an arrow: if one large group
        of effects has a block-diagonal Hessian, beside at most 1,024 other parameters.
    :raises ValueError: for another order.

    **References:**

    1. *Control Variates for Stochastic Gradient MCMC*, J. Baker, P. Fearnhead, E. B. Fox and C. Nemeth,
       https://arxiv.org/abs/1706.05439

    **Example**

    .. doctest::

        >>> from numpyro_repulsion import ControlVariates
        >>> ControlVariates()
        ControlVariates(shared=False, block_size=1, order=None)
    """

    order: int | None = field(default=None, kw_only=True)
    has_reference = True

    def __post_init__(self):
        super().__post_init__()
        if self.order not in (None, 1, 2):
            name = type(self).__name__
            raise ValueError(f"{name}: `order` must be 1, 2 or None (the better one); got {self.order!r}.")

    def hessian_units(self, target, dimension):
        """Return the units of the Hessian over all rows, which warmup computes if that is asked for or costs little.

        :raises ValueError: if it is asked for, and the model has a rule of its own for derivatives, of the first order.
        """
        rows, is_large = sum(size for size, _ in target.plates.values()), dimension > DENSE
        is_cheap = not is_large and rows * dimension**2 <= 2e10
        is_used = self.has_reference and self.order != 1 and target.plates
        if not is_used or not (self.order == 2 or is_cheap or is_large):
            return None
        if not self._has_second_derivatives(target):
            return None
        units = find_units(target, dimension) if is_large else None
        return Units(dimension) if units is None and (self.order == 2 or is_cheap) else units

    def _has_second_derivatives(self, target):
        position, unravel = ravel_pytree({name: jnp.zeros(x.shape, x.dtype) for name, x in target.prototype.items()})
        particle = jnp.concatenate((position, position, position, jnp.ones(3, position.dtype)))

        def gradient(target, particle):
            expansion = _Expansion(target, unravel)
            return jax.grad(expansion.potential_energy)(particle, target.first_rows, jax.random.key(0))

        try:
            jax.eval_shape(compiled(gradient, target), particle)
        except (TypeError, NotImplementedError) as error:
            if self.order is None:
                return False
            raise ValueError(
                f"{self!r} needs second derivatives of the log density, which this model does not have ({error}). Set "
                "order=1, or replace jax.custom_vjp by jax.custom_jvp."
            ) from error
        return True

    def energy_and_grad(self, key, target, unravel, z, reference=None):
        if reference is None or target.base is target:
            return self._corrected(key, target, unravel, z, reference)
        # Rows are nearly quadratic in centered coordinates. In others, scales of sites multiply what rows depend on, so
        # that corrections would be noise.
        (x, volume), pull = jax.vjp(jnp.vectorize(target.to_base, signature="(d)->(d),()"), z)
        energy, gradient = self._corrected(key, target.base, unravel, x, reference)
        return energy - volume, pull((gradient, -jnp.ones_like(volume)))[0]

    def _corrected(self, key, target, unravel, z, reference):
        plain = super().energy_and_grad
        if reference is None:
            return plain(key, target, unravel, z)
        offset, order = z - reference.position, reference.order
        if reference.hessian is not None:
            return self._to_second_order(key, target, unravel, z, offset, reference)

        def accumulate(i, total):
            energy, gradient = plain(key, target, unravel, jnp.where(i == 0, z, reference.position))
            sign = jnp.where(i == 0, 1.0, -1.0).astype(z.dtype)
            # The control variate of the energy is its expansion about ẑ, to first order, which matches the gradient.
            energy = energy + jnp.where(i == 0, 0.0, jnp.sum(gradient * offset, -1))
            return total[0] + sign * energy, total[1] + sign * gradient

        # A loop of one or two turns halves the compile time, and the cost while no reference is in use.
        start = (jnp.zeros(z.shape[:-1], z.dtype), jnp.zeros_like(z))
        energy, gradient = lax.fori_loop(0, 2 if order is None else 1 + jnp.minimum(order, 1), accumulate, start)
        known = reference.potential_energy + jnp.sum(reference.gradient * offset, -1)
        if order is None:
            return energy + known, gradient + reference.gradient
        is_used = order > 0
        return energy + jnp.where(is_used, known, 0.0), gradient + jnp.where(is_used, reference.gradient, 0.0)

    def _to_second_order(self, key, target, unravel, z, offset, reference):
        order, dimension = reference.order, z.shape[-1]
        curved = jnp.ones((), z.dtype) if order is None else (order > 1).astype(z.dtype)
        bend = curved * reference.hessian.times(offset)
        weights = jnp.stack([jnp.ones_like(z[..., 0])] * 2 + [jnp.broadcast_to(curved, z.shape[:-1])], -1)
        both = jnp.concatenate((z, jnp.broadcast_to(reference.position, z.shape), offset, weights), -1)
        _, found = super().energy_and_grad(key, _Expansion(target, unravel), lambda x: x, both)
        # At ẑ the gradient has the product of the Hessian with the offset in it.
        here, there = found[..., :dimension], found[..., dimension : 2 * dimension]
        energy, energy_there, along = jnp.moveaxis(found[..., -3:], -1, 0)
        on_rows = energy_there + (jnp.sum(there * offset, -1) + along) / 2.0
        on_all = reference.potential_energy + jnp.sum((reference.gradient + bend / 2.0) * offset, -1)
        corrected = energy + on_all - on_rows, here + reference.gradient + bend - there
        if order is None:
            return corrected
        return jax.tree.map(lambda new, old: jnp.where(order > 0, new, old), corrected, (energy, here))


class _Expansion(Wrapped):
    """``w₀ U(z) + w₁ U(ẑ) + τ DU(ẑ) δ`` of flat particles ``(z, ẑ, δ, w₀, w₁, τ)``.

    Its gradient has all that an expansion to second order needs: by z and ẑ those of U, the latter with the product of
    the Hessian and δ, and by the weights the three terms. Both points pass through the model together, once forward,
    once along δ and once back.
    """

    def __init__(self, target: Target, unravel: Callable):
        super().__init__(target)
        self._unravel = unravel

    def potential_energy(self, z, indices, key):
        *positions, offset = z[:-3].reshape(3, -1)
        offset = lax.stop_gradient(offset)

        def energies(x):
            return jax.vmap(lambda x: self._target.potential_energy(self._unravel(x), indices, key))(x).astype(x.dtype)

        points = jnp.stack(positions)
        found, along = jax.jvp(energies, (points,), (jnp.stack((jnp.zeros_like(offset), offset)),))
        return z[-3] * found[0] + z[-2] * found[1] + z[-1] * along[1]


@dataclass(frozen=True)
class SVRG(ControlVariates):
    r"""Stochastic variance-reduced gradients: a reference point for each particle, renewed every epoch.

    .. math::
        \hat g(z_i) = \nabla U_B(z_i) - \nabla U_B(\hat z_i) + \nabla U(\hat z_i)

    with :math:`\hat z_i` the position of particle i at the beginning of the epoch, and :math:`\nabla U(\hat z_i)` over
    all rows. It is meant for posteriors with several modes, and for networks. There no single point is near all
    particles, as :class:`~numpyro_repulsion.ControlVariates` needs it, but each particle is near its earlier position.

    *Stationary distribution.* The past determines :math:`\hat z_i`, and given the past the estimate is unbiased. D, Q
    and Γ are therefore those of the dynamics, and the stationary distribution (of each particle; with separate
    minibatches also of the ensemble) is that of exact gradients, up to the gradient noise, which widens variances by an
    amount of order ε. The variance of this noise is about that of plain minibatches times the squared distance of z
    from ẑ, divided by the squared width of the *prior*. It grows from zero within an epoch; warmup measures it in the
    middle of one.

    *Cost.* Two gradients on a minibatch for each update and particle, and a pass over all rows for each particle and
    epoch: with the default epoch, three gradients instead of one. References are used after the arrival of warmup,
    unless it finds, and reports, that they add noise; with ``num_warmup=0``, or a given ``step_size`` and no learned
    scales, from the first update. A run that continues with other data renews all at once.

    :param shared: as for :class:`~numpyro_repulsion.Subsampled`, and so is ``block_size``.
    :param epoch: the number of updates in an epoch, rounded up to whole iterations of ``num_steps``. ``None``, the
        default, is the number of minibatches in the data, N / ``subsample_size`` (with several plates the largest such
        number; for plates that meet in a site their product). Shorter epochs have less noise and cost more.
    :raises ValueError: if ``epoch`` is not an integer of 1 or more.

    **References:**

    1. *Accelerating Stochastic Gradient Descent using Predictive Variance Reduction*, R. Johnson and T. Zhang (2013)
    2. *Variance Reduction in Stochastic Gradient Langevin Dynamics*, A. Dubey, S. J. Reddi, B. Póczos, A. J. Smola,
       E. P. Xing and S. A. Williamson (2016)

    **Example**

    .. doctest::

        >>> import numpyro
        >>> import numpyro.distributions as dist
        >>> from numpyro_repulsion import SGLDR, SVRG
        >>> def two_modes(y):
        ...     theta = numpyro.sample("theta", dist.Normal(0, 1))
        ...     with numpyro.plate("rows", len(y), subsample_size=20) as i:
        ...         numpyro.sample("y", dist.Normal(theta**2, 1), obs=y[i])
        >>> kernel = SGLDR(two_modes, gradient=SVRG())
        >>> SVRG(epoch=50)
        SVRG(shared=False, block_size=1, epoch=50)
    """

    epoch: int | None = None
    order: int | None = field(default=1, init=False, repr=False)

    def __post_init__(self):
        super().__post_init__()
        if self.epoch is not None:
            keep(self, "epoch", integer, expected="None or a number of updates, an integer of 1 or more")

    def epoch_length(self, target, num_steps):
        epoch = self.epoch
        if epoch is None:
            groups = [[target.plates[name] for name in group] for group in target.crossed_plates()]
            # In integers, because rounding errors could add an update.
            counts = (-(-math.prod(n for n, _ in group) // math.prod(b for _, b in group)) for group in groups)
            epoch = max(counts, default=1)
        return num_steps * -(-int(epoch) // num_steps)


def evaluate_reference(
    key: jax.Array, target: Target, unravel: Callable, reference: Reference, size: int, with_hessian: bool = True
) -> Reference:
    """Return the reference with U and ∇U over all rows at its position, or at those of each particle.

    :param size: the number of minibatches that fit into memory at once.
    :param with_hessian: whether its Hessian is evaluated too, if it has one.
    """
    position = reference.position
    age = jax.tree.map(jnp.zeros_like, reference.age)
    if reference.hessian is not None and with_hessian:
        units = reference.hessian.units
        energy, gradient, products = full_gradient(key, target, unravel, position, size, units)
        hessian = Arrow.checked(units, products)
        return reference._replace(potential_energy=energy, gradient=gradient, age=age, hessian=hessian)
    share = max(1, size // max(1, math.prod(position.shape[:-1])))
    # All particles use one chunk at a time, so its rows are gathered once.
    evaluate = jnp.vectorize(lambda z: full_gradient(key, target, unravel, z, share), signature="(d)->(),(d)")
    energy, gradient = evaluate(position)
    return reference._replace(potential_energy=energy, gradient=gradient, age=age)


@unrounded()
def full_gradient(
    key: jax.Array,
    target: Target,
    unravel: Callable,
    position: Float[Array, " d"],
    size: int,
    units: Units | None = None,
) -> tuple[Array, ...]:
    """Return U and ∇U at one flat particle over all rows of all subsampled plates, in chunks.

    :param size: the number of minibatches that fit into memory at once.
    :param units: if given, the products of ∇²U with their probes are returned as well, ``(m, d)``.
    """

    def energy(flat, rows):
        return target.potential_energy(unravel(flat), rows, key).astype(flat.dtype)

    def evaluate(rows):
        found = jax.value_and_grad(energy)(position, rows)
        if units is None:
            return found
        # Rows are read once, and 16 directions are taken at a time, for each of which memory holds the chunk.
        _, product = jax.linearize(jax.grad(lambda flat: energy(flat, rows)), position)
        probes, most = jnp.arange(units.num_probes), min(16, units.num_probes)
        return *found, lax.map(lambda i: product(units.probe(i).astype(position.dtype)), probes, batch_size=most)

    length, *terms = chunks(target, size)
    try:
        jax.eval_shape(energy, position, {name: jnp.arange(count) for name, count in length.items()})
    except (TypeError, ValueError):
        length, *terms = chunks(target)  # A model that works for its own number of rows only.

    def accumulate(total, term):
        weight, start, count = term
        # A shorter piece repeats each of its rows equally often.
        rows = {name: start[name] + jnp.arange(length[name]) % count[name] for name in length}
        return jax.tree.map(lambda t, x: t + weight.astype(x.dtype) * x, total, evaluate(rows)), None

    nothing: tuple[Array, ...] = jnp.zeros((), position.dtype), jnp.zeros_like(position)
    if units is not None:
        nothing = *nothing, jnp.zeros((units.num_probes, len(position)), position.dtype)
    return lax.scan(accumulate, nothing, jax.tree.map(jnp.asarray, tuple(terms)))[0]


def fingerprint(target: Target, unravel: Callable, position: Float[Array, " d"]) -> Float[Array, ""]:
    """Return U at one flat particle, on rows of minibatch size spread evenly over each plate, to compare data."""
    return target.potential_energy(unravel(position), target.spread_rows(), jax.random.key(0)).astype(position.dtype)


def chunks(target: Target, size: int | None = None) -> tuple[dict[str, int], np.ndarray, dict, dict]:
    """Return chunks whose estimates of U, of c out of N rows and weighted by c / N, sum to that of all rows.

    Plates that meet in a site need all pairs of their chunks. Plates that do not meet are processed one after another,
    with the others at their first chunk, and the surplus estimates of these first chunks are subtracted.

    :param size: the size of a chunk in minibatches. ``None`` uses minibatches of exactly each plate's size.
    :return: the length of a chunk, by plate; of T terms the weights, ``(T,)``; and by plate the first rows, ``(T,)``,
        and numbers of rows. Of fewer rows than the length, all are repeated equally often.
    """
    groups = target.crossed_plates()
    length = {name: batch for name, (_, batch) in target.plates.items()}
    for group in groups if size is not None else ():
        # For plates that meet in a site, memory holds the product of their rows.
        rows = float(size or 1) * np.prod([target.plates[name][1] for name in group])
        share = max(1, round(rows ** (1 / len(group))))
        for name in group:
            # A power of two leaves few pieces over.
            length[name] = 1 << (min(target.plates[name][0], share).bit_length() - 1)
    first = {name: (0, length[name]) for name in length}
    terms = []
    for group in groups:
        pieces = ([(name, piece) for piece in _pieces(target.plates[name][0], length[name])] for name in group)
        for combination in itertools.product(*pieces):
            fraction = math.prod(count / target.plates[name][0] for name, (_, count) in combination)
            terms.append((fraction, first | dict(combination)))
    if len(groups) > 1:
        terms.append((1.0 - len(groups), first))
    start, count = ({name: np.array([at[name][k] for _, at in terms], np.int32) for name in first} for k in (0, 1))
    return length, np.array([weight for weight, _ in terms]), start, count


def _pieces(total: int, length: int) -> list[tuple[int, int]]:
    """Return ``(start, count)`` of the pieces of a plate: whole chunks, and the rest in pieces that divide a chunk.

    Each piece, repeated, fills a chunk exactly, so one compiled program serves all.
    """
    divisors = [count for count in range(length, 0, -1) if length % count == 0]
    pieces, start = [], 0
    while start < total:
        count = next(count for count in divisors if count <= total - start)
        pieces.append((start, count))
        start += count
    return pieces
