"""Checks and properties of runs by kernels of this package."""

from __future__ import annotations

from collections.abc import Callable
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro.infer import MCMC

from numpyro_repulsion.gradients import ModelTarget, Target, compiled, fingerprint, ravel_cloud
from numpyro_repulsion.interactions import Independent
from numpyro_repulsion.kernels.base import ParticleKernel
from numpyro_repulsion.kernels.bound import BoundSampler
from numpyro_repulsion.kernels.mcmc import arguments, bring_here, draws


def kernel_of(mcmc: object, who: str, instead: str = "") -> ParticleKernel:
    """Return the kernel of an ``MCMC``; raise ``TypeError`` for anything but one of this package.

    :param who: what was called with it, for the message.
    :param instead: what to do with other objects, a sentence.
    """
    kernel = getattr(mcmc, "sampler", None)
    if not isinstance(mcmc, MCMC) or not isinstance(kernel, ParticleKernel):
        raise TypeError(
            f"{who} takes a numpyro.infer.MCMC with a kernel of this package, such as SGLDR(model); got "
            f"{type(mcmc).__name__}{f' with {type(kernel).__name__}' if kernel is not None else ''}.{instead}"
        )
    bring_here(mcmc)
    return kernel


def kernel_of_run(
    mcmc: object, who: str, instead: str = "", *, of_warmup: bool = False, of_optimizer: bool = False
) -> ParticleKernel:
    """Return the kernel of an ``MCMC``, as :func:`kernel_of` does; raise ``ValueError`` if it has no draws.

    :param of_warmup: whether the draws may be those of a warmup.
    :param of_optimizer: whether the particles may be those of an optimizer of the cloud.
    """
    kernel = kernel_of(mcmc, who, instead)
    require_draws(mcmc)
    if not of_warmup and is_warmup(mcmc):
        raise ValueError(f"These are draws of warmup; call {who} after mcmc.run(key, ...).")
    if not of_optimizer and not kernel.dynamics.is_sampler:
        raise ValueError(
            f"{type(kernel).__name__} is an optimizer, so its particles are not draws from the posterior. Use SGLDR "
            "for draws."
        )
    return kernel


def bound_of(mcmc: MCMC) -> BoundSampler:
    """Return the kernel of a run, bound to the arguments of its model."""
    return mcmc.sampler.bind(*arguments(mcmc))


def require_draws(mcmc: MCMC) -> None:
    """Raise ``ValueError`` if an ``MCMC`` has no draws."""
    if draws(mcmc) is None:
        raise ValueError("This MCMC has no draws yet; call mcmc.run(key, ...) first.")
    # After a warmup that collects nothing, NumPyro leaves zeros.
    is_ours = isinstance(mcmc.sampler, ParticleKernel)
    if is_ours and is_warmup(mcmc) and not np.any(mcmc.get_extra_fields()["step_size"]):
        raise ValueError(
            "This MCMC has only warmed up and kept no draws; call mcmc.run(key, ...), or mcmc.warmup(..., "
            "collect_warmup=True) to keep the draws of warmup."
        )


def evenly_spread(total: int, most: int) -> np.ndarray:
    """Return at most so many of the numbers below ``total``, evenly spread, with the first and the last."""
    return np.unique(np.linspace(0, total - 1, min(most, total)).round().astype(int))


def chosen_draws(mcmc: MCMC, most: int, by_chain: bool = False) -> Any:
    """Return at most so many draws of a run, evenly spread over particles and iterations, with a leading axis.

    Of an optimizer of the cloud, they come from its last cloud.

    :param by_chain: whether to choose whole iterations, at least 4, and return axes ``(chains, draws)``.
    """
    of_last_cloud = not (by_chain or mcmc.sampler.dynamics.is_sampler)
    most, axis = (max(4, most // mcmc.num_chains), 1) if by_chain else (most, 0)
    kept = mcmc.get_samples(group_by_chain=by_chain or of_last_cloud)
    if of_last_cloud:
        kept = jax.tree.map(lambda x: x[:, -1], kept)
    chosen = evenly_spread(jax.tree.leaves(kept)[0].shape[axis], most)
    return jax.tree.map(lambda x: jnp.asarray(x.take(chosen, axis)), kept)


def latent_draws(target: Target, draws: Any, who: str) -> Any:
    """Return the draws of the latent sites of a model, whose absence a message says; those of a function are all."""
    if not isinstance(target, ModelTarget):
        return draws
    if missing := [name for name in target.latent if name not in draws]:
        raise ValueError(
            f"{who} the draws of all latent sites, and {missing} are missing; run without extra_fields=('~z.site',)."
        )
    return {name: draws[name] for name in target.latent}


def flat_values(values: Any, lead: int) -> tuple[np.ndarray, Callable[[np.ndarray], Any]]:
    """Return the leaves of a pytree, with so many leading axes, as one array ``(..., n)`` in double precision, and a
    function that gives n numbers the structure of one value."""
    leaves, structure = jax.tree.flatten(values)
    shapes = [x.shape[lead:] for x in leaves]

    def shaped(flat):
        parts = np.split(flat, np.cumsum([math.prod(shape) for shape in shapes])[:-1])
        return jax.tree.unflatten(structure, [part.reshape(x) for part, x in zip(parts, shapes, strict=True)])

    return np.concatenate([np.asarray(x, float).reshape(*x.shape[:lead], -1) for x in leaves], -1), shaped


def is_warmup(mcmc: MCMC) -> bool:
    """Return whether the draws of an ``MCMC`` with a kernel of this package are those of its warmup."""
    state = mcmc.last_state
    return int(state.iteration) <= int(state.num_warmup)


def has_other_data(mcmc: MCMC) -> bool:
    """Return whether a run has other data or another model than its warmup.

    Those with the same digest are the same. Of others, U at a start of the warmup is compared (of a subsampled plate on
    as many rows as in a minibatch, evenly spread): rows in another order, or of another type, are no other data.
    """
    learned = mcmc.last_state.learned
    if learned.data_fingerprint is None:
        return False
    position, known = learned.data_fingerprint[:-1], float(learned.data_fingerprint[-1])
    bound, z = bound_of(mcmc), mcmc.last_state.with_particle_axis().z
    if (data := bound.posterior_id(z)) is not None and np.array_equal(learned.posterior_id, data):
        return False
    target, (_, unravel) = bound.target, ravel_cloud(z)
    found = float(compiled(lambda target, z: fingerprint(target, unravel, z), target)(position))
    # Another program may round differently, especially where terms cancel.
    return np.isfinite(known) and not abs(found - known) <= 1e-4 * (1.0 + abs(known))


def of_updates(mcmc: MCMC) -> tuple[float, float]:
    """Return the share of flagged updates among those that `num_flagged_updates` covers, and by how much clipping
    shortened their gradients, on average.

    The second is about the most by which a posterior mean shifts, in posterior standard deviations: gradients average
    to zero, and grow on average by one or more for each standard deviation, because E[∂²U/∂z²] is at least 1 / Var z.
    """
    kernel, state = mcmc.sampler, mcmc.last_state
    counted = int(state.iteration) - (int(state.num_warmup) if state.origin.has_warmed else 0)
    number = max(1, counted * kernel.num_steps * mcmc.num_chains)
    return float(state.num_flagged_updates / number), float(state.cut_off / number)


def coupling_of(mcmc: MCMC) -> tuple[str, int]:
    """Return what makes the particles of a run dependent, and how many independent parts the run has.

    :return: the first that applies of ``"minibatches"`` (shared), ``"interaction"``, ``"noise"`` (balanced, or opposed
        in pairs), ``"moves"`` and ``"none"``; and the number of parts.
    """
    kernel, size = mcmc.sampler, mcmc.num_chains
    if size == 1:
        return "none", size
    parts = 1 if kernel.interaction.balances_ensembles else kernel.num_ensembles
    bound = bound_of(mcmc)
    if bound.gradient.shared and bound.target.plates:
        return "minibatches", parts
    if kernel.interaction.interacts or kernel.dynamics.interacts:
        return "interaction", parts
    if type(kernel.interaction) is not Independent:
        return "noise", parts
    return ("none", size) if kernel.moves is None else ("moves", parts)
