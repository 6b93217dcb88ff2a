"""How particles come from their starts to the posterior, whatever its scale."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import jax
from jax import lax, random
import jax.numpy as jnp
from jax.scipy.special import ndtr
import numpy as np

from numpyro_repulsion.dynamics import Cloud, select
from numpyro_repulsion.noise import normal
from numpyro_repulsion.warmup.windows import Stage

if TYPE_CHECKING:
    from numpyro_repulsion.warmup.learning import Sampler
    from numpyro_repulsion.warmup.state import WarmupState

__all__ = ["ArrivalState", "Surroundings", "arrive", "left_behind", "rescue", "update_arrival"]

#: Bounds on the steps of particles that arrive, once scales suit them.
ARRIVAL_STEPS = (np.exp(-12.0), 1.0)

Position = tuple[jax.Array, jax.Array, jax.Array]


def arrive(
    key: jax.Array,
    position: Position,
    step_size: jax.Array,
    energy_and_grad: Callable[[jax.Array], tuple[jax.Array, jax.Array]],
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
    step = step_size[..., None]
    # One draw, because each generator takes a tenth of a second to compile.
    white = normal(key, (u.size + step_size.size,), u.dtype)
    noise = jnp.sqrt(2.0 * step) * white[: u.size].reshape(u.shape)
    threshold = ndtr(white[u.size :]).reshape(step_size.shape)

    def propose(point, _):
        energy, gradient = energy_and_grad(point)
        return u - step * gradient + noise, (energy, gradient)

    if is_noisy:
        # At u, then at the proposal from there; as a loop, so that the force is compiled once.
        _, (energies, gradients) = lax.scan(propose, u, length=2)
    else:
        ahead = energy_and_grad(u - step * position[2] + noise)
        energies, gradients = zip(position[1:], ahead, strict=True)
    proposal = u - step * gradients[0] + noise
    forward = jnp.sum(noise**2, -1)
    backward = jnp.sum((u - proposal + step * gradients[1]) ** 2, -1)
    log_ratio = energies[0] - energies[1] + (forward - backward) / (4.0 * step_size)
    usable = jnp.isfinite(log_ratio) & jnp.isfinite(gradients[1]).all(-1)
    probability = jnp.where(usable, jnp.exp(jnp.minimum(jnp.where(usable, log_ratio, 0.0), 0.0)), 0.0)
    accepted = threshold < probability
    moved = select(accepted, (proposal, energies[1], gradients[1]), (u, energies[0], gradients[0]))
    # A rejected particle keeps its last finite force if the fresh minibatch has none for it.
    fresh = (jnp.isfinite(energies[0]) & jnp.isfinite(gradients[0]).all(-1)) | accepted
    return select(fresh, moved, position), step_size * jnp.exp(0.5 * (probability - 0.6))


class Surroundings(NamedTuple):
    """Energies and squared gradients of each particle over a window: how much of the posterior lies around it.

    - **number** - iterations in the window.
    - **energy** - sums of U, ``(G, L)``.
    - **square** - sums of the squared whitened gradient, ``(G, L, d)``.
    """

    number: jax.Array
    energy: jax.Array
    square: jax.Array

    @staticmethod
    def empty(shape: tuple[int, ...], dtype) -> Surroundings:
        """Of nothing yet, for particles ``(G, L, d)``."""
        return Surroundings(jnp.zeros((), dtype), jnp.zeros(shape[:2], dtype), jnp.zeros(shape, dtype))

    def add(self, energy: jax.Array, gradient: jax.Array) -> Surroundings:
        """With one more iteration."""
        return Surroundings(self.number + 1.0, self.energy + energy, self.square + gradient**2)

    def weighs_nothing(self) -> jax.Array:
        """Around which particles, ``(G, L)``, there is next to nothing of the posterior, beside another particle.

        In a basin of curvature H the mean of U is its minimum plus ``d/2`` and that of ``g gᵀ`` is H. The basin thus
        holds ``exp(−E U) |E g gᵀ|^(−1/2)`` of the posterior, up to a constant. Energy alone would prefer narrow
        basins, such as the neck of a funnel. Of ``E g gᵀ`` there are two estimates: a width for each coordinate, which
        makes too much of a particle that has not moved; and one width for all, which makes too little of a basin that
        is narrow in some coordinates. A particle has to be far behind by both.
        """
        number, dimension = jnp.maximum(self.number, 1.0), self.square.shape[-1]
        energy, square = self.energy / number, self.square / number
        smallest = jnp.finfo(square.dtype).tiny
        log_weights = (
            -energy - 0.5 * jnp.sum(jnp.log(square + smallest), -1),
            -energy - 0.5 * dimension * jnp.log(jnp.mean(square, -1) + smallest),
        )
        lost = jnp.ones(energy.shape, bool)
        for log_weight in log_weights:
            best = jnp.nanmax(jnp.where(jnp.isfinite(log_weight), log_weight, -jnp.inf))
            lost &= ~(log_weight >= best - 10.0 - 2.0 * dimension**0.5)
        return lost


class ArrivalState(NamedTuple):
    """What particles know while they arrive.

    - **step_size** - of each particle, ``(G, L)``.
    - **surroundings** - in the current window; ``None`` where gradients are noisy.
    """

    step_size: jax.Array
    surroundings: Surroundings | None

    @staticmethod
    def start(shape: tuple[int, ...], dtype, looks_around: bool) -> ArrivalState:
        """Of particles ``(G, L, d)`` at their starts."""
        surroundings = Surroundings.empty(shape, dtype) if looks_around else None
        return ArrivalState(jnp.full(shape[:2], 0.05, dtype), surroundings)


def left_behind(energy: jax.Array, dimension: int) -> jax.Array:
    """Which particles, ``(G, L)``, have an energy more than ``10 + 5 √d`` above the median, as exact draws hardly have.

    :param energy: ``(G, L)``, potential energies that can be compared.
    """
    # What is not finite is far behind too.
    return ~(energy <= jnp.nanmedian(energy) + 10.0 + 5.0 * dimension**0.5)


def rescue(key: jax.Array, position: Position, step_size: jax.Array, lost: jax.Array) -> tuple[Position, jax.Array]:
    """Sends lost particles to where others are.

    :param lost: ``(G, L)``; where all are, none moves.
    """
    lost = lost.ravel() & ~lost.all()
    logits = jnp.where(lost, -jnp.inf, 0.0)
    chosen = jnp.where(lost, random.categorical(key, logits, shape=lost.shape), jnp.arange(lost.size))

    def move(x):
        return x.reshape(lost.size, *x.shape[2:])[chosen].reshape(x.shape)

    return jax.tree.map(move, (position, step_size))


def update_arrival(
    key: jax.Array, stage: Stage, warmup: WarmupState, cloud: Cloud, sampler: Sampler
) -> tuple[WarmupState, Cloud]:
    """At the ends of windows, particles around which there is nothing of the posterior go to where others are."""
    if not sampler.plan.arrives:
        return warmup, cloud
    steps, surroundings = warmup.arrival
    if surroundings is not None:

        def look_around():
            fresh = jax.tree.map(lambda x: jnp.where(stage.window_starts, 0.0, x), warmup.arrival.surroundings)
            return fresh.add(cloud.potential_energy, cloud.gradient)

        surroundings = lax.cond(stage.is_arriving, look_around, lambda: warmup.arrival.surroundings)

    def lost():
        if surroundings is not None:
            return surroundings.weighs_nothing()
        # Energies of a particle's own minibatches cannot be compared, nor curvature be told from their noise.
        return left_behind(sampler.energy_on_common_rows(warmup, cloud.z), cloud.z.shape[-1])

    position, steps = lax.cond(
        stage.window_ends & stage.may_rescue,
        lambda: rescue(key, cloud[:3], steps, lost()),
        lambda: (cloud[:3], steps),
    )
    if sampler.plan.scale is not None:
        steps = jnp.where(stage.window_ends, jnp.clip(steps, *ARRIVAL_STEPS), steps)
    z, energy, gradient = position
    return warmup._replace(arrival=ArrivalState(steps, surroundings)), Cloud(z, energy, gradient, cloud.memory)
