"""A bandwidth learned by what it gains: how much each of many would speed up the averages of the cloud."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
from jax import lax, random
import jax.numpy as jnp
import numpy as np

from numpyro_repulsion.dynamics import Cloud, CurvatureStats, EulerError
from numpyro_repulsion.interactions import Interaction
from numpyro_repulsion.schedules import BiasBudget
from numpyro_repulsion.warmup.curvature import measure_steepness
from numpyro_repulsion.warmup.windows import Stage

if TYPE_CHECKING:
    from numpyro_repulsion.warmup.learning import Sampler
    from numpyro_repulsion.warmup.state import WarmupState

__all__ = ["Gains", "best_bandwidth", "gains", "next_bandwidth", "update_bandwidth"]

#: The bandwidths that are tried, as multiples of the rule's.
MULTIPLES = 2.0 ** np.linspace(-4.0, 4.0, 33)
POWER_ITERATIONS = 16


class Gains(NamedTuple):
    """What an interaction makes of a unit of time, and of an update.

    - **mean** - how fast the ensemble mean relaxes, beside particles without interaction.
    - **square** - the same of the ensemble average of squares.
    - **step** - the longest step whose bias is within the budget, in units of one over the curvature.
    """

    mean: jax.Array
    square: jax.Array
    step: jax.Array

    @property
    def score(self) -> jax.Array:
        """The logarithm of the product of the two numbers of effective draws for each gradient, but for a constant."""
        return jnp.log(self.mean) + jnp.log(self.square) + 2.0 * jnp.log(self.step)


def gains(interaction: Interaction, u: jax.Array, bandwidth: jax.Array | float, tolerance: float) -> Gains:
    """What the interaction gains at a bandwidth, from one cloud.

    Overdamped dynamics is reversible, and there the rate of a function f is at most its Dirichlet form,
    ``E Σ_ij K_ij ∇_i f · ∇_j f``, over its variance, which does not depend on K. For the ensemble mean that is
    ``1ᵀK1 / L``; for the scatter about it, ``x_i = u_i − ū``, twice ``Σ xᵀKx / Σ xᵀx``. In a Gaussian posterior and for
    kernels of differences ū and the x_i are independent, so that both relax by themselves; where K hardly changes
    (many dimensions) the bounds are attained.

    :param u: particles, ``(G, L, d)``.
    :param tolerance: δ of the bias budget.
    """
    coupling = interaction.couple(u, bandwidth)
    size = u.shape[-2]
    x = u - u.mean(-2, keepdims=True)
    # All coordinates count alike, whitened or not.
    spread = jnp.sqrt(jnp.mean(x**2, (0, 1)))
    x = x / jnp.where(spread > 0, spread, 1.0)
    # In one product: beside another one, K times ones came out as garbage (JAX 0.10.2, a CPU, 24 groups in a loop).
    product = coupling.apply(jnp.concatenate((jnp.ones_like(u[..., :1]), x), -1))
    mean = jnp.mean(product[..., 0])
    rest = jnp.sum(x * product[..., 1:]) / jnp.sum(x * x)
    square = size / ((size - 1) / rest + 1.0 / mean)
    steepness = measure_steepness(random.key(0), interaction, u, bandwidth)
    one = jnp.ones((), u.dtype)
    stats = CurvatureStats(one, one, 0.0 * one, steepness)
    coupling = coupling._replace(bound=_largest_eigenvalue(coupling.apply, 1.0 + x))
    return Gains(mean, square, EulerError(coupling).max_step_for_bias(tolerance, stats))


def _largest_eigenvalue(apply, start):
    """Of K, by power iteration: dozens of bandwidths are tried, and a solver would take longer."""

    def iterate(x, _):
        product = apply(x)
        size = jnp.sqrt(jnp.sum(product**2, (-2, -1), keepdims=True))
        return product / size, size

    x, _ = iterate(start, None)
    _, sizes = lax.scan(iterate, x, length=POWER_ITERATIONS)
    return sizes[-1].max()


def best_bandwidth(interaction: Interaction, u: jax.Array, rule: jax.Array, tolerance: float) -> jax.Array:
    """The multiple of the rule's bandwidth with the best score on one cloud ``(G, L, d)``; the rule's, failing all."""
    candidates = rule * jnp.asarray(MULTIPLES, u.dtype)
    scores = lax.map(lambda h: gains(interaction, u, h, tolerance).score, candidates)
    scores = jnp.where(jnp.isfinite(scores), scores, -jnp.inf)
    return jnp.where(jnp.isfinite(scores).any(), candidates[jnp.argmax(scores)], rule)


def next_bandwidth(
    interaction: Interaction,
    u: jax.Array,
    previous: jax.Array,
    number: jax.Array,
    tolerance: float,
    bias: jax.Array | float,
) -> jax.Array:
    """The bandwidth for the cloud: the rule's, or once scales are frozen the one learned from all clouds so far.

    :param u: particles, ``(G, L, d)``.
    :param previous: the bandwidth so far.
    :param number: how many windows have ended since scales were frozen, with this one.
    :param bias: of the step in use; NaN where it was not measured.
    """
    rule = interaction.learn_bandwidth(u)
    if not interaction.tunes_bandwidth:
        return rule

    def average():
        # Where a short run raises the step beyond the budget, stability limits it, and a wide K would shorten it again.
        best = jnp.where(bias > 1.05 * tolerance, rule, best_bandwidth(interaction, u, rule, tolerance))
        # Geometric, for one cloud of twenty knows its best to within a factor of about two.
        return jnp.exp(jnp.log(previous) + (jnp.log(best) - jnp.log(previous)) / number).astype(rule.dtype)

    return lax.cond(number > 0, average, lambda: rule)


def update_bandwidth(
    key: jax.Array, stage: Stage, warmup: WarmupState, cloud: Cloud, sampler: Sampler
) -> tuple[WarmupState, Cloud]:
    """The bandwidth follows the cloud until scales are frozen, and then settles at the ends of windows.

    A cloud may shrink many times over while it travels. With the bandwidth it had before, all particles would be
    neighbours, and the step too long for the largest eigenvalue of such a K.
    """
    del key
    plan = sampler.plan
    if not plan.bandwidth:
        return warmup, cloud
    interacts = stage.has_arrived if plan.arrives else True
    follows = interacts & (stage.is_adapting | stage.window_ends)
    rule = plan.step_size or BiasBudget()
    bandwidth = lax.cond(
        follows,
        lambda: next_bandwidth(
            sampler.interaction, cloud.z, warmup.bandwidth, stage.num_settled, rule.tolerance, warmup.step.bias
        ),
        lambda: warmup.bandwidth,
    )
    return warmup._replace(bandwidth=bandwidth), cloud
