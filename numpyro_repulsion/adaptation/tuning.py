"""What warmup learns, and from what."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import lax, random
import jax.numpy as jnp
import numpy as np

from numpyro_repulsion.adaptation.arrival import rescue
from numpyro_repulsion.adaptation.bandwidth import settle_bandwidth
from numpyro_repulsion.adaptation.measurement import (
    CorrectableForce,
    Measurements,
    measure,
    measure_steepness,
    survey,
)
from numpyro_repulsion.adaptation.preconditioner import Moments, Preconditioner
from numpyro_repulsion.adaptation.timetable import (
    ANNEALING,
    ARRIVED,
    BEGINNINGS,
    FIRST_DENSE,
    FIRST_RESCUE,
    FREEZE,
    SETTLING_ENDS,
    at,
    is_due,
)
from numpyro_repulsion.dynamics import Cloud, Dynamics
from numpyro_repulsion.gradients import Anchor
from numpyro_repulsion.interactions import Interaction
from numpyro_repulsion.schedules import BiasBudget

__all__ = ["Learned", "Tuning", "adapt"]

#: Half the distance over which gradients are compared, where u has unit scale.
WIDTH = 0.2


class Learned(NamedTuple):
    """What a warmup learns; static.

    - **step_size** - the rule for the step size, or ``None`` where it is given.
    - **scale** - ``"diagonal"`` or ``"dense"``, or ``None`` where the preconditioner is given.
    - **bandwidth** - whether the interaction leaves one to be learned.
    - **anchor** - whether the gradient has control variates.
    - **noise** - whether gradients are noisy.
    - **jumps** - whether particles jump between modes.
    - **epoch** - after how many updates each particle's own reference is renewed; ``None`` where control variates have
      a common one.
    """

    step_size: BiasBudget | None
    scale: str | None
    bandwidth: bool
    anchor: bool
    noise: bool = False
    jumps: bool = False
    epoch: int | None = None

    @property
    def arrives(self) -> bool:
        """Whether particles move at steps of their own at first: where no step that suits them is given."""
        return self.step_size is not None or self.scale is not None

    @property
    def measures(self) -> bool:
        """Whether curvature and gradient noise are measured."""
        return self.step_size is not None or self.anchor


class Tuning(NamedTuple):
    """What warmup has learned so far, and what it learns from. Constant after warmup but for the count.

    - **iteration** - MCMC iterations done so far.
    - **num_warmup** - how many of them are warmup.
    - **preconditioner** - the linear change of variables in use.
    - **step_size** - ε, where it is measured.
    - **bias** - the relative inflation of variances that this ε is expected to cause; NaN where it is not measured.
    - **effective_draws** - how many independent draws a run as long as the warmup is then worth, for the direction that
      moves slowest; NaN where the step is not measured.
    - **bandwidth** - h, where an interaction learns it; NaN where none is in use.
    - **anchor** - the reference points of control variates, or ``None``. Each particle's own go on being renewed.
    - **arrival** - the step sizes of the particles while they arrive, ``(G, L)``.
    - **moments** - of the cloud in the current window; ``None`` without a warmup.
    - **measurements** - curvature and noise since the scales were frozen; ``None`` without a warmup.
    - **jumps** - what jumps have learned, or ``None``.
    """

    iteration: jax.Array
    num_warmup: jax.Array
    preconditioner: Preconditioner
    step_size: jax.Array
    bias: jax.Array
    effective_draws: jax.Array
    bandwidth: jax.Array
    anchor: Anchor | None
    arrival: jax.Array
    moments: Moments
    measurements: Measurements
    jumps: Any

    @property
    def noise(self) -> jax.Array:
        """The largest variance of the gradient in use, in any direction."""
        plain, corrected = self.measurements.mean_noise
        return plain if self.anchor is None else jnp.where(self.anchor.in_use, corrected, plain)

    def spread(self, dynamics: Dynamics) -> jax.Array:
        """The largest variance in any direction, in units of the temperature."""
        return self.moments.spread() / (dynamics.temperature or 1.0)

    @staticmethod
    def start(
        num_warmup: int,
        preconditioner: Preconditioner,
        step_size: float,
        bandwidth: jax.Array,
        cloud: Cloud,
        learned: Learned,
        jumps: Any = None,
    ) -> Tuning:
        """Nothing learned yet."""
        groups, size, dimension = cloud.z.shape
        nothing: Any = None
        dtype = cloud.z.dtype
        learns = num_warmup > 0
        anchor = nothing
        if learned.epoch is not None:
            anchor = Anchor.none(cloud.z.shape, dtype, in_use=not (learns and learned.arrives))
        elif learns and learned.anchor:
            anchor = Anchor.none(dimension, dtype)
        return Tuning(
            iteration=jnp.zeros((), jnp.int32),
            num_warmup=jnp.asarray(num_warmup, jnp.int32),
            preconditioner=preconditioner,
            step_size=jnp.asarray(step_size, dtype),
            bias=jnp.asarray(jnp.nan, dtype),
            effective_draws=jnp.asarray(jnp.nan, dtype),
            bandwidth=bandwidth,
            anchor=anchor,
            arrival=jnp.full((groups, size), 0.05, dtype),
            moments=Moments.empty(dimension, dtype, learned.scale == "dense") if learns else nothing,
            measurements=Measurements.empty(1 + len(SETTLING_ENDS), groups * size, dtype) if learns else nothing,
            jumps=jumps,
        )


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
    tuning = tuning._replace(moments=moments, iteration=tuning.iteration + 1)
    due = is_due(tuning)
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
    fresh = jnp.any(tuning.iteration == at(BEGINNINGS, tuning))
    moments = jax.tree.map(lambda x: jnp.where(fresh, jnp.zeros_like(x), x), tuning.moments)
    return moments.add(*(x.reshape(-1, x.shape[-1]) for x in (cloud.z, cloud.gradient)))


def _refit(key, tuning, cloud, learned, score):
    """Lost particles sent back, and new scales from the window's moments."""
    done = tuning.iteration
    if learned.arrives:
        position, arrival = lax.cond(
            # Not at the last: copies must part before particles repel each other.
            (done > at(FIRST_RESCUE, tuning)) & (done < at(ARRIVED, tuning)),
            lambda: rescue(key, cloud[:3], tuning.arrival, score(tuning, cloud.z) if learned.noise else None),
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
        **{name: jnp.where(changed, jnp.nan, getattr(known, name)) for name in ("curvature", "noise", "steepness")},
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
        # Jumps move between modes, as no step of this kind could.
        draws_per_step=draws_per_step if dynamics.is_sampler and not learned.jumps else jnp.inf,
    )
    usable = jnp.isfinite(step_size) & (step_size > 0)
    # Of particles that do not move nothing was measured: stay well below the steps that Metropolis accepted.
    accepted = jnp.exp(jnp.log(tuning.arrival).mean())
    step_size = jnp.where(usable, step_size, dynamics.comparable(0.1 * accepted))
    found = {
        "step_size": step_size,
        "bias": dynamics.bias(step_size, landscape, coupling),
        "effective_draws": step_size * draws_per_step,
    }
    return tuning._replace(**{name: value.astype(cloud.z.dtype) for name, value in found.items()})
