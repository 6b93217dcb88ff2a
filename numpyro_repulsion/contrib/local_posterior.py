"""Local posteriors: a handler that makes one of a model, and the learning coefficient of a run of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple
import warnings

import jax
from jax import random
import jax.numpy as jnp
import numpy as np

import numpyro
import numpyro.distributions as dist
from numpyro.distributions import biject_to, constraints
from numpyro.infer import MCMC
from numpyro.primitives import Messenger

from numpyro_repulsion.checks import integer, positive
from numpyro_repulsion.diagnostics import ensemble_ess, ensemble_mcse
from numpyro_repulsion.gradients import ModelTarget, compiled, influenced
from numpyro_repulsion.gradients.location_scale import base_support
from numpyro_repulsion.inference_data import map_draws, visible
from numpyro_repulsion.kernels.runs import bound_of, chosen_draws, coupling_of, kernel_of_run, latent_draws


class Localized(Messenger):
    r"""Turn the posterior of a model into the local posterior around given values, such as those of a trained network.

    The model with prior φ and observed sites of log likelihood ℓ then has the posterior

    .. math::
        \varphi(w)\, \exp\!\Big(\beta\, \ell(w) - \frac{\gamma}{2} \lVert z(w) - z(w^*) \rVert^2\Big)

    in which z are the unconstrained coordinates of the sites in ``center``, ``biject_to(support).inv`` of their values.
    The tether is one more factor of the model, named ``"tether"``, outside of all plates, so it counts once for any
    minibatch. The prior stays: where the tether alone is to hold the parameters, give them a wide one.

    It works with all kernels of this package and with those of NumPyro. ``init_strategy=init_around(center)`` starts
    particles near the center.

    :param fn: a model; without one the result is a decorator.
    :param center: w*, a dictionary of latent sites with values in their supports. Sites that it leaves out have no
        tether. The entries of a Flax module may be nested: ``{"net": {"Dense_0": {"kernel": ...}}}`` is the site
        ``"net/Dense_0.kernel"``.
    :param strength: γ, the precision of the tether, in units of the unconstrained coordinates: it alone would give each
        of them the standard deviation ``1 / sqrt(strength)``.
    :param inverse_temperature: β, the power of the likelihood: of each observed site, in addition to the weights that
        it has (the N / B of subsampled plates, ``numpyro.handlers.scale``). ``None`` is 1.
    :param factors: names of the ``numpyro.factor`` statements that belong to the likelihood, for β; ``()`` if none
        does.
    :raises TypeError: if ``center`` is not a dictionary of numbers.
    :raises ValueError: if ``strength`` or ``inverse_temperature`` is not positive, ``center`` is empty or not finite,
        or the model is localized already. When the model runs: for names that are no continuous latent sites; for
        values of the wrong shape, or outside the support; and, with ``inverse_temperature``, for a discrete latent
        site, and for factors if ``factors`` does not say which belong to the likelihood.

    **References:**

    1. *The Local Learning Coefficient: A Singularity-Aware Complexity Measure*, E. Lau, Z. Furman, G. Wang, D. Murfet
       and S. Wei, https://arxiv.org/abs/2308.12108

    **Example**

    .. doctest::

        >>> from jax import random
        >>> import jax.numpy as jnp
        >>> import numpyro
        >>> import numpyro.distributions as dist
        >>> from numpyro.infer import MCMC
        >>> from numpyro_repulsion import SGLD, init_around
        >>> from numpyro_repulsion.contrib import Localized

        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     numpyro.sample("y", dist.Normal(mu**2, 1), obs=y)  # has two modes

        >>> center = {"mu": 1.0}
        >>> local = Localized(model, center=center, strength=4.0)
        >>> mcmc = MCMC(SGLD(local, init_strategy=init_around(center)), num_warmup=100, num_samples=100, num_chains=10,
        ...             chain_method="vectorized", progress_bar=False)
        >>> mcmc.run(random.key(0), jnp.array([0.8, 1.1, 1.3, 0.9]))
        >>> bool(mcmc.get_samples()["mu"].mean() > 0.7)
        True
    """

    def __init__(
        self,
        fn: Callable | None = None,
        *,
        center: Mapping[str, Any],
        strength: float,
        inverse_temperature: float | None = None,
        factors: Iterable[str] | None = None,
    ):
        if isinstance(fn, Localized):
            raise ValueError("This model is localized already: give one Localized all of its sites in `center`.")
        if not isinstance(center, Mapping):
            raise TypeError(
                "Localized: `center` must be a dictionary of latent sites and their values, such as {'mu': 1.0}; got "
                f"{type(center).__name__}."
            )
        if isinstance(factors, str):
            raise TypeError(f"Localized: `factors` must be a list of names; got {factors!r}. Write [{factors!r}].")
        self.center = {name: _number(name, value) for name, value in _by_site(center)}
        if not self.center:
            raise ValueError("Localized: `center` is empty; give it a value for each latent site of the model.")
        self.strength = positive("Localized: `strength`", strength)
        if inverse_temperature is not None:
            inverse_temperature = positive("Localized: `inverse_temperature`", inverse_temperature)
        self.inverse_temperature = inverse_temperature
        self.factors = None if factors is None else tuple(factors)
        self._forget()
        super().__init__(fn)

    def _forget(self):
        #: What one run of the model shows: supports of latent sites, values in `center`, and factors.
        self._latent: dict[str, Any] = {}
        self._values: dict[str, Any] = {}
        self._found: set[str] = set()

    def __call__(self, *args, **kwargs):
        if self.fn is not None:
            return super().__call__(*args, **kwargs)
        if len(args) != 1 or kwargs or not callable(args[0]):
            raise TypeError("Localized(center=..., strength=...) has no model yet, and must be called with one.")
        names = ("center", "strength", "inverse_temperature", "factors")
        return Localized(args[0], **{name: getattr(self, name) for name in names})

    def __enter__(self):
        self._forget()
        super().__enter__()

    def __exit__(self, exc_type, exc_value, traceback):
        super().__exit__(exc_type, exc_value, traceback)
        latent, values, found = self._latent, self._values, self._found
        self._forget()
        if exc_type is not None:
            return
        if unknown := [name for name in self.center if name not in values]:
            raise ValueError(
                f"Localized: `center` names {unknown}, which are not latent sites of the model. It has "
                f"{sorted(latent)}: leave the others out."
            )
        if unknown := [name for name in self.factors or () if name not in found]:
            raise ValueError(
                f"Localized: `factors` names {unknown}, and the model has "
                f"{f'the factors {sorted(found)}' if found else 'no factors'}."
            )
        distance = [self._distance(name, latent[name], value) for name, value in values.items()]
        tether = dist.Unit(-0.5 * self.strength * sum(distance))
        # A factor, with a mark that it belongs to the prior.
        numpyro.sample("tether", tether, obs=tether.sample(None), infer={"is_auxiliary": True, "is_prior": True})

    def process_message(self, msg):
        if msg["type"] != "sample":
            return
        name = msg["name"]
        if not msg["is_observed"]:
            self._check_latent(name, msg["fn"])
            # Its support is kept from here, because handlers outside may replace the site by others.
            self._latent[name] = msg["fn"].support
            return
        is_likelihood = not msg["infer"].get("is_auxiliary", False) or self._is_likelihood(name)
        if is_likelihood and self.inverse_temperature is not None:
            weight = self.inverse_temperature
            msg["scale"] = weight if msg["scale"] is None else weight * msg["scale"]
            # The user's dictionary stays as it is.
            msg["infer"] = msg["infer"] | {"inverse_temperature": weight}

    def postprocess_message(self, msg):
        name = msg.get("name")
        if name in self.center and name in self._latent and msg["type"] in ("sample", "deterministic"):
            self._values[name] = msg["value"]

    def _check_latent(self, name, fn):
        if not fn.support.is_discrete:
            return
        if name in self.center:
            raise ValueError(
                f"Localized: the latent site '{name}' is discrete and has no unconstrained coordinates: leave it out "
                "of `center`."
            )
        if self.inverse_temperature is not None:
            raise ValueError(
                f"Localized: the discrete latent site '{name}' is summed over, and a power of the sum is not the sum "
                "of powers. Marginalize it by hand (numpyro.distributions.MixtureSameFamily), or drop "
                "`inverse_temperature`."
            )

    def _is_likelihood(self, name):
        """Return whether a factor belongs to the likelihood; raise ``ValueError`` if that is unknown and matters."""
        # NumPyro adds factors for the volumes of transforms, with all handlers inside it at work.
        if any(name.endswith(f"_{latent}_log_det") for latent in self._latent):
            return False
        self._found.add(name)
        if self.factors is None and self.inverse_temperature is not None:
            raise ValueError(
                f"Localized: the factor '{name}' of the model may belong to the likelihood, which "
                f"`inverse_temperature` weights, or to the prior. Write factors=[{name!r}] or factors=[]."
            )
        return name in (self.factors or ())

    def _distance(self, name, support, value):
        """Return the squared distance of a site from its center, in unconstrained coordinates."""
        center, shape = self.center[name], jnp.shape(value)
        if center.shape != shape:
            raise ValueError(
                f"Localized: the latent site '{name}' has the shape {shape}, and its value in `center` has "
                f"{center.shape}. Give each entry its value, such as jnp.full({shape}, 0.5)."
            )
        center = np.asarray(center, jnp.result_type(value))
        if not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(support)):
            with jax.ensure_compile_time_eval():
                if not np.all(support(jnp.asarray(center))):
                    raise ValueError(
                        f"Localized: the value of '{name}' in `center` lies outside the site's support, {support}. "
                        "Give the constrained value, as the model uses it."
                    )
        if base_support(support) is not constraints.real:
            transform = biject_to(support)
            value, center = transform.inv(value), transform.inv(jnp.asarray(center))
        return jnp.sum(jnp.square(value - center))


def _by_site(values: Mapping, inside: str = "") -> Iterator[tuple[str, Any]]:
    """Yield sites and values; entries of nested dictionaries under the names that NumPyro gives them in a module."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _by_site(value, f"{inside}{name}{'.' if inside else '/'}")
        else:
            yield f"{inside}{name}", value


def _number(name, value):
    try:
        array = np.asarray(value)
        is_number = jnp.issubdtype(array.dtype, jnp.floating) or jnp.issubdtype(array.dtype, jnp.integer)
    except (TypeError, ValueError):
        is_number = False
    if not is_number:
        raise TypeError(f"Localized: the value of {name!r} in `center` must be an array of numbers; got {value!r}.")
    if not np.isfinite(array).all():
        raise ValueError(f"Localized: the value of {name!r} in `center` has entries that are not finite.")
    return array


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
        LearningCoefficient(2.04 ± 0.051; n = 500, β = 0.161, ESS 812)
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
        worth = f"ESS {self.ess:.0f}" if np.isfinite(self.ess) else f"{self.num_draws} draws"
        return (
            f"LearningCoefficient({self.value:.3g} {error}; n = {self.n}, β = {self.inverse_temperature:.3g}, {worth})"
        )


def llc(mcmc: MCMC, *, num_draws: int = 4000) -> LearningCoefficient:
    r"""Return the local learning coefficient of a model at the center of a run of its local posterior.

    .. math::
        \hat\lambda = \beta \big( \mathbb E[n L_n(w)] - n L_n(w^*) \big), \qquad
        n L_n(w) = -\sum_{i=1}^n \log p(y_i \mid x_i, w),

    with the mean over the draws of a run of ``Localized(model, center=w*, strength=γ, inverse_temperature=β)``. Twice
    λ̂ is an effective number of parameters: d for a regular model with d parameters, and less where directions do not
    change the likelihood. Losses are those of all rows, whatever minibatches the run used, relative to the center entry
    by entry, so that single precision suffices.

    The usual choice is ``β = 1 / log(n)``. The center should be a minimum of the loss: trained to the end, without
    early stopping. Prior and tether hold parameters that the data leave free, so narrow ones lower λ̂: a wide prior and
    a few strengths show by how much. It also differs from the learning coefficient by terms of order ``1 / log(n)``.

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
    local: Any = kernel.model
    target: Any = bound_of(mcmc).target
    _check_localized(local, target)
    if kernel.dynamics.temperature != 1:
        raise ValueError(
            f"The dynamics has temperature={kernel.dynamics.temperature}, which tempers the tether as well as the "
            "likelihood. Use a dynamics of temperature 1; Localized(..., inverse_temperature=...) tempers the "
            "likelihood alone."
        )
    center = {name: jnp.asarray(x, target.prototype[name].dtype) for name, x in local.center.items()}
    try:
        at_center = compiled(_terms, target)(center)
        is_random = target.is_random and any(influenced(partial(_terms, target, center), random.key(0)))
    except (TypeError, ValueError) as failure:
        raise ValueError(f"The likelihood over all rows is unknown: {failure}") from failure
    if is_random:
        raise ValueError("The likelihood is random (numpyro.prng_key), so the loss of a draw is unknown.")
    loss_at_center = -sum(np.asarray(density, np.float64).sum() for density, _ in at_center.values())
    if not np.isfinite(loss_at_center):
        raise ValueError(f"The loss at the center is {loss_at_center}. Choose a center with a positive likelihood.")

    def excess(target, values):
        found = _terms(target, values)
        return {"loss": sum(jnp.sum(at_center[name][0] - found[name][0]) for name in at_center)}

    draws = latent_draws(target, chosen_draws(mcmc, num_draws, by_chain=True), "The losses need")
    found = map_draws(excess, target, draws, "The loss", "Lower `num_draws`")
    losses = np.asarray(found["loss"], np.float64)
    if not np.isfinite(losses).all():
        bad = np.flatnonzero(~np.isfinite(losses).all(1))
        raise ValueError(
            f"The loss is not finite for draws of the particles {bad.tolist()}, so its mean is undefined. Look at "
            "diagnose(mcmc), and run again with a smaller step size."
        )
    beta = local.inverse_temperature
    _, parts = coupling_of(mcmc)
    mean, error = float(losses.mean()), float(ensemble_mcse(losses, parts))
    if mean < -2.0 * np.nan_to_num(error):
        warnings.warn(
            f"The center is not a minimum of the loss: the draws' mean loss is lower by {-mean:.3g}. The local "
            "learning coefficient is negative, so the estimate is not meaningful. Train until the loss no longer "
            "falls, and run again at the new center.",
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


def _check_localized(model, target):
    if not isinstance(model, Localized) or not isinstance(target, ModelTarget):
        raise ValueError(
            "llc needs a run of the local posterior: SGLD(Localized(model, center=..., strength=1.0, "
            "inverse_temperature=1 / math.log(n))), with Localized around any other handlers."
        )
    if model.inverse_temperature is None:
        raise ValueError(
            "This run does not temper the likelihood. Use Localized(..., inverse_temperature=1 / math.log(n)), the "
            "usual choice for n observations."
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


def _terms(target, values, key=None):
    """Return for the tempered sites over all rows the log likelihood of each entry, without the temperature, and the
    number of entries that no mask hides; random likelihoods use the ``key``."""
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
