"""The likelihood of a model: its potential energy without the priors of some sites."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
from jax import lax, random
import jax.numpy as jnp
import numpy as np

from numpyro.infer.util import potential_energy
from numpyro.primitives import Messenger

from numpyro_repulsion.gradients.structure import any_number_of_rows
from numpyro_repulsion.gradients.target import Indices, Particle, SitesTarget, Target
from numpyro_repulsion.rounding import unrounded

__all__ = ["likelihood_energies", "likelihood_gradients"]


class _Weighted(Messenger):
    """Multiply the log densities of some sites, and the volumes of their transforms, by weights."""

    def __init__(self, fn: Callable, weights: dict[str, jax.Array]):
        super().__init__(fn)
        self._weights = weights | {f"_{name}_log_det": weight for name, weight in weights.items()}

    def process_message(self, msg):
        if msg["type"] == "sample" and (weight := self._weights.get(msg["name"])) is not None:
            msg["scale"] = weight if msg["scale"] is None else weight * msg["scale"]


@unrounded()
def _weighted_energy(target, z, rows, weights):
    model = _Weighted(target.bind(rows, random.key(0)), weights)
    with any_number_of_rows():
        return potential_energy(model, target.args, target.kwargs, z)


def likelihood_energies(target: Target, particles: Particle, rows: Indices) -> jax.Array:
    """Return U without the priors, estimated from some rows, at particles with leaves ``(n, ...)``; ``(n,)``.

    If discrete sites are summed out, the priors count too.

    :param rows: minibatches of each plate, ``(m, B)``, that are evaluated one after another.
    """

    def energy(z, rows):
        if not isinstance(target, SitesTarget) or target.discrete:
            return target.potential_energy(z, rows, random.key(0))
        return _weighted_energy(target, z, rows, dict.fromkeys(target.latent, jnp.zeros(())))

    def total(sums, rows):
        return sums + jax.vmap(energy, (0, None))(particles, rows), None

    (number,) = {len(found) for found in rows.values()}
    count = len(jax.tree.leaves(particles)[0])
    first = jnp.zeros(count, jnp.result_type(float))
    return lax.scan(total, first, rows)[0] / number


@unrounded()
def likelihood_gradients(target: SitesTarget, particles: Particle, without: Sequence[set[str]]) -> list[Particle]:
    """Return the gradients of U without the priors of some sites, at particles with leaves ``(n, ...)``.

    :param target: the posterior of a model. Minibatches consist of rows at equal distances.
    :param without: sets of latent sites. For each, the result has the gradients without their priors.
    """
    rows = {name: jnp.arange(batch) * (size // batch) for name, (size, batch) in target.plates.items()}
    names = sorted(target.latent)
    weights = jnp.asarray(np.array([[float(name not in left_out) for name in names] for left_out in without]))

    def energy(z, weights):
        return _weighted_energy(target, z, rows, dict(zip(names, weights, strict=True)))

    at_particles = jax.vmap(jax.grad(energy), (0, None))
    found = jax.vmap(at_particles, (None, 0))(particles, weights)
    return [{name: leaf[i] for name, leaf in found.items()} for i in range(len(without))]
