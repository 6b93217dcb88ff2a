"""Location-scale sites in coordinates between their centered and non-centered forms."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
import math
from typing import Any, NamedTuple

import jax
from jax import random
import jax.numpy as jnp
import numpy as np

import numpyro.distributions as dist
from numpyro.distributions import biject_to, constraints
from numpyro.distributions.transforms import ExpTransform, IndependentTransform
from numpyro.handlers import substitute
from numpyro.infer.util import constrain_fn, potential_energy
from numpyro.ops.provenance import eval_provenance

from numpyro_repulsion.gradients.all_rows import CALLS, program_of
from numpyro_repulsion.gradients.structure import any_number_of_rows
from numpyro_repulsion.gradients.target import Indices, Particle
from numpyro_repulsion.rounding import matmul

#: Families with a location and a scale.
FAMILIES = (dist.Normal, dist.StudentT, dist.Cauchy, dist.Laplace, dist.Logistic, dist.Gumbel)
#: Operations whose result is linear in their first argument, whatever the others.
_LINEAR = """
    broadcast_in_dim convert_element_type copy dynamic_slice expand_dims gather neg reduce_sum reshape slice squeeze
    transpose
"""


# --- Products of effects and scales that a model has in itself. ---


class _Use(NamedTuple):
    """How an array uses the sites of a model: in which it is linear, and on which it depends."""

    linear: frozenset = frozenset()
    causes: frozenset = frozenset()


class Products:
    """Products of latent effects z and scales s in a model, as in non-centered models written by hand.

    A model may be written with ``x = s^p z`` and a prior of z that does not depend on s. Where the likelihood depends
    on z and s through x alone, it satisfies ``∂L/∂log s = p z·∂L/∂z``, so p can be estimated from gradients at some
    particles; it is 0 where the model has no such product. As x is then centered by a share c, its coordinate is
    ``y = s^{pc} z``. This is a change of variables for any p, so the posterior never depends on it.

    :param others: sites that are in coordinates of their own already.

    - **pairs** - the names of an effect and a scale, to each of which a power belongs.
    - **sites** - the names of all effects and scales.
    """

    def __init__(self, target: Any, sites: Mapping[str, dict], others: Collection[str]):
        shapes = {name: site.shape for name, site in target.prototype.items()}
        self._logarithms = {
            name: logarithm
            for name in target.latent
            if name not in others and (logarithm := _logarithm(sites[name]["fn"].support, shapes[name])) is not None
        }
        effects = {
            name
            for name in set(target.latent) - set(others)
            if _is_real(sites[name]["fn"]) and sites[name]["scale"] is None
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
        self.pairs = [(effect, scale) for effect, scale in pairs if scale not in scaled]
        self.sites = {name for pair in self.pairs for name in pair}

    def log_scales(self, z: Particle, powers: jax.Array) -> dict[str, jax.Array]:
        """Return the logarithm of the scale of each effect, of its shape, at a particle with these powers."""
        found: dict = {}
        for (effect, scale), power in zip(self.pairs, powers, strict=True):
            part = power * self._logarithms[scale](z[scale])
            found[effect] = jnp.broadcast_to(part + found.get(effect, 0.0), z[effect].shape)
        return found

    def powers(self, particles: Particle, gradients: Particle) -> jax.Array:
        """Return the power of each pair from particles with leaves ``(n, ...)``, and ∇U without priors of `sites`."""
        found = [jnp.zeros(())] * len(self.pairs)
        for scale in dict.fromkeys(scale for _, scale in self.pairs):
            numbers = [i for i, pair in enumerate(self.pairs) if pair[1] == scale]
            u, slope = particles[scale], gradients[scale]
            speed = jax.vmap(jax.grad(lambda u, log=self._logarithms[scale]: log(u).sum()))(u)
            effects = (self.pairs[i][0] for i in numbers)
            columns = [jax.vmap(_summed_to)(particles[x] * gradients[x], u).ravel() for x in effects]
            for i, power in zip(numbers, _fitted(jnp.stack(columns, 1), (slope / speed).ravel()), strict=True):
                found[i] = power
        return jnp.stack(found)


def multiplied(function: Callable, argument: Mapping[str, Any]) -> set[tuple[str, str]]:
    """Return the pairs (z, s) such that a program multiplies or divides a term linear in z by one in s."""
    pairs: set = set()
    program = jax.make_jaxpr(function)(dict(argument))
    _walk(program, [_Use(frozenset([name]), frozenset([name])) for name in sorted(argument)], pairs)
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
    name, params, program = equation.primitive.name, equation.params, program_of(equation)
    if name in CALLS and program is not None:
        return _walk(program, given, pairs)
    causes = frozenset().union(*(use.causes for use in given))
    if name == "scan" and program is not None:
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
    # Scales may enter as standard deviations, variances or precisions: as powers of 1/2 or 1, up to the sign.
    power = jnp.round(2.0 * power / lengths) / 2.0
    error, length = jnp.linalg.norm(target - matmul(columns, power)), jnp.linalg.norm(target)
    # The part that is left unexplained allows for rounding.
    usable = (error <= 0.02 * length) & (length > 0)
    return jnp.where(usable & (jnp.abs(power) <= 1.0), power, 0.0)


def _summed_to(x, like):
    """Return the sums of x over the axes along which ``like`` would be repeated to its shape."""
    return jax.vjp(lambda like: jnp.broadcast_to(like, x.shape), like)[1](x)[0]


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
    """Return the function from unconstrained values to logarithms of positive ones, such as a real number itself;
    ``None`` for a site without these."""
    if (base := base_support(support)) is constraints.real:
        return (lambda u: u) if np.prod(shape) == 1 else None
    # A bound may depend on other sites, and the transform with it.
    bounds = [getattr(base, name, default) for name, default in (("lower_bound", -1.0), ("upper_bound", 1.0))]
    if any(isinstance(bound, jax.core.Tracer) for bound in bounds) or not np.all(np.asarray(bounds[0]) >= 0.0):
        return None
    transform = biject_to(support)
    inner = transform.base_transform if isinstance(transform, IndependentTransform) else transform
    return (lambda u: u) if isinstance(inner, ExpTransform) else lambda u: jnp.log(transform(u))


# --- Effects that a model adds to another coefficient. ---


class Translations:
    r"""Groups of effects that a model adds to another coefficient, their base, such as random effects and an intercept.

    If the likelihood depends on the base a and on the effects x of a group through ``a + x_j`` alone, then
    ``∂L/∂a = Σ_j ∂L/∂x_j``, so the base of each group can be found from gradients at some particles. The data then say
    nothing about the mean of x, which varies as much as the scale s of the effects allows. So the mean is left
    non-centered, and ``a + mean(x)``, which the data do determine, takes the place of a:

    .. math::
        x_j = s_j^{1-c_j} (y_j - \bar y) + \bar s\, \bar y, \qquad a = y_a - \bar s\, \bar y,

    with weights ``s_j^{1-c_j}`` in the mean ȳ, the geometric mean s̄ of the scales, and the share c by which each effect
    is centered. This is a change of variables for any a, so the posterior never depends on it.

    :param pairs: the products of effects and scales, by name.

    - **groups** - the names of the sites of effects, which have one axis.
    - **members** - which entries of a flat particle belong to each group, ``(g, d)``; 1 or 0.
    - **sizes** - the number of effects in each group, ``(g,)``.
    - **places** - for each site that can be a base, the places of its entries in a flat particle.

    **References:**

    1. *Efficient Parametrisations for Normal Linear Mixed Models*, A. E. Gelfand, S. K. Sahu and B. P. Carlin,
       Biometrika 82 (1995)
    """

    def __init__(self, target: Any, sites: Mapping[str, dict], pairs: list[tuple[str, str]]):
        shapes = {name: site.shape for name, site in target.prototype.items()}
        scales = {name: scale for name, (location, scale) in target.location_scale.items() if not location}
        for effect, scale in pairs:
            scales[effect] = scales.get(effect, frozenset()) | {scale}
        # A scale must not depend on effects that move with their mean, nor on the base.
        taken = frozenset().union(*scales.values())
        groups = sorted(name for name in scales.keys() - taken if len(shapes[name]) == 1 and shapes[name][0] > 1)
        taken |= frozenset(target.location_scale)
        bases = {name for name in target.latent if name not in taken and _is_real(sites[name]["fn"])}
        self.groups = groups if bases - set(groups) else []

        def flat(values):
            parts = [np.broadcast_to(values.get(name, 0.0), shapes[name]).ravel() for name in sorted(shapes)]
            return np.concatenate(parts)

        self.members = np.stack([flat({name: 1.0}) for name in groups]) if self.groups else np.zeros((0, 0))
        self.sizes = self.members.sum(1)
        ends = np.cumsum([math.prod(shapes[name]) for name in sorted(shapes)])
        places = dict(zip(sorted(shapes), np.split(np.arange(ends[-1], dtype=np.int32), ends[:-1]), strict=True))
        self.places = {name: places[name].reshape(shapes[name]) for name in sorted(bases)}
        self._variance = flat({name: _variance(sites[name]["fn"]) for name in bases}) if self.groups else np.zeros(0)

    def bases(self, gradient: jax.Array, scale: jax.Array, smallest_sd: float) -> jax.Array:
        """Return the entry that is the base of each group, ``(g,)``; -1 for a group without one.

        An entry with a prior narrower than that of the mean of the effects would not let this mean vary.

        :param gradient: ∇U without priors at some particles, with respect to their centered form, ``(n, d)``.
        :param scale: the scale of each entry there; 1 for what is no effect.
        :param smallest_sd: the smallest standard deviation of log s for which a group gets a base: where the scale is
            known well, the coordinates of the model do as well.
        """
        total, log_scale = self.sums(gradient), self.means(jnp.log(scale))
        residual = jnp.sum((gradient[:, None] - total[:, :, None]) ** 2, 0)
        size = jnp.sum(total**2, 0)[:, None]
        variance = (jnp.mean(jnp.exp(2.0 * log_scale), 0) / self.sizes)[:, None]
        can_be = (scale == 1.0).all(0) & (jnp.asarray(self._variance, scale.dtype) > variance) & (size > 0)
        error = jnp.where(can_be, residual / jnp.where(size > 0, size, 1.0), jnp.inf)
        # Gradients may differ by a hundredth, to allow for rounding.
        found = (jnp.min(error, 1) < 1e-4) & (jnp.std(log_scale, 0) > smallest_sd)
        return jnp.where(found, jnp.argmin(error, 1), -1).astype(jnp.int32)

    def sums(self, x: jax.Array) -> jax.Array:
        """Return the sum of x, ``(..., d)``, over each group, ``(..., g)``."""
        return matmul(x, jnp.asarray(self.members, x.dtype).T)

    def means(self, x: jax.Array) -> jax.Array:
        """Return the mean of x over each group."""
        return self.sums(x) / self.sizes.astype(x.dtype)

    def to_entries(self, x: jax.Array) -> jax.Array:
        """Return the value x of each group, ``(..., g)``, at each of its entries, ``(..., d)``; 0 elsewhere."""
        return matmul(x, jnp.asarray(self.members, x.dtype))


def _is_real(fn):
    return base_support(fn.support) is constraints.real


def _variance(fn):
    """Return the variance of a prior; infinite where it is unknown."""
    if not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(fn)):
        with suppress(AttributeError, NotImplementedError, TypeError):
            return np.nan_to_num(np.asarray(fn.variance), nan=np.inf, posinf=np.inf)
    return np.inf


# --- Sites with a location and a scale. ---


def location_scale_sites(target: Any, sites: Mapping[str, dict]) -> dict[str, list[frozenset[str]]]:
    """Return the latent sites of a model with a location, and a scale that depends on other latent sites; with the
    sites that the two depend on.

    A site with a weight, by ``numpyro.handlers.scale``, is left out: the volume of its coordinates has none.
    """

    def may_have(name):
        fn = _base(sites[name]["fn"])
        is_real = type(fn) in FAMILIES and fn.support is constraints.real
        return sites[name]["scale"] is None and is_real and isinstance(fn.scale, jax.core.Tracer)

    names = [name for name in target.latent if may_have(name)]
    if target.discrete or not names or len(target.latent) == 1:
        return {}
    centered = {name: jnp.ones(target.prototype[name].shape) for name in names}

    def priors(**z):
        return recovered(target, {name[1:]: x for name, x in z.items()}, centered)[1]

    with suppress(AssertionError, KeyError, TypeError, ValueError):  # Such a model keeps its own coordinates.
        # A site may have the name of a parameter of `eval_provenance`.
        causes = eval_provenance(priors, **{f"_{name}": x for name, x in target.prototype.items()})
        found = {name: [frozenset(x[1:] for x in own) for own in causes[name]] for name in sorted(causes)}
        return {name: both for name, both in found.items() if both[1]}
    return {}


def _base(fn):
    while isinstance(fn, dist.Independent | dist.ExpandedDistribution):
        fn = fn.base_dist
    return fn


def centered_energy(target: Any, y: Particle, indices: Indices, key: jax.Array, shares: Mapping[str, jax.Array]):
    """Return U in coordinates in which some sites are partly centered, by the given share for each of their entries."""
    energy, found = _partly_centered(potential_energy, target, y, indices, key, shares)
    return energy - sum(jnp.sum((1.0 - shares[name]) * jnp.log(scale)) for name, (_, _, scale) in found.items())


def recovered(target: Any, y: Particle, shares: Mapping[str, jax.Array]) -> tuple[Particle, dict[str, tuple]]:
    """Return a particle in the coordinates of the model, and the location and scale of each partly centered site."""
    # NumPyro ends a run of the model there that sees all sites.
    _, found = _partly_centered(constrain_fn, target, y, target.first_rows, random.key(0), shares)
    values = {name: value for name, (value, *_) in found.items()}
    return y | values, {name: tuple(prior) for name, (_, *prior) in found.items()}


def _partly_centered(function, target, y, indices, key, shares):
    """Return a function of the model at y, and of each partly centered site its value, its location and its scale."""
    found: dict = {}

    # A site is met with the name and the prior that it has outside of all handlers, so these do not matter.
    def value_of(site=None):
        name, fn = site["name"], site["fn"]
        if name not in shares or site["type"] != "sample":
            return None
        shape, base = fn.shape(site["kwargs"]["sample_shape"]), _base(fn)
        if shape != y[name].shape:
            return None  # A site inside `scan` is shown for one step.
        location, scale = (jnp.broadcast_to(x, shape) for x in (base.loc, base.scale))
        share = shares[name]
        found[name] = location + scale ** (1.0 - share) * (y[name] - share * location), location, scale
        return found[name][0]

    model = substitute(target.bind(indices, key), substitute_fn=value_of)
    others = {name: x for name, x in y.items() if name not in shares}
    with any_number_of_rows():
        return function(model, target.args, target.kwargs, others), found
