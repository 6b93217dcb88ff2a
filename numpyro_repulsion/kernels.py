"""The host layer: one ``MCMCKernel`` whose chains are particles, and presets of its parts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, NamedTuple
import warnings

import jax
from jax import lax, random
import jax.numpy as jnp
import numpy as np

from numpyro.infer import init_to_sample
from numpyro.infer.mcmc import MCMCKernel
from numpyro.util import identity, is_prng_key, not_jax_tracer

from numpyro_repulsion.adaptation import Preconditioner, Tuning, is_due, measure
from numpyro_repulsion.dynamics import Cloud, Dynamics, Overdamped, hold
from numpyro_repulsion.gradients import (
    FullData,
    FunctionTarget,
    Gradient,
    ModelTarget,
    Subsampled,
    Target,
    ravel_cloud,
)
from numpyro_repulsion.interactions import RBF, Balanced, Interaction, median_bandwidth
from numpyro_repulsion.schedules import BiasBudget, as_schedule

__all__ = ["ParticleKernel", "ParticleState", "SGLD", "SGLDR", "SVGD", "enable_live_warnings"]

MAX_START_DRAWS = 100
_live_warnings = True


def enable_live_warnings(enabled: bool = True) -> None:
    """Whether kernels warn while they run, at the first particle that diverges. On by default.

    A compiled program that can warn calls back into Python and is not stored in JAX's persistent compilation cache.
    Switch the warnings off, before ``MCMC.run``, where that cache matters; the counts stay in the results.

    **Example**

    .. doctest::

        >>> from numpyro_repulsion import enable_live_warnings
        >>> enable_live_warnings(False)
        >>> enable_live_warnings()
    """
    global _live_warnings
    _live_warnings = enabled


class ParticleState(NamedTuple):
    """The state of all particles. With a single plain chain, per-particle fields lack the axis L.

    - **z** - unconstrained positions: the sites, each ``(L, ...)``.
    - **potential_energy** - U at z, ``(L,)``; an estimate from a minibatch where the gradient is one.
    - **step_size** - ε of the last update, ``(L,)``.
    - **bandwidth** - h in use, ``(L,)``; NaN where the interaction has none.
    - **diverging** - whether a particle became non-finite in the last iteration and was held, ``(L,)``.
    - **gradient** - the (preconditioned) gradient at z, ``(L, d)``.
    - **memory** - what the dynamics carries, a tuple of ``(L, d)``.
    - **tuning** - what warmup learns, see :class:`~numpyro_repulsion.adaptation.Tuning`.
    - **num_updates** - updates done so far, warmup included: what schedules count.
    - **num_divergences** - how often a particle was held since warmup ended.
    - **rng_key** - the PRNG key of the next iteration.
    """

    z: Any
    potential_energy: jax.Array
    step_size: jax.Array
    bandwidth: jax.Array
    diverging: jax.Array
    gradient: jax.Array
    memory: tuple[jax.Array, ...]
    tuning: Tuning
    num_updates: jax.Array
    num_divergences: jax.Array
    rng_key: jax.Array


_PARTICLE_FIELDS = ("z", "potential_energy", "step_size", "bandwidth", "diverging", "gradient", "memory")


class ParticleKernel(MCMCKernel):
    """Base of all kernels: dynamics × interaction × gradient × schedule, with the chains of ``MCMC`` as particles.

    :param model: a NumPyro model. Plates with ``subsample_size`` are minibatched.
    :param potential_fn: instead of a model, the potential energy of one particle (any pytree of floats); takes
        ``init_params``.
    :param step_size: ε. ``None`` measures it in warmup, ``BiasBudget()``: a conservative bound from the largest
        curvature and the minibatch noise found on the cloud. A float is constant; a callable of the update count
        (warmup included) is a schedule, for example :class:`~numpyro_repulsion.Polynomial` or one of optax.
    :param interaction: how particles see each other; ``None`` is the kernel's own.
    :param preconditioner: a constant matrix P with which the diffusion is ``K ⊗ P``: an array of shape ``(d,)`` for
        a diagonal or ``(d, d)``, over the flat unconstrained parameters in the order of
        :func:`jax.flatten_util.ravel_pytree` (sites by name). ``None`` is the identity, and so is, in this release,
        ``"auto"``.
    :param num_steps: updates per MCMC iteration, and so per draw.
    :param num_ensembles: the particles are split into so many equal groups, in order of the chains, that do not
        interact and share no minibatch.
    :param gradient: ``None`` is ``Subsampled()`` for models with subsampled plates and ``FullData()`` for others.
    :param dynamics: ``None`` is the kernel's own.
    :param moves: jumps between updates; only ``None`` in this release.
    :param init_strategy: where particles start: a draw from the prior each, by default.
    :raises ValueError: for settings out of range; see also :meth:`init`.
    :raises TypeError: for settings of a wrong kind.
    """

    sample_field = "z"
    default_fields = ("z", "potential_energy", "step_size", "bandwidth", "diverging")

    _default_interaction: ClassVar[Interaction] = Balanced()
    _default_dynamics: ClassVar[Dynamics] = Overdamped()

    def __init__(
        self,
        model: Callable | None = None,
        potential_fn: Callable | None = None,
        *,
        step_size: float | Callable | BiasBudget | None = None,
        interaction: Interaction | None = None,
        preconditioner: Any = "auto",
        num_steps: int = 10,
        num_ensembles: int = 1,
        gradient: Gradient | None = None,
        dynamics: Dynamics | None = None,
        moves: None = None,
        init_strategy: Callable = init_to_sample,
    ):
        if (model is None) == (potential_fn is None):
            raise ValueError(
                f"{type(self).__name__} needs exactly one of `model` and `potential_fn`; "
                f"got {'neither' if model is None else 'both'}."
            )
        if not callable(model if potential_fn is None else potential_fn):
            raise TypeError(f"`model` or `potential_fn` must be callable; got {model or potential_fn!r}.")
        interaction = self._default_interaction if interaction is None else interaction
        dynamics = self._default_dynamics if dynamics is None else dynamics
        _require_instance("interaction", interaction, Interaction, "RBF(), Balanced() or Independent()")
        _require_instance("dynamics", dynamics, Dynamics, "Overdamped()")
        if gradient is not None:
            _require_instance("gradient", gradient, Gradient, "FullData() or Subsampled()")
        if moves is not None:
            raise ValueError(f"`moves` must be None in this release; got {moves!r}.")
        if not callable(init_strategy):
            raise TypeError(f"`init_strategy` must be callable, such as init_to_sample; got {init_strategy!r}.")
        self._model = model
        self._potential_fn = potential_fn
        self.interaction = interaction
        self.dynamics = dynamics
        self.gradient = gradient
        self.num_steps = _count("num_steps", num_steps)
        self.num_ensembles = _count("num_ensembles", num_ensembles)
        self.init_strategy = init_strategy
        self.step_size = BiasBudget() if step_size is None else step_size
        self._schedule = None if isinstance(self.step_size, BiasBudget) else as_schedule(self.step_size)
        self.preconditioner = preconditioner
        self._preconditioner = _preconditioner(preconditioner)
        if isinstance(interaction, Balanced) and interaction.interacts and self.num_ensembles == 1:
            raise ValueError(
                f"{interaction!r} balances ensembles against each other; set num_ensembles=2 or more, or use "
                f"{interaction.interaction!r} for a single one."
            )
        self._is_single = False
        self._forget()

    @property
    def model(self):
        """The model, or ``None`` for a kernel made from a ``potential_fn``."""
        return self._model

    @property
    def is_ensemble_kernel(self):
        """True, unless the last run was of a single plain chain."""
        return not self._is_single

    def get_diagnostics_str(self, state):
        """The step size in use and how many updates were held, for the progress bar."""
        text = f"{self.num_steps} updates of size {float(jnp.ravel(state.step_size)[0]):.2e}"
        diverged = int(state.num_divergences)
        return f"{text}. {diverged} diverged" if diverged else text

    def init(self, rng_key, num_warmup, init_params=None, model_args=(), model_kwargs=None):
        """Starts the particles: draws from ``init_strategy`` until energy and gradient are finite, or ``init_params``.

        :param rng_key: L keys for L particles, or a single key for one plain chain (kernels that do not interact).
        :param num_warmup: iterations in which step size and bandwidth may be learned.
        :param init_params: unconstrained positions, each leaf ``(L, ...)``.
        :raises ValueError: for a wrong ``chain_method`` or number of chains, identical starts, ``init_params`` that do
            not fit, a model that cannot be sampled, or data with NaN.
        """
        self._is_single = is_prng_key(rng_key)
        if self._is_single:
            if self.interaction.interacts or self.num_ensembles > 1:
                raise ValueError(
                    f"{type(self).__name__} moves all particles of an ensemble together and needs "
                    '`MCMC(kernel, num_chains=20, chain_method="vectorized", ...)`, with two or more chains; got a '
                    "single chain, so num_chains=1 or another chain_method."
                )
            rng_key = rng_key[None]
            init_params = jax.tree.map(lambda x: jnp.asarray(x)[None], init_params)
        size = rng_key.shape[0]
        self._check_groups(size)
        if num_warmup == 0 and self._schedule is None:
            raise ValueError("With num_warmup=0 no step size can be measured; give `step_size`, or warm up.")
        target = self._target(model_args, model_kwargs)
        self._check_data(target)
        if init_params is not None:
            _check_init_params(init_params, target, size)
        elif isinstance(target, FunctionTarget):
            raise ValueError(
                "A kernel made from a `potential_fn` needs `init_params`, one start per chain: "
                f"mcmc.run(key, init_params=...) with a leading axis of {size}."
            )
        # Keys of a resumed run are copies of one key, so the particle's number goes in too.
        keys = jax.vmap(lambda key, i: random.split(random.fold_in(key, i)))(rng_key, jnp.arange(size))
        state_key, start_key = random.split(keys[0, 1])
        start = self._start(start_key, keys[:, 0], init_params, model_args, model_kwargs)
        z, cloud, bandwidth, eigenvalue = start
        if not_jax_tracer(cloud.z):
            self._check_starts(target, cloud, eigenvalue, init_params is not None)
        dtype = cloud.z.dtype
        scalar = jnp.ones((), dtype)
        tuning = Tuning(
            jnp.zeros((), jnp.int32), jnp.asarray(num_warmup, jnp.int32), 1e-3 * scalar, 0.0 * scalar, bandwidth
        )
        first = tuning.step_size if self._schedule is None else jnp.asarray(self._schedule(0), dtype)
        state = ParticleState(
            z=z,
            potential_energy=cloud.potential_energy.reshape(size),
            step_size=jnp.broadcast_to(first, (size,)),
            bandwidth=jnp.broadcast_to(bandwidth, (size,)),
            diverging=jnp.zeros(size, bool),
            gradient=cloud.gradient.reshape(size, -1),
            memory=tuple(x.reshape(size, -1) for x in cloud.memory),
            tuning=tuning,
            num_updates=jnp.zeros((), jnp.int32),
            num_divergences=jnp.zeros((), jnp.int32),
            rng_key=state_key,
        )
        return _map_particles(lambda x: x[0], state) if self._is_single else state

    def sample(self, state, model_args, model_kwargs):
        """One MCMC iteration: ``num_steps`` updates of all particles."""
        is_single = jnp.ndim(state.potential_energy) == 0
        if is_single:
            state = _map_particles(lambda x: x[None], state)
        target = self._target(model_args, model_kwargs)
        size = state.potential_energy.shape[0]
        flat, unravel = ravel_cloud(state.z)
        preconditioner = self._scale(flat)
        force = self._force(target, unravel, preconditioner)
        cloud = Cloud(preconditioner.whiten(flat), state.potential_energy, state.gradient, state.memory)
        cloud = jax.tree.map(lambda x: x.reshape(self.num_ensembles, -1, *x.shape[1:]), cloud)
        rng_key, tuning_key, loop_key = random.split(state.rng_key, 3)
        tuning = self._tune(tuning_key, state.tuning, cloud.z, force, target)

        def couple(u):
            return self.interaction.couple(u, tuning.bandwidth)

        def step_size(count):
            value = tuning.step_size if self._schedule is None else self._schedule(count)
            return jnp.asarray(value, flat.dtype)

        def update(carry, key):
            cloud, count = carry
            noise_key, force_key = random.split(key)
            proposal = self.dynamics.step(noise_key, cloud, lambda u: force(force_key, u), couple, step_size(count))
            cloud, held = hold(cloud, proposal)
            return (cloud, count + 1), held

        keys = random.split(loop_key, self.num_steps)
        (cloud, num_updates), held = lax.scan(update, (cloud, state.num_updates), keys)
        z = jax.vmap(unravel)(preconditioner.colour(cloud.z).reshape(size, -1))
        counts = (tuning.iteration >= tuning.num_warmup) | (self._schedule is not None)
        num_divergences = state.num_divergences + jnp.where(counts, held.sum(), 0).astype(jnp.int32)
        _warn_at_first_divergence(state.num_divergences, num_divergences)
        state = ParticleState(
            z=z,
            potential_energy=cloud.potential_energy.reshape(size),
            step_size=jnp.broadcast_to(step_size(num_updates - 1), (size,)),
            bandwidth=jnp.broadcast_to(tuning.bandwidth, (size,)),
            diverging=held.any(0).reshape(size),
            gradient=cloud.gradient.reshape(size, -1),
            memory=tuple(x.reshape(size, -1) for x in cloud.memory),
            tuning=tuning._replace(iteration=tuning.iteration + 1),
            num_updates=num_updates,
            num_divergences=num_divergences,
            rng_key=rng_key,
        )
        return _map_particles(lambda x: x[0], state) if is_single else state

    def postprocess_fn(self, args, kwargs):
        """A function from one unconstrained particle to its sites in their supports, with deterministic sites."""
        return identity if self._model is None else self._target(args, kwargs).constrain

    def __getstate__(self):
        state = self.__dict__.copy()
        del state["_start_program"], state["_concrete_program"], state["_checked"]
        return state

    def __setstate__(self, state):
        self.__dict__.update(state)
        self._forget()

    def _forget(self):
        """Drops compiled programs: they cannot be pickled, and hold nothing that is not made again on demand."""
        self._start_program = jax.jit(self._start_cloud, static_argnums=0)
        self._concrete_program = None
        self._checked = None

    def _target(self, args, kwargs) -> Target:
        if self._model is None:
            return FunctionTarget(self._potential_fn)
        return ModelTarget(self._model, args, kwargs)

    def resolve_gradient(self, target: Target | None) -> Gradient:
        """The gradient in use for a target: the kernel's own choice where none was given."""
        if target is None:
            target = FunctionTarget(self._potential_fn)
        if self.gradient is None:
            return Subsampled() if target.plates else FullData()
        if isinstance(self.gradient, Subsampled) and not target.plates:
            raise ValueError(
                f"gradient={self.gradient!r} needs a model with a subsampled plate, `numpyro.plate(name, size, "
                "subsample_size=...)` with subsample_size < size; this one has none. Drop `gradient`."
            )
        return self.gradient

    def _scale(self, flat) -> Preconditioner:
        scale = self._preconditioner
        if scale is None:
            return Preconditioner()
        if scale.shape[0] != flat.shape[1]:
            raise ValueError(
                f"`preconditioner` has shape {np.shape(self.preconditioner)}, but a particle has {flat.shape[1]} "
                f"unconstrained parameters; expected ({flat.shape[1]},) or ({flat.shape[1]}, {flat.shape[1]})."
            )
        return Preconditioner(jnp.asarray(scale, flat.dtype))

    def _force(self, target, unravel, preconditioner):
        gradient = self.resolve_gradient(target)

        def force(key, u):
            energy, slope = gradient.force(key, target, unravel, preconditioner.colour(u))
            return energy, preconditioner.pull(slope)

        return force

    def _tune(self, key, tuning, u, force, target):
        budget = self.step_size if self._schedule is None else None
        if budget is None and not self.interaction.learns_bandwidth:
            return tuning
        shared = getattr(self.resolve_gradient(target), "shared", False)
        return lax.cond(
            is_due(tuning),
            lambda: measure(key, tuning, u, force, self.interaction, budget, shared),
            lambda: tuning,
        )

    def _start(self, key, keys, init_params, args, kwargs):
        """Starting particles, by a program compiled once for all data of the same shapes."""
        leaves, treedef = jax.tree.flatten((args, kwargs))
        is_array = tuple(isinstance(leaf, np.ndarray | jax.Array) for leaf in leaves)
        arrays = [leaf for leaf, yes in zip(leaves, is_array, strict=True) if yes]
        static = (treedef, is_array, tuple(leaf for leaf, yes in zip(leaves, is_array, strict=True) if not yes))
        if _is_hashable(static):
            try:
                return self._start_program(static, arrays, key, keys, init_params)
            except (jax.errors.JAXTypeError, jax.errors.JAXIndexError):
                pass  # The model needs the values of its arguments, not only their shapes.
        known = self._concrete_program
        if known is None or known[0] != treedef or not all(map(_same, known[1], leaves)):
            program = jax.jit(partial(self._start_cloud, static, arrays))
            self._concrete_program = known = (treedef, leaves, program)
        return known[2](key, keys, init_params)

    def _start_cloud(self, static, arrays, key, keys, init_params):
        treedef, is_array, others = static
        arrays, others = iter(arrays), iter(others)
        args, kwargs = jax.tree.unflatten(treedef, [next(arrays) if yes else next(others) for yes in is_array])
        target = self._target(args, kwargs)
        force_key, memory_key = random.split(key)

        def grouped(x):
            return x.reshape(self.num_ensembles, -1, *x.shape[1:])

        def evaluate(key, z):
            flat, unravel = ravel_cloud(z)
            scale = self._scale(flat)
            u = scale.whiten(flat)
            energy, gradient = self._force(target, unravel, scale)(key, grouped(u))
            return u, energy.reshape(-1), gradient.reshape(u.shape)

        if init_params is None:
            z, *cloud = self._draw_starts(force_key, keys, target, evaluate)
        else:
            z = init_params
            if isinstance(target, ModelTarget):
                z = {name: jnp.asarray(z[name], site.dtype) for name, site in target.prototype.items()}
            cloud = evaluate(force_key, z)
        u, energy, gradient = map(grouped, cloud)
        bandwidth = jnp.asarray(getattr(self.interaction, "bandwidth", None) or jnp.nan, u.dtype)
        if self.interaction.learns_bandwidth:
            bandwidth = median_bandwidth(u)
        cloud = self.dynamics.init(
            memory_key, u, lambda _: (energy, gradient), lambda v: self.interaction.couple(v, bandwidth)
        )
        eigenvalue = jnp.ones(())
        if not getattr(self.interaction, "positive_definite", True):
            gram = jax.vmap(lambda v: self.interaction.gram(v, bandwidth)[0])(u)
            eigenvalue = jnp.linalg.eigvalsh(gram).min()
        return z, cloud, bandwidth, eigenvalue

    def _draw_starts(self, key, keys, target, evaluate):
        """Starts by the ``init_strategy``, drawn again, each up to a hundred times, until they are finite."""

        def attempt(carry):
            count, key, keys, valid, old = carry
            key, force_key = random.split(key)
            keys, draw_keys = jnp.moveaxis(jax.vmap(random.split)(keys), 1, 0)
            z = jax.vmap(lambda key: target.draw(key, self.init_strategy))(draw_keys)

            def select(new, old):
                return jnp.where(valid.reshape(-1, *[1] * (new.ndim - 1)), old, new)

            new = jax.tree.map(select, (z, *evaluate(force_key, z)), old)
            valid = jnp.isfinite(new[2]) & jnp.isfinite(new[3]).all(-1)
            return count + 1, key, keys, valid, new

        size = keys.shape[0]
        z = {name: jnp.zeros((size, *site.shape), site.dtype) for name, site in target.prototype.items()}
        u, _ = ravel_cloud(z)
        start = (0, key, keys, jnp.zeros(size, bool), (z, u, jnp.zeros(size, u.dtype), u))
        carry = lax.while_loop(lambda carry: ~carry[3].all() & (carry[0] < MAX_START_DRAWS), attempt, start)
        return carry[4]

    def _check_groups(self, size):
        if size % self.num_ensembles:
            raise ValueError(
                f"num_chains must be a multiple of num_ensembles; got num_chains={size} and "
                f"num_ensembles={self.num_ensembles}."
            )
        if size == self.num_ensembles and (self.num_ensembles > 1 or self.interaction.interacts):
            raise ValueError(
                f"num_chains={size} with num_ensembles={self.num_ensembles} leaves one particle in each ensemble; "
                f"use num_chains={2 * self.num_ensembles} or more, or fewer ensembles"
                + ("." if self.interaction.interacts else ", or interaction=Independent().")
            )

    def _check_data(self, target):
        """Refuses NaN that some minibatch would meet later; the starts meet those of full data."""
        if not target.plates or (self._checked is not None and all(map(_same, self._checked, target.leaves))):
            return
        if (found := target.find_nan()) and not target.is_finite_on_all_rows():
            raise ValueError(f"The data contain NaN: {'; '.join(found)}. Remove these rows, or mask them.")
        self._checked = target.leaves

    def _check_starts(self, target, cloud, eigenvalue, given):
        flat = np.asarray(cloud.z).reshape(-1, cloud.z.shape[-1])
        finite = np.isfinite(np.asarray(cloud.potential_energy)).ravel()
        finite &= np.isfinite(np.asarray(cloud.gradient).reshape(flat.shape)).all(1)
        if not finite.all():
            where = f"particles {np.flatnonzero(~finite).tolist()}"
            cause = "; ".join(target.find_nan())
            raise ValueError(
                (f"The data contain NaN: {cause}. Remove or mask these rows. " if cause else "")
                + f"The potential energy or its gradient is not finite at the start of {where}"
                + (
                    ": change their `init_params`."
                    if given
                    else f", after {MAX_START_DRAWS} draws from init_strategy; try init_to_uniform or init_params."
                )
            )
        if self.interaction.interacts and len({row.tobytes() for row in flat}) < len(flat):
            raise ValueError(
                f"{type(self).__name__}: some particles start at the same point and would never repel each other. "
                "Use an init_strategy that draws, such as init_to_sample or init_to_uniform, or distinct init_params."
            )
        if eigenvalue <= 0:
            raise ValueError(
                f"The Gram matrix of {self.interaction!r} is not positive definite on the starting particles: its "
                f"smallest eigenvalue is {float(eigenvalue):.2g}. Use a positive-definite kernel, such as RBF or "
                "IMQ, or a larger nugget."
            )


class SGLD(ParticleKernel):
    r"""Stochastic-gradient Langevin dynamics of L particles in parallel.

    :math:`z_i \leftarrow z_i - \epsilon \nabla U(z_i) + \sqrt{2\epsilon}\, \xi_i`, that is ``D = I``, ``Q = 0``,
    ``Γ = 0``. As ε → 0 every particle's stationary law is the posterior. By default the noise is *balanced*
    (:class:`~numpyro_repulsion.Balanced`: it sums to zero over an ensemble, which leaves each particle's law as it
    is and makes averages over particles far more precise) and averaged over two updates
    (:class:`~numpyro_repulsion.Overdamped`: a bias of second order in ε). The paper's plain baseline is
    ``SGLD(model, interaction=Independent(), dynamics=Overdamped(integrator="euler"))``.

    With a single chain this is one plain SGLD chain. All arguments are those of
    :class:`~numpyro_repulsion.kernels.ParticleKernel`.

    **References:**

    1. *Bayesian Learning via Stochastic Gradient Langevin Dynamics*, M. Welling and Y. W. Teh, ICML 2011

    **Example**

    .. doctest::

        >>> from jax import random
        >>> import jax.numpy as jnp
        >>> import numpyro
        >>> import numpyro.distributions as dist
        >>> from numpyro.infer import MCMC
        >>> from numpyro_repulsion import SGLD

        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     with numpyro.plate("rows", len(y), subsample_size=10) as i:
        ...         numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])

        >>> mcmc = MCMC(SGLD(model, step_size=1e-3), num_warmup=50, num_samples=50, num_chains=4,
        ...             chain_method="vectorized", progress_bar=False)
        >>> mcmc.run(random.key(0), jnp.arange(100.0) / 100)
        >>> mcmc.get_samples(group_by_chain=True)["mu"].shape
        (4, 50)
    """


class SGLDR(ParticleKernel):
    r"""SGLD with repulsion (SGLD+R): particles that repel each other, with noise that keeps the posterior stationary.

    .. math::
        Z \leftarrow Z + \epsilon\,(-K \nabla U(Z) + \Gamma) + \sqrt{2 \epsilon}\; C \xi,
        \qquad C C^\top = K_{ij} = k(z_i, z_j), \qquad \Gamma_i = \sum_j \nabla_{z_j} K_{ij}

    that is ``D = K ⊗ I`` and ``Q = 0`` in the complete recipe. As ε → 0 the stationary law is ``∏_i π(z_i)``: L
    independent draws from the posterior at any one time. The bandwidth is frozen before draws are kept, for K must
    depend on the particles through k alone. There is no factor ``1/L``: the paper's step is L times ours, and
    ``interaction=Independent()`` is parallel SGLD exactly.

    Needs ``MCMC(..., num_chains=L, chain_method="vectorized")`` with L of 2 or more per ensemble. All arguments are
    those of :class:`~numpyro_repulsion.kernels.ParticleKernel`; the default interaction is
    :class:`~numpyro_repulsion.RBF`.

    **References:**

    1. *Stochastic Gradient MCMC with Repulsive Forces*, V. Gallego and D. Ríos Insua,
       https://arxiv.org/abs/1812.00071

    **Example**

    .. doctest::

        >>> from jax import random
        >>> import numpyro
        >>> import numpyro.distributions as dist
        >>> from numpyro.infer import MCMC
        >>> from numpyro_repulsion import SGLDR

        >>> def model():
        ...     numpyro.sample("rate", dist.Gamma(5, 1))

        >>> mcmc = MCMC(SGLDR(model), num_warmup=100, num_samples=100, num_chains=6,
        ...             chain_method="vectorized", progress_bar=False)
        >>> mcmc.run(random.key(0))
        >>> bool((mcmc.get_samples()["rate"] > 0).all())
        True
    """

    _default_interaction = RBF()


class SVGD(ParticleKernel):
    r"""Stein variational gradient descent: :class:`SGLDR` with the noise off. An optimizer, not a sampler.

    :math:`Z \leftarrow Z + \epsilon\,(-K \nabla U(Z) + \Gamma)` moves a cloud of particles towards a set of points
    that represents the posterior. The product law is *not* stationary; the spread of few particles comes out too
    small, and successive clouds are not draws. The result is the last cloud:
    :func:`~numpyro_repulsion.to_inference_data` and :func:`~numpyro_repulsion.summary` keep just that one. There is
    no factor ``1/L``, and no adaptive learning rate; any schedule of optax fits ``step_size``.

    All arguments are those of :class:`~numpyro_repulsion.kernels.ParticleKernel`; the default interaction is
    :class:`~numpyro_repulsion.RBF`.

    **References:**

    1. *Stein Variational Gradient Descent: A General Purpose Bayesian Inference Algorithm*, Q. Liu and D. Wang,
       https://arxiv.org/abs/1608.04471

    **Example**

    .. doctest::

        >>> from jax import random
        >>> import jax.numpy as jnp
        >>> from numpyro.infer import MCMC
        >>> from numpyro_repulsion import SVGD
        >>> mcmc = MCMC(SVGD(potential_fn=lambda z: jnp.sum(z**2) / 2, step_size=0.05), num_warmup=100,
        ...             num_samples=1, num_chains=5, chain_method="vectorized", progress_bar=False)
        >>> mcmc.run(random.key(0), init_params=3.0 + random.normal(random.key(1), (5, 2)))
        >>> mcmc.last_state.z.shape
        (5, 2)
    """

    _default_interaction = RBF()
    _default_dynamics = Overdamped(noise=False)


def _map_particles(fn, state):
    return state._replace(**{name: jax.tree.map(fn, getattr(state, name)) for name in _PARTICLE_FIELDS})


def _same(a, b):
    """Whether two leaves of model arguments may be taken for the same: one object, or equal plain values."""
    return a is b or (type(a) is type(b) and isinstance(a, bool | int | float | complex | str) and a == b)


def _is_hashable(value):
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _warn_at_first_divergence(before, after):
    def warn(before, after):
        # Where `cond` is batched both its branches run, so look again.
        if before == 0 and after > 0:
            warnings.warn(
                "A particle's update was not finite; it was held where it was and flagged `diverging`. The step size "
                "is too large for this posterior: divide `step_size` by 2 to 10, or reparameterize. (Said once; the "
                "count of held updates is in `summary` and `to_inference_data`.)",
                RuntimeWarning,
                stacklevel=2,
            )

    if _live_warnings:
        lax.cond((before == 0) & (after > 0), lambda: jax.debug.callback(warn, before, after), lambda: None)


def _count(name, value):
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise ValueError(f"`{name}` must be an integer, 1 or more; got {value!r}.")
    return int(value)


def _require_instance(name, value, kind, example):
    if not isinstance(value, kind):
        called = f"; call it, `{value.__name__}()`" if isinstance(value, type) else ""
        raise TypeError(f"`{name}` must be an instance such as {example}; got {value!r}{called}.")


def _preconditioner(value):
    """The scale S with ``P = S Sᵀ``, or ``None`` for the identity."""
    if value is None or (isinstance(value, str) and value == "auto"):
        return None
    if isinstance(value, str):
        raise ValueError(
            f"`preconditioner` must be 'auto', None or an array; got {value!r}"
            + (", which is not learned in this release." if value in ("diagonal", "dense") else ".")
        )
    matrix = np.asarray(value)
    if matrix.dtype.kind not in "fiu" or matrix.ndim not in (1, 2) or not np.isfinite(matrix).all():
        raise ValueError(f"`preconditioner` must be a finite array of shape (d,) or (d, d); got {value!r}.")
    if matrix.ndim == 1:
        if (matrix <= 0).any():
            raise ValueError(f"A diagonal `preconditioner` must be positive; got {value!r}.")
        return np.sqrt(matrix)
    if matrix.shape[0] != matrix.shape[1] or not np.allclose(matrix, matrix.T):
        raise ValueError(f"A dense `preconditioner` must be square and symmetric; got shape {matrix.shape}.")
    try:
        return np.linalg.cholesky(matrix)
    except np.linalg.LinAlgError as error:
        raise ValueError("A dense `preconditioner` must be positive definite; this one is not.") from error


def _check_init_params(init_params, target, size):
    shapes = jax.tree.map(jnp.shape, init_params)
    for leaf in jax.tree.leaves(init_params):
        if jnp.shape(leaf)[:1] != (size,):
            raise ValueError(f"`init_params` must lead with the {size} chains; got shapes {shapes}.")
    if isinstance(target, FunctionTarget):
        if not all(jnp.issubdtype(jnp.result_type(leaf), jnp.floating) for leaf in jax.tree.leaves(init_params)):
            raise TypeError(f"`init_params` must be floating point; got {jax.tree.map(jnp.result_type, init_params)}.")
        return
    expected = {name: (size, *site.shape) for name, site in target.prototype.items()}
    if not isinstance(init_params, dict) or set(init_params) != set(expected):
        got = sorted(init_params) if isinstance(init_params, dict) else type(init_params).__name__
        raise ValueError(
            f"`init_params` must be a dictionary with the latent sites {sorted(expected)} (unconstrained values); got "
            f"{got}."
        )
    if shapes != expected:
        raise ValueError(f"`init_params` are unconstrained values of shapes {expected}, chains first; got {shapes}.")
