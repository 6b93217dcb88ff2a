"""The bandwidth learner: try many bandwidths and choose the one that speeds up averages over the cloud most."""

from __future__ import annotations

from dataclasses import dataclass

import jax
from jax import lax, random
import jax.numpy as jnp
from jaxtyping import Array, Float
import numpy as np
from numpy.random import Generator

from numpyro_repulsion.dynamics import Cloud, CurvatureStats, EulerError
from numpyro_repulsion.interactions import Interaction
from numpyro_repulsion.noise import signs
from numpyro_repulsion.schedules import BiasBudget
from numpyro_repulsion.warmup.state import Found, Sampler, WarmupState
from numpyro_repulsion.warmup.windows import Window


@dataclass(frozen=True)
class BandwidthConstants:
    """Which multiples of the rule's bandwidth are tried."""

    #: How many octaves on either side, and how many bandwidths in all.
    octaves: float = 4.0
    number: int = 33
    #: Iterations that give the largest eigenvalue of K.
    iterations: int = 16


BANDWIDTH = BandwidthConstants()


def gains(
    interaction: Interaction, u: Float[Array, "*particles d"], bandwidth: Float[Array, ""] | float, tolerance: float
) -> tuple[Float[Array, ""], Float[Array, ""], Float[Array, ""]]:
    """Estimate from one cloud what the interaction gains at a bandwidth.

    Overdamped dynamics is reversible, so the rate of a function f is at most its Dirichlet form,
    ``E Σ_ij K_ij ∇_i f · ∇_j f``, over its variance, which does not depend on K. For the ensemble mean this is
    ``1ᵀK1 / L``; for the scatter about it, ``x_i = u_i − ū``, it is twice ``Σ xᵀKx / Σ xᵀx``. For a Gaussian posterior
    and kernels of differences, ū and the x_i are independent, so each relaxes by itself; where K hardly changes (many
    dimensions), the bounds are attained.

    :param tolerance: δ of the bias budget.
    :return: how fast the ensemble mean relaxes, relative to particles without interaction; the same for the ensemble
        average of squares; and the longest step whose bias is within the budget, in units of 1 / curvature.
    """
    coupling = interaction.couple(u, bandwidth)
    size = u.shape[-2]
    x = u - u.mean(-2, keepdims=True)
    # Standardize, so that all coordinates count equally, whitened or not.
    spread = jnp.sqrt(jnp.mean(x**2, (0, 1)))
    x = x / jnp.where(spread > 0, spread, 1.0)
    # One product, because with two, K times ones returned garbage (JAX 0.10.2, CPU, 24 groups in a loop).
    product = coupling.apply(jnp.concatenate((jnp.ones_like(u[..., :1]), x), -1))
    mean = jnp.mean(product[..., 0])
    rest = jnp.sum(x * product[..., 1:]) / jnp.sum(x * x)
    square = size / ((size - 1) / rest + 1.0 / mean)
    steepness = measure_steepness(random.key(0), interaction, u, bandwidth)
    one = jnp.ones((), u.dtype)
    stats = CurvatureStats(one, one, 0.0 * one, steepness)
    coupling = coupling._replace(bound=_largest_eigenvalue(coupling.apply, 1.0 + x))
    return mean, square, EulerError(coupling).max_step_for_bias(tolerance, stats)


def score(
    interaction: Interaction, u: Float[Array, "*particles d"], bandwidth: Float[Array, ""] | float, tolerance: float
) -> Float[Array, ""]:
    """Return the log of the product of both numbers of effective draws per gradient, up to a constant."""
    mean, square, step = gains(interaction, u, bandwidth, tolerance)
    return jnp.log(mean) + jnp.log(square) + 2.0 * jnp.log(step)


def _largest_eigenvalue(apply, start):
    """Return the largest eigenvalue of K by power iteration, which is faster than a solver for dozens of bandwidths."""

    def iterate(x, _):
        product = apply(x)
        size = jnp.sqrt(jnp.sum(product**2, (-2, -1), keepdims=True))
        return product / size, size

    x, _ = iterate(start, None)
    _, sizes = lax.scan(iterate, x, length=BANDWIDTH.iterations)
    return sizes[-1].max()


def measure_steepness(
    key: jax.Array, interaction: Interaction, u: Float[Array, "*particles d"], bandwidth: Float[Array, ""] | float
) -> Float[Array, ""]:
    """Return how fast Γ changes along a random direction of all particles at once, as a root mean square."""
    if not interaction.interacts:
        return jnp.zeros((), u.dtype)
    direction = signs(key, u.shape, u.dtype)
    change = jax.jvp(lambda u: interaction.couple(u, bandwidth).repulsion + jnp.zeros_like(u), (u,), (direction,))[1]
    return jnp.sqrt(jnp.mean(jnp.where(jnp.isfinite(change), change, 0.0) ** 2))


def best_bandwidth(
    interaction: Interaction, u: Float[Array, "*particles d"], rule: Float[Array, ""], tolerance: float
) -> Float[Array, ""]:
    """Return the multiple of the rule's bandwidth with the best score on a cloud ``(G, L, d)``, or the rule's."""
    powers = np.linspace(-BANDWIDTH.octaves, BANDWIDTH.octaves, BANDWIDTH.number)
    candidates = rule * jnp.asarray(2.0**powers, u.dtype)
    scores = lax.map(lambda h: score(interaction, u, h, tolerance), candidates)
    scores = jnp.where(jnp.isfinite(scores), scores, -jnp.inf)
    return jnp.where(jnp.isfinite(scores).any(), candidates[jnp.argmax(scores)], rule)


def update_bandwidth(rng: Generator, window: Window, warmup: WarmupState, cloud: Cloud, sampler: Sampler) -> Found:
    """Update the bandwidth: by the rule, or, once the scales are frozen, to the average of the best ones so far.

    Until then it also follows the rule in every iteration (``kernels/warmup_programs.py``): a cloud may shrink by a
    large factor while it moves. With an old bandwidth, all particles would be neighbors, and the step would be too long
    for the largest eigenvalue of such a K.
    """
    plan = sampler.plan
    if not plan.learns_bandwidth or (plan.arrives and not window.has_arrived):
        return warmup, cloud
    bandwidth = rule = sampler.bandwidth_of(cloud.z)
    if plan.tunes_bandwidth and window.num_settled > 0:
        tolerance = (plan.budget or BiasBudget()).tolerance_for(False)
        # If a short run raised the step beyond the bias budget, stability limits the step; a wide K would shorten it.
        best = rule if warmup.is_raised else sampler.best_bandwidth(cloud.z, rule, tolerance)
        # A geometric mean, because one cloud of twenty determines its best only within a factor of about two.
        bandwidth = warmup.bandwidth * (best / warmup.bandwidth) ** (1.0 / window.num_settled)
    return warmup._replace(bandwidth=bandwidth), cloud
