"""Estimates of the bias that the step size adds to the stationary distribution of a run, without exact draws."""

from __future__ import annotations

import copy
from functools import partial
from typing import NamedTuple

import jax
from jax import lax, random
import jax.numpy as jnp
import numpy as np

from numpyro.infer import MCMC

from numpyro_repulsion.checks import integer
from numpyro_repulsion.diagnostics import ensemble_mcse
from numpyro_repulsion.dynamics import CurvatureStats
from numpyro_repulsion.gradients import Particle, compiled, ravel_cloud
from numpyro_repulsion.kernels import arguments, bound_of, has_other_data, kernel_of, require_draws
from numpyro_repulsion.processes import is_spread
from numpyro_repulsion.warmup import Measurements, estimate_curvature, measure_steepness, summarize_curvature

__all__ = ["StepBias", "predict_bias", "step_bias"]

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
      :class:`~numpyro_repulsion.Recipe`, and momenta with a K_ii that depends on the particles.
    - **predicted_noise** - the inflation from gradient noise alone.
    - **observed** - the mean of ``observed_by_parameter``. This and all fields below are ``None`` unless a segment was
      run.
    - **observed_error** - its standard error; NaN if the segment is too short to estimate it, as for
      :func:`~numpyro_repulsion.ensemble_mcse`.
    - **observed_by_parameter** - ``E[(z − E z) ∂U/∂z] / T − 1`` for each unconstrained parameter, in the structure of
      one particle; for sites that warmup centred partly, in the coordinates in which they move. It is 0 for the
      posterior; for a Gaussian it is the relative inflation of the variance. It is negative for a cloud that is too
      narrow.
    - **observed_error_by_parameter** - standard errors of ``observed_by_parameter``.
    - **halving_by_parameter** - the relative fall of each variance when the step is halved: about half the bias if that
      is of first order in ε, three quarters if it is of second order.
    - **halving_error_by_parameter** - standard errors of ``halving_by_parameter``.

    **Example**

    .. doctest::

        >>> from numpyro_repulsion import StepBias
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
    - from the variances of another segment with half the step.

    Segments run only if ``num_samples`` is above 0. All estimates are relative to variances at the temperature T of the
    dynamics. For a schedule, all three are for the longest step that made a draw.

    :param mcmc: an ``MCMC`` that has run with a kernel of this package; it does not change.
    :param rng_key: the key of the segments; ``None`` continues with the run's own.
    :param num_samples: iterations in the segment with the same step. The segment with half the step has three times as
        many; its first third lets the particles settle. Standard errors are about ``sqrt(2 / ESS)`` of the segment, and
        the observed bias is too low by about ``1 / ESS``, so choose enough for hundreds of effective draws.
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
        >>> from numpyro_repulsion import SGLD, Overdamped, step_bias
        >>> mcmc = MCMC(SGLD(potential_fn=lambda z: jnp.sum(z**2) / 2, step_size=0.2, dynamics=Overdamped("euler")),
        ...             num_warmup=0, num_samples=100, num_chains=10, chain_method="vectorized", progress_bar=False)
        >>> mcmc.run(random.key(0), init_params=random.normal(random.key(1), (10, 3)))
        >>> f"{step_bias(mcmc).predicted:.3f}"  # ε/2 / (1 − ε/2)
        '0.111'
    """
    kernel, state, args, kwargs = _finished(mcmc)
    if 0 < (num_samples := integer("`num_samples`", num_samples, 0, "0, or 8 or more")) < 8:
        raise ValueError(f"`num_samples` must be 0, or 8 or more; got {num_samples!r}.")
    step_size = _step_size(mcmc)
    known = StepBias(step_size, *predict_bias(mcmc))
    if num_samples == 0:
        return known
    if rng_key is not None:
        is_many = np.ndim(state.num_updates)
        state = state._replace(rng_key=random.split(rng_key, len(state.num_updates)) if is_many else rng_key)
    particles = state.z if np.ndim(state.potential_energy) else jax.tree.map(lambda x: x[None], state.z)
    flat, unravel = ravel_cloud(particles)
    # As many coordinates as fit, evenly spread.
    most = max(1, MAX_ENTRIES // (num_samples * len(flat)))
    followed = np.unique(np.linspace(0, flat.shape[1] - 1, min(most, flat.shape[1])).round().astype(int))
    centre = (flat if state.coordinates is None else state.coordinates[0]).mean(0)
    program = jax.jit(partial(_segment, kernel, args, kwargs, followed, int(num_samples), centre))
    # Plain chains that measured their steps have one step each.
    steps = jnp.ravel(state.step_size) if np.ndim(state.num_updates) and not callable(kernel.step_size) else step_size
    _, same = program(state, steps)
    settled, _ = program(state, steps / 2)
    halves = []
    for _ in range(2):
        settled, half = program(settled, steps / 2)
        halves.append(half)
    series = [np.asarray(x, np.float64) for x in same]
    half = [np.concatenate([np.asarray(x, np.float64) for x in pair], 1) for pair in zip(*halves, strict=True)]
    stein = _stein(series) / kernel.dynamics.temperature - 1.0
    groups = len(stein)
    overall = stein.mean(-1)
    squares, half_squares = _squares(series), _squares(half)
    variance, half_variance = squares.mean((0, 1)), half_squares.mean((0, 1))
    error = np.hypot(ensemble_mcse(squares, groups) / variance, ensemble_mcse(half_squares, groups) / half_variance)

    def shaped(values):
        return unravel(jnp.full(flat.shape[1], jnp.nan, flat.dtype).at[followed].set(values))

    return known._replace(
        observed=float(overall.mean()),
        observed_error=float(ensemble_mcse(overall, groups)),
        observed_by_parameter=shaped(stein.mean((0, 1))),
        observed_error_by_parameter=shaped(ensemble_mcse(stein, groups)),
        halving_by_parameter=shaped(1.0 - half_variance / variance),
        halving_error_by_parameter=shaped(error * half_variance / variance),
    )


def predict_bias(mcmc: MCMC, is_other: bool | None = None) -> tuple[float, float]:
    """Return the predicted relative inflation of variances for the step in use, and that from gradient noise alone.

    :param mcmc: for several plain chains, the first one counts.
    :param is_other: whether the run has other data than its warmup, so that warmup's measurements do not count;
        ``None`` finds out.
    """
    is_other = has_other_data(mcmc) if is_other is None else is_other
    state = mcmc.last_state
    if np.ndim(state.num_updates):
        state = jax.tree.map(lambda x: x[0], state)
    step_size = jnp.asarray(_step_size(mcmc), state.step_size.dtype)
    kernel, target = mcmc.sampler, bound_of(mcmc).target
    if any(map(is_spread, jax.tree.leaves((target.args, target.kwargs)))):
        program = compiled(lambda own, *given: _predict(kernel, own.args, own.kwargs, is_other, *given), target)
    else:
        program = jax.jit(partial(_predict, kernel, *arguments(mcmc), is_other))
    predicted, noise = program(state, step_size)
    return float(predicted), float(noise)


def _step_size(mcmc):
    """Return the ε in use: of several plain chains that of the first, of a schedule the longest that made a draw."""
    if callable(mcmc.sampler.step_size):
        return float(np.max(mcmc.get_extra_fields()["step_size"]))
    return float(np.ravel(mcmc.last_state.step_size)[0])


def _finished(mcmc):
    kernel = kernel_of(mcmc, "step_bias")
    require_draws(mcmc)
    if not kernel.dynamics.is_sampler:
        raise ValueError(
            f"{type(kernel).__name__} is an optimizer of the cloud: no step size makes it draw from the posterior. "
            "Use SGLDR for draws."
        )
    return kernel, mcmc.last_state, *arguments(mcmc)


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


def _segment(kernel, args, kwargs, followed, num_samples, centre, state, step_size):
    """Return the state after ``num_samples`` iterations, and series of ensemble means, each ``(groups, n, d)``.

    :param step_size: a scalar, or one for each of several plain chains.
    """

    def run(state, step_size):
        constant = copy.copy(kernel)
        # Settings cannot be set again, but this copy has no compiled program yet.
        vars(constant)["schedule"] = lambda count: step_size

        def iterate(state, _):
            state = constant.sample(state, args, kwargs)
            _, cloud = constant.parts(state, args, kwargs)
            change = state.warmup.scales.preconditioner
            # Centred, because squares of positions far from the origin lose their digits in single precision.
            z, gradient = (
                x[..., followed]
                for x in (change.to_positions(cloud.z) - centre, change.unwhiten_gradient(cloud.gradient))
            )
            return state, tuple(x.mean(-2) for x in (z, z**2, gradient, z * gradient))

        return lax.scan(iterate, state, length=num_samples)

    if jnp.ndim(state.num_updates):
        state, series = jax.vmap(run)(state, jnp.broadcast_to(step_size, state.num_updates.shape))
        return state, tuple(x[:, :, 0] for x in series)
    state, series = run(state, step_size)
    series = tuple(jnp.moveaxis(x, 0, 1) for x in series)
    if kernel.interaction.balances_ensembles:
        series = tuple(x.mean(0, keepdims=True) for x in series)
    return state, series


def _stein(series):
    """Return ``(z − E z) ∂U/∂z`` from series of z, its square, the gradient, and the product of z and gradient."""
    z, _, gradient, product = series
    return product - z.mean((0, 1)) * gradient


def _squares(series):
    """Return ``(z − E z)²`` from the same series."""
    z, square, _, _ = series
    mean = z.mean((0, 1))
    return square - 2.0 * mean * z + mean**2
