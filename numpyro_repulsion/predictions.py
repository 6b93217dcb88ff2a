"""Predictions of a site for new data, a mixture over draws; and draws of latent variables that a run integrated out."""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass
import inspect
from typing import Any

import jax
from jax import random
import jax.numpy as jnp
import numpy as np

import numpyro.distributions as dist
from numpyro.handlers import substitute
from numpyro.infer import MCMC
from numpyro.primitives import Messenger
from numpyro.util import is_prng_key

from numpyro_repulsion.checks import integer, number
from numpyro_repulsion.gradients import ModelTarget, check_values, compiled
from numpyro_repulsion.gradients.local import Integrated
from numpyro_repulsion.inference_data import in_chunks, visible
from numpyro_repulsion.inference_data.rows import row_latents_of, whole
from numpyro_repulsion.kernels.bound import hinting
from numpyro_repulsion.kernels.runs import bound_of, chosen_draws, kernel_of_run, latent_draws

#: How many rows and particles show how exact the integrals are, and the number of points that they are compared with.
NUM_ROWS, NUM_PARTICLES = 500, 4
MORE_POINTS = {1: 61, 2: 11, 3: 7}
#: Where the search for modes begins in that comparison: a row with two modes may have the other one there.
OTHER_START = -1.7


@dataclass(frozen=True, eq=False, repr=False)
class Predictions:
    r"""Predictions of a site, :math:`p(y^*) = \frac1n \sum_s p(y^* \mid \theta_s)` over n draws, as NumPy arrays.

    - **site** - the name of the site.
    - **replicates** - one random value of the site for each draw, ``(draws, ...)``.
    - **observed** - the observations, or ``None``. NaN are missing, as those that a mask hides are.
    - **mean**, **sd** - of the mixture, with the shape of the site: ``sd`` joins the noise of the site with the
      disagreement of the draws. For a deterministic site it is the disagreement alone. ``None`` for classes.
    - **probabilities** - of each class, in a last axis, for a categorical site; otherwise ``None``.
    - **log_likelihood** - the log density of each observation under the mixture, if the data for which predictions
      were made have observations; otherwise ``None``. Its mean, ``np.nanmean`` if some are missing, is the usual test
      log likelihood.

    :func:`~numpyro_repulsion.predict` makes it.

    **Example**

    .. doctest::

        >>> import numpy as np
        >>> from numpyro_repulsion.predictions import Predictions
        >>> rng = np.random.default_rng(0)
        >>> found = Predictions("y", replicates=rng.normal(size=(200, 50)), observed=3.0 * rng.normal(size=50))
        >>> found.quantile([0.05, 0.95]).shape
        (2, 50)
        >>> found.coverage(0.9) < 0.8  # too narrow
        True
    """

    site: str
    replicates: np.ndarray
    observed: np.ndarray | None = None
    mean: np.ndarray | None = None
    sd: np.ndarray | None = None
    probabilities: np.ndarray | None = None
    log_likelihood: np.ndarray | None = None

    def __repr__(self) -> str:
        count, *shape = self.replicates.shape
        text = f"{self.site!r}, {count} draws, shape {tuple(shape)}"
        if self.log_likelihood is not None:
            known, total = self.log_likelihood[~np.isnan(self.log_likelihood)], self.log_likelihood.size
            text += f", mean log likelihood {known.mean() if known.size else np.nan:.4g}"
            text += f", {known.size} of {total} observed" * (known.size < total)
        return f"Predictions({text})"

    def quantile(self, q: Any) -> np.ndarray:
        """Return quantiles of the mixture, estimated from the replicates.

        :param q: one share or several, between 0 and 1.
        :return: an array of the shape of the site, with the axes of ``q`` before it.
        :raises ValueError: for shares out of range.
        """
        shares = np.asarray(q)
        if shares.dtype.kind not in "iuf" or not ((shares >= 0) & (shares <= 1)).all():
            raise ValueError(f"`q` must be one or more numbers from 0 to 1; got {q!r}.")
        return np.quantile(self.replicates, shares, axis=0)

    def pit(self) -> np.ndarray:
        """Return the probability integral transform of each observation: the share of the mixture below it.

        It is uniform between 0 and 1 where predictions are calibrated. Ties with replicates, as for counts, are broken
        at random, from a fixed seed.

        :raises ValueError: without observations, and for classes.

        **References:**

        1. *Predictive model assessment for count data*, C. Czado, T. Gneiting and L. Held, Biometrics 65, 2009
        """
        if self.probabilities is not None:
            raise ValueError(f"The classes of '{self.site}' have no order; compare `probabilities` with `observed`.")
        observed = self.require_observed()
        below, ties = (self.replicates < observed).sum(0), (self.replicates == observed).sum(0)
        rank = below + np.random.default_rng(0).uniform(size=observed.shape) * (ties + 1)
        return np.where(np.isnan(observed), np.nan, rank / (len(self.replicates) + 1))

    def coverage(self, prob: float = 0.9) -> float:
        """Return the share of observations inside the central interval that should hold the share ``prob`` of them.

        :raises ValueError: without observations, for classes, and for a ``prob`` that is not between 0 and 1.
        """
        prob = number("`prob`", prob, "a number between 0 and 1", lambda x: 0.0 < x < 1.0)
        share = self.pit()
        return float((np.abs(share[~np.isnan(share)] - 0.5) <= prob / 2.0).mean())

    def require_observed(self) -> np.ndarray:
        """Return the observations.

        :raises ValueError: without any.
        """
        if self.observed is None or np.isnan(self.observed).all():
            raise ValueError(
                f"These predictions of '{self.site}' have no observations to compare with; pass the observed values "
                "as predict(mcmc, ...) passes them to the model."
            )
        return self.observed


def predict(
    mcmc: MCMC,
    *args: Any,
    site: str | None = None,
    num_draws: int = 1000,
    rng_key: jax.Array | None = None,
    **kwargs: Any,
) -> Predictions:
    """Return predictions of a site of the model for the given data.

    Only the replicates of all draws are kept, so networks and thousands of rows fit into memory.

    :param mcmc: an ``MCMC`` that has run with a kernel of this package.
    :param args: the arguments of the model, such as new covariates, checked like those of a run. Where they have
        observations of the site, the result has their log likelihood. Latent variables of rows that the run integrated
        out are drawn from their distribution given the other sites, as for new rows, without log likelihood.
    :param site: the name of an observed site, or of a deterministic one. ``None`` if the model observes a single site.
    :param num_draws: most draws to use, evenly spread over particles and iterations. For an optimizer of the cloud
        (:class:`~numpyro_repulsion.SVGD`) all come from its last cloud.
    :param rng_key: the key for the replicates; ``None`` is ``random.key(0)``.
    :param kwargs: the keyword arguments of the model.
    :raises TypeError: if ``mcmc`` is not an ``MCMC`` with a kernel of this package, if ``rng_key`` is not a key, and
        for arguments that the model does not take.
    :raises ValueError: before the run; for a kernel without a model; for a site that does not exist or is not chosen;
        if the run left out latent sites; for enumerated models; for data that a run would refuse, such as fewer rows
        than a plate has; if a latent site has another shape with these data, as an effect for each row has; for
        observations of another shape than their site; for sites inside ``scan``; and if replicates exceed 2 GiB.

    **Example**

    .. doctest::

        >>> from jax import random
        >>> import jax.numpy as jnp
        >>> import numpyro
        >>> import numpyro.distributions as dist
        >>> from numpyro.infer import MCMC
        >>> from numpyro_repulsion import SGLD, predict

        >>> def model(x, y=None):
        ...     slope = numpyro.sample("slope", dist.Normal(0, 1))
        ...     with numpyro.plate("rows", len(x), subsample_size=min(len(x), 20)) as i:
        ...         numpyro.sample("y", dist.Normal(slope * x[i], 0.5), obs=None if y is None else y[i])

        >>> x = jnp.linspace(-1.0, 1.0, 200)
        >>> y = 0.7 * x + 0.5 * random.normal(random.key(0), (200,))
        >>> mcmc = MCMC(SGLD(model), num_warmup=200, num_samples=200, num_chains=6, chain_method="vectorized",
        ...             progress_bar=False)
        >>> mcmc.run(random.key(1), x, y)
        >>> found = predict(mcmc, jnp.array([-1.0, 0.0, 2.0]))
        >>> found.mean.shape, found.quantile([0.05, 0.95]).shape
        ((3,), (2, 3))
        >>> bool(0.8 < predict(mcmc, x, y).coverage(0.9) < 1.0)
        True
    """
    kernel = kernel_of_run(mcmc, "predict", of_optimizer=True)
    if kernel.model is None:
        raise ValueError("A kernel made from a `potential_fn` has no model to predict from; make it from a model.")
    num_draws = integer("`num_draws`", num_draws)
    if rng_key is not None and not (hasattr(rng_key, "dtype") and is_prng_key(rng_key)):
        raise TypeError(f"`rng_key` must be a PRNG key such as random.key(1); got {rng_key!r}.")
    key = random.key(0) if rng_key is None else rng_key
    fitted: Any = bound_of(mcmc).target
    site = _site(fitted, site)
    draws = latent_draws(fitted, chosen_draws(mcmc, num_draws), "Predictions need")
    _check_arguments(kernel.model, args, kwargs)
    model = _NewData(substitute(kernel.model, data=fitted.params), {name: x.shape[1:] for name, x in draws.items()})
    with hinting(kernel.model, args, kwargs):
        target = ModelTarget(model, args, kwargs)
        model.draws = True
        check_values(args, kwargs, of_rows=True)
        observed = _observed(target, site, model.drawn, jax.tree.map(lambda x: x[0], draws))

    def of_draw(target, numbered):
        place, draw = numbered
        # The model takes keys from its own by splitting, so replicates need another.
        of_model, of_replicate = random.split(random.fold_in(key, place))
        has_density = observed is not None and not fitted.integrated
        return _of_draw(target.sites(draw, of_model)[site], of_replicate, has_density)

    numbered = jnp.arange(len(next(iter(draws.values())))), draws
    remedy = "Lower `num_draws`, or pass the rows in parts"
    found = in_chunks(of_draw, target, numbered, f"Replicates of '{site}'", remedy, kept="replicate")
    return _mixture(site, observed, found)


def _mixture(site, observed, chunks):
    """Return the predictions that chunks of draws make together, summed in double precision."""
    replicates: list = []
    sums: dict[str, np.ndarray] = {}
    origin = log_likelihood = mean = sd = None
    seen = np.zeros(np.shape(observed), bool)
    for found in chunks:
        replicates.append(found.pop("replicate"))
        if "log_prob" in found:
            total = np.logaddexp.reduce(found.pop("log_prob"), 0, float)
            log_likelihood = total if log_likelihood is None else np.logaddexp(log_likelihood, total)
            seen |= found.pop("seen", np.ones(1, bool)).any(0)
        if "mean" in found:
            # The first draw is subtracted, so that the variance of means does not cancel.
            origin = found["mean"][0].astype(float) if origin is None else origin
            found["mean"] = found["mean"].astype(float) - origin
            found["square"] = found["mean"] ** 2
        for name, value in found.items():
            sums[name] = sums.get(name, 0.0) + value.sum(0, dtype=float)
    drawn = np.concatenate(replicates)
    means = {name: value / len(drawn) for name, value in sums.items()}
    if origin is not None:
        mean = origin + means["mean"]
        sd = np.sqrt(means["variance"] + np.maximum(means["square"] - means["mean"] ** 2, 0.0))
    elif "probabilities" not in means:  # a distribution that does not know its moments
        mean, sd = drawn.mean(0, dtype=float), drawn.std(0, dtype=float)
    if log_likelihood is not None:
        events = tuple(range(log_likelihood.ndim, observed.ndim))
        # NumPyro gives NaN a density of 0.
        is_missing = ~seen.any(events) | (np.isnan(observed) & seen).any(events)
        log_likelihood = np.where(is_missing, np.nan, log_likelihood - np.log(len(drawn)))
        observed = observed if seen.all() else np.where(seen, observed, np.nan)
    return Predictions(site, drawn, observed, mean, sd, means.get("probabilities"), log_likelihood)


def _of_draw(msg, key, has_data):
    """Return the moments, the log density and a random value of a traced site, as far as it has them."""
    if msg["type"] == "deterministic":
        value = jnp.asarray(msg["value"])
        return {"mean": value, "variance": jnp.zeros_like(value, float), "replicate": value}
    fn = msg["fn"]
    found = {"replicate": fn.sample(key)}
    if has_data:
        found["log_prob"] = fn.log_prob(msg["value"])
        if (seen := visible(fn, msg["value"], in_events=True)) is not None:
            found["seen"] = seen
    base, shape = fn, fn.batch_shape + fn.event_shape
    while isinstance(base, dist.Independent | dist.MaskedDistribution | dist.ExpandedDistribution):
        base = base.base_dist
    if isinstance(base, dist.CategoricalProbs | dist.CategoricalLogits):
        return found | {"probabilities": jnp.broadcast_to(base.probs, (*shape, base.probs.shape[-1]))}
    try:
        return found | {"mean": jnp.broadcast_to(fn.mean, shape), "variance": jnp.broadcast_to(fn.variance, shape)}
    except (NotImplementedError, AttributeError):
        return found


class _NewData(Messenger):
    """A model of new data: its plates take all rows, and sites that have neither data nor draws are drawn.

    :param shapes: those of the draws by name. Others are refused, before NumPyro broadcasts them.

    - **drawn** - the sites without data or draws.
    - **draws** - whether they are drawn. In the analysis they are observed, at some value of their support that depends
      on nothing: a random value moves along with its mean, so that its density would hide what a wrong index changes.
    """

    def __init__(self, fn, shapes):
        super().__init__(fn)
        self.shapes, self.drawn, self.draws = shapes, set(), False

    def process_message(self, msg):
        # Rows of unknown numbers, unlike those of `all_rows`, so that the analysis of the model sees what they reach.
        if msg["type"] == "plate" and (msg["value"] is None or msg["args"][1] in (None, msg["args"][0])):
            size = msg["args"][0]
            msg["args"], msg["value"] = (size, size), jnp.arange(size)
        # Sites of a scan have values here, and an axis that their distribution does not know.
        if msg["type"] != "sample" or msg["value"] is not None:
            return
        name, fn, known = msg["name"], msg["fn"], self.shapes.get(msg["name"])
        shape = fn.shape(msg["kwargs"]["sample_shape"])
        if known is None:
            self.drawn.add(name)
            msg["is_observed"] = True
            msg["value"] = None if self.draws else _some_value(fn, shape)
        elif shape != known:
            raise ValueError(
                f"With these data the latent site '{name}' has the shape {shape}, and its draws have {known}: effects "
                "of single rows cannot be predicted for other rows. Pass the same rows, or a model of new ones to "
                "numpyro.infer.Predictive."
            )


def _some_value(fn, shape):
    """Return values in the support of a distribution, zeros if it does not say any."""
    support: Any = getattr(fn, "support", None)
    zeros = jnp.zeros(shape, int if getattr(support, "is_discrete", False) else float)
    try:
        return support.feasible_like(zeros)
    except (AttributeError, NotImplementedError):
        return zeros


def _check_arguments(model, args, kwargs):
    try:
        inspect.signature(model).bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(
            f"The model does not take these arguments: {error}. Pass predict(mcmc, ...) what the model needs for the "
            "new data."
        ) from None
    except ValueError:  # no signature is known
        pass


def _site(target, site):
    if target.discrete:
        raise ValueError(
            f"The discrete latent sites {target.discrete} are summed over, and predictions need their values. Use "
            "numpyro.infer.Predictive(model, samples, infer_discrete=True)."
        )
    target = whole(target)
    known = [*target.observed, *target.deterministic, *target.minibatched]
    if site is None and len(target.observed) == 1:
        return target.observed[0]
    if site not in known:
        got = "None, and the model observes several" if site is None and target.observed else repr(site)
        raise ValueError(f"`site` must be an observed or deterministic site of the model, one of {known}; got {got}.")
    return site


def _observed(target, site, drawn, draw):
    """Return the observations of the site, or ``None``, after a look at the model with these data."""

    def values(target, draw):
        found = target.sites(draw)
        if site not in found:
            raise ValueError(f"With these data the model has no site '{site}'; it has {sorted(found)}.")
        inside = [name for name in (*target.latent, *target.discrete) if name not in draw]
        if inside or (found[site]["type"] == "sample" and found[site].get("_control_flow_done")):
            raise ValueError(
                f"The sites {inside or [site]} are inside a `scan` or `cond`, where their distribution cannot be "
                "separated by rows. Use numpyro.infer.Predictive on the model without observations."
            )
        if site in drawn or not found[site].get("is_observed"):
            return None
        shape, given = found[site]["fn"].shape(), jnp.shape(found[site]["value"])
        if jnp.broadcast_shapes(shape, given) != given:
            raise ValueError(
                f"The observations of '{site}' have shape {given}, and the site has {shape}: "
                "each would be compared with all predictions. Drop an axis of length one, as in y[:, 0]."
            )
        return found[site]["value"]

    found = compiled(values, target)(draw)
    return None if found is None else np.asarray(found)


# --- Latent variables of rows, over which a run has integrated. ---


def row_latents(
    mcmc: MCMC, rows: Iterable[int] | None = None, *, num_draws: int = 200, rng_key: jax.Array | None = None
) -> dict[str, np.ndarray]:
    """Return draws of the latent sites inside of a subsampled plate, which the run itself has integrated out.

    For each of some draws of the run, the sites of the chosen rows are drawn from their distribution given that draw
    and the data: together they are draws from the joint posterior. Each is chosen from 200 points about its mode, by
    importance.

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
        >>> from numpyro_repulsion.predictions import row_latents
        >>> def model(counts):
        ...     mean = numpyro.sample("mean", dist.Normal(0, 2))
        ...     with numpyro.plate("rows", len(counts), subsample_size=20) as i:
        ...         rate = numpyro.sample("rate", dist.LogNormal(mean, 0.5))
        ...         numpyro.sample("counts", dist.Poisson(rate), obs=counts[i])
        >>> counts = random.poisson(random.key(0), 3.0, (200,))
        >>> mcmc = MCMC(SGLD(model, step_size=0.001), num_warmup=50, num_samples=50, num_chains=5,
        ...             chain_method="vectorized", progress_bar=False)
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
        return row_latents_of(target, random.fold_in(key, number), draw, indices)

    numbered = jnp.arange(len(next(iter(draws.values())))), draws
    what = f"Draws of {target.integrated}"
    parts = list(in_chunks(of_draw, target, numbered, what, "Lower `num_draws`, or ask for fewer `rows`"))
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def integration_shifts(mcmc: MCMC) -> dict[str, float]:
    """Return by how many posterior standard deviations integrals over latent variables of rows shift means, by site.

    A gradient of U that is off by g everywhere shifts a coordinate with variance s² by s² g. The mean of g over some
    particles comes from integrals with more points on some rows of each plate. It is empty without such integrals.
    """
    target: Any = bound_of(mcmc).target
    if not isinstance(target, ModelTarget) or not target.integrated:
        return {}
    rows = {name: jnp.asarray(np.arange(NUM_ROWS) * size // NUM_ROWS) for name, (size, _) in target.plates.items()}
    finer = Integrated(target.model.model, target.model.plates, MORE_POINTS, OTHER_START)

    def difference(target, z):
        other = copy(target)
        other.model = finer
        one, more = (
            jax.vmap(jax.grad(x._potential_energy), (0, None, None))(z, rows, random.key(0)) for x in (target, other)
        )
        return jax.tree.map(lambda a, b: (a - b).mean(0), one, more)

    z = mcmc.last_state.z
    off = compiled(difference, target)(jax.tree.map(lambda x: x[:NUM_PARTICLES], z))
    return {name: float(np.max(np.abs(np.asarray(off[name])) * np.std(np.asarray(z[name]), 0))) for name in off}
