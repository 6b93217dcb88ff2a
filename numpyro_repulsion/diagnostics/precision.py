"""How well the draws of interacting particles determine an average: effective sample sizes, and standard errors."""

from __future__ import annotations

from typing import Any

import numpy as np

from numpyro.diagnostics import effective_sample_size

from numpyro_repulsion.diagnostics.ensembles import each, normal_scores

__all__ = ["KNOWN", "MODES", "NOTHING", "SHORT", "ensemble_ess", "ensemble_mcse", "why_unknown"]

#: Why there is no figure: there is one; draws that do not vary or are not finite; particles that mix, each where it is,
#: but not with each other; and a run that is short beside the time in which a particle mixes.
KNOWN, NOTHING, MODES, SHORT = range(4)

#: A run of fewer autocorrelation times of a particle has not forgotten where it began.
MIN_TIMES = 5.0
#: Frequencies for each autocorrelation time in the run. At the last of them the spectrum of an autoregression has
#: fallen to 0.7 of what it is at 0, for which the estimate is corrected.
FREQUENCIES = 0.4
#: Degrees of freedom below which a standard error is off by more than a quarter too often.
MIN_FREEDOM = 10
#: The variance of an estimated autocorrelation time, in units of its square, for each such time in the draws.
TIME_VARIANCE = 6.0
#: Particles do not mix where their means lie so much further apart than their own spectra explain (a standard error a
#: quarter too small), beyond what chance does once in ten thousand times.
EXCESS, CHANCE = 1.5, 1e-4
#: Averages are taken to forget faster than particles where they have so many times as many autocorrelation times, and
#: so many standard errors more if they are not known to repel each other.
FASTER, FASTER_ERRORS = 3.0, 2.5
#: An average has been everywhere that varies over time by so much of what its stationary variance is known to be.
EXPLORED = 0.9
#: Particles that hold so many autocorrelation times about their own means mix where they are.
MIXED_WITHIN = 15.0
#: Batches of a chain of which it is asked whether few of them make all the variance.
MAX_BATCHES = 64
#: Numbers of draws looked at in one go.
BLOCK = 2**24


def ensemble_ess(
    draws: Any, num_ensembles: int | None = None, *, method: str = "bulk", prob: float | None = None
) -> Any:
    r"""How many independent draws the draws of interacting particles are worth.

    Particles of one ensemble are no independent chains, so that neither the sum of their effective sample sizes nor
    anything else that looks at them one by one says how well an average over all is known. The average of f over
    the L particles at each iteration, :math:`\bar f_t`, is a single series, and the error of its mean is that of any
    series:

    .. math::
        \mathrm{ESS} = \frac{\operatorname{Var} f}{\mathrm{MCSE}^2}, \qquad
        \mathrm{MCSE}^2 = \frac{S(0)}{N}

    for N iterations, with S(0) the spectrum of :math:`\bar f_t` at frequency 0, which is
    :math:`\tau \operatorname{Var} \bar f` for an integrated autocorrelation time τ. For independent particles that is
    ``L N / τ``; for balanced noise it may be far more than there are draws, and with shared minibatches far less.
    Of several ensembles the variance of their means counts too, and they add up.

    S(0) comes from the lowest frequencies of the averages (discrete cosines, so that a drift counts), as many as lie
    well below the frequency at which single particles forget. How fast they do is estimated from all particles
    together, about the mean of all: particles that have not been everywhere differ. The result is NaN where the draws
    cannot tell: where the run is shorter than 5 autocorrelation times of a particle; where particles lie further apart
    than their own paths explain, as in separate modes; and where fewer than 10 squares are left to estimate S(0) from,
    so a single ensemble needs some 25 autocorrelation times. :func:`~numpyro_repulsion.summary` says which. Inference
    data of particles that repel each other tell more: these are independent at any one time, so it is enough that
    their average has varied by as much as that says.

    :param draws: ``(chains, draws, ...)``; or a dictionary of such; or inference data (ArviZ) with a ``posterior``.
    :param num_ensembles: how many equal groups the chains consist of, in their order, that are independent of each
        other. ``None`` reads it from inference data, and is 1 for arrays, of whose coupling nothing is known; for
        independent chains give their number. Ensembles that are balanced against each other are one.
    :param method: what the draws are worth for: ``"mean"``, ``"sd"`` (the mean of squared deviations), ``"bulk"`` (the
        mean of normal scores of ranks), ``"tail"`` (the lesser of the 5 % and 95 % quantiles), or ``"quantile"``.
    :param prob: of the quantile.
    :return: an array of the shape of one draw, NaN as above, and where draws do not vary or are not finite; or a
        dictionary of them.
    :raises ValueError: for less than four draws of each chain, chains that make no equal ensembles, an unknown method,
        a ``prob`` outside (0, 1), or inference data of an optimizer (SVGD).
    :raises TypeError: for draws that are no numbers.

    **References:**

    1. *Rank-normalization, folding, and localization: An improved R-hat*, A. Vehtari, A. Gelman, D. Simpson,
       B. Carpenter and P.-C. Bürkner, https://arxiv.org/abs/1903.08008
    2. *A spectral method for confidence interval generation and run length control in simulations*, P. Heidelberger
       and P. D. Welch (1981)

    **Example**

    .. doctest::

        >>> from jax import random
        >>> from numpyro_repulsion import ensemble_ess
        >>> draws = random.normal(random.key(0), (10, 1000))
        >>> bool(8000 < ensemble_ess(draws) < 12_000)
        True
        >>> balanced = draws - draws.mean(0) + 0.1 * draws[:1]
        >>> bool(ensemble_ess(balanced, method="mean") > 50_000)
        True
        >>> drifting = draws.cumsum(1)  # of random walks nothing is known
        >>> float(ensemble_ess(drifting))
        nan
    """
    if method not in _STATISTICS:
        raise ValueError(f"`method` must be one of {sorted(_STATISTICS)}; got {method!r}.")
    if (method == "quantile") != (prob is not None) or (prob is not None and not 0.0 < prob < 1.0):
        raise ValueError(f"`prob` is the probability of method='quantile', between 0 and 1; got {prob!r}.")

    def worth(x, groups, repels):
        found, scores = [], normal_scores(x)
        for f in _STATISTICS[method](x, scores, prob):
            variance, _ = _variance_of_mean(f, groups, repels, scores)
            found.append(f.var((0, 1), ddof=1) / variance)
        return np.minimum.reduce(found)

    return each(draws, num_ensembles, _in_blocks(worth))


def ensemble_mcse(draws: Any, num_ensembles: int | None = None, *, method: str = "mean") -> Any:
    """The standard error of the mean over all draws, for interacting particles: ``sd / sqrt(ESS)``.

    It allows for its own uncertainty, so that errors have about unit variance in its units: of a single ensemble
    and few autocorrelation times it is a tenth or two larger than its square's best estimate.

    :param draws: as for :func:`ensemble_ess`.
    :param num_ensembles: as there.
    :param method: ``"mean"``, or ``"sd"`` for the standard error of the standard deviation.
    :return: an array of the shape of one draw, NaN where it cannot be known, as there; or a dictionary of them.
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

    def error(x, groups, repels):
        scores = normal_scores(x)
        (f,) = _STATISTICS[method](x, scores, None)
        found = np.sqrt(_variance_of_mean(f, groups, repels, scores)[0])
        # The deviation is the root of the mean square.
        return found if method == "mean" else found / (2.0 * x.std((0, 1)))

    return each(draws, num_ensembles, _in_blocks(error))


def why_unknown(draws: Any, num_ensembles: int | None = None) -> Any:
    """Why :func:`ensemble_ess` has no figure: ``KNOWN`` (0) where it has one, ``NOTHING``, ``MODES`` or ``SHORT``.

    :param draws: as for :func:`ensemble_ess`.
    :param num_ensembles: as there.
    :return: an array of the shape of one draw, or a dictionary of them.
    """

    def why(x, groups, repels):
        return _variance_of_mean(normal_scores(x), groups, repels)[1]

    found = each(draws, num_ensembles, _in_blocks(why))
    if isinstance(found, dict):
        return {name: _as_reasons(one) for name, one in found.items()}
    return _as_reasons(found)


def _as_reasons(found):
    return np.where(np.isnan(found), NOTHING, found).astype(int)


def _in_blocks(function):
    """The function of ``(chains, draws, columns)``, applied to so many columns at a time as fit into memory."""

    def apply(x, groups, repels):
        flat = x.reshape(*x.shape[:2], -1)
        width = max(1, BLOCK // (flat.shape[0] * flat.shape[1]))
        found = np.full(flat.shape[2], np.nan)
        for start in range(0, flat.shape[2], width):
            part = flat[..., start : start + width]
            usable = np.isfinite(part).all((0, 1))
            usable[usable] = np.ptp(part[..., usable], (0, 1)) > 0
            place = np.arange(start, start + part.shape[2])[usable]
            if place.size:
                found[place] = function(part[..., usable], groups, repels)
        return found.reshape(x.shape[2:])[()]

    return apply


def _variance_of_mean(f, groups, repels=False, scores=None):
    """The variance of the mean over all draws of ``f``, and why there is none, each ``(columns,)``.

    :param repels: whether the particles interact, but are independent at any one time.
    :param scores: normal scores of what f is a function of, which must have mixed too.
    """
    times = _all_times(f, groups, repels)
    blocked = KNOWN
    if scores is not None and scores is not f:
        # A function of what mixes slowly is not known before that is.
        times = np.minimum(times, _all_times(scores, groups, repels))
        _, _, blocked = _look(scores, groups, times, repels)
    variance, freedom, why = _look(f, groups, times, repels)
    why = np.where((why == KNOWN) & (freedom < MIN_FREEDOM), SHORT, why)
    why = np.where((why == KNOWN) & (blocked != NOTHING), blocked, why)
    return np.where(why == KNOWN, variance, np.nan), why


def _look(f, groups, times, repels):
    """The variance of the mean, its degrees of freedom, and whether particles have mixed, for ``(C, N, columns)``.

    :param times: what :func:`_all_times` found.
    """
    from scipy.fft import dct

    (chains, number, _), (own_times, times) = f.shape, times
    waves = dct(f - f.mean((0, 1)), axis=1, norm="ortho")[:, : _count(times, number).max() + 1]
    waves = waves.reshape(groups, -1, *waves.shape[1:])
    means = waves.mean(1)
    between, within, count = _squares(means, times, number)
    freedom = groups * count + groups - 1
    with np.errstate(divide="ignore", invalid="ignore"):
        variance = (within + between) / freedom / (groups * number)
        apart = _exceeds(between, groups - 1, within, groups * count)
        # An average that is thought to forget faster than its particles must not hold what is as slow as these.
        _, slow, few = _squares(means, own_times, number)
        apart |= (few < count) & _exceeds(slow, groups * few, within - slow, groups * (count - few))
        if waves.shape[1] > 1:
            own = (waves - means[:, None]).reshape(chains, *waves.shape[2:])
            some = groups * (waves.shape[1] - 1)
            between, within, count = _squares(own, own_times, number)
            # Particles that all move alike have nothing but rounding between them.
            differ = between + within > 1e-20 * (f**2).sum((0, 1))
            apart |= differ & _exceeds(between, some, within, some * count)
        # So that errors have unit variance in units of the standard error, uncertain as it is.
        variance *= freedom / (freedom - 2.0) * (1.0 + TIME_VARIANCE / (groups * times))
    # A series may be so antithetic that hardly anything is left at low frequencies.
    total = groups * number
    least = _averages(f, groups).var((0, 1)) / (total * np.log10(total))
    variance = np.maximum(variance, least)
    is_short = own_times < MIN_TIMES
    if is_short.any():
        apart[is_short] |= _times((f - f.mean(1, keepdims=True))[..., is_short]) > MIXED_WITHIN
    why = np.select([apart, is_short], [MODES, SHORT], KNOWN)
    if repels:
        # Particles that repel each other may keep their order, on a line, while their average goes everywhere: then it
        # varies over time as much as that of independent particles does from one set of them to another.
        spread = _averages(f, groups).var((0, 1)) * (chains // groups)
        why = np.where(spread > EXPLORED * f.var((0, 1)), KNOWN, why)
    # Of an average that stays where it began nothing is known, however exactly its noises cancel.
    freedom = np.minimum(freedom, _freedom_of_events(f, own_times))
    return variance, freedom, np.where(least > 1e-24 * f.var((0, 1)), why, NOTHING)


def _averages(f, groups):
    return f.reshape(groups, -1, *f.shape[1:]).mean(1)


def _all_times(f, groups, repels):
    """How many autocorrelation times of a particle the run has, and how many of the averages over ensembles.

    The averages have the particles' unless they are clearly faster, as with repulsion: a single series hardly tells.
    """
    own = _times(f)
    averages = _times(_averages(f, groups)) if groups < f.shape[0] else own
    factor = FASTER if repels else np.maximum(FASTER, np.exp(FASTER_ERRORS * np.sqrt(TIME_VARIANCE / (groups * own))))
    return np.stack((own, np.where(averages > factor * own, averages, own)))


def _count(times, number):
    return np.clip(FREQUENCIES * times, 0, number // 2).astype(int)


def _squares(waves, times, number):
    """Squares at frequency 0, those of the lowest others, and how many these are; summed over series.

    :param times: autocorrelation times in the run, which give the number, and the spectrum of an autoregression by
        which squares are divided, relative to its value at frequency 0.
    """
    rho = (number / times - 1.0) / (number / times + 1.0)
    order, count = np.arange(waves.shape[1])[:, None], _count(times, number)
    inverse = (1.0 - 2.0 * rho * np.cos(np.pi * order / number) + rho**2) / (1.0 - rho) ** 2
    weight = np.where((order >= 1) & (order <= count), inverse, 0.0)
    return (waves[:, 0] ** 2).sum(0), (waves**2 * weight).sum((0, 1)), count


def _freedom_of_events(f, times):
    """Degrees of freedom by how unequal the squares of batch means are: rare events, or single draws, leave few.

    A batch is about as long as an autocorrelation time.
    """
    chains, number, columns = f.shape
    batches = 2 ** np.clip(np.log2(times).round(), 1, np.log2(min(MAX_BATCHES, number))).astype(int)
    found = np.empty(columns)
    for count in np.unique(batches):
        chosen = batches == count
        part = f[..., chosen] - f[..., chosen].mean((0, 1))
        part = part[:, : number // count * count].reshape(chains * count, -1, part.shape[2]).mean(1) ** 2
        with np.errstate(divide="ignore", invalid="ignore"):
            inequality = (part**2).sum(0) / part.sum(0) ** 2 - 1.0 / len(part)
            found[chosen] = np.where(inequality > 0, 2.0 / inequality, np.inf)
    return found


def _times(f):
    """How many autocorrelation times of a particle the run has, by all particles about the mean of all."""
    with np.errstate(divide="ignore", invalid="ignore"):
        found = effective_sample_size(f) / f.shape[0]
    # A series may be so antithetic that its estimated time is not positive.
    most = f.shape[1] * np.log10(f.shape[0] * f.shape[1])
    return np.where((found > 0) & (found < most), found, most)


def _exceeds(squares, number, others, other_number):
    """Whether some squares are larger than others by more than chance and a smooth spectrum explain."""
    from scipy.stats import f as ratio

    found = (squares / number) / (others / other_number)
    some = np.maximum(number, 1), np.maximum(other_number, 1)
    return (np.asarray(number) > 0) & (other_number > 0) & (ratio.sf(found / EXCESS, *some) < CHANCE)


def _below(x, prob):
    return (x <= np.quantile(x, prob, (0, 1), keepdims=True)).astype(float)


#: The functions whose means are asked for.
_STATISTICS = {
    "mean": lambda x, scores, _: [x],
    "sd": lambda x, scores, _: [(x - x.mean((0, 1))) ** 2],
    "bulk": lambda x, scores, _: [scores],
    "tail": lambda x, scores, _: [_below(x, 0.05), _below(x, 0.95)],
    "quantile": lambda x, scores, prob: [_below(x, prob)],
}
