"""The local learning coefficient: how many directions the data determine around given parameters."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple
import warnings

from jax import random
import jax.numpy as jnp
import numpy as np

from numpyro.infer import MCMC

from numpyro_repulsion.checks import integer
from numpyro_repulsion.contrib.localized import Localized
from numpyro_repulsion.diagnostics import ensemble_ess, ensemble_mcse
from numpyro_repulsion.gradients import ModelTarget, compiled, influenced
from numpyro_repulsion.inference_data import map_draws, visible
from numpyro_repulsion.kernels import bound_of, chosen_draws, coupling_of, kernel_of_run, latent_draws

__all__ = ["LearningCoefficient", "llc"]

#: A mean loss below that of the center by more standard errors is no chance.
ERRORS = 2.0


class LearningCoefficient(NamedTuple):
    """An estimate of the local learning coefficient.

    - **value** - λ̂ = β (E[n L(w)] − n L(w*)).
    - **mcse** - its Monte Carlo standard error; NaN where the draws do not determine it, as for
      :func:`~numpyro_repulsion.ensemble_mcse`. It does not include the bias of a step size, nor that of finite n.
    - **ess** - the number of independent draws that the draws are worth for the mean loss.
    - **n** - the number of terms of the log likelihood: of entries of the observed sites over all rows that no mask
      hides, where an event of several numbers is one.
    - **inverse_temperature** - β.
    - **loss** - E[n L(w)], the mean of the negative log likelihood over the draws.
    - **loss_at_center** - n L(w*).
    - **num_draws** - the number of draws used.

    **Example**

    .. doctest::

        >>> from numpyro_repulsion.contrib import LearningCoefficient
        >>> LearningCoefficient(2.04, 0.051, 812.0, 500, 0.161, 712.9, 700.2, 4000)
        LearningCoefficient(2.04 ± 0.051; n = 500, β = 0.161, 812 effective draws)
    """

    value: float
    mcse: float
    ess: float
    n: int
    inverse_temperature: float
    loss: float
    loss_at_center: float
    num_draws: int

    def __repr__(self):
        error = f"± {self.mcse:.2g}" if np.isfinite(self.mcse) else "± an unknown error"
        worth = f"{self.ess:.0f} effective draws" if np.isfinite(self.ess) else f"{self.num_draws} draws"
        return (
            f"LearningCoefficient({self.value:.3g} {error}; n = {self.n}, β = {self.inverse_temperature:.3g}, {worth})"
        )


def llc(mcmc: MCMC, *, num_draws: int = 4000) -> LearningCoefficient:
    r"""Return the local learning coefficient of a model at the center of a run of its local posterior.

    .. math::
        \hat\lambda = \beta \big( \mathbb E[n L_n(w)] - n L_n(w^*) \big), \qquad
        n L_n(w) = -\sum_{i=1}^n \log p(y_i \mid x_i, w),

    with the mean over the draws of a run of ``Localized(model, center=w*, strength=γ, inverse_temperature=β)``. Center,
    β and data are those of the run. Twice λ̂ is an effective number of parameters: d/2 for a regular model with d
    parameters, and less where directions do not change the likelihood. Losses are those of all rows, whatever
    minibatches the run used, relative to the center entry by entry, so that single precision suffices.

    The usual choice is ``β = 1 / log(n)``. The center should be a minimum of the loss: trained to the end, without
    early stopping. Both the prior and the tether hold parameters that the data leave free, so λ̂ falls if they are
    narrow; a wide prior and a few strengths show how much. Even without Monte Carlo error λ̂ differs from the learning
    coefficient by terms that vanish like ``1 / log(n)``.

    :param mcmc: an ``MCMC`` that has run with a kernel of this package and a model that is :class:`Localized` at values
        of all its latent sites, with an ``inverse_temperature``.
    :param num_draws: most draws to use, in whole iterations at equal distances; each costs one pass over all rows.
    :return: the estimate, its standard error, and what it was computed from.
    :raises TypeError: if ``mcmc`` is not an ``MCMC`` with a kernel of this package.
    :raises ValueError: before the run; for a model that is not :class:`Localized`, or not at all latent sites, or
        without an inverse temperature; for an optimizer (SVGD), a kernel of another temperature, or draws of warmup;
        if the run left out latent sites; if the likelihood over all rows is unknown, as it is for random likelihoods
        and sites scaled by hand for minibatches of one size; and if losses are not finite.
    :warns UserWarning: if the center is no minimum, because the mean loss is lower.

    **References:**

    1. *The Local Learning Coefficient: A Singularity-Aware Complexity Measure*, E. Lau, Z. Furman, G. Wang, D. Murfet
       and S. Wei, https://arxiv.org/abs/2308.12108
    2. *A Widely Applicable Bayesian Information Criterion*, S. Watanabe, Journal of Machine Learning Research 14 (2013)

    **Example**

    .. doctest::

        >>> from jax import random
        >>> import jax.numpy as jnp
        >>> import numpyro
        >>> import numpyro.distributions as dist
        >>> from numpyro.infer import MCMC
        >>> from numpyro_repulsion import SGLD, init_around
        >>> from numpyro_repulsion.contrib import Localized, llc

        >>> def model(x, y):
        ...     a = numpyro.sample("a", dist.Normal(0, 10))
        ...     b = numpyro.sample("b", dist.Normal(0, 10))
        ...     with numpyro.plate("rows", len(y), subsample_size=50) as i:
        ...         numpyro.sample("y", dist.Normal((a + b) * x[i], 1), obs=y[i])  # of two parameters, one counts

        >>> x = random.normal(random.key(0), (1000,))
        >>> center = {"a": 1.0, "b": 2.0}
        >>> local = Localized(model, center=center, strength=1.0, inverse_temperature=1 / jnp.log(1000))
        >>> mcmc = MCMC(SGLD(local, init_strategy=init_around(center)), num_warmup=200, num_samples=200, num_chains=10,
        ...             chain_method="vectorized", progress_bar=False)
        >>> mcmc.run(random.key(1), x, 3.0 * x)
        >>> bool(0.4 < llc(mcmc).value < 0.6)
        True
    """
    kernel = kernel_of_run(mcmc, "llc")
    num_draws = integer("`num_draws`", num_draws)
    local, target = _localized(kernel.model, bound_of(mcmc).target)
    if kernel.dynamics.temperature != 1:
        raise ValueError(
            f"The dynamics has temperature={kernel.dynamics.temperature}, which tempers the tether as well as the "
            "likelihood. Use a dynamics of temperature 1; Localized(..., inverse_temperature=...) tempers the "
            "likelihood alone."
        )
    center = {name: jnp.asarray(x, target.prototype[name].dtype) for name, x in local.center.items()}
    try:
        at_center = compiled(_terms, target)(center)
        is_random = target.is_random and any(influenced(partial(_listed, target, center), random.key(0)))
    except (TypeError, ValueError) as failure:
        raise ValueError(f"The likelihood over all rows is unknown: {failure}") from failure
    if is_random:
        raise ValueError("The likelihood is random (numpyro.prng_key), so the loss of a draw is unknown.")
    loss_at_center = -sum(np.asarray(density, np.float64).sum() for density, _ in at_center.values())
    if not np.isfinite(loss_at_center):
        raise ValueError(f"The loss at the center is {loss_at_center}: the center has no likelihood.")

    def excess(target, values):
        found = _terms(target, values)
        return {"loss": sum(jnp.sum(at_center[name][0] - found[name][0]) for name in at_center)}

    draws = latent_draws(target, chosen_draws(mcmc, num_draws, by_chain=True), "The losses need")
    found = map_draws(excess, target, draws, "The loss", "Lower `num_draws`")
    losses = np.asarray(found["loss"], np.float64)
    if not np.isfinite(losses).all():
        bad = np.flatnonzero(~np.isfinite(losses).all(1))
        raise ValueError(
            f"The loss is not finite for draws of the particles {bad.tolist()}: no mean is known. Look at "
            "diagnose(mcmc), and run again with a shorter step."
        )
    beta = local.inverse_temperature
    _, parts = coupling_of(mcmc)
    mean, error = float(losses.mean()), float(ensemble_mcse(losses, parts))
    if mean < -ERRORS * (error if np.isfinite(error) else 0.0):
        warnings.warn(
            f"The center is no minimum of the loss: the draws' mean loss is lower by {-mean:.3g}, so the local "
            "learning coefficient is negative and means nothing. Train on until the loss no longer falls, and run "
            "again at the new center.",
            stacklevel=2,
        )
    return LearningCoefficient(
        value=beta * mean,
        mcse=beta * error,
        ess=float(ensemble_ess(losses, parts, method="mean")),
        n=int(sum(count for _, count in at_center.values())),
        inverse_temperature=beta,
        loss=loss_at_center + mean,
        loss_at_center=float(loss_at_center),
        num_draws=losses.size,
    )


def _localized(model, target):
    """Return the model of a run as one that is localized at all of its sites, and its posterior.

    :raises ValueError: for others.
    """
    if not isinstance(model, Localized) or not isinstance(target, ModelTarget):
        raise ValueError(
            "llc needs a run of the local posterior: SGLD(Localized(model, center=..., strength=1.0, "
            "inverse_temperature=1 / math.log(n))), with Localized around any other handlers."
        )
    if model.inverse_temperature is None:
        raise ValueError(
            "This run has the likelihood at its own temperature. Localized(..., inverse_temperature=1 / math.log(n)) "
            "is the usual choice for n observations."
        )
    if missing := [name for name in target.latent if name not in model.center]:
        raise ValueError(
            f"The loss at the center needs a value of each latent site, and `center` of Localized has none for "
            f"{missing}."
        )
    if target.rows_outside:
        raise ValueError(
            f"The sites {sorted(target.rows_outside)} use rows of subsampled plates outside of these plates, scaled by "
            "hand for minibatches of `subsample_size` rows, so the likelihood over all rows is unknown. Put them into "
            "the plates."
        )
    return model, target


def _terms(target, values, key=None):
    """Return for the tempered sites over all rows the log likelihood of each entry, without the temperature, and the
    number of entries that no mask hides.

    :param key: what random likelihoods use, and modules that draw initial values, which have no effect.
    :raises ValueError: if there are no such sites.
    """
    found = {}
    for name, site in target.sites(values, key).items():
        if site["type"] == "sample" and "inverse_temperature" in site["infer"]:
            weight = site["scale"] / site["infer"]["inverse_temperature"]
            density = weight * jnp.asarray(site["fn"].log_prob(site["value"]))
            seen = visible(site["fn"], site["value"])
            found[name] = density, density.size if seen is None else seen.sum()
    if not found:
        raise ValueError("the model observes nothing.")
    return found


def _listed(target, values, key):
    return [density for density, _ in _terms(target, values, key).values()]
