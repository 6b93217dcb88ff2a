"""Marks of local posteriors: sites whose likelihood a handler raised to a power, and the factor of its tether."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["TEMPERED", "TETHER", "untempered"]

#: The key under which a site's ``infer`` has the power of its likelihood.
TEMPERED = "inverse_temperature"
#: The name of the factor that holds parameters near a center. It belongs to the prior.
TETHER = "tether"


def untempered(site: Mapping) -> Any:
    """Return the weight of a site's log density without the power of its likelihood; ``None`` is 1."""
    power = site["infer"].get(TEMPERED)
    return site["scale"] if power is None else site["scale"] / power
