"""From a finished run to ArviZ: InferenceData on ArviZ 0.x, a DataTree on 1.x.

The only module that needs ArviZ, which it imports when called.
"""

from __future__ import annotations

from functools import partial
from typing import Any
import warnings

import jax
import numpy as np

from numpyro.infer import MCMC
from numpyro.util import soft_vmap

from numpyro_repulsion.diagnostics import ensemble_ess, ensemble_mcse, nested_rhat
from numpyro_repulsion.gradients import ModelTarget
from numpyro_repulsion.kernels import ParticleKernel
from numpyro_repulsion.schedules import BiasBudget

__all__ = ["summary", "to_inference_data"]

#: Deterministic sites over all rows of subsampled plates are refused beyond this many bytes.
MAX_BYTES = 2**31
#: R-hat above which `summary` says that the particles have not mixed.
MAX_R_HAT = 1.1
#: Draws of such sites computed at once.
CHUNK_SIZE = 100

_STATISTICS = {"potential_energy": "lp"}
#: Columns of ArviZ's summary that presume independent chains, and what they are for interacting particles.
_OF_ENSEMBLES = {
    "mcse_mean": ensemble_mcse,
    "mcse_sd": partial(ensemble_mcse, method="sd"),
    "ess_bulk": ensemble_ess,
    "ess_tail": partial(ensemble_ess, method="tail"),
}


def to_inference_data(
    mcmc: MCMC,
    *,
    coords: dict[str, Any] | None = None,
    dims: dict[str, list[str]] | None = None,
    deterministic: bool = True,
):
    """The draws of a run, one chain per particle, for ArviZ.

    Groups: ``posterior``; ``sample_stats`` with ``lp`` (minus the potential energy; a minibatch estimate where the
    gradient is one), ``step_size``, ``bandwidth``, ``diverging`` and the extra fields of the run; and
    ``observed_data``, over all rows of subsampled plates. Dimensions are named after plates. The attributes of the
    posterior name the algorithm, its settings, and the ensemble of each chain. Site names with "/" get "." instead.

    For an optimizer of the cloud (:class:`~numpyro_repulsion.SVGD`) only the last cloud is a result: it becomes one
    chain whose draws are the particles.

    :param mcmc: an ``MCMC`` that has run with a kernel of this package.
    :param coords: coordinate values by dimension.
    :param dims: names of dimensions by variable, chain and draw left out, instead of those taken from the plates.
    :param deterministic: whether to compute the deterministic sites that look at subsampled rows, over all rows.
    :return: ``arviz.InferenceData`` (ArviZ 0.x) or ``xarray.DataTree`` (1.x).
    :raises TypeError: for anything but an ``MCMC`` with a kernel of this package.
    :raises ValueError: before the run, or where deterministic sites over all rows would exceed 2 GiB.

    **Example**

    .. doctest::

        >>> from jax import random
        >>> import numpyro
        >>> import numpyro.distributions as dist
        >>> from numpyro.infer import MCMC
        >>> from numpyro_repulsion import SGLDR, to_inference_data

        >>> def model():
        ...     with numpyro.plate("school", 3):
        ...         numpyro.sample("theta", dist.Normal(0, 1))

        >>> mcmc = MCMC(SGLDR(model, step_size=0.1), num_warmup=10, num_samples=20, num_chains=4,
        ...             chain_method="vectorized", progress_bar=False)
        >>> mcmc.run(random.key(0))
        >>> dict(to_inference_data(mcmc)["posterior"].sizes)
        {'chain': 4, 'draw': 20, 'school': 3}
    """
    import arviz

    kernel = _require_run(mcmc)
    target = ModelTarget(kernel.model, mcmc._args, mcmc._kwargs) if kernel.model is not None else None
    posterior = _named(mcmc.get_samples(group_by_chain=True))
    statistics = {
        _STATISTICS.get(name, name): -value if name == "potential_energy" else value
        for name, value in mcmc.get_extra_fields(group_by_chain=True).items()
        if isinstance(value, jax.Array | np.ndarray)
    }
    if not kernel.dynamics.is_sampler:
        posterior = {name: value[:, -1:] for name, value in posterior.items()}
        statistics = {name: value[:, -1:] for name, value in statistics.items()}
    observed: dict[str, Any] = {}
    if target is not None:
        if deterministic and set(target.latent) <= set(posterior):
            posterior |= _minibatched(target, posterior)
        observed = _observations(target)
    if not kernel.dynamics.is_sampler:
        # One chain, whose draws are the particles.
        posterior = {name: np.swapaxes(value, 0, 1) for name, value in posterior.items()}
        statistics = {name: np.swapaxes(value, 0, 1) for name, value in statistics.items()}
    groups = {
        "posterior": _safe(posterior),
        "sample_stats": _safe(statistics),
        "observed_data": _safe(observed),
    }
    groups = {name: group for name, group in groups.items() if group}
    named = _dims(target, groups) | (dims or {})
    if arviz.__version__.startswith("0."):
        data = arviz.from_dict(**groups, coords=coords, dims=named)
    else:
        data = arviz.from_dict(groups, coords=coords, dims=named)
    attributes = _attributes(mcmc, kernel, target)
    data.attrs.update(attributes)
    for name in ("posterior", "sample_stats"):
        data[name].attrs.update(attributes)
    return data


def summary(run, **kwargs):
    """ArviZ's summary of a run, with a line that says what was run and whether something went wrong.

    Effective sample sizes and standard errors are those of ensembles of particles that interact,
    :func:`~numpyro_repulsion.ensemble_ess` and :func:`~numpyro_repulsion.ensemble_mcse`, where ArviZ has those of
    independent chains. ``r_hat`` is that of particles; runs of several ensembles have a column ``nested_r_hat`` too.

    For an optimizer of the cloud (:class:`~numpyro_repulsion.SVGD`) it describes the last cloud, and leaves out what
    only draws have.

    :param run: an ``MCMC`` that has run with a kernel of this package, or what :func:`to_inference_data` made of it.
    :param kwargs: passed to ``arviz.summary``.
    :return: a pandas DataFrame.

    **Example**

    .. doctest::

        >>> from jax import random
        >>> import jax.numpy as jnp
        >>> from numpyro.infer import MCMC
        >>> from numpyro_repulsion import SGLDR, summary
        >>> mcmc = MCMC(SGLDR(potential_fn=lambda z: z**2 / 2, step_size=0.1), num_warmup=10, num_samples=200,
        ...             num_chains=4, chain_method="vectorized", progress_bar=False)
        >>> mcmc.run(random.key(0), init_params=jnp.arange(4.0))
        >>> table = summary(mcmc)
        SGLDR: 4 particles in 1 ensemble, 10 updates of size 0.1 per draw. No update was held as diverging.
        >>> list(table.index)
        ['z']
    """
    import arviz

    data = to_inference_data(run) if isinstance(run, MCMC) else run
    attributes = data["posterior"].attrs
    if attributes.get("inference_library") != "numpyro_repulsion":
        raise TypeError(f"`summary` takes an MCMC run or the result of to_inference_data; got {type(run).__name__}.")
    is_sampler = attributes["is_sampler"] == "true"
    table = arviz.summary(data, **({"kind": "all" if is_sampler else "stats"} | kwargs))
    if is_sampler:
        _put_ensembles_in(table, data["posterior"], kwargs.get("coords"), kwargs.get("round_to", 3))
    print(_sentence(attributes, table))
    return table


def _put_ensembles_in(table, posterior, coords, round_to):
    """The columns that presume independent chains replaced by those for interacting particles."""
    present = [name for name in _OF_ENSEMBLES if name in getattr(table, "columns", ())]
    if not present or {"chain", "draw"} & set(coords or {}):
        return
    posterior = getattr(posterior, "dataset", posterior)
    variables = [_variable(label, posterior) for label in table.index]
    posterior = posterior[list(dict.fromkeys(variables))]
    if coords:
        posterior = posterior.sel({name: value for name, value in coords.items() if name in posterior.dims})
    if posterior.sizes["draw"] < 4:
        return
    columns = {name: _OF_ENSEMBLES[name](posterior) for name in present}
    ensembles = int(posterior.attrs["num_ensembles"])
    if "r_hat" in table and 1 < ensembles < posterior.sizes["chain"]:
        columns["nested_r_hat"] = nested_rhat(posterior)
    for name, found in columns.items():
        # ArviZ 1.x keeps text, with the digits that matter.
        is_text = table["mean" if "mean" in table else present[0]].dtype == object
        values = np.concatenate([np.ravel(found[variable]) for variable in dict.fromkeys(variables)])
        if is_text:
            digits = ".0f" if name.startswith("ess") else ".2f" if "r_hat" in name else ".2g"
            table[name] = [f"{x:{digits}}" for x in values]
        elif isinstance(round_to, int):
            table[name] = values.round(0 if name.startswith("ess") else round_to)
        else:
            table[name] = values


def _variable(label, posterior):
    """Which variable a row of the table is of: names may have brackets of their own."""
    return max((name for name in posterior if label == name or label.startswith(f"{name}[")), key=len)


def _require_run(mcmc):
    kernel = getattr(mcmc, "sampler", None)
    if not isinstance(mcmc, MCMC) or not isinstance(kernel, ParticleKernel):
        raise TypeError(
            "to_inference_data takes a numpyro.infer.MCMC with a kernel of this package, such as SGLDR(model); got "
            f"{type(mcmc).__name__}{f' with {type(kernel).__name__}' if kernel is not None else ''}. For other kernels "
            "use arviz.from_numpyro."
        )
    if mcmc._states is None:
        raise ValueError("This MCMC has no draws yet; call mcmc.run(key, ...) first.")
    return kernel


def _named(samples):
    """Arrays by name: site names, or for the pytree of a ``potential_fn`` the path of each leaf."""
    if isinstance(samples, dict) and all(isinstance(value, jax.Array | np.ndarray) for value in samples.values()):
        return dict(samples)
    leaves = jax.tree.leaves_with_path(samples)
    return {("z" + jax.tree_util.keystr(path)).replace("'", ""): leaf for path, leaf in leaves}


def _minibatched(target, posterior):
    if not target.minibatched:
        return {}
    latent = {name: posterior[name] for name in target.latent}
    draws = next(iter(latent.values())).shape[:2]
    shapes = jax.eval_shape(lambda: target.minibatched_values({name: value[0, 0] for name, value in latent.items()}))
    size = draws[0] * draws[1] * sum(np.prod(x.shape) * x.dtype.itemsize for x in shapes.values())
    if size > MAX_BYTES:
        raise ValueError(
            f"The deterministic sites {sorted(shapes)} over all rows would take {size / 2**30:.1f} GiB. Pass "
            "deterministic=False, or keep fewer draws (MCMC(..., thinning=...))."
        )
    return soft_vmap(target.minibatched_values, latent, batch_ndims=2, chunk_size=CHUNK_SIZE)


def _observations(target):
    try:
        return jax.jit(target.observations)()
    except (TypeError, ValueError) as error:
        if not target.plates:
            raise
        warnings.warn(
            f"observed_data is left out: the model fails when it is given all rows of {sorted(target.plates)} "
            f"({type(error).__name__}: {str(error).splitlines()[0]}).",
            stacklevel=3,
        )
        return {}


def _safe(group):
    return {name.replace("/", "."): np.asarray(value) for name, value in group.items()}


def _dims(target, groups):
    """Plates as names of dimensions, where a variable does have the plate's size there."""
    if target is None:
        return {}
    sizes = target.plate_sizes
    found = {}
    for name, plates in target.dims.items():
        name = name.replace("/", ".")
        for group, axes in (("posterior", 2), ("observed_data", 0)):
            if name in groups.get(group, ()):
                shape = groups[group][name].shape[axes:]
                if plates and tuple(sizes[plate] for plate in plates) == shape[: len(plates)]:
                    found[name] = [plate.replace("/", ".") for plate in plates]
    return found


def _attributes(mcmc, kernel, target):
    state = mcmc.last_state
    plates = target.plates if target is not None else {}
    measured = isinstance(kernel.step_size, BiasBudget)
    # Plain chains run one by one leave a state each, and are ensembles of their own.
    num_ensembles = mcmc.num_chains if np.ndim(state.num_updates) else kernel.num_ensembles
    return {
        "inference_library": "numpyro_repulsion",
        "algorithm": type(kernel).__name__,
        "is_sampler": str(kernel.dynamics.is_sampler).lower(),
        "interaction": repr(kernel.interaction),
        "dynamics": repr(kernel.dynamics),
        "moves": repr(kernel.moves),
        "gradient": repr(kernel.resolve_gradient(target)),
        "minibatches": ", ".join(f"{size} of {total} {name}" for name, (total, size) in plates.items()),
        "preconditioner": "None" if kernel.preconditioner is None else str(kernel.preconditioner),
        "step_size_rule": repr(kernel.step_size) if not callable(kernel.step_size) else "schedule",
        "step_size": float(np.ravel(state.step_size)[0]),
        "step_size_measured": str(measured).lower(),
        "remedy": kernel.remedy,
        "complaints": " ".join(kernel.complaints(state)),
        "num_particles": mcmc.num_chains,
        "num_ensembles": num_ensembles,
        "ensemble": np.repeat(np.arange(num_ensembles), mcmc.num_chains // num_ensembles),
        "num_steps": kernel.num_steps,
        "num_warmup": mcmc.num_warmup,
        "thinning": mcmc.thinning,
        "num_divergences": int(np.sum(state.num_divergences)),
    }


def _sentence(attributes, table):
    """What was run, and what to think of it."""
    count, ensembles = int(attributes["num_particles"]), int(attributes["num_ensembles"])
    text = f"{attributes['algorithm']}: {count} particle{'s' * (count > 1)} in "
    text += f"{ensembles} ensemble{'s' * (ensembles > 1)}, {attributes['num_steps']} updates "
    text += f"of size {float(attributes['step_size']):.3g}"
    if attributes["step_size_measured"] == "true":
        text += " (measured in warmup)"
    text += " per draw. "
    held = int(attributes["num_divergences"])
    if held:
        text += (
            f"{held} update{'s were' if held > 1 else ' was'} not finite and held, or had a gradient that was cut: "
            f"{attributes['remedy']}, or reparameterize."
        )
    else:
        text += "No update was held as diverging."
    if attributes["complaints"]:
        text += f" {attributes['complaints']}"
    if "r_hat" in table and (worst := float(np.nanmax(np.asarray(table["r_hat"], float), initial=1.0))) > MAX_R_HAT:
        text += (
            f" R-hat is {worst:.2f} for {table['r_hat'].astype(float).idxmax()}: the particles have not mixed. Raise "
            "`num_steps` or `num_warmup`, or rescale or reparameterize the model."
        )
    if attributes["is_sampler"] != "true":
        text += (
            f" An optimizer, not a sampler: this describes its last cloud of {count} points, whose spread is smaller "
            "than the posterior's."
        )
    return text
