"""Arrow-shaped symmetric matrices: Hessians of models whose many effects are independent given all other parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
import math
from typing import Any

import jax
from jax import lax, random
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer
import numpy as np

from numpyro_repulsion.gradients.target import Target, compiled, quickly
from numpyro_repulsion.rounding import AnyArray, matmul, namespace, solve_rows, xp

#: Beyond so many parameters, a Hessian must be an arrow to be computed and used.
DENSE = 512
#: Smaller groups are not worth a program of their own.
MIN_UNITS = 100
#: An arrow, or its probes at once, have at most so many numbers.
MOST_NUMBERS = 1 << 25
#: Products with other signs differ by less, relative to the diagonal: by nothing, but for rounding.
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Units:
    """Which entries of a flat particle belong to the n units of an arrow; the others are its globals.

    - **dimension** - d, the number of entries of a particle.
    - **sites** - of each site of units where it begins, its shape, and which axis counts the units. Each site has one
      or more entries for each unit, k in all. Without sites, all entries are globals and a matrix is dense.
    """

    dimension: int
    sites: tuple[tuple[int, tuple[int, ...], int], ...] = ()

    @property
    def number(self) -> int:
        """n"""
        return self.sites[0][1][self.sites[0][2]] if self.sites else 0

    @property
    def size(self) -> int:
        """k"""
        return sum(math.prod(shape) for _, shape, _ in self.sites) // max(self.number, 1)

    @property
    def num_globals(self) -> int:
        """The number g of entries outside of the units."""
        return self.dimension - self.number * self.size

    def split(self, x: Float[AnyArray, "*particles d"]) -> tuple[Float[AnyArray, "*particles g"], AnyArray]:
        """Return the globals ``(..., g)`` and the units ``(..., n, k)`` of flat particles."""
        if not self.sites:
            return x, x[..., :0, None][..., :0]
        parts, rest, end = [], [], 0
        for start, shape, axis in sorted(self.sites):
            rest.append(x[..., end:start])
            end = start + math.prod(shape)
            site = x[..., start:end].reshape(*x.shape[:-1], *shape)
            parts.append(xp.moveaxis(site, x.ndim - 1 + axis, x.ndim - 1).reshape(*x.shape[:-1], self.number, -1))
        return _joined([*rest, x[..., end:]]), _joined(parts)

    def join(self, rest: Float[AnyArray, "*particles g"], units: AnyArray) -> Float[AnyArray, "*particles d"]:
        """Return flat particles with these globals and units."""
        if not self.sites:
            return rest
        lead, parts, at, end, column = rest.shape[:-1], [], 0, 0, 0
        for start, shape, axis in sorted(self.sites):
            parts.append(rest[..., at : at + start - end])
            at, end = at + start - end, start + math.prod(shape)
            width = (end - start) // self.number
            others = tuple(length for place, length in enumerate(shape) if place != axis)
            site = units[..., column : column + width].reshape(*lead, self.number, *others)
            parts.append(xp.moveaxis(site, len(lead), len(lead) + axis).reshape(*lead, -1))
            column += width
        return _joined([*parts, rest[..., at:]])

    @property
    def num_signs(self) -> int:
        """The number s of sets of signs: 1 for all units, and then, so that any two differ, by each binary digit."""
        return 1 + max(self.number - 1, 0).bit_length()

    @property
    def num_probes(self) -> int:
        """The number of directions whose products determine an arrow, and tell other matrices."""
        return self.num_globals + self.num_signs * self.size

    def signs(self, which: Integer[AnyArray, ""] | int) -> Integer[AnyArray, " n"]:
        """Return 1 or -1 for each unit, of one of the sets."""
        units = namespace(which)
        return 1 - 2 * ((which > 0) & (units.arange(self.number) >> units.maximum(which - 1, 0)) & 1)

    def probe(self, i: Integer[AnyArray, ""] | int) -> Float[AnyArray, " d"]:
        """Return one direction: of the globals one by one, then of one entry of each unit, with each set of signs."""
        g, k, numbers = self.num_globals, max(self.size, 1), namespace(i).arange
        is_entry = (numbers(self.size) == (i - g) % k) & (i >= g)
        return self.join(1.0 * (numbers(g) == i), 1.0 * self.signs((i - g) // k)[:, None] * is_entry)

    def probes(self, start: int = 0) -> np.ndarray:
        """Return all directions ``(g + s k, d)`` from one of them on."""
        return np.stack([self.probe(i) for i in range(start, self.num_probes)])

    def disagreement(self, products: Float[AnyArray, "m d"]) -> Float[AnyArray, ""]:
        """Return the largest difference between blocks by products ``(s k, d)`` of the units, relative to them."""
        found = self.split(products)[1].reshape(-1, self.size, self.number, self.size)
        found = found * np.stack([self.signs(which) for which in range(self.num_signs)])[:, None, :, None]
        size = xp.maximum(xp.abs(found).max((0, 1), keepdims=True), 1e-6)
        gap = xp.abs(found - found[:1]) / size
        return xp.where(xp.isfinite(gap), gap, np.inf).max()


@partial(jax.tree_util.register_dataclass, data_fields=("rest", "cross", "blocks"), meta_fields=("units",))
@dataclass(frozen=True)
class Arrow:
    r"""A symmetric matrix ``[[A, B], [Bᵀ, D]]`` with D block diagonal: n blocks of ``(k, k)``, one for each unit.

    - **rest** - A, ``(g, g)``.
    - **cross** - Bᵀ, ``(n, k, g)``.
    - **blocks** - those of D, ``(n, k, k)``.
    - **units** - which entries belong to the units.
    """

    # JAX puts shapes and other leaves in their place.
    rest: Any
    cross: Any
    blocks: Any
    units: Units

    @staticmethod
    def zeros(units: Units, dtype: Any) -> Arrow:
        """Return the matrix of zeros."""
        g, n, k = units.num_globals, units.number, units.size
        return Arrow(jnp.zeros((g, g), dtype), jnp.zeros((n, k, g), dtype), jnp.zeros((n, k, k), dtype), units)

    @staticmethod
    def checked(units: Units, products: Float[AnyArray, "m d"]) -> Arrow:
        """Return the arrow with these products with all probes; NaN if the matrix is not an arrow."""
        found = Arrow.of_products(units, products)
        if not units.sites:
            return found
        is_arrow = units.disagreement(products[units.num_globals :]) < TOLERANCE
        return jax.tree.map(lambda x: xp.where(is_arrow, x, np.nan), found)

    @staticmethod
    def of_products(units: Units, products: Float[AnyArray, "m d"]) -> Arrow:
        """Return the arrow with these products with the first g + k probes, which determine it, or all."""
        g, k = units.num_globals, units.size
        rest, cross = units.split(products[:g])
        _, blocks = units.split(products[g : g + k])
        rest, blocks = (rest + rest.T) / 2, xp.moveaxis(blocks, 0, -1)
        return Arrow(rest, xp.moveaxis(cross, 0, -1), (blocks + xp.swapaxes(blocks, 1, 2)) / 2, units)

    @property
    def is_known(self) -> bool:
        """Whether it was evaluated, and is finite: zeros stand for a matrix that is not known."""
        return bool(np.isfinite(self.rest).all() and np.any(self.rest))

    def times(self, x: Float[AnyArray, "*particles d"]) -> Float[AnyArray, "*particles d"]:
        """Return the products with particles ``(..., d)``."""
        if not self.units.sites:
            return matmul(x, self.rest)
        rest, own = self.units.split(x)
        cross = self.cross.reshape(-1, self.cross.shape[-1])
        flat = own.reshape(*own.shape[:-2], -1)
        return self.units.join(
            matmul(rest, self.rest) + matmul(flat, cross),
            matmul(rest, cross.T).reshape(own.shape) + _by_unit(self.blocks, own),
        )

    def scaled(self, scale: Float[AnyArray, " d"]) -> Arrow:
        """Return ``S H S`` for a diagonal S, ``(d,)``."""
        rest, own = self.units.split(scale)
        cross, blocks = self.cross * own[..., None] * rest, self.blocks * own[..., None] * own[:, None]
        return Arrow(self.rest * rest[:, None] * rest, cross, blocks, self.units)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("rest", "cross", "blocks", "inverses", "variances"),
    meta_fields=("units",),
)
@dataclass(frozen=True)
class ArrowRoot:
    r"""S with ``S Sᵀ = H⁻¹`` for an arrow H, which has the same shape: units follow the globals.

    .. math::
        x_g = C u_g, \qquad x_l = L u_l - W x_g, \qquad L L^\top = D^{-1},\quad W = D^{-1} B^\top,\quad
        C C^\top = (A - B W)^{-1}

    - **rest** - C, lower triangular, ``(g, g)``.
    - **cross** - W, ``(n, k, g)``.
    - **blocks** - those of L, lower triangular, ``(n, k, k)``.
    - **inverses** - those of the blocks, ``(n, k, k)``.
    - **variances** - the diagonal of ``S Sᵀ``, ``(d,)``, whose computation costs more than an update.
    - **units** - which entries belong to the units.
    """

    rest: Any
    cross: Any
    blocks: Any
    inverses: Any
    variances: Any
    units: Units

    @staticmethod
    def identity(units: Units, dtype: Any) -> ArrowRoot:
        """Return the identity."""
        zero = Arrow.zeros(units, dtype)
        g, k = units.num_globals, units.size
        blocks, ones = zero.blocks + jnp.eye(k, dtype=dtype), jnp.ones(units.dimension, dtype)
        return ArrowRoot(jnp.eye(g, dtype=dtype), zero.cross, blocks, blocks, ones, units)

    @staticmethod
    def of(curvature: Arrow, root: Callable[[np.ndarray], np.ndarray]) -> ArrowRoot:
        """Return the root of the inverse of a curvature, on the host and in double precision.

        :param root: returns S, lower triangular, with ``S Sᵀ`` the inverse of a matrix made positive.
        """
        rest, cross, blocks = (np.asarray(x, np.float64) for x in (curvature.rest, curvature.cross, curvature.blocks))
        if blocks.shape[-1] == 1:
            own = np.where(blocks == 0, 1.0, np.abs(blocks)) ** -0.5
        else:
            own = np.stack([root(block) for block in blocks])
        across = matmul(own, matmul(np.swapaxes(own, 1, 2), cross))
        schur = rest - matmul(cross.reshape(-1, len(rest)).T, across.reshape(-1, len(rest)))
        return ArrowRoot._with_variances(root(schur), across, own, curvature.units)

    @staticmethod
    def _with_variances(rest, cross, blocks, units):
        across = matmul(cross.reshape(-1, len(rest)), rest)
        own = (blocks**2).sum(-1) + (across**2).sum(-1).reshape(cross.shape[:2])
        return ArrowRoot(rest, cross, blocks, np.linalg.inv(blocks), units.join((rest**2).sum(-1), own), units)

    def scaled(self, factor: Float[np.ndarray, " d"]) -> ArrowRoot:
        """Return S times a diagonal, ``(d,)``."""
        rest, own = self.units.split(factor)
        return ArrowRoot._with_variances(self.rest * rest, self.cross, self.blocks * own[:, None], self.units)

    def times(self, u: Float[AnyArray, "*particles d"]) -> Float[AnyArray, "*particles d"]:
        """Return ``S u``."""
        rest, own = self.units.split(u)
        rest = matmul(rest, self.rest.T)
        return self.units.join(rest, _by_unit(self.blocks, own) - self._across(rest, own))

    def solve(self, x: Float[AnyArray, "*particles d"]) -> Float[AnyArray, "*particles d"]:
        """Return ``S⁻¹ x``."""
        rest, own = self.units.split(x)
        own = _by_unit(self.inverses, own + self._across(rest, own))
        return self.units.join(solve_rows(self.rest, rest), own)

    def transposed_times(self, gradient: Float[AnyArray, "*particles d"]) -> Float[AnyArray, "*particles d"]:
        """Return ``Sᵀ ∇``."""
        rest, own = self.units.split(gradient)
        rest = matmul(rest - self._back(own), self.rest)
        return self.units.join(rest, _by_unit(xp.swapaxes(self.blocks, 1, 2), own))

    def transposed_solve(self, gradient: Float[AnyArray, "*particles d"]) -> Float[AnyArray, "*particles d"]:
        """Return ``S⁻ᵀ ∇``."""
        rest, own = self.units.split(gradient)
        own = _by_unit(xp.swapaxes(self.inverses, 1, 2), own)
        return self.units.join(solve_rows(self.rest, rest, transposed=True) + self._back(own), own)

    def _across(self, rest, own):
        return matmul(rest, self.cross.reshape(-1, self.cross.shape[-1]).T).reshape(own.shape)

    def _back(self, own):
        return matmul(own.reshape(*own.shape[:-2], -1), self.cross.reshape(-1, self.cross.shape[-1]))


def _joined(parts):
    return namespace(*parts).concatenate(parts, -1)


def _by_unit(blocks, x):
    """Return the products of blocks ``(n, k, k)`` with the units ``(..., n, k)``."""
    # Of two terms or so each. Of a reduction and the matrix product added to it XLA makes one kernel, which is wrong
    # in jaxlib 0.10.2.
    return sum(blocks[..., j] * x[..., j, None] for j in range(blocks.shape[-1]))


def find_units(target: Target, dimension: int) -> Units | None:
    """Return the units of the Hessian of a model with subsampled plates, if it is an arrow; by products on some rows.

    If entries have a diagonal block, products with signs return this diagonal whatever the signs: what is beside it is
    exactly zero, because no row and no prior contains two units. Sites with an axis of the same length may be units
    together, and are tried one after another, the largest first.
    """
    is_traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((target.args, target.kwargs)))
    if is_traced or 64 * dimension > MOST_NUMBERS:
        return None
    shapes = {name: tuple(target.prototype[name].shape) for name in sorted(target.prototype)}
    ends = np.cumsum([math.prod(shape) for shape in shapes.values()])
    families: dict[int, list] = {}
    for end, shape in zip(ends, shapes.values(), strict=True):
        for length in set(shape):
            families.setdefault(length, []).append((int(end) - math.prod(shape), shape, shape.index(length)))
    quick, product, found = None, None, []
    for length, family in sorted(families.items(), reverse=True):
        # The smallest share of the entries that units can have, and still be worth it.
        if length < MIN_UNITS or 2 * sum(math.prod(shape) for _, shape, _ in family) < dimension:
            continue
        # A minibatch refuses most, as of networks, whose rows cost much.
        quick, product = quick or _sample_products(target, 1), product or _sample_products(target, 20_000)
        units = Units(dimension)
        for site in sorted(family, key=lambda site: -math.prod(site[1])):
            trial = Units(dimension, tuple(sorted((*units.sites, site))))
            if trial.size > 16 or _is_refused(trial, quick):
                continue
            if trial.disagreement(product(trial.probes(trial.num_globals))) < TOLERANCE:
                units = trial
        found.append(units)
    # The largest number of globals that is affordable, and by the number of rows for each probe. Effects without any
    # other parameter are independent, and need no arrow.
    most = min(1024, dimension // 2, MOST_NUMBERS // dimension)
    num_probes = 2e8 / max(1, sum(size for size, _ in target.plates.values()))
    affordable = (x for x in found if 0 < x.num_globals <= most and x.num_globals + x.size <= num_probes)
    return min(affordable, key=lambda x: x.num_globals, default=None)


def _is_refused(units, product):
    """Return whether two products tell that blocks are not all there is."""
    found = units.split(product(np.stack([units.probe(units.num_globals + i) for i in (0, units.size)])))[1]
    first, second = (x * units.signs(which)[:, None] for which, x in enumerate(found))
    return not np.all(np.abs(first - second) <= TOLERANCE * np.maximum(np.abs(first) + np.abs(second), 1e-6))


def _sample_products(target, number):
    """Return the function for products ``(m, d)`` of the Hessian near the origin on so many rows or a minibatch."""
    flat, unravel = ravel_pytree({name: jnp.zeros(x.shape, x.dtype) for name, x in target.prototype.items()})
    position = 0.1 * random.normal(random.key(0), flat.shape, flat.dtype)

    def products(target: Target, rows: dict, directions: Array) -> Array:
        def energy(z):
            return target.potential_energy(unravel(z), rows, random.key(0)).astype(z.dtype)

        return lax.map(lambda v: jax.jvp(jax.grad(energy), (position,), (v,))[1], directions)

    rows = target.spread_rows({name: min(size, max(batch, number)) for name, (size, batch) in target.plates.items()})
    run = compiled(products, target, quickly())

    def evaluate(directions):
        # One program for directions of similar numbers.
        padded = np.zeros((1 << (len(directions) - 1).bit_length(), len(flat)), flat.dtype)
        padded[: len(directions)] = directions
        return np.asarray(run(rows, jnp.asarray(padded)))[: len(directions)]

    return evaluate
