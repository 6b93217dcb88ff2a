"""A tournament of learning rates: each particle descends with its own, then all begin again with the best."""

from __future__ import annotations

from functools import partial

import jax
from jax import lax
import jax.numpy as jnp

from numpyro_repulsion.dynamics import Cloud, select
from numpyro_repulsion.shapes import Flag, Numbers, Scalar
from numpyro_repulsion.warmup.learning import Sampler
from numpyro_repulsion.warmup.state import WarmupState
from numpyro_repulsion.warmup.windows import Stage

__all__ = ["best_rate", "is_competing", "update_tournament"]

#: The share of warmup that the tournament takes.
SHARE = 0.3
#: The energies of so many of the slowest particles, which have hardly moved, limit those of particles that ran away.
NUM_SLOWEST = 5
#: A start far above the others is contracted to this share of its distance from their median, at most so many times.
CONTRACTION, MOST_CONTRACTIONS = 0.5, 10


def is_competing(stage: Stage) -> Flag:
    """Return whether the tournament is on in this iteration."""
    return stage.done <= stage.at(SHARE)


def best_rate(rates: Numbers, energy: Numbers) -> Scalar:
    """Return the rate whose particle and its two neighbours have the lowest mean energy.

    An energy counts as that of a slow particle if it is higher or not finite, so that one particle that ran away says
    no more against its neighbours than one that stood still.

    :param rates: in ascending order, ``(G, L)``.
    :param energy: comparable energies, ``(G, L)``.
    """
    rates, energy = rates.ravel(), energy.ravel()
    limit = jnp.nanmedian(energy[:NUM_SLOWEST])
    energy = jnp.where(energy <= limit, energy, jnp.where(jnp.isfinite(limit), limit, 0.0))
    padded = jnp.pad(energy, 1, mode="edge")
    return rates[jnp.argmin(padded[:-2] + padded[1:-1] + padded[2:])]


def update_tournament(
    key: jax.Array, stage: Stage, warmup: WarmupState, cloud: Cloud, sampler: Sampler
) -> tuple[WarmupState, Cloud]:
    """After the first iteration, contract wild starts; at the end of the tournament, take the best rate.

    Both times all particles move back to their starts, and the optimizer forgets what it has learned.
    """
    tournament, dynamics = warmup.tournament, sampler.dynamics
    if tournament is None:
        return warmup, cloud

    def begun():
        rate = best_rate(tournament.rates, *sampler.energies_to_compare((warmup, cloud)))
        starts = _contracted(tournament.starts, partial(sampler.energy_on_common_rows, warmup))
        bandwidth = sampler.interaction.learn_bandwidth(starts) if sampler.plan.bandwidth else warmup.bandwidth
        couple = partial(sampler.interaction.couple, bandwidth=bandwidth)
        fresh = dynamics.init(key, starts, partial(sampler.energy_and_grad(warmup), key), couple)
        step = warmup.step._replace(size=rate)
        return warmup._replace(tournament=tournament._replace(starts=starts), step=step, bandwidth=bandwidth), fresh

    due = (stage.done == 1) | (stage.done == stage.at(SHARE))
    return lax.cond(due, begun, lambda: (warmup, cloud))


def _contracted(starts, energy_of):
    """Return the starts, each moved towards the median of all while that lowers its energy much.

    The first gradients of a network that predicts wildly are so long that an optimizer that remembers them, such as
    Adagrad, hardly moves it afterwards.
    """
    middle, least = jnp.median(starts, (0, 1)), 10.0 + 5.0 * starts.shape[-1] ** 0.5

    def contract(carry):
        count, starts, energy, _ = carry
        nearer = middle + CONTRACTION * (starts - middle)
        lower = energy_of(nearer)
        gains = lower < energy - least  # False where either is not a number
        starts, energy = select(gains, (nearer, lower), (starts, energy))
        return count + 1, starts, energy, gains.any()

    first = 0, starts, energy_of(starts), jnp.ones((), bool)
    return lax.while_loop(lambda carry: carry[3] & (carry[0] < MOST_CONTRACTIONS), contract, first)[1]
