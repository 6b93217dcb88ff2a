"""Effective sample sizes, standard errors and nested R-hat of interacting particles, and those that have left."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from numpyro.diagnostics import effective_sample_size

from numpyro_repulsion.warmup.arrival import ARRIVAL

#: Why there is no figure: there is one; draws do not vary or are not finite; particles mix, each in its own place, but
#: not with each other; the run is short compared with the mixing time of a particle.
KNOWN, NOTHING, MODES, SHORT = range(4)
#: The relative variance of an estimated autocorrelation time is this over the number of such times in the draws.
TIME_VARIANCE = 6.0


def ensemble_ess(
    draws: Any, num_ensembles: int | None = None, *, method: str = "bulk", prob: float | None = None
) -> Any:
    r"""Return the effective sample size: how many independent draws the draws of interacting particles are worth.

    Particles of one ensemble are not independent chains, so no statistic of single particles tells how precise an
    average over all of them is. The average of f over the L particles at each iteration, :math:`\bar f_t`, is a single
    series, and its mean has the error of any series:

    .. math::
        \mathrm{ESS} = \frac{\operatorname{Var} f}{\mathrm{MCSE}^2}, \qquad
        \mathrm{MCSE}^2 = \frac{S(0)}{N}

    N is the number of iterations. S(0) is the spectrum of :math:`\bar f_t` at frequency 0, which is
    :math:`\tau \operatorname{Var} \bar f` for an integrated autocorrelation time τ. The ESS is ``L N / τ`` for
    independent particles; with balanced noise it may far exceed the number of draws, and with shared minibatches it is
    far smaller. Several ensembles add up, and the variance of their means counts too.

    S(0) comes from the lowest frequencies of the averages (discrete cosines, so that a drift counts), well below that
    at which single particles decorrelate. The autocorrelation time of a particle is estimated from all particles
    together, about their common mean, so that those that have not explored the whole distribution count as slow. The
    result is NaN if the run is shorter than 5 autocorrelation times of a particle; if particles lie further apart than
    their own paths explain, as in separate modes; or if fewer than 10 squares are left to estimate S(0) from, so a
    single ensemble needs about 25 autocorrelation times. :func:`~numpyro_repulsion.summary` says which. Inference data
    of particles that repel each other need less: these are independent at any one time, so it is enough that their
    average varies as much as that implies.

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

    return each(draws, num_ensembles, _in_blocks(lambda *x: _Columns(*x).ess(method, prob)))


def ensemble_mcse(draws: Any, num_ensembles: int | None = None, *, method: str = "mean") -> Any:
    """Return the standard error of the mean over all draws of interacting particles: ``sd / sqrt(ESS)``.

    It allows for its own uncertainty, so that errors divided by it have about unit variance.

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

    return each(draws, num_ensembles, _in_blocks(lambda *x: _Columns(*x).mcse(method)))


def nested_rhat(draws: Any, num_ensembles: int | None = None, *, method: str = "rank") -> Any:
    r"""Return the nested :math:`\hat R`, with ensembles as superchains.

    .. math::
        \hat R = \sqrt{1 + B / W}

    B is the variance of the ensembles' means. W is the mean over ensembles of the variance within: the variance between
    its particles' means, plus the mean variance of each particle over time. Particles of an ensemble may interact. If
    all stay where they started, at one point for each ensemble, it does not show, so check the plain R-hat of particles
    too. The numbers are those of ``arviz_stats.rhat_nested``, which ArviZ 0.x lacks.

    :param draws: as for :func:`ensemble_ess`.
    :param num_ensembles: as for :func:`ensemble_ess`; two or more.
    :param method: ``"rank"`` splits each particle's series into halves, and takes the larger of the values for the
        draws and for their distances from the median, both as normal scores of ranks. ``"identity"`` uses the draws as
        they are.
    :return: an array of the shape of one draw, NaN where draws do not vary or are not finite; or a dictionary of such.
    :raises ValueError: for a single ensemble, an unknown method, and as :func:`ensemble_ess` does.

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

    def of(x, groups, _):
        return _rhat(x, groups) if method == "identity" else _rank_rhat(x, lambda x: _rhat(x, groups))

    def rhat(x, groups, repels):
        if groups < 2:
            raise ValueError(
                "nested_rhat compares ensembles and needs two or more; got one. Run the kernel with several, such as "
                "num_ensembles=4, or pass `num_ensembles`."
            )
        return _in_blocks(of)(x, groups, repels)

    # Balanced ensembles lie further apart than independent ones, so the value is conservative.
    return each(draws, num_ensembles, rhat, adds_up=False)


def mixing(draws: Any, num_ensembles: int | None = None, *, with_errors: bool = True) -> dict[str, Any]:
    """Return what a summary shows of mixing, by column.

    These are the split R-hat of particles (NaN of a single one), the reason why :func:`ensemble_ess` is NaN
    (``NOTHING``, ``MODES`` or ``SHORT``; ``KNOWN`` (0) where it is not), and effective sizes and standard errors if
    asked for. Of thousands of variables sorting takes the time, so draws are ranked once.
    """
    names = ["r_hat", "reason"] + ["ess_mean", "ess_tail", "mcse_mean", "mcse_sd"] * with_errors

    def of(x, groups, repels):
        columns = _Columns(x, groups, repels)
        # As of split chains, which are independent of each other.
        r_hat = _rank_rhat(x, lambda x: np.sqrt(_rhat(x, len(x)) ** 2 - 1.0 / x.shape[1]), columns.scores)
        rows = [r_hat if len(x) > 1 else np.full_like(r_hat, np.nan), columns.reason]
        if with_errors:
            rows += [*map(columns.ess, ("bulk", "tail")), *map(columns.mcse, ("mean", "sd"))]
        return np.stack(rows)

    unknown = np.where([name == "reason" for name in names], NOTHING, np.nan)
    found = each(draws, num_ensembles, _in_blocks(of, unknown))
    if not isinstance(found, dict):
        return dict(zip(names, found, strict=True))
    return {name: {variable: rows[k] for variable, rows in found.items()} for k, name in enumerate(names)}


def num_independent(attributes: dict[str, Any], num_chains: int) -> int:
    """Return the number of independent groups of chains by the attributes of inference data; of another library, one.

    Each chain is a group if nothing couples chains, and each ensemble if ensembles do not interact. Ensembles that are
    balanced against each other are one group.
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
                f"{data.attrs.get('algorithm', 'This')} is an optimizer: its particles are not a sample from the "
                "posterior, so the effective sample size, standard errors and R-hat are undefined. Use SGLDR for "
                "draws."
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
    from scipy.special import ndtri  # JAX depends on SciPy; its own functions make ties in single precision
    from scipy.stats import rankdata

    flat = x.reshape(x.shape[0] * x.shape[1], -1)
    # Sorted along contiguous columns; ``norm.ppf`` is ``ndtri`` with checks that take five times as long.
    ranks = rankdata(np.ascontiguousarray(flat.T), axis=1).T
    return ndtri((ranks - 0.375) / (len(flat) + 0.25)).reshape(x.shape)


def _rank_rhat(x, rhat, scores=None):
    """Return the larger R-hat of the halves' draws and of their distances from the median, as normal scores of ranks.

    Known ``scores`` of all draws are those of the halves if none is left over.
    """
    half = x.shape[1] // 2

    # The halves of a particle count as two particles of the same ensemble.
    def halves(x):
        return np.stack((x[:, :half], x[:, -half:]), 1).reshape(-1, half, *x.shape[2:])

    parts = halves(x)
    scores = normal_scores(parts) if scores is None or x.shape[1] % 2 else halves(scores)
    return np.maximum(rhat(scores), rhat(normal_scores(np.abs(parts - np.median(parts, (0, 1))))))


def _rhat(x, groups):
    x = x.reshape(groups, -1, *x.shape[1:])
    within = x.var(2, ddof=1).mean(1)
    if x.shape[1] > 1:
        within = within + x.mean(2).var(1, ddof=1)
    between = x.mean((1, 2)).var(0, ddof=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.sqrt(1.0 + between / within.mean(0))


def _in_blocks(function, unknown=np.nan):
    """Apply a function of ``(chains, draws, columns)`` to blocks of columns, in threads: sorting and Fourier transforms
    let others run. ``unknown`` is the result where draws do not vary or are not finite."""

    def apply(x, groups, repels):
        flat = x.reshape(*x.shape[:2], -1)
        width = max(1, 2**20 // (flat.shape[0] * flat.shape[1]))
        found = np.repeat(np.expand_dims(unknown, -1), flat.shape[2], -1)

        def fill(start):
            part = flat[..., start : start + width].astype(np.float64)
            usable = np.isfinite(part).all((0, 1))
            usable[usable] = np.ptp(part[..., usable], (0, 1)) > 0
            place = np.arange(start, start + part.shape[2])[usable]
            if place.size:
                found[..., place] = function(part[..., usable], groups, repels)

        with ThreadPoolExecutor() as pool:
            list(pool.map(fill, range(0, flat.shape[2], width)))  # A list raises what they raise.
        return found.reshape((*found.shape[:-1], *x.shape[2:]))[()]

    return apply


class _Columns:
    """Columns of draws, ``(chains, draws, columns)``, and what their statistics share."""

    def __init__(self, x, groups, repels):
        self.x, self.groups, self.repels = x, groups, repels
        self.scores = normal_scores(x)
        self.times = _all_times(self.scores, groups, repels)

    @property
    def reason(self):
        return self._variance_of_mean(self.scores)[1]

    def ess(self, method, prob=None):
        series = _STATISTICS[method](self.x, self.scores, prob)
        return np.minimum.reduce([f.var((0, 1), ddof=1) / self._variance_of_mean(f)[0] for f in series])

    def mcse(self, method):
        (f,) = _STATISTICS[method](self.x, self.scores, None)
        found = np.sqrt(self._variance_of_mean(f)[0])
        # The sd is the root of the mean square, so its error follows by the delta method.
        return found if method == "mean" else found / (2.0 * self.x.std((0, 1)))

    def _variance_of_mean(self, f):
        """Return the variance of the mean of ``f`` over all draws, and why it is NaN, each ``(columns,)``. The draws
        that f is a function of must have mixed too."""
        times, blocked = self.times, KNOWN
        if f is not self.scores:
            # The mean of a function of slow draws is unknown until these have mixed.
            times = np.minimum(times, _all_times(f, self.groups, self.repels))
            _, _, blocked = _look(self.scores, self.groups, times, self.repels)
        variance, freedom, why = _look(f, self.groups, times, self.repels)
        # With fewer degrees of freedom a standard error is off by more than a quarter too often.
        why = np.where((why == KNOWN) & (freedom < 10), SHORT, why)
        why = np.where((why == KNOWN) & (blocked != NOTHING), blocked, why)
        return np.where(why == KNOWN, variance, np.nan), why


def _look(f, groups, times, repels):
    """Return the variance of the mean of ``f``, its degrees of freedom, and a reason if particles have not mixed."""
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
    # A shorter run has not forgotten its start. Particles that mix about their own means meanwhile are in modes.
    is_short = own_times < 5.0
    if is_short.any():
        apart[is_short] |= _times((f - f.mean(1, keepdims=True))[..., is_short]) > 15.0
    why = np.select([apart, is_short], [MODES, SHORT], KNOWN)
    if repels:
        # Particles that repel each other may keep their order on a line while their average goes everywhere: then the
        # average varies over time nearly as much as the averages of independent sets of particles.
        spread = _averages(f, groups).var((0, 1)) * (chains // groups)
        why = np.where(spread > 0.9 * f.var((0, 1)), KNOWN, why)
    # An average that stays where it began is unknown, however exactly its noises cancel.
    freedom = np.minimum(freedom, _freedom_of_events(f, own_times))
    return variance, freedom, np.where(least > 1e-24 * f.var((0, 1)), why, NOTHING)


def _averages(f, groups):
    return f.reshape(groups, -1, *f.shape[1:]).mean(1)


def _all_times(f, groups, repels):
    """Return how many autocorrelation times the run has, of a particle and of the averages over ensembles.

    Averages get the particles' number unless they are clearly faster, as with repulsion: a single series tells little.
    Unless particles are known to repel each other, the excess must also be 2.5 standard errors.
    """
    own = _times(f)
    averages = _times(_averages(f, groups)) if groups < f.shape[0] else own
    factor = 3.0 if repels else np.maximum(3.0, np.exp(2.5 * np.sqrt(TIME_VARIANCE / (groups * own))))
    return np.stack((own, np.where(averages > factor * own, averages, own)))


def _count(times, number):
    # At the last of so many frequencies the spectrum of an autoregression has fallen to 0.7 of its value at 0.
    return np.clip(0.4 * times, 0, number // 2).astype(int)


def _squares(waves, times, number):
    """Return sums over series of squares at frequency 0 and at the lowest others, and how many these are.

    The latter are divided by the spectrum of an autoregression, relative to its value at 0.
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
    batches = 2 ** np.clip(np.log2(times).round(), 1, np.log2(min(64, number))).astype(int)
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
    """Return whether ``squares`` exceed ``others`` by more than chance and a smooth spectrum explain.

    That is by a factor of 1.5, where a standard error is about a fifth too small, beyond what chance does once in ten
    thousand times.
    """
    from scipy.stats import f as ratio

    found = (squares / number) / (others / other_number)
    some = np.maximum(number, 1), np.maximum(other_number, 1)
    return (np.asarray(number) > 0) & (other_number > 0) & (ratio.sf(found / 1.5, *some) < 1e-4)


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


def find_diverged_chains(
    draws: Mapping[str, jax.Array | np.ndarray], energy: jax.Array | np.ndarray, dimension: int, in_basins: bool = False
) -> tuple[np.ndarray, int]:
    """Return which particles have left the others or stand still, ``(chain,)``; and how many are in a wider mode.

    A particle has left if its mean energy is far above the median of all particles, or not finite. If most particles
    differ that much, the lowest energies take the place of the median. If most were that much higher in the first half
    of their draws than in the second, they have not arrived. Entries that are not finite for most particles
    are those of the model, such as padding.

    Particles in other modes of a posterior do not count. A wide mode has a higher energy than a narrow one that holds
    as much of the posterior, so the energy less the logarithm of the volume that a particle visits must be far above
    the others' too. Where it is not, and two particles or more are on either side of a gap in energy, they are in modes
    of different widths.

    :param draws: those of latent sites, ``(chain, draw, ...)`` by variable.
    :param energy: potential energies in units of the temperature, ``(chain, draw)``; estimates on minibatches may do.
    :param dimension: the number of parameters.
    :param in_basins: whether particles are in basins of different depth, as networks are. Then a particle has left only
        if its mean energy is ten median absolute deviations above the median too.
    """
    size, number = energy.shape
    parts = [np.asarray(x).reshape(size, number, -1) for x in draws.values()]
    step = -(-sum(part.shape[-1] for part in parts) // 500)
    flat = np.concatenate([part[..., ::step] for part in parts], -1)
    finite = np.isfinite(flat).all(1)
    flat, finite = flat[..., finite.mean(0) > 0.5], finite[:, finite.mean(0) > 0.5]
    diverged = ~(finite.all(1) & np.isfinite(energy).all(1))
    # Fewer particles or draws show no majority, and no motion.
    if size < 4 or number < 10 or diverged.all():
        return diverged, 0
    # A particle stands still if most of its draws repeat the draw before.
    diverged |= (flat[:, 1:] == flat[:, :-1]).all(-1).mean(1) > 0.5
    usable = np.flatnonzero(~diverged)
    if not usable.size:
        return diverged, 0
    energy, flat = np.asarray(energy, float)[usable], np.asarray(flat, float)[usable]
    times = np.stack([part.mean(1) for part in np.array_split(energy, 10, axis=1)])
    # From second differences, in which a fall cancels.
    noise = 1.48 * np.median(np.abs(np.diff(times, 2, axis=0))) / 6**0.5
    # Energies of draws have a standard deviation of about the root of the dimension; five standard errors are chance.
    means, limit = energy.mean(1), 10.0 + 5.0 * dimension**0.5 + 5.0 * noise / len(times) ** 0.5
    if in_basins:
        limit = max(limit, ARRIVAL.deviations * np.median(np.abs(means - np.median(means))))
    # Positive entries are sampled as their logarithms.
    positive = (flat > 0).all((0, 1))
    flat = np.where(positive, np.log(np.where(positive, flat, 1.0)), flat)
    volume = np.log(flat.std(1) + np.finfo(float).tiny).sum(-1) * (dimension / max(flat.shape[-1], 1))
    is_high, is_light = (_far_above(x, limit, in_basins) for x in (means, means - volume))
    gone = is_high & is_light
    first, second = (half.mean(0) for half in np.array_split(times, 2))
    if np.mean(falls := first > np.median(second) + limit + 5.0 * noise) > 0.5:
        gone |= falls
    diverged[usable] |= gone
    if in_basins:
        return diverged, 0
    ordered = np.sort(means[~gone])
    gaps = np.diff(ordered)[1:-1]
    wide = 0 if not gaps.size or gaps.max() < limit else len(ordered) - 2 - int(gaps.argmax())
    return diverged, wide


def _far_above(x, limit, in_basins):
    """Return which numbers are further above the others than the limit."""
    has_majority = in_basins or np.subtract(*np.quantile(x, (0.75, 0.25))) <= limit
    return x > np.quantile(x, 0.5 if has_majority else 0.1) + limit
