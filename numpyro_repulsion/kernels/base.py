"""The one ``MCMCKernel`` of the package, whose chains are particles."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from typing import ClassVar, cast
import warnings

import jax
from jax import lax, random
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike
import tqdm

from numpyro.infer import init_to_sample
from numpyro.infer.mcmc import MCMCKernel
from numpyro.util import identity, is_prng_key, not_jax_tracer

from numpyro_repulsion.checks import check_jaxlib, integer, is_auto
from numpyro_repulsion.dynamics import Cloud, Dynamics, Overdamped
from numpyro_repulsion.findings import MAX_FLAGGED, Diagnosis, Finding, flagged_updates
from numpyro_repulsion.gradients import Gradient, compiled, is_traced, ravel_cloud
from numpyro_repulsion.interactions import Balanced, Coupling, Interaction
from numpyro_repulsion.kernels import initialization, requirements, warmup_host, warmup_programs
from numpyro_repulsion.kernels.bound import Binder, BoundSampler, Settings, hinting, preconditioner_scale, step_schedule
from numpyro_repulsion.kernels.iteration import CloudMover
from numpyro_repulsion.kernels.mcmc import arguments, calling_mcmc, collects_warmup
from numpyro_repulsion.kernels.programs import Programs, compiler_options
from numpyro_repulsion.kernels.state import ParticleState, check_chains, check_state, map_particles, row_seed
from numpyro_repulsion.kernels.warmup_programs import Frozen, WarmupRun
from numpyro_repulsion.layout import place_everywhere
from numpyro_repulsion.moves import Move
from numpyro_repulsion.schedules import BiasBudget


class ParticleKernel(Settings, MCMCKernel):
    """Base of all kernels: dynamics × interaction × gradient × schedule, with the chains of ``MCMC`` as particles.

    :param model: a NumPyro model. Plates with ``subsample_size`` are minibatched.
    :param potential_fn: instead of a model, a function that returns the potential energy of one particle, a pytree of
        floats. ``mcmc.run`` then needs ``init_params``.
    :param step_size: ε. ``"auto"`` is ``BiasBudget()``, which measures ε in warmup, from the curvature that nine
        particles in ten stay below and the minibatch noise; with :class:`~numpyro_repulsion.dynamics.Descent` it is
        0.05. A float is constant; a callable of the update count (including warmup) is a schedule:
        :class:`~numpyro_repulsion.Polynomial`, :class:`~numpyro_repulsion.Cyclical`, or one of optax.
    :param interaction: how particles interact; ``"auto"`` is the kernel's default.
    :param preconditioner: a constant matrix P that makes the diffusion ``K ⊗ P``: an array of shape ``(d,)`` for a
        diagonal or ``(d, d)``, over the flat unconstrained parameters in the order of
        :func:`jax.flatten_util.ravel_pytree` (sites by name). ``"diagonal"``, ``"dense"``, ``"arrow"`` (for one large
        group of effects that are independent given all other parameters, in models with subsampled plates) and
        ``"low_rank"`` (diagonal scales, and own ones for the 40 directions that need them most) learn P in warmup and
        freeze it. ``"auto"`` is dense up to the number of parameters whose correlations warmup can learn (0.15 L W with
        L particles and W iterations of warmup, W ``num_steps`` / 8 with minibatches; at least 64, at most 512). Above
        it is of low rank, or for more than 512 parameters an arrow if the model has such a group, and diagonal above a
        million. With a given
        ``step_size``, ``"auto"`` is the identity, so that the step is that of plain SGLD. ``None`` is the identity.
    :param num_steps: updates per MCMC iteration, and so per draw.
    :param num_ensembles: into how many equal groups to split the particles, in order of the chains; groups do not
        interact and share no minibatch.
    :param gradient: ``"auto"`` is ``ControlVariates()`` for models with subsampled plates (``Subsampled()`` if the
        likelihood is also random, or a site uses rows of a plate outside of it, scaled by hand) and
        ``FullData()`` for others; ``"plain"`` has no control variates; ``SVRG()`` suits several modes.
    :param dynamics: how particles move; ``"auto"`` is the kernel's default.
    :param moves: jumps between updates, such as ``Archive()``. With ``"auto"``, four or more particles jump between
        basins, by proposals from an archive of warmup, if warmup measures the step and finds several basins, and each
        update uses all rows. This does not apply to noise that is averaged over two updates and
        correlated by K, the default of ``SGLDR`` with a measured step. ``False`` switches these jumps off.
    :param reparam: ``"auto"`` centers hierarchical sites (a normal, Student-t, Cauchy, Laplace, logistic or Gumbel
        prior with a scale that depends on other sites; or a site that the model multiplies by its scale) by a share
        that warmup learns for each of their entries: centered where the data determine it, non-centered where they do
        not, or between. The posterior and the draws are those of the model. It applies to four or more particles of a
        sampler that learns its step, without ``moves``, ``SVRG`` and discrete sites. ``None`` keeps the coordinates of
        the model.
    :param init_strategy: where particles start; by default, each at a draw from the prior, nearer if U explodes. See
        also :func:`~numpyro_repulsion.init_from_guide`, :func:`~numpyro_repulsion.init_from_idata` and
        :func:`~numpyro_repulsion.init_around`.
    :raises ValueError: if a setting is out of range.
    :raises TypeError: if a setting has a wrong type.
    """

    def __init_subclass__(cls, **kwargs):
        """Show the arguments in the documentation of each kernel."""
        super().__init_subclass__(**kwargs)
        if cls.__doc__ and ":param" not in cls.__doc__:
            head, references, tail = cls.__doc__.partition("    **References:**")
            arguments = (ParticleKernel.__doc__ or "").partition("    :param")
            cls.__doc__ = f"{head}{''.join(arguments[1:]).rstrip()}\n\n{references}{tail}"

    sample_field = "z"
    _num_shown: int
    #: Tells NumPyro that `sample` can continue from a stored state without `init`.
    _sample_fn = True
    default_fields = ("z", "potential_energy", "step_size", "bandwidth", "diverging")

    _default_interaction: ClassVar[Interaction] = Balanced()
    _default_dynamics: ClassVar[Dynamics] = Overdamped()
    #: Default dynamics if the step size is measured; ``None`` for the same.
    _measured_dynamics: ClassVar[Dynamics | None] = None

    def __init__(
        self,
        model: Callable | None = None,
        potential_fn: Callable | None = None,
        *,
        step_size: float | Callable | BiasBudget | str | None = "auto",
        interaction: Interaction | str | None = "auto",
        preconditioner: ArrayLike | None = "auto",
        num_steps: int = 10,
        num_ensembles: int = 1,
        gradient: Gradient | str = "auto",
        dynamics: Dynamics | str = "auto",
        moves: Move | bool | str = "auto",
        reparam: str | None = "auto",
        init_strategy: Callable = init_to_sample,
    ):
        if (model is None) == (potential_fn is None):
            raise ValueError(
                f"{type(self).__name__} needs exactly one of `model` and `potential_fn`; "
                f"got {'neither' if model is None else 'both'}."
            )
        if not callable(model if potential_fn is None else potential_fn):
            raise TypeError(f"`model` or `potential_fn` must be callable; got {model or potential_fn!r}.")
        for name, value in (("gradient", gradient), ("dynamics", dynamics), ("moves", moves)):
            if value is None:
                off = ", or moves=False for no jumps" if name == "moves" else ""
                raise ValueError(f'{name}=None meant the automatic choice, which is {name}="auto" now{off}.')
        step_size = None if is_auto(step_size) else step_size
        interaction = self._default_interaction if interaction is None or is_auto(interaction) else interaction
        if is_auto(dynamics):
            measured = step_size is None or isinstance(step_size, BiasBudget)
            measured &= is_auto(moves) or not moves  # Jumps cannot carry noise that K correlates.
            dynamics = (measured and self._measured_dynamics) or self._default_dynamics
        requirements.require_instance("interaction", interaction, Interaction, "RBF(), Balanced() or Independent()")
        requirements.require_instance("dynamics", dynamics, Dynamics, "Overdamped()")
        interaction, dynamics = cast(Interaction, interaction), cast(Dynamics, dynamics)
        if not (is_auto(gradient) or gradient == "plain"):
            requirements.require_instance("gradient", gradient, Gradient, "FullData() or Subsampled()")
        if not is_auto(moves) and moves is not False:
            requirements.check_moves(moves, interaction, dynamics)
        requirements.check_sweeps(gradient, dynamics)
        if not callable(init_strategy):
            raise TypeError(f"`init_strategy` must be callable, such as init_to_sample; got {init_strategy!r}.")
        self.model, self.potential_fn = model, potential_fn
        self.interaction, self.dynamics = interaction, dynamics
        self.gradient = gradient
        self.moves = moves if isinstance(moves, Move) else None
        self.looks_for_basins = is_auto(moves) and dynamics.allows_jumps(interaction.interacts)
        self.reparam = requirements.check_reparam(reparam)
        self.num_steps = integer("`num_steps`", num_steps)
        self.num_ensembles = integer("`num_ensembles`", num_ensembles)
        self.init_strategy = init_strategy
        self.step_size, self.schedule = step_schedule(step_size, dynamics, self.num_steps)
        self.preconditioner = preconditioner
        self.scale = preconditioner_scale(preconditioner)
        requirements.check_ensembles(interaction, self.num_ensembles)
        self._prepare()

    @property
    def is_ensemble_kernel(self):
        """Whether one state holds all chains; raises ``ValueError`` if a stored state has other chains than the run.

        ``MCMC.run`` reads this property before it continues from a stored state, whose references are evaluated here on
        the data of the run. NumPyro's progress bar reads it too, each time that it moves.
        """
        mcmc, _ = calling_mcmc("run")
        if mcmc is None or not isinstance(state := mcmc.post_warmup_state, ParticleState):
            return True
        self._num_shown = int(state.num_flagged_updates)
        requirements.require_agreement(self, mcmc, None, 0, state, *arguments(mcmc))
        has_chains, bound = check_chains(state, mcmc), self.bind(*arguments(mcmc))
        bound.gradient.share(bound.target)
        mcmc.post_warmup_state = self.resumed(state, *arguments(mcmc))
        return has_chains

    def resumed(self, state: ParticleState | WarmupRun, args, kwargs) -> ParticleState | WarmupRun:
        """Return a stored state for a run, with references on the data of the run.

        ``MCMC.run`` and `run_in_pieces` call this. Whoever calls `sample` with a state and other data calls it first.
        """
        bound = self.bind(args, kwargs)
        if isinstance(state, WarmupRun):
            return warmup_programs.relabeled(state, bound.posterior_id(state.prototype))
        reference = state.learned.reference
        posterior_id = None if reference is None else bound.posterior_id()
        if reference is None or posterior_id is None or np.array_equal(reference.posterior_id, posterior_id):
            return state
        if reference.age is not None:
            # Each particle renews its own.
            new = reference._replace(posterior_id=jnp.asarray(posterior_id), age=-jnp.ones_like(reference.age))
        else:
            mover, _ = self.parts(state, args, kwargs)
            position = jnp.asarray(reference.position)
            size = np.size(state.potential_energy)

            def evaluate(target, position):
                on = replace(mover, bound=replace(mover.bound, target=target), posterior_id=None)
                moved = reference._replace(position=position)
                return on.evaluate_reference(random.key(0), state.learned, moved, size)

            new = compiled(evaluate, bound.target)(position)._replace(posterior_id=jnp.asarray(posterior_id))
            if new.hessian is not None and not new.hessian.is_known:
                new = new._replace(hessian=None)  # no arrow on these data: corrections of first order are exact too
        # Noise of other data would take too much of the injected noise.
        return state._replace(learned=state.learned._replace(reference=new, gradient_noise=None))

    def get_diagnostics_str(self, state):
        """Return the text of the progress bar; warn of problems in the last iteration."""
        self._num_shown = self.warn_of_flagged(state, self._num_shown)
        return self.progress(state)

    def progress(self, state: ParticleState) -> str:
        """Return the step size in use and the number of flagged updates, in words."""
        count, step_size = int(state.num_flagged_updates), float(np.ravel(state.step_size)[0])
        words = f"{self.num_steps} step{'s' * (self.num_steps > 1)}/draw, ε = {step_size:.3g}"
        return words + (f", {count} flagged" if count else "")

    def warn_of_flagged(self, state: ParticleState, num_flagged_updates: int) -> int:
        """Warn, on the host and once, if many updates were flagged and before only so many; return their number."""
        count = int(state.num_flagged_updates)
        many = MAX_FLAGGED * int(state.num_warmup) * self.num_steps * np.size(state.potential_energy)
        if num_flagged_updates <= many < count:
            words = "Updates were flagged `diverging` (shown once; `diagnose` has the final count)"
            warnings.warn(f"{words}:\n{Diagnosis([flagged_updates(count, 0.0, self.remedy)])}", RuntimeWarning, 3)
        return count

    def warn_of_warmup(self, state: ParticleState) -> None:
        """Warn, on the host, of problems that warmup found."""
        if found := Diagnosis(self.findings(state)):
            warnings.warn(f"Warmup found problems:\n{found}", RuntimeWarning, 3)

    def init(self, rng_key, num_warmup, init_params=None, model_args=(), model_kwargs=None):
        """Return the state from which draws are made: start the particles, and make the whole warmup.

        Particles start at ``init_params``, or at draws of ``init_strategy`` with finite U and ∇U. Within ``MCMC.run``,
        NumPyro's own iterations of warmup then pass without an update, unless ``collect_warmup=True``, which makes them
        frozen draws. If there is nothing to learn (a given step, no control variates), they are iterations like others.

        :param rng_key: L keys for L particles, or a single key for one chain (kernels that do not interact).
        :param num_warmup: iterations that learn the step size, preconditioner, bandwidth and control variates.
        :param init_params: unconstrained positions, each leaf ``(L, ...)``.
        :raises ValueError: for a wrong ``chain_method`` or number of chains, identical starts, ``init_params`` that do
            not fit, a model that cannot be sampled, data with NaN, or a warmup within ``jax.jit`` or ``pmap``.
        """
        mcmc, left_out = calling_mcmc()
        state = self.start(rng_key, num_warmup, init_params, model_args, model_kwargs, mcmc, left_out)
        if isinstance(state, ParticleState):
            return state
        is_shown = mcmc is not None and mcmc.progress_bar
        stride = max(1, num_warmup // 20) if is_shown else num_warmup
        with tqdm.tqdm(total=num_warmup, desc="warmup", disable=not is_shown or jax.process_index() > 0) as bar:
            for done in range(0, num_warmup, stride):
                number = min(stride, num_warmup - done)
                state = self.warm(state, number, num_warmup, model_args, model_kwargs)
                if is_shown:
                    jax.block_until_ready(state)
                bar.update(number)
        # NumPyro counts the iterations of warmup itself.
        done = 0 if mcmc is not None else num_warmup
        skips_warmup = mcmc is not None and not collects_warmup(mcmc)
        state = self.freeze(state, model_args, model_kwargs, is_prng_key(rng_key), done, skips_warmup)
        if is_shown:
            self.warn_of_warmup(state)
        return state

    def start(
        self, rng_key, num_warmup, init_params, model_args, model_kwargs, mcmc=None, left_out=()
    ) -> WarmupRun | ParticleState:
        """Return the state before warmup, or that from which draws are made if there is nothing to learn."""
        check_jaxlib()
        is_single = is_prng_key(rng_key)
        if is_single:
            chains = 1 if mcmc is None else mcmc.num_chains
            if chains > 1 or self.interaction.interacts or self.num_ensembles > 1:
                raise ValueError(
                    f"{type(self).__name__} moves all chains together and needs "
                    f'`MCMC(kernel, num_chains={chains if chains > 1 else 20}, chain_method="vectorized", ...)`; got '
                    f"num_chains={chains} by {getattr(mcmc, 'chain_method', 'init')!r}."
                )
            rng_key = rng_key[None]
            init_params = jax.tree.map(lambda x: jnp.asarray(x)[None], init_params)
        size, self._num_shown = rng_key.shape[0], 0
        requirements.check_groups(size, self.num_ensembles, self.interaction.interacts)
        if num_warmup == 0 and self.schedule is None:
            raise ValueError("With num_warmup=0 the step size cannot be adapted; give `step_size`, or num_warmup=1000.")
        requirements.require_agreement(self, mcmc, rng_key, num_warmup, init_params, model_args, model_kwargs)
        bound = self.bind(model_args, model_kwargs)
        requirements.check_data(bound.target, bound.gradient, mcmc, size, left_out)
        requirements.check_init_params(init_params, bound.target, size)
        if self.moves is not None:
            requirements.check_jumps(self.moves, bound.gradient, bound.target, num_warmup, size)
        plan = bound.plan()
        how = None
        if num_warmup == 0 or not plan.learns:
            how = Frozen((int(plan.epoch is not None), False), skips_warmup=False, iteration=0, is_single=is_single)
        posterior_id = None
        if num_warmup > 0 or bound.gradient.has_reference:
            posterior_id = bound.posterior_id(init_params)
            posterior_id = np.zeros(4, np.uint32) if posterior_id is None else posterior_id
        options = compiler_options(bound, 1, size, 1)
        with hinting(self.model, model_args, model_kwargs or {}):
            settings = initialization.StartSettings(num_warmup, how, bound.hessian_units())
            arrays = rng_key, init_params, posterior_id
            begun = self._programs(initialization.start, bound, settings, *arrays, options=options)
        if not_jax_tracer(begun.cloud.potential_energy):
            initialization.check_start(bound, begun, init_params is not None)
        requirements.warn_of_short_warmup(num_warmup if plan.arrives else 0)
        return begun.state

    def warm(self, state: WarmupRun, number: int, num_warmup: int, args, kwargs) -> WarmupRun:
        """Make a number of iterations of warmup; how many there are in all decides how the program is compiled."""
        if is_traced():
            raise ValueError(
                f"{type(self).__name__} adapts its step size, preconditioner or control-variate reference before the "
                "first draw, outside of compiled programs, but it was started within one. Use MCMC(kernel, "
                'chain_method="vectorized", ...), with a mesh for several devices; call kernel.init outside of '
                "jax.jit; or adapt nothing, as with step_size=0.01 and num_warmup=0."
            )
        bound, shape = self.bind(args, kwargs), state.cloud.z.shape
        options = compiler_options(bound, num_warmup * self.num_steps, shape[0] * shape[1], shape[2])
        with hinting(self.model, args, kwargs or {}):
            return warmup_host.warm(bound, self._programs, options, state, number)

    def freeze(self, state: WarmupRun, args, kwargs, is_single: bool, iteration: int, skips_warmup: bool = False):
        """Return the state from which draws are made, with all that a warmup learned.

        :param iteration: how many iterations count as done.
        :param skips_warmup: whether NumPyro's iterations of warmup pass without an update.
        """
        with hinting(self.model, args, kwargs or {}):
            on = warmup_programs.what_is_on(self.bind(args, kwargs), state.warmup)
            return self.frozen_as(Frozen(on, skips_warmup, iteration, is_single), state, args, kwargs)

    def frozen_as(self, how: Frozen, state: WarmupRun, args, kwargs) -> ParticleState:
        """Return a state for which it is known what is on, also for the shapes of a warmup."""
        bound, shape = self.bind(args, kwargs), state.cloud.z.shape
        judged = warmup_host.judge(bound, bound.plan(state.warmup.preconditioner.kind), self._programs, state)
        options = compiler_options(bound, 1, shape[0] * shape[1], shape[2])
        return self._programs(warmup_programs.freeze, bound, how, state, judged, options=options)

    def sample(self, state, model_args, model_kwargs):
        """Make one MCMC iteration: ``num_steps`` updates of all particles."""
        if not state.origin.skips_warmup:
            return self._sample(state, model_args, model_kwargs)
        return lax.cond(
            state.iteration < state.num_warmup,
            lambda: place_everywhere(state._replace(iteration=state.iteration + 1)),
            lambda: self._sample(state, model_args, model_kwargs),
        )

    def _sample(self, given, model_args, model_kwargs):
        # At both ends, so that the loops of callers leave the state on these devices.
        state = place_everywhere(given.with_particle_axis())
        mover, cloud = self.parts(state, model_args, model_kwargs)
        learned = mover.with_references(cloud, state.learned)
        rng_key, now, learned = mover.move(state.rng_key, cloud, learned, state.num_updates, learned.jumps is not None)
        is_counted = not state.origin.has_warmed or state.iteration >= state.num_warmup
        count = state.num_flagged_updates + jnp.where(is_counted, now.flagged.sum(), 0)
        cut_off = state.cut_off + jnp.where(is_counted, now.cut_off.sum(), 0.0)
        found = ParticleState.of(
            mover,
            now.cloud,
            learned,
            mover.step_size(learned, now.num_updates - 1),
            now.flagged,
            rng_key,
            mover.row_seed,
            iteration=state.iteration + 1,
            num_warmup=state.num_warmup,
            num_updates=now.num_updates,
            num_flagged_updates=count.astype(jnp.int32),
            cut_off=cut_off,
            origin=state.origin,
        )
        return place_everywhere(map_particles(lambda x: x[0], found) if given.is_single else found)

    def parts(self, state: ParticleState, args, kwargs) -> tuple[CloudMover, Cloud]:
        """Return what moves the particles of a state, and its particles in whitened coordinates, ``(G, L, d)``."""
        state = state.with_particle_axis()
        bound = self.bind(args, kwargs)
        posterior_id = None if state.learned.reference is None else bound.posterior_id()
        bound = bound.behind_barrier()
        plan = bound.plan(state.learned.preconditioner.kind)
        check_state(state, self, bound.target, bound.gradient)
        flat, unravel = ravel_cloud(state.z)
        flat, energy = state.coordinates or (flat, state.potential_energy)
        cloud = Cloud(state.learned.preconditioner.whiten(flat), energy, state.gradient, state.memory)
        cloud = jax.tree.map(lambda x: x.reshape(self.num_ensembles, -1, *x.shape[1:]), cloud)
        mover = CloudMover(bound, plan, unravel, row_seed(state), posterior_id, self.schedule)
        return mover, mover.layout(cloud.z).place(cloud)

    def postprocess_fn(self, args, kwargs):
        """Return a function from one unconstrained particle to its constrained and deterministic sites."""
        return identity if self.model is None else self.bind(args, kwargs).target.constrain

    def findings(self, state: ParticleState) -> list[Finding]:
        """Return the problems found at the end of warmup; an empty list without a warmup."""
        found = state.learned.diagnosis
        return [] if found is None else found.findings()

    @property
    def remedy(self) -> str:
        """How to make the steps of this kernel shorter, as a clause."""
        if not isinstance(self.step_size, BiasBudget):
            return "divide `step_size` by 2 to 10"
        # A fifth of what may be in use, which the order of control variates decides too.
        error = self.dynamics.step_error(Coupling.of_figures(1.0, 1.0, not self.interaction.interacts))
        return f"set step_size=BiasBudget({self.step_size.tolerance_for(error.is_second_order) / 5:g}, min_draws=0)"

    def wrap_model(self, wrapper: Callable) -> ParticleKernel:
        """Return a copy of this kernel with the model ``wrapper(model)``.

        :raises ValueError: for a kernel that is made from a ``potential_fn``.
        """
        if self.model is None:
            raise ValueError("A kernel made from a `potential_fn` has no model; make it from a model.")
        kernel = copy(self)
        kernel.__dict__["model"] = wrapper(self.model)
        return kernel

    def _prepare(self):
        """Make what caches compiled programs, and can be made again."""
        self._programs, self._binder = Programs(self), Binder(self)
        self._num_shown = 0

    def __getstate__(self):
        return {name: value for name, value in self.__dict__.items() if name not in ("_binder", "_programs")}

    def __setstate__(self, state):
        self.__dict__.update(state)
        self._prepare()

    def bind(self, args, kwargs=None) -> BoundSampler:
        """Return this kernel bound to the model's arguments; the model is analyzed once for equal arguments."""
        return self._binder(args, kwargs)
