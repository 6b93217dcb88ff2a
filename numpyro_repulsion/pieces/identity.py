"""What makes a run the run it is, in words and digests, so that another is not taken for it."""

from __future__ import annotations

import hashlib
import re
from typing import Any

import jax
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
import numpy as np

import numpyro
from numpyro.infer import MCMC

from numpyro_repulsion.gradients import fingerprint

__all__ = ["differences", "digest", "identify", "makers"]

#: Counts of updates at which a step-size schedule is looked at.
_COUNTS = (0, 1, 10, 100, 1000, 10_000, 100_000)


def identify(mcmc: MCMC, rng_key, init_params, states, collected) -> dict[str, Any]:
    """Everything on which the draws depend, by name, as JSON can hold it.

    :param states: the states of the run, or their shapes.
    :param collected: shapes of one draw, by field.
    """
    kernel = mcmc.sampler
    identity = {
        "kernel": type(kernel).__name__,
        "potential energy": _energy(mcmc, states[0]),
        "key": digest(rng_key),
        "init_params": digest(init_params),
        "post_warmup_state": digest(mcmc.post_warmup_state),
        "step_size": _schedule(kernel),
        "preconditioner": kernel.preconditioner if _is_word(kernel.preconditioner) else digest(kernel.preconditioner),
    }
    identity |= {f"unconstrained site {name}": words for name, words in _shapes(states[0].z).items()}
    identity |= {f"field {name}": words for name, words in _shapes(collected).items()}
    for name in ("interaction", "dynamics", "gradient", "moves", "init_strategy"):
        identity[name] = _words(getattr(kernel, name))
    for name in ("num_steps", "num_ensembles"):
        identity[name] = getattr(kernel, name)
    for name in ("num_warmup", "num_samples", "thinning", "num_chains", "chain_method"):
        identity[name] = getattr(mcmc, name)
    if mcmc.num_chains == 1:
        del identity["chain_method"]
    for path, leaf in jax.tree.leaves_with_path({"args": mcmc._args, "kwargs": mcmc._kwargs}):
        identity[f"the model's {path[0].key}{jax.tree_util.keystr(path[1:])}"] = digest(leaf)
    return identity


def differences(saved: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What sets two runs apart, in words."""
    found = []
    for name in dict.fromkeys((*now, *saved)):
        a, b = saved.get(name), now.get(name)
        if a == b or (name == "potential energy" and _is_close(a, b)):
            continue
        if None in (a, b) and name.startswith(("field", "unconstrained", "the model")):
            found.append(f"{name} is {'missing' if b is None else 'new'}")
            continue
        short = max(len(str(a)), len(str(b))) < 80 and "digest" not in f"{a}{b}"
        found.append(f"{name} was {a} and is {b}" if short else f"{name} differs")
    return found


def makers() -> dict[str, str]:
    """What computes: other versions and devices may round differently."""
    import numpyro_repulsion

    device = jax.devices()[0]
    return {
        "jax": jax.__version__,
        "numpyro": numpyro.__version__,
        "numpyro-repulsion": numpyro_repulsion.__version__,
        "device": f"{device.platform} {device.device_kind}",
    }


def digest(tree) -> str | None:
    """A digest of the values of a pytree, with shapes and types; of what is no array, its ``repr``."""
    if tree is None:
        return None
    found = hashlib.blake2b(digest_size=16)
    leaves = jax.tree.leaves_with_path(tree)
    for path, leaf in leaves:
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            found.update(str(leaf.dtype).encode())
            leaf = jax.random.key_data(leaf)
        if isinstance(leaf, jax.Array | np.ndarray | np.generic) and leaf.dtype.kind != "O":
            leaf = np.asarray(leaf)
            found.update(f"{jax.tree_util.keystr(path)} {leaf.shape} {leaf.dtype}".encode())
            found.update(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8).data)
        else:
            found.update(f"{jax.tree_util.keystr(path)} {_words(leaf)}".encode())
    if len(leaves) == 1 and isinstance(leaves[0][1], bool | int | float | str):
        return repr(leaves[0][1])
    return f"digest {found.hexdigest()}"


def _words(value) -> str:
    """The ``repr`` without addresses, which are others in another process."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))


def _is_word(value):
    return value is None or isinstance(value, str)


def _schedule(kernel):
    words = _words(kernel.step_size)
    if not callable(kernel.step_size):
        return words
    # Schedules of optax are functions, which do not tell their settings.
    return f"{words}: {[float(kernel.step_size(jnp.asarray(n))) for n in _COUNTS]}"


def _shapes(tree) -> dict[str, str]:
    leaves = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True): f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves}


def _energy(mcmc, state):
    """U at an arbitrary particle, from an even sample of rows: it tells models with the same sites apart."""
    is_single = len(state.potential_energy.shape) == 0
    particle = jax.tree.map(lambda x: jnp.zeros(x.shape if is_single else x.shape[1:], x.dtype), state.z)
    flat, unravel = ravel_pytree(particle)
    position = jnp.linspace(-0.5, 0.5, flat.size, dtype=flat.dtype)
    target = mcmc.sampler.target(mcmc._args, mcmc._kwargs)
    return float(jax.jit(lambda position: fingerprint(target, unravel, position))(position))


def _is_close(a, b):
    """Whether two energies differ by no more than other programs round."""
    if a is None or b is None:
        return False
    return bool(np.isclose(a, b, rtol=1e-4, atol=1e-4, equal_nan=True))
