"""A handler that undoes subsampling, for any NumPyro function that runs a model."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from numpyro.primitives import Messenger

__all__ = ["all_rows"]


class all_rows(Messenger):
    """Make the subsampled plates of a model take all their rows, in order.

    From a model that subsamples, NumPyro computes results for the few rows that it happens to draw, or scales them up.
    With this handler ``Predictive`` and ``log_likelihood`` see every row once; together with
    ``numpyro.handlers.uncondition`` they draw the observed sites, although the model gets its data. Subsampled plates
    whose rows are already fixed, for example by ``substitute``, do not change.

    :param fn: a model.

    **Example**

    .. doctest::

        >>> from jax import random
        >>> import jax.numpy as jnp
        >>> import numpyro
        >>> import numpyro.distributions as dist
        >>> from numpyro.handlers import uncondition
        >>> from numpyro.infer import Predictive
        >>> from numpyro_repulsion import all_rows

        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 1))
        ...     with numpyro.plate("rows", 100, subsample_size=10) as i:
        ...         numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])

        >>> y = jnp.zeros(100)
        >>> Predictive(uncondition(model), num_samples=5)(random.key(0), y)["y"].shape
        (5, 10)
        >>> Predictive(uncondition(all_rows(model)), num_samples=5)(random.key(0), y)["y"].shape
        (5, 100)
    """

    def process_message(self, msg):
        # NumPyro numbers the rows of other plates itself, in a compiled program by unknown numbers.
        if msg["type"] == "plate" and (msg["value"] is None or msg["args"][1] in (None, msg["args"][0])):
            size = msg["args"][0]
            # Known rows let models index NumPy arrays in compiled programs.
            with jax.ensure_compile_time_eval():
                msg["value"] = jnp.arange(size)
            msg["args"] = (size, size)
