"""Conversion of a finished run to ArviZ. ArviZ and xarray are imported when called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any
import warnings

import jax
import numpy as np

import numpyro
from numpyro.infer import MCMC

from numpyro_repulsion.diagnostics import find_diverged_chains
from numpyro_repulsion.findings import Finding, to_json
from numpyro_repulsion.gradients import ModelTarget, ravel_cloud
from numpyro_repulsion.inference_data.labels import Labels, named_draws, safe_names
from numpyro_repulsion.inference_data.rows import (
    by_draw,
    from_posterior,
    from_prior,
    is_key,
    map_draws,
    observe,
    pointwise,
)
from numpyro_repulsion.kernels import (
    ParticleKernel,
    bound_of,
    coupling_of,
    has_other_data,
    is_warmup,
    kernel_of_run,
    share_flagged,
)
from numpyro_repulsion.schedules import BiasBudget

__all__ = ["to_inference_data"]

#: The finding about a run with other data than its warmup; it replaces the findings of that warmup.
OTHER_DATA = Finding(
    "other_data",
    "warning",
    None,
    "This run has other data than its warmup, so step size, scales and all else that warmup learned may not fit.",
    "Warm up on these data, unless both are alike.",
)
#: Momenta below this share of their temperature are cold. Noise and long steps of a thermostat leave more than 0.8.
MIN_TEMPERATURE = 0.5
_WARMUP = ("warmup_posterior", "warmup_sample_stats")


def to_inference_data(
    mcmc: MCMC,
    *,
    coords: Mapping[str, Any] | None = None,
    dims: Mapping[str, Sequence[str]] | None = None,
    deterministic: bool = True,
    log_likelihood: bool | Sequence[str] = False,
    posterior_predictive: Any = None,
    prior: Any = None,
    predictions: Mapping[str, Any] | None = None,
    constant_data: Mapping[str, Any] | None = None,
    predictions_constant_data: Mapping[str, Any] | None = None,
    warmup: Any = None,
):
    """Return the draws of a run for ArviZ, one chain per particle.

    The result always has ``posterior``; ``sample_stats`` with ``lp`` (minus the potential energy; a minibatch estimate
    if the gradient is one), ``step_size``, ``bandwidth``, ``diverging`` and the extra fields of the run; and
    ``observed_data``. On request it has ``log_likelihood``, ``posterior_predictive``, ``prior`` with
    ``prior_predictive``, and the groups that are passed in. Everything computed from the model covers all rows of
    subsampled plates, each once. The model keeps its data; predictions draw the observed sites nevertheless.

    Dimensions are named after plates, and after ``infer={"event_dims": [...]}`` of a site. Chains have the coordinates
    ``ensemble``, and ``diverged_chains``: whether a particle has left the others or stands still. Attributes name the
    algorithm, its settings, and the ensemble of each chain. In site names "." replaces "/". If a mask hides a part of
    an observed site, for all draws alike, the site is flattened to its visible entries along ``<site>_entry``, whose
    coordinates are positions in the flattened site.

    For an optimizer of the cloud (:class:`~numpyro_repulsion.SVGD`) only the last cloud is a result: it becomes one
    chain whose draws are the particles.

    Between ``mcmc.warmup(..., collect_warmup=True)`` and ``mcmc.run`` the draws are those of warmup, in the groups
    ``warmup_posterior`` and ``warmup_sample_stats``. ``mcmc.run`` drops them: convert before it, and pass the result as
    ``warmup`` afterwards.

    :param mcmc: an ``MCMC`` that has run with a kernel of this package.
    :param coords: coordinate values by dimension.
    :param dims: names of dimensions by variable, without chain and draw; they replace those taken from the plates.
    :param deterministic: whether to compute the deterministic sites that use subsampled rows, over all rows.
    :param log_likelihood: whether to compute the log likelihood of every observation, for ``arviz.loo`` and
        ``arviz.compare``: ``True`` for all observed sites, or a list of names of observed sites and of
        ``numpyro.factor`` sites that are likelihoods. It leaves out any ``numpyro.handlers.scale``.
    :param posterior_predictive: a PRNG key for one replicate per draw of the observed sites (and of deterministic sites
        made from them); or the dictionary that ``numpyro.infer.Predictive`` returned for ``mcmc.get_samples()``.
    :param prior: a PRNG key for 1000 draws from prior and prior predictive; or the dictionary of ``Predictive``.
    :param predictions: for other data, the dictionary that ``Predictive(uncondition(all_rows(model)),
        mcmc.get_samples())`` returned, see :class:`~numpyro_repulsion.all_rows`.
    :param constant_data: arrays to store with the data, such as covariates; their dimensions come from ``dims``.
    :param predictions_constant_data: the same for ``predictions``.
    :param warmup: what this function returned after ``mcmc.warmup(..., collect_warmup=True)``.
    :return: ``arviz.InferenceData`` (ArviZ 0.x) or ``xarray.DataTree`` (1.x).
    :raises TypeError: if ``mcmc`` is not an ``MCMC`` with a kernel of this package, or an argument has a wrong type.
    :raises ValueError: before the run; if a group computed from the model would exceed 2 GiB; for log likelihoods of
        models with enumerated or random likelihoods; for predictions from a key if latent sites are enumerated, or
        sites are observed inside ``scan``; for names and coordinates that do not fit.

    **References:**

    1. *Practical Bayesian model evaluation using leave-one-out cross-validation and WAIC*, A. Vehtari, A. Gelman and
       J. Gabry, https://arxiv.org/abs/1507.04544

    **Example**

    .. doctest::

        >>> from jax import random
        >>> import jax.numpy as jnp
        >>> import numpyro
        >>> import numpyro.distributions as dist
        >>> from numpyro.infer import MCMC
        >>> from numpyro_repulsion import SGLDR, to_inference_data

        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 1))
        ...     with numpyro.plate("pupil", 100, subsample_size=10) as i:
        ...         numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])

        >>> mcmc = MCMC(SGLDR(model, step_size=1e-3), num_warmup=0, num_samples=20, num_chains=4,
        ...             chain_method="vectorized", progress_bar=False)
        >>> mcmc.run(random.key(0), jnp.zeros(100))
        >>> dict(to_inference_data(mcmc)["posterior"].sizes)
        {'chain': 4, 'draw': 20}
        >>> data = to_inference_data(mcmc, log_likelihood=True, posterior_predictive=random.key(1))
        >>> dict(data["log_likelihood"].sizes)
        {'chain': 4, 'draw': 20, 'pupil': 100}
        >>> data["posterior_predictive"]["y"].dims
        ('chain', 'draw', 'pupil')
    """
    import arviz
    import xarray

    instead = " For other kernels use arviz.from_numpyro."
    kernel = kernel_of_run(mcmc, "to_inference_data", instead, of_warmup=True, of_optimizer=True)
    target: Any = bound_of(mcmc).target if kernel.model is not None else None
    of_warmup = is_warmup(mcmc)
    posterior, statistics = _draws(mcmc)
    shape = next(iter(statistics.values())).shape[:2]
    # Only the last cloud of an optimizer is a result.
    all_count = kernel.dynamics.is_sampler or of_warmup
    if not all_count:
        posterior = {name: value[:, -1:] for name, value in posterior.items()}
        statistics = {name: value[:, -1:] for name, value in statistics.items()}
    latent = _latent(target, posterior)
    if deterministic and latent and target.minibatched:
        counted = next(iter(latent.values())).shape[:2]
        what, remedy = f"The deterministic sites {sorted(target.minibatched)}", "Pass deterministic=False"
        posterior |= map_draws(ModelTarget.minibatched_values, target, latent, counted, what, remedy)
    wanted = _wanted(log_likelihood=log_likelihood, posterior_predictive=posterior_predictive, prior=prior)
    _require_model(wanted, target, latent, of_warmup)
    observations = observe(target)
    if observations.failure:
        if wanted:
            raise ValueError(f"{', '.join(sorted(wanted))} cannot be computed: {observations.failure}")
        warnings.warn(f"observed_data is left out: {observations.failure}", stacklevel=2)
    groups: dict[str, dict] = {"posterior": posterior, "sample_stats": statistics}
    if "log_likelihood" in wanted:
        groups["log_likelihood"] = observations.counting(pointwise(target, latent, log_likelihood), 2)
    if "posterior_predictive" in wanted:
        groups["posterior_predictive"] = from_posterior(target, posterior_predictive, latent)
    elif posterior_predictive is not None:
        groups["posterior_predictive"] = by_draw("posterior_predictive", posterior_predictive, shape, all_count)
    if predictions is not None:
        groups["predictions"] = by_draw("predictions", predictions, shape, all_count)
    if not all_count:
        # One chain, whose draws are the particles.
        groups = {k: {name: np.swapaxes(value, 0, 1) for name, value in v.items()} for k, v in groups.items()}
    if "prior" in wanted:
        groups["prior"], groups["prior_predictive"] = from_prior(target, prior, deterministic)
    elif prior is not None:
        groups["prior"], groups["prior_predictive"] = _split_prior(prior, target, posterior)
    for name in {"posterior_predictive", "prior_predictive"} & set(groups):
        groups[name] = observations.counting(groups[name], 2)
    groups["observed_data"] = observations.counting(observations.values, 0)
    groups["constant_data"] = dict(constant_data or {})
    groups["predictions_constant_data"] = dict(predictions_constant_data or {})
    variables = [name for group in groups.values() for name in group]
    names = safe_names(variables, target.plate_sizes if target is not None else ())
    labels = Labels(target, observations, names, coords, dims)
    facts = _attributes(mcmc, kernel, target)
    of_chains = {"ensemble": facts["ensemble"]}
    if all_count:
        dimension = mcmc.last_state.gradient.shape[-1]
        temperature = kernel.dynamics.temperature or 1.0
        is_network = _is_network(mcmc.last_state)
        energy = -statistics["lp"] / temperature
        diverged, facts["num_wide"] = find_diverged_chains(latent or posterior, energy, dimension, is_network)
        of_chains["diverged_chains"] = diverged
    datasets = {}
    for name, group in groups.items():
        if group:
            per_particle = all_count and name in ("posterior", "sample_stats")
            dataset = labels.dataset(name, group, of_chains if per_particle else {})
            dataset.attrs.update(facts)
            datasets[f"warmup_{name}" if of_warmup and name in ("posterior", "sample_stats") else name] = dataset
    if warmup is not None:
        datasets |= _of_warmup(warmup, mcmc.num_chains)
    if arviz.__version__.startswith("0."):
        return arviz.InferenceData(attrs=facts, save_warmup=True, **datasets)
    data = xarray.DataTree.from_dict(datasets)
    data.attrs.update(facts)
    return data


def _draws(mcmc):
    """Return ``(posterior, sample_stats)``."""
    fields = mcmc.get_extra_fields(group_by_chain=True)
    statistics = {name: value for name, value in fields.items() if isinstance(value, jax.Array | np.ndarray)}
    statistics["lp"] = -statistics.pop("potential_energy")
    # In a state, bandwidth 0 means none.
    statistics["bandwidth"] = np.where(np.asarray(statistics["bandwidth"]) > 0.0, statistics["bandwidth"], np.nan)
    return named_draws(mcmc.get_samples(group_by_chain=True)), statistics


def _latent(target, posterior):
    """Return the draws of the latent sites, or nothing if the run left some out."""
    if target is None or not set(target.latent) <= set(posterior):
        return {}
    return {name: posterior[name] for name in target.latent}


def _wanted(*, log_likelihood, **given):
    """Return the names of the groups to compute from the model."""
    asked = log_likelihood if isinstance(log_likelihood, bool) else len(log_likelihood) > 0
    keys = {name for name, value in given.items() if value is not None and is_key(name, value)}
    return keys | {"log_likelihood"} if asked else keys


def _require_model(wanted, target, latent, of_warmup):
    if not wanted:
        return
    if target is None:
        raise ValueError(
            f"A kernel made from a `potential_fn` has no model to compute {sorted(wanted)} from; leave "
            "these arguments out, or make the kernel from a model."
        )
    if of_warmup:
        raise ValueError(f"These are draws of warmup; ask for {sorted(wanted)} after mcmc.run(key, ...).")
    if not latent and wanted - {"prior"}:
        raise ValueError(
            f"{sorted(wanted - {'prior'})} need the draws of all latent sites {target.latent}; run without "
            "extra_fields=('~z.site',)."
        )


def _split_prior(prior, target, posterior):
    """Split the user's draws into sites that the posterior has too, and predictions."""
    draws = {name: np.asarray(value)[None] for name, value in prior.items()}
    of_prior = set(posterior) | set(target.minibatched if target is not None else ())
    return (
        {name: value for name, value in draws.items() if name in of_prior},
        {name: value for name, value in draws.items() if name not in of_prior},
    )


def _of_warmup(data, num_chains):
    """Return the groups of a conversion made after warmup."""
    try:
        groups = {name: data[name] for name in _WARMUP}
    except (KeyError, TypeError, AttributeError):
        raise ValueError(
            "`warmup` is what to_inference_data(mcmc) returns between mcmc.warmup(..., collect_warmup=True) and "
            f"mcmc.run(...), with the groups {list(_WARMUP)}; got {type(data).__name__} without them."
        ) from None
    groups = {name: group.to_dataset() if hasattr(group, "to_dataset") else group for name, group in groups.items()}
    if any(group.sizes["chain"] != num_chains for group in groups.values()):
        raise ValueError(
            f"`warmup` must come from this run, with {num_chains} chains; pass what to_inference_data(mcmc) returned "
            "before mcmc.run."
        )
    return groups


def _attributes(mcmc: MCMC, kernel: ParticleKernel, target: ModelTarget | None) -> dict[str, Any]:
    """Return the attributes that describe a run."""
    state = mcmc.last_state
    plates = target.plates if target is not None else {}
    measured = isinstance(kernel.step_size, BiasBudget)
    is_other = has_other_data(mcmc)
    findings = ([OTHER_DATA] if is_other else kernel.findings(state)) + _of_momenta(kernel, state)
    known = state.learned.measurements
    biases = (-1.0, -1.0) if known is None else (float(known.bias), float(known.mean_bias))
    bias, mean_bias = (np.nan if x < 0.0 or is_other else x for x in biases)
    coupling, num_independent = coupling_of(mcmc)
    return {
        "created_at": datetime.now(UTC).isoformat(),
        "inference_library": "numpyro_repulsion",
        "numpyro_version": numpyro.__version__,
        "algorithm": type(kernel).__name__,
        "is_sampler": str(kernel.dynamics.is_sampler).lower(),
        "interaction": repr(kernel.interaction),
        "dynamics": repr(kernel.dynamics),
        "moves": repr(kernel.moves),
        "gradient": repr(bound_of(mcmc).gradient),
        "control_variates": _control_variates(state.learned.reference),
        "minibatches": ", ".join(f"{size} of {total} {name}" for name, (total, size) in plates.items()),
        "centering": _centering(state),
        "preconditioner": "None" if kernel.preconditioner is None else str(kernel.preconditioner),
        "step_size_rule": "schedule" if callable(kernel.step_size) else repr(kernel.step_size),
        "step_size": float(np.ravel(state.step_size)[0]),
        "step_size_measured": str(measured).lower(),
        "step_size_bias": bias,
        "step_size_mean_bias": mean_bias,
        "remedy": "warm up on these data" if is_other and measured else kernel.remedy,
        "findings": to_json(findings),
        "other_data": str(is_other).lower(),
        "coupling": coupling,
        "num_independent": num_independent,
        "num_particles": mcmc.num_chains,
        "num_ensembles": kernel.num_ensembles,
        "ensemble": np.repeat(np.arange(kernel.num_ensembles), mcmc.num_chains // kernel.num_ensembles),
        "num_steps": kernel.num_steps,
        "num_warmup": mcmc.num_warmup,
        "thinning": mcmc.thinning,
        "num_flagged_updates": int(np.sum(state.num_flagged_updates)),
        "share_flagged": share_flagged(mcmc),
    }


def _control_variates(reference):
    """Return the order of the control variates in use, in words."""
    if reference is None:
        return "none"
    return "first order" if reference.hessian is None else "second order"


def _of_momenta(kernel, state):
    """Return a finding about momenta that are far colder than in equilibrium, so that particles hardly move."""
    found = kernel.dynamics.kinetic_temperature(state.memory)
    if found is None or not kernel.dynamics.is_sampler:
        return []
    share = float(found) / kernel.dynamics.temperature
    # The mean of n squares has a standard deviation of sqrt(2 / n).
    if not share < min(MIN_TEMPERATURE, 1.0 - 4.0 * (2.0 / state.memory[0].size) ** 0.5):
        return []
    message = f"Momenta have {100 * share:.0f} % of their temperature, so particles hardly move."
    remedy = "Leave `step_size` to warmup, or raise `num_warmup`: the friction of a thermostat falls slowly."
    return [Finding("cold_momenta", "error", share, message, remedy)]


def _is_network(state):
    """Return whether warmup prolonged the arrival, as for networks."""
    return state.learned.problems is not None and bool(state.learned.problems.is_prolonged)


def _centering(state):
    """Return by how much hierarchical sites are centered, in words; empty if all sites are as in the model."""
    centering = state.learned.centering
    if centering is None:
        return ""
    shares = ravel_cloud(state.z)[1](centering.share)
    ranges = {name: (float(x.min()), float(x.max())) for name, x in shares.items() if x.size and (x != 1.0).any()}
    return ", ".join(f"{name} {low:.2f} to {high:.2f}" for name, (low, high) in ranges.items())
