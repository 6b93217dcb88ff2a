"""A handler that turns the posterior of a model into the local posterior around given values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import numpyro
import numpyro.distributions as dist
from numpyro.distributions import biject_to, constraints
from numpyro.primitives import Messenger

from numpyro_repulsion.checks import positive
from numpyro_repulsion.gradients.location_scale import base_support

#: The name of the factor that holds parameters near a center. It belongs to the prior.
TETHER = "tether"


class Localized(Messenger):
    r"""Turn the posterior of a model into the local posterior around given values, such as those of a trained network.

    The model with prior φ and observed sites of log likelihood ℓ then has the posterior

    .. math::
        \varphi(w)\, \exp\!\Big(\beta\, \ell(w) - \frac{\gamma}{2} \lVert z(w) - z(w^*) \rVert^2\Big)

    in which z are the unconstrained coordinates of the sites in ``center``: for sites of real numbers the sites
    themselves, for others ``biject_to(support).inv`` of their values. The tether is one more factor of the model, named
    ``"tether"``, outside of all plates, so it counts once for any minibatch. The prior stays: where the tether alone is
    to hold the parameters, give them a wide one.

    It works with all kernels of this package and with those of NumPyro. Particles start where ``init_strategy`` puts
    them, by default at draws from the prior: ``init_around(center)`` starts them near the center.

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
            raise ValueError("Localized: `center` names no site; give it a value for each latent site of the model.")
        self.strength = positive("Localized: `strength`", strength)
        self.inverse_temperature = (
            None if inverse_temperature is None else positive("Localized: `inverse_temperature`", inverse_temperature)
        )
        self.factors = None if factors is None else tuple(factors)
        self._forget()
        super().__init__(fn)

    def _forget(self):
        """Forget what one run of the model has shown: its latent sites, values of those in `center`, and factors."""
        self._latent: dict[str, Any] = {}
        self._values: dict[str, Any] = {}
        self._found: set[str] = set()

    def __call__(self, *args, **kwargs):
        if self.fn is not None:
            return super().__call__(*args, **kwargs)
        if len(args) != 1 or kwargs or not callable(args[0]):
            raise TypeError("Localized(center=..., strength=...) has no model yet, and must be called with one.")
        return Localized(
            args[0],
            center=self.center,
            strength=self.strength,
            inverse_temperature=self.inverse_temperature,
            factors=self.factors,
        )

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
                f"Localized: `center` names {unknown}, which are no latent sites of the model. It has "
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
        numpyro.sample(TETHER, tether, obs=tether.sample(None), infer={"is_auxiliary": True, "is_prior": True})

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
            self._temper(msg)

    def postprocess_message(self, msg):
        name = msg.get("name")
        if name in self.center and name in self._latent and msg["type"] in ("sample", "deterministic"):
            self._values[name] = msg["value"]

    def _check_latent(self, name, fn):
        """Raise ``ValueError`` for discrete sites that have no place in a local posterior."""
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
        """Return whether a factor of the model belongs to the likelihood.

        :raises ValueError: if that is unknown and matters.
        """
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

    def _temper(self, msg):
        """Multiply the log density of a site by β."""
        weight = self.inverse_temperature
        msg["scale"] = weight if msg["scale"] is None else weight * msg["scale"]
        # The user's dictionary stays as it is.
        msg["infer"] = msg["infer"] | {"inverse_temperature": weight}

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
                        "Give the value that the model has, not the unconstrained one."
                    )
        if base_support(support) is not constraints.real:
            transform = biject_to(support)
            value, center = transform.inv(value), transform.inv(jnp.asarray(center))
        return jnp.sum(jnp.square(value - center))


def _by_site(values: Mapping) -> Iterator[tuple[str, Any]]:
    """Yield sites and values; entries of nested dictionaries under the names that NumPyro gives them in a module."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            for path, leaf in _paths(value):
                yield f"{name}/{'.'.join(path)}", leaf
        else:
            yield name, value


def _paths(values):
    for name, value in values.items():
        for path, leaf in _paths(value) if isinstance(value, Mapping) else [((), value)]:
            yield (str(name), *path), leaf


def _number(name, value):
    """Return a value of the center as a NumPy array."""
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
