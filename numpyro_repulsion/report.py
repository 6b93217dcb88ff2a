"""Reports on a run: a summary table, and the problems found. ArviZ is imported when called."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
import json
import logging
from typing import Any, NamedTuple
import warnings

import numpy as np

from numpyro.infer import MCMC

from numpyro_repulsion.bias import MAX_PREDICTED, predict_bias
from numpyro_repulsion.checks import boolean
from numpyro_repulsion.diagnostics import KNOWN, MODES, SHORT, mixing, nested_rhat
from numpyro_repulsion.findings import (
    LARGE_BIAS,
    MAX_CLIPPING_SHIFT,
    MAX_FLAGGED,
    MAX_MEAN_SHIFT,
    MAX_SHIFT,
    Diagnosis,
    Finding,
    flagged_updates,
    from_json,
    with_findings,
)
from numpyro_repulsion.inference_data import to_inference_data
from numpyro_repulsion.kernels.runs import kernel_of_run
from numpyro_repulsion.predictions import integration_shifts

_log = logging.getLogger(__name__)

#: A scale and the size of its effects are called dependent above this correlation of their logarithms.
MIN_CORRELATION = 0.7
#: Groups of at most so many levels hardly determine their scale.
FEW_LEVELS = 5

#: The kinds of ArviZ's summary with figures of mixing, and the same without these.
_KINDS = {"all": "stats", "diagnostics": "stats", "all_median": "stats_median", "diagnostics_median": "stats_median"}


def summary(run, *, exclude_diverged: bool = False, **kwargs):
    """Return ArviZ's summary of a run as a table that shows what was run and the problems found, worst first.

    ``print(summary(mcmc))``, or the last line of a notebook's cell, shows one line about the run, the findings of
    :func:`~numpyro_repulsion.diagnose` for the variables, chains and draws in the table, and then the table. Otherwise
    it is a pandas DataFrame; its attribute ``diagnosis`` has the findings, and ``to_string()`` is the text without
    them. The logger ``numpyro_repulsion.report`` names warnings and errors in one line on stderr.

    Effective sample sizes and standard errors are those for interacting particles,
    :func:`~numpyro_repulsion.ensemble_ess` and :func:`~numpyro_repulsion.ensemble_mcse`, instead of ArviZ's for
    independent chains. ``ess_mean`` takes the place of ArviZ's ``ess_bulk``: the number of independent draws whose mean
    would be as precise. It exceeds the number of draws if noise cancels between particles, as by default. ``r_hat``
    compares particles; runs of several ensembles also have a column ``nested_r_hat``. For an optimizer
    (:class:`~numpyro_repulsion.SVGD`) the table describes the last positions of the particles, without these columns.

    :param run: an ``MCMC`` that has run with a kernel of this package, or its result from :func:`to_inference_data`.
    :param exclude_diverged: whether to leave out particles that diverged or stand still, the chains with the coordinate
        ``diverged_chains`` of :func:`to_inference_data`.
    :param kwargs: passed to ``arviz.summary``.
    :return: a pandas DataFrame. Selected rows or columns keep the findings; ``pandas.DataFrame(table)`` has none.
    :raises TypeError: for any other ``run``.
    :raises ValueError: before the run, if there are only draws of warmup, for a ``fmt`` other than ``"wide"``, and if
        ``exclude_diverged`` leaves no particle.

    **Example**

    .. doctest::

        >>> from jax import random
        >>> from numpyro.infer import MCMC
        >>> from numpyro_repulsion import SGLDR, summary
        >>> mcmc = MCMC(SGLDR(potential_fn=lambda z: z @ z / 2, step_size=0.05), num_warmup=10, num_samples=500,
        ...             num_chains=10, chain_method="vectorized", progress_bar=False)
        >>> mcmc.run(random.key(0), init_params=random.normal(random.key(1), (10, 2)))
        >>> table = summary(mcmc)
        >>> print(table[["mean", "sd", "ess_mean", "r_hat"]])
        SGLDR: 10 particles in 1 ensemble, 10 updates of size 0.05 per draw, step-size bias at most ...% of a
        posterior sd.
        No problems found.
        <BLANKLINE>
                mean    sd  ess_mean  r_hat
        z[0] ...
        z[1] ...
        >>> list(table.index)
        ['z[0]', 'z[1]']
    """
    import arviz

    if kwargs.get("fmt", "wide") != "wide":
        raise ValueError(
            f"`summary` puts the columns for ensembles into the wide table; got fmt={kwargs['fmt']!r}. For ArviZ's own "
            "call arviz.summary(to_inference_data(mcmc), fmt=...)."
        )
    data, posterior = _data_of(run, "summary")
    if boolean("`exclude_diverged`", exclude_diverged):
        kwargs["coords"] = _kept(posterior, kwargs.get("coords") or {})
    is_sampler = posterior.attrs.get("is_sampler", "true") == "true"
    is_ours, statistics = is_sampler and kwargs.get("group", "posterior") == "posterior", None
    kind = kwargs.setdefault("kind", "all" if is_sampler else "stats")
    # ArviZ's figures of mixing presume independent chains.
    if is_diagnosed := is_ours and kind in _KINDS and kwargs.get("extend", True):
        kwargs["kind"] = _KINDS[kind]
    table = arviz.summary(data, **kwargs)
    if is_ours:
        variables = [_variable(label, posterior) for label in table.index]
        posterior = _part(posterior, variables, kwargs.get("coords") or {})
        statistics = _statistics(posterior, with_errors=is_diagnosed)
    if is_diagnosed:
        others = [] if kind.startswith("all") else list(table)
        _add_columns(table, statistics, kwargs.get("round_to"))
        for name in others:
            del table[name]
    diagnosis = diagnosis_of(run, posterior, statistics)
    if problems := [f"{found.name} ({found.severity})" for found in diagnosis if found.severity != "note"]:
        number = f"{len(problems)} problem{'s' * (len(problems) > 1)}"
        _log.warning(f"summary found {number}: {', '.join(problems)}. Print its result or diagnose(mcmc) for details.")
    return with_findings(table, diagnosis)


def diagnose(run) -> Diagnosis:
    """Return the problems of a run, worst first, as an object for programs; the table of ``summary`` shows the same.

    It combines what warmup found with what the draws show: R-hat, effective sample sizes, rejected updates,
    clipped gradients, and the predicted bias of the step size (see :func:`~numpyro_repulsion.step_bias`). The bias
    of a given ``step_size`` is known only if ``run`` is an ``MCMC``.

    :param run: an ``MCMC`` that has run with a kernel of this package, or its result from :func:`to_inference_data`.
    :return: a sequence of :class:`~numpyro_repulsion.findings.Finding`, true if any is a warning or an error.
    :raises TypeError: for any other ``run``.
    :raises ValueError: before the run, or if there are only draws of warmup.

    **References:**

    1. *Rank-Normalization, Folding, and Localization: An Improved R-hat for Assessing Convergence of MCMC*,
       A. Vehtari, A. Gelman, D. Simpson, B. Carpenter and P.-C. Bürkner, https://arxiv.org/abs/1903.08008

    **Example**

    .. doctest::

        >>> from jax import random
        >>> from numpyro.infer import MCMC
        >>> from numpyro_repulsion import SGLD, diagnose
        >>> mcmc = MCMC(SGLD(potential_fn=lambda z: z @ z / 2, step_size=0.001), num_warmup=0, num_samples=100,
        ...             num_chains=10, chain_method="vectorized", progress_bar=False)
        >>> mcmc.run(random.key(0), init_params=random.normal(random.key(1), (10, 2)))
        >>> found = diagnose(mcmc)
        >>> for finding in found:
        ...     print(finding.name, finding.severity, finding.remedy)
        not_mixed error Use the kernel SGHMC, or raise `num_steps`, `num_warmup` or `num_samples`, or ...
        >>> bool(found), "funnel" in found
        (True, False)
    """
    return diagnosis_of(run, _data_of(run, "diagnose")[1])


def _data_of(run, who):
    """Return the inference data of a run, and the dataset of its posterior, for a public function of that name."""
    data = run
    if isinstance(run, MCMC):
        instead = " For other kernels use arviz.summary." if who == "summary" else ""
        kernel_of_run(run, who, instead, of_optimizer=True)
        with warnings.catch_warnings():
            # About groups of inference data that a table does not show.
            warnings.filterwarnings("ignore", ".*depend on latent sites, so they are not data")
            data = to_inference_data(run)
    with suppress(KeyError, TypeError, AttributeError, IndexError):
        posterior = data["posterior"]
        if posterior.attrs.get("inference_library") == "numpyro_repulsion":
            return data, getattr(posterior, "dataset", posterior)
    raise TypeError(f"`{who}` takes an MCMC run or the result of to_inference_data; got {type(run).__name__}.")


def diagnosis_of(run: Any, posterior: Any, statistics: dict[str, Any] | None = None) -> Diagnosis:
    """Return the diagnosis of the draws in a dataset, with their statistics where known; of an ``MCMC`` with what its
    state tells beyond them."""
    attributes = posterior.attrs
    findings = from_json(attributes["findings"])
    is_short = any(finding.name == "short_run" for finding in findings)
    if flagged := int(attributes["num_flagged_updates"]):
        is_measured, remedy = attributes["step_size_measured"] == "true", attributes["remedy"]
        findings.append(flagged_updates(flagged, float(attributes["share_flagged"]), remedy, is_measured))
    findings += _of_clipping(attributes) + _of_strays(posterior) + _of_widths(posterior)
    sd = None
    if attributes["is_sampler"] != "true":
        message = (
            f"This is an optimizer, not a sampler: the spread of its {attributes['num_particles']} particles is "
            "smaller than that of the posterior."
        )
        findings.append(Finding("optimizer", "note", None, message, "Use SGLDR for draws."))
    elif not is_short:
        sd, found = _of_bias(run, attributes)
        findings += found + _of_draws(posterior, statistics or _statistics(posterior, with_errors=False))
    if isinstance(run, MCMC):
        findings += _of_integrals(run)
    return Diagnosis(findings, _headline(attributes, sd))


def _of_clipping(attributes):
    shift = float(attributes["clipping_shift"])
    if shift <= MAX_CLIPPING_SHIFT:
        return []
    message = f"Long gradients were clipped, which shifts posterior means by up to about {shift:.2g} posterior sds."
    remedy = "Reparameterize: at some of the draws, the potential is far steeper than at others."
    return [Finding("clipped_gradients", _severity(shift), shift, message, remedy)]


def _of_bias(run, attributes):
    """Return the relative inflation of standard deviations by the step size if it is small, else ``None``; and findings
    about one that is not."""
    is_other, is_measured = attributes["other_data"] == "true", attributes["step_size_measured"] == "true"
    if is_measured and not is_other:
        # Warmup has its own finding about a measured step that is too long.
        inflation, noise, limit = float(attributes["step_size_bias"]), 0.0, np.inf
    else:
        inflation, noise = predict_bias(run, is_other)() if isinstance(run, MCMC) else (np.nan, np.nan)
        limit = 0.05  # `BiasBudget` allows as much.
    sd = float(np.sqrt(1.0 + inflation) - 1.0)
    if np.isnan(inflation):
        return None, []
    if inflation <= limit:
        is_known = float(attributes["share_flagged"]) <= MAX_FLAGGED and not _of_clipping(attributes)
        return sd if is_known else None, []
    is_large = inflation > LARGE_BIAS
    remedy = attributes["remedy"] if is_measured or is_large else "halve `step_size`"
    by_noise = noise > inflation / 2
    if by_noise and not is_other:
        gradient = attributes["gradient"]
        corrected = gradient.startswith(("ControlVariates", "SVRG")) or "control_variates=True" in gradient
        instead = "" if corrected else "set gradient=ControlVariates(), "
        remedy = f"raise `subsample_size`, {instead}or {remedy}"
    # Near the limit of stability the size means nothing.
    figure = sd if inflation <= MAX_PREDICTED else None
    size = f"up to {100 * sd:.0f}% too large" if figure else "more than 100% too large, and may be unstable"
    message = f"The step size makes posterior sds {size}, mostly through {'minibatches' if by_noise else 'curvature'}."
    remedy = f"{remedy[:1].upper()}{remedy[1:]}."
    return None, [Finding("step_bias", "error" if is_large else "warning", figure, message, remedy)]


def _of_integrals(mcmc):
    shifts = integration_shifts(mcmc)
    name = max(shifts, key=shifts.__getitem__, default="")
    if not shifts or shifts[name] <= MAX_MEAN_SHIFT:
        return []
    message = (
        f"The integrals over the latent variables of rows are inexact, and shift the posterior mean of {name} by about "
        f"{shifts[name]:.2g} posterior sds."
    )
    remedy = "Move these sites out of the plate and index them, or drop `subsample_size`."
    return [Finding("row_integrals", _severity(shifts[name]), shifts[name], message, remedy)]


def _severity(shift):
    return "error" if shift > 5 * MAX_MEAN_SHIFT else "warning"


def _of_strays(posterior):
    if not (diverged := _diverged(posterior)).any():
        return []
    names = np.atleast_1d(posterior["chain"].values)[diverged]
    some = ", ".join(map(str, names[:5])) + ", ..." * (len(names) > 5)
    message = f"{len(names)} of {diverged.size} particles (chain {some}) "
    if diverged.mean() > 0.25:
        message += (
            "are, or were in the run, at much higher potential energy than the others: they have not reached the "
            "posterior, or have left it. All results include them."
        )
        remedy = (
            "Raise `num_warmup`, or start closer to the posterior, for example with init_from_guide(guide, params)."
        )
    else:
        message += "diverged to much higher potential energy or stopped moving. All results include them."
        remedy = "Exclude them by summary(..., exclude_diverged=True), and run again with a smaller step size."
    if diverged.all():
        message = (
            f"All {diverged.size} particles have stopped moving, are not finite, or still descend from much higher "
            "potential energy, as after starts far from the posterior. The draws are not a sample from the posterior."
        )
        remedy = (
            "Give priors the scale of the parameters, or start closer to the posterior, for example with "
            "init_around(values) or init_strategy=numpyro.infer.init_to_uniform(radius=0.1). Check that the density "
            "is smooth and proper."
        )
    return [Finding("diverged_chains", "error", float(len(names)), message, remedy)]


def _diverged(posterior):
    """Return which particles have left the others or stand still; none if results made elsewhere do not say."""
    known = posterior.coords.get("diverged_chains")
    return np.zeros(posterior.sizes["chain"], bool) if known is None else np.atleast_1d(known.values)


def _of_widths(posterior):
    if not (wide := int(posterior.attrs.get("num_wide", 0))):
        return []
    message = (
        f"{wide} of {posterior.attrs['num_particles']} particles stay at much higher potential energy than the "
        "others, in regions so much wider that they may contain as much posterior mass (modes of different widths). "
        "The weights of the modes are unknown."
    )
    remedy = "Set moves=Archive(), with gradient=FullData() if rows are subsampled, or reparameterize."
    return [Finding("several_basins", "error", float(wide), message, remedy)]


def _statistics(posterior, with_errors):
    """Return statistics of draws by column, each an array over all quantities; nothing of too few draws to tell."""
    if posterior.sizes["draw"] < 4:
        return {}
    found = mixing(posterior, with_errors=with_errors)
    if with_errors and 1 < int(posterior.attrs["num_ensembles"]) < posterior.sizes["chain"]:
        found["nested_r_hat"] = nested_rhat(posterior)
    return {name: np.concatenate([np.ravel(x) for x in of.values()]) for name, of in found.items()}


def _of_draws(posterior, statistics):
    """Return findings about how particles mix; each quantity counts for one finding only."""
    if (number := posterior.sizes["draw"]) < 4:
        message = (
            f"Each particle has only {number} draw{'s' * (number > 1)}, too few to tell whether particles have mixed."
        )
        remedy = "Raise `num_samples` far above 4."
        return [Finding("short_run", "warning", float(number), message, remedy)]
    names = np.repeat(list(posterior), [x[0, 0].size for x in posterior.values()])
    reasons, r_hat = statistics["reason"], statistics["r_hat"]
    apart, mixed = reasons == MODES, ~(r_hat > 1.1)
    findings = []
    if stay := int(apart.sum()):
        message = (
            f"For {stay} of {len(reasons)} quantities particles explore separate regions (distinct modes or label "
            "permutations), so ESS and standard errors are unknown."
        )
        remedy = (
            "Order the labels of a mixture, or set moves=Archive(), with gradient=FullData() if rows are subsampled."
        )
        findings.append(Finding("separate_modes", "error", float(stay), message, remedy))
    if (slow := ~apart & ~mixed).any():
        worst = int(np.argmax(np.where(slow, r_hat, -np.inf)))
        label = _label(posterior, names[worst], worst - int(np.argmax(names == names[worst])))
        # Particles that repel each other may keep their order on a line while their average goes everywhere.
        is_known = bool((reasons[slow] == KNOWN).all())
        said = "the particles have not mixed."
        if is_known:
            said = "single particles have not mixed. Standard errors of averages over all particles are still valid."
        # Against the exact gradients of all rows, momenta cost nothing, and they go straight for longer.
        has_momenta = posterior.attrs["algorithm"] not in ("SGLD", "SGLDR")
        first = "Raise " if has_momenta or posterior.attrs["minibatches"] else "Use the kernel SGHMC, or raise "
        remedy = f"{first}`num_steps`, `num_warmup` or `num_samples`, or rescale or reparameterize the model."
        figure = float(r_hat[worst]) if np.isfinite(r_hat[worst]) else None
        message = f"R-hat is {r_hat[worst]:.2f} (above 1.1) for {label}, so {said}"
        findings.append(Finding("not_mixed", "warning" if is_known else "error", figure, message, remedy))
    findings += group_findings(posterior, set(names[apart | ~mixed]))
    if short := int(((reasons == SHORT) & mixed).sum()):
        message = (
            f"For {short} of {len(reasons)} quantities the run is short compared with the mixing time, so ESS and "
            "standard errors are unknown."
        )
        findings.append(Finding("short_run", "warning", float(short), message, "Raise `num_samples` or `num_steps`."))
    return findings


class _Pair(NamedTuple):
    scale: str
    effects: str
    levels: int
    correlation: float


def group_findings(posterior: Any, slow: Collection[str]) -> list[Finding]:
    """Return findings about groups of effects whose scale, or whose effects, are among the quantities that have not
    mixed; and about scales that the bias of many effects shifts."""
    every = _pairs(posterior)
    pairs = [pair for pair in every if pair.scale in slow or pair.effects in slow]
    products = [pair for pair in pairs if pair.correlation < -MIN_CORRELATION]
    few = [pair for pair in pairs if pair.correlation > MIN_CORRELATION and pair.levels <= FEW_LEVELS]
    findings = []
    if products:
        worst = min(products, key=lambda pair: pair.correlation)
        names = ", ".join(f"{pair.effects} (with {pair.scale})" for pair in products)
        message = (
            f"The data identify only the products of a scale and its effects, not the effects themselves: {names}. "
            "Particles hardly move along this ridge."
        )
        remedy = (
            f"Write these effects centered, numpyro.sample({worst.effects!r}, dist.Normal(0, {worst.scale})), and drop "
            "the product."
        )
        findings.append(Finding("noncentered", "error", worst.correlation, message, remedy))
    if few:
        worst = max(few, key=lambda pair: pair.correlation)
        message = (
            f"{worst.effects} has only {worst.levels} levels, so {worst.scale} is weakly identified, and no fixed "
            "preconditioner suits the range of its values."
        )
        remedy = (
            f"Use SGHMC, which moves faster there, give {worst.scale} a prior away from 0 and infinity, or give the "
            "levels a prior of fixed width."
        )
        findings.append(Finding("few_levels", "warning", worst.levels, message, remedy))
    return findings + _shifted_scales(posterior, every)


def _shifted_scales(posterior, pairs):
    """Return a finding about scales that the inflation δ of their effects' variances shifts.

    Of an effect with posterior variance s² (1 - h), h is the share that the data determine. In coordinates that center
    it by c, δ adds δ (c - h) to the score of log s, which so moves by δ Σ(c - h) / √(2 Σ h²) of its standard
    deviations: harmless for ten effects and not for thousands, unless c is h. Effects that
    are no site of the model count as centered.
    """
    inflation = float(posterior.attrs.get("step_size_mean_bias", np.nan))
    centered = json.loads(posterior.attrs.get("centering_means", "{}"))
    shifts = {}
    for pair in pairs:
        if pair.correlation > 0.0 and pair.levels > FEW_LEVELS and inflation > 0.0:
            x = _flat(posterior[pair.effects])
            # About the mean of all effects, which has a location of its own.
            variances = np.var(x - x.mean(-1, keepdims=True), 0)
            shares = np.clip(1.0 - variances / np.mean(_flat(posterior[pair.scale]) ** 2), 0.0, 1.0)
            information = 2.0 * np.sum(shares**2)
            if information > 1.0:
                excess = np.sum(centered.get(pair.effects, 1.0) - shares)
                shifts[pair] = float(inflation * np.abs(excess) / np.sqrt(information))
    large = {pair: shift for pair, shift in shifts.items() if shift > MAX_SHIFT}
    if not large:
        return []
    worst = max(large, key=large.__getitem__)
    names = ", ".join(f"{pair.scale} (of {pair.levels:,} {pair.effects})" for pair in large)
    message = (
        f"A bias of {100 * inflation:.1f}% in each effect's variance adds up over many effects. It may shift the "
        f"logarithm of their scale by {large[worst]:.1f} posterior sds (limit {MAX_SHIFT:g}): {names}."
    )
    budget = max(float(f"{inflation * MAX_SHIFT / large[worst]:.0e}"), 1e-5)
    remedy = f"Raise `subsample_size`, or set step_size=BiasBudget({budget:g}, min_draws=0)."
    return [Finding("many_effects", "warning", large[worst], message, remedy)]


def _flat(x):
    return np.asarray(x.values, float).reshape(-1, *x.shape[2:])


def _pairs(posterior):
    """Return for each group of effects the positive scalar that its size depends on most, if it may be their scale."""
    draws = {name: _flat(x) for name, x in posterior.items()}
    total = max((len(x) for x in draws.values()), default=0)
    draws = {name: x[:: -(-total // 20_000) or 1] for name, x in draws.items()}
    scales = {name: np.log(x) for name, x in draws.items() if x.ndim == 1 and (x > 0).all() and x.std() > 0}
    found = []
    for name, x in draws.items():
        size = np.sqrt(np.mean(x**2, -1))
        if x.ndim != 2 or x.shape[1] < 2 or not scales or not (np.isfinite(size) & (size > 0)).all() or not size.std():
            continue
        size = np.log(size)
        correlations = {scale: float(np.corrcoef(size, y)[0, 1]) for scale, y in scales.items()}
        scale, correlation = max(correlations.items(), key=lambda pair: abs(pair[1]))
        # Their product, where one falls as the other grows, or their ratio must vary less than the size, in logarithms.
        # Others, such as the weight of a mixture and the places of its parts, may be correlated too.
        if (size - np.sign(correlation) * scales[scale]).std() < 0.8 * size.std():
            found.append(_Pair(scale, name, x.shape[1], correlation))
    return found


def _label(posterior, name, place):
    """Return the name of an entry of a variable, as in the table."""
    rest = posterior[name].isel(chain=0, draw=0)
    where = np.unravel_index(place, rest.shape)
    at = [str(rest[axis].values[i]) for axis, i in zip(rest.dims, where, strict=True)]
    return f"{name}[{', '.join(at)}]" if at else name


def _headline(attributes, sd):
    """Return one line on what was run; ``sd`` is the inflation of standard deviations by the step, if it is small."""
    count, ensembles = int(attributes["num_particles"]), int(attributes["num_ensembles"])
    text = f"{attributes['algorithm']}: {count} particle{'s' * (count > 1)} in {ensembles} "
    text += f"ensemble{'s' * (ensembles > 1)}, {attributes['num_steps']} updates of size {attributes['step_size']:.3g}"
    text += " (adapted in warmup)" * (attributes["step_size_measured"] == "true") + " per draw"
    if (order := attributes.get("control_variates", "none")) != "none":
        text += f", {order.replace(' ', '-')} control variates"
    if sd is not None:
        size = "below 0.1" if sd < 0.0005 else f"at most {100 * sd:.1f}"
        text += f", step-size bias {size}% of a posterior sd"
    return text + "."


def _kept(posterior, coords):
    """Return the coordinates to select, without the chains of particles that have left or stand still."""
    if not (diverged := _diverged(posterior)).any():
        return coords
    asked = posterior["chain"].sel(chain=coords["chain"]) if "chain" in coords else posterior["chain"]
    kept = set(posterior["chain"].values[~diverged].tolist())
    if not (chosen := [chain for chain in np.atleast_1d(asked.values).tolist() if chain in kept]):
        raise ValueError(
            "exclude_diverged=True leaves no particles: all of them diverged or stopped moving. Run again with a "
            "smaller step size."
        )
    return {**coords, "chain": chosen}


def _part(posterior, variables, coords):
    posterior = posterior[list(dict.fromkeys(variables))]
    # A single chain or draw keeps its axis.
    kept = {name: [x] if name in ("chain", "draw") and np.isscalar(x) else x for name, x in coords.items()}
    posterior = posterior.sel({name: x for name, x in kept.items() if name in posterior.dims})
    if "chain" in coords:
        # Only some particles of each ensemble may be left; how many is unknown.
        posterior = posterior.assign_attrs(num_independent=1, num_ensembles=1)
    return posterior


def _add_columns(table, statistics, round_to):
    """Add the columns of mixing and precision to a table of ArviZ."""
    unknown = np.full(len(table), np.nan)
    # ArviZ 1.x stores text with the significant digits; from 1.3 on it stores numbers, and text to show instead.
    is_text = any(dtype.kind == "O" for dtype in table.dtypes)
    shown = getattr(table, "_fmt_map", None)
    for name in ("mcse_mean", "mcse_sd", "ess_mean", "ess_tail", "r_hat", "nested_r_hat"):
        if name == "nested_r_hat" and name not in statistics:
            continue
        values = statistics.get(name, unknown)
        text = [f"{x:{'.0f' if name.startswith('ess') else '.2f' if 'r_hat' in name else '.2g'}}" for x in values]
        if shown and not is_text:
            shown[name] = dict(zip(table.index, text, strict=True))
        elif round_to is None or isinstance(round_to, int):
            digits = (2 if "r_hat" in name else 3) if round_to is None else round_to
            values = values.round(0 if name.startswith("ess") else digits)
        table[name] = text if is_text else values


def _variable(label, posterior):
    """Return the variable of a row of the table; names may contain brackets themselves."""
    return max((name for name in posterior if label == name or label.startswith(f"{name}[")), key=len)
