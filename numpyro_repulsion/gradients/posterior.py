"""The posterior as samplers see it: the potential energy of one unconstrained particle."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any
import warnings

import jax
from jax import random
import jax.numpy as jnp
import numpy as np

import numpyro.distributions as dist
from numpyro.distributions import biject_to
from numpyro.handlers import seed, substitute, trace, uncondition
from numpyro.infer import init_to_uniform
from numpyro.infer.gibbs import subsample_plate_sizes
from numpyro.infer.util import compute_log_probs, constrain_fn, helpful_support_errors, potential_energy
from numpyro.primitives import Messenger
from numpyro.util import not_jax_tracer

__all__ = ["FunctionTarget", "Indices", "ModelTarget", "Particle", "Target", "influenced"]

Particle = Any
Indices = dict[str, jax.Array]


class Target:
    """A posterior: the potential energy ``U(z) = −log π(z) + const`` of one unconstrained particle.

    - **plates** - ``{name: (size, subsample_size)}`` of the plates that are subsampled.
    - **is_random** - whether U is an estimate that differs from key to key, given the rows too.
    """

    plates: Mapping[str, tuple[int, int]] = MappingProxyType({})
    is_random: bool = False

    def potential_energy(self, z: Particle, indices: Indices, key: jax.Array) -> jax.Array:
        """U at one particle, from the rows ``indices`` of each subsampled plate; ``key`` feeds random likelihoods."""
        raise NotImplementedError(f"{type(self).__name__} does not implement `potential_energy`.")

    def constrain(self, z: Particle) -> Particle:
        """What ``get_samples`` shows of one particle."""
        return z

    def unconstrain(self, x: Particle) -> Particle:
        """The particle that `constrain` shows as ``x``."""
        return x

    def draw(self, key: jax.Array, init_strategy: Callable) -> Particle:
        """A starting particle."""
        raise NotImplementedError(f"{type(self).__name__} does not implement `draw`.")

    def find_nan(self) -> list[str]:
        """Where in the data there is NaN, in words."""
        return []

    def crossed_plates(self) -> list[list[str]]:
        """The subsampled plates in groups, such that no term of U looks at rows of two groups."""
        return [[name] for name in self.plates]


class FunctionTarget(Target):
    """The posterior of a bare ``potential_fn``."""

    def __init__(self, potential_fn):
        self.potential_fn = potential_fn

    def potential_energy(self, z, indices, key):
        energy = jnp.asarray(self.potential_fn(z))
        if energy.shape != ():
            raise ValueError(f"`potential_fn` must return a scalar; got shape {energy.shape} for one particle.")
        return energy


class ModelTarget(Target):
    """The posterior of a NumPyro model given its arguments.

    The model is traced abstractly, so that nothing is computed on the data; refusals are raised here.

    :param model: a callable with NumPyro primitives.
    :param args: its arguments.
    :param kwargs: its keyword arguments.
    :raises ValueError: for a model that cannot be sampled rightly: no continuous latent site, a latent site inside a
        subsampled plate, a subsampled plate whose indices do not matter.
    """

    def __init__(self, model, args=(), kwargs=None):
        self.model, self.args, self.kwargs = model, args, kwargs or {}
        self._params: dict = {}
        try:
            sites = self._inspect()
        except jax.errors.TracerArrayConversionError:
            # NumPy arrays cannot be indexed by rows that are drawn in the compiled program.
            with jax.ensure_compile_time_eval():
                self.args, self.kwargs = jax.tree.map(_as_jax, (self.args, self.kwargs))
            sites = self._inspect()
        self.plates = subsample_plate_sizes(sites)
        self.plate_sizes = {name: site["args"][0] for name, site in sites.items() if site["type"] == "plate"}
        self.dims = {
            name: {frame.name: frame.dim for frame in site["cond_indep_stack"]}
            for name, site in sites.items()
            if site["type"] in ("sample", "deterministic")
        }
        self.events = {
            name: (site["fn"].event_dim, site["infer"].get("event_dims", ()))
            for name, site in sites.items()
            if site["type"] == "sample"
        }
        self.factors = [name for name, site in sites.items() if site["type"] == "sample" and _factor(site)]
        self.observed = [n for n, s in sites.items() if s["type"] == "sample" and s["is_observed"] and not _factor(s)]
        latent = {name: site for name, site in sites.items() if site["type"] == "sample" and not site["is_observed"]}
        self.discrete = discrete = [name for name, site in latent.items() if site["fn"].support.is_discrete]
        self.latent = [name for name in latent if name not in discrete]
        self._refuse(latent, discrete)
        self._enumeration_dim = None
        if discrete:
            frames = [frame.dim for site in sites.values() for frame in site.get("cond_indep_stack", ())]
            self._enumeration_dim = min(frames, default=0) - 1
        if any(site["type"] in ("param", "mutable") for site in sites.values()):
            # Random initial values of `param` sites must not change from update to update.
            with jax.ensure_compile_time_eval():
                values = self._trace(self.first_rows)
            self._params = {k: v["value"] for k, v in values.items() if v["type"] in ("param", "mutable")}
        self.prototype = jax.eval_shape(lambda: self.draw(random.key(0), init_to_uniform))
        deterministic = [name for name, site in sites.items() if site["type"] == "deterministic"]
        self.minibatched = self._minibatched(deterministic)
        self.deterministic = [name for name in deterministic if name not in self.minibatched]

    @property
    def first_rows(self) -> Indices:
        """The first ``subsample_size`` rows of each subsampled plate: a fixed choice, for shapes and replays."""
        return {name: jnp.arange(size) for name, (_, size) in self.plates.items()}

    @property
    def all_rows(self) -> Indices:
        """All rows of each subsampled plate."""
        return {name: jnp.arange(size) for name, (size, _) in self.plates.items()}

    def potential_energy(self, z, indices, key):
        enum = self._enumeration_dim is not None
        model = self._bind(indices, key)
        if enum:
            from numpyro.contrib.funsor import config_enumerate, enum as enumerated

            model = enumerated(config_enumerate(model), self._enumeration_dim)
        with _any_number_of_rows():
            return potential_energy(model, self.args, self.kwargs, z, enum=enum)

    def constrain(self, z):
        """The latent sites in their supports, and the deterministic sites that do not look at a minibatch."""
        values = self._constrain(z, self.first_rows)
        return {name: values[name] for name in (*self.latent, *self.deterministic)}

    def minibatched_values(self, values: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """The deterministic sites that look at subsampled rows, over all rows, given latent sites in their supports."""
        sites = self.sites({name: values[name] for name in self.latent})
        return {name: sites[name]["value"] for name in self.minibatched}

    def sites(self, values: dict, key: jax.Array | None = None, *, observed: bool = True) -> dict[str, dict]:
        """All sites over all rows, given values of some in their supports; others are drawn if not ``observed``."""
        # Improper priors have no draws, and any value will do where only the observed sites count.
        other = init_to_uniform if observed else lambda site: None
        return self._trace(self.all_rows, key, lambda site=None: values.get(site["name"], other(site)), observed)

    def crossed_plates(self):
        groups = [{name} for name in self.plates]
        for influences in self._influences_on_sites():
            met = [group for group in groups if group & influences]
            if len(met) > 1:
                groups = [group for group in groups if group not in met] + [set().union(*met)]
        return [sorted(group) for group in groups]

    def _influences_on_sites(self):
        """For every site that counts, the subsampled plates on whose rows its log density depends."""
        names: list = []

        def log_probs(rows, z, plate):
            model = self._bind(self.first_rows | {plate: rows}, random.key(0))
            values = self._constrain(z, self.first_rows)
            with _any_number_of_rows():
                latent = {name: values[name] for name in self.latent}
                found, _ = compute_log_probs(model, self.args, self.kwargs, latent)
            names[:] = found
            return list(found.values())

        influences: dict[str, set] = {}
        for plate, rows in self.first_rows.items():
            depends = influenced(lambda rows, z, plate=plate: log_probs(rows, z, plate), rows, self.prototype)
            for name, yes in zip(names, depends, strict=True):
                if yes:
                    influences.setdefault(name, set()).add(plate)
        return list(influences.values())

    def observations(self) -> dict[str, jax.Array]:
        """The observed values, over all rows."""
        values = self._trace(self.all_rows)
        return {name: values[name]["value"] for name in self.observed}

    @property
    def leaves(self) -> list:
        """The leaves of the model's arguments."""
        return jax.tree.leaves((self.args, self.kwargs))

    def find_nan(self):
        found = []
        for path, leaf in jax.tree.leaves_with_path({"args": self.args, "kwargs": self.kwargs}):
            # NumPy, for inside a user's `jit` an operation of JAX on known data has no value.
            if _is_concrete(leaf) and (count := _count_nan(leaf)):
                found.append(f"{count} in the model's {path[0].key}{jax.tree_util.keystr(path[1:])}")
        try:
            observations = jax.jit(self.observations)()
        except (TypeError, ValueError):
            observations = {}  # A model that works for its own number of rows only.
        for name, value in observations.items():
            if _is_concrete(value) and (count := _count_nan(value)):
                found.append(f"{count} in the observed site '{name}'")
        return found

    def is_finite_on_all_rows(self) -> bool:
        """Whether the potential energy is finite at an arbitrary particle, over all rows; true where none can tell."""
        z = self.draw(random.key(0), init_to_uniform)
        try:
            energy = jax.jit(self.potential_energy)(z, self.all_rows, random.key(0))
        except (TypeError, ValueError):
            return True  # A model that works for its own number of rows only.
        return bool(np.isfinite(energy)) if not_jax_tracer(energy) else True

    def unconstrain(self, x):
        return self._unconstrained(self._trace(self.first_rows, init_strategy=lambda site=None: x.get(site["name"])))

    def draw(self, key, init_strategy):
        return self._unconstrained(self._trace(self.first_rows, key, init_strategy))

    def _unconstrained(self, sites):
        z = {}
        for name in self.latent:
            with helpful_support_errors(sites[name]):
                z[name] = biject_to(sites[name]["fn"].support).inv(sites[name]["value"])
        return z

    def _inspect(self):
        """The model's sites, of which only what is static may be used."""
        sites: dict = {}
        keys = _Keys()
        with keys:
            jax.eval_shape(lambda: sites.update(self._trace({})) or 0)
        self.is_random = keys.asked
        return sites

    def _bind(self, indices, key):
        return seed(substitute(self.model, data={**self._params, **indices}), key)

    def _trace(self, indices, key=None, init_strategy=init_to_uniform, observed=True):
        model = self._bind(indices, random.key(0) if key is None else key)
        model = model if observed else uncondition(model)
        with _any_number_of_rows():
            return trace(substitute(model, substitute_fn=init_strategy)).get_trace(*self.args, **self.kwargs)

    def _constrain(self, z, indices):
        model = self._bind(indices, random.key(0))
        with _any_number_of_rows():
            return constrain_fn(model, self.args, self.kwargs, z, return_deterministic=True)

    def _minibatched(self, deterministic):
        """The deterministic sites that depend on the rows; checks that the potential depends on every plate's."""
        inside = [name for name in deterministic if set(self.dims[name]) & set(self.plates)]
        for plate in self.plates:

            def energy(rows, z, plate=plate):
                return self.potential_energy(z, self.first_rows | {plate: rows}, random.key(0))

            def values(rows, z, plate=plate):
                traced = self._constrain(z, self.first_rows | {plate: rows})
                return [traced[name] for name in deterministic]

            rows = self.first_rows[plate]
            if not all(influenced(energy, rows, self.prototype)):
                size, subsample_size = self.plates[plate]
                raise ValueError(
                    f"The likelihood does not depend on which rows the subsampled plate '{plate}' draws: every "
                    f"update would see the same {subsample_size} of {size} rows. Pass the whole data to the model "
                    f"and take the rows inside the plate: `with numpyro.plate('{plate}', {size}, "
                    f"subsample_size={subsample_size}) as i: ... obs=y[i]`, or use `numpyro.subsample`."
                )
            depends = influenced(values, rows, self.prototype)
            inside += [n for n, yes in zip(deterministic, depends, strict=True) if yes and n not in inside]
        return inside

    def _refuse(self, latent, discrete):
        for name, site in latent.items():
            if isinstance(site["fn"], dist.Delta):
                raise ValueError(
                    f"Latent site '{name}' has a delta distribution; use `numpyro.deterministic('{name}', ...)`."
                )
            if self.plates and name in discrete:
                raise ValueError(
                    f"Discrete latent site '{name}' would be enumerated, which is wrong with the subsampled plate "
                    f"{sorted(self.plates)}: the logarithm of a sum over its values is no sum over rows. Marginalize "
                    "it by hand (numpyro.distributions.MixtureSameFamily), or drop `subsample_size`."
                )
            if plates := [plate for plate in self.dims[name] if plate in self.plates]:
                raise ValueError(
                    f"Latent site '{name}' lies inside the subsampled plate '{plates[0]}', where each minibatch would "
                    "need other latent variables. Move it out of the plate and index it, marginalize it, or drop "
                    "`subsample_size`."
                )
        if not self.latent:
            raise ValueError(
                "The model has no continuous latent site, so there is nothing to sample; it needs at least one "
                f"`numpyro.sample` statement without `obs`. Discrete latent sites: {discrete or 'none'}."
            )


class _Keys(Messenger):
    """Sees whether a model asks for keys, ``numpyro.prng_key()``."""

    asked = False

    def process_message(self, msg):
        self.asked |= msg["type"] == "prng_key"


@contextmanager
def _any_number_of_rows():
    """Lets rows given from outside outnumber the plate's own subsample."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "subsample_size does not match")
        yield


def _factor(site):
    return site["infer"].get("is_auxiliary", False)


def influenced(fn, cause, *rest):
    """Whether each output of ``fn(cause, *rest)`` depends on ``cause``, by the structure of the program."""
    program = jax.make_jaxpr(fn)(cause, *rest).jaxpr
    tainted = {id(variable) for variable in program.invars[: len(jax.tree.leaves(cause))]}
    for equation in program.eqns:
        if any(id(variable) in tainted for variable in equation.invars):
            tainted.update(id(variable) for variable in equation.outvars)
    return [id(variable) in tainted for variable in program.outvars]


def _as_jax(leaf):
    return jnp.asarray(leaf) if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufc" else leaf


def _count_nan(array):
    return int(np.isnan(np.asarray(array)).sum()) if jnp.issubdtype(array.dtype, jnp.inexact) else 0


def _is_concrete(leaf):
    return isinstance(leaf, np.ndarray | jax.Array) and not_jax_tracer(leaf)
