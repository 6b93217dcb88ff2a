"""Whether log densities and their gradients are finite numbers, over all rows, and where they are not, in words."""

from __future__ import annotations

from collections.abc import Callable
import math

import jax
from jax import lax, random
import jax.numpy as jnp
import numpy as np

from numpyro.infer import init_to_sample, init_to_uniform

from numpyro_repulsion.gradients.bounds import places
from numpyro_repulsion.gradients.posterior import ModelTarget
from numpyro_repulsion.gradients.target import Particle, Target, compiled, quickly

__all__ = ["is_finite_on_all_rows", "sites_not_finite"]

#: By plate: first rows of minibatches, and the steps from one row to the next.
Chosen = dict[str, tuple[np.ndarray, np.ndarray]]

#: Minibatches that are looked at together, and at most: of more pairs of plates that meet, all rows without all pairs.
TOGETHER, MAX_MINIBATCHES = 20, 1 << 20
#: Rows that are looked at one by one, and those of them that are looked at with further draws, of each kind so many.
MAX_ROWS, MAX_DOUBTFUL, NUM_DRAWS = 10_000, 200, 50


def is_finite_on_all_rows(target: Target, z: Particle) -> bool:
    """Whether U and ∇U are finite at a particle for minibatches that cover all rows; true where that is unknown."""
    starts = _minibatches(target)
    count = len(next(iter(starts.values()), ()))
    # In whole groups, so that one program serves all.
    starts = {name: np.resize(x, (-(-count // TOGETHER), min(count, TOGETHER))) for name, x in starts.items()}

    def look(target, z, starts):
        def each(first):
            rows = {name: start + jnp.arange(target.plates[name][1]) for name, start in first.items()}
            # U alone would not do: to NumPyro's Bernoulli distribution a NaN among its logits is a likelihood of 1.
            return _is_finite(lambda z: target.potential_energy(z, rows, random.key(0)), z)

        return lax.map(jax.vmap(each), starts).all() if starts else each({})

    with jax.debug_nans(False):
        found = compiled(look, target, quickly())(z, starts)
    return isinstance(found, jax.core.Tracer) or bool(found)


def sites_not_finite(target: Target, z: Particle, *, doubtful: bool = False) -> list[str]:
    """Return, in words, the sites whose log density, or its gradient, is finite at none of some particles, and where.

    :param z: the particles, each leaf with a leading axis of them.
    :param doubtful: whether to leave out rows with finite densities at draws from the prior or around zero: there the
        particles have had bad luck.
    """
    if not isinstance(target, ModelTarget):
        return []
    found = []
    with jax.debug_nans(False):
        # Sums over discrete sites have no parts.
        names = (
            {name: target.plates_of(name) for name in target.events} if not target.discrete else {"": [*target.plates]}
        )
        for name, plates in names.items():
            if plates and (rows := _rows_not_finite(target, name, plates, z, doubtful)):
                found.append(f"'{name}' ({rows})" if name else rows)
        if target.discrete or found or doubtful:
            return found
        densities = compiled(lambda target, z: jax.vmap(target.log_densities)(z), target, quickly())(z)
        for name, value in densities.items():
            if (bad := ~np.isfinite(np.asarray(value)).any(0)).any():
                where = "" if names[name] else places(bad, target.dims[name], {}, target.plate_sizes)
                found.append(f"'{name}'" + (f" ({where})" if where else ""))
    return found


def _is_finite(function: Callable, z: Particle) -> jax.Array:
    """Return whether a function and its gradient are finite."""
    value, gradient = jax.value_and_grad(function)(z)
    return jnp.isfinite(value) & jnp.stack([jnp.isfinite(x).all() for x in jax.tree.leaves(gradient)]).all()


def _minibatches(target: Target) -> dict[str, np.ndarray]:
    """Return by plate the first rows of minibatches, ``(T,)``, that cover all rows, and all pairs of plates that meet.

    All plates go on together, and begin again where they are shorter.
    """
    found: dict = {}
    for group in target.crossed_plates() if target.plates else ():
        first = [np.minimum(np.arange(0, n, batch), n - batch) for n, batch in (target.plates[name] for name in group)]
        if math.prod(map(len, first)) <= MAX_MINIBATCHES:
            first = [x.ravel() for x in np.meshgrid(*first, indexing="ij")]
        found |= dict(zip(group, first, strict=True))
    count = max(map(len, found.values()), default=0)
    return {name: np.resize(x, count).astype(np.int32) for name, x in found.items()}


def _rows_not_finite(target: ModelTarget, name: str, plates: list[str], z: Particle, doubtful: bool) -> str:
    """Return, in words, the rows of a site with which its log density or the gradient is not finite at any particle."""

    def density(target, z, rows):
        # With a name of no site, of all.
        return jnp.sum(target.log_densities(z, rows)[name]) if name else target.potential_energy(z, rows, random.key(0))

    def look(target, z, chosen):
        def each(chosen):
            rows = {
                plate: first + step * jnp.arange(target.plates[plate][1]) for plate, (first, step) in chosen.items()
            }
            rows = {**target.first_rows, **rows}
            return ~jax.vmap(lambda z: _is_finite(lambda z: density(target, z, rows), z))(z).any()

        return lax.map(each, chosen)

    is_bad = compiled(look, target, quickly())

    def bad(chosen: Chosen, z: Particle = z, limit: int = MAX_DOUBTFUL) -> Chosen:
        marked = np.flatnonzero(np.asarray(is_bad(z, jax.tree.map(jnp.asarray, chosen))))[:limit]
        return {plate: (first[marked], step[marked]) for plate, (first, step) in chosen.items()}

    starts = _minibatches(target)
    limit = max(TOGETHER, MAX_ROWS // max(target.plates[plate][1] for plate in plates))
    chosen = bad({plate: (starts[plate], np.ones_like(starts[plate])) for plate in plates}, limit=limit)
    named: list[str] = []
    for plate in plates:
        batch = target.plates[plate][1]
        # Each row alone, as often as a minibatch has rows.
        alone = {name: (np.repeat(first, batch), np.repeat(step, batch)) for name, (first, step) in chosen.items()}
        rows = (alone[plate][0].reshape(-1, batch) + np.arange(batch, dtype=np.int32)).ravel()
        alone[plate] = rows, np.zeros_like(rows)
        if not len(rows):
            return ""
        found = bad(alone, limit=MAX_ROWS)
        # With all rows of one plate, it is those of another.
        if len(found[plate][0]) < len(rows) or (plate == plates[-1] and not named):
            chosen, named = found, [*named, plate]
    if doubtful:
        few = {name: (first[:MAX_DOUBTFUL], step[:MAX_DOUBTFUL]) for name, (first, step) in chosen.items()}
        chosen = bad(few, _draws(target))
    numbers = {plate: np.unique(chosen[plate][0]) for plate in named}
    marks = {plate: np.ones(len(numbers[plate]), bool) for plate in named}
    parts = (places(marks[plate], {plate: -1}, numbers, target.plate_sizes) for plate in named if len(numbers[plate]))
    return " and ".join(parts)


def _draws(target: ModelTarget) -> Particle:
    """Return draws from the prior, and around zero."""

    def draw(target, key):
        return [jax.vmap(lambda key, by=by: target.draw(key, by))(key) for by in (init_to_sample, init_to_uniform)]

    both = compiled(draw, target, quickly())(random.split(random.key(0), NUM_DRAWS))
    return jax.tree.map(lambda *x: jnp.concatenate(x), *both)
