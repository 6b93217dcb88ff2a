"""How the sites of a model use the rows of its plates, found by running it on chosen rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro.ops.provenance import eval_provenance

__all__ = [
    "Probes",
    "Usage",
    "abstract_usage",
    "check_latent",
    "check_sites",
    "check_use",
    "influenced",
    "point",
    "rows_outside",
]

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
    """Inputs of a run of the model; a batch of them has leading axes.

    - **number** - of the point, an index of `RADII`.
    - **rows** - by plate.
    - **discrete** - by discrete site, the value of all its entries.
    - **key** - the number of the key.
    """

    number: Any
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
    :param plates: ``{plate: (size, rows taken)}`` of the subsampled plates.
    :param discrete: the discrete sites.
    """

    def __init__(self, run: Callable, plates: Mapping[str, tuple[int, int]], discrete: list[str]):
        self._plates, self._order = plates, {}
        self._cases: list[Case] = []
        rng = np.random.default_rng(0)
        nothing = dict.fromkeys(discrete, 0)
        for number in range(len(RADII) if plates else 1):
            # Neighbors too: a lag shows among them, and may not among scattered rows.
            rows = {name: _rows(rng, *counts, scattered=number > 0) for name, counts in plates.items()}
            self._add((None, number), Case(number, rows, nothing, 0))
            for name, (size, batch) in plates.items():
                old, order, keep = rows[name], rng.permutation(batch), rng.random(batch) < 0.5
                keep[rng.integers(batch)] = True
                others = np.setdiff1d(np.arange(size), old) if size <= 4 * batch else _rows(rng, size, 3 * batch, True)
                new = np.resize(rng.permutation(others) if len(others) else old[::-1], batch)
                self._order[name, number] = order, keep
                probes = (np.where(keep, old, new), old[order], np.where(keep, new[::-1], old))
                for kind, probe in enumerate((*probes, np.where(keep, new[::-1], new))):
                    self._add((name, number, kind), Case(number, rows | {name: probe}, nothing, 0))
        first = self._cases[0]
        self._add(("key",), first._replace(key=1))
        for name in discrete:
            self._add((name,), first._replace(discrete=nothing | {name: 1}))
        cases = jax.tree.map(lambda *x: jnp.asarray(np.stack(x), jnp.int32), *self._cases)
        self.densities, self._values = jax.tree.map(np.asarray, run(cases))

    def _add(self, name, case):
        self._place = getattr(self, "_place", {}) | {name: len(self._cases)}
        self._cases.append(case)

    def _of(self, name: str, *case) -> list:
        """Return what a site has in a case."""
        return [found[name][self._place[case]] for found in (self.densities, self._values) if name in found]

    def _differ(self, name, one, other):
        pairs = zip(self._of(name, *one), self._of(name, *other), strict=True)
        return any(not np.array_equal(a, b, equal_nan=True) for a, b in pairs)

    def usage(self) -> Usage:
        """Return on what the sites depend."""
        names = list(self.densities | self._values)

        def depends(name, plate):
            points = range(len(RADII))
            return any(self._differ(name, (None, k), (plate, k, kind)) for k in points for kind in (0, 2))

        discrete = [case[0] for case in self._place if len(case) == 1 and case != ("key",)]
        return Usage(
            {name: {plate for plate in self._plates if depends(name, plate)} for name in names},
            {name: {site for site in discrete if self._differ(name, (None, 0), (site,))} for name in names},
            {name for name in names if self._differ(name, (None, 0), ("key",))},
        )

    def runs(self, name: str, plate: str) -> Iterator[tuple]:
        """Yield, point by point, the densities of a site in the five cases, the order and the rows kept."""
        for k in range(len(RADII)):
            found = (
                self.densities[name][self._place[case]] for case in ((None, k), *((plate, k, i) for i in range(4)))
            )
            yield *found, *self._order[plate, k]


def _rows(rng, size, batch, scattered):
    if not scattered:
        return (rng.integers(size) + np.arange(batch)) % size
    return (
        rng.choice(size, batch, replace=False)
        if size < 1 << 20
        else np.unique(rng.integers(size, size=2 * batch))[:batch]
    )


def point(number: jax.Array | int, prototype: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Return unconstrained values that are spread over an interval and cost hardly anything to compute."""
    radius = jnp.asarray(RADII)[number]
    return {
        name: (radius * jnp.sin(1.0 + k + 7.0 * number + 2.399963 * jnp.arange(site.size)))
        .reshape(site.shape)
        .astype(site.dtype)
        for k, (name, site) in enumerate(prototype.items())
    }


def abstract_usage(evaluate: Callable, rows: Mapping, discrete: Mapping, z: Mapping) -> Usage:
    """Return the usage by the structure of the program, for a model whose data have no values.

    :param evaluate: ``(rows, discrete values, z, key) -> dictionaries by site``.
    """

    def named(**inputs):
        parts: dict = {"rows": {}, "discrete": {}}
        for name, value in inputs.items():
            kind, _, label = name.partition(" ")
            parts.setdefault(kind, {})[label] = value
        return evaluate(parts["rows"], parts["discrete"], parts["z"][""], parts["key"][""])

    inputs = {f"rows {name}": x for name, x in rows.items()} | {f"discrete {name}": x for name, x in discrete.items()}
    found: dict = {}
    for part in eval_provenance(named, **inputs, z=z, key=jax.random.key(0)):
        for name, causes in part.items():
            found[name] = found.get(name, frozenset()).union(*jax.tree.leaves(causes, is_leaf=_is_set))

    def of(kind):
        return {name: {cause[len(kind) :] for cause in each if cause.startswith(kind)} for name, each in found.items()}

    return Usage(of("rows "), of("discrete "), {name for name, each in found.items() if "key" in each})


def influenced(fn: Callable, cause: Any, *rest: Any) -> list[bool]:
    """Return for each output of ``fn(cause, *rest)`` whether it depends on ``cause``, by the program's structure."""
    found = eval_provenance(lambda cause, rest: fn(cause, *rest), cause=cause, rest=rest)
    return ["cause" in causes for causes in jax.tree.leaves(found, is_leaf=_is_set)]


def _is_set(x):
    return isinstance(x, frozenset)


def check_latent(usage: Usage, latent: list[str]) -> None:
    """Raise ``ValueError`` for priors that depend on the minibatch."""
    for name in latent:
        if seen := sorted(usage.rows[name]):
            raise ValueError(
                f"The prior of the latent site '{name}' depends on the rows of the subsampled plate '{seen[0]}': every "
                "minibatch would have a different prior. Compute what the prior needs from the whole data, outside "
                "the plate, or drop `subsample_size`."
            )


def check_use(plates: Mapping, usage: Usage, names: Iterable[str]) -> None:
    """Raise ``ValueError`` for subsampled plates whose rows no site uses."""
    for plate, (size, batch) in plates.items():
        if not any(plate in usage.rows[name] for name in names):
            raise ValueError(
                f"The likelihood does not depend on which rows the subsampled plate '{plate}' draws: every update "
                f"would use the same {batch} of {size} rows. {_remedy(plate, size, batch)}"
            )


def _remedy(plate, size, batch):
    return (
        f"Pass the whole data to the model and take the rows inside the plate: `with numpyro.plate('{plate}', "
        f"{size}, subsample_size={batch}) as i: ... obs=y[i]`, or use `numpyro.subsample`."
    )


def check_sites(probes: Probes, usage: Usage, own: Mapping[str, frozenset], dims: Mapping, plates: Mapping) -> None:
    """Raise ``ValueError`` for sites whose minibatches do not add up to all rows.

    :param own: by name of each sample site, the subsampled plates that contain it.
    :param dims: by site, the dimension of each plate.
    :param plates: ``{name: (size, subsample_size)}`` of the subsampled plates.
    """
    for plate, counts in plates.items():
        for name in own:
            if plate in own[name]:
                local = any(plate in own[site] for site in usage.discrete[name])
                _check_inside(probes, name, plate, dims[name][plate], local, usage, counts)
            elif plate in usage.rows[name]:
                _check_outside(probes, name, plate)


def _check_inside(probes, name, plate, dim, local, usage, counts):
    (size, batch), remedy = counts, _remedy(plate, *counts)
    for a, b, permuted, c, d, order, keep in probes.runs(name, plate):
        # Of sites without an axis for the plate, and those that have the same value for all its rows.
        is_one = a.ndim < -dim or all(
            np.array_equal(x, np.broadcast_to(x.take([0], dim), x.shape), equal_nan=True) for x in (a, b, d)
        )
        if plate not in usage.rows[name]:
            if not is_one and not local and name not in usage.random:
                raise ValueError(
                    f"The site '{name}' does not depend on which rows the subsampled plate '{plate}' draws, but "
                    f"other sites do: every update would use the same {batch} of {size} rows of it. {remedy}"
                )
            continue
        if (
            is_one
            and len(order) > 1
            and not (np.array_equal(a, b, equal_nan=True) and np.array_equal(a, d, equal_nan=True))
        ):
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
                f"'{plate}' draws, as after `x[i] - x[i].mean(0)`, a lag inside of a minibatch or batch normalization: "
                "no average over minibatches is the posterior. Compute what rows share from all rows, outside of the "
                "plate, and take its rows with `[i]`, as in `y[i - 1]` for a lag; write what is of one row with "
                "jax.vmap."
            )
        if not keeps_order:
            raise ValueError(
                f"The site '{name}' combines the rows that the subsampled plate '{plate}' draws with values that "
                f"stay the same in every minibatch. {remedy} This applies to covariates, masks and weights too."
            )


def _check_outside(probes, name, plate):
    for a, b, _, c, d, *_ in probes.runs(name, plate):
        sums = [np.sum(x, dtype=float) for x in (a, b, c, d)]
        a, b, c, d = sums
        if abs((b - a) - (d - c)) > 0.2 * ROUNDING * max(map(abs, sums)) + ROUNDING:
            raise ValueError(
                f"The site '{name}' uses rows of the subsampled plate '{plate}' outside of that plate, and its log "
                "density is not a sum over these rows: what a row adds to it depends on the others, as with a normal "
                "distribution of a whole minibatch or a statistic of it. No average over minibatches is the posterior. "
                "Compute what rows share from all rows, or drop `subsample_size`."
            )


def _equal(a, b):
    with np.errstate(invalid="ignore"):
        return bool(np.all((a == b) | (np.abs(a - b) <= ROUNDING * (1 + np.abs(a))) | (np.isnan(a) & np.isnan(b))))


def rows_outside(
    usage: Usage,
    scales: Mapping[str, Any],
    over_all_rows: Callable[[], Mapping[str, Any]],
    factors: list[str],
    own: Mapping[str, frozenset],
    plates: Mapping,
) -> dict[str, list[str]]:
    """Return the sites that use rows of subsampled plates from outside, with these plates.

    It omits sites that are multiplied by size / number of rows for any number of rows, as NumPyro does in a plate.

    :param scales: by name of each observed site and factor, the scale of its log density.
    :param over_all_rows: returns the same over all rows, if the model works for these.
    :param factors: the names of the factors, whose values may include the scale.
    :raises ValueError: for a site that only its own plates scale.
    """
    found = {}
    for name, scale in scales.items():
        outside = sorted(usage.rows[name] - own[name])
        if not outside:
            continue
        factor, needed = (
            math.prod(plates[plate][0] / plates[plate][1] for plate in names) for names in (own[name], outside)
        )
        if _is(_ratio(scale, 1.0), factor) and name not in factors:
            size, batch = plates[outside[0]]
            raise ValueError(
                f"The site '{name}' uses rows of the subsampled plate '{outside[0]}' outside of that plate, so its "
                f"log density is that of {batch} of {size} rows. Put it into the plate, or scale its log "
                f"density: `with numpyro.handlers.scale(scale={size} / len(i)): ...`."
            )
        if not _is(_ratio(scale, over_all_rows().get(name, math.nan)), factor * needed):
            found[name] = outside
    return found


def _ratio(scale, other):
    """Return the ratio of two scales of a log density; NaN if they are unknown."""
    if any(isinstance(x, jax.core.Tracer) for x in (scale, other)):
        return math.nan
    return np.divide(*(np.asarray(1.0 if x is None else x, float) for x in (scale, other)))


def _is(ratio, wanted):
    return bool(np.all(np.isclose(ratio, wanted)))
