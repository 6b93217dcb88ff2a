"""Draws of the latent variables of rows, over which a run has integrated, and how exact that was."""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from functools import partial
from typing import Any

import jax
from jax import random
import jax.numpy as jnp
import numpy as np

from numpyro.handlers import substitute
from numpyro.infer import MCMC
from numpyro.infer.util import potential_energy as numpyro_energy

from numpyro_repulsion.checks import integer
from numpyro_repulsion.gradients import ModelTarget, compiled
from numpyro_repulsion.gradients.local import Integrated
from numpyro_repulsion.gradients.structure import any_number_of_rows
from numpyro_repulsion.inference_data.rows import in_chunks
from numpyro_repulsion.kernels import bound_of, chosen_draws, kernel_of_run, latent_draws

#: How many rows and particles show how exact the integrals are, and the number of points that they are compared with.
NUM_ROWS, NUM_PARTICLES = 500, 4
MORE_POINTS = {1: 61, 2: 11, 3: 7}
#: Where the search for modes begins in that comparison: a row with two modes may have the other one there.
OTHER_START = -1.7


def row_latents(
    mcmc: MCMC, rows: Iterable[int] | None = None, *, num_draws: int = 200, rng_key: jax.Array | None = None
) -> dict[str, np.ndarray]:
    """Return draws of the latent sites inside of a subsampled plate, which the run itself has integrated out.

    For each of some draws of the run, the sites of the chosen rows are drawn from their distribution given that draw
    and the data: together they are draws from the joint posterior. Each is chosen from 200 draws of a Student's t
    distribution about its mode, by importance.

    :param mcmc: a run of a model with latent sites inside of one subsampled plate.
    :param rows: which rows of the plate; all by default.
    :param num_draws: the largest number of draws of the run, evenly spread over particles and iterations.
    :param rng_key: ``random.key(0)`` by default.
    :return: by site, in its support, arrays ``(draw, ...)`` with one entry for each row along the axis of the plate.
    :raises ValueError: for a model without such sites or with several such plates, for rows beyond its end, and if the
        result would take more than 2 GiB.

    **Example**

    .. doctest::

        >>> from jax import random
        >>> import jax.numpy as jnp
        >>> import numpyro
        >>> import numpyro.distributions as dist
        >>> from numpyro.infer import MCMC
        >>> from numpyro_repulsion import SGLD
        >>> from numpyro_repulsion.local_latents import row_latents
        >>> def model(counts):
        ...     mean = numpyro.sample("mean", dist.Normal(0, 2))
        ...     with numpyro.plate("rows", len(counts), subsample_size=50) as i:
        ...         rate = numpyro.sample("rate", dist.LogNormal(mean, 0.5))
        ...         numpyro.sample("counts", dist.Poisson(rate), obs=counts[i])
        >>> counts = random.poisson(random.key(0), 3.0, (1000,))
        >>> mcmc = MCMC(SGLD(model), num_warmup=100, num_samples=100, num_chains=10, chain_method="vectorized",
        ...             progress_bar=False)
        >>> mcmc.run(random.key(1), counts)
        >>> sorted(mcmc.get_samples())
        ['mean']
        >>> row_latents(mcmc, rows=[0, 7])["rate"].shape
        (200, 2)
    """
    kernel_of_run(mcmc, "row_latents")
    target: Any = bound_of(mcmc).target
    if not isinstance(target, ModelTarget) or not target.integrated:
        raise ValueError("The model of this run has no latent sites inside of a subsampled plate.")
    if len(target.model.plates) > 1:
        raise ValueError(
            f"`row_latents` draws those of one plate; the model has such sites in {sorted(target.model.plates)}."
        )
    (plate,) = target.model.plates
    size = target.plates[plate][0]
    chosen = np.arange(size) if rows is None else np.atleast_1d(np.asarray(rows))
    if chosen.ndim != 1 or chosen.dtype.kind not in "iu" or not len(chosen) or chosen.min() < 0 or chosen.max() >= size:
        raise ValueError(f"`rows` must be integers from 0 to {size - 1}, rows of the plate '{plate}'; got {rows!r}.")
    draws = latent_draws(target, chosen_draws(mcmc, integer("`num_draws`", num_draws)), "Latent variables of rows need")
    key, indices = random.key(0) if rng_key is None else rng_key, target.first_rows | {plate: jnp.asarray(chosen)}

    def of_draw(target, numbered):
        number, draw = numbered
        return _call(target, partial(target.model.draw, random.fold_in(key, number)), draw, indices)

    numbered = jnp.arange(len(next(iter(draws.values())))), draws
    what = f"Draws of {target.integrated}"
    parts = list(in_chunks(of_draw, target, numbered, what, "Lower `num_draws`, or ask for fewer `rows`"))
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def integration_shifts(mcmc: MCMC) -> dict[str, float]:
    """Return by how many posterior standard deviations integrals over latent variables of rows shift means, by site.

    A gradient of U that is off by g everywhere shifts a coordinate with variance s² by s² g. The mean of g over some
    particles comes from integrals with more points on some rows of each plate. It is empty without such integrals.
    """
    target: Any = bound_of(mcmc).target if mcmc.sampler.model is not None else None
    if target is None or not target.integrated:
        return {}
    rows = {name: jnp.asarray(np.arange(NUM_ROWS) * size // NUM_ROWS) for name, (size, _) in target.plates.items()}
    finer = Integrated(target.model.model, target.model.plates, MORE_POINTS, OTHER_START)

    def difference(target, z):
        gradients = [jax.vmap(jax.grad(partial(_energy, at, rows)))(z) for at in (target, _with_model(target, finer))]
        return jax.tree.map(lambda a, b: (a - b).mean(0), *gradients)

    z = mcmc.last_state.z
    off = compiled(difference, target)(jax.tree.map(lambda x: x[:NUM_PARTICLES], z))
    return {name: float(np.max(np.abs(np.asarray(off[name])) * np.std(np.asarray(z[name]), 0))) for name in off}


def _energy(target, rows, z):
    with any_number_of_rows():
        return numpyro_energy(target.bind(rows, random.key(0)), target.args, target.kwargs, z)


def _with_model(target, model):
    other = copy(target)
    other.model = model
    return other


def _call(target, model, draw, rows):
    """Return what a model returns, given values of its sites and the rows of its plates."""
    bound = _with_model(target, model).bind(rows, random.key(0))
    with any_number_of_rows():
        return substitute(bound, data=draw)(*target.args, **target.kwargs)
