"""Conversion of a finished run to ArviZ. ArviZ and xarray are imported when called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
import json
from typing import Any
import warnings

import jax
import numpy as np

import numpyro
from numpyro.infer import MCMC

from numpyro_repulsion.diagnostics import find_diverged_chains
from numpyro_repulsion.findings import Finding, to_json
from numpyro_repulsion.gradients import ModelTarget, ravel_cloud
from numpyro_repulsion.inference_data.rows import (
    by_draw,
    counting,
    from_posterior,
    from_prior,
    is_key,
    map_draws,
    observe,
    pointwise,
    whole,
)
from numpyro_repulsion.kernels import ParticleKernel
from numpyro_repulsion.kernels.runs import (
    bound_of,
    coupling_of,
    has_other_data,
    is_warmup,
    kernel_of_run,
    of_updates,
)
from numpyro_repulsion.schedules import BiasBudget

#: It replaces the findings of the warmup.
OTHER_DATA = Finding(
    "other_data",
    "warning",
    None,
    "The data changed after warmup, so the step size, preconditioner and other adapted quantities may be unsuitable.",
    "Warm up on these data, unless the two data sets are similar.",
)
_LEADING = ("chain", "draw")


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
    algorithm and its settings. In site names "." replaces "/". If a mask hides a part of an observed site, for all
    draws alike, the site is flattened to its visible entries along ``<site>_entry``, whose coordinates are positions in
    the flattened site. Of an optimizer of the cloud (:class:`~numpyro_repulsion.SVGD`) only the last cloud is a result:
    one chain, whose draws are the particles.

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
    posterior = named_draws(mcmc.get_samples(group_by_chain=True))
    statistics = _statistics(mcmc)
    shape = statistics["lp"].shape
    # Only the last cloud of an optimizer is a result.
    all_count = kernel.dynamics.is_sampler or of_warmup
    if not all_count:
        posterior = {name: value[:, -1:] for name, value in posterior.items()}
        statistics = {name: value[:, -1:] for name, value in statistics.items()}
    has_all = target is not None and set(target.latent) <= set(posterior)
    latent = {name: posterior[name] for name in target.latent} if has_all else {}
    if deterministic and latent and target.minibatched:
        what, remedy = f"The deterministic sites {sorted(target.minibatched)}", "Pass deterministic=False"
        posterior |= map_draws(ModelTarget.minibatched_values, target, latent, what, remedy)
    given = {"posterior_predictive": posterior_predictive, "prior": prior}
    wanted = {name for name, value in given.items() if value is not None and is_key(name, value)}
    if log_likelihood is True or (log_likelihood is not False and len(log_likelihood)):
        wanted.add("log_likelihood")
    _require_model(wanted, target, latent, of_warmup)
    everything = target and whole(target)
    observed, entries, failure = observe(everything)
    if failure:
        if wanted:
            raise ValueError(f"{', '.join(sorted(wanted))} cannot be computed: {failure}")
        warnings.warn(f"observed_data is left out: {failure}", stacklevel=2)
    groups: dict[str, dict] = {"posterior": posterior, "sample_stats": statistics}
    if "log_likelihood" in wanted:
        groups["log_likelihood"] = counting(entries, pointwise(target, latent, log_likelihood), 2)
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
        groups["prior"], groups["prior_predictive"] = from_prior(everything, prior, deterministic)
    elif prior is not None:
        # What the posterior has too, and predictions.
        of_prior = {*posterior, *(target.minibatched if target is not None else ())}
        draws = {name: np.asarray(value)[None] for name, value in prior.items()}
        groups["prior"] = {name: value for name, value in draws.items() if name in of_prior}
        groups["prior_predictive"] = {name: value for name, value in draws.items() if name not in of_prior}
    for name in {"posterior_predictive", "prior_predictive"} & set(groups):
        groups[name] = counting(entries, groups[name], 2)
    groups["observed_data"] = counting(entries, observed, 0)
    groups["constant_data"] = dict(constant_data or {})
    groups["predictions_constant_data"] = dict(predictions_constant_data or {})
    variables = [name for group in groups.values() for name in group]
    names = _safe_names([*variables, *(target.plate_sizes if target is not None else ())])
    labels = _Labels(everything, entries, names, coords, dims)
    facts = _attributes(mcmc, kernel, target)
    of_chains = {"ensemble": facts["ensemble"]}
    if all_count:
        dimension = mcmc.last_state.gradient.shape[-1]
        temperature = kernel.dynamics.unit_of_energy
        problems = mcmc.last_state.learned.diagnosis
        # Warmup prolonged the arrival, as for networks.
        is_network = problems is not None and bool(problems.is_prolonged)
        energy = -statistics["lp"] / temperature
        diverged, facts["num_wide"] = find_diverged_chains(latent or posterior, energy, dimension, is_network)
        of_chains["diverged_chains"] = diverged
    datasets = {}
    for name, group in groups.items():
        if group:
            of_run = name in ("posterior", "sample_stats")
            dataset = labels.dataset(name, group, of_chains if all_count and of_run else {})
            dataset.attrs.update(facts)
            datasets[f"warmup_{name}" if of_warmup and of_run else name] = dataset
    if warmup is not None:
        datasets |= _of_warmup(warmup, mcmc.num_chains)
    if arviz.__version__.startswith("0."):
        return arviz.InferenceData(attrs=facts, save_warmup=True, **datasets)
    data = xarray.DataTree.from_dict(datasets)
    data.attrs.update(facts)
    return data


def _statistics(mcmc):
    fields = mcmc.get_extra_fields(group_by_chain=True)
    found = {name: value for name, value in fields.items() if isinstance(value, jax.Array | np.ndarray)}
    found["lp"] = -found.pop("potential_energy")
    # In a state, bandwidth 0 means none.
    found["bandwidth"] = np.where(np.asarray(found["bandwidth"]) > 0.0, found["bandwidth"], np.nan)
    return found


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


def _of_warmup(data, num_chains):
    """Return the groups of a conversion made after warmup."""
    names = ["warmup_posterior", "warmup_sample_stats"]
    try:
        groups = {name: data[name] for name in names}
    except (KeyError, TypeError, AttributeError):
        raise ValueError(
            "`warmup` is what to_inference_data(mcmc) returns between mcmc.warmup(..., collect_warmup=True) and "
            f"mcmc.run(...), with the groups {names}; got {type(data).__name__} without them."
        ) from None
    if any(group.sizes["chain"] != num_chains for group in groups.values()):
        raise ValueError(
            f"`warmup` must come from this run, with {num_chains} chains; pass what to_inference_data(mcmc) returned "
            "before mcmc.run."
        )
    return {name: group.to_dataset() if hasattr(group, "to_dataset") else group for name, group in groups.items()}


def _attributes(mcmc: MCMC, kernel: ParticleKernel, target: ModelTarget | None) -> dict[str, Any]:
    state = mcmc.last_state
    plates = target.plates if target is not None else {}
    measured = isinstance(kernel.step_size, BiasBudget)
    is_other = has_other_data(mcmc)
    findings = ([OTHER_DATA] if is_other else kernel.findings(state)) + _of_momenta(kernel, state)
    known, reference = state.learned.figures, state.learned.reference
    biases = (-1.0, -1.0) if known is None else (float(known.bias), float(known.mean_bias))
    bias, mean_bias = (np.nan if x < 0.0 or is_other else x for x in biases)
    coupling, num_independent = coupling_of(mcmc)
    centering, centering_means = _centering(state)
    share_flagged, clipping_shift = of_updates(mcmc)
    order = "none" if reference is None else "first order" if reference.hessian is None else "second order"
    return {
        "created_at": datetime.now(UTC).isoformat(),
        "inference_library": "numpyro_repulsion",
        "numpyro_version": numpyro.__version__,
        "algorithm": type(kernel).__name__,
        "is_sampler": str(kernel.dynamics.is_sampler).lower(),
        "interaction": repr(kernel.interaction),
        "dynamics": repr(kernel.dynamics),
        "moves": repr(kernel.moves if state.learned.jumps is None else bound_of(mcmc).moves),
        "gradient": repr(bound_of(mcmc).gradient),
        "control_variates": order,
        "minibatches": ", ".join(f"{size} of {total} {name}" for name, (total, size) in plates.items()),
        "centering": centering,
        "centering_means": json.dumps(centering_means),
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
        "num_flagged_updates": int(state.num_flagged_updates),
        "share_flagged": share_flagged,
        "clipping_shift": clipping_shift,
    }


def _of_momenta(kernel, state):
    """Return a finding about momenta that are far colder than in equilibrium, so that particles hardly move."""
    found = kernel.dynamics.kinetic_temperature(state.memory)
    if found is None or not kernel.dynamics.is_sampler:
        return []
    share = float(found) / kernel.dynamics.temperature
    # Noise and long steps of a thermostat leave more than 0.8; the mean of n squares has an sd of sqrt(2 / n).
    if not share < min(0.5, 1.0 - 4.0 * (2.0 / state.memory[0].size) ** 0.5):
        return []
    message = f"The kinetic temperature is {100 * share:.0f}% of its target, so particles hardly move."
    remedy = "Omit `step_size`, which warmup adapts, or raise `num_warmup`: the friction of a thermostat falls slowly."
    return [Finding("cold_momenta", "error", share, message, remedy)]


def _centering(state):
    """Return by how much hierarchical sites are centered, in words and on average; nothing if as in the model."""
    centering = state.learned.centering
    if centering is None:
        return "", {}
    shares = ravel_cloud(state.z)[1](centering.share)
    shares = {name: np.asarray(x, float) for name, x in shares.items() if x.size and (x != 1.0).any()}
    words = ", ".join(f"{name} {x.min():.2f} to {x.max():.2f}" for name, x in shares.items())
    return words, {name: float(x.mean()) for name, x in shares.items()}


def named_draws(samples: Any) -> dict[str, Any]:
    """Return arrays by name: site names, or for the pytree of a ``potential_fn`` the path of each leaf."""
    if isinstance(samples, dict) and all(isinstance(value, jax.Array | np.ndarray) for value in samples.values()):
        return dict(samples)
    leaves = jax.tree.leaves_with_path(samples)
    return {("z" + jax.tree_util.keystr(path)).replace("'", ""): leaf for path, leaf in leaves}


class _Labels:
    """Names of variables and of the axes of their arrays, by the plates of the model and by what the user says."""

    def __init__(self, target, entries, names, coords, dims):
        self.target, self.entries, self.names = target, entries, names
        self.coords = {names.get(name, name): values for name, values in (coords or {}).items()}
        self.dims = {names.get(name, name): list(listed) for name, listed in (dims or {}).items()}

    def dataset(self, group, arrays, of_chains):
        """Return an ``xarray.Dataset`` in which every axis has a name and coordinates."""
        import xarray

        leading = () if group.endswith("_data") else _LEADING
        variables: dict[str, tuple] = {}
        coords: dict[str, Any] = {}
        for name, value in arrays.items():
            # JAX arrays are copied so that users may write to them; NumPy arrays may lie on disk and stay there.
            value = value if isinstance(value, np.ndarray) else np.array(value)
            safe, shape = self.names[name], value.shape[len(leading) :]
            axes = self._axes(name, shape, group)
            for i, size in enumerate(shape):
                axis = axes[i]
                # A plate may have two lengths if new rows are predicted.
                if axis is None or (axis not in self.dims.get(safe, ()) and _differs(coords, axis, size)):
                    axes[i] = axis = f"{safe}_dim_{i}"
                if _differs(coords, axis, size):
                    raise ValueError(
                        f"Dimension '{axis}' has size {len(coords[axis])}, and would have {size} for '{name}'; give "
                        "the two different names in `dims`."
                    )
                coords.setdefault(axis, self._coordinate(name, axis, size, group))
            coords |= {axis: np.arange(size) for axis, size in zip(leading, value.shape, strict=False)}
            variables[safe] = ([*leading, *axes], value, {} if safe == name else {"site": name})
        taken = {*variables, *coords}
        coords |= {name: ("chain", values) for name, values in of_chains.items() if name not in taken}
        return xarray.Dataset(variables, coords)

    def _axes(self, name, shape, group):
        """Return the names of axes, ``None`` for those without."""
        given = self.dims.get(self.names[name])
        if name in self.entries and group != "predictions" and shape[:1] == self.entries[name][1].shape:
            behind = [] if given is None else given[len(self.entries[name][0]) :]
            given = [f"{self.names[name]}_entry", *behind]
        if given is not None:
            if len(given) > len(shape) and group != "log_likelihood":
                raise ValueError(
                    f"`dims['{name}']` must have at most {len(shape)} names, one for each dimension; got {given}."
                )
            # Log likelihoods have no event axes.
            return [*given, *[None] * len(shape)][: len(shape)]
        return self._plates(name, shape, group)

    def _plates(self, name, shape, group):
        axes: list[str | None] = [None] * len(shape)
        if self.target is None:
            return axes
        plates, sizes = self.target.dims.get(name, {}), self.target.plate_sizes
        event, event_names = self.target.events.get(name, (None, ()))
        event = 0 if group == "log_likelihood" and event is not None else event
        # Deterministic sites do not say where their batch ends.
        splits = range(len(shape) + 1) if event is None else [len(shape) - event]
        for split in splits:
            axes_of = {split + dim: plate for plate, dim in plates.items()}
            if min(axes_of, default=0) >= 0 and (
                group == "predictions" or all(shape[i] == sizes[plate] for i, plate in axes_of.items())
            ):
                for i, plate in axes_of.items():
                    axes[i] = self.names[plate]
                break
        if event and len(event_names) == event:
            axes[-event:] = event_names
        return axes

    def _coordinate(self, name, axis, size, group):
        if name in self.entries and axis == f"{self.names[name]}_entry":
            return self.entries[name][1]
        values = self.coords.get(axis)
        if values is None or (group.startswith("predictions") and len(values) != size):
            return np.arange(size)
        if len(values) != size:
            raise ValueError(f"coords['{axis}'] must have {size} values, one for each entry; got {len(values)}.")
        return np.asarray(values)


def _differs(coords, axis, size):
    return axis in coords and len(coords[axis]) != size


def _safe_names(names):
    """Return unique names for ArviZ, in which "." replaces "/", which separates netCDF groups."""
    safe: dict[str, str] = {}
    taken = set(_LEADING)
    # Names that may stay as they are come first.
    for name in sorted(dict.fromkeys(names), key=lambda name: "/" in name):
        found = wished = name.replace("/", ".")
        while found in taken:
            found += "_"
        if found != wished:
            warnings.warn(f"'{name}' is called '{found}' here, because '{wished}' is taken.", stacklevel=3)
        taken.add(found)
        safe[name] = found
    return safe
