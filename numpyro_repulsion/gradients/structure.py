"""What the sites of a model depend on, and checks of its plates, latent sites and data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
import importlib.util
import math
import operator
from typing import Any, NamedTuple
import warnings

import jax
import jax.numpy as jnp
import numpy as np

import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.handlers import block
from numpyro.ops.provenance import eval_provenance
from numpyro.primitives import _PYRO_STACK, Messenger
from numpyro.util import not_jax_tracer

from numpyro_repulsion.rows import Rows, losses


class Watch(Messenger):
    """Records the sites and plates of a model, also in the bodies of ``scan`` and ``cond``, unlike other handlers.

    - **blocks** - whether ``numpyro.handlers.block`` is around what asks for a key.
    """

    def __init__(self):
        super().__init__()
        self.blocks, self._depth = False, 0
        self._plates: dict[str, tuple[int, int]] = {}
        self._hidden_plates: list[str] = []
        self._names: set[str] = set()
        self._fixed: dict[str, bool] = {}

    def process_message(self, msg):
        if msg["type"] == "prng_key":
            # Bodies of loops run inside of a block of NumPyro's own.
            self.blocks |= not self._depth and any(isinstance(handler, block) for handler in _PYRO_STACK)
        elif msg["type"] == "plate":
            size, batch = msg["args"]
            self._check_plate(msg["name"], size, size if batch is None else batch)
            if self._depth and batch is not None and batch < size:
                self._hidden_plates.append(msg["name"])
        elif msg["type"] in ("sample", "deterministic", "param"):
            self._names.add(msg["name"])
            # What NumPyro shows once more after a `scan` has its value from inside.
            if msg["type"] == "sample" and not msg["is_observed"]:
                self._fixed.setdefault(msg["name"], not self._depth and msg["kwargs"]["rng_key"] is None)
        elif msg["type"] == "control_flow":
            msg["args"] = tuple(self._watched(arg) if callable(arg) else arg for arg in msg["args"])

    def check(self) -> None:
        """Raise ``ValueError`` for latent sites with fixed values, and for plates whose rows cannot be chosen."""
        # NumPyro gives a key to each latent site that no handler has given a value.
        if fixed := [name for name, is_fixed in self._fixed.items() if is_fixed]:
            raise ValueError(
                f"A handler inside the model gives the latent sites {fixed} values, so the posterior would not depend "
                "on their draws. To fix them, write block(substitute(model, data=values), "
                f"hide={fixed}) with both from numpyro.handlers; to start there, init_strategy=init_around(values)."
            )
        if self._hidden_plates:
            raise ValueError(
                f"The subsampled plate {self._hidden_plates} lies inside `scan` or `cond`, where its rows cannot be "
                "chosen. Put the plate around the sites outside, or drop its `subsample_size`."
            )

    def _check_plate(self, name, size, batch):
        """Raise ``ValueError`` for plates that NumPyro turns into a wrong posterior or a misleading error."""
        try:
            size, batch = operator.index(size), operator.index(batch)
        except TypeError:
            return  # NumPyro reports these.
        if batch == 0:
            raise ValueError(f"The plate '{name}' has subsample_size=0. Write subsample_size=min(100, {size}).")
        if batch > size:
            raise ValueError(
                f"The plate '{name}' has subsample_size={batch}, more than its {size} rows. Use "
                f"subsample_size=min({batch}, {size}), which uses all rows in every update, or omit it."
            )
        if batch < size > (most := 2**31 - 1):
            raise ValueError(
                f"The subsampled plate '{name}' has {size} rows; rows are numbered by 32-bit integers, so it can have "
                f"{most} at most. Split the data over several plates."
            )
        if name in self._names:
            raise ValueError(
                f"The plate '{name}' has the name of a site of the model, and NumPyro would omit that site from the "
                "posterior. Give one of them another name."
            )
        first = self._plates.setdefault(name, (size, batch))
        if first != (size, batch) and (first[0] > first[1] or size > batch):
            raise ValueError(
                f"Two plates have the name '{name}', one with size={first[0]} and subsample_size={first[1]}, the "
                f"other with size={size} and subsample_size={batch}, so both would use the rows of one of them. Give "
                "them different names."
            )

    def _watched(self, body):
        def watched(*args):
            self._depth += 1
            try:
                with self:
                    return body(*args)
            finally:
                self._depth -= 1

        return watched


def check_kinds(target: Any, latent: Mapping[str, dict]) -> None:
    """Raise ``ValueError`` for latent sites that particles cannot represent."""
    for name, site in latent.items():
        if isinstance(site["fn"], dist.Delta):
            raise ValueError(
                f"Latent site '{name}' has a delta distribution; write `numpyro.deterministic('{name}', ...)`."
            )
        support, is_empty = site["fn"].support, 0 in site["fn"].shape()
        # NumPyro's transforms and densities support some values without elements.
        is_whole = 0 not in site["fn"].batch_shape and getattr(support, "base_constraint", None) is constraints.real
        if is_empty and not (is_whole or support is constraints.real):
            raise ValueError(
                f"Latent site '{name}' has shape {site['fn'].shape()} and so no elements, which NumPyro's "
                "transforms and densities do not support; leave the site out if it is empty."
            )
    if not target.latent:
        raise ValueError(
            "The model has no continuous latent site, so there is nothing to sample; it needs at least one "
            f"`numpyro.sample` statement without `obs`. Discrete latent sites: {target.discrete or 'none'}."
        )


def check_values(
    args: tuple = (), kwargs: Mapping = {}, observations: Mapping[str, Any] = {}, of_rows: bool = False
) -> None:
    """Raise ``ValueError`` for values that JAX would change in silence, by narrower types and without masks.

    :param of_rows: whether to read all `Rows`, and not to look at arrays in memory.
    """
    for where, array in arrays(args, kwargs, observations):
        if isinstance(array, Rows) == of_rows and (lost := losses(array)):
            raise ValueError(f"{where[0].upper()}{where[1:]} {lost}")


def arrays(args, kwargs, observations):
    """Yield the arrays of a model, and where they are, in words."""
    leaves = jax.tree.leaves_with_path({"args": args, "kwargs": dict(kwargs)}, is_leaf=lambda x: isinstance(x, Rows))
    named = [(f"the model's {path[0].key}{jax.tree_util.keystr(path[1:])}", leaf) for path, leaf in leaves]
    for where, leaf in [*named, *((f"the observed site '{name}'", x) for name, x in observations.items())]:
        array = np.asarray(leaf) if type(leaf).__module__.split(".")[0] in ("pandas", "polars") else leaf
        if isinstance(array, np.ndarray | jax.Array | Rows) and not_jax_tracer(getattr(array, "source", array)):
            yield where, array


@contextmanager
def any_number_of_rows():
    """Allow more rows from outside than the plate's subsample has."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "subsample_size does not match")
        yield


# --- What depends on what. ---

#: The radii of the points at which the model is run: far from zero, where terms differ, and near, where none saturates.
RADII = (1.0, 1.0, 0.1)
#: Densities count as equal up to this part of them: rounding differs from place to place in a minibatch.
ROUNDING = 1e-4


class Usage(NamedTuple):
    """On what the sites of a model depend: latent sites by density or support, deterministic ones by value.

    - **rows** - by site, the plates.
    - **discrete** - by site, the discrete sites.
    - **random** - the sites that depend on the key.
    """

    rows: dict[str, set[str]]
    discrete: dict[str, set[str]]
    random: set[str]


class Case(NamedTuple):
    """Inputs of a run of the model; of discrete sites one value for all entries. A batch of cases has leading axes."""

    point: Any
    rows: dict[str, Any]
    discrete: dict[str, Any]
    key: Any


class Probes:
    """Runs of a model on chosen rows, all in one program.

    For each plate and point there are five: rows; the same with some exchanged; the same in another order; and the
    first two with the rest of the rows exchanged. The density of a row must go with the row, whatever the other rows,
    and a density outside of the plate must be a sum over rows: what some rows change may not depend on the rest.

    :param run: ``(cases) -> (densities, values)``, each a dictionary of arrays with a leading axis of cases. Densities
        come entry by entry; of values, the latent sites in their supports and the deterministic sites, one number.
    :param plates: ``{plate: (size, rows taken)}``.
    """

    def __init__(self, run: Callable, plates: Mapping[str, tuple[int, int]], discrete: list[str]):
        self._plates, self._discrete, self._order = plates, discrete, {}
        cases: dict[tuple, Case] = {}
        rng = np.random.default_rng(0)
        nothing = dict.fromkeys(discrete, 0)
        for number in range(len(RADII) if plates else 1):
            # Neighbors too: a lag shows among them, and may not among scattered rows.
            rows = {name: _rows(rng, *counts, scattered=number > 0) for name, counts in plates.items()}
            cases["rows", number] = Case(number, rows, nothing, 0)
            for name, (size, batch) in plates.items():
                old, order, keep = rows[name], rng.permutation(batch), rng.random(batch) < 0.5
                keep[rng.integers(batch)] = True
                others = np.setdiff1d(np.arange(size), old) if size <= 4 * batch else _rows(rng, size, 3 * batch, True)
                new = np.resize(rng.permutation(others) if len(others) else old[::-1], batch)
                self._order[name, number] = order, keep
                rest = np.where(keep, new[::-1], old), np.where(keep, new[::-1], new)
                for kind, probe in enumerate((np.where(keep, old, new), old[order], *rest)):
                    cases["rows", number, name, kind] = Case(number, rows | {name: probe}, nothing, 0)
        first = cases["rows", 0]
        cases["key", 0] = first._replace(key=1)
        cases |= {("discrete", name): first._replace(discrete=nothing | {name: 1}) for name in discrete}
        found = run(jax.tree.map(lambda *x: jnp.asarray(np.stack(x), jnp.int32), *cases.values()))
        self.densities, values = jax.tree.map(np.asarray, found)
        self._names, self._both = list(self.densities | values), (self.densities, values)
        self._place = {case: place for place, case in enumerate(cases)}

    def _depends(self, name, *case, number=0):
        """Whether what a site has differs from the first case of a point."""
        one, other = self._place["rows", number], self._place[case]
        found = [part[name] for part in self._both if name in part]
        return any(not np.array_equal(x[one], x[other], equal_nan=True) for x in found)

    def usage(self) -> Usage:
        """Return on what the sites depend."""
        probes = [(k, kind) for k in range(len(RADII)) for kind in (0, 2)]
        rows = {
            name: {
                plate
                for plate in self._plates
                if any(self._depends(name, "rows", k, plate, kind, number=k) for k, kind in probes)
            }
            for name in self._names
        }
        discrete = {name: {x for x in self._discrete if self._depends(name, "discrete", x)} for name in self._names}
        return Usage(rows, discrete, {name for name in self._names if self._depends(name, "key", 0)})

    def runs(self, name: str, plate: str) -> Iterator[tuple]:
        """Yield, point by point, the densities of a site in the five cases, the order and the rows kept."""
        for k in range(len(RADII)):
            cases = ("rows", k), *(("rows", k, plate, kind) for kind in range(4))
            yield *(self.densities[name][self._place[case]] for case in cases), *self._order[plate, k]


def _rows(rng, size, batch, scattered):
    if not scattered:
        return (rng.integers(size) + np.arange(batch)) % size
    if size < 1 << 20:
        return rng.choice(size, batch, replace=False)
    return np.unique(rng.integers(size, size=2 * batch))[:batch]


def point(number: jax.Array | int, prototype: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Return unconstrained values that are spread over an interval and cost hardly anything to compute."""
    radius = jnp.asarray(RADII)[number]
    return {
        name: (radius * jnp.sin(1.0 + k + 7.0 * number + 2.399963 * jnp.arange(site.size)))
        .reshape(site.shape)
        .astype(site.dtype)
        for k, (name, site) in enumerate(prototype.items())
    }


def abstract_usage(target: Any) -> Usage:
    """Return the usage by the structure of the program of a posterior."""
    given = {"rows ": target.first_rows, "discrete ": target.discrete_shapes}

    def run(z, key, **inputs):
        parts = ({name: inputs[kind + name] for name in part} for kind, part in given.items())
        return target.evaluate(*parts, z, key)

    inputs = {kind + name: x for kind, part in given.items() for name, x in part.items()}
    found: dict = {}
    for part in eval_provenance(run, **inputs, z=target.prototype, key=jax.random.key(0)):
        for name, causes in part.items():
            found[name] = found.get(name, frozenset()).union(*_sets(causes))

    def of(kind):
        return {name: {cause[len(kind) :] for cause in each if cause.startswith(kind)} for name, each in found.items()}

    return Usage(of("rows "), of("discrete "), {name for name, each in found.items() if "key" in each})


def influenced(fn: Callable, cause: Any, *rest: Any) -> list[bool]:
    """Return for each output of ``fn(cause, *rest)`` whether it depends on ``cause``, by the program's structure."""
    found = eval_provenance(lambda cause, rest: fn(cause, *rest), cause=cause, rest=rest)
    return ["cause" in causes for causes in _sets(found)]


def _sets(causes):
    return jax.tree.leaves(causes, is_leaf=lambda x: isinstance(x, frozenset))


# --- What may depend on what. ---


def _remedy(plate, size, batch):
    return (
        f"Pass the whole data to the model and take the rows inside the plate: `with numpyro.plate('{plate}', "
        f"{size}, subsample_size={batch}) as i: ... obs=y[i]`, or use `numpyro.subsample`."
    )


def check_sites(target: Any, probes: Probes) -> None:
    """Raise ``ValueError`` for priors that use rows, plates without use, and minibatches that do not add up."""
    for name in target.latent:
        if seen := sorted(target.usage.rows[name]):
            raise ValueError(
                f"The prior of the latent site '{name}' depends on the rows of the subsampled plate '{seen[0]}': every "
                "minibatch would have a different prior. Compute what the prior needs from the whole data, outside "
                "the plate, or drop `subsample_size`."
            )
    # Of data whose rows are all alike no probe tells more.
    unseen = target.plates.keys() - set().union(*(target.usage.rows[name] for name in target.subsampled))
    used = abstract_usage(target).rows if unseen else {}
    for plate in sorted(unseen):
        if not any(plate in used[name] for name in target.subsampled):
            size, batch = target.plates[plate]
            raise ValueError(
                f"The likelihood does not depend on which rows the subsampled plate '{plate}' draws: every update "
                f"would use the same {batch} of {size} rows. {_remedy(plate, size, batch)}"
            )
    for plate in target.plates:
        for name, own in target.subsampled.items():
            if plate in own:
                _check_inside(target, probes, name, plate)
            elif plate in target.usage.rows[name]:
                _check_outside(probes, name, plate)


def _check_inside(target, probes, name, plate):
    usage, dim, (size, batch) = target.usage, target.dims[name][plate], target.plates[plate]
    remedy = _remedy(plate, size, batch)
    is_local = any(plate in target.subsampled[site] for site in usage.discrete[name])
    for a, b, permuted, c, d, order, keep in probes.runs(name, plate):
        # Of sites without an axis for the plate, and those that have the same value for all its rows.
        is_one = a.ndim < -dim or all(_is_same(x, np.broadcast_to(x.take([0], dim), x.shape)) for x in (a, b, d))
        if plate not in usage.rows[name]:
            if not is_one and not is_local and name not in usage.random:
                raise ValueError(
                    f"The site '{name}' does not depend on which rows the subsampled plate '{plate}' draws, but "
                    f"other sites do: every update would use the same {batch} of {size} rows of it. {remedy}"
                )
            continue
        if is_one and len(order) > 1 and not (_is_same(a, b) and _is_same(a, d)):
            raise ValueError(
                f"The site '{name}' has one log density for a whole minibatch of the subsampled plate '{plate}', "
                "and NumPyro would count it once for every row. Give it one log density for each row (no sum over "
                "rows, no `.to_event` over them). If it is a sum over rows, it can also stand outside of the plate and "
                f"be scaled: `with numpyro.handlers.scale(scale={size} / len(i)): ...`."
            )
        if a.ndim < -dim or a.shape[dim] != len(order):
            continue
        a, b, permuted, c, d = (np.moveaxis(x, dim, 0) for x in (a, b, permuted, c, d))
        keeps_order = name in usage.random or _equal(a[order], permuted)
        if not keeps_order and any(
            n == len(order) and _equal(a[order].take(order, k + 1), permuted) for k, n in enumerate(a.shape[1:])
        ):
            raise ValueError(
                f"In the log density of the site '{name}' the rows of the subsampled plate '{plate}' lie along an "
                f"axis other than dimension {dim}, that of the plate: every row would be combined with all other "
                "rows. Drop an axis of length one, as in `(X[i] @ w)[:, 0]`, or give the plate another `dim`."
            )
        pairs = ((a, b, keep), (a, c, ~keep), (b, d, ~keep), (c, d, keep))
        if not all(_equal(x[rows], y[rows]) for x, y, rows in pairs):
            raise ValueError(
                f"At the site '{name}' the density of a row depends on the other rows that the subsampled plate "
                f"'{plate}' draws, as after `x[i] - x[i].mean(0)`, a lag inside of a minibatch or batch "
                "normalization, so minibatch gradients are biased. Compute what rows share from all rows, outside of "
                "the plate, and index it with `[i]`, as in `y[i - 1]` for a lag; use jax.vmap for computations on a "
                "single row."
            )
        if not keeps_order:
            raise ValueError(
                f"The site '{name}' combines the rows that the subsampled plate '{plate}' draws with values that "
                f"stay the same in every minibatch. {remedy} This applies to covariates, masks and weights too."
            )


def _check_outside(probes, name, plate):
    for a, b, _, c, d, *_ in probes.runs(name, plate):
        a, b, c, d = sums = [np.sum(x, dtype=float) for x in (a, b, c, d)]
        if abs((b - a) - (d - c)) > 0.2 * ROUNDING * max(map(abs, sums)) + ROUNDING:
            raise ValueError(
                f"The site '{name}' uses rows of the subsampled plate '{plate}' outside of that plate, and its log "
                "density is not a sum over these rows: what a row adds to it depends on the others, as with a normal "
                "distribution of a whole minibatch or a statistic of it. Minibatch gradients would be biased. "
                "Compute what rows share from all rows, or drop `subsample_size`."
            )


def _is_same(a, b):
    return np.array_equal(a, b, equal_nan=True)


def _equal(a, b):
    with np.errstate(invalid="ignore"):
        return bool(np.all((a == b) | (np.abs(a - b) <= ROUNDING * (1 + np.abs(a))) | (np.isnan(a) & np.isnan(b))))


def rows_outside(target: Any, scales: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the sites that use rows of subsampled plates from outside, with these plates.

    It omits those that are multiplied by size / number of rows for any number of rows, as NumPyro does in a plate, and
    raises ``ValueError`` for those that only their own plates scale.
    """
    found = {}
    for name, scale in scales.items():
        own = target.subsampled[name]
        outside = sorted(target.usage.rows[name] - own)
        if not outside:
            continue
        factor, needed = (
            math.prod(target.plates[plate][0] / target.plates[plate][1] for plate in names) for names in (own, outside)
        )
        # The value of a factor may include the scale.
        if _is_scaled(scale, 1.0, factor) and name not in target.factors:
            size, batch = target.plates[outside[0]]
            raise ValueError(
                f"The site '{name}' uses rows of the subsampled plate '{outside[0]}' outside of that plate, so its "
                f"log density is that of {batch} of {size} rows. Put it into the plate, or scale its log "
                f"density: `with numpyro.handlers.scale(scale={size} / len(i)): ...`."
            )
        if not _is_scaled(scale, target.scales_over_all_rows().get(name, math.nan), factor * needed):
            found[name] = outside
    return found


def _is_scaled(scale, other, wanted):
    """Whether two scales of a log density have the wanted ratio; not if they are unknown."""
    if any(isinstance(x, jax.core.Tracer) for x in (scale, other)):
        return False
    one, other = (np.asarray(1.0 if x is None else x, float) for x in (scale, other))
    return bool(np.all(np.isclose(one / other, wanted)))


def check_enumeration(target: Any, sites: Mapping[str, dict]) -> None:
    """Raise an error for discrete latent sites that cannot be summed over, in general or with minibatches."""
    if target.discrete and importlib.util.find_spec("funsor") is None:
        raise ImportError(
            f"The sites {sorted(target.discrete)} are discrete and have no observations (obs is None); to observe "
            "them, pass the data to the model. Summing over them needs funsor: pip install funsor; or marginalize them "
            "by hand (numpyro.distributions.MixtureSameFamily)."
        )
    for name in target.discrete:
        distribution = sites[name]["fn"]
        if not distribution.has_enumerate_support:
            raise ValueError(
                f"Discrete latent site '{name}' has a {type(distribution).__name__} distribution, whose values cannot "
                "be summed over. Marginalize it by hand, or replace it by a distribution with few values, such as "
                "numpyro.distributions.Categorical."
            )
        if (asked := sites[name]["infer"].get("enumerate", "parallel")) != "parallel":
            raise ValueError(
                f"Discrete latent site '{name}' asks for enumerate={asked!r}, but particles have no discrete "
                "coordinates, so it must be summed over: write infer={'enumerate': 'parallel'}."
            )
    for name in target.discrete if target.plates else ():
        for other, around in target.subsampled.items():
            seen = around | target.usage.rows[other]
            if name in target.usage.discrete[other] and (plate := sorted(seen ^ target.subsampled[name])):
                raise ValueError(
                    f"Discrete latent site '{name}' would be summed over, and the density of the site '{other}' "
                    f"depends on it, but only one of them uses the rows of the subsampled plate {plate}: the "
                    "logarithm of a sum over its values is not a sum over rows, so minibatch gradients would be "
                    "biased. Marginalize it by hand (numpyro.distributions.MixtureSameFamily), put both into the "
                    "plate, or drop `subsample_size`."
                )
