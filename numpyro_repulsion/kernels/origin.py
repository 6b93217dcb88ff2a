"""The origin of a state, and checks whether a kernel or an ``MCMC`` can continue from the state."""

from __future__ import annotations

from dataclasses import dataclass
import hashlib
from typing import Protocol

import jax
from jax import random
import jax.numpy as jnp
import numpy as np

from numpyro.infer import MCMC

from numpyro_repulsion.digests import words
from numpyro_repulsion.dynamics import Cloud, Dynamics
from numpyro_repulsion.gradients import Gradient, ModelTarget, Particle, Target
from numpyro_repulsion.interactions import Interaction
from numpyro_repulsion.kernels.bound import Settings
from numpyro_repulsion.warmup import WarmupPlan, WarmupState

__all__ = ["Origin", "check_chains", "check_state"]

_CALL = "set mcmc.post_warmup_state = None and call mcmc.run(key, ..., init_params=state.z)"
_ANEW = f"to start again from its positions, {_CALL}"


@jax.tree_util.register_static
@dataclass(frozen=True)
class Origin:
    """What a state was made for; static.

    - **memory** - what its memory holds, in words.
    - **dynamics** - the dynamics of the kernel that made it.
    - **has_bandwidth** - whether it has a bandwidth that an interaction can use.
    - **scale** - learned scales (``"diagonal"``, ``"dense"`` or ``"low_rank"``), a digest of given ones, or ``None``.
    - **moves** - the class of the kernel's moves; empty without them.
    - **measured_for** - the settings for which its step size was measured, by name; empty if the step was given.
    """

    memory: str
    dynamics: str
    has_bandwidth: bool
    scale: str | None
    moves: str
    measured_for: tuple[tuple[str, str], ...]

    @staticmethod
    def of(kernel: Settings, plan: WarmupPlan, gradient: Gradient, cloud: Cloud, num_warmup: int) -> Origin:
        """Return the origin of a state that a kernel starts.

        :param plan: what the warmup will learn.
        :param cloud: the cloud at the start.
        """
        scale, interaction = plan.scale if num_warmup else None, kernel.interaction
        return Origin(
            memory=kernel.dynamics.carries if cloud.memory else "nothing",
            dynamics=words(kernel.dynamics),
            has_bandwidth=interaction.learns_bandwidth or getattr(interaction, "bandwidth", None) is not None,
            scale=_digest(kernel.scale) if scale is None else scale,
            moves="" if kernel.moves is None else type(kernel.moves).__name__,
            measured_for=_measured_for(kernel, gradient) if num_warmup and kernel.schedule is None else (),
        )


class State(Protocol):
    """What the checks look at: a :class:`~numpyro_repulsion.kernels.ParticleState`."""

    @property
    def z(self) -> Particle: ...

    @property
    def potential_energy(self) -> jax.Array: ...

    @property
    def gradient(self) -> jax.Array: ...

    @property
    def memory(self) -> tuple[jax.Array, ...]: ...

    @property
    def num_updates(self) -> jax.Array: ...

    @property
    def warmup(self) -> WarmupState: ...

    @property
    def origin(self) -> Origin: ...


def check_state(kernel: Settings, state: State, target: Target, plan: WarmupPlan, gradient: Gradient) -> None:
    """Raise ``ValueError`` if a kernel would misread a state. It looks only at shapes, types and static settings.

    :param state: a state with the axis of particles.
    """
    origin, warmup = state.origin, state.warmup
    _check_precision(state, target)
    if isinstance(target, ModelTarget):
        size = len(state.potential_energy)
        expected = {name: (size, *site.shape) for name, site in target.prototype.items()}
        found = jax.tree.map(jnp.shape, state.z)
        if found != expected:
            raise ValueError(
                f"The state has the sites {found}, and this model has {expected}. Run the model of the state, or set "
                "mcmc.post_warmup_state = None and start again."
            )
    if (centring := warmup.scales.centring) is not None:
        found = len(centring.powers), len(centring.bases)
        if not isinstance(target, ModelTarget) or found != (target.num_products, target.num_groups):
            raise ValueError(
                "The state centres hierarchical sites of the model that made it, and this kernel's model has others. "
                f"Run the model of the state; or, {_ANEW}."
            )
    groups = warmup.arrival.step_size.shape[0]
    if groups != kernel.num_ensembles:
        raise ValueError(
            f"The state has num_ensembles={groups}, and this kernel has num_ensembles={kernel.num_ensembles}: use "
            f"num_ensembles={groups}; or, {_ANEW}."
        )
    _check_memory(kernel, state)
    if kernel.interaction.learns_bandwidth and not origin.has_bandwidth:
        raise ValueError(
            f"{kernel.interaction!r} needs a bandwidth that warmup learns, and the state has none: give one, or "
            f"use the interaction of the state; or, {_ANEW}."
        )
    scale = _digest(kernel.scale) if not isinstance(kernel.scale, str) else origin.scale
    if scale != origin.scale:
        found = {None: "no preconditioner", "dense": "a learned dense preconditioner"}
        raise ValueError(
            f"The state has {found.get(origin.scale, 'another preconditioner')}, which stays in use, and this kernel "
            f"has preconditioner={kernel.preconditioner!r}: use that of the state (preconditioner='auto' accepts any); "
            f"or, {_ANEW}."
        )
    if kernel.moves is not None and origin.moves != type(kernel.moves).__name__:
        raise ValueError(
            f"moves={kernel.moves!r} jumps by what its own warmup learned, and the state was made with "
            f"{origin.moves or 'no moves'}: use those, or drop `moves`; or, {_ANEW}."
        )
    if plan.epoch is not None and (warmup.reference is None or warmup.reference.position.ndim != 3):
        raise ValueError(
            f"gradient={gradient!r} needs a reference for each particle, and the state has none: continue with "
            f"gradient=Subsampled(), or the gradient of the state; or, {_ANEW}."
        )
    if kernel.schedule is None and (wanted := _measured_for(kernel, gradient)) != origin.measured_for:
        if origin.measured_for:
            changed = [
                f"{name}={old} and is now {name}={new}"
                for (name, old), (_, new) in zip(origin.measured_for, wanted, strict=True)
                if old != new
            ]
            what = f"was measured for {', for '.join(changed)}"
        else:
            what = "was given and not measured"
        raise ValueError(
            f"The step size of the state {what}. Give this kernel a `step_size`, such as the state's own, "
            f"float(state.step_size[0]), if it suits both; or, to measure it again from its positions, {_CALL}."
        )


def check_chains(state: State, mcmc: MCMC) -> bool:
    """Return whether a stored state holds all chains; raise ``ValueError`` if the run has other chains."""
    is_stacked = np.ndim(state.num_updates) > 0
    number = len(state.num_updates) if is_stacked else int(np.size(state.potential_energy))
    chains = "1 chain" if number == 1 else f"{number} chains" if is_stacked else f"{number} particles"
    if number != mcmc.num_chains:
        raise ValueError(
            f"`post_warmup_state` is a state of {chains}, and this MCMC has num_chains={mcmc.num_chains}. Use "
            f"MCMC(..., num_chains={number}), or set mcmc.post_warmup_state = None and start again."
        )
    if number > 1 and is_stacked == (mcmc.chain_method == "vectorized"):
        method = "of chains that ran one by one" if is_stacked else "of particles that moved together"
        raise ValueError(
            f'`post_warmup_state` is a state {method}, and this MCMC has chain_method="{mcmc.chain_method}". Use '
            f"chain_method={'sequential' if is_stacked else 'vectorized'!r}, as in the run that made the state."
        )
    done, num_warmup = np.max(state.warmup.iteration), np.max(state.warmup.num_warmup)
    if done < num_warmup:
        raise ValueError(
            f"`post_warmup_state` is a state after {done} of {num_warmup} iterations of warmup, so the next draws "
            "would be draws of warmup. Set mcmc.post_warmup_state = None and start again."
        )
    return number > 1 and not is_stacked


def _check_precision(state, target):
    """Raise ``ValueError`` for another precision: a model determines its own, and a function only rules out float64."""
    found = state.warmup.step.size.dtype
    expected = found if jax.dtypes.canonicalize_dtype(found) == found else "float32"
    if isinstance(target, ModelTarget):
        expected = jnp.result_type(*(site.dtype for site in target.prototype.values()))
    if found != expected:
        raise ValueError(
            f"The state is in {found}, and this run in {expected}: set jax.config.update('jax_enable_x64', "
            f"{found == 'float64'}), as in the run that made the state; or, {_ANEW}."
        )


def _check_memory(kernel, state):
    """Raise ``ValueError`` for other memory. Momenta and carried noise have the same shape, so compare words too."""
    dynamics: Dynamics = kernel.dynamics
    shape = (kernel.num_ensembles, -1, state.gradient.shape[-1])
    expected = _memory(dynamics, kernel.interaction, state.gradient.reshape(shape), state.warmup.bandwidth)
    carried = dynamics.carries if expected else "nothing"
    origin = state.origin
    shapes = [x.shape[-1] for x in expected], [x.shape[-1] for x in state.memory]
    if carried != origin.memory or shapes[0] != shapes[1]:
        raise ValueError(
            f"The state carries {origin.memory} from one update to the next, because it was made with "
            f"dynamics={origin.dynamics}, and this kernel, with dynamics={words(dynamics)}, would read it as "
            f"{carried}. Use a kernel with the dynamics and the interaction that made the state; or, {_ANEW}."
        )


def _memory(dynamics: Dynamics, interaction: Interaction, u, bandwidth):
    """Return the shapes of the memory that these dynamics would carry, for a cloud ``(G, L, d)``."""

    def energy_and_grad(u):  # Its values do not matter for shapes.
        return jnp.zeros(u.shape[:-1], u.dtype), jnp.zeros_like(u)

    def memory(u, bandwidth):
        return dynamics.init(random.key(0), u, energy_and_grad, lambda v: interaction.couple(v, bandwidth)).memory

    return jax.eval_shape(memory, u, bandwidth)


def _measured_for(kernel, gradient):
    parts = {
        "step_size": kernel.step_size,
        "dynamics": kernel.dynamics,
        "interaction": kernel.interaction,
        "gradient": gradient,
    }
    return tuple((name, words(part)) for name, part in parts.items())


def _digest(scale):
    """Return a digest of a given scale; ``None`` for no scale, or for one to be learned."""
    if scale is None or isinstance(scale, str):
        return None
    return hashlib.blake2b(np.ascontiguousarray(scale, np.float64).tobytes(), digest_size=8).hexdigest()
