"""How the sites of a model use the rows of its plates, and checks for uses that give a wrong posterior."""

from __future__ import annotations

from collections.abc import Callable, Mapping
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_repulsion.gradients.dependence import EQUAL, OTHER, POSITION, Fact, Overrun, Reader

__all__ = ["Usage", "check_bounds", "check_latent", "check_sites", "read_usage", "rows_outside"]


class Usage(NamedTuple):
    """What the parts of a model depend on; causes are ``("rows", plate)`` and ``("site", discrete site)``.

    - **densities** - by site, the fact of its log density, entry by entry of its batch.
    - **values** - by latent site, the fact of its value given the unconstrained one.
    - **deterministic** - by deterministic site, the fact of its value.
    - **overruns** - indices beyond the end of an axis, found for the last rows of each plate.
    - **taken** - by plate, the number of these last rows.
    """

    densities: dict[str, Fact]
    values: dict[str, Fact]
    deterministic: dict[str, Fact]
    overruns: list[Overrun]
    taken: dict[str, int]

    def rows(self, name: str) -> set[str]:
        """Return the plates on whose rows the log density of a site depends."""
        return {label for kind, label in self.densities[name].causes if kind == "rows"}

    def discrete(self, name: str) -> set[str]:
        """Return the discrete sites on which the log density of a site depends."""
        return {label for kind, label in self.densities[name].causes if kind == "site"}


def read_usage(program: Callable, plates: Mapping, discrete: Mapping, prototype: Mapping) -> Usage:
    """Return the usage of a model.

    :param program: ``(rows, discrete values, unconstrained values) -> (densities, values, deterministic)``.
    :param plates: ``{name: (size, number of rows taken)}``.
    :param discrete: shapes and types of the values of discrete sites.
    :param prototype: shapes and types of the unconstrained values.
    """
    rows, facts = {}, {}
    for name, (size, batch) in plates.items():
        rows[name] = jnp.arange(batch)
        last = np.arange(size - batch, size, dtype=np.int64)
        label = ("rows", name)
        facts[name] = Fact.of((batch,), [label], frozenset([label]), last)
    known = {name: Fact.of(site.shape, [("site", name)], OTHER) for name, site in discrete.items()}
    free = {name: Fact.of(site.shape) for name, site in prototype.items()}
    reader = Reader()
    found: Any = reader.read(program, (rows, dict(discrete), dict(prototype)), (facts, known, free))
    densities, values, deterministic = found
    taken = {name: batch for name, (_, batch) in plates.items()}
    return Usage(densities, values, deterministic, list(reader.overruns), taken)


def check_bounds(usage: Usage, sizes: Mapping[str, int]) -> None:
    """Raise ``ValueError`` for plates with more rows than the data.

    :param sizes: the sizes of the plates.
    """
    for causes, largest, length in usage.overruns:
        names = sorted(label for kind, label in causes if kind == "rows")
        if names:
            plates = " and ".join(f"'{name}' of size {sizes[name]}" for name in names)
            raise ValueError(
                f"The rows of the plate {plates} index an axis of length {length} up to {largest}, and JAX would use "
                "the last entry for every row that does not exist. Make the plate as long as the data, "
                f"`numpyro.plate({names[0]!r}, len(y), ...)`; or, if a mask hides these rows, index with "
                "`jnp.minimum(i, len(y) - 1)`."
            )


def check_latent(usage: Usage, latent: list[str], plates: Mapping) -> None:
    """Raise ``ValueError`` for priors that depend on the minibatch."""
    for name in latent:
        causes = usage.densities[name].causes | usage.values[name].causes
        if seen := sorted(label for kind, label in causes if kind == "rows" and label in plates):
            raise ValueError(
                f"The prior of the latent site '{name}' depends on the rows of the subsampled plate '{seen[0]}': every "
                "minibatch would have a different prior. Compute what the prior needs from the whole data, outside "
                "the plate, or drop `subsample_size`."
            )


def check_sites(
    usage: Usage, names: list[str], own: Mapping[str, frozenset], dims: Mapping[str, Mapping], plates: Mapping
) -> None:
    """Raise ``ValueError`` for sites in subsampled plates with minibatches that would not add up to all rows.

    :param names: the names of the sites.
    :param own: by site, the subsampled plates that contain it.
    :param dims: by site, the dimension of each plate.
    :param plates: ``{name: (size, subsample_size)}`` of the subsampled plates.
    """
    for plate, (size, batch) in plates.items():
        remedy = (
            f"Pass the whole data to the model and take the rows inside the plate: `with numpyro.plate('{plate}', "
            f"{size}, subsample_size={batch}) as i: ... obs=y[i]`, or use `numpyro.subsample`."
        )
        if not any(plate in usage.rows(name) for name in names):
            raise ValueError(
                f"The likelihood does not depend on which rows the subsampled plate '{plate}' draws: every update "
                f"would use the same {batch} of {size} rows. {remedy}"
            )
        for name in names:
            if plate not in own[name]:
                continue
            axes, dim = usage.densities[name].axes, dims[name][plate]
            kind = axes[dim] if len(axes) >= -dim else EQUAL
            local = any(plate in own[site] for site in usage.discrete(name))
            if plate not in usage.rows(name) and not local:
                if kind != EQUAL:
                    raise ValueError(
                        f"The site '{name}' does not depend on which rows the subsampled plate '{plate}' draws, but "
                        f"other sites do: every update would use the same {batch} of {size} rows of it. {remedy}"
                    )
            elif kind & POSITION:
                raise ValueError(
                    f"The site '{name}' combines the rows that the subsampled plate '{plate}' draws with values that "
                    f"stay the same in every minibatch. {remedy} This applies to covariates, masks and weights too."
                )
            elif any(("rows", plate) in other for i, other in enumerate(axes) if i - len(axes) != dim):
                raise ValueError(
                    f"In the log density of the site '{name}' the rows of the subsampled plate '{plate}' lie along an "
                    f"axis other than dimension {dim}, that of the plate: every row would be combined with all other "
                    "rows. Drop an axis of length one, as in `(X[i] @ w)[:, 0]`, or give the plate another `dim`."
                )
            elif kind == EQUAL and usage.taken[plate] > 1:
                raise ValueError(
                    f"The site '{name}' has one log density for a whole minibatch of the subsampled plate '{plate}', "
                    "and NumPyro would count it once for every row. Give it one log density for each row (no sum over "
                    "rows, no `.to_event` over them), or move it out of the plate and scale it: `with "
                    f"numpyro.handlers.scale(scale={size} / len(i)): ...`."
                )
            elif ("mixed", plate) in usage.densities[name].causes:
                raise ValueError(
                    f"At the site '{name}' the density of a row depends on the other rows that the subsampled plate "
                    f"'{plate}' draws, as after `x[i] - x[i].mean(0)` or batch normalization: no average over "
                    "minibatches is the posterior. Compute what rows share from all rows, outside of the plate; write "
                    "what is of one row with jax.vmap."
                )


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
        outside = sorted((usage.rows(name) & set(plates)) - own[name])
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
