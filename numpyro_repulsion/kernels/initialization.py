"""The start: particles begin at finite draws of an ``init_strategy``, or at positions that the user gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple
import warnings

import jax
from jax import lax, random
import jax.numpy as jnp
from jaxtyping import Array, Float
import numpy as np

from numpyro.infer import init_to_sample
from numpyro.util import not_jax_tracer

from numpyro_repulsion.dynamics import Cloud, select
from numpyro_repulsion.gradients import (
    Centering,
    Gradient,
    ModelTarget,
    Particle,
    Units,
    fingerprint,
    is_finite_on_all_rows,
    ravel_cloud,
    sites_not_finite,
)
from numpyro_repulsion.interactions import median_bandwidth
from numpyro_repulsion.kernels.bound import BoundSampler, automatic_scale
from numpyro_repulsion.kernels.state import ParticleState, last_word
from numpyro_repulsion.kernels.warmup_programs import Frozen, WarmupRun, freeze
from numpyro_repulsion.layout import place_particles
from numpyro_repulsion.starts import JointStrategy
from numpyro_repulsion.warmup import Preconditioner, WarmupState
from numpyro_repulsion.warmup.preconditioner import first_scale
from numpyro_repulsion.warmup.scales import CENTERING


@dataclass(frozen=True)
class StartConstants:
    """How starts are drawn."""

    #: How often starts that are not finite are drawn again, or contracted.
    draws: int = 100
    #: Starts are contracted to this share of their distance from their median if that lowers energies by this factor; a
    #: quadratic energy falls by 11, that of a network of four layers by 10^5.
    contraction: float = 0.3
    explosion: float = 1e3


START = StartConstants()


class StartSettings(NamedTuple):
    """What a start depends on besides the run's kernel and data; static."""

    num_warmup: int
    how: Frozen | None  # how to freeze the start at once, if there is nothing to learn
    units: Units | None  # of the Hessian, if there is one


class Start(NamedTuple):
    """The start of a run."""

    state: WarmupRun | ParticleState  # of the warmup; if there is nothing to learn, that from which draws are made
    z: Particle  # the sites of the particles, each ``(L, ...)``
    cloud: Cloud  # the particles in whitened coordinates
    smallest_eigenvalue: Float[Array, ""]  # of K: 1 if K is always positive definite, NaN if K is not finite


def start(
    bound: BoundSampler, settings: StartSettings, rng_key: jax.Array, init_params: Particle | None, posterior_id: Any
) -> Start:
    """Start particles, each with a key.

    :param posterior_id: what tells the posterior from others, or ``None``.
    """
    (num_warmup, how, units), kernel, target = settings, bound.kernel, bound.target
    size = rng_key.shape[0]
    rng_key = place_particles(rng_key)
    # Keys of a resumed run are copies of one key, so fold in the particle's index.
    keys = jax.vmap(lambda key, i: random.split(random.fold_in(key, i)))(rng_key, jnp.arange(size))
    state_key, gradient_key, memory_key = random.split(keys[0, 1], 3)

    def grouped(x):
        return x.reshape(kernel.num_ensembles, -1, *x.shape[1:])

    def evaluate(key, z):
        flat, unravel = ravel_cloud(z)
        energy, gradient = bound.gradient.energy_and_grad(key, target, unravel, grouped(flat))
        return flat, energy.reshape(-1), gradient.reshape(flat.shape)

    if init_params is None:
        z, flat, energy, gradient = _draw(gradient_key, keys[:, 0], kernel.init_strategy, target, evaluate)
    else:
        # Starts of NumPy would be traced as constants.
        z = jax.tree.map(jnp.asarray, init_params)
        if isinstance(target, ModelTarget):
            z = {name: z[name].astype(site.dtype) for name, site in target.prototype.items()}
        flat, energy, gradient = evaluate(gradient_key, z)
    is_noisy = bound.gradient.is_noisy(target)
    automatic = automatic_scale(flat.shape[1], size, num_warmup, kernel.num_steps, is_noisy)
    plan = bound.plan("arrow" if units is not None and units.sites else automatic)
    change = _first_scales(kernel, plan, settings, flat, gradient)
    # All else is zero or one as yet; of products with constant zeros, XLA makes NaN on some CPUs.
    own = change._replace(vectors=None, stretch=None, root=None)
    u, whitened_energy, gradient = map(grouped, (own.whiten(flat), energy, own.whiten_gradient(gradient)))
    if kernel.interaction.learns_bandwidth:
        bandwidth = median_bandwidth(u)
    else:
        bandwidth = jnp.asarray(getattr(kernel.interaction, "bandwidth", None) or 0.0, u.dtype)
    cloud = kernel.dynamics.init(
        memory_key, u, lambda _: (whitened_energy, gradient), lambda v: kernel.interaction.couple(v, bandwidth)
    )
    jumps = None
    if num_warmup > 0 and bound.moves is not None and size >= bound.moves.min_particles:
        jumps = bound.moves.start(cloud, num_warmup, plan.kind == "dense")
    first = 1e-3 if kernel.schedule is None else kernel.schedule(0)
    may_center = num_warmup > 0 and size >= CENTERING.particles and _may_center(kernel, plan, target)
    centering = Centering.none(target, u.shape[2], u.dtype) if may_center else None
    data_fingerprint = None
    if num_warmup > 0:
        # At the largest |U| its terms hardly cancel, so rounding errors are small compared with it.
        position = flat[jnp.argmax(jnp.abs(energy))]
        data_fingerprint = position, fingerprint(target, ravel_cloud(z)[1], position)
    known = {"jumps": jumps, "posterior_id": posterior_id, "data_fingerprint": data_fingerprint}
    state = WarmupRun(
        cloud=cloud,
        warmup=WarmupState.start(num_warmup, change, first, bandwidth, cloud, plan, units, centering, **known),
        num_updates=jnp.zeros((), jnp.int32),
        rng_key=state_key,
        row_seed=None if type(bound.gradient).at is Gradient.at else last_word(memory_key),
        prototype=jax.tree.map(lambda x: x[:1], z),
    )
    eigenvalue = _smallest_eigenvalue(kernel.interaction, u, bandwidth)
    return Start(state if how is None else freeze(bound, how, state, None), z, cloud, eigenvalue)


def _first_scales(kernel, plan, settings, flat, gradient):
    """Return the first of the scales that are learned, from starts and gradients there; or the given ones."""
    units = settings.units
    if plan.kind == "arrow" and (units is None or not units.sites):
        raise ValueError(
            "preconditioner='arrow' needs a model of more than 512 parameters with subsampled plates and control "
            "variates of second order, in which one group of effects has a block-diagonal Hessian beside at most 1,024 "
            "other parameters; no such group was found. Use preconditioner='auto'."
        )
    if settings.num_warmup > 0 and plan.kind is not None:
        return first_scale(flat, gradient, plan.kind, units)
    scale = kernel.scale
    if scale is None or isinstance(scale, str):
        return Preconditioner()
    if scale.shape[0] != flat.shape[1]:
        raise ValueError(
            f"`preconditioner` has shape {scale.shape}, but a particle has {flat.shape[1]} unconstrained parameters; "
            f"expected ({flat.shape[1]},) or ({flat.shape[1]}, {flat.shape[1]})."
        )
    return Preconditioner(jnp.asarray(scale, flat.dtype))


def _may_center(kernel, plan, target):
    """Return whether warmup may center hierarchical sites partly: where it measures the step and learns scales."""
    learns = None not in (kernel.reparam, plan.budget, plan.kind) and kernel.dynamics.is_sampler
    # Jumps, and references of each particle, are in the coordinates of the model.
    needs_model_coordinates = plan.has_given_moves or plan.epoch is not None
    return learns and not needs_model_coordinates and bool(target.location_scale or target.num_products)


def _smallest_eigenvalue(interaction, u, bandwidth):
    if getattr(interaction, "positive_definite", True):
        return jnp.ones(())
    # NaN reveals an interaction that uses a bandwidth without learning one.
    h = bandwidth if interaction.learns_bandwidth else jnp.nan
    gram, repulsion = jax.vmap(lambda v: interaction.gram(v, h))(u)
    finite = jnp.isfinite(gram).all() & jnp.isfinite(repulsion).all()
    return jnp.where(finite, jnp.linalg.eigvalsh(gram).min(), jnp.nan)


def _draw(key, keys, strategy, target, evaluate):
    """Draw starts by the ``init_strategy``, each again until it is finite, at most ``START.draws`` times.

    Draws from the prior of a deep network may predict so wildly that an optimizer ruins the network in its first
    steps. While it lowers energies by orders of magnitude, such starts are contracted about their median.
    """
    size = keys.shape[0]
    contracts = strategy is init_to_sample and size > 1

    def draw(key, number):
        is_joint = isinstance(strategy, JointStrategy)
        return target.draw(key, strategy.one(key, number, target.latent) if is_joint else strategy)

    def contracted(x):
        center = jnp.median(x, 0)
        return center + START.contraction * (x - center)

    def attempt(carry):
        count, key, keys, valid, old, _ = carry
        key, gradient_key = random.split(key)
        keys, draw_keys = jnp.moveaxis(jax.vmap(random.split)(keys), 1, 0)
        z = jax.vmap(draw)(draw_keys, jnp.arange(size))
        if not contracts:
            new = select(valid, old, (z, *evaluate(gradient_key, z)))
            valid = is_finite(new)
            return count + 1, key, keys, valid, new, valid.all()
        complete = valid.all()
        z = jax.tree.map(lambda drawn, known: jnp.where(complete, contracted(known), drawn), z, old[0])
        tried = z, *evaluate(gradient_key, z)
        # Energies are known up to a constant, and differ by about the dimension between draws of a posterior.
        least = jnp.abs(jnp.median(tried[2])) + tried[1].shape[1]
        is_lower = is_finite(tried).all() & (jnp.median(old[2]) > START.explosion * least)
        new = select(jnp.where(complete, ~is_lower, valid), old, tried)
        return count + 1, key, keys, is_finite(new), new, complete & ~is_lower

    def is_finite(starts):
        return jnp.isfinite(starts[2]) & jnp.isfinite(starts[3]).all(-1)

    z = {name: jnp.zeros((size, *site.shape), site.dtype) for name, site in target.prototype.items()}
    u, _ = ravel_cloud(z)
    first = (0, key, keys, jnp.zeros(size, bool), (z, u, jnp.zeros(size, u.dtype), u), jnp.zeros((), bool))
    return lax.while_loop(lambda carry: ~carry[5] & (carry[0] < START.draws), attempt, first)[4]


def check_start(bound: BoundSampler, start: Start, is_given: bool) -> None:
    """Raise ``ValueError`` if starts are not finite or coincide, or if K is not positive definite there."""
    kernel, target, cloud = bound.kernel, bound.target, jax.tree.map(np.asarray, start.cloud)
    interaction, eigenvalue = kernel.interaction, float(start.smallest_eigenvalue)
    flat = cloud.z.reshape(-1, cloud.z.shape[-1])
    gradient = cloud.gradient.reshape(flat.shape)
    finite = np.isfinite(cloud.potential_energy).ravel() & np.isfinite(gradient).all(1)
    if not finite.all():
        where, cause = np.flatnonzero(~finite), "; ".join(target.find_nan())
        sites = sites_not_finite(target, jax.tree.map(lambda x: x[where[:1]], start.z))
        remedy = "change these `init_params`" if is_given else "try init_to_uniform(radius=0.1) or init_params"
        raise ValueError(
            (f"The data contain NaN: {cause}. Remove or mask these rows. " if cause else "")
            + f"The potential energy or its gradient is not finite at the start of particles {where.tolist()}"
            + ("" if is_given else f", after {START.draws} draws from init_strategy")
            + (f"; nor is the log density of {', '.join(sites)}, or its gradient" if sites else "")
            + ". Look for data outside the support, parameters that are not allowed, such as a negative scale, and "
            + f"covariates that are not standardized, or {remedy}."
        )
    _check_rows(bound, start.z)
    is_dense = isinstance(kernel.scale, np.ndarray) and kernel.scale.ndim == 2
    if not (is_dense or target.plates):
        # A dense preconditioner mixes coordinates, and a minibatch may leave some out.
        _warn_of_flat_directions(target, flat, gradient)
    groups = flat.reshape(kernel.num_ensembles, -1, flat.shape[1])
    if interaction.interacts and any(len({row.tobytes() for row in group}) < len(group) for group in groups):
        raise ValueError(
            f"{type(kernel).__name__}: some particles start at the same point and would never repel each other. "
            "Use an init_strategy that draws, such as init_to_sample or init_around(values), or give distinct "
            "init_params."
        )
    kernel.dynamics.check(cloud)
    if np.isnan(eigenvalue):
        raise ValueError(
            f"The Gram matrix of {interaction!r} or its Γ is not finite on the starting particles. `evaluate` must "
            "be differentiable where x = y, and must not use `bandwidth` unless `learns_bandwidth` is true."
        )
    if eigenvalue <= 0:
        raise ValueError(
            f"The Gram matrix of {interaction!r} is not positive definite on the starting particles: its "
            f"smallest eigenvalue is {eigenvalue:.2g}. Use a positive-definite kernel, such as RBF or "
            "IMQ, or a larger nugget."
        )


def _check_rows(bound, z):
    """Raise ``ValueError`` for rows that minibatches would meet later, and that none of five starts can bear."""
    target = bound.target
    if not target.plates or "rows" in bound.known:
        return
    starts = jax.tree.map(lambda x: jnp.asarray(x[:5]), z)
    each = (jax.tree.map(lambda x, i=i: x[i], starts) for i in range(len(jax.tree.leaves(starts)[0])))
    if not any(is_finite_on_all_rows(target, start) for start in each) and (
        sites := sites_not_finite(target, starts, doubtful=True)
    ):
        # Data are looked through only where something is wrong.
        cause = "; ".join(target.find_nan())
        raise ValueError(
            (f"The data contain NaN: {cause}. " if cause else "")
            + f"The log density or its gradient is not finite at {', '.join(sites)}, wherever particles start, so "
            "every update that draws one of these rows would fail. Look for values outside of their support or at "
            "its end, such as fractions of exactly 0 or 1 and labels beyond the last class, and for missing ones. "
            "Remove or correct these rows. To mask them, put allowed numbers in their place as well: the gradient "
            "of a masked NaN is NaN."
        )
    if all(map(not_jax_tracer, target.leaves)):
        bound.known["rows"] = "checked"


def _warn_of_flat_directions(target, positions, gradient):
    """Warn of coordinates without any gradient: these starts cannot tell a plateau from an improper posterior."""
    is_flat = (gradient == 0).all(0) & (positions.max(0) > positions.min(0))
    if not is_flat.any():
        return
    where = f"{is_flat.sum()} of {len(is_flat)} coordinates"
    if isinstance(target, ModelTarget):
        ends = np.cumsum([int(np.prod(target.prototype[name].shape)) for name in sorted(target.prototype)])
        parts = zip(sorted(target.prototype), np.split(is_flat, ends[:-1]), strict=True)
        where += f", in the sites {[name for name, part in parts if part.any()]}"
    warnings.warn(
        f"The potential energy does not change with {where} at any starting particle. A posterior that is flat "
        "without bound is improper and cannot be sampled: give these a proper prior.",
        stacklevel=4,
    )
