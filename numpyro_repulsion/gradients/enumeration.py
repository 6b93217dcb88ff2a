"""Discrete latent sites: the potential energy summed over their values, also with subsampled rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
import importlib.util
import math

import jax

from numpyro.handlers import block, scale, substitute
from numpyro.infer.util import potential_energy

__all__ = ["check_enumeration", "enumerated_energy", "subsampled"]


def enumerated_energy(
    model: Callable,
    args: tuple,
    kwargs: Mapping,
    z: dict[str, jax.Array],
    values: dict[str, jax.Array],
    weights: Mapping[str, float],
    groups: frozenset[frozenset[str]],
    dim: int,
) -> jax.Array:
    r"""Return U at one particle, summed over the values of discrete latent sites.

    NumPyro multiplies the log density of each site by N / B for a minibatch of B of the N rows of its plate, and then
    sums over discrete values. For values of single rows the sum over rows must come last, and the factor with it:
    :math:`-\frac{N}{B} \sum_{i \in \text{batch}} \log \sum_c p(c) p(y_i | c)`. This function therefore processes sites
    plate by plate without the factor, and multiplies the result by it. :func:`check_enumeration` ensures that no sum
    has terms of different plates.

    :param model: the model, with its rows and key bound.
    :param z: unconstrained values of the continuous latent sites.
    :param values: the same values in their supports.
    :param weights: N / B of each subsampled plate.
    :param groups: the non-empty sets of subsampled plates in which the model has sites.
    :param dim: the first dimension free for enumeration.
    """
    from numpyro.contrib.funsor import config_enumerate, enum, log_density

    def within(group):
        """Hide all sites except those in exactly these subsampled plates."""
        return lambda site: site["type"] == "sample" and subsampled(site, weights) != group

    energy = potential_energy(
        block(enum(config_enumerate(model), dim), hide_fn=within(frozenset())), args, kwargs, z, enum=True
    )
    for group in groups:
        weight = math.prod(weights[name] for name in group)
        known = substitute(enum(config_enumerate(model), dim), data=values)
        part = block(scale(known, scale=1.0 / weight), hide_fn=within(group))
        energy = energy - weight * log_density(part, args, kwargs, {})[0]
    return energy


def subsampled(site: dict, plates: Mapping) -> frozenset[str]:
    """Return the subsampled plates that contain a site."""
    return frozenset(frame.name for frame in site["cond_indep_stack"]) & frozenset(plates)


def check_enumeration(
    discrete: Mapping[str, dict],
    plates: Mapping,
    dependents: Callable[[], Mapping[str, Mapping[str, set]]],
) -> None:
    """Raise an error for discrete latent sites that cannot be summed over, in general or with minibatches.

    :param discrete: the discrete latent sites by name.
    :param plates: the subsampled plates.
    :param dependents: returns for every discrete site the sites whose log density depends on its value, with the
        subsampled plates that these use.
    :raises ImportError: if funsor, which computes the sums, is not installed.
    :raises ValueError: for a site that cannot be summed over.
    """
    if discrete and importlib.util.find_spec("funsor") is None:
        raise ImportError(
            f"The sites {sorted(discrete)} are discrete and have no observations (obs is None); to observe them, pass "
            "the data to the model. Summing over them needs funsor: pip install funsor; or marginalize them by hand "
            "(numpyro.distributions.MixtureSameFamily)."
        )
    for name, site in discrete.items():
        distribution = site["fn"]
        if not distribution.has_enumerate_support:
            raise ValueError(
                f"Discrete latent site '{name}' has a {type(distribution).__name__} distribution, whose values cannot "
                "be summed over. Marginalize it by hand, or replace it by a distribution with few values, such as "
                "numpyro.distributions.Categorical."
            )
        asked = site["infer"].get("enumerate", "parallel")
        if asked != "parallel":
            raise ValueError(
                f"Discrete latent site '{name}' asks for enumerate={asked!r}, but particles have no discrete "
                "coordinates, so it must be summed over: write infer={'enumerate': 'parallel'}."
            )
    if not (discrete and plates):
        return
    for name, sites in dependents().items():
        own = subsampled(discrete[name], plates)
        for other, seen in sites.items():
            if plate := sorted(seen ^ own):
                raise ValueError(
                    f"Discrete latent site '{name}' would be summed over, and the density of the site '{other}' "
                    f"depends on it, but only one of them uses the rows of the subsampled plate {plate}: the logarithm "
                    "of a sum over its values is not a sum over rows, so no minibatch estimates it. Marginalize it "
                    "by hand (numpyro.distributions.MixtureSameFamily), put both into the plate, or drop "
                    "`subsample_size`."
                )
