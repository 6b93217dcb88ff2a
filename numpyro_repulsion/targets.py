"""Models with known answers, for tests, benchmarks and first experiments.

They are ordinary NumPyro models. A model without data *is* its target: :func:`draw` returns exact draws from it and
:func:`moments` its exact means and variances. For a model with data, :func:`draw` returns parameters together with
simulated data; given these data, the parameters are one exact draw from the posterior.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
import itertools
from typing import Any

import jax
from jax import random
import jax.numpy as jnp
from numpy.typing import ArrayLike

import numpyro
import numpyro.distributions as dist
from numpyro.handlers import seed, trace

__all__ = [
    "bayesian_neural_network",
    "draw",
    "exponential_mixture",
    "gaussian",
    "gaussian_mixture",
    "logistic_regression",
    "moments",
    "relu_network",
]


def gaussian(mean: ArrayLike = (0.0, 0.0), covariance: ArrayLike | None = None) -> None:
    r"""A Gaussian, :math:`z \sim N(\mu, \Sigma)`; by default N(0, I₂), from the paper's Section 3.1.

    :param mean: μ, of shape ``(d,)``.
    :param covariance: Σ, of shape ``(d, d)``; ``None`` is the identity.

    **References:**

    1. *Stochastic Gradient MCMC with Repulsive Forces*, V. Gallego and D. Ríos Insua,
       https://arxiv.org/abs/1812.00071

    **Example**

    .. doctest::

        >>> from numpyro_repulsion.targets import gaussian, moments
        >>> mean, variance = moments(gaussian, (3.0, 3.0))["z"]
        >>> mean.tolist(), variance.tolist()
        ([3.0, 3.0], [1.0, 1.0])
    """
    mean = jnp.asarray(mean)
    if covariance is None:
        numpyro.sample("z", dist.Normal(mean, 1.0).to_event(1))
    else:
        numpyro.sample("z", dist.MultivariateNormal(mean, jnp.asarray(covariance)))


def exponential_mixture(rates: ArrayLike = (1.5, 0.5), weights: ArrayLike = (1 / 3, 2 / 3)) -> None:
    r"""The paper's mixture of exponentials, :math:`\pi(z) = \sum_k w_k \lambda_k e^{-\lambda_k z}` on ``z > 0``.

    Particles move in ``log z``; NumPyro supplies the transform and its Jacobian. By default ``E z = 14/9`` and
    ``E z² = 152/27``.

    :param rates: the λ.
    :param weights: the w, which sum to 1.

    **References:**

    1. *Stochastic Gradient MCMC with Repulsive Forces*, V. Gallego and D. Ríos Insua,
       https://arxiv.org/abs/1812.00071

    **Example**

    .. doctest::

        >>> from numpyro_repulsion.targets import exponential_mixture, moments
        >>> mean, variance = moments(exponential_mixture)["z"]
        >>> f"{mean:.4f} {variance + mean**2:.4f}"
        '1.5556 5.6296'
    """
    component = dist.Categorical(probs=jnp.asarray(weights))
    numpyro.sample("z", dist.MixtureSameFamily(component, dist.Exponential(jnp.asarray(rates))))


def gaussian_mixture(ticks: Iterable[float] = (-2.0, 0.0, 2.0), variance: float = 0.1) -> None:
    r"""The paper's 3 × 3 grid of equally likely Gaussians in the plane, each :math:`N(c, 0.1\, I_2)`.

    :param ticks: the centers are all pairs of these values.
    :param variance: the variance of each Gaussian in each direction.

    **References:**

    1. *Stochastic Gradient MCMC with Repulsive Forces*, V. Gallego and D. Ríos Insua,
       https://arxiv.org/abs/1812.00071

    **Example**

    .. doctest::

        >>> from numpyro_repulsion.targets import gaussian_mixture, moments
        >>> mean, variance = moments(gaussian_mixture)["z"]
        >>> [f"{v:.4f}" for v in variance]  # 8/3 between the centers, 0.1 within
        ['2.7667', '2.7667']
    """
    centers = jnp.array(list(itertools.product(ticks, repeat=2)))
    component = dist.Categorical(probs=jnp.full(len(centers), 1 / len(centers)))
    numpyro.sample("z", dist.MixtureSameFamily(component, dist.Normal(centers, variance**0.5).to_event(1)))


def logistic_regression(
    X: ArrayLike, y: ArrayLike | None = None, subsample_size: int | None = None, scale: float = 1.0
) -> None:
    r"""Bayesian logistic regression: :math:`\beta \sim N(0, s^2 I)`, ``y`` Bernoulli with logits ``X β``.

    For an intercept, add a column of ones to ``X``.

    :param X: covariates, ``(N, d)``.
    :param y: labels 0 and 1, ``(N,)``; ``None`` draws them.
    :param subsample_size: rows in a minibatch; ``None`` means all rows.
    :param scale: the prior's standard deviation s.

    **References:**

    1. *Bayesian Learning via Stochastic Gradient Langevin Dynamics*, M. Welling and Y. W. Teh, ICML 2011

    **Example**

    .. doctest::

        >>> from jax import random
        >>> from numpyro_repulsion.targets import draw, logistic_regression
        >>> X = random.normal(random.key(0), (100, 3))
        >>> truth = draw(random.key(1), logistic_regression, 1, X)
        >>> truth["beta"].shape, truth["y"].shape
        ((1, 3), (1, 100))
    """
    X = jnp.asarray(X)
    beta = numpyro.sample("beta", dist.Normal(0.0, scale).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", len(X), subsample_size=subsample_size) as i:
        numpyro.sample("y", dist.Bernoulli(logits=X[i] @ beta), obs=None if y is None else jnp.asarray(y)[i])


def bayesian_neural_network(
    X: ArrayLike, y: ArrayLike | None = None, subsample_size: int | None = None, hidden: int = 50
) -> None:
    r"""Regression with a network of one hidden ReLU layer and unknown precisions.

    All weights and biases are :math:`N(0, 1/\lambda)`, ``y`` is :math:`N(f(x), 1/\gamma)`, and the precisions λ and γ
    are Gamma(1, 0.1), of mean 10. These priors suit covariates and responses that the caller has standardized.

    :param X: covariates, ``(N, p)``.
    :param y: responses, ``(N,)``; ``None`` draws them.
    :param subsample_size: rows in a minibatch; ``None`` means all rows.
    :param hidden: number of hidden units.

    **References:**

    1. *Probabilistic Backpropagation for Scalable Learning of Bayesian Neural Networks*, J. M. Hernández-Lobato and
       R. P. Adams, https://arxiv.org/abs/1502.05336
    2. *Stein Variational Gradient Descent: A General Purpose Bayesian Inference Algorithm*, Q. Liu and D. Wang,
       https://arxiv.org/abs/1608.04471

    **Example**

    .. doctest::

        >>> from jax import random
        >>> from numpyro_repulsion.targets import bayesian_neural_network, draw, relu_network
        >>> X = random.normal(random.key(0), (100, 3))
        >>> prior = draw(random.key(1), bayesian_neural_network, 5, X)
        >>> sorted(prior)
        ['b1', 'b2', 'noise_precision', 'w1', 'w2', 'weight_precision', 'y']
        >>> relu_network(prior, X).shape
        (5, 100)
    """
    X = jnp.asarray(X)
    weight_precision = numpyro.sample("weight_precision", dist.Gamma(1.0, 0.1))
    noise_precision = numpyro.sample("noise_precision", dist.Gamma(1.0, 0.1))
    prior = dist.Normal(0.0, weight_precision**-0.5)
    shapes = {"w1": (X.shape[1], hidden), "b1": (hidden,), "w2": (hidden,), "b2": ()}
    weights = {name: numpyro.sample(name, prior.expand(shape).to_event(len(shape))) for name, shape in shapes.items()}
    with numpyro.plate("rows", len(X), subsample_size=subsample_size) as i:
        response = dist.Normal(relu_network(weights, X[i]), noise_precision**-0.5)
        numpyro.sample("y", response, obs=None if y is None else jnp.asarray(y)[i])


def relu_network(weights: dict[str, jax.Array], X: jax.Array) -> jax.Array:
    """Return the mean response ``f(X)`` of :func:`bayesian_neural_network`.

    :param weights: draws of ``w1``, ``b1``, ``w2`` and ``b2``, with any leading axes.
    :param X: covariates, ``(N, p)``.
    :return: of shape ``(..., N)``.

    **Example**

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from numpyro_repulsion.targets import relu_network
        >>> weights = {"w1": jnp.ones((2, 1)), "b1": jnp.zeros(1), "w2": jnp.ones(1), "b2": jnp.array(1.0)}
        >>> relu_network(weights, jnp.array([[1.0, 2.0], [-1.0, -2.0]])).tolist()
        [4.0, 1.0]
    """
    layer = jax.nn.relu(X @ weights["w1"] + weights["b1"][..., None, :])
    return (layer @ weights["w2"][..., None])[..., 0] + weights["b2"][..., None]


def draw(key: jax.Array, model: Callable, num_draws: int, *args: Any, **kwargs: Any) -> dict[str, jax.Array]:
    """Return independent draws of all unobserved sites of a model.

    :param key: a PRNG key.
    :param model: a NumPyro model.
    :param num_draws: the number of draws.
    :param args: the model's arguments.
    :param kwargs: the model's keyword arguments.
    :return: ``{site: array whose first axis is the draws}``.

    **Example**

    .. doctest::

        >>> from jax import random
        >>> from numpyro_repulsion.targets import draw, gaussian
        >>> draw(random.key(0), gaussian, 10)["z"].shape
        (10, 2)
    """

    def one(key):
        sites = trace(seed(model, key)).get_trace(*args, **kwargs)
        return {name: site["value"] for name, site in sites.items() if _is_free(site)}

    return jax.jit(jax.vmap(one))(random.split(key, num_draws))


def moments(model: Callable, *args: Any, **kwargs: Any) -> dict[str, tuple[jax.Array, jax.Array]]:
    """Return exact means and variances of the sites of a model without data, in which no site depends on another.

    :param model: a NumPyro model, such as :func:`gaussian`, :func:`exponential_mixture` or :func:`gaussian_mixture`.
    :param args: the model's arguments.
    :param kwargs: the model's keyword arguments.
    :return: ``{site: (mean, variance)}``.
    :raises ValueError: if a site depends on another.

    **Example**

    .. doctest::

        >>> import numpyro
        >>> import numpyro.distributions as dist
        >>> from numpyro_repulsion.targets import moments
        >>> mean, variance = moments(lambda: numpyro.sample("z", dist.Gamma(3.0, 2.0)))["z"]
        >>> float(mean), float(variance)
        (1.5, 0.75)
    """

    def of(key):
        sites = trace(seed(model, key)).get_trace(*args, **kwargs)
        return {name: (site["fn"].mean, site["fn"].variance) for name, site in sites.items() if _is_free(site)}

    exact, again = of(random.key(0)), of(random.key(1))
    if not jax.tree.all(jax.tree.map(jnp.array_equal, exact, again)):
        raise ValueError("`moments` needs a model in which no site depends on another; use `draw` for this one.")
    return exact


def _is_free(site):
    return site["type"] == "sample" and not site["is_observed"]
