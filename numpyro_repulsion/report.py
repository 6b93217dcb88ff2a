"""What to think of a run: ArviZ's summary with the numbers of ensembles, and a sentence. ArviZ comes when called."""

from __future__ import annotations

from functools import partial

import numpy as np

from numpyro.infer import MCMC

from numpyro_repulsion.bias import predict_bias
from numpyro_repulsion.diagnostics import MODES, SHORT, ensemble_ess, ensemble_mcse, nested_rhat, why_unknown
from numpyro_repulsion.inference_data import to_inference_data

__all__ = ["summary"]

#: R-hat above which `summary` says that the particles have not mixed.
MAX_R_HAT = 1.1
#: Inflation of variances by a given step above which `summary` asks for a shorter one; what `BiasBudget` allows.
MAX_BIAS = 0.05
#: Share of updates that were held or had their gradients cut above which nothing is known of the bias.
MAX_FLAGGED = 1e-3
#: Columns of ArviZ's summary that presume independent chains, and what they are for interacting particles.
_OF_ENSEMBLES = {
    "mcse_mean": ensemble_mcse,
    "mcse_sd": partial(ensemble_mcse, method="sd"),
    "ess_bulk": ensemble_ess,
    "ess_tail": partial(ensemble_ess, method="tail"),
}


def summary(run, **kwargs):
    """ArviZ's summary of a run, with a line that says what was run and whether something went wrong.

    Effective sample sizes and standard errors are those of ensembles of particles that interact,
    :func:`~numpyro_repulsion.ensemble_ess` and :func:`~numpyro_repulsion.ensemble_mcse`, where ArviZ has those of
    independent chains. ``r_hat`` is that of particles; runs of several ensembles have a column ``nested_r_hat`` too.
    The line names the bias that the step size is expected to cause, with a remedy where it is too large: see
    :func:`~numpyro_repulsion.step_bias`. Of a step that was given it is known only where ``run`` is an ``MCMC``.

    For an optimizer of the cloud (:class:`~numpyro_repulsion.SVGD`) it describes the last cloud, and leaves out what
    only draws have.

    :param run: an ``MCMC`` that has run with a kernel of this package, or what :func:`to_inference_data` made of it.
    :param kwargs: passed to ``arviz.summary``.
    :return: a pandas DataFrame.
    :raises TypeError: for a ``run`` of another kind.
    :raises ValueError: before the run or for draws of warmup, and for a ``fmt`` other than ``"wide"``.

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
        SGLDR: 10 particles in 1 ensemble, 10 updates of size 0.05 per draw. No update was held as diverging. Step-size
        bias: at most about ... % of a posterior sd.
        >>> list(table.index)
        ['z[0]', 'z[1]']
    """
    import arviz

    if kwargs.get("fmt", "wide") != "wide":
        raise ValueError(
            f"`summary` puts the numbers of ensembles into the wide table; got fmt={kwargs['fmt']!r}. For ArviZ's own "
            "call arviz.summary(to_inference_data(mcmc), fmt=...)."
        )
    data = to_inference_data(run) if isinstance(run, MCMC) else run
    if isinstance(run, MCMC) and "warmup_posterior" in data:
        raise ValueError("This MCMC holds only the draws of warmup; call mcmc.run(key, ...) first.")
    attributes = data["posterior"].attrs
    if attributes.get("inference_library") != "numpyro_repulsion":
        raise TypeError(f"`summary` takes an MCMC run or the result of to_inference_data; got {type(run).__name__}.")
    is_sampler = attributes["is_sampler"] == "true"
    reasons = np.array([])
    table = arviz.summary(data, **({"kind": "all" if is_sampler else "stats"} | kwargs))
    if is_sampler:
        reasons = _put_ensembles_in(table, data["posterior"], kwargs.get("coords"), kwargs.get("round_to", 3))
    print(_sentence(attributes, table, _bias(run, attributes) if is_sampler else None, reasons))
    return table


def _bias(run, attributes):
    """The relative inflation of variances by the step, and what gradient noise has of it; None where unknown."""
    is_other = attributes.get("other_data") == "true"
    if attributes["step_size_measured"] == "true" and not is_other:
        return float(attributes["step_size_bias"]), None
    return predict_bias(run, is_other) if isinstance(run, MCMC) else None


def _put_ensembles_in(table, posterior, coords, round_to):
    """The columns that presume independent chains replaced by those for interacting particles.

    :return: why there is no figure, for each row.
    """
    nothing = np.array([])
    present = [name for name in _OF_ENSEMBLES if name in getattr(table, "columns", ())]
    if not present:
        return nothing
    posterior = getattr(posterior, "dataset", posterior)
    variables = [_variable(label, posterior) for label in table.index]
    posterior = posterior[list(dict.fromkeys(variables))]
    if coords:
        chosen = {name: x for name, x in coords.items() if name in posterior.dims}
        # A single chain or draw keeps its axis.
        posterior = posterior.sel(
            {name: [x] if name in ("chain", "draw") and np.isscalar(x) else x for name, x in chosen.items()}
        )
    if posterior.sizes["draw"] < 4:
        return nothing
    if "chain" in (coords or {}):
        # Some particles of an ensemble; which are left of the others is not known.
        posterior = posterior.assign_attrs(num_independent=1, num_ensembles=1)
    columns = {name: _OF_ENSEMBLES[name](posterior) for name in present}
    ensembles = int(posterior.attrs["num_ensembles"])
    if "r_hat" in table and 1 < ensembles < posterior.sizes["chain"]:
        columns["nested_r_hat"] = nested_rhat(posterior)
    # ArviZ 1.x keeps text, with the digits that matter; from 1.3 on beside the numbers, and shows it in their place.
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
    return np.concatenate([np.ravel(x) for x in why_unknown(posterior).values()])


def _variable(label, posterior):
    """Which variable a row of the table is of: names may have brackets of their own."""
    return max((name for name in posterior if label == name or label.startswith(f"{name}[")), key=len)


def _of_bias(bias, attributes):
    """What the step size does to the posterior, in words."""
    inflation, noise = bias
    if np.isnan(inflation):
        return ""
    if _flagged(attributes) > MAX_FLAGGED and (noise is None or inflation <= MAX_BIAS):
        return " Step-size bias: unknown where so many updates are held or cut."
    sd = 100.0 * (np.sqrt(1.0 + inflation) - 1.0)
    if noise is None or inflation <= MAX_BIAS:
        # Of a measured step that is too long warmup has complained.
        return f" Step-size bias: at most about {sd:.1f} % of a posterior sd."
    measured = attributes["step_size_measured"] == "true"
    cure = attributes["remedy"] if measured or inflation > 4 * MAX_BIAS else "halve `step_size`"
    if noise > inflation / 2 and attributes.get("other_data") != "true":
        cure = f"enlarge the minibatch (`subsample_size`), use gradient=ControlVariates(), or {cure}"
    size = (
        f"up to about {sd:.0f} % of a posterior sd"
        if sd < 100.0
        else "more than a posterior sd, if it is stable at all"
    )
    return f" Step-size bias: {size}, most of it by {'minibatches' if noise > inflation / 2 else 'curvature'}: {cure}."


def _flagged(attributes):
    """The share of updates that were held or had their gradients cut; unknown, so none, in data of older versions."""
    return float(attributes.get("share_flagged", 0.0))


def _sentence(attributes, table, bias, reasons):
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
    if bias is not None:
        text += _of_bias(bias, attributes)
    if attributes["complaints"]:
        text += f" {attributes['complaints']}"
    stay = int(np.sum(reasons == MODES))
    if "r_hat" in table and (worst := float(np.nanmax(np.asarray(table["r_hat"], float), initial=1.0))) > MAX_R_HAT:
        text += f" R-hat is {worst:.2f} for {table['r_hat'].astype(float).idxmax()}: the particles have not mixed."
        if not stay:
            text += " Raise `num_steps` or `num_warmup`, or rescale or reparameterize the model."
    if stay:
        text += (
            f" For {stay} of {len(reasons)} quantities particles move, but stay apart from each other, as in separate "
            "modes or with exchangeable labels, so no effective sample size or standard error is known: order the "
            "labels, or let particles jump (moves=Archive())."
        )
    if short := int(np.sum(reasons == SHORT)):
        text += (
            f" For {short} of {len(reasons)} quantities the run is short beside the time in which particles mix, so no "
            "effective sample size or standard error is known: raise num_samples or `num_steps`."
        )
    if attributes["is_sampler"] != "true":
        text += (
            f" An optimizer, not a sampler: this describes its last cloud of {count} points, whose spread is smaller "
            "than the posterior's."
        )
    return text
