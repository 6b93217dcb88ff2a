"""The origin of a state, and checks whether a kernel or an ``MCMC`` can continue from the state."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from numpyro.infer import MCMC

from numpyro_repulsion.digests import digest, words
from numpyro_repulsion.gradients import Gradient, ModelTarget, Particle, Target
from numpyro_repulsion.kernels.bound import Settings
from numpyro_repulsion.warmup import WarmupState

__all__ = ["Origin", "check_chains", "check_state"]

_ANEW = (
    "to start again from its positions, set mcmc.post_warmup_state = None and call mcmc.run(key, ..., "
    "init_params=state.z)"
)


@jax.tree_util.register_static
@dataclass(frozen=True)
class Origin:
    """The settings of the kernel that made a state, by name, in words; static."""

    settings: tuple[tuple[str, str], ...]

    @staticmethod
    def of(kernel: Settings, gradient: Gradient) -> Origin:
        """Return the origin of a state that a kernel starts; ``num_steps`` may change."""
        names = ("step_size", "dynamics", "interaction", "moves", "reparam", "num_ensembles")
        found = {"kernel": type(kernel).__name__} | {name: words(getattr(kernel, name)) for name in names}
        found |= {"gradient": words(gradient), "preconditioner": str(digest(kernel.preconditioner))}
        return Origin(tuple(found.items()))


def check_state(
    kernel: Settings, origin: Origin, z: Particle, warmup: WarmupState, target: Target, gradient: Gradient
) -> None:
    """Raise ``ValueError`` if a state is that of another kernel, model or precision.

    It looks only at shapes, types and static settings.

    :param z: the particles of the state, each leaf with a leading axis of them.
    """
    _check_precision(warmup, target)
    if isinstance(target, ModelTarget):
        size = len(jax.tree.leaves(z)[0])
        expected = {name: (size, *site.shape) for name, site in target.prototype.items()}
        found = jax.tree.map(jnp.shape, z)
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
    pairs = zip(origin.settings, Origin.of(kernel, gradient).settings, strict=True)
    if changed := [f"{name}={old} and is now {name}={new}" for (name, old), (_, new) in pairs if old != new]:
        raise ValueError(
            f"The state was made with {', '.join(changed)}: continue with the kernel that made it; or, {_ANEW}."
        )


def check_chains(number: int, warmup: WarmupState, mcmc: MCMC) -> bool:
    """Return whether a stored state has several chains; raise ``ValueError`` if it does not fit the run.

    :param number: of chains in the state.
    """
    if number != mcmc.num_chains or (number > 1 and mcmc.chain_method != "vectorized"):
        raise ValueError(
            f"`post_warmup_state` is a state of {number} chain{'s' * (number > 1)} that moved together, and this MCMC "
            f"has num_chains={mcmc.num_chains} by {mcmc.chain_method!r}. Use MCMC(..., num_chains={number}, "
            'chain_method="vectorized"), or set mcmc.post_warmup_state = None and start again.'
        )
    done, num_warmup = int(warmup.iteration), int(warmup.num_warmup)
    if done < num_warmup:
        raise ValueError(
            f"`post_warmup_state` is a state after {done} of {num_warmup} iterations of warmup, so the next draws "
            "would be draws of warmup. Set mcmc.post_warmup_state = None and start again."
        )
    return number > 1


def _check_precision(warmup, target):
    """Raise ``ValueError`` for another precision: a model determines its own, and a function only rules out float64."""
    found = warmup.step.size.dtype
    expected = found if jax.dtypes.canonicalize_dtype(found) == found else np.dtype("float32")
    if isinstance(target, ModelTarget):
        expected = jnp.result_type(*(site.dtype for site in target.prototype.values()))
    if found != expected:
        raise ValueError(
            f"The state is in {found}, and this run in {expected}: set jax.config.update('jax_enable_x64', "
            f"{found == 'float64'}), as in the run that made the state; or, {_ANEW}."
        )
