"""Simulation-based calibration: whether runs on data from the prior find their true parameters as often as they say."""

from __future__ import annotations

from contextlib import redirect_stderr
from dataclasses import dataclass
from functools import partial
import io
from typing import Any
import warnings

import jax
from jax import random
import numpy as np
from scipy.stats import binom, kstest
import tqdm

import numpyro.distributions as dist
from numpyro.handlers import seed, trace, uncondition
from numpyro.infer import MCMC
from numpyro.primitives import Messenger

from numpyro_repulsion.checks import integer, number
from numpyro_repulsion.inference_data import all_rows, visible
from numpyro_repulsion.kernels import ParticleKernel
from numpyro_repulsion.plots.draws import COLORS, axes, check_axes
from numpyro_repulsion.report import diagnose
from numpyro_repulsion.rows import Rows

#: Simulated data sets that determine a simultaneous band.
NUM_SIMULATIONS = 20_000
CENSORED = (dist.LeftCensoredDistribution, dist.RightCensoredDistribution, dist.IntervalCensoredDistribution)


@dataclass(frozen=True, eq=False, repr=False)
class Calibration:
    """Ranks of true parameters among the draws of a posterior, data set by data set.

    Where runs draw from the posterior, ranks are uniform between 0 and 1. They pile up at both ends where posteriors
    are too narrow, in the middle where they are too wide, and at one end where they are shifted.

    - **ranks** - by site, the share of draws below the true value, ``(data set, ...)``.
    - **errors** - by data set, the names of the errors that :func:`~numpyro_repulsion.diagnose` found.

    :func:`~numpyro_repulsion.contrib.calibrate` makes it.
    """

    ranks: dict[str, np.ndarray]
    errors: list[list[str]]

    def __repr__(self) -> str:
        least = {name: p.min() for name, p in self.p_values().items()}
        worst, total = min(least, key=least.__getitem__), sum(x[0].size for x in self.ranks.values())
        text = f"{len(self.errors)} data sets, {sum(map(bool, self.errors))} with errors, {total} parameters"
        return f"Calibration({text}, smallest p of uniform ranks {least[worst]:.2g} ({worst!r}))"

    def coverage(self, prob: float = 0.9) -> dict[str, np.ndarray]:
        """Return by site in what share of the data sets central intervals hold the true value.

        Of n data sets, this share has the standard error ``sqrt(prob * (1 - prob) / n)``.

        :param prob: the share of the draws in an interval, between 0 and 1.
        """
        prob = number("`prob`", prob, "a number between 0 and 1", lambda x: 0.0 < x < 1.0)
        return {name: (np.abs(ranks - 0.5) <= prob / 2.0).mean(0) for name, ranks in self.ranks.items()}

    def p_values(self) -> dict[str, np.ndarray]:
        """Return by site the p-values of Kolmogorov and Smirnov's test that ranks are uniform."""
        p_value = partial(np.apply_along_axis, lambda ranks: kstest(ranks, "uniform").pvalue, 0)
        return {name: p_value(ranks) for name, ranks in self.ranks.items()}

    def plot(self, prob: float = 0.95, ax: Any = None) -> Any:
        """Plot by how much the distribution of each parameter's ranks differs from the uniform one.

        Lines of calibrated posteriors all stay inside of the gray band with at least the probability ``prob``; the
        legend names the first ten parameters that do not.

        :param prob: a number between 0 and 1.
        :param ax: axes to draw on; ``None`` makes a figure.
        :return: the axes.
        :raises ImportError: without matplotlib.
        """
        check_axes(ax)
        prob = number("`prob`", prob, "a number between 0 and 1", lambda x: 0.0 < x < 1.0)
        ax, at = axes(ax, (5.0, 3.2)), np.linspace(0.01, 0.99, 99)
        lines = [(name, place, x[:, *place]) for name, x in self.ranks.items() for place in np.ndindex(x.shape[1:])]
        low, high = simultaneous_band(len(self.errors), at, 1.0 - (1.0 - prob) / len(lines))
        ax.fill_between(at, low - at, high - at, color="0.88", linewidth=0)
        outside = 0
        for name, place, ranks in lines:
            share = (ranks[:, None] <= at).mean(0)
            if ((low <= share) & (share <= high)).all():
                ax.plot(at, share - at, color="0.5", linewidth=0.7)
                continue
            label = (f"{name}[{', '.join(map(str, place))}]" if place else name) if outside < 10 else None
            ax.plot(at, share - at, color=COLORS[outside % len(COLORS)], linewidth=1.2, label=label)
            outside += 1
        if outside:
            ax.legend(frameon=False, title="not calibrated", loc="upper left", bbox_to_anchor=(1.0, 1.0))
        ax.set(xlim=(0, 1), xlabel="rank of the true value", ylabel="share of data sets below, minus rank")
        return ax


def simultaneous_band(number: int, at: np.ndarray, prob: float) -> tuple[np.ndarray, np.ndarray]:
    """Return bounds of the shares of uniform numbers below each of some points, which hold together.

    Each bound leaves out the same share of a binomial distribution, determined by simulation, or from below for rare
    events.

    :param number: how many independent uniform numbers there are.
    :param at: increasing points between 0 and 1, ``(n,)``.
    :param prob: the probability, at least, that no share is outside.

    **References:**

    1. *Graphical test for discrete uniformity and its applications in goodness-of-fit evaluation and multiple sample
       comparison*, T. Säilynoja, P.-C. Bürkner and A. Vehtari, Statistics and Computing 32, 2022
    """
    counts = np.arange(number + 1)[:, None]
    tails = 2.0 * np.minimum(binom.cdf(counts, number, at), binom.sf(counts - 1, number, at))
    pieces = np.diff(at, prepend=0.0, append=1.0)
    simulated = np.random.default_rng(0).multinomial(number, pieces, NUM_SIMULATIONS)[:, :-1].cumsum(1)
    level = np.quantile(np.take_along_axis(tails, simulated, 0).min(1), 1.0 - prob)
    # Too few simulations tell the rarest; the sum of the probabilities over all points is a bound.
    inside = tails >= (level if (1.0 - prob) * NUM_SIMULATIONS > 10.0 else (1.0 - prob) / len(at))
    return inside.argmax(0) / number, (number - inside[::-1].argmax(0)) / number


def calibrate(
    kernel: ParticleKernel,
    *args: Any,
    num_datasets: int = 100,
    num_warmup: int = 500,
    num_samples: int = 500,
    num_chains: int = 20,
    rng_key: jax.Array | None = None,
    progress_bar: bool = True,
    **kwargs: Any,
) -> Calibration:
    """Run a kernel on data sets whose parameters are drawn from the prior, and see where these are among the draws.

    For each data set, parameters come from the prior and observations from the model; missing ones (NaN) and the other
    arguments stay as they are. If runs draw from the posterior, the rank of a true value among the draws is uniform.
    One program samples for all data sets. Draws are correlated, so ranks need some hundred effective ones.

    :param kernel: a kernel of this package, made from a model.
    :param args: the arguments of the model, with observations in place, as ``mcmc.run`` takes them.
    :param num_datasets: 100 tell a coverage of 90 % from one of 80 %.
    :param num_warmup: iterations of warmup for each data set.
    :param num_samples: draws per particle and data set.
    :param num_chains: particles.
    :param rng_key: the key for data sets and runs; ``None`` is ``random.key(0)``.
    :param progress_bar: whether to show the data sets that are done.
    :param kwargs: the keyword arguments of the model.
    :raises TypeError: for other kernels.
    :raises ValueError: for a kernel without a model; for ``numpyro.factor`` and improper priors, from which nothing can
        be drawn; if the observations of a site are not, as they are, one of the arguments; if anything else depends on
        them; and for data sets that are not finite.

    **References:**

    1. *Validating Bayesian Inference Algorithms with Simulation-Based Calibration*, S. Talts, M. Betancourt,
       D. Simpson, A. Vehtari and A. Gelman, https://arxiv.org/abs/1804.06788

    **Example**

    .. doctest::

        >>> import jax.numpy as jnp
        >>> import numpyro
        >>> import numpyro.distributions as dist
        >>> from numpyro_repulsion import SGLD
        >>> from numpyro_repulsion.contrib import calibrate

        >>> def model(x, y):
        ...     slope = numpyro.sample("slope", dist.Normal(0, 1))
        ...     with numpyro.plate("rows", len(y), subsample_size=20) as i:
        ...         numpyro.sample("y", dist.Normal(slope * x[i], 1), obs=y[i])

        >>> x = jnp.linspace(-1.0, 1.0, 100)
        >>> found = calibrate(SGLD(model), x, jnp.zeros(100), num_datasets=3, num_warmup=100, num_samples=100,
        ...                   num_chains=10, progress_bar=False)
        >>> found.ranks["slope"].shape
        (3,)
    """
    if not isinstance(kernel, ParticleKernel):
        raise TypeError(f"calibrate takes a kernel of this package, such as SGLD(model); got {kernel!r}.")
    num_datasets = integer("`num_datasets`", num_datasets)
    key = random.key(0) if rng_key is None else rng_key
    if not kernel.dynamics.is_sampler:
        raise ValueError(f"{type(kernel).__name__} optimizes, and its path is no sample; calibrate a sampler.")
    kernel = kernel.wrap_model(lambda model: _Simulated(model, args, kwargs))
    kernel._num_runs = num_datasets
    model: Any = kernel.model
    numbers = {"num_warmup": num_warmup, "num_samples": num_samples, "num_chains": num_chains}
    # With NumPyro's progress bar one program samples for all data sets; the bar itself is not shown.
    mcmc = MCMC(kernel, chain_method="vectorized", progress_bar=True, jit_model_args=True, **numbers)
    ranks: dict[str, list] = {}
    errors, rng = [], np.random.default_rng(0)
    for k in tqdm.trange(num_datasets, desc="data sets", disable=not progress_bar):
        of_data, of_run = random.split(random.fold_in(key, k))
        try:
            truth, arrays = model.drawn(of_data)
            # What warmups found is among the errors.
            with redirect_stderr(io.StringIO()), warnings.catch_warnings(record=True):
                mcmc.run(of_run, arrays)
        except Exception as error:
            error.add_note(f"This is data set {k}, of the key random.fold_in(rng_key, {k}).")
            raise
        for name, draws in mcmc.get_samples().items():
            value, draws = truth.get(name), np.asarray(draws)
            if value is not None and value.shape == draws.shape[1:]:
                # Constants, as of a Cholesky factor, have ranks at random.
                ties = rng.uniform(size=value.shape) * np.mean(draws == value, 0)
                ranks.setdefault(name, []).append(np.mean(draws < value, 0) + ties)
        errors.append([finding.name for finding in diagnose(mcmc) if finding.severity == "error"])
    return Calibration({name: np.stack(found) for name, found in ranks.items()}, errors)


class _Whole(Messenger):
    """Gives the distribution of each observed site the shape of its observations, to draw as many."""

    def process_message(self, msg):
        if msg["type"] == "sample" and msg["is_observed"] and not msg["infer"].get("is_auxiliary"):
            fn, shape = msg["fn"], np.shape(msg["value"])
            shape = np.broadcast_shapes(fn.batch_shape, shape[: len(shape) - fn.event_dim])
            msg["fn"] = fn.expand(shape) if shape != fn.batch_shape else fn


class _Simulated:
    """A model whose only argument are its arrays, by place among the leaves of all arguments; it draws observations."""

    def __init__(self, model, args, kwargs):
        self._model = model
        self._leaves, self._structure = jax.tree.flatten((args, kwargs), is_leaf=lambda leaf: isinstance(leaf, Rows))
        if any(isinstance(leaf, Rows) for leaf in self._leaves):
            raise ValueError("calibrate needs data in memory: pass arrays in place of Rows.")
        self._arrays = {place: leaf for place, leaf in enumerate(self._leaves) if _is_numeric(leaf)}
        found = self._sites(all_rows, {}, random.key(0))
        self._check_kinds(found)
        observed = {name: np.asarray(site["value"]) for name, site in found.items() if site.get("is_observed")}
        self._places = {name: self._place(name, value) for name, value in observed.items()}
        if not observed or len(set(self._places.values())) < len(observed):
            raise ValueError(f"Each observed site needs an argument of its own; the model observes {[*observed]}.")
        try:
            jax.eval_shape(lambda arrays: self._sites(all_rows, arrays, random.key(0)) and None, self._arrays)
        except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError) as error:
            raise ValueError(
                "The model computes something from the values of its arrays outside of JAX, and one program serves all "
                "data sets: compute it before, and pass it by functools.partial."
            ) from error
        self._known = self._check_independence()

    def drawn(self, key):
        """Return the true values by site, and all arrays, with observations drawn from the prior."""
        found, arrays = self._draw({}, key)
        return {name: np.asarray(site["value"]) for name, site in found.items() if name in self._known}, arrays

    def __call__(self, arrays):
        leaves = [arrays.get(place, leaf) for place, leaf in enumerate(self._leaves)]
        args, kwargs = jax.tree.unflatten(self._structure, leaves)
        return self._model(*args, **kwargs)

    def _sites(self, handler, arrays, key):
        try:
            found = trace(seed(handler(partial(self, arrays)), key)).get_trace()
        except NotImplementedError as error:
            raise ValueError("A distribution of the model cannot be drawn from, such as an improper prior.") from error
        return {name: site for name, site in found.items() if site["type"] in ("sample", "deterministic", "param")}

    def _draw(self, arrays, key):
        found = self._sites(lambda model: uncondition(_Whole(all_rows(model))), arrays, key)
        drawn = dict(self._arrays)
        for name, place in self._places.items():
            value, given = np.asarray(found[name]["value"]), np.asarray(self._leaves[place])
            if not np.isfinite(value).all():
                raise ValueError(f"Values of the site '{name}' drawn from the prior are not finite: narrow the priors.")
            if given.dtype.kind == "f":
                # Missing observations stay missing.
                value = np.where(np.isnan(given), given, value).astype(given.dtype)
            elif value.dtype.kind != "f":
                if not np.array_equal(value.astype(given.dtype), value):
                    raise ValueError(f"{given.dtype} is too narrow for values of '{name}' drawn from the prior.")
                value = value.astype(given.dtype)
            drawn[place] = value
        return found, drawn

    def _place(self, name, value):
        """Return which leaf of the arguments has the observations of a site."""
        is_float = value.dtype.kind == "f"

        def equals(leaf):
            leaf = np.asarray(leaf)
            return np.array_equal(leaf.astype(value.dtype) if is_float else leaf, value, equal_nan=is_float)

        places = [place for place, leaf in self._arrays.items() if equals(leaf)]
        if len(places) != 1:
            raise ValueError(
                f"The observations of the site '{name}' must be one of the arguments, an array in memory, as they are, "
                f"so that others can take their place; {len(places) or 'none'} of the arguments equal them. Transform "
                "data before they are passed to the model."
            )
        return places[0]

    def _check_kinds(self, found):
        """Raise ``ValueError`` for sites from which no data can be drawn."""
        samples = {name: site for name, site in found.items() if site["type"] == "sample"}
        if factors := [name for name, site in samples.items() if site["infer"].get("is_auxiliary")]:
            raise ValueError(f"Nothing can be drawn from numpyro.factor, the sites {factors}; write distributions.")
        if censored := [name for name, site in samples.items() if isinstance(_base(site["fn"]), CENSORED)]:
            raise ValueError(f"NumPyro draws from censored distributions without censoring, at the sites {censored}.")
        if params := [name for name, site in found.items() if site["type"] == "param"]:
            raise ValueError(f"Fix the parameters {params} by numpyro.handlers.substitute: they are not drawn.")

    def _check_independence(self):
        """Return the sites whose values and densities do not depend on the observations; all latent and observed ones
        must be among them."""

        def compared(found):
            # The same key draws the same, whatever the observations.
            return {
                name: (site["value"], site.get("scale"), visible(site["fn"], site["value"]) if "fn" in site else None)
                for name, site in found.items()
            }

        found, arrays = self._draw({}, random.key(0))
        one, other = compared(found), compared(self._draw(arrays, random.key(0))[0])
        same = {name for name, parts in one.items() if name in other and all(map(_is_close, parts, other[name]))}
        if changed := sorted(name for name, site in found.items() if site["type"] == "sample" and name not in same):
            raise ValueError(
                f"The sites {changed} depend on the observations themselves, as on the row before or in a prior or "
                "mask made from the data, so what is drawn from the prior is no data set of this model."
            )
        return same


def _is_numeric(leaf):
    return isinstance(leaf, np.ndarray | jax.Array) and np.ndim(leaf) > 0 and leaf.dtype.kind in "biuf"


def _is_close(one, other):
    if one is None or other is None:
        return one is other
    return np.shape(one) == np.shape(other) and np.allclose(one, other, 1e-3, 1e-5, equal_nan=True)


def _base(fn):
    """Return a distribution without masks and other axes."""
    while isinstance(fn, dist.Independent | dist.MaskedDistribution | dist.ExpandedDistribution):
        fn = fn.base_dist
    return fn
