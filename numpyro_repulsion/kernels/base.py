"""The one ``MCMCKernel`` of the package, whose chains are particles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar
import warnings

import jax
from jax import random
import jax.numpy as jnp
import numpy as np

from numpyro.infer import init_to_sample
from numpyro.infer.mcmc import MCMCKernel
from numpyro.util import identity, is_prng_key, not_jax_tracer

from numpyro_repulsion.adaptation import Learned, Tuning, judge
from numpyro_repulsion.dynamics import Cloud, Dynamics, Overdamped
from numpyro_repulsion.gradients import (
    ControlVariates,
    FunctionTarget,
    Gradient,
    ModelTarget,
    Target,
    ravel_cloud,
)
from numpyro_repulsion.interactions import Balanced, Interaction
from numpyro_repulsion.kernels.iteration import Iteration
from numpyro_repulsion.kernels.live import warn_at_first_divergence, warn_by_verdict
from numpyro_repulsion.kernels.settings import (
    check_ensembles,
    check_groups,
    check_init_params,
    check_jumps,
    check_moves,
    choose_gradient,
    count,
    preconditioner_scale,
    require_instance,
    step_schedule,
)
from numpyro_repulsion.kernels.starts import Starter
from numpyro_repulsion.kernels.state import ParticleState, map_particles
from numpyro_repulsion.moves import Archive
from numpyro_repulsion.schedules import BiasBudget

__all__ = ["ParticleKernel"]

#: Up to so many parameters the preconditioner is dense, unless a diagonal one is asked for.
MAX_DENSE = 64
#: Below so many iterations warmup has too few draws to learn from.
MIN_WARMUP = 50


class ParticleKernel(MCMCKernel):
    """Base of all kernels: dynamics × interaction × gradient × schedule, with the chains of ``MCMC`` as particles.

    :param model: a NumPyro model. Plates with ``subsample_size`` are minibatched.
    :param potential_fn: instead of a model, the potential energy of one particle (any pytree of floats); takes
        ``init_params``.
    :param step_size: ε. ``None`` measures it in warmup, ``BiasBudget()``: a conservative bound from the largest
        curvature and the minibatch noise found on the cloud. A float is constant; a callable of the update count
        (warmup included) is a schedule: :class:`~numpyro_repulsion.Polynomial`,
        :class:`~numpyro_repulsion.Cyclical`, or one of optax.
    :param interaction: how particles see each other; ``None`` is the kernel's own.
    :param preconditioner: a constant matrix P with which the diffusion is ``K ⊗ P``: an array of shape ``(d,)`` for
        a diagonal or ``(d, d)``, over the flat unconstrained parameters in the order of
        :func:`jax.flatten_util.ravel_pytree` (sites by name). ``"diagonal"`` and ``"dense"`` learn it in warmup and
        freeze it; ``"auto"`` is dense for up to 64 parameters and diagonal above, but the identity where a
        ``step_size`` is given, so that it means what it means in SGLD. ``None`` is the identity.
    :param num_steps: updates per MCMC iteration, and so per draw, but for the hot ones of a cycle.
    :param num_ensembles: the particles are split into so many equal groups, in order of the chains, that do not
        interact and share no minibatch.
    :param gradient: ``None`` is ``ControlVariates()`` for models with subsampled plates (``Subsampled()`` if their
        likelihood is random too) and ``FullData()`` for others; ``SVRG()`` suits several modes.
    :param dynamics: ``None`` is the kernel's own.
    :param moves: jumps between updates, :class:`~numpyro_repulsion.Archive`, or ``None``.
    :param init_strategy: where particles start: a draw from the prior each, by default.
    :raises ValueError: for settings out of range; see also :meth:`init`.
    :raises TypeError: for settings of a wrong kind.
    """

    sample_field = "z"
    #: Tells NumPyro that a stored state is enough to go on from, without `init`: `sample` needs nothing else.
    _sample_fn = True
    default_fields = ("z", "potential_energy", "step_size", "bandwidth", "diverging")

    _default_interaction: ClassVar[Interaction] = Balanced()
    _default_dynamics: ClassVar[Dynamics] = Overdamped()
    #: Where the step size is measured, if that is to be another.
    _measured_dynamics: ClassVar[Dynamics | None] = None

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
        moves: Archive | None = None,
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
        if dynamics is None:
            measured = step_size is None or isinstance(step_size, BiasBudget)
            measured &= moves is None  # Jumps do not carry noise that is correlated by K.
            dynamics = (measured and self._measured_dynamics) or self._default_dynamics
        require_instance("interaction", interaction, Interaction, "RBF(), Balanced() or Independent()")
        require_instance("dynamics", dynamics, Dynamics, "Overdamped()")
        if gradient is not None:
            require_instance("gradient", gradient, Gradient, "FullData() or Subsampled()")
        if moves is not None:
            check_moves(moves, interaction, dynamics)
        if not callable(init_strategy):
            raise TypeError(f"`init_strategy` must be callable, such as init_to_sample; got {init_strategy!r}.")
        self._model = model
        self._potential_fn = potential_fn
        self.interaction = interaction
        self.dynamics = dynamics
        self.gradient = gradient
        self.moves = moves
        self.num_steps = count("num_steps", num_steps)
        self.num_ensembles = count("num_ensembles", num_ensembles)
        self.init_strategy = init_strategy
        self.step_size = BiasBudget() if step_size is None else step_size
        self._schedule = step_schedule(self.step_size, self.num_steps)
        self.preconditioner = preconditioner
        self.scale = preconditioner_scale(preconditioner)
        check_ensembles(interaction, self.num_ensembles)
        self._is_single = False
        self._starter = Starter(self)

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
        :param num_warmup: iterations in which step size, preconditioner, bandwidth and control variates are learned.
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
        check_groups(size, self.num_ensembles, self.interaction.interacts)
        if num_warmup == 0 and self._schedule is None:
            raise ValueError("With num_warmup=0 no step size can be measured; give `step_size`, or num_warmup=1000.")
        target = self.target(model_args, model_kwargs)
        self._starter.check_data(target)
        if init_params is not None:
            check_init_params(init_params, target, size)
        elif isinstance(target, FunctionTarget):
            raise ValueError(
                "A kernel made from a `potential_fn` needs `init_params`, one start per chain: "
                f"mcmc.run(key, init_params=...) with a leading axis of {size}."
            )
        # Keys of a resumed run are copies of one key, so the particle's number goes in too.
        keys = jax.vmap(lambda key, i: random.split(random.fold_in(key, i)))(rng_key, jnp.arange(size))
        state_key, start_key = random.split(keys[0, 1])
        start = self._starter(start_key, keys[:, 0], init_params, model_args, model_kwargs, num_warmup > 0)
        z, cloud, preconditioner, bandwidth, eigenvalue = start
        if not_jax_tracer(cloud.z):
            self._starter.check(target, cloud, eigenvalue, init_params is not None)
        learned = self.learned(target, cloud.z.shape[-1])
        jumps = None
        if self.moves is not None:
            check_jumps(self.moves, self.resolve_gradient(target), target, num_warmup, size)
            jumps = self.moves.start(cloud, num_warmup, learned.scale == "dense")
        if learned.arrives and 0 < num_warmup < MIN_WARMUP:
            warnings.warn(
                f"num_warmup={num_warmup} is too few for step size and scales to be learned well; use "
                f"num_warmup={MIN_WARMUP} at the very least, better 1000.",
                stacklevel=2,
            )
        first = 1e-3 if self._schedule is None else self._schedule(0)
        tuning = Tuning.start(num_warmup, preconditioner, first, bandwidth, cloud, learned, jumps)
        state = ParticleState(
            z=z,
            potential_energy=cloud.potential_energy.reshape(size),
            step_size=jnp.broadcast_to(tuning.step_size, (size,)),
            bandwidth=jnp.broadcast_to(bandwidth, (size,)),
            diverging=jnp.zeros(size, bool),
            gradient=cloud.gradient.reshape(size, -1),
            memory=tuple(x.reshape(size, -1) for x in cloud.memory),
            tuning=tuning,
            num_updates=jnp.zeros((), jnp.int32),
            num_divergences=jnp.zeros((), jnp.int32),
            rng_key=state_key,
        )
        return map_particles(lambda x: x[0], state) if self._is_single else state

    def sample(self, state, model_args, model_kwargs):
        """One MCMC iteration: ``num_steps`` updates of all particles."""
        is_single = jnp.ndim(state.potential_energy) == 0
        if is_single:
            state = map_particles(lambda x: x[None], state)
        tuning, size = state.tuning, state.potential_energy.shape[0]
        iteration, cloud = self.parts(state, model_args, model_kwargs)
        learned = iteration.learned
        rng_key, tuning_key, loop_key = random.split(state.rng_key, 3)
        tuning, is_other = iteration.recognize(cloud, tuning)
        cloud, tuning, in_use, troubled, num_updates = iteration.move(
            loop_key, cloud, tuning, state.num_updates, is_other
        )
        kept_after = tuning.num_warmup if learned.arrives else 0
        troubles = state.num_divergences + jnp.where(tuning.iteration >= kept_after, troubled.sum(), 0)
        warn_at_first_divergence(state.num_divergences, troubles, self.remedy)
        cloud, tuning = iteration.learn(tuning_key, cloud, tuning, is_other)
        if tuning.measurements is not None and (learned.measures or learned.jumps):
            warn_by_verdict(tuning.iteration == tuning.num_warmup, lambda: self._judge(tuning))
        state = ParticleState(
            z=jax.vmap(iteration.unravel)(tuning.preconditioner.colour(cloud.z).reshape(size, -1)),
            potential_energy=cloud.potential_energy.reshape(size),
            step_size=in_use.reshape(size),
            bandwidth=jnp.broadcast_to(tuning.bandwidth, (size,)),
            diverging=(troubled > 0).reshape(size),
            gradient=cloud.gradient.reshape(size, -1),
            memory=tuple(x.reshape(size, -1) for x in cloud.memory),
            tuning=tuning,
            num_updates=num_updates,
            num_divergences=troubles.astype(jnp.int32),
            rng_key=rng_key,
        )
        return map_particles(lambda x: x[0], state) if is_single else state

    def parts(self, state: ParticleState, args, kwargs) -> tuple[Iteration, Cloud]:
        """What moves the particles of a state, and these in whitened coordinates, ``(G, L, d)``."""
        if jnp.ndim(state.potential_energy) == 0:
            state = map_particles(lambda x: x[None], state)
        target = self.target(args, kwargs)
        flat, unravel = ravel_cloud(state.z)
        cloud = Cloud(state.tuning.preconditioner.whiten(flat), state.potential_energy, state.gradient, state.memory)
        iteration = Iteration(
            target,
            unravel,
            self.resolve_gradient(target),
            self.dynamics,
            self.interaction,
            self.moves,
            self._schedule,
            self.learned(target, flat.shape[1]),
            self.num_steps,
        )
        return iteration, jax.tree.map(lambda x: x.reshape(self.num_ensembles, -1, *x.shape[1:]), cloud)

    def postprocess_fn(self, args, kwargs):
        """A function from one unconstrained particle to its sites in their supports, with deterministic sites."""
        return identity if self._model is None else self.target(args, kwargs).constrain

    def complaints(self, state: ParticleState) -> list[str]:
        """What the end of warmup found wrong, in sentences; none where there was no warmup."""
        if np.ndim(state.num_updates):  # plain chains, run one by one
            count = len(state.num_updates)
            found = [self.complaints(jax.tree.map(lambda x, i=i: x[i], state)) for i in range(count)]
            return list(dict.fromkeys(sentence for sentences in found for sentence in sentences))
        tuning = state.tuning
        if tuning.measurements is None or (tuning.measurements.number == 0 and tuning.jumps is None):
            return []
        return self._judge(tuning).complaints()

    def _judge(self, tuning):
        return judge(tuning, self._rule, self.dynamics)

    @property
    def remedy(self) -> str:
        """What makes the steps of this kernel shorter, in words."""
        rule = self._rule
        if rule is None:
            return "divide `step_size` by 2 to 10"
        return f"set step_size=BiasBudget({rule.tolerance / 5:g}, min_draws=0)"

    def __getstate__(self):
        state = self.__dict__.copy()
        del state["_starter"]  # Compiled programs cannot be pickled.
        return state

    def __setstate__(self, state):
        self.__dict__.update(state)
        self._starter = Starter(self)

    def target(self, args, kwargs) -> Target:
        if self._model is None:
            return FunctionTarget(self._potential_fn)
        return ModelTarget(self._model, args, kwargs)

    def resolve_gradient(self, target: Target | None) -> Gradient:
        """The gradient in use for a target: the kernel's own choice where none was given."""
        return choose_gradient(self.gradient, FunctionTarget(self._potential_fn) if target is None else target)

    @property
    def _rule(self) -> BiasBudget | None:
        """How the step size is measured, if it is."""
        return self.step_size if isinstance(self.step_size, BiasBudget) else None

    def learned(self, target, dimension) -> Learned:
        """What a warmup would learn."""
        rule = self._rule
        scale = self.scale if isinstance(self.scale, str) else None
        if scale == "auto":
            # A given step means what it means in plain SGLD.
            scale = None if rule is None else "dense" if dimension <= MAX_DENSE else "diagonal"
        gradient = self.resolve_gradient(target)
        return Learned(
            step_size=rule,
            scale=scale,
            bandwidth=self.interaction.learns_bandwidth,
            anchor=isinstance(gradient, ControlVariates),
            epoch=gradient.epoch_length(target, self.num_steps),
            noise=gradient.is_noisy(target),
            jumps=self.moves is not None,
        )
