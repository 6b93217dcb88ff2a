"""The warmup on the host: a loop over its windows, with programs between them and learners at their ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
import itertools
from typing import Any
import warnings

import jax
from jax import random
from jax.experimental import multihost_utils
import numpy as np
from numpy.random import Generator, Philox, SeedSequence

from numpyro_repulsion.dynamics import Dynamics
from numpyro_repulsion.gradients import Sweeps
from numpyro_repulsion.interactions import Coupling
from numpyro_repulsion.kernels import warmup_programs
from numpyro_repulsion.kernels.bound import BoundSampler
from numpyro_repulsion.kernels.programs import Programs, compiler_options
from numpyro_repulsion.kernels.warmup_programs import Judged, WarmupRun, WindowInfo, what_is_on
from numpyro_repulsion.processes import are_several
from numpyro_repulsion.warmup import (
    Coordinates,
    MeasuredFigures,
    Preconditioner,
    Timetable,
    WarmupDiagnosis,
    WarmupPlan,
    WarmupState,
    Window,
)
from numpyro_repulsion.warmup.arrival import update_arrival, update_prolongation
from numpyro_repulsion.warmup.bandwidth import update_bandwidth
from numpyro_repulsion.warmup.curvature import UNKNOWN, draw_seed, rounding_shift
from numpyro_repulsion.warmup.learned import diagnose_warmup, update_symptoms
from numpyro_repulsion.warmup.scales import CENTERING, update_centering, update_scales
from numpyro_repulsion.warmup.state import Learner
from numpyro_repulsion.warmup.step_size import update_reference, update_step_size
from numpyro_repulsion.warmup.windows import ARRIVED, FREEZE


def _update_jumps(rng, window, warmup, cloud, sampler):
    if warmup.jumps is None:
        return warmup, cloud
    jumps = sampler.bound.moves.learn(window, warmup.jumps, warmup, cloud, sampler.dynamics.temperature)
    return warmup._replace(jumps=jumps), cloud


#: In calling order: lost particles return by energies in the old coordinates, so other coordinates come after that, and
#: before a reference in them. New scales come after the reference, whose noise they account for, and before what is
#: measured in them.
LEARNERS: tuple[Learner, ...] = (
    update_symptoms,
    update_arrival,
    update_centering,
    update_reference,
    update_scales,
    update_bandwidth,
    update_step_size,
    update_prolongation,
    _update_jumps,
)


@dataclass(frozen=True, eq=False)
class HostSampler:
    """What learners may use of a bound sampler, by the programs of the same names. Arrays are those of the host."""

    bound: BoundSampler
    plan: WarmupPlan
    programs: Programs
    state: WarmupRun  # at the end of the window

    @property
    def dynamics(self):
        return self.bound.kernel.dynamics

    def _run(self, function, settings, *arrays, num_gradients=0):
        """Return on the host what a program returns, for arrays of which the host may have made floats more precise."""
        shape, dtype = self.state.cloud.z.shape, self.state.cloud.z.dtype

        def narrowed(x):
            is_float = isinstance(x, (np.ndarray, np.generic)) and np.issubdtype(x.dtype, np.floating)
            return np.asarray(x, dtype) if is_float else x

        arrays = jax.tree.map(narrowed, arrays)
        options = compiler_options(self.bound, num_gradients, shape[0] * shape[1], shape[2])
        # Learners know what to do where a particle has run away.
        with jax.debug_nans(False):
            return jax.device_get(self.programs(function, self.bound, settings, *arrays, options=options))

    def _coordinates(self, warmup):
        return Coordinates(warmup.preconditioner, warmup.centering, warmup.reference, self.state.prototype)

    def _couple(self, u, bandwidth, is_new=False):
        # Each window measures along directions of its own.
        seed = np.uint32(int(self.state.warmup.iteration))
        return self._run(warmup_programs.couple, None, u, bandwidth, np.bool_(is_new), self.state.rng_key, seed)

    def couple(self, u, bandwidth):
        """Return the bound and the diagonal of K for particles ``(G, L, d)``; it has no operations."""
        found = self._couple(u, bandwidth)
        return Coupling.of_figures(found.bound, found.diagonal, found.is_identity)

    def steepness(self, u, bandwidth):
        """Return how fast Γ changes along a random direction."""
        return self._couple(u, bandwidth).steepness

    def bandwidth_of(self, u):
        """Return the bandwidth by the rule of the interaction."""
        return self._couple(u, self.state.warmup.bandwidth, is_new=True).bandwidth

    def best_bandwidth(self, u, rule, tolerance):
        return self._run(warmup_programs.best_bandwidth, tolerance, u, rule)

    def gradients(self, warmup):
        """Return the function for gradients in whitened coordinates."""
        return lambda cases: (gradient for _, gradient in self._evaluated(warmup, cases))

    def energy_and_grad(self, warmup, seed, u):
        """Return U and ∇U on the minibatch of a seed."""
        return next(self._evaluated(warmup, [(seed, u, 0)]))

    def _evaluated(self, warmup, cases):
        """Yield U and ∇U for each case of :data:`~numpyro_repulsion.warmup.curvature.Gradients`, by one program."""
        where, u, cases = self._coordinates(warmup), self.state.cloud.z, iter(cases)
        # So many points at once, and fewer where these have more numbers in all.
        most = int(np.clip(2**16 // u.size, 4, 64))
        while some := list(itertools.islice(cases, most)):
            seeds, orders = np.zeros(most, np.uint32), np.zeros(most, np.int32)
            points, count = np.zeros((most, *u.shape), u.dtype), len(some)
            for i, case in enumerate(some):
                seeds[i], points[i], orders[i] = case
            rest = self.state.rng_key, seeds, points, orders, np.int32(count)
            # A warmup evaluates about 500 gradients of the cloud for its measurements, and for each of five dense
            # curvatures two for each parameter.
            number = 500 + 20 * u.shape[-1] * (self.plan.is_noisy and self.plan.kind == "dense")
            found = self._run(warmup_programs.gradients, None, where, *rest, num_gradients=number)
            yield from zip(*(x[:count] for x in found), strict=True)

    def energy_on_common_rows(self, warmup, u):
        return self._run(warmup_programs.energy_on_common_rows, None, self._coordinates(warmup), u)

    def log_volume_gained(self, warmup, u):
        target = self.bound.target
        if not (target.location_scale or target.num_products):
            return np.zeros(u.shape[:-1], u.dtype)
        return self._run(warmup_programs.log_volume_gained, None, self._coordinates(warmup), u)

    def energy_to_compare(self, centering, y):
        where = Coordinates(Preconditioner(), centering, None, self.state.prototype)
        return self._run(warmup_programs.energy_to_compare, None, where, y)

    def recover_and_center(self, warmup, u, learns):
        smallest_sd = CENTERING.sd if learns else None
        return self._run(warmup_programs.recover_and_center, smallest_sd, self._coordinates(warmup), u)

    def to_coordinates(self, centering, found):
        return self._run(warmup_programs.to_coordinates, None, self._coordinates(self.state.warmup), centering, found)

    def evaluate_reference(self, rng, warmup, reference, u, with_hessian):
        size, seed = self.state.cloud.potential_energy.size, np.uint32(draw_seed(rng))
        reference = reference._replace(posterior_id=warmup.posterior_id)
        where = self._coordinates(warmup._replace(reference=None))
        passes = reference.hessian.units.num_probes * self.plan.num_minibatches // size if with_hessian else 0
        arrays = where, reference, u, self.state.rng_key, seed
        return self._run(warmup_programs.evaluate_reference, (size, with_hessian), *arrays, num_gradients=passes)

    def mean_curvature(self, warmup, u):
        number = warmup.reference.hessian.units.num_probes
        return self._run(warmup_programs.mean_curvature, None, self._coordinates(warmup), u, num_gradients=number)

    def settled(self, cloud, step_size, noise):
        if type(self.dynamics).settled is Dynamics.settled:
            return cloud
        return self._run(warmup_programs.settled, None, cloud, step_size, noise)


def _like(given: Any, new: Any) -> Any:
    """Return new arrays with the types of given ones."""
    return jax.tree.map(lambda old, value: value if value is old else np.asarray(value, old.dtype), given, new)


def info_of(plan: WarmupPlan, timetable: Timetable, warmup: WarmupState, iteration: int) -> WindowInfo:
    """Return the `WindowInfo` of an iteration, counted from 0."""
    extreme = 0.0
    if plan.is_noisy and plan.measures:
        extreme = warmup._replace(measurements=jax.device_get(warmup.measurements)).noise.extreme
    begins, ends = map(np.int32, timetable.half_of_arrival(iteration))
    return WindowInfo(
        np.int32(timetable.next_end(iteration)),
        np.int32(timetable.at(ARRIVED)),
        (begins, ends),
        np.bool_(iteration < timetable.at(FREEZE)),
        np.asarray(extreme, warmup.step_size.dtype),
    )


def warm(bound: BoundSampler, programs: Programs, options: dict[str, Any], state: WarmupRun, number: int) -> WarmupRun:
    """Make a number of iterations of warmup, by programs with these options, and learn at the ends of windows."""
    plan = bound.plan(state.warmup.preconditioner.kind)
    done = int(state.warmup.iteration)
    last = done + number
    while done < last:
        timetable = Timetable(int(state.warmup.num_warmup), bool(state.warmup.arrival.is_prolonged), plan.late)
        is_arriving = plan.arrives and timetable.is_arriving(done)
        if timetable.is_beginning(done):
            state = _without_sums(state, is_arriving)
        stop = min(last, timetable.next_stop(done))
        program = warmup_programs.arriving if is_arriving else warmup_programs.sampling
        info = info_of(plan, timetable, state.warmup, done)
        state = programs(program, bound, None, state, info, np.int32(stop - done), options=options)
        done = stop
        if timetable.is_end(done):
            state = _learn(bound, plan, programs, Window(timetable, done), state)
    return state


def iterations_of(bound: BoundSampler, state: WarmupRun) -> list[Callable[[WarmupRun], WarmupRun]]:
    """Return the functions of the iterations of a warmup, while particles arrive and afterwards, which
    identify a stored run."""
    plan, zero = bound.plan(state.warmup.preconditioner.kind), np.int32(0)
    info = WindowInfo(zero, zero, (zero, zero), np.False_, np.zeros((), state.warmup.step_size.dtype))
    both = (warmup_programs.arriving, warmup_programs.sampling) if plan.arrives else (warmup_programs.sampling,)
    return [partial(program, bound, None, window=info, number=1) for program in both]


def _without_sums(state, is_arriving):
    """Return the state where the sums of a window begin."""
    warmup, arrival = state.warmup, state.warmup.arrival
    empty = partial(jax.tree.map, lambda x: _put(x, np.zeros(x.shape, x.dtype)))
    if is_arriving and arrival.surroundings is not None:
        arrival = arrival._replace(surroundings=empty(arrival.surroundings))
    return state._replace(warmup=warmup._replace(moments=empty(warmup.moments), arrival=arrival))


def _learn(bound, plan, programs, window, state):
    """Return the state after all learners have seen the end of a window."""
    given = state.warmup, state.cloud
    on_host = jax.device_get(given)
    sampler = HostSampler(bound, plan, programs, state)
    words = np.asarray(random.key_data(state.rng_key)).ravel()
    rng = Generator(Philox(SeedSequence([*map(int, words), window.ends])))
    warmup, cloud = on_host
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for learner in LEARNERS:
            warmup, cloud = found = _like(on_host, learner(rng, window, warmup, cloud, sampler))
    if are_several():
        found = multihost_utils.broadcast_one_to_all(found)
    # What has not changed stays on its devices.
    warmup, cloud = jax.tree.map(lambda x, old, new: x if new is old else _put(x, new), given, on_host, found)
    return state._replace(warmup=warmup, cloud=cloud)


def _put(x: jax.Array, value: np.ndarray) -> jax.Array:
    """Return an array of the host on the devices of another of its shape, so that no other program is compiled."""
    if value.shape != x.shape:
        raise ValueError(f"A learner must keep the shapes of the state; got {value.shape} instead of {x.shape}.")
    return jax.device_put(value, x.sharding) if x.committed else jax.device_put(value)


def judge(bound: BoundSampler, plan: WarmupPlan, programs: Programs, state: WarmupRun) -> Judged:
    """Return what the host says of a warmup at its end."""
    kernel, dynamics, like = bound.kernel, bound.kernel.dynamics, state.warmup.step_size
    if isinstance(like, (jax.core.Tracer, jax.ShapeDtypeStruct)):
        number = len(MeasuredFigures._fields) + len(WarmupDiagnosis._fields)
        is_judged = plan.measures or plan.has_given_moves
        return Judged(np.zeros((), like.dtype), np.zeros(number, like.dtype) if is_judged else None)
    warmup = jax.device_get(state.warmup)
    known = warmup.measurements
    with np.errstate(all="ignore"):
        extreme = np.asarray(warmup.noise.extreme_gradient if plan.measures else 0.0, like.dtype)
        if not (plan.measures or plan.has_given_moves):
            return Judged(extreme, None)
        is_jumping = None if kernel.moves is None else what_is_on(bound, warmup)[1]
        is_swept = isinstance(kernel.gradient, Sweeps)
        curvature = known.high_curvature, known.largest_curvature, known.typical_steepness
        noise, variance = warmup.noise, warmup.largest_variance(dynamics)
        measured = MeasuredFigures(*curvature, noise.largest, noise.mean, variance, warmup.bias, warmup.mean_bias)
        problems = diagnose_warmup(warmup, plan.budget, dynamics, is_jumping, is_swept)
        if plan.budget is not None and plan.kind is not None and not problems.is_prolonged:
            sampler = HostSampler(bound, plan, programs, state)
            shift = rounding_shift(jax.device_get(state.cloud.z), sampler.gradients(warmup))
            problems = problems._replace(rounding=shift)
        packed = np.asarray([float(x) for x in (*measured, *problems)], like.dtype)
        return Judged(extreme, np.where(np.isnan(packed), np.asarray(UNKNOWN, like.dtype), packed))
