"""The posterior that samplers sample, as the potential energy of one unconstrained particle."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from copy import copy
from functools import cache, partial
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer
import numpy as np

from numpyro_repulsion.processes import is_spread
from numpyro_repulsion.rounding import unrounded

Particle = Any
#: ``{plate: rows}``
Indices = dict[str, Integer[Array, "... _"]]


class Target:
    """A posterior: the potential energy ``U(z) = −log π(z) + const`` of one unconstrained particle.

    - **prototype** - the shapes of the unconstrained sites of one particle; empty for functions.
    - **plates** - ``{name: (size, subsample_size)}`` of the subsampled plates.
    - **rows_outside** - the observed sites and factors that use rows of subsampled plates from outside, with these
      plates. Their scale factors fit minibatches of exactly ``subsample_size`` rows.
    - **is_random** - whether U is an estimate that differs from key to key even for given rows.
    - **work** - about how many evaluations of the density of a row one of U takes.
    - **num_terms** - of how many log densities of observations U is the sum on a minibatch; 0 if unknown.
    - **location_scale** - the sites whose prior scale depends on other sites; they can be centered partly.
    - **num_products** - how many products of an effect and a scale there may be, which can be centered partly too.
    - **num_groups** - how many groups of such effects may be added to another coefficient, which can take their mean.
    """

    args: tuple = ()
    kwargs: Mapping[str, Any] = MappingProxyType({})
    prototype: Mapping[str, Any] = MappingProxyType({})
    plates: Mapping[str, tuple[int, int]] = MappingProxyType({})
    rows_outside: Mapping[str, list[str]] = MappingProxyType({})
    is_random: bool = False
    work: int = 1
    num_terms: int = 0
    location_scale: Mapping[str, Any] = MappingProxyType({})
    num_products: int = 0
    num_groups: int = 0

    def potential_energy(self, z: Particle, indices: Indices, key: jax.Array) -> Float[Array, ""]:
        """Return U at one particle from the rows ``indices`` of subsampled plates; random likelihoods use ``key``."""
        raise NotImplementedError(f"{type(self).__name__} does not implement `potential_energy`.")

    def prior_energy(self, z: Particle) -> Float[Array, ""]:
        """Return the part of U that uses no data."""
        raise NotImplementedError(f"{type(self).__name__} does not implement `prior_energy`.")

    @property
    def base(self) -> Target:
        """The posterior in the coordinates of the model; effects that it multiplies by their scale are centered."""
        return self

    def to_base(self, y: Float[Array, " d"]) -> tuple[Float[Array, " d"], Float[Array, ""]]:
        """Return a flat particle x in the coordinates of `base`, and log det dx/dy."""
        return y, jnp.zeros((), y.dtype)

    def constrain(self, z: Particle) -> Particle:
        """Return one particle in the form of ``get_samples``."""
        return z

    def unconstrain(self, x: Particle) -> Particle:
        """Return the particle for which `constrain` returns ``x``."""
        return x

    def draw(self, key: jax.Array, init_strategy: Callable) -> Particle:
        """Draw a starting particle."""
        raise NotImplementedError(f"{type(self).__name__} does not implement `draw`.")

    @property
    def structure(self) -> Hashable:
        """What a compiled program depends on in addition to the shapes of the arguments."""
        return ()

    def with_arguments(self, args: tuple, kwargs: Mapping) -> Target:
        """Return the posterior given other arguments of the same shapes, without another analysis of the model."""
        return self

    def find_nan(self) -> list[str]:
        """Return, in words, where the data contain NaN."""
        return []

    def spread_rows(self, counts: Mapping[str, int] | None = None) -> Indices:
        """Return rows spread evenly over each subsampled plate: as many as in a minibatch, or as given."""
        counts = counts or {name: batch for name, (_, batch) in self.plates.items()}
        return {name: jnp.asarray(np.arange(n) * self.plates[name][0] // n) for name, n in counts.items()}

    def crossed_plates(self) -> list[list[str]]:
        """Return the subsampled plates in groups such that no term of U uses rows of two groups."""
        return [[name] for name in self.plates]


class Wrapped(Target):
    """A posterior in another form: a function of a particle that uses the data and minibatches of a given target."""

    def __init__(self, target: Target):
        self._target = target
        self.args, self.kwargs = target.args, target.kwargs
        self.plates, self.rows_outside, self.is_random = target.plates, target.rows_outside, target.is_random
        self.work, self.num_terms = target.work, target.num_terms

    def with_arguments(self, args, kwargs):
        other = copy(self)
        Wrapped.__init__(other, self._target.with_arguments(args, kwargs))
        return other

    def crossed_plates(self):
        return self._target.crossed_plates()


class FunctionTarget(Target):
    """The posterior given by a ``potential_fn``."""

    def __init__(self, potential_fn):
        self.potential_fn = potential_fn

    @unrounded()
    def potential_energy(self, z, indices, key):
        energy = jnp.asarray(self.potential_fn(z))
        if energy.shape != ():
            raise ValueError(
                f"`potential_fn` must return a scalar; got shape {energy.shape} for one particle. "
                "Return a sum, such as jnp.sum(...)."
            )
        return energy


@cache
def quickly() -> dict[str, Any]:
    """Return the options for small programs that run once: the optimizer would take longer than they do.

    JAX takes them only outside of other programs, and XLA only those that this release of it knows.
    """
    found: dict[str, Any] = {}
    for option in ({"xla_backend_optimization_level": 0}, {"xla_cpu_use_fusion_emitters": False}):
        # Its errors have no class of their own. Within a program all options would be refused.
        with suppress(Exception), jax.core.eval_context():
            jax.jit(lambda: 0, compiler_options=option)()
            found |= option
    return found


def is_traced() -> bool:
    """Return whether the caller is being traced, by ``jax.jit`` or another transformation around it."""
    return isinstance(jnp.zeros(()), jax.core.Tracer)


def compiled(function: Callable, target: Target, options: dict | None = None) -> Callable:
    """Return the compiled function ``(*given) -> function(target, *given)``, by these options of the compiler.

    The arguments of the model are constants of the program, but for arrays of which no process has the whole.
    """
    leaves, structure = jax.tree.flatten((target.args, target.kwargs))
    spread = {number: leaf for number, leaf in enumerate(leaves) if is_spread(leaf)}

    @unrounded()
    def program(spread, *given):
        args, kwargs = jax.tree.unflatten(structure, [spread.get(i, leaf) for i, leaf in enumerate(leaves)])
        return function(target.with_arguments(args, kwargs) if spread else target, *given)

    return partial(jax.jit(program, compiler_options=options), spread)
