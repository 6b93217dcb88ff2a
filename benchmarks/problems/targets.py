"""Models that studies, tests and figures share: those of the paper, logistic regression and a network."""

import itertools

import jax
import jax.numpy as jnp
from numpy.typing import ArrayLike

import numpyro
import numpyro.distributions as dist


def sample(**laws: dist.Distribution) -> list:
    """Sites by name, in their order."""
    return [numpyro.sample(name, law) for name, law in laws.items()]


def normals(d: int, scale: ArrayLike = 1.0, name: str = "beta") -> jax.Array:
    """A vector of independent N(0, scale²)."""
    return numpyro.sample(name, dist.Normal(0, scale).expand([d]).to_event(1))


def gaussian(mean: ArrayLike = (0.0, 0.0), covariance: ArrayLike | None = None) -> None:
    """N(mean, covariance); by default N(0, I₂), from the paper's Section 3.1."""
    mean = jnp.asarray(mean)
    if covariance is None:
        numpyro.sample("z", dist.Normal(mean, 1.0).to_event(1))
    else:
        numpyro.sample("z", dist.MultivariateNormal(mean, jnp.asarray(covariance)))


def exponential_mixture() -> None:
    """The paper's mixture of exponentials, of mean 14/9 and mean square 152/27. Particles move in log z."""
    component = dist.Categorical(probs=jnp.array([1 / 3, 2 / 3]))
    numpyro.sample("z", dist.MixtureSameFamily(component, dist.Exponential(jnp.array([1.5, 0.5]))))


def gaussian_mixture() -> None:
    """The paper's 3 × 3 grid of equally likely Gaussians in the plane, each of variance 0.1."""
    centers = jnp.array(list(itertools.product((-2.0, 0.0, 2.0), repeat=2)))
    component = dist.Categorical(probs=jnp.full(9, 1 / 9))
    numpyro.sample("z", dist.MixtureSameFamily(component, dist.Normal(centers, 0.1**0.5).to_event(1)))


def logistic_regression(
    X: ArrayLike, y: ArrayLike | None = None, subsample_size: int | None = None, scale: float = 1.0
) -> None:
    """Coefficients N(0, scale²), labels 0 and 1."""
    X = jnp.asarray(X)
    beta = numpyro.sample("beta", dist.Normal(0.0, scale).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", len(X), subsample_size=subsample_size) as i:
        numpyro.sample("y", dist.Bernoulli(logits=X[i] @ beta), obs=None if y is None else jnp.asarray(y)[i])


def bayesian_neural_network(
    X: ArrayLike, y: ArrayLike | None = None, subsample_size: int | None = None, hidden: int = 50
) -> None:
    """One hidden ReLU layer: weights and biases N(0, 1/λ), responses N(f(x), 1/γ), both precisions Gamma(1, 0.1).

    That of Hernández-Lobato and Adams (2015) and of Liu and Wang (2016), for standardized covariates and responses.
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
    """The mean response ``(..., N)`` of the network for draws of its weights with any leading axes."""
    layer = jax.nn.relu(X @ weights["w1"] + weights["b1"][..., None, :])
    return (layer @ weights["w2"][..., None])[..., 0] + weights["b2"][..., None]
