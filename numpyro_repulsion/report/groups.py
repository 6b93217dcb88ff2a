"""Groups of effects and their scales, recognized from draws: which pairs hinder mixing, and what to write instead."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from numpyro_repulsion.findings import Finding

__all__ = ["group_findings"]

#: A scale and the size of its effects are called dependent above this correlation of their logarithms.
MIN_CORRELATION = 0.7
#: Their product, or their ratio, must vary by less than this share of how much the size varies, in logarithms. Others,
#: such as the weight of a mixture and the places of its parts, may be correlated too.
MAX_SPREAD = 0.8
#: Groups of at most so many levels hardly determine their scale.
FEW_LEVELS = 5
#: Draws that are looked at.
MAX_DRAWS = 20_000


class _Pair(NamedTuple):
    scale: str
    effects: str
    levels: int
    correlation: float


def group_findings(posterior: Any, slow: dict[str, bool]) -> list[Finding]:
    """Return findings about groups of effects whose scale, or whose effects, have not mixed.

    - ``noncentered``: a scale falls as its effects grow, because the data determine their product.
    - ``few_levels``: the effects follow their scale, which few levels hardly determine.

    :param posterior: the draws, a dataset.
    :param slow: by quantity, whether any entry has not mixed.
    """
    pairs = [pair for pair in _pairs(posterior) if slow.get(pair.scale) or slow.get(pair.effects)]
    products = [pair for pair in pairs if pair.correlation < -MIN_CORRELATION]
    few = [pair for pair in pairs if pair.correlation > MIN_CORRELATION and pair.levels <= FEW_LEVELS]
    findings = []
    if products:
        worst = min(products, key=lambda pair: pair.correlation)
        names = ", ".join(f"{pair.effects} (with {pair.scale})" for pair in products)
        findings.append(
            Finding(
                "noncentered",
                "error",
                worst.correlation,
                f"The data determine products of a scale and its effects, not the effects themselves: {names}. "
                "Particles cannot move along such a ridge.",
                f"Write these effects centered, numpyro.sample({worst.effects!r}, dist.Normal(0, {worst.scale})), and "
                "drop the product.",
            )
        )
    if few:
        worst = max(few, key=lambda pair: pair.correlation)
        findings.append(
            Finding(
                "few_levels",
                "warning",
                worst.levels,
                f"{worst.effects} has {worst.levels} levels, which hardly determine {worst.scale}: the width of the "
                "effects varies more than constant scales suit.",
                f"Use SGHMC, which moves faster there, give {worst.scale} a prior away from 0 and infinity, or give "
                "the levels a prior of fixed width.",
            )
        )
    return findings


def _pairs(posterior):
    """Return for each group of effects the positive scalar that its size depends on most, if it may be their scale."""
    draws = {name: np.asarray(x.values, float).reshape(-1, *x.shape[2:]) for name, x in posterior.items()}
    total = next(iter(draws.values())).shape[0] if draws else 0
    thin = slice(None, None, -(-total // MAX_DRAWS) or 1)
    draws = {name: x[thin] for name, x in draws.items()}
    scales = {name: np.log(x) for name, x in draws.items() if x.ndim == 1 and (x > 0).all() and x.std() > 0}
    found = []
    for name, x in draws.items():
        if x.ndim != 2 or x.shape[1] < 2 or not np.isfinite(x).all():
            continue
        size = np.sqrt(np.mean(x**2, 1))
        if not (size > 0).all() or np.std(np.log(size)) == 0:
            continue
        size = np.log(size)
        correlations = {scale: float(np.corrcoef(size, y)[0, 1]) for scale, y in scales.items()}
        if not correlations:
            continue
        scale = max(correlations, key=lambda one: abs(correlations[one]))
        # The logarithm of the product where one falls as the other grows, of the ratio otherwise.
        determined = size - np.sign(correlations[scale]) * scales[scale]
        if determined.std() < MAX_SPREAD * size.std():
            found.append(_Pair(scale, name, x.shape[1], correlations[scale]))
    return found
