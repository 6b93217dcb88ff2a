"""The table of a run: ArviZ's summary with columns for ensembles. ArviZ is imported when called."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from numpyro_repulsion.checks import boolean
from numpyro_repulsion.diagnostics import ensemble_ess, ensemble_mcse, nested_rhat
from numpyro_repulsion.report.diagnosis import data_of, diagnosis_of

#: Columns of ArviZ's summary that presume independent chains, and their replacements for interacting particles.
_OF_ENSEMBLES: dict[str, Callable] = {
    "mcse_mean": ensemble_mcse,
    "mcse_sd": partial(ensemble_mcse, method="sd"),
    "ess_bulk": ensemble_ess,
    "ess_tail": partial(ensemble_ess, method="tail"),
}


def summary(run, *, exclude_diverged: bool = False, **kwargs):
    """Return ArviZ's summary of a run; prints what was run, and the problems found, worst first.

    Effective sample sizes and standard errors are those for interacting particles,
    :func:`~numpyro_repulsion.ensemble_ess` and :func:`~numpyro_repulsion.ensemble_mcse`, instead of ArviZ's for
    independent chains. ``ess_mean`` takes the place of ArviZ's ``ess_bulk``: the number of independent draws whose mean
    would be as precise. It exceeds the number of draws where noise cancels between particles, as by default. ``r_hat``
    compares particles; runs of several ensembles also have a column ``nested_r_hat``.
    The printed text is :func:`~numpyro_repulsion.diagnose` of the variables, chains and draws in the table.

    For an optimizer of the cloud (:class:`~numpyro_repulsion.SVGD`) the table describes the last cloud, without the
    columns that need draws of a sampler.

    :param run: an ``MCMC`` that has run with a kernel of this package, or its result from :func:`to_inference_data`.
    :param exclude_diverged: whether to leave out particles that have left the others or stand still, the chains with
        the coordinate ``diverged_chains`` of :func:`to_inference_data`.
    :param kwargs: passed to ``arviz.summary``.
    :return: a pandas DataFrame.
    :raises TypeError: for any other ``run``.
    :raises ValueError: before the run, if there are only draws of warmup, for a ``fmt`` other than ``"wide"``, and if
        ``exclude_diverged`` leaves no particle.

    **Example**

    .. doctest::

        >>> from jax import random
        >>> import jax.numpy as jnp
        >>> from numpyro.infer import MCMC
        >>> from numpyro_repulsion import SGLDR, summary
        >>> mcmc = MCMC(SGLDR(potential_fn=lambda z: jnp.sum(z**2) / 2, step_size=0.05), num_warmup=10, num_samples=500,
        ...             num_chains=10, chain_method="vectorized", progress_bar=False)
        >>> mcmc.run(random.key(0), init_params=random.normal(random.key(1), (10, 2)))
        >>> table = summary(mcmc)
        SGLDR: 10 particles in 1 ensemble, 10 updates of size 0.05 per draw, step-size bias at most ... % of a
        posterior sd.
        No problems found.
        >>> list(table.index)
        ['z[0]', 'z[1]']
    """
    import arviz

    if kwargs.get("fmt", "wide") != "wide":
        raise ValueError(
            f"`summary` puts the columns for ensembles into the wide table; got fmt={kwargs['fmt']!r}. For ArviZ's own "
            "call arviz.summary(to_inference_data(mcmc), fmt=...)."
        )
    data = data_of(run, "summary")
    posterior = data["posterior"]
    posterior = getattr(posterior, "dataset", posterior)
    if boolean("`exclude_diverged`", exclude_diverged):
        kwargs["coords"] = _kept(posterior, kwargs.get("coords") or {})
    is_sampler = posterior.attrs.get("is_sampler", "true") == "true"
    table = arviz.summary(data, **({"kind": "all" if is_sampler else "stats"} | kwargs))
    if is_sampler and kwargs.get("group", "posterior") == "posterior":
        variables = [_variable(label, posterior) for label in table.index]
        posterior = _part(posterior, variables, kwargs.get("coords") or {})
        _put_ensembles_in(table, variables, posterior, kwargs.get("round_to", 3))
    print(diagnosis_of(run, posterior))
    return table


def _kept(posterior, coords):
    """Return the coordinates to select, without the chains of particles that have left or stand still."""
    diverged = (
        posterior["diverged_chains"].values
        if "diverged_chains" in posterior.coords
        else np.zeros(posterior.sizes["chain"], bool)
    )
    if not diverged.any():
        return coords
    asked = posterior["chain"].sel(chain=coords["chain"]) if "chain" in coords else posterior["chain"]
    kept = set(posterior["chain"].values[~diverged].tolist())
    chosen = [chain for chain in np.atleast_1d(asked.values).tolist() if chain in kept]
    if not chosen:
        raise ValueError(
            "exclude_diverged=True leaves no particle: all of them have left or stand still. Run again with a shorter "
            "step."
        )
    return {**coords, "chain": chosen}


def _part(posterior, variables, coords):
    """Return the part of the posterior that the table covers."""
    posterior = posterior[list(dict.fromkeys(variables))]
    chosen = {name: x for name, x in coords.items() if name in posterior.dims}
    # A single chain or draw keeps its axis.
    posterior = posterior.sel(
        {name: [x] if name in ("chain", "draw") and np.isscalar(x) else x for name, x in chosen.items()}
    )
    if "chain" in coords:
        # Only some particles of each ensemble may be left; how many is unknown.
        posterior = posterior.assign_attrs(num_independent=1, num_ensembles=1)
    return posterior


def _put_ensembles_in(table, variables, posterior, round_to):
    """Replace the columns that presume independent chains by those for interacting particles."""
    present = [name for name in _OF_ENSEMBLES if name in getattr(table, "columns", ())]
    if not present or posterior.sizes["draw"] < 4:
        return
    columns = {name: _OF_ENSEMBLES[name](posterior) for name in present}
    ensembles = int(posterior.attrs["num_ensembles"])
    if "r_hat" in table and 1 < ensembles < posterior.sizes["chain"]:
        columns["nested_r_hat"] = nested_rhat(posterior)
    # ArviZ 1.x stores text with the significant digits; from 1.3 on it stores numbers, and text to show instead.
    is_text = table["mean" if "mean" in table else present[0]].dtype == object
    shown = getattr(table, "_fmt_map", None)
    for name, found in columns.items():
        values = np.concatenate([np.ravel(found[variable]) for variable in dict.fromkeys(variables)])
        digits = ".0f" if name.startswith("ess") else ".2f" if "r_hat" in name else ".2g"
        text = [f"{x:{digits}}" for x in values]
        if is_text:
            table[name] = text
        elif shown:
            table[name] = values
            shown[name] = dict(zip(table.index, text, strict=True))
        elif isinstance(round_to, int):
            table[name] = values.round(0 if name.startswith("ess") else round_to)
        else:
            table[name] = values
    # It is no bulk ESS of ArviZ.
    table.columns = ["ess_mean" if name == "ess_bulk" else name for name in table.columns]
    if shown and "ess_bulk" in shown:
        shown["ess_mean"] = shown.pop("ess_bulk")


def _variable(label, posterior):
    """Return the variable of a row of the table; names may contain brackets themselves."""
    return max((name for name in posterior if label == name or label.startswith(f"{name}[")), key=len)
