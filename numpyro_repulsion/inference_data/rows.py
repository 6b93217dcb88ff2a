"""A handler that undoes subsampling, for anything of NumPyro's that runs a model."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from numpyro.primitives import Messenger

__all__ = ["all_rows"]


class all_rows(Messenger):
    """Handler under which the subsampled plates of a model take all their rows, in order.

    What NumPyro computes from a model that subsamples is about the few rows it happens to draw, or scaled up from
    them. With this handler ``Predictive`` and ``log_likelihood`` see every row once; and with
    ``numpyro.handlers.uncondition`` the observed sites are drawn, though the model be given its data. Plates whose
    rows are fixed already, by ``substitute`` say, are left alone.

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
        if msg["type"] == "plate" and msg["value"] is None:
            size = msg["args"][0]
            # Rows that are known let models index NumPy arrays in compiled programs.
            with jax.ensure_compile_time_eval():
                msg["value"] = jnp.arange(size)
            msg["args"] = (size, size)
