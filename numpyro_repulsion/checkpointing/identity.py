"""The identity of a run, in words, digests and numbers, which tells it from other runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
import numpy as np

import numpyro
from numpyro.infer import MCMC
from numpyro.infer.util import compute_log_probs

from numpyro_repulsion.digests import digest, digest_of_program
from numpyro_repulsion.gradients import ModelTarget, compiled, fingerprint
from numpyro_repulsion.kernels.mcmc import arguments
from numpyro_repulsion.kernels.requirements import described
from numpyro_repulsion.kernels.runs import bound_of
from numpyro_repulsion.version import __version__

#: Entries that are programs: other versions of JAX make other programs from the same functions.
PROGRAMS = ("what an iteration computes", "what warmup computes", "how particles start")


def trace(function: Callable, *args: Any, known: Any = ()) -> tuple[str, Any]:
    """Return the digest of the program of a function, but for known arrays, and the shapes and types of its results."""
    program, output = jax.make_jaxpr(function, return_shape=True)(*args)
    return digest_of_program(program, known), output


def identify(mcmc: MCMC, rng_key, init_params, state, collected, programs: tuple[str, str, str]) -> dict[str, Any]:
    """Return everything on which the draws depend, by name, in a form that JSON can hold.

    :param state: the (first) state of the run, or its shapes.
    :param collected: shapes of one draw, by field.
    :param programs: digests of those of :data:`PROGRAMS`.
    """
    identity = {
        "key": digest(rng_key),
        "init_params": digest(init_params),
        "post_warmup_state": digest(mcmc.post_warmup_state),
    }
    identity |= {f"unconstrained site {name}": kind for name, kind in shapes_of(state.z).items()}
    identity |= {f"field {name}": kind for name, kind in shapes_of(collected).items()}
    for name in ("num_warmup", "num_samples", "thinning", "num_chains", "chain_method"):
        identity[name] = getattr(mcmc, name)
    if mcmc.num_chains == 1:
        del identity["chain_method"]
    identity |= described(mcmc.sampler, *arguments(mcmc))
    return identity | dict(zip(PROGRAMS, programs, strict=True)) | _densities(mcmc, state)


def differences(saved: dict[str, Any], now: dict[str, Any], has_other_programs: bool = False) -> list[str]:
    """Return the differences between two identities, in words; other versions make programs that cannot be compared."""
    found, unknown = [], []
    for name in dict.fromkeys((*now, *saved)):
        a: Any = saved.get(name)
        b: Any = now.get(name)
        if isinstance(a, list) and isinstance(b, list):
            if not np.isfinite([a, b]).all(0).any():
                unknown.append(f"{name} is not finite wherever it was evaluated, so it cannot be compared")
            elif not np.allclose(a, b, 1e-5, 1e-5, equal_nan=True):  # Another program may round it differently.
                found.append(f"{name} differs")
        elif a == b or (has_other_programs and name in PROGRAMS):
            continue
        elif None in (a, b) and name.startswith(("field", "unconstrained", "the ")):
            found.append(f"{name} is {'missing' if b is None else 'new'}")
        else:
            is_short = max(len(str(a)), len(str(b))) < 80 and "digest" not in f"{a}{b}"
            found.append(f"{name} was {a} and is {b}" if is_short else f"{name} differs")
    return found + unknown if found or has_other_programs else []


def _densities(mcmc, state):
    """Return the potential energy and the log density of each site at a few points; not all need be finite.

    They say in which site models differ, and tell those apart whose programs cannot be compared, as after an update of
    JAX, or look the same, as with callbacks into Python.
    """
    is_single = len(state.potential_energy.shape) == 0
    particle = jax.tree.map(lambda x: jnp.zeros(x.shape if is_single else x.shape[1:], x.dtype), state.z)
    flat, unravel = ravel_pytree(particle)
    target = bound_of(mcmc).target

    def look(target, position):
        found = {"the potential energy": fingerprint(target, unravel, position)}
        if isinstance(target, ModelTarget) and not target.discrete:
            values = target.constrain(unravel(position))
            latent = {name: values[name] for name in target.latent}
            model = target.bind(target.spread_rows(), jax.random.key(0))
            sites, _ = compute_log_probs(model, target.args, target.kwargs, latent)
            found |= {f"the density of site '{name}'": jnp.sum(value) for name, value in sites.items()}
        return found

    line = jnp.linspace(-0.5, 0.5, flat.size, dtype=flat.dtype)
    with jax.debug_nans(False):
        see = compiled(look, target)
        points = [see(position) for position in (line + 0.1, 0.2 * line, 1.0 - line, -1.0 + line, 2.0 * line - 0.3)]
    return {name: [float(point[name]) for point in points] for name in points[0]}


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


def shapes_of(tree: Any) -> dict[str, str]:
    """Return the types and shapes of the leaves of a pytree by name."""
    leaves = jax.tree.leaves_with_path(jax.eval_shape(lambda tree: tree, tree))
    return {jax.tree_util.keystr(path, simple=True): f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves}
