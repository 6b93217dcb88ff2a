"""Products of effects and their scale, as in models that are written in non-centred form by hand."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax
from jax import random
import jax.numpy as jnp
import numpy as np

from numpyro.distributions import biject_to, constraints
from numpyro.distributions.transforms import ExpTransform, IndependentTransform

from numpyro_repulsion.gradients.bounds import CALLS
from numpyro_repulsion.gradients.target import Particle, SitesTarget
from numpyro_repulsion.rounding import matmul

__all__ = ["Products", "base_support", "multiplied"]

#: Scales may enter as standard deviations, variances or precisions, so powers are multiples of 1/2 up to this.
MAX_POWER = 1.0
#: The largest part of a gradient that a power may leave unexplained, to allow for rounding.
MAX_RESIDUAL = 0.02
#: Operations whose result is linear in their first argument, whatever the others.
_LINEAR = """
    broadcast_in_dim convert_element_type copy dynamic_slice expand_dims gather neg reduce_sum reshape slice squeeze
    transpose
"""


class _Use(NamedTuple):
    """How an array uses the sites of a model: in which it is linear, and on which it depends."""

    linear: frozenset = frozenset()
    causes: frozenset = frozenset()


class Products:
    """Products of latent effects z and scales s in a model, as in non-centred models written by hand.

    A model may be written with ``x = s z`` and a prior of z that does not depend on s. Where the likelihood depends on
    z and s through x alone, it satisfies ``∂L/∂log s = z·∂L/∂z``, and likewise with ``p z`` for ``x = s^p z``. So
    p can be estimated from gradients at some particles; it is 0 where the model has no such product. As x is then
    centred by a share c, its coordinate is ``y = s^c z``. This is a change of variables for any p, so the posterior
    never depends on it.

    :param target: the posterior of the model.
    :param sites: its sites.
    :param others: sites that are in coordinates of their own already.
    """

    def __init__(self, target: SitesTarget, sites: Mapping[str, dict], others: Collection[str]):
        shapes = {name: site.shape for name, site in target.prototype.items()}
        self._logarithms = {
            name: logarithm
            for name in target.latent
            if name not in others and (logarithm := _logarithm(sites[name]["fn"].support, shapes[name])) is not None
        }
        effects = {
            name
            for name in set(target.latent) - set(others)
            if base_support(sites[name]["fn"].support) is constraints.real and sites[name]["scale"] is None
        }
        found = set()
        if effects and self._logarithms and not target.discrete:
            found = multiplied(lambda z: target.potential_energy(z, target.first_rows, random.key(0)), target.prototype)
        pairs = [
            (effect, scale)
            for effect, scale in sorted(found)
            if effect in effects and scale in self._logarithms and _fits(shapes[scale], shapes[effect])
        ]
        # An effect of one product that is the scale of another would be in coordinates that depend on each other.
        scaled = {effect for effect, _ in pairs}
        #: (effect, scale), by name; a power belongs to each.
        self.pairs = [(effect, scale) for effect, scale in pairs if scale not in scaled]

    def log_scales(self, z: Particle, powers: jax.Array) -> dict[str, jax.Array]:
        """Return the logarithm of the scale of each effect, of its shape, at a particle with these powers."""
        found: dict = {}
        for (effect, scale), power in zip(self.pairs, powers, strict=True):
            part = power * self._logarithms[scale](z[scale])
            found[effect] = jnp.broadcast_to(part + found.get(effect, 0.0), z[effect].shape)
        return found

    @property
    def sites(self) -> set[str]:
        """The names of all effects and scales of products."""
        return {name for pair in self.pairs for name in pair}

    def powers(self, particles: Particle, gradients: Particle) -> jax.Array:
        """Return the power of each pair.

        :param particles: some particles, with leaves ``(n, ...)``.
        :param gradients: ∇U without the priors of `sites` there.
        """
        found = [jnp.zeros(())] * len(self.pairs)
        for scale in dict.fromkeys(scale for _, scale in self.pairs):
            numbers = [i for i, pair in enumerate(self.pairs) if pair[1] == scale]
            u, slope = particles[scale], gradients[scale]
            speed = jax.vmap(jax.grad(lambda u, log=self._logarithms[scale]: log(u).sum()))(u)
            columns = []
            for i in numbers:
                effect = self.pairs[i][0]
                product = particles[effect] * gradients[effect]
                columns.append(jax.vmap(lambda x, like: _summed_to(x, like))(product, u).ravel())
            for i, power in zip(numbers, _fitted(jnp.stack(columns, 1), (slope / speed).ravel()), strict=True):
                found[i] = power
        return jnp.stack(found)


def multiplied(function: Callable, argument: Mapping[str, Any]) -> set[tuple[str, str]]:
    """Return the pairs (z, s) such that a program multiplies or divides a term linear in z by one in s.

    It reads the jaxpr equation by equation, without running it.
    """
    pairs: set = set()
    program = jax.make_jaxpr(lambda leaves: function(dict(zip(argument, leaves, strict=True))))(list(argument.values()))
    _walk(program, [_Use(frozenset([name]), frozenset([name])) for name in argument], pairs)
    return pairs


def _walk(program, inputs, pairs):
    """Return how the results of a jaxpr use the sites, and add the pairs that it multiplies."""
    jaxpr = getattr(program, "jaxpr", program)
    uses = dict.fromkeys(jaxpr.constvars, _Use()) | dict(zip(jaxpr.invars, inputs, strict=True))

    def look(variable):
        return _Use() if hasattr(variable, "val") else uses[variable]

    for equation in jaxpr.eqns:
        given = [look(variable) for variable in equation.invars]
        uses.update(zip(equation.outvars, _results(equation, given, pairs), strict=True))
    return [look(variable) for variable in jaxpr.outvars]


def _results(equation, given, pairs):
    name, params = equation.primitive.name, equation.params
    program = next((params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if key in params), None)
    fits = program is not None and len(getattr(program, "jaxpr", program).invars) == len(given)
    if name in CALLS and fits:
        return _walk(program, given, pairs)
    causes = frozenset().union(*(use.causes for use in given))
    if name == "scan" and fits:
        # What a loop carries may depend on all that enters it.
        first = params.get("num_consts", 0)
        carried = range(first, first + params.get("num_carry", 0))
        _walk(program, [_Use(causes=causes) if i in carried else use for i, use in enumerate(given)], pairs)
    linear: frozenset = frozenset()
    if name in ("mul", "dot_general"):
        one, other = given
        pairs |= {(z, s) for a, b in ((one, other), (other, one)) for z in a.linear - b.causes for s in b.causes}
        linear = (one.linear - other.causes) | (other.linear - one.causes)
    elif name == "div":
        one, other = given
        pairs |= {(z, s) for z in one.linear - other.causes for s in other.causes}
        linear = one.linear - other.causes
    elif name in ("add", "add_any", "sub", "concatenate"):
        linear = frozenset.intersection(*(use.linear for use in given))
    elif name in _LINEAR.split():
        linear = given[0].linear.difference(*(use.causes for use in given[1:]))
    return [_Use(linear, causes)] * len(equation.outvars)


def _fitted(columns, target):
    """Return the powers by which the columns, ``(n, p)``, explain the target, ``(n,)``; 0 if they do not."""
    lengths = jnp.linalg.norm(columns, axis=0)
    lengths = jnp.where(lengths > 0, lengths, 1.0)
    unit = columns / lengths
    power = matmul(unit.T, target)
    if unit.shape[1] > 1:
        power = jnp.linalg.solve(matmul(unit.T, unit) + 1e-6 * jnp.eye(unit.shape[1], dtype=unit.dtype), power)
    power = jnp.round(2.0 * power / lengths) / 2.0
    error = jnp.linalg.norm(target - matmul(columns, power))
    usable = (error <= MAX_RESIDUAL * jnp.linalg.norm(target)) & (jnp.linalg.norm(target) > 0)
    return jnp.where(usable & (jnp.abs(power) <= MAX_POWER), power, 0.0)


def _summed_to(x, like):
    """Return the sums of x over the axes along which ``like`` would be repeated to its shape."""
    extra = x.ndim - like.ndim
    x = x.sum(tuple(range(extra)))
    repeated = tuple(axis for axis, size in enumerate(like.shape) if size == 1 != x.shape[axis])
    return x.sum(repeated, keepdims=True)


def _fits(small, large):
    """Whether an array of the small shape can be repeated to the large shape."""
    padded = (1,) * (len(large) - len(small)) + small
    return len(small) <= len(large) and all(a in (1, b) for a, b in zip(padded, large, strict=True))


def base_support(support: Any) -> Any:
    """Return the support of one number."""
    while isinstance(support, constraints.independent):
        support = support.base_constraint
    return support


def _logarithm(support, shape):
    """Return the function from unconstrained values to logarithms of positive ones; ``None`` for a site without these.

    A single real number may be a logarithm itself.
    """
    if (base := base_support(support)) is constraints.real:
        return (lambda u: u) if np.prod(shape) == 1 else None
    # A bound may depend on other sites, and the transform with it.
    bounds = [getattr(base, name, default) for name, default in (("lower_bound", -1.0), ("upper_bound", 1.0))]
    if any(isinstance(bound, jax.core.Tracer) for bound in bounds) or not np.all(np.asarray(bounds[0]) >= 0.0):
        return None
    transform = biject_to(support)
    inner = transform.base_transform if isinstance(transform, IndependentTransform) else transform
    return (lambda u: u) if isinstance(inner, ExpTransform) else lambda u: jnp.log(transform(u))
