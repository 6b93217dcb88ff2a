"""From a finished run to ArviZ: InferenceData on ArviZ 0.x, a DataTree on 1.x. ArviZ is imported when called."""

from __future__ import annotations

from typing import Any
import warnings

import jax
import numpy as np

from numpyro.infer import MCMC
from numpyro.util import soft_vmap

from numpyro_repulsion.gradients import ModelTarget
from numpyro_repulsion.kernels import ParticleKernel
from numpyro_repulsion.schedules import BiasBudget

__all__ = ["named_draws", "to_inference_data"]

#: Deterministic sites over all rows of subsampled plates are refused beyond this many bytes.
MAX_BYTES = 2**31
#: Draws of such sites computed at once.
CHUNK_SIZE = 100

_STATISTICS = {"potential_energy": "lp"}


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
    posterior = named_draws(mcmc.get_samples(group_by_chain=True))
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


def named_draws(samples):
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
        "step_size_bias": float(np.ravel(state.tuning.bias)[0]),
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
