"""The posterior of a NumPyro model in the form that samplers use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from copy import copy
import math

import jax
from jax import lax, random
import jax.numpy as jnp
import numpy as np

from numpyro.distributions import biject_to
from numpyro.handlers import block, scale, seed, substitute, trace, uncondition
from numpyro.infer import init_to_uniform
from numpyro.infer.gibbs import subsample_plate_sizes
from numpyro.infer.util import compute_log_probs, constrain_fn, helpful_support_errors, potential_energy
from numpyro.primitives import Messenger

from numpyro_repulsion.gradients.all_rows import check_indices
from numpyro_repulsion.gradients.local import Integrated, Outside, local_sites
from numpyro_repulsion.gradients.location_scale import (
    Products,
    Translations,
    centered_energy,
    location_scale_sites,
    recovered,
)
from numpyro_repulsion.gradients.minibatch import TakesRows, check_sizes
from numpyro_repulsion.gradients.structure import (
    Probes,
    Watch,
    abstract_usage,
    any_number_of_rows,
    arrays,
    check_enumeration,
    check_kinds,
    check_sites,
    check_values,
    influenced,
    point,
    rows_outside,
)
from numpyro_repulsion.gradients.target import Indices, Particle, Target, compiled, is_traced, quickly
from numpyro_repulsion.rounding import unrounded
from numpyro_repulsion.rows import count_nan, host_rows


class _Weighted(Messenger):
    """Multiply the log densities of some sites, and the volumes of their transforms, by weights."""

    def __init__(self, fn, weights):
        super().__init__(fn)
        self._weights = weights | {f"_{name}_log_det": weight for name, weight in weights.items()}

    def process_message(self, msg):
        if msg["type"] == "sample" and (weight := self._weights.get(msg["name"])) is not None:
            msg["scale"] = weight if msg["scale"] is None else weight * msg["scale"]


@unrounded()
def _weighted_energy(target, z, rows, weights):
    model = _Weighted(target.bind(rows), weights)
    with any_number_of_rows():
        return potential_energy(model, target.args, target.kwargs, z)


def likelihood_energies(target: ModelTarget, particles: Particle) -> jax.Array:
    """Return U without the priors (but with, if discrete sites are summed out), from up to 1,000 rows of each plate,
    or one minibatch.

    :param particles: with leaves ``(n, ...)``; the result is ``(n,)``.
    """
    # Minibatches that are evaluated one after another, with rows spread evenly.
    number = max(1, min((min(size, 1000) // batch for size, batch in target.plates.values()), default=1))
    rows = target.spread_rows({name: number * batch for name, (_, batch) in target.plates.items()})
    rows = {name: x.reshape(number, -1) for name, x in rows.items()}

    def energy(z, rows):
        if target.discrete:
            return target.potential_energy(z, rows, random.key(0))
        return _weighted_energy(target, z, rows, dict.fromkeys(target.latent, jnp.zeros(())))

    def total(sums, rows):
        return sums + jax.vmap(energy, (0, None))(particles, rows), None

    first = jnp.zeros(len(jax.tree.leaves(particles)[0]), jnp.result_type(float))
    return lax.scan(total, first, rows)[0] / number


@unrounded()
def likelihood_gradients(target: ModelTarget, particles: Particle, without: Sequence[set[str]]) -> list[Particle]:
    """Return the gradients of U at particles with leaves ``(n, ...)``, without the priors of each set of sites.

    Minibatches consist of rows spread evenly.
    """
    rows = target.spread_rows()
    names = sorted(target.latent)
    weights = jnp.asarray(np.array([[float(name not in left_out) for name in names] for left_out in without]))

    def energy(z, weights):
        return _weighted_energy(target, z, rows, dict(zip(names, weights, strict=True)))

    at_particles = jax.vmap(jax.grad(energy), (0, None))
    found = jax.vmap(at_particles, (None, 0))(particles, weights)
    return [{name: leaf[i] for name, leaf in found.items()} for i in range(len(without))]


class ModelTarget(Target):
    """The posterior of a NumPyro model given its arguments.

    - **latent**, **discrete** - the continuous latent sites, and those that are summed out.
    - **integrated** - the latent sites inside of subsampled plates, which are integrated out.
    - **deterministic**, **minibatched**, **summed_out** - the deterministic sites; those that use rows of subsampled
      plates; and those that depend on discrete sites.
    - **prototype** - the shapes of the continuous latent sites, unconstrained.
    - **subsampled** - by sample site, the subsampled plates that contain it.
    - **dims** - by site, the dimension of each plate.

    :raises ValueError: for a model that cannot be sampled correctly, and for data that JAX would change or that would
        take a quarter of the memory of the device.
    """

    def __init__(self, model, args=(), kwargs=None):
        self.model, self.args, self.kwargs = model, args, kwargs or {}
        self.params: dict = {}
        self.integrated: list[str] = []
        check_sizes(args, self.kwargs)
        # On a mesh the other devices would wait for one that cannot read its rows.
        if not jax.sharding.get_abstract_mesh().empty:
            check_values(args, self.kwargs, of_rows=True)
        refusal = None
        try:
            check_values(args, self.kwargs)
        except ValueError as error:
            refusal = error
        self._share_traces()
        try:
            sites, watch = self._inspect()
        except Exception as error:  # Whatever JAX and the model raise for such values.
            if refusal:
                raise refusal from None
            if not isinstance(error, jax.errors.TracerArrayConversionError):
                raise
            # Rows that are drawn in the compiled program cannot index NumPy arrays.
            with jax.ensure_compile_time_eval():
                self.args, self.kwargs = jax.tree.map(
                    lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) and x.dtype.kind in "biufc" else x,
                    (self.args, self.kwargs),
                )
            sites, watch = self._inspect()
        if refusal and not self._is_same_in_double():
            raise refusal
        check_values(observations={name: sites[name]["value"] for name in self.observed})
        if any(site["type"] in ("param", "mutable") for site in sites.values()):
            # Random initial values of `param` sites must not change from update to update.
            with jax.ensure_compile_time_eval():
                values = self._trace(self.first_rows)
            self.params = {k: v["value"] for k, v in values.items() if v["type"] in ("param", "mutable")}
        if not any(np.prod(site.shape) for site in self.prototype.values()):
            raise ValueError(f"The latent sites {self.latent} have no elements. Give one a shape without 0.")
        if any(isinstance(leaf, jax.core.Tracer) for leaf in self.leaves):
            # The values of the data are unknown.
            self.usage = abstract_usage(self)
        else:
            # Inside of a program, what is run here must have values; outside, this would hide constant indices.
            with jax.ensure_compile_time_eval() if is_traced() else nullcontext():
                # First, because a host has no rows beyond the end.
                check_indices(self)
                self._probe(watch)
        self.is_random = bool(self.usage.random & self.subsampled.keys())
        check_enumeration(self, sites)
        scales = {name: _weight(sites[name]) for name in (*self.observed, *self.factors)}
        self.rows_outside = rows_outside(self, scales)
        if self.discrete:
            try:
                jax.eval_shape(self.potential_energy, self.prototype, self.first_rows, random.key(0))
            except (KeyError, ValueError) as error:  # Funsor must know every batch dimension.
                raise ValueError(
                    f"The discrete latent sites {self.discrete} cannot be summed over ({error}). Every batch dimension "
                    "of a sample site must belong to a numpyro.plate, or be made part of the event by `.to_event(...)`."
                ) from error
        deterministic = [name for name, site in sites.items() if site["type"] == "deterministic"]
        self.summed_out = [name for name in deterministic if self.usage.discrete[name]]
        deterministic = [name for name in deterministic if name not in self.summed_out]
        by_rows = {name for name in deterministic if self.usage.rows[name] or self.plates.keys() & self.dims[name]}
        self.minibatched = [name for name in deterministic if name in by_rows]
        self.deterministic = [name for name in deterministic if name not in self.minibatched]
        self.location_scale = location_scale_sites(self, sites)
        self.products = Products(self, sites, self.location_scale)
        self.translations = Translations(self, sites, self.products.pairs)
        self.num_products, self.num_groups = len(self.products.pairs), len(self.translations.groups)

    def _share_traces(self):
        """Compile functions so that the model runs only once for each shape of their arguments."""
        self._energy = compiled(ModelTarget._potential_energy, self)
        self.evaluate = compiled(ModelTarget._evaluation, self)
        self._constrained = compiled(ModelTarget._constrained_values, self)
        self.centered_energy = compiled(centered_energy, self)
        self.recovered = compiled(recovered, self)

    @property
    def structure(self):
        shapes = tuple((name, site.shape, site.dtype) for name, site in self.prototype.items())
        plates = tuple(self.plates.items())
        kind = self.is_random, bool(self.rows_outside), tuple(map(tuple, self.crossed_plates()))
        parts = shapes, plates, tuple(self.discrete), self._groups, self._enumeration_dim, kind
        effects = tuple(self.location_scale), tuple(self.products.pairs), tuple(self.translations.groups)
        # Initial values of `param` sites are constants of the compiled program.
        return (*parts, *effects, *map(id, self.params.values()))

    def with_arguments(self, args, kwargs):
        other = copy(self)
        other.args, other.kwargs = args, kwargs
        other._share_traces()
        return other

    def scales_over_all_rows(self) -> dict:
        """Return the scale of each site over all rows; empty if the model works for its own number of rows only."""
        sites: dict = {}
        try:
            jax.eval_shape(lambda: sites.update(self._trace(self.all_rows)) or 0)
        except (TypeError, ValueError):
            return {}
        return {name: _weight(site) for name, site in sites.items() if site["type"] == "sample"}

    @property
    def first_rows(self) -> Indices:
        """The first ``subsample_size`` rows of each subsampled plate, a fixed choice for shapes and replays."""
        return {name: jnp.arange(size) for name, (_, size) in self.plates.items()}

    @property
    def all_rows(self) -> Indices:
        """All rows of each subsampled plate."""
        return {name: jnp.arange(size) for name, (size, _) in self.plates.items()}

    def potential_energy(self, z, indices, key):
        return self._energy(z, indices, key)

    @unrounded()
    def prior_energy(self, z):
        hidden = [*self.observed, *self.factors, *self.discrete]
        with any_number_of_rows():
            return potential_energy(block(self.bind(self.first_rows), hide=hidden), self.args, self.kwargs, z)

    def _potential_energy(self, z, indices, key):
        model = self.bind(indices, key)
        with any_number_of_rows():
            if self.discrete:
                return self._enumerated_energy(model, z, indices)
            return potential_energy(model, self.args, self.kwargs, z)

    def _enumerated_energy(self, model, z, indices):
        r"""Return U at one particle, summed over the values of discrete latent sites.

        NumPyro multiplies the log density of each site by N / B, and then sums over discrete values. For values of
        single rows the sum over rows must come last, and the factor with it: :math:`-\frac{N}{B} \sum_{i \in
        \text{batch}} \log \sum_c p(c) p(y_i | c)`. So sites are processed plate by plate without the factor, and the
        result is multiplied by it. No sum has terms of different plates, which `check_enumeration` ensures.
        """
        from numpyro.contrib.funsor import config_enumerate, enum, log_density

        def enumerated():
            return enum(config_enumerate(model), self._enumeration_dim)

        def only(group, model):
            return block(model, hide_fn=lambda site: site["type"] == "sample" and self._around(site) != group)

        energy = potential_energy(only(frozenset(), enumerated()), self.args, self.kwargs, z, enum=True)
        weights = {name: size / len(indices.get(name, range(batch))) for name, (size, batch) in self.plates.items()}
        values = constrain_fn(self.bind(indices), self.args, self.kwargs, z) if self._groups else {}
        values = {name: x for name, x in values.items() if name in self.latent}
        for group in self._groups:
            weight = math.prod(weights[name] for name in group)
            known = scale(substitute(enumerated(), data=values), scale=1.0 / weight)
            energy = energy - weight * log_density(only(group, known), self.args, self.kwargs, {})[0]
        return energy

    def _around(self, site):
        """Return the subsampled plates that contain a site."""
        return frozenset(frame.name for frame in site["cond_indep_stack"]) & frozenset(self.plates)

    def constrain(self, z):
        """Return the latent sites in their supports, and the deterministic sites that do not use a minibatch."""
        return self._constrained(z)

    def _constrained_values(self, z):
        nothing = jax.tree.map(lambda site: jnp.zeros(site.shape, site.dtype), self.discrete_shapes)
        _, latent, deterministic = self.evaluate(self.first_rows, nothing, z)
        return latent | {name: deterministic[name] for name in self.deterministic}

    def minibatched_values(self, values: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Return the deterministic sites that use subsampled rows, over all rows, given latent values in supports."""
        sites = self.sites({name: values[name] for name in self.latent})
        return {name: sites[name]["value"] for name in self.minibatched}

    def sites(self, values: dict, key: jax.Array | None = None, *, observed: bool = True) -> dict[str, dict]:
        """Return all sites over all rows, given values of some in their supports; draw others if not ``observed``."""
        # Improper priors have no draws, and any value works if only the observed sites matter.
        other = init_to_uniform if observed else lambda site: None
        return self._trace(self.all_rows, key, lambda site=None: values.get(site["name"], other(site)), observed)

    def crossed_plates(self):
        groups = [{name} for name in self.plates]
        for name in self.subsampled:
            seen = self.usage.rows[name] | self.subsampled[name]
            met = [group for group in groups if group & seen]
            if len(met) > 1:
                groups = [group for group in groups if group not in met] + [set().union(*met)]
        return [sorted(group) for group in groups]

    def _evaluation(self, rows, discrete, z, key=None):
        """Return by site: log densities, entry by entry; latent values in their supports; deterministic values."""

        def to_support(site):
            if site["type"] == "sample" and site["name"] in z:
                with helpful_support_errors(site):
                    return biject_to(site["fn"].support)(z[site["name"]])
            return None

        model = substitute(self.bind(rows, key), substitute_fn=to_support)
        with any_number_of_rows():
            densities, sites = compute_log_probs(model, self.args, self.kwargs, discrete, sum_log_prob=False)
        deterministic = {name: site["value"] for name, site in sites.items() if site["type"] == "deterministic"}
        return densities, {name: sites[name]["value"] for name in self.latent}, deterministic

    def _probe(self, watch):
        """Find how the sites of the model depend on rows, discrete sites and the key, and check that it is right."""
        taken, shapes = self.plates, self.discrete_shapes
        if not (taken or shapes):
            self.usage = abstract_usage(self)
            if not self.usage.random:
                return
        if any(batch == 1 < size for size, batch in taken.values()):
            # A single row shows no variation.
            two = {name: (size, min(size, max(batch, 2))) for name, (size, batch) in taken.items()}
            wider = {name: self._with_rows(name, site, two) for name, site in shapes.items()}
            with suppress(TypeError, ValueError):
                rows = {name: jnp.arange(batch) for name, (_, batch) in two.items()}
                jax.eval_shape(self.evaluate, rows, wider, self.prototype)
                taken, shapes = two, wider

        def runs(target, cases):
            def run(case):
                z = point(case.point, self.prototype)
                values = {name: jnp.full(x.shape, case.discrete[name], x.dtype) for name, x in shapes.items()}
                densities, *others = target._evaluation(case.rows, values, z, random.key(case.key))
                return densities, {name: _total(x) for part in others for name, x in part.items()}

            return lax.map(run, cases)

        probes = Probes(compiled(runs, self, quickly()), taken, self.discrete)
        self.usage = usage = probes.usage()
        if watch.blocks and (random_sites := sorted(usage.random & self.subsampled.keys())):
            raise ValueError(
                f"The densities of the sites {random_sites} change with the random key, because "
                "numpyro.handlers.block hides a statement that uses one: a hidden latent site or subsampled plate "
                "would be drawn anew in every update. Hide only sites that have values, as in "
                "block(substitute(model, data=values), hide=[...])."
            )
        check_sites(self, probes)

    def at_point(self, z: dict | int, rows: Mapping) -> dict[str, jax.Array]:
        """Return the densities and deterministic values at a point, by site; ``z`` may be the number of a point."""
        z = z if isinstance(z, dict) else point(z, self.prototype)
        nothing = {name: jnp.zeros(x.shape, x.dtype) for name, x in self.discrete_shapes.items()}
        densities, _, deterministic = self._evaluation(rows, nothing, z)
        arrays = {name: x for name, x in deterministic.items() if isinstance(x, jax.Array)}
        return densities | arrays

    def _is_same_in_double(self):
        """Return whether the densities of all rows, and their slopes, are the same in double precision."""
        found: list[list] = []
        for is_double in (False, True):
            with jax.enable_x64(is_double), suppress(Exception):  # Whatever the model raises, it is not the same.
                z = point(0, self.prototype)
                # At 0 too, where a slope shows signs that large squares hide.
                starts = jax.tree.map(jnp.zeros_like, z), z
                found.append([jax.jvp(lambda z: self.at_point(z, self.all_rows), (at,), (z,)) for at in starts])
        pairs = zip(*map(jax.tree.leaves, found), strict=True)
        return len(found) == 2 and all(np.isfinite(b).all() and np.allclose(a, b, 1e-3, 1e-3) for a, b in pairs)

    def _with_rows(self, name, site, counts):
        """Return the shape and type of a discrete site for other numbers of rows in its plates."""
        shape, event_dim = list(site.shape), self.events[name][0]
        for plate in counts.keys() & self.dims[name].keys():
            shape[self.dims[name][plate] - event_dim] = counts[plate][1]
        return jax.ShapeDtypeStruct(tuple(shape), site.dtype)

    def observations(self) -> dict[str, jax.Array]:
        """Return the observed values over all rows."""
        values = self._trace(self.all_rows)
        return {name: values[name]["value"] for name in self.observed}

    @property
    def leaves(self) -> list:
        """The leaves of the model's arguments."""
        return jax.tree.leaves((self.args, self.kwargs))

    def find_nan(self):
        check_values(self.args, self.kwargs, of_rows=True)
        observations = {}
        # All rows of `Rows` may exceed memory.
        if not host_rows((self.args, self.kwargs)):
            with suppress(TypeError, ValueError):  # A model that works for its own number of rows only.
                observations = compiled(ModelTarget.observations, self)()
        found = [(count_nan(array), where) for where, array in arrays(self.args, self.kwargs, observations)]
        return [f"{count} in {where}" for count, where in found if count]

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
        """Return the model's sites, of which only static properties may be used."""
        sites: dict = {}
        watch = Watch()

        def unconstrained():
            sites.update(self._trace({}))
            self._classify(sites)
            if local := local_sites(sites):
                self._integrate(local)
                sites.clear()
                sites.update(self._trace({}))
                self._classify(sites)
            return self._unconstrained(sites), {name: sites[name]["value"] for name in self.discrete}

        with watch:
            self.prototype, self.discrete_shapes = jax.eval_shape(unconstrained)
        watch.check()
        return sites, watch

    def _integrate(self, local):
        """Integrate over latent sites inside of subsampled plates, ``{site: plate}``; no site outside may use them."""
        model, plates = self.model, frozenset(local.values())
        names: list[str] = []

        def outside(fill):
            self.model = Outside(model, plates, fill)
            found = {
                name: site for name, site in self._trace({}).items() if site["type"] in ("sample", "deterministic")
            }
            names[:] = found
            return [x["fn"].log_prob(x["value"]) if x["type"] == "sample" else x["value"] for x in found.values()]

        self.integrated, self.work = sorted(local), Integrated.WORK
        for name, depends in zip(names, influenced(outside, jnp.zeros(())), strict=True):
            if depends:
                raise ValueError(
                    f"The site '{name}' depends on the latent sites {sorted(local)} inside of a subsampled plate from "
                    "outside of it, and a minibatch has those of its own rows only. Put it into the plate, or drop "
                    "`subsample_size`."
                )
        self.model = Integrated(model, plates)

    def _classify(self, sites):
        """Classify the sites of the model, and raise ``ValueError`` for unsupported ones."""
        self.plates = subsample_plate_sizes(sites)
        self.plate_sizes = {name: site["args"][0] for name, site in sites.items() if site["type"] == "plate"}
        # A handler may hide the plates of a site that it shows.
        self.dims = {
            name: {frame.name: frame.dim for frame in site["cond_indep_stack"] if frame.name in self.plate_sizes}
            for name, site in sites.items()
            if site["type"] in ("sample", "deterministic")
        }
        sampled = {name: site for name, site in sites.items() if site["type"] == "sample"}
        self.subsampled = {name: self._around(site) for name, site in sampled.items()}
        self.events = {name: (x["fn"].event_dim, x["infer"].get("event_dims", ())) for name, x in sampled.items()}
        factors = [name for name, site in sampled.items() if site["infer"].get("is_auxiliary")]
        self.factors = [name for name in factors if not sampled[name]["infer"].get("is_prior")]
        self.observed = [name for name, site in sampled.items() if site["is_observed"] and name not in factors]
        self.num_terms = sum(np.size(sampled[name]["value"]) for name in (*self.observed, *self.factors))
        latent = {name: site for name, site in sampled.items() if not site["is_observed"]}
        self.discrete = [name for name, site in latent.items() if site["fn"].support.is_discrete]
        self.latent = [name for name in latent if name not in self.discrete]
        check_kinds(self, latent)
        # The first dimension that is free for enumeration.
        frames = [frame.dim for site in sites.values() for frame in site.get("cond_indep_stack", ())]
        self._enumeration_dim = min(frames, default=0) - 1
        self._groups = frozenset(self.subsampled.values()) - {frozenset()}

    def bind(self, indices: Indices, key: jax.Array | None = None):
        """Return the model with the rows of its subsampled plates, and a key for random likelihoods."""
        key = random.key(0) if key is None else key
        sizes = {name: size for name, (size, _) in self.plates.items()} if indices else {}
        return TakesRows(seed(substitute(self.model, data={**self.params, **indices}), key), indices, sizes)

    def _trace(self, indices, key=None, init_strategy=init_to_uniform, observed=True):
        model = self.bind(indices, key)
        model = model if observed else uncondition(model)
        with any_number_of_rows():
            return trace(substitute(model, substitute_fn=init_strategy)).get_trace(*self.args, **self.kwargs)


def _total(value):
    """Return a number that changes with a value."""
    leaves = (jnp.nan_to_num(jnp.asarray(leaf, float)) for leaf in jax.tree.leaves(value))
    return sum(jnp.sum(leaf) for leaf in leaves)


def _weight(site):
    """Return the weight of a site's log density without the power to which a handler says that it raised it."""
    power = site["infer"].get("inverse_temperature")
    return site["scale"] if power is None else site["scale"] / power
