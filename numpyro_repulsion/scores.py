"""The scores of a run's draws, for Stein discrepancies."""

from __future__ import annotations

import jax
from jax import lax, random
import numpy as np

from numpyro.infer import MCMC

from numpyro_repulsion.checks import integer
from numpyro_repulsion.gradients import FullData, Gradient, Particle, Target, compiled, ravel_cloud
from numpyro_repulsion.kernels import bound_of, chosen_draws, kernel_of, require_draws

__all__ = ["score_at", "scores"]


def scores(
    mcmc: MCMC, *, num_draws: int = 1000, gradient: Gradient | None = None, rng_key: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Return draws of a run in unconstrained space and the score ``−∇U`` at each, the arguments of :func:`ksd`.

    :param mcmc: an ``MCMC`` that has run with a kernel of this package.
    :param num_draws: the number n of draws, evenly spread over particles and iterations; each costs one gradient. For
        an optimizer of the cloud (:class:`~numpyro_repulsion.SVGD`) all come from its last cloud.
    :param gradient: ``None`` is ``FullData()``. ``Subsampled()`` estimates each score from its own minibatch, and the
        discrepancy includes the noise.
    :param rng_key: the key for minibatches and random likelihoods.
    :return: draws and scores, both ``(n, d)``, with parameters in the order of :func:`jax.flatten_util.ravel_pytree`.
        Draws that rounding put on the boundary of their support are left out.
    :raises TypeError: if ``mcmc`` is not an ``MCMC`` with a kernel of this package, or ``gradient`` not a gradient.
    :raises ValueError: before the run, if ``num_draws`` is below 1, or if the run left out latent sites; and for a
        ``gradient`` with another number of rows than ``subsample_size`` if a site uses rows of a plate outside it.

    **Example**

    .. doctest::

        >>> from jax import random
        >>> import numpyro
        >>> import numpyro.distributions as dist
        >>> from numpyro.infer import MCMC
        >>> from numpyro_repulsion import SGLDR, ksd, scores
        >>> mcmc = MCMC(SGLDR(lambda: numpyro.sample("rate", dist.Gamma(5, 1)), step_size=0.02), num_warmup=50,
        ...             num_samples=100, num_chains=6, chain_method="vectorized", progress_bar=False)
        >>> mcmc.run(random.key(0))
        >>> bool(ksd(*scores(mcmc)) < 0.3)
        True
    """
    kernel_of(mcmc, "scores")
    require_draws(mcmc)
    num_draws = integer("`num_draws`", num_draws)
    gradient = FullData() if gradient is None else gradient
    if not isinstance(gradient, Gradient):
        raise TypeError(f"`gradient` must be a gradient such as FullData() or Subsampled(); got {gradient!r}.")
    target = bound_of(mcmc).target
    gradient.check_rows(target)
    flat, found = score_at(chosen_draws(mcmc, num_draws, "Scores need"), target, gradient, rng_key)
    usable = np.isfinite(np.asarray(flat)).all(1) & np.isfinite(np.asarray(found)).all(1)
    return flat[usable], found[usable]


def score_at(
    draws: Particle, target: Target, gradient: Gradient, rng_key: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Return draws in unconstrained space and the score at each, both ``(n, d)``.

    :param draws: in the form of ``get_samples``, with a leading axis.
    """

    def scores(target, points):
        def score(point):
            key, z = point
            return -gradient.energy_and_grad(key, target, unravel, z[None, None])[1][0, 0]

        return lax.map(score, points)

    z = compiled(lambda target, draws: jax.vmap(target.unconstrain)(draws), target)(draws)
    flat, unravel = ravel_cloud(z)
    keys = random.split(random.key(0) if rng_key is None else rng_key, len(flat))
    return flat, compiled(scores, target)((keys, flat))
