"""Stein's identity: scores of draws, discrepancies of these from a distribution, and control variates for means."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import lax, random
import jax.numpy as jnp
import numpy as np

from numpyro.infer import MCMC

from numpyro_repulsion.checks import integer
from numpyro_repulsion.diagnostics.ensembles import ensemble_mcse
from numpyro_repulsion.gradients import FullData, Gradient, compiled, ravel_cloud
from numpyro_repulsion.kernels.runs import bound_of, chosen_draws, coupling_of, flat_values, kernel_of_run, latent_draws
from numpyro_repulsion.rounding import matmul


def ksd(draws: jax.Array, scores: jax.Array, *, scale: float | jax.Array = 1.0, exponent: float = -0.5) -> jax.Array:
    r"""Return the kernelized Stein discrepancy between draws and the distribution with these scores.

    In the limit it is 0 for that distribution alone. With the inverse multiquadric
    :math:`k(x, y) = (1 + \|x - y\|^2 / c^2)^\beta` and scores :math:`s = \nabla \log \pi = -\nabla U`,

    .. math::
        \mathrm{KSD}^2 = \frac{1}{n^2} \sum_{ij} \bigl( s_i \cdot s_j\, k + s_i \cdot \nabla_y k + s_j \cdot \nabla_x k
        + \nabla_x \cdot \nabla_y k \bigr)(x_i, x_j)

    It needs no normalizing constant and no exact draws. It detects bias and lack of convergence alike, but not wrong
    weights of distant modes. For n independent draws from π it is about :math:`n^{-1/2}` times its value for one draw.
    No array of shape ``(n, n)`` is formed. Scores from minibatches add the variance of their noise.

    :param draws: ``(n, d)``, in the unconstrained space of the scores.
    :param scores: ``(n, d)``.
    :param scale: c, a number or one for each coordinate; about the scale of the posterior.
    :param exponent: β, between -1 and 0.
    :return: a scalar, 0 or above.
    :raises ValueError: if the shapes differ or there are no draws, if ``scale`` is not positive or not one number or
        one for each coordinate, or if ``exponent`` is out of range.

    **References:**

    1. *Measuring Sample Quality with Kernels*, J. Gorham and L. Mackey, https://arxiv.org/abs/1703.01717

    **Example**

    .. doctest::

        >>> from jax import random
        >>> from numpyro_repulsion import ksd
        >>> x = random.normal(random.key(0), (1000, 2))  # from N(0, I), whose score is −x
        >>> bool(ksd(x, -x) < 0.1 < ksd(1.3 * x, -1.3 * x))
        True
    """
    x, s = jnp.asarray(draws), jnp.asarray(scores)
    if x.ndim != 2 or x.shape != s.shape:
        raise ValueError(f"`draws` and `scores` must both be of shape (n, d); got {x.shape} and {s.shape}.")
    if not len(x):
        raise ValueError("`draws` must be of shape (n, d) with one draw or more; got none.")
    if jnp.shape(scale) not in ((), (1,), x.shape[1:]) or not (jnp.asarray(scale) > 0).all():
        raise ValueError(
            f"`scale` must be above 0, one number or one for each of {x.shape[1]} coordinates; got {scale!r}."
        )
    if not -1.0 < exponent < 0.0:
        raise ValueError(f"`exponent` must lie between -1 and 0; got {exponent!r}.")
    # In units of c the kernel has scale 1, and scores are longer by the factor c.
    x, s = x / scale, s * scale

    def row(point):
        xi, si = point
        gap = xi - x
        q = 1.0 + jnp.sum(gap**2, -1)
        k, slope = q**exponent, 2.0 * exponent * q ** (exponent - 1.0)  # ∇_x k = slope · gap = −∇_y k
        trace = -slope * x.shape[1] - 4.0 * exponent * (exponent - 1.0) * q ** (exponent - 2.0) * (q - 1.0)
        return jnp.mean(matmul(s, si) * k + slope * jnp.sum(gap * (s - si), -1) + trace)

    return jnp.sqrt(jnp.maximum(jnp.mean(lax.map(row, (x, s))), 0.0))


def scores(
    mcmc: MCMC, *, num_draws: int = 1000, gradient: Gradient | None = None, rng_key: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Return draws of a run in unconstrained space and the score ``−∇U`` at each, the arguments of
    :func:`~numpyro_repulsion.ksd`.

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
        >>> from numpyro_repulsion import SGLDR, ksd
        >>> from numpyro_repulsion.diagnostics import scores
        >>> mcmc = MCMC(SGLDR(lambda: numpyro.sample("rate", dist.Gamma(5, 1))), num_warmup=50,
        ...             num_samples=100, num_chains=6, chain_method="vectorized", progress_bar=False)
        >>> mcmc.run(random.key(0))
        >>> bool(ksd(*scores(mcmc)) < 0.3)
        True
    """
    kernel_of_run(mcmc, "scores", of_warmup=True, of_optimizer=True)
    flat, found = _scores(mcmc, chosen_draws(mcmc, integer("`num_draws`", num_draws)), gradient, rng_key)
    usable = np.isfinite(np.asarray(flat)).all(1) & np.isfinite(np.asarray(found)).all(1)
    return flat[usable], found[usable]


def _scores(mcmc, draws, gradient, rng_key):
    """Return draws of all sites in unconstrained space and the score at each, both ``(n, d)``."""
    gradient = FullData() if gradient is None else gradient
    if not isinstance(gradient, Gradient):
        raise TypeError(f"`gradient` must be a gradient such as FullData() or Subsampled(); got {gradient!r}.")
    target = bound_of(mcmc).target
    gradient.check_rows(target)
    draws = latent_draws(target, draws, "Scores need")
    z = compiled(lambda target, draws: jax.vmap(target.unconstrain)(draws), target)(draws)
    flat, unravel = ravel_cloud(z)
    keys = random.split(random.key(0) if rng_key is None else rng_key, len(flat))

    def score(target, point):
        key, z = point
        return -gradient.energy_and_grad(key, target, unravel, z[None, None])[1][0, 0]

    return flat, compiled(lambda target, points: lax.map(lambda x: score(target, x), points), target)((keys, flat))


class ControlledMeans(NamedTuple):
    """Posterior means with control variates; :func:`~numpyro_repulsion.stein_control_variates` returns it.

    - **mean** - the means, as a pytree like the values of the function.
    - **mcse** - their Monte Carlo standard errors; NaN where the draws do not determine them.
    - **plain_mean**, **plain_mcse** - the same of the same draws without control variates.
    - **degree** - the control variates that were used.
    - **num_draws** - the number of draws.

    **Example**

    .. doctest::

        >>> from numpyro_repulsion.diagnostics import ControlledMeans
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
    the other, so that the estimate has no bias from fitting. For a Gaussian posterior means and variances are exact
    with a quadratic P, whatever the draws; for others the variance of f falls to that of what P does not explain. Part
    of the bias of a step size is removed too; a mean that differs from the plain one by many standard errors shows it.

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
    kernel_of_run(mcmc, "stein_control_variates")
    if degree not in ("quadratic", "squares", "linear", None):
        raise ValueError(f"`degree` must be one of 'quadratic', 'squares', 'linear' or None; got {degree!r}.")
    draws = chosen_draws(mcmc, integer("`num_draws`", num_draws), by_chain=True)
    shape = jax.tree.leaves(draws)[0].shape[:2]
    draws = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), draws)
    z, score = (np.asarray(x, float) for x in _scores(mcmc, draws, gradient, rng_key))
    if not (np.isfinite(z).all() and np.isfinite(score).all()):
        raise ValueError(
            "Some draws lie on the boundary of their support (by rounding), or their gradient is not finite. Run in "
            "double precision, jax.config.update('jax_enable_x64', True)."
        )
    degree = _degree(degree, *z.shape)
    numbers, shaped = flat_values(draws if function is None else jax.jit(jax.vmap(function))(draws), 1)
    residuals = _residuals(numbers, _variates(z, score, degree), shape)
    _, parts = coupling_of(mcmc)

    def mcse(x):
        return shaped(np.asarray(ensemble_mcse(x.reshape(*shape, -1), parts)))

    mean, plain = (shaped(x.mean(0)) for x in (residuals, numbers))
    return ControlledMeans(mean, mcse(residuals), plain, mcse(numbers), degree, len(z))


def _degree(degree, count, dimension):
    """Return the kind of control variates; raise ``ValueError`` if there are too few draws for it."""
    sizes = {"quadratic": dimension * (dimension + 3) // 2, "squares": 2 * dimension, "linear": dimension}
    for name in sizes if degree is None else (degree,):
        if 8 * sizes[name] <= count:
            return name
    raise ValueError(
        f"{count} draws are too few for {sizes[name]} coefficients of {name} control variates: there must be 8 for "
        "each. Raise `num_draws`, keep more draws, or use another `degree`."
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
        residuals[used] = values[used] - np.dot(variates[used], coefficients)
    return residuals
