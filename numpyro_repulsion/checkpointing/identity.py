"""The identity of a run, in words, digests and numbers, which tells it from other runs."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
import numpy as np

import numpyro
from numpyro.infer import MCMC
from numpyro.infer.util import compute_log_probs

from numpyro_repulsion.checkpointing.program import Program
from numpyro_repulsion.digests import digest
from numpyro_repulsion.gradients import ModelTarget, compiled, fingerprint
from numpyro_repulsion.kernels import arguments, bound_of
from numpyro_repulsion.kernels.requirements import described
from numpyro_repulsion.version import __version__

__all__ = ["PROGRAMS", "compare_densities", "densities", "differences", "identify", "makers"]

#: Entries that are programs: other versions of JAX make other programs from the same functions.
PROGRAMS = ("what an iteration computes", "how particles start")
#: Relative to one plus its size, a density may differ by this much if another program rounds it.
_TOLERANCE = 1e-5


def identify(mcmc: MCMC, rng_key, init_params, state, collected, programs: tuple[Program, Program]) -> dict[str, Any]:
    """Return everything on which the draws depend, by name, in a form that JSON can hold.

    :param state: the (first) state of the run, or its shapes.
    :param collected: shapes of one draw, by field.
    :param programs: the programs of an iteration and of the start.
    """
    identity = {
        "key": digest(rng_key),
        "init_params": digest(init_params),
        "post_warmup_state": digest(mcmc.post_warmup_state),
    }
    identity |= {f"unconstrained site {name}": kind for name, kind in _shapes(state.z).items()}
    identity |= {f"field {name}": kind for name, kind in _shapes(collected).items()}
    for name in ("num_warmup", "num_samples", "thinning", "num_chains", "chain_method"):
        identity[name] = getattr(mcmc, name)
    if mcmc.num_chains == 1:
        del identity["chain_method"]
    identity |= described(mcmc.sampler, *arguments(mcmc))
    return identity | {name: program.digest for name, program in zip(PROGRAMS, programs, strict=True)}


def differences(saved: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return the differences between two identities, in words."""
    found = []
    for name in dict.fromkeys((*now, *saved)):
        a, b = saved.get(name), now.get(name)
        if a == b:
            continue
        if None in (a, b) and name.startswith(("field", "unconstrained", "the model")):
            found.append(f"{name} is {'missing' if b is None else 'new'}")
            continue
        short = max(len(str(a)), len(str(b))) < 80 and "digest" not in f"{a}{b}"
        found.append(f"{name} was {a} and is {b}" if short else f"{name} differs")
    return found


def densities(mcmc: MCMC, state) -> dict[str, list]:
    """Returns, at a few points, each site's log density, the size of its gradient and one component of that.

    They distinguish models if programs cannot be compared. ``None`` where one of the three is not finite.

    :param state: a state of the run, or its shapes.
    """
    is_single = len(state.potential_energy.shape) == 0
    particle = jax.tree.map(lambda x: jnp.zeros(x.shape if is_single else x.shape[1:], x.dtype), state.z)
    flat, unravel = ravel_pytree(particle)
    target = bound_of(mcmc).target
    names: list[str] = []

    def log_densities(target, position):
        found = {"the potential energy": fingerprint(target, unravel, position)}
        if isinstance(target, ModelTarget) and not target.discrete:
            rows = {name: jnp.asarray(np.arange(b) * n // b) for name, (n, b) in target.plates.items()}
            model = target.bind(rows, jax.random.key(0))
            values = target.constrain(unravel(position))
            latent = {name: values[name] for name in target.latent}
            sites, _ = compute_log_probs(model, target.args, target.kwargs, latent)
            found |= {f"the density of site '{name}'": value for name, value in sites.items()}
        names[:] = found
        return jnp.stack([jnp.asarray(value, position.dtype).sum() for value in found.values()])

    direction = jnp.cos(1.0 + jnp.arange(flat.size, dtype=flat.dtype))

    def look(target, position):
        slopes = jax.jacrev(partial(log_densities, target))(position)
        return jnp.stack([log_densities(target, position), jnp.linalg.norm(slopes, axis=-1), slopes @ direction], -1)

    line = jnp.linspace(-0.5, 0.5, flat.size, dtype=flat.dtype)
    with jax.debug_nans(False):
        see = compiled(look, target)
        points = [np.asarray(see(position), float) for position in (line + 0.1, 0.2 * line, 1.0 - line, -1.0 + line)]
    return {
        name: [[float(x) for x in point[i]] if np.isfinite(point[i]).all() else None for point in points]
        for i, name in enumerate(names)
    }


def compare_densities(saved: dict[str, list], now: dict[str, list]) -> list[str]:
    """Returns, in words, which sites of two models have different densities, or cannot be compared."""
    found = []
    for name in dict.fromkeys((*now, *saved)):
        if name not in saved or name not in now:
            found.append(f"{name} is {'new' if name in now else 'missing'}")
            continue
        pairs = [(np.array(a), np.array(b)) for a, b in zip(saved[name], now[name], strict=True) if a and b]
        if not pairs:
            found.append(f"{name} is not finite wherever it was compared, so whether it is the same is unknown")
        elif not all(_is_close(a, b) for a, b in pairs):
            found.append(f"{name} differs")
    return found


def makers() -> dict[str, str]:
    """Return the versions and the devices that compute; others may round differently."""
    device, mesh = jax.devices()[0], jax.sharding.get_abstract_mesh()
    shared = "" if mesh.empty else f", {dict(mesh.shape)} by {jax.process_count()} processes"
    return {
        "jax": jax.__version__,
        "numpyro": numpyro.__version__,
        "numpyro-repulsion": __version__,
        "device": f"{device.platform} {device.device_kind}{shared}",
    }


def _shapes(tree) -> dict[str, str]:
    leaves = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True): f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves}


def _is_close(a, b):
    """Return whether ``(density, size of the gradient, component)`` differ by no more than rounding."""
    scale = 1.0 + np.abs([a[0], a[1], a[1]])
    return bool((np.abs(a - b) <= _TOLERANCE * scale).all())
