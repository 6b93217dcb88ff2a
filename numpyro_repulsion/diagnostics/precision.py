"""Effective sample sizes and standard errors of averages over interacting particles."""

from __future__ import annotations

from typing import Any

import numpy as np

from numpyro.diagnostics import effective_sample_size

#: Why there is no figure: there is one; draws do not vary or are not finite; particles mix, each in its own place, but
#: not with each other; the run is short compared with the mixing time of a particle.
KNOWN, NOTHING, MODES, SHORT = range(4)

#: A run of fewer autocorrelation times of a particle has not forgotten its start.
MIN_TIMES = 5.0
#: Frequencies used for each autocorrelation time in the run. At the last of them the spectrum of an autoregression has
#: fallen to 0.7 of its value at 0; the estimate is corrected for that.
FREQUENCIES = 0.4
#: With fewer degrees of freedom a standard error is off by more than a quarter too often.
MIN_FREEDOM = 10
#: The relative variance of an estimated autocorrelation time is this over the number of such times in the draws.
TIME_VARIANCE = 6.0
#: Particles do not mix if the squared distances between their means exceed by this factor what their own spectra
#: explain (a standard error about a fifth too small), beyond what chance does once in ten thousand times.
EXCESS, CHANCE = 1.5, 1e-4
#: Averages count as faster than particles if the run has this many times as many of their autocorrelation times; and,
#: unless particles are known to repel each other, if the excess is also this many standard errors.
FASTER, FASTER_ERRORS = 3.0, 2.5
#: An average has explored its distribution if its variance over time is this share of its known stationary variance.
EXPLORED = 0.9
#: Particles mix where they are if the run has more than this many autocorrelation times about their own means.
MIXED_WITHIN = 15.0
#: Most batches per chain in the test of whether few batches make all the variance.
MAX_BATCHES = 64
#: Most entries of draws processed at once.
BLOCK = 2**24


def ensemble_ess(
    draws: Any, num_ensembles: int | None = None, *, method: str = "bulk", prob: float | None = None
) -> Any:
    r"""Return the effective sample size: how many independent draws the draws of interacting particles are worth.

    Particles of one ensemble are not independent chains. So neither the sum of their effective sample sizes nor any
    other statistic of single particles tells how precise an average over all of them is. The average of f over the L
    particles at each iteration, :math:`\bar f_t`, is a single series, and its mean has the error of any series:

    .. math::
        \mathrm{ESS} = \frac{\operatorname{Var} f}{\mathrm{MCSE}^2}, \qquad
        \mathrm{MCSE}^2 = \frac{S(0)}{N}

    N is the number of iterations. S(0) is the spectrum of :math:`\bar f_t` at frequency 0, which is
    :math:`\tau \operatorname{Var} \bar f` for an integrated autocorrelation time τ. The ESS is ``L N / τ`` for
    independent particles; with balanced noise it may far exceed the number of draws, and with shared minibatches it is
    far smaller. Several ensembles add up, and the variance of their means counts too.

    S(0) comes from the lowest frequencies of the averages (discrete cosines, so that a drift counts), those well below
    the frequency at which single particles decorrelate. The autocorrelation time of a particle is estimated from all
    particles together, about their common mean, so that particles that have not explored the whole distribution count
    as slow. The result is NaN if the draws do not determine it: if the run is shorter than 5 autocorrelation times of a
    particle; if particles lie further apart than their own paths explain, as in separate modes; or if fewer than 10
    squares are left to estimate S(0) from, so a single ensemble needs about 25 autocorrelation times.
    :func:`~numpyro_repulsion.summary` says which. Inference data of particles that repel each other need less: these
    particles are independent at any one time, so it is enough that their average varies as much as that implies.

    :param draws: an array ``(chains, draws, ...)``, a dictionary of such, or inference data (ArviZ) with a
        ``posterior``.
    :param num_ensembles: number of equal groups of chains, in chain order, that are independent of each other. ``None``
        reads it from inference data, and is 1 for arrays, whose coupling is unknown; for independent chains pass their
        number. Ensembles that are balanced against each other count as one.
    :param method: the estimate that the draws are for: ``"mean"``, ``"sd"`` (the mean of squared deviations),
        ``"bulk"`` (the mean of normal scores of ranks), ``"tail"`` (the smaller ESS of the 5 % and 95 % quantiles), or
        ``"quantile"``.
    :param prob: the probability of the quantile.
    :return: an array of the shape of one draw, NaN as above, and where draws do not vary or are not finite; or a
        dictionary of such.
    :raises ValueError: for fewer than four draws of each chain, a ``num_ensembles`` that does not divide the number of
        chains, an unknown method, a ``prob`` outside (0, 1), or inference data of an optimizer (SVGD).
    :raises TypeError: for draws that are not numbers.

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
        >>> drifting = draws.cumsum(1)  # random walks have no ESS
        >>> float(ensemble_ess(drifting))
        nan
    """
    if method not in _STATISTICS:
        raise ValueError(f"`method` must be one of {sorted(_STATISTICS)}; got {method!r}.")
    if (method == "quantile") != (prob is not None) or (prob is not None and not 0.0 < prob < 1.0):
        raise ValueError(
            "`prob` must be between 0 and 1 for method='quantile', and None for others; got "
            f"prob={prob!r} with method={method!r}."
        )

    def worth(x, groups, repels):
        found, scores = [], normal_scores(x)
        for f in _STATISTICS[method](x, scores, prob):
            variance, _ = _variance_of_mean(f, groups, repels, scores)
            found.append(f.var((0, 1), ddof=1) / variance)
        return np.minimum.reduce(found)

    return each(draws, num_ensembles, _in_blocks(worth))


def ensemble_mcse(draws: Any, num_ensembles: int | None = None, *, method: str = "mean") -> Any:
    """Return the standard error of the mean over all draws of interacting particles: ``sd / sqrt(ESS)``.

    It allows for its own uncertainty, so that errors divided by it have about unit variance: for a single ensemble and
    few autocorrelation times it is a tenth or two larger than the root of the best estimate of its square.

    :param draws: as for :func:`ensemble_ess`.
    :param num_ensembles: as for :func:`ensemble_ess`.
    :param method: ``"mean"``, or ``"sd"`` for the standard error of the standard deviation.
    :return: an array of the shape of one draw, NaN where :func:`ensemble_ess` is NaN; or a dictionary of such.
    :raises ValueError: as :func:`ensemble_ess` does.

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
        # The sd is the root of the mean square, so its error follows by the delta method.
        return found if method == "mean" else found / (2.0 * x.std((0, 1)))

    return each(draws, num_ensembles, _in_blocks(error))


def why_unknown(draws: Any, num_ensembles: int | None = None) -> Any:
    """Return why :func:`ensemble_ess` is NaN: ``NOTHING``, ``MODES`` or ``SHORT``; ``KNOWN`` (0) where it is not.

    :param draws: as for :func:`ensemble_ess`.
    :param num_ensembles: as for :func:`ensemble_ess`.
    :return: an array of the shape of one draw, or a dictionary of such.
    """

    def why(x, groups, repels):
        return _variance_of_mean(normal_scores(x), groups, repels)[1]

    return each(draws, num_ensembles, _in_blocks(why, NOTHING))


def num_independent(attributes: dict[str, Any], num_chains: int) -> int:
    """Return the number of independent groups of chains in inference data; groups are equal and in chain order.

    Each chain is a group if nothing couples chains, and each ensemble if ensembles do not interact. Ensembles that are
    balanced against each other are one group.

    :param attributes: attributes of inference data; of another library there is one group.
    :param num_chains: number of chains of the data.
    """
    return num_chains if attributes.get("coupling") == "none" else int(attributes.get("num_independent", 1))


def each(draws, num_ensembles, function, adds_up=True):
    """Apply a function of an array ``(chains, draws, ...)`` and a number of ensembles to each array of draws.

    :param function: takes an array, the number of ensembles, and whether particles are known to interact by a drift
        that leaves them independent at any one time.
    :param adds_up: whether the function presumes that ensembles are independent.
    """
    repels = False
    data = getattr(draws, "posterior", draws)
    data = getattr(data, "dataset", data)
    if hasattr(data, "data_vars"):
        if str(data.attrs.get("is_sampler", "true")) != "true":
            raise ValueError(
                f"{data.attrs.get('algorithm', 'This')} is an optimizer: its last cloud is not a sample, and has no "
                "effective sample size, standard error or R-hat. Use SGLDR for draws."
            )
        repels = data.attrs.get("coupling") == "interaction"
        if num_ensembles is None:
            count = data.sizes["chain"]
            num_ensembles = num_independent(data.attrs, count) if adds_up else int(data.attrs.get("num_ensembles", 1))
        draws = {name: data[name].values for name in data.data_vars}
    num_ensembles = 1 if num_ensembles is None else num_ensembles
    if isinstance(draws, dict):
        return {name: each(x, num_ensembles, lambda x, n, _: function(x, n, repels)) for name, x in draws.items()}
    x = np.asarray(draws)
    if x.dtype.kind not in "biuf":
        raise TypeError(f"`draws` must be numbers; got an array of type {x.dtype}.")
    x = x.astype(np.float64)
    if x.ndim < 2 or x.shape[1] < 4:
        raise ValueError(f"`draws` must be of shape (chains, draws, ...) with four draws or more; got {x.shape}.")
    if isinstance(num_ensembles, bool) or not isinstance(num_ensembles, int | np.integer):
        raise TypeError(f"`num_ensembles` must be an integer; got {num_ensembles!r}.")
    if num_ensembles < 1 or x.shape[0] % num_ensembles:
        raise ValueError(
            f"`num_ensembles` must divide the number of chains; got {num_ensembles} for {x.shape[0]} chains."
        )
    return function(x, int(num_ensembles), repels)


def normal_scores(x):
    """Return the normal scores of ranks over all draws, of the shape of ``x``."""
    from scipy.stats import norm, rankdata  # JAX depends on SciPy; its own functions make ties in single precision

    flat = x.reshape(x.shape[0] * x.shape[1], -1)
    return norm.ppf((rankdata(flat, axis=0) - 0.375) / (len(flat) + 0.25)).reshape(x.shape)


def _in_blocks(function, unknown=np.nan):
    """Apply a function of ``(chains, draws, columns)`` to as many columns at a time as fit into memory.

    :param unknown: its result where draws do not vary or are not finite.
    """

    def apply(x, groups, repels):
        flat = x.reshape(*x.shape[:2], -1)
        width = max(1, BLOCK // (flat.shape[0] * flat.shape[1]))
        found = np.full(flat.shape[2], unknown)
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
    """Return the variance of the mean of ``f`` over all draws, and why it is NaN, each ``(columns,)``.

    :param repels: whether the particles interact, but are independent at any one time.
    :param scores: normal scores of the draws that f is a function of; these must have mixed too.
    """
    times = _all_times(f, groups, repels)
    blocked = KNOWN
    if scores is not None and scores is not f:
        # The mean of a function of slow draws is unknown until these have mixed.
        times = np.minimum(times, _all_times(scores, groups, repels))
        _, _, blocked = _look(scores, groups, times, repels)
    variance, freedom, why = _look(f, groups, times, repels)
    why = np.where((why == KNOWN) & (freedom < MIN_FREEDOM), SHORT, why)
    why = np.where((why == KNOWN) & (blocked != NOTHING), blocked, why)
    return np.where(why == KNOWN, variance, np.nan), why


def _look(f, groups, times, repels):
    """Return the variance of the mean of ``f``, its degrees of freedom, and a reason if particles have not mixed.

    :param f: ``(chains, draws, columns)``.
    :param times: the result of :func:`_all_times`.
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
        # An average that counts as faster than its particles must have no part as slow as these.
        _, slow, few = _squares(means, own_times, number)
        apart |= (few < count) & _exceeds(slow, groups * few, within - slow, groups * (count - few))
        if waves.shape[1] > 1:
            own = (waves - means[:, None]).reshape(chains, *waves.shape[2:])
            some = groups * (waves.shape[1] - 1)
            between, within, count = _squares(own, own_times, number)
            # Particles that all move alike differ only by rounding.
            differ = between + within > 1e-20 * (f**2).sum((0, 1))
            apart |= differ & _exceeds(between, some, within, some * count)
        # So that errors divided by the standard error, itself uncertain, have unit variance.
        variance *= freedom / (freedom - 2.0) * (1.0 + TIME_VARIANCE / (groups * times))
    # An antithetic series may have hardly any variance left at low frequencies.
    total = groups * number
    least = _averages(f, groups).var((0, 1)) / (total * np.log10(total))
    variance = np.maximum(variance, least)
    is_short = own_times < MIN_TIMES
    if is_short.any():
        apart[is_short] |= _times((f - f.mean(1, keepdims=True))[..., is_short]) > MIXED_WITHIN
    why = np.select([apart, is_short], [MODES, SHORT], KNOWN)
    if repels:
        # Particles that repel each other may keep their order on a line while their average goes everywhere: then the
        # average varies over time as much as the averages of independent sets of particles.
        spread = _averages(f, groups).var((0, 1)) * (chains // groups)
        why = np.where(spread > EXPLORED * f.var((0, 1)), KNOWN, why)
    # An average that stays where it began is unknown, however exactly its noises cancel.
    freedom = np.minimum(freedom, _freedom_of_events(f, own_times))
    return variance, freedom, np.where(least > 1e-24 * f.var((0, 1)), why, NOTHING)


def _averages(f, groups):
    return f.reshape(groups, -1, *f.shape[1:]).mean(1)


def _all_times(f, groups, repels):
    """Return how many autocorrelation times the run has, of a particle and of the averages over ensembles.

    Averages get the particles' number unless they are clearly faster, as with repulsion: a single series tells little.
    """
    own = _times(f)
    averages = _times(_averages(f, groups)) if groups < f.shape[0] else own
    factor = FASTER if repels else np.maximum(FASTER, np.exp(FASTER_ERRORS * np.sqrt(TIME_VARIANCE / (groups * own))))
    return np.stack((own, np.where(averages > factor * own, averages, own)))


def _count(times, number):
    return np.clip(FREQUENCIES * times, 0, number // 2).astype(int)


def _squares(waves, times, number):
    """Return squares at frequency 0, squares at the lowest other frequencies, and how many these are.

    The squares are sums over series. Those above frequency 0 are divided by the spectrum of an autoregression, relative
    to its value at 0.

    :param times: autocorrelation times in the run, which determine the number of frequencies and the spectrum.
    """
    rho = (number / times - 1.0) / (number / times + 1.0)
    order, count = np.arange(waves.shape[1])[:, None], _count(times, number)
    inverse = (1.0 - 2.0 * rho * np.cos(np.pi * order / number) + rho**2) / (1.0 - rho) ** 2
    weight = np.where((order >= 1) & (order <= count), inverse, 0.0)
    return (waves[:, 0] ** 2).sum(0), (waves**2 * weight).sum((0, 1)), count


def _freedom_of_events(f, times):
    """Return degrees of freedom from how unequal squared batch means are: rare events, or single draws, leave few.

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
    """Return how many autocorrelation times of a particle the run has, from all particles about their common mean."""
    with np.errstate(divide="ignore", invalid="ignore"):
        found = effective_sample_size(f) / f.shape[0]
    # The estimated time of an antithetic series may not be positive.
    most = f.shape[1] * np.log10(f.shape[0] * f.shape[1])
    return np.where((found > 0) & (found < most), found, most)


def _exceeds(squares, number, others, other_number):
    """Return whether ``squares`` exceed ``others`` by more than chance and a smooth spectrum explain."""
    from scipy.stats import f as ratio

    found = (squares / number) / (others / other_number)
    some = np.maximum(number, 1), np.maximum(other_number, 1)
    return (np.asarray(number) > 0) & (other_number > 0) & (ratio.sf(found / EXCESS, *some) < CHANCE)


def _below(x, prob):
    return (x <= np.quantile(x, prob, (0, 1), keepdims=True)).astype(float)


#: The functions of draws whose means each method is about.
_STATISTICS = {
    "mean": lambda x, scores, _: [x],
    "sd": lambda x, scores, _: [(x - x.mean((0, 1))) ** 2],
    "bulk": lambda x, scores, _: [scores],
    "tail": lambda x, scores, _: [_below(x, 0.05), _below(x, 0.95)],
    "quantile": lambda x, scores, prob: [_below(x, prob)],
}
