"""The bias that the step size adds to the stationary distribution of a run: estimated, and extrapolated away."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
import math
from typing import Any, NamedTuple

import jax
from jax import random
import jax.numpy as jnp
import numpy as np

from numpyro.infer import MCMC

from numpyro_repulsion.checks import device_memory, integer
from numpyro_repulsion.diagnostics import ensemble_mcse
from numpyro_repulsion.dynamics import CurvatureStats
from numpyro_repulsion.gradients import ModelTarget, Particle, compiled, ravel_cloud
from numpyro_repulsion.interactions import Coupling
from numpyro_repulsion.interactions.base import MOST_REPLACED
from numpyro_repulsion.kernels.halving import halved_series
from numpyro_repulsion.kernels.runs import (
    bound_of,
    coupling_of,
    evenly_spread,
    flat_values,
    has_other_data,
    kernel_of_run,
)
from numpyro_repulsion.warmup import MeasuredFigures, Measurements
from numpyro_repulsion.warmup.bandwidth import measure_steepness
from numpyro_repulsion.warmup.curvature import UNKNOWN, estimate_curvature, summarize_curvature
from numpyro_repulsion.warmup.step_size import without_known

#: Largest number of entries of one series of a segment; for larger particles only some coordinates are followed.
MAX_ENTRIES = 2**24
#: With a larger inflation the step is near or beyond the limit of stability, and the size means nothing.
MAX_PREDICTED = 3.0


class StepBias(NamedTuple):
    """The bias that the step size adds to a run, relative to variances: 0.1 makes a posterior sd 5 % too wide.

    - **step_size** - the ε in use; for a schedule, the longest step that made a draw.
    - **predicted** - the largest inflation of a variance, that of the stiffest direction, from step size, curvature and
      gradient noise. NaN where there is no estimate: :class:`~numpyro_repulsion.dynamics.Recipe`, and momenta with a
      K_ii that depends on the particles.
    - **predicted_noise** - the inflation from gradient noise alone.
    - **observed** - the mean of ``observed_by_parameter``. This and all fields below are ``None`` without a segment.
    - **observed_error** - its standard error; NaN as for :func:`~numpyro_repulsion.ensemble_mcse`.
    - **observed_by_parameter** - ``E[(z − E z) ∂U/∂z] / T − 1`` for each unconstrained parameter, in the structure of
      one particle; for sites that warmup centered partly, in the coordinates in which they move. It is 0 for the
      posterior; for a Gaussian it is the relative inflation of the variance. It is negative for a cloud that is too
      narrow.
    - **halving_by_parameter** - the relative fall of each variance when the step is halved: about half the bias if that
      is of first order in ε, three quarters if it is of second order.
    - **observed_error_by_parameter**, **halving_error_by_parameter** - standard errors of these two.

    **Example**

    .. doctest::

        >>> from numpyro_repulsion.bias import StepBias
        >>> print(StepBias(step_size=0.1, predicted=0.053, predicted_noise=0.01))
        Step size 0.1: variances at most about 5.3% too large by estimate (1.0% from gradient noise).
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
            text += f"more than {100 * MAX_PREDICTED:.0f}% too large by estimate, and the step may be unstable"
        else:
            text += f"at most about {100 * self.predicted:.1f}% too large by estimate "
            text += f"({100 * self.predicted_noise:.1f}% from gradient noise)"
        if self.observed is not None:
            text += f"; {100 * self.observed:.1f}"
            if self.observed_error is not None and np.isfinite(self.observed_error):
                text += f" ± {100 * self.observed_error:.1f}% on average, as observed"
            else:
                text += "% on average, as observed, with unknown precision: raise `num_samples`"
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

    All are relative to variances at the temperature T of the dynamics. For a schedule they are for the longest step
    that made a draw.

    :param mcmc: an ``MCMC`` that has run with a kernel of this package; it does not change.
    :param rng_key: the key of the segments; ``None`` continues with the run's own.
    :param num_samples: iterations in the segment with the same step; 0 for none. Half as many go before, in which the
        cloud with half the step finds its own distribution; that costs 4.5 times as much as iterations of the run.
        Standard errors of the observed bias are about ``sqrt(2 / ESS)`` of the segment, and it is too low by about
        ``1 / ESS``; those of the fall by half the step are far smaller, but for particles that repel each other.
    :return: see :class:`~numpyro_repulsion.bias.StepBias`.
    :raises TypeError: if ``mcmc`` is not an ``MCMC`` with a kernel of this package.
    :raises ValueError: before the run, for an optimizer (SVGD), or if ``num_samples`` is neither 0 nor 8 or more.

    **References:**

    1. *Measuring Sample Quality with Stein's Method*, J. Gorham and L. Mackey, https://arxiv.org/abs/1506.03039

    **Example**

    .. doctest::

        >>> from jax import random
        >>> from numpyro.infer import MCMC
        >>> from numpyro_repulsion import SGLD, step_bias
        >>> from numpyro_repulsion.dynamics import Overdamped
        >>> mcmc = MCMC(SGLD(potential_fn=lambda z: z @ z / 2, step_size=0.2, dynamics=Overdamped("euler")),
        ...             num_warmup=0, num_samples=100, num_chains=10, chain_method="vectorized", progress_bar=False)
        >>> mcmc.run(random.key(0), init_params=random.normal(random.key(1), (10, 3)))
        >>> f"{step_bias(mcmc).predicted:.3f}"  # ε/2 / (1 − ε/2)
        '0.111'
    """
    kernel = kernel_of_run(mcmc, "step_bias", of_warmup=True)
    num_samples = integer("`num_samples`", num_samples, 8 if num_samples else 0, "0, or 8 or more")
    step = _step_in_use(mcmc)
    known = StepBias(step, *predict_bias(mcmc)())
    if num_samples == 0:
        return known
    state = mcmc.last_state
    flat, unravel = ravel_cloud(state.with_particle_axis().z)
    # As many coordinates as fit, evenly spread.
    followed = evenly_spread(flat.shape[1], max(1, MAX_ENTRIES // (num_samples * len(flat))))
    center = (flat if state.coordinates is None else state.coordinates[0]).mean(0)

    def observe(mover, learned, cloud):
        change = learned.preconditioner
        # Centered, because squares of positions far from the origin lose their digits in single precision.
        z, gradient = change.to_positions(cloud.z) - center, change.unwhiten_gradient(cloud.gradient)
        z, gradient = z[..., followed], gradient[..., followed]
        return jnp.concatenate([z, z**2, gradient, z * gradient], -1)

    found = halved_series(mcmc, rng_key, num_samples, step, observe)
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


class ExtrapolatedMeans(NamedTuple):
    """Posterior means extrapolated to ε = 0; :func:`~numpyro_repulsion.extrapolate` returns it.

    - **mean** - the means, as a pytree like the values of the function.
    - **mcse** - their standard errors: those of draws and of the shift, and what the shift may leave of the bias, half
      the predicted bias of variances times the shift. NaN where there are too few iterations for one of them.
    - **plain_mean**, **plain_mcse** - the same of the run's draws alone.
    - **shift**, **shift_mcse** - what was added to ``plain_mean``, and its standard error: the estimated bias of the
      step size, with the opposite sign.
    - **step_size** - ε of the run.
    - **fall** - r, the share of the bias that halving the smaller step once more would leave: 1/2 for first order in ε,
      1/4 for second.

    **Example**

    .. doctest::

        >>> from numpyro_repulsion.bias import ExtrapolatedMeans
        >>> found = ExtrapolatedMeans(1.00, 0.012, 1.05, 0.011, -0.05, 0.004, step_size=0.1, fall=0.5)
        >>> abs(found.shift) > 3 * found.shift_mcse  # the bias of the plain mean is no chance
        True
    """

    mean: Any
    mcse: Any
    plain_mean: Any
    plain_mcse: Any
    shift: Any
    shift_mcse: Any
    step_size: float
    fall: float


def extrapolate(
    mcmc: MCMC,
    function: Callable | None = None,
    *,
    num_samples: int | None = None,
    levels: int = 1,
    rng_key: jax.Array | None = None,
) -> ExtrapolatedMeans:
    r"""Return posterior means of a function, extrapolated from the step size of the run to a step of size zero.

    .. math::
        \hat E_0 f = E_\epsilon f + \sum_{l < k} \Delta_l + \frac{r}{1 - r}\, \Delta_{k-1}, \qquad
        \Delta_l = E_{\epsilon / 2^{l+1}} f - E_{\epsilon / 2^l} f

    with k = ``levels``: Richardson's extrapolation. :math:`E_\epsilon f` is the mean of the run's draws. Each
    :math:`\Delta_l` comes from two clouds that start at the last state and move by the same noise and minibatches, one
    with half the step of the other. They stay close, so their difference has little noise. r is the share of the bias
    that is left with half the step: 1/2 with minibatches, whose bias is of first order in ε; without them, what the
    order of the integrator and the curvature predict, 1/4 to 1/2. What remains with minibatches is of second order;
    without, it is small where the prediction is good. More levels leave less.

    What no step size causes is not removed: particles that have not converged, or clipped gradients. Particles that
    repel each other do not stay close if the same noise moves them: for the same ``shift_mcse`` they need ten to a
    hundred times as many iterations, and draws with half the step are as good.

    :param mcmc: an ``MCMC`` that has run with a kernel of this package that samples; it does not change.
    :param function: of one draw, ``{site: value}`` with the constrained and deterministic sites; returns a pytree of
        numbers. ``None`` is the draw itself: the means of all sites.
    :param num_samples: iterations with ε for :math:`\Delta_0`; half as many go before, in which clouds find their
        distributions. They cost 4.5 times as much as iterations of the run. ``None`` makes all levels together cost
        half as much as the run, without its warmup: a ninth of its iterations for one level.
    :param levels: how many times the step is halved. Each level costs twice as much as the one before.
    :param rng_key: the key of the clouds; ``None`` goes on with the run's own.
    :raises TypeError: if ``mcmc`` is not an ``MCMC`` with a kernel of this package.
    :raises ValueError: before the run; after a warmup; for an optimizer (:class:`~numpyro_repulsion.SVGD`); for a
        schedule of step sizes; with ``moves``, which are exact for any step and make r unknown; for fewer than 8
        iterations; for a step near or beyond the limit of stability; for a function without values, or of sites that
        the run left out; and for so many values that their series would take a quarter of the memory.

    **References:**

    1. *Stochastic Gradient Richardson-Romberg Markov Chain Monte Carlo*, A. Durmus, U. Şimşekli, E. Moulines, R. Badeau
       and G. Richard, NIPS 2016
    2. *Multi-index/multilevel Monte Carlo for Langevin dynamics*: M. B. Giles, M. B. Majka, L. Szpruch, S. J. Vollmer
       and K. C. Zygalakis, *Multi-level Monte Carlo methods for the approximation of invariant measures of stochastic
       differential equations*, https://arxiv.org/abs/1605.01384

    **Example**

    .. doctest::

        >>> from jax import random
        >>> import numpyro
        >>> import numpyro.distributions as dist
        >>> from numpyro.infer import MCMC
        >>> from numpyro_repulsion import SGLD, extrapolate
        >>> from numpyro_repulsion.dynamics import Overdamped
        >>> kernel = SGLD(lambda: numpyro.sample("x", dist.Normal(0, 1)), step_size=0.5, dynamics=Overdamped("euler"))
        >>> mcmc = MCMC(kernel, num_warmup=100, num_samples=2000, num_chains=20, chain_method="vectorized",
        ...             progress_bar=False)
        >>> mcmc.run(random.key(0))
        >>> found = extrapolate(mcmc, lambda draw: draw["x"] ** 2)  # 1; Euler's is 1 / (1 − ε/2) = 1.33
        >>> f"{found.plain_mean:.1f} {found.mean:.1f}"
        '1.3 1.0'
    """
    kernel = kernel_of_run(mcmc, "extrapolate")
    if callable(kernel.step_size):
        raise ValueError(
            "A schedule uses steps of many sizes, so there is no single step size to extrapolate from. Run with a "
            "number as `step_size`, or without one."
        )
    # Jumps that warmup switched on by itself stand in its results only.
    if kernel.moves is not None or mcmc.last_state.learned.jumps is not None:
        raise ValueError(
            "Jumps between basins are exact for any step size, so the bias of draws is not proportional to a power of "
            "it. Compare with a run with half the `step_size`."
        )
    levels, step = integer("`levels`", levels), _step_in_use(mcmc)
    predicted = predict_bias(mcmc)
    if predicted()[0] > MAX_PREDICTED:
        raise ValueError(
            f"The step size makes variances more than {100 * MAX_PREDICTED:.0f}% too large by estimate, and may be "
            "unstable. This step is too large to extrapolate. Run with a tenth of `step_size`, or without one."
        )
    draws, target = mcmc.get_samples(group_by_chain=True), bound_of(mcmc).target
    has_all, function = function is None, function or (lambda draw: draw)
    number = _num_values(function, draws)
    shape = jax.tree.leaves(draws)[0].shape[:2]
    if num_samples is None:
        num_samples = max(8, shape[1] * mcmc.thinning // (9 * (2**levels - 1)))
    num_samples = integer("`num_samples`", num_samples, 8)
    if shape[1] < 4:
        raise ValueError(f"Standard errors need at least four draws of each particle; the run has {shape[1]}.")
    # Of both clouds, with what goes before.
    needed = 12 * number * kernel.num_ensembles * num_samples * 2 ** (levels - 1)
    if needed > device_memory() / 4:
        raise ValueError(
            f"{number:,} values in {num_samples} iterations would take {needed / 2**30:.1f} GiB. Give a `function` "
            "of a draw with fewer values."
        )
    values = draws if has_all else jax.jit(jax.vmap(jax.vmap(function)))(jax.tree.map(jnp.asarray, draws))
    plain, shaped = flat_values(values, 2)
    mean = plain.mean((0, 1))

    def observe(mover, learned, cloud):
        def one(z):
            draw = target.constrain(mover.unravel(z))
            draw = {name: draw[name] for name in draws} if isinstance(target, ModelTarget) else draw
            return jnp.concatenate([jnp.ravel(x).astype(z.dtype) for x in jax.tree.leaves(function(draw))])

        found = jax.vmap(jax.vmap(one))(mover.recover(learned, cloud.z).z)
        # Averages of large values would lose their digits in single precision.
        return found - mean.astype(found.dtype)

    # The predicted bias with the smallest step as a share of that with twice this step: of second order in ε 1/4; of
    # first order, as that of minibatches, or an unknown one, 1/2.
    bias, after = (predicted(k)[0] for k in (levels - 1, levels))
    is_known = 0.0 < bias < MAX_PREDICTED
    fall = min(max(after / bias, 0.25), 0.5) if is_known and not bound_of(mcmc).plan().is_noisy else 0.5
    bias = bias if is_known else 0.0
    shift, variance = np.zeros(number), np.zeros(number)
    keys = [rng_key]
    if levels > 1:
        keys = list(random.split(mcmc.last_state.rng_key if rng_key is None else rng_key, levels))
    for level, key in enumerate(keys):
        _, change = halved_series(mcmc, key, num_samples * 2**level, step / 2**level, observe)
        weight = 1.0 / (1.0 - fall) if level == levels - 1 else 1.0
        shift += weight * change.mean((0, 1))
        error = np.where(np.any(change, (0, 1)), ensemble_mcse(change, len(change)), 0.0)
        variance += (weight * error) ** 2
    error = np.asarray(ensemble_mcse(plain, coupling_of(mcmc)[1]))
    # What is left is of the next order, which is to the shift as the bias to 1, and falls with half the step by half.
    total = np.sqrt(error**2 + variance + (bias / 2.0 * shift) ** 2)
    numbers = mean + shift, total, mean, error, shift, np.sqrt(variance)
    return ExtrapolatedMeans(*map(shaped, numbers), step, fall)  # type: ignore[call-arg]


def _num_values(function, draws):
    """Return how many numbers a function of one draw returns; raise ``ValueError`` for what has no mean."""
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[2:], x.dtype), draws)
    try:
        found = jax.eval_shape(function, one)
    except KeyError as error:
        raise ValueError(
            f"The run has no site {error}; it kept {sorted(draws)}. Sites that extra_fields=('~z.site',) leaves out "
            "cannot be used."
        ) from error
    if not (number := sum(math.prod(x.shape) for x in jax.tree.leaves(found))):
        raise ValueError("There are no values to average: the run kept no site, or the function returns nothing.")
    if any(jnp.issubdtype(x.dtype, jnp.complexfloating) for x in jax.tree.leaves(found)):
        raise ValueError("The function must return real numbers; return real and imaginary parts by themselves.")
    return number


def predict_bias(mcmc: MCMC, is_other: bool | None = None) -> Callable[..., tuple[float, float]]:
    """Return a function of how often the step in use is halved, 0 by default: the predicted relative inflation of
    variances, and that from gradient noise alone.

    :param is_other: whether the run has other data than its warmup, whose measurements then do not count; ``None``
        finds out.
    """
    is_other = has_other_data(mcmc) if is_other is None else is_other
    kernel, state, target = mcmc.sampler, mcmc.last_state, bound_of(mcmc).target
    plan, step_size = bound_of(mcmc).plan(state.learned.preconditioner.kind), _step_in_use(mcmc)
    u, steepness, *figures = jax.device_get(compiled(partial(_figures, kernel), target)(state))
    coupling, known = Coupling.of_figures(*figures), jax.device_get(state.learned.figures)
    is_replaced = state.learned.gradient_noise is not None and bool(np.any(state.learned.gradient_noise))
    if is_other or known is None or plan.budget is None:
        gradient = compiled(partial(_gradient, kernel), target)

        def gradients(cases):
            return (np.asarray(gradient(state, np.uint32(number), point)) for number, point, _ in cases)

        # Half the distance over which gradients are compared: a fifth of that of one update.
        width, rng = 0.2 * np.sqrt(np.asarray(step_size, u.dtype)), np.random.default_rng(0)
        curvature, noise = estimate_curvature(rng, u, width, gradients, orders=[0])
        if not plan.is_noisy:
            noise = np.zeros_like(noise)
        one = Measurements.empty(1, len(curvature), u.dtype).add(curvature, noise, steepness)
        largest = one.high_curvature, one.largest_curvature, one.typical_steepness
        direction, mean = one.mean_noise.largest[0], one.mean_noise.mean[0]
        known = MeasuredFigures(*largest, direction, mean, np.inf, UNKNOWN, UNKNOWN)
    shared, both = bound_of(mcmc).gradient.shared, (known.noise, known.isotropic_noise)
    with np.errstate(all="ignore"):
        stats = summarize_curvature(known, both, known.largest_variance, coupling, kernel.dynamics, shared, plan.sweep)
    error = kernel.dynamics.step_error(coupling)

    def predicted(halvings=0):
        step = np.asarray(step_size / 2**halvings, u.dtype)
        with np.errstate(all="ignore"):
            found = stats
            if is_replaced:
                found = without_known(stats, MOST_REPLACED / kernel.dynamics.heat(step, 1.0))
            remaining = error.remaining_noise(step, found)
            without_curvature = CurvatureStats(0.0, 0.0, remaining, isotropic_noise=found.isotropic_noise)
            return float(error.bias(step, found)), float(error.bias(step, without_curvature))

    return predicted


def _figures(kernel, target, state):
    """Return the particles, how steep Γ is there, and the bound, the diagonal of K, and whether K is the identity."""
    _, cloud = kernel.parts(state, target.args, target.kwargs)
    interaction = kernel.interaction.at(random.key(0), state.num_updates)
    coupling, h = interaction.couple(cloud.z, state.learned.bandwidth), state.learned.bandwidth
    steepness = measure_steepness(random.key(0), interaction, cloud.z, h)
    return cloud.z, steepness, coupling.bound, coupling.diagonal, coupling.is_identity


def _gradient(kernel, target, state, number, u):
    """Return ∇U at particles in whitened coordinates, on the minibatch of a number."""
    mover, _ = kernel.parts(state, target.args, target.kwargs)
    return mover.energy_and_grad(state.learned)(random.fold_in(random.key(0), number), u)[1]


def _step_in_use(mcmc):
    """Return the ε in use, of a schedule the longest that made a draw."""
    if callable(mcmc.sampler.step_size):
        return float(np.max(mcmc.get_extra_fields()["step_size"]))
    return float(np.ravel(mcmc.last_state.step_size)[0])
