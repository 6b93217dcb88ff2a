"""Two clouds that the same noise moves, one of them with half the step, to see what the step size does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
from jax import lax, random
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer
import numpy as np

from numpyro.infer import MCMC

from numpyro_repulsion.dynamics import Cloud
from numpyro_repulsion.interactions import Antithetic, Balanced, Interaction
from numpyro_repulsion.kernels.iteration import CloudMover
from numpyro_repulsion.kernels.mcmc import arguments
from numpyro_repulsion.warmup import Learned

#: Numbers ``(G, L, m)`` of the particles of a cloud.
Observe = Callable[[CloudMover, Learned, Cloud], Float[Array, "*particles k"]]
#: A cloud, how many updates it made, and what its sampler learned.
Moved = tuple[Cloud, Integer[Array, ""], Learned]


@dataclass(frozen=True)
class _Summed(Interaction):
    """An interaction whose noise is that of two half steps, in the order of the keys of a split."""

    interaction: Interaction

    def couple(self, u, bandwidth=None):
        coupling = self.interaction.couple(u, bandwidth)

        def summed(draw):
            return lambda key: sum(map(draw, random.split(key))) / 2**0.5

        return coupling._replace(draw=summed(coupling.draw), white=summed(lambda key: coupling.white_noise(key, u)))


def halved_series(
    mcmc: MCMC, rng_key: jax.Array | None, num_samples: int, step_size: float, observe: Observe
) -> tuple[np.ndarray, np.ndarray]:
    r"""Go on from the last state of a run with two clouds, one with steps of ε and one with steps of ε/2.

    Both move for the same time. An update with ε has the noise of two with ε/2, their sum over :math:`\sqrt 2`, and the
    minibatch of the first of them, so that the clouds stay close, and the means of their differences are precise. (Not
    so if particles repel each other; and minibatches without replacement, and dynamics that draw noise from the key
    themselves, differ between the clouds.) By itself, each cloud is a chain with its step: an update with ε has one
    standard normal ξ and one minibatch of the usual size. K is redrawn, references of particles are renewed, and basins
    are jumped between at the same times in both. The first third is not returned, because the cloud with ε/2 needs time
    to find its own distribution.

    :param rng_key: ``None`` goes on with the key of the run.
    :param num_samples: the number of iterations with ε that are returned; half as many go before.
    :param step_size: ε.
    :param observe: ``(mover, learned, cloud) -> numbers (G, L, m)``.
    :return: the means over each group with ε, ``(groups, num_samples, m)``, and the differences with ε/2 from them.
        Means are over all updates of an iteration; with ``moves``, which change the distribution within an iteration,
        those after the last one.
    """
    kernel, state, (args, kwargs) = mcmc.sampler, mcmc.last_state, arguments(mcmc)
    if rng_key is not None:
        state = state._replace(rng_key=rng_key)

    def run(state, step_size):
        mover, cloud = kernel.parts(state, args, kwargs)
        mover = replace(mover, schedule=None)
        steps = (jnp.asarray(step, state.learned.step_size.dtype) for step in (step_size, step_size / 2))
        both = (state.learned._replace(step_size=step) for step in steps)
        clouds = tuple((cloud, state.num_updates, learned) for learned in both)

        def iterate(clouds, key):
            clouds, (one, other) = _iterate(mover, key, clouds, observe)
            return clouds, (one, other - one)

        return lax.scan(iterate, clouds, random.split(state.rng_key, num_samples + num_samples // 2))[1]

    series = tuple(jnp.moveaxis(x, 0, 1) for x in jax.jit(run)(state, step_size))
    if kernel.interaction.balances_ensembles:
        series = tuple(x.mean(0, keepdims=True) for x in series)
    one, difference = (np.asarray(x[:, num_samples // 2 :], np.float64) for x in series)
    return one, difference


def _iterate(mover: CloudMover, key: jax.Array, clouds: tuple[Moved, Moved], observe: Observe):
    """Make one iteration with ε, and twice as many updates with ε/2; also return the means of what is observed."""
    jump_key, updates_key = random.split(key)

    def begun(cloud, count, learned):
        return mover.begin(jump_key, cloud, count, mover.with_references(cloud, learned))

    (now, learned), (half, half_learned) = (begun(*moved) for moved in clouds)
    # Each particle by itself moves as with any noise with K = I; that of neighbors would part two particles whose
    # clouds differ ever so little in their order.
    interaction = mover.interaction
    interaction = Balanced() if isinstance(interaction, Antithetic) else interaction

    def update(carry, key):
        now, half = carry
        interaction_key, noise_key, *gradient_keys = random.split(key, 4)
        at = interaction.at(interaction_key, now.num_updates)
        now = mover.advance(noise_key, gradient_keys[0], _Summed(at), now, learned)
        keys = random.split(noise_key), jnp.stack(gradient_keys)
        half, found = lax.scan(lambda half, keys: seen(mover.advance(*keys, at, half, half_learned)), half, keys)
        return (now, half), (seen(now)[1], summarized(found))

    def seen(now):
        return now, observe(mover, learned, now.cloud).mean(-2)

    def summarized(found):
        # Draws are made at the end of an iteration, which a jump begins.
        return found.mean(0) if learned.jumps is None else found[-1]

    keys = random.split(updates_key, mover.num_steps)
    (now, half), found = lax.scan(update, (now, half), keys)
    learned = mover.ended(learned)
    half_learned = mover.ended(half_learned, 2 * mover.num_steps)
    clouds = (now.cloud, now.num_updates, learned), (half.cloud, half.num_updates, half_learned)
    return clouds, jax.tree.map(summarized, found)
