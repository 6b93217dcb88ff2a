"""Stein's identity at work: scores of draws, and posterior means with control variates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import lax, random
import jax.numpy as jnp
import numpy as np

from numpyro.infer import MCMC

from numpyro_repulsion.checks import integer
from numpyro_repulsion.diagnostics import ensemble_mcse
from numpyro_repulsion.gradients import FullData, Gradient, Particle, Target, compiled, ravel_cloud
from numpyro_repulsion.kernels import (
    bound_of,
    chosen_draws,
    coupling_of,
    is_warmup,
    kernel_of,
    latent_draws,
    require_draws,
)

__all__ = [
    "ControlledMeans",
    "stein_control_variates",
    "score_at",
    "scores",
]


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


#: Kinds of control variates, from most to fewest; the number of coefficients is at most this share of the draws.
DEGREES, SHARE = ("quadratic", "squares", "linear"), 8


class ControlledMeans(NamedTuple):
    """Posterior means with control variates; :func:`~numpyro_repulsion.stein_control_variates` returns it.

    - **mean** - the means, as a pytree like the values of the function.
    - **mcse** - their Monte Carlo standard errors; NaN where the draws do not determine them.
    - **plain_mean**, **plain_mcse** - the same of the same draws without control variates.
    - **degree** - the control variates that were used.
    - **num_draws** - the number of draws.

    **Example**

    .. doctest::

        >>> from numpyro_repulsion.stein import ControlledMeans
        >>> found = ControlledMeans(1.02, 0.001, 0.97, 0.04, "quadratic", 2000)
        >>> round((found.plain_mcse / found.mcse) ** 2)  # as many draws as one was worth
        1600
    """

    mean: Any
    mcse: Any
    plain_mean: Any
    plain_mcse: Any
    degree: str
    num_draws: int


def stein_control_variates(
    mcmc: MCMC,
    function: Callable | None = None,
    *,
    degree: str | None = None,
    num_draws: int = 2000,
    gradient: Gradient | None = None,
    rng_key: jax.Array | None = None,
) -> ControlledMeans:
    r"""Return posterior means of a function, with control variates from Stein's identity.

    .. math::
        \hat E f = \frac1n \sum_i \left[ f(z_i) - (\mathcal A P)(z_i) \right], \qquad
        \mathcal A P = \Delta P - \nabla U \cdot \nabla P

    The mean of :math:`\mathcal A P` over the posterior is 0 for any polynomial P of the unconstrained parameters. Its
    coefficients are those of the regression of f on :math:`\mathcal A P`, found on one half of the draws and used on
    the other, and vice versa, so that the estimate has no bias from fitting. For a Gaussian posterior means and
    variances are exact with a quadratic P, whatever the draws. For others the variance of f falls to that of what P
    does not explain. As the identity is that of the posterior, part of the bias of a step size is removed too; a mean
    that differs from the plain one by many standard errors shows that bias.

    :param mcmc: an ``MCMC`` that has run with a kernel of this package that samples.
    :param function: of one draw, ``{site: value}`` with the constrained and deterministic sites; returns a pytree of
        numbers. ``None`` is the draw itself: the means of all sites.
    :param degree: ``"linear"``, with a coefficient for each of d parameters; ``"squares"``, with 2 d;
        ``"quadratic"``, with d (d + 3) / 2. ``None`` is the richest of these for which there are 8 draws per
        coefficient.
    :param num_draws: the most draws to use, evenly spread over the iterations, but at least 4 of each particle; each
        costs one gradient.
    :param gradient: ``None`` is ``FullData()``. ``Subsampled()`` is cheaper; its noise leaves less to gain.
    :param rng_key: the key for minibatches and random likelihoods.
    :raises TypeError: if ``mcmc`` is not an ``MCMC`` with a kernel of this package, or ``gradient`` not a gradient.
    :raises ValueError: before the run; after a warmup; for an optimizer (:class:`~numpyro_repulsion.SVGD`); for an
        unknown ``degree``, and for fewer than 8 draws per coefficient; if the run left out latent sites; and for draws
        on the boundary of their support.

    **References:**

    1. *Zero variance Markov chain Monte Carlo for Bayesian estimators*, A. Mira, R. Solgi and D. Imparato, Statistics
       and Computing 23, 2013
    2. *Control functionals for Monte Carlo integration*, C. J. Oates, M. Girolami and N. Chopin, Journal of the Royal
       Statistical Society B 79, 2017

    **Example**

    .. doctest::

        >>> from jax import random
        >>> import numpyro
        >>> import numpyro.distributions as dist
        >>> from numpyro.infer import MCMC
        >>> from numpyro_repulsion import SGLD, stein_control_variates
        >>> mcmc = MCMC(SGLD(lambda: numpyro.sample("x", dist.Normal(3, 2)), step_size=0.5), num_warmup=50,
        ...             num_samples=100, num_chains=6, chain_method="vectorized", progress_bar=False)
        >>> mcmc.run(random.key(0))
        >>> found = stein_control_variates(mcmc, lambda draw: {"mean": draw["x"], "square": draw["x"] ** 2})
        >>> round(float(found.mean["mean"]), 4), round(float(found.mean["square"]), 3)
        (3.0, 13.0)
    """
    kernel = kernel_of(mcmc, "stein_control_variates")
    require_draws(mcmc)
    if is_warmup(mcmc):
        raise ValueError("These are draws of warmup; call stein_control_variates after mcmc.run(key, ...).")
    if not kernel.dynamics.is_sampler:
        raise ValueError("An optimizer of the cloud has no draws of the posterior; use SGLDR in place of SVGD.")
    if degree is not None and degree not in DEGREES:
        raise ValueError(f"`degree` must be one of {', '.join(map(repr, DEGREES))} or None; got {degree!r}.")
    gradient = FullData() if gradient is None else gradient
    if not isinstance(gradient, Gradient):
        raise TypeError(f"`gradient` must be a gradient such as FullData() or Subsampled(); got {gradient!r}.")
    target = bound_of(mcmc).target
    gradient.check_rows(target)
    kept, shape = _every_other(mcmc.get_samples(group_by_chain=True), integer("`num_draws`", num_draws))
    latent = latent_draws(target, kept, "Control variates need")
    z, score = (np.asarray(x, float) for x in score_at(latent, target, gradient, rng_key))
    if not (np.isfinite(z).all() and np.isfinite(score).all()):
        raise ValueError(
            "Some draws lie on the boundary of their support, by rounding, or have no finite gradient. Run in double "
            "precision, jax.config.update('jax_enable_x64', True)."
        )
    degree = _degree(degree, *z.shape)
    variates = _variates(z, score, degree)
    values = jax.jit(jax.vmap(function))(kept) if function is not None else kept
    leaves, structure = jax.tree.flatten(values)
    numbers = np.concatenate([np.asarray(leaf, float).reshape(len(z), -1) for leaf in leaves], 1)
    residuals = _residuals(numbers, variates, shape)
    _, parts = coupling_of(mcmc)

    def shaped(flat):
        ends = np.cumsum([int(np.prod(leaf.shape[1:])) for leaf in leaves])[:-1]
        found = [part.reshape(leaf.shape[1:]) for part, leaf in zip(np.split(flat, ends), leaves, strict=True)]
        return jax.tree.unflatten(structure, found)

    def mcse(x):
        return shaped(np.asarray(ensemble_mcse(x.reshape(*shape, -1), parts)))

    mean, plain = (shaped(x.mean(0)) for x in (residuals, numbers))
    return ControlledMeans(mean, mcse(residuals), plain, mcse(numbers), degree, len(z))


def _every_other(draws, num_draws):
    """Return draws ``(chains, iterations, ...)`` of evenly spread iterations, flat, and how many ``(chains, kept)``."""
    chains, total = jax.tree.leaves(draws)[0].shape[:2]
    kept = min(total, max(4, num_draws // chains))
    chosen = np.linspace(0, total - 1, kept).round().astype(int)
    return jax.tree.map(lambda x: jnp.asarray(x[:, chosen]).reshape(-1, *x.shape[2:]), draws), (chains, kept)


def _degree(degree, count, dimension):
    """Return the kind of control variates; raise ``ValueError`` if there are too few draws for it."""
    sizes = {"quadratic": dimension * (dimension + 3) // 2, "squares": 2 * dimension, "linear": dimension}
    for name in DEGREES if degree is None else (degree,):
        if SHARE * sizes[name] <= count:
            return name
    raise ValueError(
        f"{count} draws are too few for {sizes[degree or 'linear']} coefficients of {degree or 'linear'} control "
        f"variates: there must be {SHARE} for each. Raise `num_draws`, keep more draws, or use another `degree`."
    )


def _variates(z, score, degree):
    """Return the functions of mean 0 at draws ``(n, d)`` with their scores, ``(n, number)``."""
    # Any affine change of variables keeps the identity; this one makes the regression well conditioned.
    scale = z.std(0)
    scale = np.where(scale > 0, scale, 1.0)
    u, score = (z - z.mean(0)) / scale, score * scale
    parts = [score]
    if degree != "linear":
        parts.append(1.0 + u * score)
    if degree == "quadratic":
        first, second = np.triu_indices(z.shape[1], 1)
        parts.append(u[:, first] * score[:, second] + u[:, second] * score[:, first])
    return np.concatenate(parts, 1)


def _residuals(values, variates, shape):
    """Return values minus control variates, whose coefficients come from the other half of the iterations."""
    half = np.tile(np.arange(shape[1]) < shape[1] // 2, shape[0])
    residuals = np.empty_like(values)
    for fitted, used in ((half, ~half), (~half, half)):
        x = variates[fitted] - variates[fitted].mean(0)
        coefficients = np.linalg.lstsq(x, values[fitted] - values[fitted].mean(0), rcond=1e-10)[0]
        residuals[used] = values[used] - variates[used] @ coefficients
    return residuals
