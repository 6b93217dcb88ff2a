"""Initialization strategies: particles start at draws of a guide or an earlier run, or around given values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import jax
from jax import random
import jax.numpy as jnp
import numpy as np

from numpyro.distributions import biject_to
from numpyro.handlers import block
from numpyro.infer import init_to_uniform, init_to_value
from numpyro.infer.autoguide import AutoDelta

from numpyro_repulsion.checks import positive


class JointStrategy:
    """An initialization strategy whose values of all sites belong together.

    NumPyro asks strategies for one site after the other, each with a key of its own. The kernels of this package call
    ``draw`` once for each particle instead; other kernels get each site from a draw of its own.

    :param draw: a function of a key and of the particle's number, which returns a dictionary of sites with values in
        their supports.
    """

    def __init__(self, draw: Callable[[jax.Array, jax.Array], Mapping[str, Any]]):
        self.draw = draw

    def one(self, key: jax.Array, number: jax.Array, latent: Iterable[str]) -> Callable:
        """Return a strategy for one particle, which gives each site its value from one draw.

        :param number: the particle's number.
        :param latent: the sites that need values.
        :raises ValueError: if some have none.
        """
        values = self.draw(key, number)
        if missing := sorted(name for name in latent if _known(name, values) not in values):
            raise ValueError(
                f"The initialization strategy has no values for the latent sites {missing}, only for "
                f"{sorted(values)}: it must come from a fit of the same model."
            )
        return init_to_value(values={name: values[_known(name, values)] for name in latent})

    def __call__(self, site: dict | None = None) -> Any:
        if site is None:
            return partial(self)  # NumPyro looks at the function of a partial.
        if site["type"] != "sample" or site["is_observed"]:
            return None
        key = site["kwargs"]["rng_key"]
        with block():  # The sites of a guide are not sites of the model.
            values = self.draw(key, random.randint(key, (), 0, np.iinfo(np.int32).max))
        return values[name] if (name := _known(site["name"], values)) in values else init_to_uniform(site)


def init_from_guide(guide: Any, params: Mapping[str, Any]) -> JointStrategy:
    """Return a strategy that starts each particle at a draw of a fitted guide.

    Warmup then begins near the posterior, with scales from the spread of the guide.

    :param guide: an automatic guide with a spread, such as ``AutoNormal``, ``AutoMultivariateNormal`` or
        ``AutoLaplaceApproximation``.
    :param params: its parameters, ``svi_result.params``.
    :raises ValueError: for ``AutoDelta``, whose draws are all equal, and for a guide that was not fitted.
    :raises TypeError: for an object without ``sample_posterior``.

    **Example**

    .. doctest::

        >>> from jax import random
        >>> import numpyro
        >>> import numpyro.distributions as dist
        >>> from numpyro.infer import SVI, Trace_ELBO
        >>> from numpyro.infer.autoguide import AutoNormal
        >>> from numpyro_repulsion import SGLD, init_from_guide
        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     numpyro.sample("y", dist.Normal(mu, 1), obs=y)
        >>> guide = AutoNormal(model)
        >>> svi = SVI(model, guide, numpyro.optim.Adam(0.1), Trace_ELBO())
        >>> result = svi.run(random.key(0), 100, 3.0, progress_bar=False)
        >>> kernel = SGLD(model, init_strategy=init_from_guide(guide, result.params))
    """
    if isinstance(guide, AutoDelta):
        raise ValueError(
            "All draws of an AutoDelta are equal, and particles must start apart: use "
            "init_around(guide.median(params), scale=0.1)."
        )
    if not callable(getattr(guide, "sample_posterior", None)):
        raise TypeError(f"`guide` must be an automatic guide, such as AutoNormal(model); got {guide!r}.")
    try:
        jax.eval_shape(lambda: guide.sample_posterior(random.key(0), dict(params)))
    except Exception as error:  # Whatever a guide without its model or parameters runs into.
        raise ValueError(
            f"This {type(guide).__name__} gives no draws with these parameters. Fit it to the model first, `result = "
            "SVI(model, guide, optimizer, Trace_ELBO()).run(key, num_steps, *data)`, and pass result.params."
        ) from error
    return JointStrategy(partial(_draw_of_guide, guide, dict(params)))


def init_from_idata(data: Any, group: str = "posterior") -> JointStrategy:
    """Return a strategy that starts each particle at another draw of an earlier run, in random order.

    :param data: inference data with draws of all latent sites, of this package or another. Names may have "." for "/";
        variables without the dimensions ``chain`` and ``draw`` are no draws.
    :param group: the group with the draws.
    :raises ValueError: without that group, or without draws in it.

    **Example**

    .. doctest::

        >>> from jax import random
        >>> import numpyro
        >>> import numpyro.distributions as dist
        >>> from numpyro.infer import MCMC
        >>> from numpyro_repulsion import SGLD, init_from_idata, to_inference_data
        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     numpyro.sample("y", dist.Normal(mu, 1), obs=y)
        >>> mcmc = MCMC(SGLD(model), num_warmup=50, num_samples=50, num_chains=4, chain_method="vectorized",
        ...             progress_bar=False)
        >>> mcmc.run(random.key(0), 3.0)
        >>> kernel = SGLD(model, init_strategy=init_from_idata(to_inference_data(mcmc)))
    """
    try:
        draws = data[group]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"`data` must be inference data with a group {group!r}; got {type(data).__name__}.") from error
    draws = getattr(draws, "dataset", draws)
    axes = "chain", "draw"
    draws = {name: x.transpose(*axes, ...) for name, x in draws.data_vars.items() if {*axes} <= {*x.dims}}
    # The name of a site, where that of its variable differs.
    values = {x.attrs.get("site", name): x.values.reshape(-1, *x.shape[2:]) for name, x in draws.items()}
    number = min(map(len, values.values()), default=0)
    if number == 0:
        raise ValueError(f"The group {group!r} of `data` has no draws, variables with the dimensions chain and draw.")
    # Each particle has a draw of its own, as long as there are enough; kernels that reject proposals repeat draws.
    table = np.concatenate([x.reshape(number, -1) for x in values.values()], 1)
    different = np.unique(table, axis=0, return_index=True)[1]
    order = np.random.default_rng(0).permutation(different)
    return JointStrategy(partial(_draw_of_table, values, order))


def init_around(values: Mapping[str, Any], scale: float = 0.1) -> Callable:
    """Return a strategy that starts particles around given values, like ``init_to_value``, but apart from each other.

    :param values: sites with values in their supports; other sites start as by ``init_to_uniform``.
    :param scale: the standard deviation around them, of unconstrained coordinates.
    :raises ValueError: unless the scale is positive.

    **Example**

    .. doctest::

        >>> from numpyro_repulsion import SGLDR, init_around
        >>> import numpyro
        >>> import numpyro.distributions as dist
        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     numpyro.sample("y", dist.Normal(mu, 1), obs=y)
        >>> kernel = SGLDR(model, init_strategy=init_around({"mu": 3.0}))
    """
    return partial(_around, values=dict(values), scale=positive("init_around: `scale`", scale))


def _known(name, values):
    """Return the name under which values have a site: files of inference data need "." for "/"."""
    return name if name in values else name.replace("/", ".")


# Functions of the module, because local ones could not be pickled with their kernel.


def _draw_of_guide(guide, params, key, number):
    return guide.sample_posterior(key, params)


def _draw_of_table(values, order, key, number):
    place = jnp.asarray(order)[number % len(order)]
    return {name: jnp.asarray(x)[place] for name, x in values.items()}


def _around(site=None, values=None, scale=0.1):
    if site is None:
        return partial(_around, values=values, scale=scale)
    if site["type"] != "sample" or site["is_observed"]:
        return None
    if site["name"] not in values:
        return init_to_uniform(site)
    transform = biject_to(site["fn"].support)
    shape = site["fn"].shape(site["kwargs"]["sample_shape"])
    z = transform.inv(jnp.broadcast_to(jnp.asarray(values[site["name"]], float), shape))
    return transform(z + scale * random.normal(site["kwargs"]["rng_key"], jnp.shape(z), z.dtype))
