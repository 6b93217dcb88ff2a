"""Diagnosis of a run from its attributes and its draws. ArviZ is imported when called."""

from __future__ import annotations

from typing import Any
import warnings

import numpy as np

from numpyro.infer import MCMC

from numpyro_repulsion.bias import MAX_PREDICTED, predict_bias
from numpyro_repulsion.diagnostics import KNOWN, MODES, SHORT, why_unknown
from numpyro_repulsion.findings import LARGE_BIAS, MAX_FLAGGED, Diagnosis, Finding, flagged_updates, from_json
from numpyro_repulsion.inference_data import to_inference_data
from numpyro_repulsion.kernels import kernel_of
from numpyro_repulsion.report.groups import group_findings

__all__ = ["data_of", "diagnose", "diagnosis_of"]

#: R-hat above which particles have not mixed.
MAX_R_HAT = 1.1
#: Fewer draws of each particle have no R-hat.
MIN_DRAWS = 4
#: A given step that inflates variances by more is too long; `BiasBudget` allows as much.
MAX_BIAS = 0.05


def diagnose(run) -> Diagnosis:
    """Return the problems of a run, worst first, as an object for programs; ``summary`` prints the same.

    It combines what warmup found with what the draws show: R-hat, effective sample sizes, updates that were rejected or
    had a clipped gradient, and the predicted bias of the step size (see :func:`~numpyro_repulsion.step_bias`). The bias
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
        >>> import jax.numpy as jnp
        >>> from numpyro.infer import MCMC
        >>> from numpyro_repulsion import SGLD, diagnose
        >>> mcmc = MCMC(SGLD(potential_fn=lambda z: jnp.sum(z**2) / 2, step_size=0.001), num_warmup=0, num_samples=100,
        ...             num_chains=10, chain_method="vectorized", progress_bar=False)
        >>> mcmc.run(random.key(0), init_params=random.normal(random.key(1), (10, 2)))
        >>> found = diagnose(mcmc)
        >>> for finding in found:
        ...     print(finding.name, finding.severity, finding.remedy)
        not_mixed error Take the kernel SGHMC, or raise `num_steps`, `num_warmup` or `num_samples`, or ...
        >>> bool(found), "funnel" in found
        (True, False)
    """
    posterior = data_of(run, "diagnose")["posterior"]
    return diagnosis_of(run, getattr(posterior, "dataset", posterior))


def data_of(run: Any, who: str) -> Any:
    """Return the inference data of a run.

    :param who: the name of the public function, for the message.
    :raises TypeError: for any other ``run``.
    :raises ValueError: before the run, or if there are only draws of warmup.
    """
    if isinstance(run, MCMC):
        kernel_of(run, who, " For other kernels use arviz.summary." if who == "summary" else "")
    with warnings.catch_warnings():
        # About groups of inference data that a table does not show.
        warnings.filterwarnings("ignore", ".*depend on latent sites, so they are not data")
        data = to_inference_data(run) if isinstance(run, MCMC) else run
    if isinstance(run, MCMC) and "warmup_posterior" in data:
        raise ValueError("This MCMC holds only the draws of warmup; call mcmc.run(key, ...) first.")
    try:
        library = data["posterior"].attrs.get("inference_library")
    except (KeyError, TypeError, AttributeError, IndexError):
        library = None
    if library != "numpyro_repulsion":
        raise TypeError(f"`{who}` takes an MCMC run or the result of to_inference_data; got {type(run).__name__}.")
    return data


def diagnosis_of(run: Any, posterior: Any) -> Diagnosis:
    """Return the diagnosis of a run.

    :param run: an ``MCMC``; for anything else the bias of a given step is unknown.
    :param posterior: the draws to diagnose, a dataset with the attributes of the run.
    """
    attributes = posterior.attrs
    findings = _of_warmup(attributes)
    flagged = int(attributes.get("num_flagged_updates", 0))
    share = float(attributes.get("share_flagged", 0.0))
    if flagged:
        is_measured = attributes.get("step_size_measured") == "true"
        findings.append(flagged_updates(flagged, share, attributes.get("remedy", "shorten the step"), is_measured))
    is_short = any(finding.name == "short_run" for finding in findings)
    findings += _of_strays(posterior) + _of_widths(posterior)
    known = None
    if attributes.get("is_sampler", "true") != "true":
        count = int(attributes.get("num_particles", posterior.sizes["draw"]))
        findings.append(
            Finding(
                "optimizer",
                "note",
                None,
                f"This is an optimizer, not a sampler: its last cloud of {count} points is narrower than the "
                "posterior.",
                "Use SGLDR for draws.",
            )
        )
    elif not is_short:
        known, found = _of_bias(_bias(run, attributes), share, attributes)
        findings += found + _of_draws(posterior)
    return Diagnosis(findings, _headline(attributes, known))


def _of_warmup(attributes):
    """Return the findings in the attributes of the run."""
    return from_json(attributes["findings"]) if "findings" in attributes else []


def _bias(run, attributes):
    """Return the relative inflation of variances by the step, NaN if unknown, and that from gradient noise alone.

    The latter is ``None`` if warmup measured the step.
    """
    is_other = attributes.get("other_data") == "true"
    if attributes.get("step_size_measured") == "true" and not is_other:
        return float(attributes.get("step_size_bias", np.nan)), None
    return predict_bias(run, is_other) if isinstance(run, MCMC) else (np.nan, None)


def _of_bias(bias, share, attributes):
    """Return the inflation of standard deviations by the step size if it is small, else ``None``; and findings.

    :param bias: the inflation of variances, and that from gradient noise alone.
    """
    inflation, noise = bias
    # Warmup has its own finding about a measured step that is too long.
    is_small = noise is None or inflation <= MAX_BIAS
    if np.isnan(inflation) or (is_small and share > MAX_FLAGGED):
        return None, []
    sd = float(np.sqrt(1.0 + inflation) - 1.0)
    if is_small:
        return sd, []
    measured = attributes.get("step_size_measured") == "true"
    is_large = inflation > LARGE_BIAS
    remedy = attributes.get("remedy", "") if measured or is_large else "halve `step_size`"
    by_noise = noise > inflation / 2
    if by_noise and attributes.get("other_data") != "true":
        gradient = str(attributes.get("gradient"))
        corrected = gradient.startswith(("ControlVariates", "SVRG")) or "control_variates=True" in gradient
        instead = "" if corrected else "set gradient=ControlVariates(), "
        remedy = f"raise `subsample_size`, {instead}or {remedy}"
    # Near the limit of stability the size means nothing.
    figure = sd if inflation <= MAX_PREDICTED else None
    size = f"up to {100 * sd:.0f} % too large" if figure else "more than 100 % too large, if the step is stable at all"
    message = f"The step size makes posterior sds {size}, mostly through {'minibatches' if by_noise else 'curvature'}."
    remedy = f"{remedy[:1].upper()}{remedy[1:]}."
    return None, [Finding("step_bias", "error" if is_large else "warning", figure, message, remedy)]


def _of_strays(posterior):
    """Return a finding about particles that have left the others or stand still."""
    if (
        "diverged_chains" not in posterior.coords
        or not (diverged := np.atleast_1d(posterior["diverged_chains"].values)).any()
    ):
        return []
    names = np.atleast_1d(posterior["chain"].values)[diverged]
    some = ", ".join(map(str, names[:5])) + ", ..." * (len(names) > 5)
    message = (
        f"{len(names)} of {diverged.size} particles (chain {some}) have left the others for places of far higher "
        "energy, or stand still; all figures include them."
    )
    remedy = "Leave them out by summary(..., exclude_diverged=True), and run again with a shorter step."
    if diverged.mean() > 0.25:
        message = (
            f"{len(names)} of {diverged.size} particles (chain {some}) have far higher energies than the others, or "
            "come from there: they have not arrived at the posterior, or have left it; all figures include them."
        )
        remedy = (
            "Raise `num_warmup`, or start nearer to the posterior, for example with init_from_guide(guide, params)."
        )
    if diverged.all():
        message = (
            f"All {diverged.size} particles stand still, are not finite, or still come down from far higher energies, "
            "as from starts far away from where the data are, so the draws are no sample of the posterior."
        )
        remedy = (
            "Give priors the scale of the parameters, or start nearer to the posterior, for example with "
            "init_around(values) or init_strategy=numpyro.infer.init_to_uniform(radius=0.1); and check that the "
            "density is smooth and proper."
        )
    return [Finding("diverged_chains", "error", float(len(names)), message, remedy)]


def _of_widths(posterior):
    """Return a finding about particles that stay in wider surroundings, which make up for their higher energy."""
    if not (wide := int(posterior.attrs.get("num_wide", 0))):
        return []
    message = (
        f"{wide} of {posterior.attrs['num_particles']} particles stay at far higher energies than the others, in "
        "surroundings that are so much wider that they may hold as much of the posterior, as in modes of different "
        "widths, so the weights of the modes are unknown."
    )
    remedy = "Set moves=Archive(), with gradient=FullData() if rows are subsampled, or reparameterize."
    return [Finding("several_basins", "error", float(wide), message, remedy)]


def _of_draws(posterior):
    """Return findings about how particles mix; each quantity counts for one finding only."""
    import arviz

    if (number := posterior.sizes["draw"]) < MIN_DRAWS:
        message = f"{number} draw{'s' * (number > 1)} of each particle cannot tell whether particles have mixed."
        remedy = f"Raise `num_samples`, to {MIN_DRAWS} and far more."
        return [Finding("short_run", "warning", float(number), message, remedy)]
    reasons = np.concatenate([np.ravel(x) for x in why_unknown(posterior).values()])
    r_hat = np.full(reasons.shape, np.nan)
    if posterior.sizes["chain"] > 1:
        with np.errstate(divide="ignore", invalid="ignore"):
            r_hat = np.concatenate([np.ravel(x) for x in arviz.rhat(posterior).values()])
    apart = reasons == MODES
    mixed = ~(r_hat > MAX_R_HAT)
    findings = []

    def add(name, severity, figure, message, remedy):
        findings.append(Finding(name, severity, float(figure) if np.isfinite(figure) else None, message, remedy))

    if stay := int(apart.sum()):
        add(
            "separate_modes",
            "error",
            stay,
            f"For {stay} of {len(reasons)} quantities particles move but stay apart from each other, as in separate "
            "modes or label permutations, so effective sample sizes and standard errors are unknown.",
            "Order the labels, or set moves=Archive(), with gradient=FullData() if rows are subsampled.",
        )
    if (slow := ~apart & ~mixed).any():
        worst = int(np.argmax(np.where(slow, r_hat, -np.inf)))
        # Particles that repel each other may keep their order on a line while their average goes everywhere.
        is_known = bool((reasons[slow] == KNOWN).all())
        is_plain = posterior.attrs.get("algorithm") in ("SGLD", "SGLDR")
        add(
            "not_mixed",
            "warning" if is_known else "error",
            r_hat[worst],
            f"R-hat is {r_hat[worst]:.2f} for {_label(posterior, worst)}, so "
            + (
                "single particles have not mixed, though standard errors of averages over all of them are known."
                if is_known
                else "the particles have not mixed."
            ),
            # Against the exact gradients of all rows, momenta cost nothing, and they go straight for longer.
            ("Take the kernel SGHMC, or raise " if is_plain and not posterior.attrs.get("minibatches") else "Raise ")
            + "`num_steps`, `num_warmup` or `num_samples`, or rescale or reparameterize the model.",
        )
    findings += group_findings(posterior, _by_name(posterior, apart | ~mixed))
    if short := int(((reasons == SHORT) & mixed).sum()):
        add(
            "short_run",
            "warning",
            short,
            f"For {short} of {len(reasons)} quantities the run is short compared with the mixing time of the "
            "particles, so effective sample sizes and standard errors are unknown.",
            "Raise `num_samples` or `num_steps`.",
        )
    return findings


def _by_name(posterior, flags):
    """Return by quantity whether any of its entries is flagged."""
    ends = np.cumsum([draws.isel(chain=0, draw=0).size for draws in posterior.values()])
    parts = np.split(flags, ends[:-1])
    return {name: bool(part.any()) for name, part in zip(posterior, parts, strict=True)}


def _label(posterior, place):
    """Return the name of a quantity, as in the table, from its place among all of them."""
    for name, draws in posterior.items():
        rest = draws.isel(chain=0, draw=0)
        if place < rest.size:
            where = np.unravel_index(place, rest.shape)
            at = [str(rest[axis].values[i]) for axis, i in zip(rest.dims, where, strict=True)]
            return f"{name}[{', '.join(at)}]" if at else name
        place -= rest.size
    raise IndexError(place)


def _headline(attributes, known):
    """Return one line on what was run.

    :param known: the inflation of standard deviations by the step, if it is small.
    """
    count, ensembles = int(attributes.get("num_particles", 0)), int(attributes.get("num_ensembles", 1))
    text = f"{attributes.get('algorithm', 'numpyro_repulsion')}: "
    text += f"{count} particle{'s' * (count > 1)} in {ensembles} ensemble{'s' * (ensembles > 1)}"
    if "num_steps" in attributes and "step_size" in attributes:
        text += f", {attributes['num_steps']} updates of size {float(attributes['step_size']):.3g}"
        text += " (measured in warmup)" * (attributes.get("step_size_measured") == "true") + " per draw"
    if known is not None:
        size = "below 0.1" if known < 0.0005 else f"at most {100 * known:.1f}"
        text += f", step-size bias {size} % of a posterior sd"
    return text + "."
