"""Estimates of the bias that the step size adds to the stationary distribution of a run, without exact draws."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
from jax import random
import jax.numpy as jnp
import numpy as np

from numpyro.infer import MCMC

from numpyro_repulsion.checks import integer
from numpyro_repulsion.diagnostics import ensemble_mcse
from numpyro_repulsion.dynamics import CurvatureStats
from numpyro_repulsion.gradients import Particle, compiled, ravel_cloud
from numpyro_repulsion.kernels import (
    ParticleKernel,
    arguments,
    bound_of,
    halved_series,
    has_other_data,
    kernel_of,
    require_draws,
)
from numpyro_repulsion.processes import is_spread
from numpyro_repulsion.warmup import Measurements, estimate_curvature, measure_steepness, summarize_curvature

__all__ = ["StepBias", "predict_bias", "predict_fall", "sampler_of", "step_bias", "step_in_use"]

#: Half the distance over which gradients are compared, in units of the distance of one update.
WIDTH = 0.2
#: Largest number of entries of one series of a segment; for larger particles only some coordinates are followed.
MAX_ENTRIES = 2**24
#: With a larger inflation the step is near or beyond the limit of stability, and the size means nothing.
MAX_PREDICTED = 3.0


class StepBias(NamedTuple):
    """The bias that the step size adds to a run, relative to variances: 0.1 makes a posterior sd 5 % too wide.

    - **step_size** - the ε in use; for a schedule, the longest step that made a draw.
    - **predicted** - the largest inflation of a variance, from step size, curvature and gradient noise. It is
      conservative, because it is that of the stiffest direction. NaN where there is no estimate:
      :class:`~numpyro_repulsion.dynamics.Recipe`, and momenta with a K_ii that depends on the particles.
    - **predicted_noise** - the inflation from gradient noise alone.
    - **observed** - the mean of ``observed_by_parameter``. This and all fields below are ``None`` unless a segment was
      run.
    - **observed_error** - its standard error; NaN if the segment is too short to estimate it, as for
      :func:`~numpyro_repulsion.ensemble_mcse`.
    - **observed_by_parameter** - ``E[(z − E z) ∂U/∂z] / T − 1`` for each unconstrained parameter, in the structure of
      one particle; for sites that warmup centered partly, in the coordinates in which they move. It is 0 for the
      posterior; for a Gaussian it is the relative inflation of the variance. It is negative for a cloud that is too
      narrow.
    - **observed_error_by_parameter** - standard errors of ``observed_by_parameter``.
    - **halving_by_parameter** - the relative fall of each variance when the step is halved: about half the bias if that
      is of first order in ε, three quarters if it is of second order.
    - **halving_error_by_parameter** - standard errors of ``halving_by_parameter``.

    **Example**

    .. doctest::

        >>> from numpyro_repulsion.bias import StepBias
        >>> print(StepBias(step_size=0.1, predicted=0.053, predicted_noise=0.01))
        Step size 0.1: variances at most about 5.3 % too large by estimate (1.0 % from gradient noise).
    """

    step_size: float
    predicted: float
    predicted_noise: float
    observed: float | None = None
    observed_error: float | None = None
    observed_by_parameter: Particle | None = None
    observed_error_by_parameter: Particle | None = None
    halving_by_parameter: Particle | None = None
    halving_error_by_parameter: Particle | None = None

    def __str__(self):
        text = f"Step size {self.step_size:.3g}: variances "
        if np.isnan(self.predicted):
            text += "too large by an unknown amount (there is no estimate for this dynamics)"
        elif self.predicted > MAX_PREDICTED:
            text += f"more than {100 * MAX_PREDICTED:.0f} % too large by estimate, if it is stable at all"
        else:
            text += f"at most about {100 * self.predicted:.1f} % too large by estimate "
            text += f"({100 * self.predicted_noise:.1f} % from gradient noise)"
        if self.observed is not None:
            text += f"; {100 * self.observed:.1f} "
            if self.observed_error is not None and np.isfinite(self.observed_error):
                text += f"± {100 * self.observed_error:.1f} % on average, as observed"
            else:
                text += "% on average, as observed, with unknown precision: take a longer segment (num_samples)"
        return text + "."


def step_bias(mcmc: MCMC, rng_key: jax.Array | None = None, *, num_samples: int = 0) -> StepBias:
    r"""Estimates the bias that the step size and minibatches add to a run, without exact draws.

    Three estimates share no assumption:

    - from step size, curvature and gradient noise, as in warmup (measured again on the last cloud if the step was
      given, or if the run has other data than its warmup);
    - from Stein's identity, :math:`\mathbb E_\pi[(z_j - \mathbb E z_j)\, \partial_j U] = T`, on a segment that
      continues from the last state with the same step;
    - from the variances of another cloud, which the same noise moves with half the step. The two clouds stay close, so
      that the difference of their variances is far more precise than each of them, unless particles repel each other.

    Segments run only if ``num_samples`` is above 0. All estimates are relative to variances at the temperature T of the
    dynamics. For a schedule, all three are for the longest step that made a draw.

    :param mcmc: an ``MCMC`` that has run with a kernel of this package; it does not change.
    :param rng_key: the key of the segments; ``None`` continues with the run's own.
    :param num_samples: iterations in the segment with the same step. Half as many go before, in which the cloud with
        half the step finds its own distribution; it makes twice as many updates. In all, that costs as much as 4.5
        times as many iterations of the run. Standard errors of the observed bias are about ``sqrt(2 / ESS)`` of the
        segment, and it is too low by about ``1 / ESS``; those of the fall by half the step are far smaller, but for
        particles that repel each other.
    :return: see :class:`StepBias`.
    :raises TypeError: if ``mcmc`` is not an ``MCMC`` with a kernel of this package.
    :raises ValueError: before the run, for an optimizer (SVGD), or if ``num_samples`` is neither 0 nor 8 or more.

    **References:**

    1. *Measuring Sample Quality with Stein's Method*, J. Gorham and L. Mackey, https://arxiv.org/abs/1506.03039

    **Example**

    .. doctest::

        >>> from jax import random
        >>> import jax.numpy as jnp
        >>> from numpyro.infer import MCMC
        >>> from numpyro_repulsion import SGLD, step_bias
        >>> from numpyro_repulsion.dynamics import Overdamped
        >>> mcmc = MCMC(SGLD(potential_fn=lambda z: jnp.sum(z**2) / 2, step_size=0.2, dynamics=Overdamped("euler")),
        ...             num_warmup=0, num_samples=100, num_chains=10, chain_method="vectorized", progress_bar=False)
        >>> mcmc.run(random.key(0), init_params=random.normal(random.key(1), (10, 3)))
        >>> f"{step_bias(mcmc).predicted:.3f}"  # ε/2 / (1 − ε/2)
        '0.111'
    """
    kernel = sampler_of(mcmc, "step_bias")
    if 0 < (num_samples := integer("`num_samples`", num_samples, 0, "0, or 8 or more")) < 8:
        raise ValueError(f"`num_samples` must be 0, or 8 or more; got {num_samples!r}.")
    known = StepBias(step_in_use(mcmc), *predict_bias(mcmc))
    if num_samples == 0:
        return known
    state = mcmc.last_state
    particles = state.z if np.ndim(state.potential_energy) else jax.tree.map(lambda x: x[None], state.z)
    flat, unravel = ravel_cloud(particles)
    # As many coordinates as fit, evenly spread.
    most = max(1, MAX_ENTRIES // (num_samples * len(flat)))
    followed = np.unique(np.linspace(0, flat.shape[1] - 1, min(most, flat.shape[1])).round().astype(int))
    center = (flat if state.coordinates is None else state.coordinates[0]).mean(0)

    def observe(iteration, warmup, cloud):
        change = warmup.scales.preconditioner
        # Centered, because squares of positions far from the origin lose their digits in single precision.
        z, gradient = change.to_positions(cloud.z) - center, change.unwhiten_gradient(cloud.gradient)
        z, gradient = z[..., followed], gradient[..., followed]
        return jnp.concatenate([z, z**2, gradient, z * gradient], -1)

    found = halved_series(mcmc, rng_key, num_samples, step_in_use(mcmc), observe)
    series, changes = (np.split(x, 4, -1) for x in found)
    z, square, gradient, product = series
    mean = z.mean((0, 1))
    stein = (product - mean * gradient) / kernel.dynamics.temperature - 1.0
    variance = (square - mean**2).mean((0, 1))
    falls = -(changes[1] - 2.0 * mean * changes[0]) / variance
    overall, groups = stein.mean(-1), len(stein)

    def shaped(values):
        return unravel(jnp.full(flat.shape[1], jnp.nan, flat.dtype).at[followed].set(values))

    return known._replace(
        observed=float(overall.mean()),
        observed_error=float(ensemble_mcse(overall, groups)),
        observed_by_parameter=shaped(stein.mean((0, 1))),
        observed_error_by_parameter=shaped(ensemble_mcse(stein, groups)),
        halving_by_parameter=shaped(falls.mean((0, 1))),
        halving_error_by_parameter=shaped(ensemble_mcse(falls, groups)),
    )


def predict_bias(mcmc: MCMC, is_other: bool | None = None) -> tuple[float, float]:
    """Return the predicted relative inflation of variances for the step in use, and that from gradient noise alone.

    :param mcmc: for several plain chains, the first one counts.
    :param is_other: whether the run has other data than its warmup, so that warmup's measurements do not count;
        ``None`` finds out.
    """
    return _predicted(mcmc, has_other_data(mcmc) if is_other is None else is_other, step_in_use(mcmc))


def predict_fall(mcmc: MCMC, times: int = 1) -> tuple[float, float]:
    """Return the predicted bias with half the step as a share of that with the step; and that with the step.

    The share is 1/2 for a bias of first order in ε, as that of minibatches, and 1/4 for one of second order. Where
    nothing is predicted, it is 1/2, and the bias 0.

    :param times: after halving the step in use how many times; at least once.
    """
    is_other, step_size = has_other_data(mcmc), step_in_use(mcmc)
    before, after = (_predicted(mcmc, is_other, step_size / 2**k)[0] for k in (times - 1, times))
    if not 0.0 < before < MAX_PREDICTED:
        return 0.5, 0.0
    return 0.5 if bound_of(mcmc).plan("diagonal").noise else min(max(after / before, 0.25), 0.5), before


def _predicted(mcmc, is_other, step_size):
    """Return the predicted inflation, and that from noise alone."""
    state = mcmc.last_state
    step_size = jnp.asarray(step_size, state.step_size.dtype)
    kernel, target = mcmc.sampler, bound_of(mcmc).target
    if any(map(is_spread, jax.tree.leaves((target.args, target.kwargs)))):
        program = compiled(lambda own, *given: _predict(kernel, own.args, own.kwargs, is_other, *given), target)
    else:
        program = jax.jit(partial(_predict, kernel, *arguments(mcmc), is_other))
    predicted, noise = program(state, step_size)
    return float(predicted), float(noise)


def step_in_use(mcmc: MCMC) -> float:
    """Return the ε in use, of a schedule the longest that made a draw."""
    if callable(mcmc.sampler.step_size):
        return float(np.max(mcmc.get_extra_fields()["step_size"]))
    return float(np.ravel(mcmc.last_state.step_size)[0])


def sampler_of(mcmc: object, who: str) -> ParticleKernel:
    """Return the kernel of a run that has draws of a posterior.

    :param who: what was called with it, for the message.
    :raises TypeError: for anything but an ``MCMC`` with a kernel of this package.
    :raises ValueError: before the run, and for an optimizer.
    """
    kernel = kernel_of(mcmc, who)
    require_draws(mcmc)
    if not kernel.dynamics.is_sampler:
        raise ValueError(
            f"{type(kernel).__name__} is an optimizer of the cloud: no step size makes it draw from the posterior. "
            "Use SGLDR for draws."
        )
    return kernel


def _predict(kernel, args, kwargs, is_other, state, step_size):
    iteration, cloud = kernel.parts(state, args, kwargs)
    warmup, plan, dynamics = state.warmup, iteration.plan, kernel.dynamics
    interaction = kernel.interaction.at(random.key(0), state.num_updates)
    coupling = interaction.couple(cloud.z, warmup.bandwidth)
    if is_other or warmup.step.measurements is None or not plan.measures:
        one = Measurements.empty(1, cloud.potential_energy.size, cloud.z.dtype)
        width = WIDTH * jnp.sqrt(step_size)
        in_use = jnp.zeros((), bool) if warmup.reference is None else warmup.reference.in_use
        curvature, noise, isotropic_noise = estimate_curvature(
            random.key(0), cloud.z, width, iteration.energy_and_grad(warmup), in_use, False
        )
        if not plan.noise:
            noise = isotropic_noise = jnp.zeros_like(noise)
        steepness = measure_steepness(random.key(0), interaction, cloud.z, warmup.bandwidth)
        measurements = one.add(curvature, noise, isotropic_noise, steepness)
        warmup = warmup._replace(step=warmup.step._replace(measurements=measurements))
    spread = jnp.inf if is_other or warmup.scales.moments is None else warmup.spread(dynamics)
    both = warmup.noise, warmup.isotropic_noise
    stats = summarize_curvature(
        warmup.step.measurements, both, spread, coupling, dynamics, iteration.shares_minibatches, plan.sweep
    )
    error = dynamics.step_error(coupling)
    without_curvature = CurvatureStats(
        jnp.zeros(()),
        jnp.zeros(()),
        error.remaining_noise(step_size, stats),
        isotropic_noise=stats.isotropic_noise,
    )
    return error.bias(step_size, stats), error.bias(step_size, without_curvature)
