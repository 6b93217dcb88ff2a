"""How warmup learns: at the ends of windows, from what was seen in them."""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax import lax, random
import jax.numpy as jnp
import numpy as np

from numpyro_repulsion.adaptation.arrival import left_behind, rescue
from numpyro_repulsion.adaptation.bandwidth import settle_bandwidth
from numpyro_repulsion.adaptation.measurement import (
    UNKNOWN,
    CorrectableForce,
    measure,
    measure_steepness,
    survey,
)
from numpyro_repulsion.adaptation.timetable import (
    ANNEALING,
    ARRIVED,
    BEGINNINGS,
    FIRST_DENSE,
    FIRST_RESCUE,
    FREEZE,
    SETTLING_ENDS,
    at,
    is_arriving,
    is_due,
    is_settling,
)
from numpyro_repulsion.adaptation.tuning import Learned, Tuning
from numpyro_repulsion.dynamics import Cloud, Dynamics
from numpyro_repulsion.gradients import Anchor
from numpyro_repulsion.interactions import Interaction
from numpyro_repulsion.schedules import BiasBudget

__all__ = ["adapt"]

#: Half the distance over which gradients are compared, where u has unit scale.
WIDTH = 0.2


def adapt(
    key: jax.Array,
    tuning: Tuning,
    cloud: Cloud,
    learned: Learned,
    force: Callable[[Tuning], CorrectableForce],
    score: Callable[[Tuning, jax.Array], jax.Array],
    reference: Callable[[Anchor], Anchor],
    is_stale: jax.Array | bool,
    interaction: Interaction,
    dynamics: Dynamics,
    num_steps: int,
    shared: bool,
) -> tuple[Tuning, Cloud]:
    """What one more iteration of warmup teaches, and most of it at the ends of windows: new scales, a new reference
    point, then bandwidth and step size. Counts the iteration.

    :param cloud: the particles, in whitened coordinates.
    :param force: the force, given what has been learned.
    :param score: the potential energies of particles on the same rows, ``(G, L)``.
    :param reference: an anchor with U and ∇U over all rows at its position.
    :param is_stale: whether the anchor's are those of other data.
    :param num_steps: updates in an iteration.
    :param shared: whether the particles of a group share their minibatch.
    :return: the tuning, and the cloud in its new coordinates.
    """

    rescue_key, measure_key = random.split(key)
    is_warmup = tuning.iteration < tuning.num_warmup
    moments = lax.cond(is_warmup, lambda: _observe(tuning, cloud), lambda: tuning.moments)
    if tuning.surroundings is not None:
        tuning = tuning._replace(
            surroundings=lax.cond(is_arriving(tuning), lambda: _look_around(tuning, cloud), lambda: tuning.surroundings)
        )
    observes, settles = tuning.symptoms is not None, is_settling(tuning)
    tuning = tuning._replace(moments=moments, iteration=tuning.iteration + 1)
    due = is_due(tuning)
    if observes:
        symptoms = lax.cond(settles, lambda: _examine(tuning, cloud, due, dynamics), lambda: tuning.symptoms)
        tuning = tuning._replace(symptoms=symptoms)
    position = tuning.preconditioner.colour(tuning.moments.position)
    tuning, cloud = lax.cond(due, lambda: _refit(rescue_key, tuning, cloud, learned, score), lambda: (tuning, cloud))
    if tuning.anchor is not None:
        passes = due & (tuning.iteration == at(ARRIVED, tuning))
        if learned.epoch is None:
            passes |= due & (tuning.iteration == at(FREEZE, tuning))
        else:
            position = tuning.preconditioner.colour(cloud.z)
        anchor = tuning.anchor._replace(
            position=jnp.where(passes, position, tuning.anchor.position), in_use=tuning.anchor.in_use | passes
        )
        anchor = lax.cond(passes | is_stale, lambda: reference(anchor), lambda: anchor)
        tuning = tuning._replace(anchor=anchor)
    if learned.bandwidth:
        tuning = tuning._replace(bandwidth=_follow(tuning, cloud, learned, interaction, due))
    if learned.measures:
        tuning = lax.cond(
            due & (tuning.iteration >= at(ARRIVED, tuning)),
            lambda: _settle(
                measure_key, tuning, cloud, learned, force(tuning), interaction, dynamics, num_steps, shared
            ),
            lambda: tuning,
        )
    return tuning, cloud


def _observe(tuning, cloud):
    """The moments with those of one more cloud."""
    moments = _renewed(tuning.moments, tuning)
    return moments.add(*(x.reshape(-1, x.shape[-1]) for x in (cloud.z, cloud.gradient)))


def _look_around(tuning, cloud):
    """The surroundings of particles with those of one more cloud."""
    return _renewed(tuning.surroundings, tuning).add(cloud.potential_energy, cloud.gradient)


def _renewed(sums, tuning):
    """Sums over a window, from zero where another one begins."""
    fresh = jnp.any(tuning.iteration == at(BEGINNINGS, tuning))
    return jax.tree.map(lambda x: jnp.where(fresh, jnp.zeros_like(x), x), sums)


def _examine(tuning, cloud, due, dynamics):
    """The symptoms with those of one more cloud."""
    u, gradient = (x.reshape(-1, x.shape[-1]) for x in (cloud.z, cloud.gradient))
    symptoms = tuning.symptoms.add(u, gradient, tuning.preconditioner)
    return lax.cond(due, lambda: symptoms.next_window(dynamics.temperature or 1.0), lambda: symptoms)


def _refit(key, tuning, cloud, learned, score):
    """Lost particles sent back, and new scales from the window's moments."""
    done = tuning.iteration

    def lost():
        if tuning.surroundings is not None:
            return tuning.surroundings.weighs_nothing()
        # Energies of a particle's own minibatches cannot be compared, nor curvature be told from their noise.
        return left_behind(score(tuning, cloud.z), cloud.z.shape[-1])

    if learned.arrives:
        position, arrival = lax.cond(
            # Not at the last: copies must part before particles repel each other.
            (done > at(FIRST_RESCUE, tuning)) & (done < at(ARRIVED, tuning)),
            lambda: rescue(key, cloud[:3], tuning.arrival, lost()),
            lambda: (cloud[:3], tuning.arrival),
        )
        cloud = cloud._replace(z=position[0], potential_energy=position[1], gradient=position[2])
        tuning = tuning._replace(arrival=jnp.clip(arrival, np.exp(-12.0), 1.0) if learned.scale else arrival)
    if learned.scale is not None:
        tuning, cloud = lax.cond(
            done <= at(FREEZE, tuning),
            lambda: _rescale(tuning, cloud),
            lambda: (tuning, cloud),
        )
    return tuning, cloud


def _follow(tuning, cloud, learned, interaction, due):
    """The bandwidth follows the cloud until scales are frozen, and then settles at the ends of windows.

    A cloud may shrink many times over while it travels. With the bandwidth it had before, all particles would be
    neighbours, and the step too long for the largest eigenvalue of such a K.
    """
    done = tuning.iteration
    interacts = (done >= at(ARRIVED, tuning)) if learned.arrives else True
    follows = interacts & ((done < at(FREEZE, tuning)) | due)
    number = jnp.sum(done >= at(np.array(SETTLING_ENDS), tuning))
    rule = learned.step_size or BiasBudget()
    return lax.cond(
        follows,
        lambda: settle_bandwidth(interaction, cloud.z, tuning.bandwidth, number, rule.tolerance, tuning.bias),
        lambda: tuning.bandwidth,
    )


def _rescale(tuning, cloud):
    change = tuning.moments.shape(tuning.iteration > at(FIRST_DENSE, tuning))
    # The carried noise is white in any coordinates.
    cloud = cloud._replace(z=change.whiten(cloud.z), gradient=change.pull(cloud.gradient))
    preconditioner, moments = tuning.preconditioner.after(change), tuning.moments.after(change)
    return tuning._replace(preconditioner=preconditioner, moments=moments), cloud


def _settle(key, tuning, cloud, learned, force, interaction, dynamics, num_steps, shared):
    """Measures curvature and gradient noise, and takes the step size from all measurements in these coordinates."""
    in_use = tuning.anchor.in_use if learned.anchor else jnp.zeros((), bool)
    scale = learned.scale
    width = WIDTH if scale else WIDTH * jnp.sqrt(tuning.arrival if learned.arrives else tuning.step_size)
    curvature, noise = measure(key, cloud.z, width, force, in_use, learned.anchor)
    if not learned.noise:
        # Without minibatches, midpoints differ by the third derivatives of U alone.
        noise = jnp.zeros_like(noise)
    changed = tuning.iteration <= at(FREEZE, tuning)
    known = tuning.measurements
    measurements = known._replace(
        number=jnp.where(changed, 0, known.number),
        **{name: jnp.where(changed, UNKNOWN, getattr(known, name)) for name in ("curvature", "noise", "steepness")},
    ).add(curvature, noise, measure_steepness(random.fold_in(key, 1), interaction, cloud.z, tuning.bandwidth))
    tuning = tuning._replace(measurements=measurements)
    plain, corrected = measurements.mean_noise
    if learned.anchor:
        tuning = tuning._replace(anchor=tuning.anchor._replace(in_use=corrected <= plain))
    if learned.step_size is None:
        return tuning
    coupling = interaction.couple(cloud.z, tuning.bandwidth)
    ends, shares = (np.array(column) for column in zip(*ANNEALING, strict=True))
    current = jnp.searchsorted(at(ends, tuning), tuning.iteration, side="right")
    share = jnp.asarray([*shares, 1.0], tuning.noise.dtype)[current]
    spread = tuning.spread(dynamics)
    landscape = survey(measurements, share * tuning.noise, spread, coupling, dynamics, shared)
    rule = learned.step_size
    draws_per_step = tuning.arrival.size * num_steps * tuning.num_warmup * dynamics.rate(spread, coupling) / 2.0
    step_size = rule.step_size(
        tolerated=dynamics.tolerated(rule.tolerance, landscape, coupling),
        # Half the limit of stability at typical particles.
        moderate=jnp.minimum(
            dynamics.stable(landscape._replace(largest=landscape.curvature), coupling) / 2.0,
            dynamics.worthwhile(landscape, draws_per_step),
        ),
        stable=dynamics.stable(landscape, coupling),
        # No step of this kind moves between basins; jumps do.
        draws_per_step=jnp.where(tuning.has_basins, jnp.inf, draws_per_step)
        if dynamics.is_sampler and not learned.jumps
        else jnp.inf,
    )
    usable = jnp.isfinite(step_size) & (step_size > 0)
    # Of particles that do not move nothing was measured: stay well below the steps that Metropolis accepted.
    accepted = jnp.exp(jnp.log(tuning.arrival).mean())
    step_size = jnp.where(usable, step_size, dynamics.comparable(0.1 * accepted))
    bias, effective_draws = dynamics.bias(step_size, landscape, coupling), step_size * draws_per_step
    found = {
        "step_size": step_size,
        "bias": jnp.where(jnp.isnan(bias), UNKNOWN, bias),
        "effective_draws": jnp.where(jnp.isnan(effective_draws), UNKNOWN, effective_draws),
    }
    return tuning._replace(**{name: value.astype(cloud.z.dtype) for name, value in found.items()})
