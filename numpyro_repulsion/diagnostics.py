"""How much draws of interacting particles are worth: arrays or inference data in, numbers out."""

from __future__ import annotations

import re
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from numpyro.diagnostics import effective_sample_size

__all__ = ["ensemble_ess", "ensemble_mcse", "independent_ensembles", "ksd", "nested_rhat"]


def ensemble_ess(
    draws: Any, num_ensembles: int | None = None, *, method: str = "bulk", prob: float | None = None
) -> Any:
    r"""How many independent draws the draws of interacting particles are worth.

    Particles of one ensemble are no independent chains, so that neither the sum of their effective sample sizes nor
    anything else that looks at them one by one says how well an average over all is known. The average of f over
    the L particles at each iteration, :math:`\bar f_t`, is a single series, and the error of its mean is that of any
    series:

    .. math::
        \mathrm{ESS} = N\, \frac{\operatorname{Var} f}{\tau \operatorname{Var} \bar f}

    for N iterations, with τ the integrated autocorrelation time of :math:`\bar f`. For independent particles that is
    ``L N / τ``; for balanced noise it may be far more than there are draws, and with shared minibatches far less.
    Ensembles add up. Each is cut into halves, so that a drift counts against it.

    :param draws: ``(chains, draws, ...)``; or a dictionary of such; or inference data (ArviZ) with a ``posterior``.
    :param num_ensembles: how many equal ensembles the chains are of, in their order. ``None`` reads it from inference
        data, and is 1 for arrays. Ensembles that are balanced against each other are one.
    :param method: what the draws are worth for: ``"mean"``, ``"sd"`` (the mean of squared deviations), ``"bulk"`` (the
        mean of normal scores of ranks), ``"tail"`` (the lesser of the 5 % and 95 % quantiles), or ``"quantile"``.
    :param prob: of the quantile.
    :return: an array of the shape of one draw, NaN where draws do not vary or are not finite; or a dictionary of them.
    :raises ValueError: for less than four draws of each chain, chains that make no equal ensembles, an unknown method,
        or a ``prob`` outside (0, 1).

    **References:**

    1. *Rank-normalization, folding, and localization: An improved R-hat*, A. Vehtari, A. Gelman, D. Simpson,
       B. Carpenter and P.-C. Bürkner, https://arxiv.org/abs/1903.08008

    **Example**

    .. doctest::

        >>> from jax import random
        >>> from numpyro_repulsion import ensemble_ess
        >>> draws = random.normal(random.key(0), (10, 200))
        >>> bool(1500 < ensemble_ess(draws) < 2700)
        True
        >>> balanced = draws - draws.mean(0) + 0.1 * draws[:1]
        >>> bool(ensemble_ess(balanced, method="mean") > 10_000)
        True
    """
    if method not in _STATISTICS:
        raise ValueError(f"`method` must be one of {sorted(_STATISTICS)}; got {method!r}.")
    if (method == "quantile") != (prob is not None) or (prob is not None and not 0.0 < prob < 1.0):
        raise ValueError(f"`prob` is the probability of method='quantile', between 0 and 1; got {prob!r}.")

    def worth(x, groups):
        return np.minimum.reduce([_worth(f, groups) for f in _STATISTICS[method](x, prob)])

    return _each(draws, num_ensembles, worth)


def ensemble_mcse(draws: Any, num_ensembles: int | None = None, *, method: str = "mean") -> Any:
    """The standard error of the mean over all draws, for interacting particles: ``sd / sqrt(ESS)``.

    :param draws: as for :func:`ensemble_ess`.
    :param num_ensembles: as there.
    :param method: ``"mean"``, or ``"sd"`` for the standard error of the standard deviation.
    :return: an array of the shape of one draw, or a dictionary of them.
    :raises ValueError: as there.

    **Example**

    .. doctest::

        >>> from jax import random
        >>> from numpyro_repulsion import ensemble_mcse
        >>> error = ensemble_mcse(random.normal(random.key(0), (10, 1000)))
        >>> bool(0.008 < error < 0.012)
        True
    """

    if method not in ("mean", "sd"):
        raise ValueError(f"`method` must be 'mean' or 'sd'; got {method!r}.")

    def error(x, groups):
        (f,) = _STATISTICS[method](x, None)
        found = f.std((0, 1)) / _worth(f, groups) ** 0.5
        # The deviation is the root of the mean square.
        return found if method == "mean" else found / (2.0 * x.std((0, 1)))

    return _each(draws, num_ensembles, error)


def nested_rhat(draws: Any, num_ensembles: int | None = None, *, method: str = "rank") -> Any:
    r"""The nested :math:`\hat R`, with ensembles as superchains.

    .. math::
        \hat R = \sqrt{1 + B / W}

    with B the variance of the means of ensembles, and W the mean over ensembles of the variance within: that between
    its particles' means, and that of each particle over time. Particles of an ensemble may interact, for ensembles do
    not. It presumes that the particles of an ensemble start at one point; particles that stay where they started pass
    it, so look at the plain R-hat of particles too. The numbers are those of ``arviz_stats.rhat_nested``, which
    ArviZ 0.x lacks.

    :param draws: as for :func:`ensemble_ess`.
    :param num_ensembles: as there; two or more.
    :param method: ``"rank"`` takes the larger of that of the normal scores of ranks, and of how far draws lie from the
        median, with each particle's series cut into halves; ``"identity"`` the draws as they are.
    :return: an array of the shape of one draw, or a dictionary of them.
    :raises ValueError: for a single ensemble, an unknown method, and as there.

    **References:**

    1. *Nested R-hat: Assessing the Convergence of Markov Chain Monte Carlo When Running Many Short Chains*,
       C. C. Margossian, M. D. Hoffman, P. Sountsov, L. Riou-Durand, A. Vehtari and A. Gelman,
       https://arxiv.org/abs/2110.13017

    **Example**

    .. doctest::

        >>> from jax import random
        >>> from numpyro_repulsion import nested_rhat
        >>> draws = random.normal(random.key(0), (20, 100))
        >>> f"{nested_rhat(draws, num_ensembles=4):.2f}"
        '1.00'
    """

    if method not in ("rank", "identity"):
        raise ValueError(f"`method` must be 'rank' or 'identity'; got {method!r}.")

    def ratio(x, groups):
        x = x.reshape(groups, -1, *x.shape[1:])
        within = x.var(2, ddof=1).mean(1)
        if x.shape[1] > 1:
            within = within + x.mean(2).var(1, ddof=1)
        between = x.mean((1, 2)).var(0, ddof=1)
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.sqrt(1.0 + between / within.mean(0))

    def rhat(x, groups):
        if groups < 2:
            raise ValueError(
                "nested_rhat compares ensembles and needs two or more; got one. Run the kernel with num_ensembles=4, "
                "say, or pass `num_ensembles`."
            )
        if method == "identity":
            return ratio(x, groups)
        half = x.shape[1] // 2
        # Halves of a particle are two of the same ensemble.
        x = np.stack((x[:, :half], x[:, -half:]), 1).reshape(-1, half, *x.shape[2:])
        folded = np.abs(x - np.median(x, (0, 1)))
        return np.maximum(*(ratio(_normal_scores(part), groups) for part in (x, folded)))

    # Balanced ensembles lie further apart than independent ones, on the safe side.
    return _each(draws, num_ensembles, rhat, adds_up=False)


def ksd(draws: jax.Array, scores: jax.Array, *, scale: float | jax.Array = 1.0, exponent: float = -0.5) -> jax.Array:
    r"""The kernelized Stein discrepancy of draws from the law with these scores: 0 for that law alone, in the limit.

    With the inverse multiquadric :math:`k(x, y) = (1 + \|x - y\|^2 / c^2)^\beta` and scores
    :math:`s = \nabla \log \pi = -\nabla U`,

    .. math::
        \mathrm{KSD}^2 = \frac{1}{n^2} \sum_{ij} \bigl( s_i \cdot s_j\, k + s_i \cdot \nabla_y k + s_j \cdot \nabla_x k
        + \nabla_x \cdot \nabla_y k \bigr)(x_i, x_j)

    It needs no normalizing constant and no exact draws, and sees bias and lack of convergence alike; but not the
    weights of far modes. Of n independent draws from π it is about :math:`n^{-1/2}` times what one draw has. Rows are
    taken one at a time, so that nothing of shape ``(n, n)`` is formed. Scores from minibatches add the variance of
    their noise.

    :param draws: ``(n, d)``, in the unconstrained space of the scores.
    :param scores: ``(n, d)``.
    :param scale: c, a number or one for each coordinate; about the scale of the posterior.
    :param exponent: β, between -1 and 0.
    :return: a scalar, 0 or above.
    :raises ValueError: for shapes that differ, or an exponent out of range.

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
    if not -1.0 < exponent < 0.0:
        raise ValueError(f"`exponent` must lie between -1 and 0; got {exponent!r}.")
    # In units of c the kernel has none, and scores are longer by c.
    x, s = x / scale, s * scale

    def row(point):
        xi, si = point
        gap = xi - x
        q = 1.0 + jnp.sum(gap**2, -1)
        k, slope = q**exponent, 2.0 * exponent * q ** (exponent - 1.0)  # ∇_x k = slope · gap = −∇_y k
        trace = -slope * x.shape[1] - 4.0 * exponent * (exponent - 1.0) * q ** (exponent - 2.0) * (q - 1.0)
        return jnp.mean((s @ si) * k + slope * jnp.sum(gap * (s - si), -1) + trace)

    return jnp.sqrt(jnp.maximum(jnp.mean(lax.map(row, (x, s))), 0.0))


def independent_ensembles(attributes: dict[str, Any]) -> int | None:
    """How many ensembles add up, by the attributes of inference data: those balanced against each other are one."""
    if re.search(r"Balanced\(interaction=(?!None)", str(attributes.get("interaction"))):
        return 1
    return attributes.get("num_ensembles")


def _each(draws, num_ensembles, function, adds_up=True):
    """The function of arrays ``(chains, draws, ...)`` and a number of ensembles, applied to each of several.

    :param adds_up: whether the function takes ensembles to be independent.
    """
    known = None
    data = getattr(draws, "posterior", draws)
    data = getattr(data, "dataset", data)
    if hasattr(data, "data_vars"):
        known = independent_ensembles(data.attrs) if adds_up else data.attrs.get("num_ensembles")
        draws = {name: data[name].values for name in data.data_vars}
    if num_ensembles is None:
        num_ensembles = 1 if known is None else int(known)
    if isinstance(draws, dict):
        return {name: _each(x, num_ensembles, function) for name, x in draws.items()}
    x = np.asarray(draws, np.float64)
    if x.ndim < 2 or x.shape[1] < 4:
        raise ValueError(f"`draws` must be of shape (chains, draws, ...) with four draws or more; got {x.shape}.")
    if num_ensembles < 1 or x.shape[0] % num_ensembles:
        raise ValueError(
            f"`num_ensembles` must divide the number of chains; got {num_ensembles} for {x.shape[0]} chains."
        )
    return function(x, num_ensembles)


def _worth(x, groups):
    """The effective sample size of the mean of ``x``, of shape ``(chains, draws, ...)``."""
    means = x.reshape(groups, -1, *x.shape[1:]).mean(1)
    half = means.shape[1] // 2
    halves = np.concatenate((means[:, :half], means[:, -half:]))
    total = halves.shape[0] * half
    with np.errstate(divide="ignore", invalid="ignore"):
        # The series may be so antithetic that its estimated time is not positive.
        iterations = effective_sample_size(halves)
        most = total * np.log10(total)
        iterations = np.where((iterations <= 0) | (iterations > most), most, iterations)
        found = iterations * x.var((0, 1), ddof=1) / halves.var((0, 1), ddof=1)
    usable = np.isfinite(x).all((0, 1)) & (x.var((0, 1)) > 0)
    return np.where(usable, found, np.nan)


def _normal_scores(x):
    from scipy.stats import norm, rankdata  # JAX needs SciPy; in single precision, JAX's own would make ties

    flat = x.reshape(x.shape[0] * x.shape[1], -1)
    return norm.ppf((rankdata(flat, axis=0) - 0.375) / (len(flat) + 0.25)).reshape(x.shape)


def _below(x, prob):
    return (x <= np.quantile(x, prob, (0, 1), keepdims=True)).astype(float)


#: The functions whose means are asked for.
_STATISTICS = {
    "mean": lambda x, _: [x],
    "sd": lambda x, _: [(x - x.mean((0, 1))) ** 2],
    "bulk": lambda x, _: [_normal_scores(x)],
    "tail": lambda x, _: [_below(x, 0.05), _below(x, 0.95)],
    "quantile": lambda x, prob: [_below(x, prob)],
}
