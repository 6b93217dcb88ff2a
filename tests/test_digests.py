"""Digests, and checksums of arrays of which devices have parts."""

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_repulsion import digests
from numpyro_repulsion.digests import digest, has_parts, words


def values(dtype):
    found = np.random.default_rng(0).random((40, 3)) * 100 - 50
    return (found + 1j * found[::-1]).astype(dtype) if np.dtype(dtype).kind == "c" else found.astype(dtype)


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64", "int64", "uint8", "complex128"])
def test_checksums_on_devices_tell_arrays_apart(dtype, monkeypatch):
    monkeypatch.setattr(digests, "_LARGE", 0)
    with jax.enable_x64(True):
        x = jnp.asarray(values(dtype))
        assert x.dtype == dtype
        others = [x[::-1], x.at[3, 1].add(1), x * 2]
        if dtype in ("float64", "complex128"):
            others.append(x.at[3, 1].multiply(1 + 1e-12))
        if dtype == "int64":
            others.append(x.at[3, 1].add(2**40))
        if dtype.startswith("complex"):
            others.append(jnp.conj(x))
        assert digest(x) not in map(digest, others)
        assert digest(x) == digest(jnp.asarray(values(dtype)))


def test_digests_are_of_values():
    assert digest(None) is None and digest(3) == "3"
    assert digest({"x": np.ones(3)}) == digest({"x": np.ones(3)}) != digest({"x": np.ones(4)})
    assert digest(random.key(0)) != digest(random.key(1))
    assert not has_parts(np.ones(3)) and not has_parts(jnp.ones(3))
    assert " at 0x" not in words(lambda: 0)
