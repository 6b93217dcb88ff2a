"""How particles come from their starts to the posterior, whatever its scale."""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax import lax, random
import jax.numpy as jnp

from numpyro_repulsion.dynamics import select

__all__ = ["arrive", "rescue"]

Position = tuple[jax.Array, jax.Array, jax.Array]


def arrive(
    key: jax.Array,
    position: Position,
    step_size: jax.Array,
    force: Callable[[jax.Array], tuple[jax.Array, jax.Array]],
    is_noisy: bool = True,
) -> tuple[Position, jax.Array]:
    """One Metropolis-adjusted Langevin update of every particle by itself, towards three acceptances in five.

    It need not be exact, only bring the particles to the posterior, whatever the scale: with minibatches each update
    moves on the posterior of its own minibatch.

    :param position: ``(u, U, ∇U)`` of shapes ``(G, L, d)``, ``(G, L)`` and ``(G, L, d)``.
    :param step_size: ``(G, L)``.
    :param force: ``u -> (U, ∇U)``, the same at both ends of the update.
    :param is_noisy: whether the force is another one in every update, so that U has to be evaluated again.
    :return: the new position, and step sizes.
    """
    u = position[0]
    noise_key, accept_key = random.split(key)
    step = step_size[..., None]
    noise = jnp.sqrt(2.0 * step) * random.normal(noise_key, u.shape, u.dtype)

    def propose(point, _):
        energy, gradient = force(point)
        return u - step * gradient + noise, (energy, gradient)

    if is_noisy:
        # At u, then at the proposal from there; as a loop, so that the force is compiled once.
        _, (energies, gradients) = lax.scan(propose, u, length=2)
    else:
        ahead = force(u - step * position[2] + noise)
        energies, gradients = zip(position[1:], ahead, strict=True)
    proposal = u - step * gradients[0] + noise
    forward = jnp.sum(noise**2, -1)
    backward = jnp.sum((u - proposal + step * gradients[1]) ** 2, -1)
    log_ratio = energies[0] - energies[1] + (forward - backward) / (4.0 * step_size)
    usable = jnp.isfinite(log_ratio) & jnp.isfinite(gradients[1]).all(-1)
    probability = jnp.where(usable, jnp.exp(jnp.minimum(jnp.where(usable, log_ratio, 0.0), 0.0)), 0.0)
    accepted = random.uniform(accept_key, probability.shape, u.dtype) < probability
    moved = select(accepted, (proposal, energies[1], gradients[1]), (u, energies[0], gradients[0]))
    # A rejected particle keeps its last finite force if the fresh minibatch has none for it.
    fresh = (jnp.isfinite(energies[0]) & jnp.isfinite(gradients[0]).all(-1)) | accepted
    return select(fresh, moved, position), step_size * jnp.exp(0.5 * (probability - 0.6))


def rescue(
    key: jax.Array, position: Position, step_size: jax.Array, score: jax.Array | None = None
) -> tuple[Position, jax.Array]:
    """Sends particles that were left far behind to where a random one of the better half is.

    Far behind is more than ``10 + 5 √d`` above the median potential energy: exact draws hardly ever are.

    :param score: potential energies, ``(G, L)``, that can be compared, where those of the position come from
        minibatches of each particle's own.
    """
    u, energy, _ = position
    flat = (energy if score is None else score).ravel()
    better = jnp.argsort(flat)[: max(1, (flat.size + 1) // 2)]
    # What is not finite is far behind too.
    lost = ~(flat <= jnp.nanmedian(flat) + 10.0 + 5.0 * u.shape[-1] ** 0.5)
    chosen = jnp.where(lost, random.choice(key, better, lost.shape), jnp.arange(flat.size))

    def move(x):
        return x.reshape(flat.size, *x.shape[2:])[chosen].reshape(x.shape)

    return jax.tree.map(move, (position, step_size))
