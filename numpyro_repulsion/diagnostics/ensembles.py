"""The number of independent groups of chains, and functions applied to each array of draws."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

__all__ = ["each", "normal_scores", "num_independent"]


def num_independent(attributes: dict[str, Any], num_chains: int) -> int:
    """Return the number of independent groups of chains in inference data; groups are equal and in chain order.

    Each chain is a group if nothing couples chains, and each ensemble if ensembles do not interact. Ensembles that are
    balanced against each other are one group.

    :param attributes: attributes of inference data; without ``coupling``, the ensembles are the groups.
    :param num_chains: number of chains of the data.
    """
    if attributes.get("coupling") == "none":
        return num_chains
    if "num_independent" in attributes:
        return int(attributes["num_independent"])
    if re.search(r"Balanced\(interaction=(?!None)", str(attributes.get("interaction"))):
        return 1
    return int(attributes.get("num_ensembles", 1))


def each(draws, num_ensembles, function, adds_up=True):
    """Apply a function of an array ``(chains, draws, ...)`` and a number of ensembles to each array of draws.

    :param function: takes an array, the number of ensembles, and whether particles are known to interact by a drift
        that leaves them independent at any one time.
    :param adds_up: whether the function presumes that ensembles are independent.
    """
    repels = False
    data = getattr(draws, "posterior", draws)
    data = getattr(data, "dataset", data)
    if hasattr(data, "data_vars"):
        if str(data.attrs.get("is_sampler", "true")) != "true":
            raise ValueError(
                f"{data.attrs.get('algorithm', 'This')} is an optimizer: its last cloud is not a sample, and has no "
                "effective sample size, standard error or R-hat. Use SGLDR for draws."
            )
        repels = data.attrs.get("coupling") == "interaction"
        if num_ensembles is None:
            count = data.sizes["chain"]
            num_ensembles = num_independent(data.attrs, count) if adds_up else int(data.attrs.get("num_ensembles", 1))
        draws = {name: data[name].values for name in data.data_vars}
    num_ensembles = 1 if num_ensembles is None else num_ensembles
    if isinstance(draws, dict):
        return {name: each(x, num_ensembles, lambda x, n, _: function(x, n, repels)) for name, x in draws.items()}
    x = np.asarray(draws)
    if x.dtype.kind not in "biuf":
        raise TypeError(f"`draws` must be numbers; got an array of type {x.dtype}.")
    x = x.astype(np.float64)
    if x.ndim < 2 or x.shape[1] < 4:
        raise ValueError(f"`draws` must be of shape (chains, draws, ...) with four draws or more; got {x.shape}.")
    if isinstance(num_ensembles, bool) or not isinstance(num_ensembles, int | np.integer):
        raise TypeError(f"`num_ensembles` must be an integer; got {num_ensembles!r}.")
    if num_ensembles < 1 or x.shape[0] % num_ensembles:
        raise ValueError(
            f"`num_ensembles` must divide the number of chains; got {num_ensembles} for {x.shape[0]} chains."
        )
    return function(x, int(num_ensembles), repels)


def normal_scores(x):
    """Return the normal scores of ranks over all draws, of the shape of ``x``."""
    from scipy.stats import norm, rankdata  # JAX depends on SciPy; its own functions make ties in single precision

    flat = x.reshape(x.shape[0] * x.shape[1], -1)
    return norm.ppf((rankdata(flat, axis=0) - 0.375) / (len(flat) + 0.25)).reshape(x.shape)
