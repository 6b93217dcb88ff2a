"""Models of all rows as models of minibatches."""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from typing import Any

import jax
from jax import random
import jax.numpy as jnp
import numpy as np

import numpyro
from numpyro.handlers import block, seed, trace
from numpyro.primitives import Messenger

from numpyro_repulsion.checks import integer
from numpyro_repulsion.rows import Rows


class minibatch:
    """Turn a model of all rows into one whose plate of rows is subsampled.

    ``minibatch(model, 500)`` calls ``model`` with 500 of the rows of its arguments: of all arrays, and
    :class:`~numpyro_repulsion.Rows`, with as many rows as the plate has. The plate must take its size from them, as
    ``len(y)``. What is inside of the plate then counts N / 500 times, as if the model itself had a ``subsample_size``
    and an index. Kernels check that minibatches add up to all rows, so a model that computes a statistic of the rows,
    such as ``x - x.mean()``, raises a ``ValueError``.

    :param model: a NumPyro model.
    :param subsample_size: the number of rows in a minibatch; a plate with fewer rows stays as it is.
    :param plate: the name of the plate of rows; by default the largest one that contains observed sites.
    :return: a model with the same arguments.
    :raises ValueError: when the model runs, for a plate that is not found, is subsampled already, is as large as
        another one, or contains latent sites, and if no argument has its rows.

    **Example**

    .. doctest::

        >>> from jax import random
        >>> import jax.numpy as jnp
        >>> import numpyro
        >>> import numpyro.distributions as dist
        >>> from numpyro.infer import MCMC
        >>> from numpyro_repulsion import SGLD, minibatch
        >>> def model(x, y):
        ...     slope = numpyro.sample("slope", dist.Normal(0, 1))
        ...     with numpyro.plate("rows", len(y)):
        ...         numpyro.sample("y", dist.Normal(slope * x, 1), obs=y)
        >>> x = random.normal(random.key(0), (1000,))
        >>> mcmc = MCMC(SGLD(minibatch(model, 50)), num_warmup=100, num_samples=100, num_chains=10,
        ...             chain_method="vectorized", progress_bar=False)
        >>> mcmc.run(random.key(1), x, 0.5 * x)
        >>> abs(float(mcmc.get_samples()["slope"].mean()) - 0.5) < 0.05
        True
    """

    def __init__(self, model: Callable, subsample_size: int, *, plate: str | None = None):
        self.model, self.plate = model, plate
        self.subsample_size = integer("`subsample_size`", subsample_size)
        # Its name and signature: attributes of a model that is an object would replace those above.
        update_wrapper(self, model, updated=())

    def __call__(self, *args, **kwargs):
        leaves, structure = jax.tree.flatten((args, kwargs), is_leaf=lambda leaf: isinstance(leaf, Rows))
        name, size = self._plate(leaves, structure)
        if size <= self.subsample_size:
            return self.model(*args, **kwargs)
        has_rows = [isinstance(leaf, (Rows, np.ndarray, jax.Array)) and leaf.shape[:1] == (size,) for leaf in leaves]
        if not any(has_rows):
            raise ValueError(
                f"minibatch: no argument of the model has the {size} rows of the plate '{name}'. Pass the data as "
                "arguments, or write `subsample_size` and the index into the model."
            )
        rows = numpyro.plate(name, size, subsample_size=self.subsample_size)
        taken = [
            (leaf if isinstance(leaf, Rows) else jnp.asarray(leaf))[rows._indices] if yes else leaf
            for leaf, yes in zip(leaves, has_rows, strict=True)
        ]
        args, kwargs = jax.tree.unflatten(structure, taken)
        with _Subsampled(rows):
            return self.model(*args, **kwargs)

    def _plate(self, leaves, structure):
        """Return the name and the size of the plate of rows."""
        sites: dict[str, Any] = {}

        def run(on_host):
            whole = iter(on_host)
            args, kwargs = jax.tree.unflatten(structure, [next(whole) if isinstance(x, Rows) else x for x in leaves])
            with block():
                sites.update(trace(seed(self.model, random.key(0))).get_trace(*args, **kwargs))

        # Only shapes matter, so `Rows` are not read.
        jax.eval_shape(run, [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves if isinstance(x, Rows)])
        plates = {name: site["args"] for name, site in sites.items() if site["type"] == "plate"}
        inside = {
            frame.name
            for site in sites.values()
            if site["type"] == "sample" and site["is_observed"]
            for frame in site["cond_indep_stack"]
        }
        sizes = {name: plates[name][0] for name in plates if name in inside}
        largest = [name for name in sizes if sizes[name] == max(sizes.values())]
        chosen = [self.plate] if self.plate in plates else largest if self.plate is None else []
        if len(chosen) != 1:
            raise ValueError(
                f"minibatch: `plate` must name the plate of rows, one of {sorted(plates)}; got {self.plate!r}"
                f"{f', and {largest} are equally large' if len(chosen) > 1 else ''}."
            )
        (name,) = chosen
        size, batch = plates[name]
        if batch not in (None, size):
            raise ValueError(f"minibatch: the plate '{name}' is subsampled already. Pass the model itself.")
        return name, size


class _Subsampled(Messenger):
    """Puts the sites of a plate of the rows of a minibatch into the subsampled plate of all rows."""

    def __init__(self, rows: numpyro.plate):
        super().__init__(None)
        self._rows = rows

    def process_message(self, msg):
        name, batch = self._rows.name, self._rows.subsample_size
        if msg["type"] == "plate" and msg["name"] == name:
            if msg["args"][0] != batch:
                raise ValueError(
                    f"minibatch: the plate '{name}' has {msg['args'][0]} rows where its data have {batch}. Take the "
                    "size of the plate from the data, as in len(y)."
                )
            msg["stop"] = True
        elif msg["type"] == "sample" and any(frame.name == name for frame in msg["cond_indep_stack"]):
            if not msg["is_observed"]:
                raise ValueError(
                    f"minibatch: the latent site '{msg['name']}' lies inside of the plate '{name}'. Write "
                    "`subsample_size` and the index into the model, which then integrates over it."
                )
            # The plate of the model has the name and the number of rows of the subsampled one, but not its scale.
            msg["scale"] = (1.0 if msg["scale"] is None else msg["scale"]) * (self._rows.size / batch)
