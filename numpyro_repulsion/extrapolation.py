"""Means of a run extrapolated to a step of size zero."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import random
import jax.numpy as jnp
import numpy as np

from numpyro.infer import MCMC

from numpyro_repulsion.bias import MAX_PREDICTED, predict_bias, predict_fall, sampler_of, step_in_use
from numpyro_repulsion.checks import device_memory, integer
from numpyro_repulsion.diagnostics import ensemble_mcse
from numpyro_repulsion.gradients import ModelTarget
from numpyro_repulsion.kernels import bound_of, coupling_of, halved_series, is_warmup

__all__ = ["ExtrapolatedMeans", "extrapolate"]


class ExtrapolatedMeans(NamedTuple):
    """Posterior means extrapolated to ε = 0; :func:`~numpyro_repulsion.extrapolate` returns it.

    - **mean** - the means, as a pytree like the values of the function.
    - **mcse** - their standard errors: those of draws and of the shift, and how much of the bias the shift may
      leave: half the predicted bias of variances times the shift. NaN where one of them is unknown, because there are
      too few iterations.
    - **plain_mean**, **plain_mcse** - the same of the run's draws alone.
    - **shift**, **shift_mcse** - what was added to ``plain_mean``, and its standard error: the estimated bias of the
      step size, with the opposite sign.
    - **step_size** - ε of the run; of several plain chains, that of the first.
    - **fall** - r, the share of the bias that halving the smaller step once more would leave: 1/2 for first order in ε,
      1/4 for second.

    **Example**

    .. doctest::

        >>> from numpyro_repulsion.extrapolation import ExtrapolatedMeans
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

    What no step size causes is not removed: particles that have not converged, or clipped gradients.

    Particles that repel each other do not stay close if the same noise moves them, so for them ``shift_mcse`` is large
    (for the same precision as without repulsion, ten to a hundred times as many iterations). Draws with half the step
    are then as good.

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
    kernel = sampler_of(mcmc, "extrapolate")
    if is_warmup(mcmc):
        raise ValueError("These are draws of warmup; call extrapolate after mcmc.run(key, ...).")
    if callable(kernel.step_size):
        raise ValueError(
            "The draws of a schedule come from steps of many sizes, and their mean is that of no step size. Run with a "
            "number as `step_size`, or without one."
        )
    if kernel.moves is not None:
        raise ValueError(
            "Jumps by `moves` are exact for any step size, so the bias of draws does not fall in proportion to a power "
            "of it. Compare with a run with half the `step_size`."
        )
    levels = integer("`levels`", levels)
    predicted, _ = predict_bias(mcmc)
    if predicted > MAX_PREDICTED:
        raise ValueError(
            f"The step size makes variances more than {100 * MAX_PREDICTED:.0f} % too large by estimate, if it is "
            "stable at all, and no extrapolation leads from there to a step of size zero. Run with a tenth of "
            "`step_size`, or without one."
        )
    draws, target = mcmc.get_samples(group_by_chain=True), bound_of(mcmc).target
    shapes = _shapes(function, draws)
    shape = jax.tree.leaves(draws)[0].shape[:2]
    if num_samples is None:
        num_samples = max(8, shape[1] * mcmc.thinning // (9 * (2**levels - 1)))
    if integer("`num_samples`", num_samples, 1, "8 or more") < 8:
        raise ValueError(f"`num_samples` must be 8 or more; got {num_samples!r}.")
    if shape[1] < 4:
        raise ValueError(f"Standard errors need four draws of each particle or more; the run has {shape[1]}.")
    leaves, structure = jax.tree.flatten(shapes)
    number = sum(int(np.prod(x.shape)) for x in leaves)
    # Of both clouds, with what goes before.
    needed = 12 * number * kernel.num_ensembles * num_samples * 2 ** (levels - 1)
    if needed > device_memory() / 4:
        raise ValueError(
            f"{number:,} values in {num_samples} iterations would take {needed / 2**30:.1f} GiB. Give a `function` "
            "of a draw with fewer values."
        )
    values = draws if function is None else jax.jit(jax.vmap(jax.vmap(function)))(jax.tree.map(jnp.asarray, draws))
    plain = np.concatenate([np.asarray(x, np.float64).reshape(*shape, -1) for x in jax.tree.leaves(values)], -1)
    mean = plain.mean((0, 1))

    def observe(iteration, warmup, cloud):
        def one(z):
            draw = target.constrain(iteration.unravel(z))
            draw = {name: draw[name] for name in draws} if isinstance(target, ModelTarget) else draw
            found = jax.tree.leaves(draw if function is None else function(draw))
            return jnp.concatenate([jnp.ravel(x).astype(z.dtype) for x in found])

        found = jax.vmap(jax.vmap(one))(iteration.recover(warmup, cloud.z).z)
        # Averages of large values would lose their digits in single precision.
        return found - mean.astype(found.dtype)

    (fall, bias), step = predict_fall(mcmc, levels), step_in_use(mcmc)
    shift, variance = np.zeros(plain.shape[-1]), np.zeros(plain.shape[-1])
    keys = (
        [rng_key]
        if levels == 1
        else list(random.split(mcmc.last_state.rng_key if rng_key is None else rng_key, levels))
    )
    for level, key in enumerate(keys):
        _, change = halved_series(mcmc, key, num_samples * 2**level, step / 2**level, observe)
        weight = 1.0 / (1.0 - fall) if level == levels - 1 else 1.0
        shift += weight * change.mean((0, 1))
        error = np.where(np.any(change, (0, 1)), ensemble_mcse(change, len(change)), 0.0)
        variance += (weight * error) ** 2
    error = np.asarray(ensemble_mcse(plain, coupling_of(mcmc)[1]))

    def shaped(flat):
        ends = np.cumsum([int(np.prod(x.shape)) for x in leaves])[:-1]
        found = [part.reshape(x.shape) for part, x in zip(np.split(flat, ends), leaves, strict=True)]
        return jax.tree.unflatten(structure, found)

    # What is left is of the next order, which is to the shift as the bias to 1, and falls with half the step by half.
    total = np.sqrt(error**2 + variance + (bias / 2.0 * shift) ** 2)
    numbers = mean + shift, total, mean, error, shift, np.sqrt(variance)
    found = dict(zip(ExtrapolatedMeans._fields, map(shaped, numbers), strict=False))
    return ExtrapolatedMeans(**found, step_size=step, fall=fall)


def _shapes(function, draws):
    """Return the shapes of the values of a function of one draw.

    :raises ValueError: for no values, for complex ones, and for sites that are not there.
    """
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[2:], x.dtype), draws)
    try:
        found = one if function is None else jax.eval_shape(function, one)
    except KeyError as error:
        raise ValueError(
            f"The run has no site {error}; it kept {sorted(draws)}. Sites that extra_fields=('~z.site',) leaves out "
            "cannot be used."
        ) from error
    if not sum(int(np.prod(x.shape)) for x in jax.tree.leaves(found)):
        raise ValueError("There are no values to average: the run kept no site, or the function returns nothing.")
    if any(jnp.issubdtype(x.dtype, jnp.complexfloating) for x in jax.tree.leaves(found)):
        raise ValueError("The function must return real numbers; return real and imaginary parts by themselves.")
    return found
