"""Checks of the plates, latent sites and data of a model."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import contextmanager
import operator
from typing import Any
import warnings

import jax
import numpy as np

import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.handlers import block
from numpyro.primitives import _PYRO_STACK, Messenger
from numpyro.util import not_jax_tracer

from numpyro_repulsion.rows import Rows, count_nan, losses

__all__ = ["Watch", "any_number_of_rows", "check_kinds", "check_values", "find_nan"]

#: The largest 32-bit integer, which numbers rows.
MAX_ROWS = 2**31 - 1


class Watch(Messenger):
    """Records the sites and plates of a model, also in the bodies of ``scan`` and ``cond``, unlike other handlers.

    - **asks_for_keys** - whether there is a ``numpyro.prng_key()``.
    - **blocks** - whether ``numpyro.handlers.block`` is around what asks for a key.
    - **hidden_plates** - the subsampled plates in those bodies.
    - **unclear_plates** - the plates in those bodies, and those that share their name with a plate of another size.
    """

    def __init__(self):
        super().__init__(None)
        self.asks_for_keys = self.blocks = False
        self.hidden_plates: list[str] = []
        self.unclear_plates: set[str] = set()
        self._plates: dict[str, tuple[int, int]] = {}
        self._names: set[str] = set()
        self._fixed: dict[str, bool] = {}
        self._depth = 0

    def process_message(self, msg):
        if msg["type"] == "prng_key":
            self.asks_for_keys = True
            # Bodies of loops run inside of a block of NumPyro's own.
            self.blocks |= not self._depth and any(isinstance(handler, block) for handler in _PYRO_STACK)
        elif msg["type"] == "plate":
            size, batch = msg["args"]
            self._check_plate(msg["name"], size, size if batch is None else batch)
            if self._depth:
                self.unclear_plates.add(msg["name"])
                if batch is not None and batch < size:
                    self.hidden_plates.append(msg["name"])
        elif msg["type"] in ("sample", "deterministic", "param"):
            self._names.add(msg["name"])
            # What NumPyro shows once more after a `scan` has its value from inside.
            if msg["type"] == "sample" and not msg["is_observed"]:
                self._fixed.setdefault(msg["name"], not self._depth and msg["kwargs"]["rng_key"] is None)
        elif msg["type"] == "control_flow":
            msg["args"] = tuple(self._watched(arg) if callable(arg) else arg for arg in msg["args"])

    def check(self) -> None:
        """Raise ``ValueError`` for latent sites with fixed values, and subsampled plates whose rows cannot be chosen.

        NumPyro gives a key to each latent site that no handler has given a value.
        """
        if fixed := [name for name, is_fixed in self._fixed.items() if is_fixed]:
            raise ValueError(
                f"A handler inside the model gives the latent sites {fixed} values, so the posterior would not depend "
                "on their draws. To hold them there, write block(substitute(model, data=values), "
                f"hide={fixed}) with both from numpyro.handlers; to start there, init_strategy=init_around(values)."
            )
        if self.hidden_plates:
            raise ValueError(
                f"The subsampled plate {self.hidden_plates} lies inside `scan` or `cond`, where its rows cannot be "
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
        if batch < size > MAX_ROWS:
            raise ValueError(
                f"The subsampled plate '{name}' has {size} rows; rows are numbered by 32-bit integers, so it can have "
                f"{MAX_ROWS} at most. Split the data over several plates."
            )
        if name in self._names:
            raise ValueError(
                f"The plate '{name}' has the name of a site of the model, and NumPyro would omit that site from the "
                "posterior. Give one of them another name."
            )
        first = self._plates.setdefault(name, (size, batch))
        if first != (size, batch):
            self.unclear_plates.add(name)
        if first != (size, batch) and (first[0] > first[1] or size > batch):
            raise ValueError(
                f"Two plates have the name '{name}', one with size={first[0]} and subsample_size={first[1]}, the other "
                f"with size={size} and subsample_size={batch}: both would get the rows of one. Give them different "
                "names."
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


def check_kinds(latent: Mapping[str, dict], discrete: list[str], dims: Mapping[str, Mapping], plates: Mapping) -> None:
    """Raise ``ValueError`` for latent sites that particles cannot represent.

    :param latent: the latent sites by name.
    :param discrete: the names of the discrete ones.
    :param dims: by site, the dimension of each plate.
    :param plates: the subsampled plates.
    """
    for name, site in latent.items():
        if isinstance(site["fn"], dist.Delta):
            raise ValueError(
                f"Latent site '{name}' has a delta distribution; write `numpyro.deterministic('{name}', ...)`."
            )
        if 0 in site["fn"].shape() and not _may_be_empty(site["fn"]):
            raise ValueError(
                f"Latent site '{name}' has shape {site['fn'].shape()} and so no elements, which NumPyro's "
                "transforms and densities do not support; leave the site out if it is empty."
            )
        around = [plate for plate in dims[name] if plate in plates]
        if around and (base := name.removesuffix("_unobserved")) != name and f"{base}_observed" in dims:
            raise ValueError(
                f"The site '{base}' has an `obs_mask` inside of the subsampled plate '{around[0]}', so NumPyro imputes "
                "its hidden entries as latent variables of rows, and each minibatch would need others. Leave them out "
                f"instead, `with numpyro.handlers.mask(mask=mask[i]): numpyro.sample('{base}', ..., obs=y[i])`: the "
                "posterior of the parameters is the same. To impute them, drop `subsample_size`."
            )
        if around and name not in discrete:
            raise ValueError(
                f"Latent site '{name}' lies inside the subsampled plate '{around[0]}', where each minibatch would "
                "need different latent variables. Move it out of the plate and index it, marginalize it, or drop "
                "`subsample_size`."
            )
    if len(latent) == len(discrete):
        raise ValueError(
            "The model has no continuous latent site, so there is nothing to sample; it needs at least one "
            f"`numpyro.sample` statement without `obs`. Discrete latent sites: {discrete or 'none'}."
        )


def _may_be_empty(distribution) -> bool:
    """Whether NumPyro's transforms and densities support values without elements."""
    is_whole = (
        0 not in distribution.batch_shape and getattr(distribution.support, "base_constraint", None) is constraints.real
    )
    return distribution.support is constraints.real or is_whole


def find_nan(args: tuple, kwargs: Mapping, observations: Mapping[str, Any]) -> list[str]:
    """Return, in words, where the arguments and observed sites of a model contain NaN."""
    found = [(count_nan(array), where) for where, array in _arrays(args, kwargs, observations)]
    return [f"{count} in {where}" for count, where in found if count]


def check_values(
    args: tuple = (),
    kwargs: Mapping = {},
    observations: Mapping[str, Any] = {},
    of_rows: bool = False,
) -> None:
    """Raise ``ValueError`` for values that JAX would change in silence, by narrower types and without masks.

    :param of_rows: whether to read all `Rows`, and not to look at arrays in memory.
    """
    for where, array in _arrays(args, kwargs, observations):
        if isinstance(array, Rows) == of_rows and (lost := losses(array)):
            raise ValueError(f"{where[0].upper()}{where[1:]} {lost}")


def _arrays(args, kwargs, observations):
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
