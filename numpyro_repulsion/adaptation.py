"""What warmup learns and freezes: the step size and the bandwidth.

Where the step size is to be measured, the first quarter of warmup lets every particle arrive at a step of its own: a
start from the prior can lie where the posterior is far stiffer than where it has its mass. Then step size and bandwidth
are measured on the cloud a few times, at last when three quarters of warmup are over, and are constant from then on: a
quantity that followed the particles while draws are kept would change the stationary law.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
from jax import lax, random
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular

from numpyro_repulsion.interactions import Interaction, median_bandwidth
from numpyro_repulsion.schedules import BiasBudget

__all__ = ["Preconditioner", "Tuning", "arrive", "curvature", "gradient_noise", "is_arriving", "is_due", "measure"]

#: The fraction of warmup in which particles arrive.
ARRIVAL = 1 / 4

#: Fractions of warmup at which the tuned quantities are measured again; frozen after the last one.
WINDOW_ENDS = (ARRIVAL, 3 / 8, 1 / 2, 5 / 8, 3 / 4)
POWER_ITERATIONS = 8
NOISE_PAIRS = 16

Force = Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


class Tuning(NamedTuple):
    """The tuned quantities; scalars, but for one.

    - **iteration** - MCMC iterations done so far.
    - **num_warmup** - how many of them are warmup.
    - **step_size** - ε, where it is measured.
    - **curvature** - the largest curvature found at the last measurement, in the second half of warmup at any; 0 until
      one is found.
    - **bandwidth** - h, where an interaction learns it; NaN where none is in use.
    - **arrival** - the step sizes of the particles while they arrive, ``(G, L)``.
    """

    iteration: jax.Array
    num_warmup: jax.Array
    step_size: jax.Array
    curvature: jax.Array
    bandwidth: jax.Array
    arrival: jax.Array


class Preconditioner(NamedTuple):
    """The linear change of variables ``z = S u``, with ``S = diag(scale)`` or lower triangular; ``None`` is identity.

    The dynamics runs in u, where K is also evaluated, so that in z its diffusion is ``K ⊗ S Sᵀ``. As S is constant,
    Γ lacks nothing.
    """

    scale: jax.Array | None = None

    def whiten(self, z: jax.Array) -> jax.Array:
        """u for positions z, ``(..., d)``."""
        if self.scale is None:
            return z
        if self.scale.ndim == 1:
            return z / self.scale
        return solve_triangular(self.scale, z.reshape(-1, z.shape[-1]).T, lower=True).T.reshape(z.shape)

    def colour(self, u: jax.Array) -> jax.Array:
        """z for positions u, ``(..., d)``."""
        if self.scale is None:
            return u
        return u * self.scale if self.scale.ndim == 1 else u @ self.scale.T

    def pull(self, gradient: jax.Array) -> jax.Array:
        """The gradient with respect to u, ``Sᵀ ∇_z U``, for gradients ``(..., d)`` with respect to z."""
        if self.scale is None:
            return gradient
        return gradient * self.scale if self.scale.ndim == 1 else gradient @ self.scale


def is_due(tuning: Tuning) -> jax.Array:
    """Whether the coming iteration begins with a measurement."""
    ends = (jnp.asarray(WINDOW_ENDS) * tuning.num_warmup).astype(jnp.int32)
    return (tuning.iteration < tuning.num_warmup) & jnp.any(tuning.iteration == ends)


def is_arriving(tuning: Tuning) -> jax.Array:
    """Whether the coming iteration belongs to the part of warmup in which particles arrive."""
    return tuning.iteration < ARRIVAL * tuning.num_warmup


def arrive(
    key: jax.Array,
    position: tuple[jax.Array, jax.Array, jax.Array],
    step_size: jax.Array,
    force: Callable[[jax.Array], tuple[jax.Array, jax.Array]],
) -> tuple[tuple[jax.Array, jax.Array, jax.Array], jax.Array]:
    """One Metropolis-adjusted Langevin update of every particle by itself, towards three acceptances in five.

    It need not be exact, only bring the particles to the posterior, whatever the scale: with minibatches each update
    moves on the posterior of its own minibatch.

    :param position: ``(u, U, ∇U)`` of shapes ``(G, L, d)``, ``(G, L)`` and ``(G, L, d)``.
    :param step_size: ``(G, L)``.
    :param force: ``u -> (U, ∇U)`` on one minibatch.
    :return: the new position, and step sizes.
    """
    u = position[0]
    noise_key, accept_key = random.split(key)
    step = step_size[..., None]
    noise = jnp.sqrt(2.0 * step) * random.normal(noise_key, u.shape, u.dtype)

    def propose(point, _):
        energy, gradient = force(point)
        return u - step * gradient + noise, (energy, gradient)

    # At u, then at the proposal from there; as a loop, so that the force is compiled once.
    _, (energies, gradients) = lax.scan(propose, u, length=2)
    proposal = u - step * gradients[0] + noise
    forward = jnp.sum(noise**2, -1)
    backward = jnp.sum((u - proposal + step * gradients[1]) ** 2, -1)
    log_ratio = energies[0] - energies[1] + (forward - backward) / (4.0 * step_size)
    usable = jnp.isfinite(log_ratio) & jnp.isfinite(gradients[1]).all(-1)
    probability = jnp.where(usable, jnp.exp(jnp.minimum(jnp.where(usable, log_ratio, 0.0), 0.0)), 0.0)
    accepted = random.uniform(accept_key, probability.shape, u.dtype) < probability

    def select(new, old):
        return jnp.where(accepted[..., None] if new.ndim > accepted.ndim else accepted, new, old)

    # A rejected particle keeps its last finite force if the fresh minibatch has none for it.
    fresh = (jnp.isfinite(energies[0]) & jnp.isfinite(gradients[0]).all(-1)) | accepted
    moved = (select(proposal, u), select(energies[1], energies[0]), select(gradients[1], gradients[0]))
    kept = jax.tree.map(
        lambda new, old: jnp.where(fresh[..., None] if new.ndim > fresh.ndim else fresh, new, old), moved, position
    )
    return kept, step_size * jnp.exp(0.5 * (probability - 0.6))


def measure(
    key: jax.Array,
    tuning: Tuning,
    u: jax.Array,
    force: Force,
    interaction: Interaction,
    budget: BiasBudget | None,
    shared: bool,
) -> Tuning:
    """Measures bandwidth and step size on the cloud.

    :param u: particles, ``(G, L, d)``.
    :param force: ``(key, u) -> (U, ∇U)`` on clouds, with a minibatch that is a function of the key.
    :param budget: the rule for the step size, or ``None`` where the user gave it.
    :param shared: whether the particles of a group share their minibatch.
    """
    if interaction.learns_bandwidth:
        tuning = tuning._replace(bandwidth=median_bandwidth(u))
    if budget is None:
        return tuning
    curvature_key, noise_key = random.split(key)
    found = curvature(curvature_key, u, force)
    # In the second half of warmup the larger of this and the last measurement counts: a step is to fit the stiffest
    # place the cloud visits, not the one where it happens to be.
    late = tuning.iteration * 2 > tuning.num_warmup
    found = jnp.where(late, jnp.maximum(found, tuning.curvature), found)
    bound = interaction.couple(u, tuning.bandwidth).bound
    noise = gradient_noise(noise_key, u, force) * (bound if shared else 1.0)
    tolerated = 2.0 * budget.tolerance / (1.0 + budget.tolerance)
    step_size = (jnp.minimum(tolerated, 0.5 / bound) / (found + noise)).astype(u.dtype)
    usable = jnp.isfinite(step_size) & (step_size > 0)
    # Without curvature, on a cone, say, there is no bound: stay well below the steps that Metropolis accepted.
    last = jnp.where(tuning.curvature > 0, tuning.step_size, 0.1 * jnp.exp(jnp.log(tuning.arrival).mean()))
    return tuning._replace(
        step_size=jnp.where(usable, step_size, last).astype(u.dtype),
        curvature=jnp.where(usable, found, tuning.curvature).astype(u.dtype),
    )


def curvature(key: jax.Array, u: jax.Array, force: Force) -> jax.Array:
    """The largest absolute curvature of U at any particle, by power iteration on gradient differences.

    :param u: particles, ``(G, L, d)``.
    :param force: ``(key, u) -> (U, ∇U)``; both sides of a difference see the same minibatch.
    :return: a scalar; particles where it is not finite are left out.
    """
    # The step of a central difference in floating point: the cube root of the rounding error, in units of u.
    width = jnp.finfo(u.dtype).eps ** (1 / 3) * (1.0 + jnp.sqrt(jnp.mean(u**2, -1, keepdims=True)))

    def iterate(direction, key):
        offset = width * direction
        # One program for both sides, for half the time to compile.
        ahead, behind = lax.map(lambda v: force(key, v)[1], jnp.stack([u + offset, u - offset]))
        product = (ahead - behind) / (2.0 * width)
        size = jnp.linalg.norm(product, axis=-1, keepdims=True)
        usable = jnp.isfinite(size) & (size > 0)
        return jnp.where(usable, product / jnp.where(usable, size, 1.0), direction), size

    direction_key, key = random.split(key)
    direction = random.normal(direction_key, u.shape, u.dtype)
    direction /= jnp.linalg.norm(direction, axis=-1, keepdims=True)
    _, sizes = lax.scan(iterate, direction, random.split(key, POWER_ITERATIONS))
    return jnp.nanmax(jnp.where(jnp.isfinite(sizes[-1]), sizes[-1], jnp.nan))


def gradient_noise(key: jax.Array, u: jax.Array, force: Force) -> jax.Array:
    """The largest eigenvalue of the covariance of the minibatch gradient, pooled over the particles.

    :param u: particles, ``(G, L, d)``.
    :param force: ``(key, u) -> (U, ∇U)``, with a minibatch that is a function of the key.
    :return: a scalar; 0 where the gradient is exact.
    """
    direction_key, key = random.split(key)

    gradients = lax.map(lambda key: force(key, u)[1], random.split(key, 2 * NOISE_PAIRS))
    rows = (gradients[:NOISE_PAIRS] - gradients[NOISE_PAIRS:]).reshape(-1, u.shape[-1])
    finite = jnp.isfinite(rows).all(-1, keepdims=True)
    rows = jnp.where(finite, rows, 0.0)

    def iterate(direction, _):
        product = (rows @ direction) @ rows / (2.0 * jnp.maximum(finite.sum(), 1))
        size = jnp.linalg.norm(product)
        return jnp.where(size > 0, product / jnp.where(size > 0, size, 1.0), direction), size

    direction = random.normal(direction_key, (u.shape[-1],), u.dtype)
    _, sizes = lax.scan(iterate, direction / jnp.linalg.norm(direction), length=POWER_ITERATIONS)
    return sizes[-1]
