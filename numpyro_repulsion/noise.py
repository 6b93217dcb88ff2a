"""Random numbers from generators that compile fast.

A generator for an array of several axes takes up to three times as long to compile as one for a flat array, because it
computes an index from a count; the numbers are the same. Draw together whatever can be drawn together, because each
generator takes a tenth of a second or more to compile.
"""

from __future__ import annotations

import math

import jax
from jax import random
import jax.numpy as jnp
import numpy as np


def normal(key: jax.Array, shape: tuple[int, ...], dtype=float) -> jax.Array:
    """Return standard normal numbers, the same as ``random.normal``."""
    return random.normal(key, (math.prod(shape),), dtype).reshape(shape)


def uniform(key: jax.Array, shape: tuple[int, ...], dtype=float) -> jax.Array:
    """Return uniform numbers in [0, 1), the same as ``random.uniform``."""
    return random.uniform(key, (math.prod(shape),), dtype).reshape(shape)


def integers_below(key: jax.Array, shape: tuple[int, ...], size: int) -> jax.Array:
    """Return unsigned 32-bit integers, uniform on 0 to ``size`` - 1.

    They are the upper word of ``size`` times 64 random bits, so their probabilities differ by a part in
    ``2**64 / size``. `random.randint` takes three generators instead of one.
    """
    low, high = random.bits(key, (2 * math.prod(shape),), jnp.uint32).reshape(2, *shape)
    factor = np.uint32(size)
    lower = high * factor
    # The product with the lower word contributes only its carry.
    carried = _upper_word(low, size) + lower
    return _upper_word(high, size) + (carried < lower).astype(jnp.uint32)


def signs(key: jax.Array, shape: tuple[int, ...], dtype=float) -> jax.Array:
    """Return 1 and -1 that depend on the key and the place in the array.

    By a hash, and no generator that would have to be compiled: for choices that need not be independent, such as those
    of directions to measure.
    """
    words = random.key_data(key).astype(jnp.uint32).ravel()
    bits = jnp.arange(math.prod(shape), dtype=jnp.uint32) * np.uint32(0x9E3779B1)
    for word, shift, factor in zip(words[:2], (16, 15), (0x7FEB352D, 0x846CA68B), strict=True):
        bits += word * np.uint32(0x85EBCA6B)
        bits = (bits ^ (bits >> np.uint32(shift))) * np.uint32(factor)
    bits = (bits ^ (bits >> np.uint32(16))).reshape(shape)
    return 1.0 - 2.0 * (bits >> np.uint32(31)).astype(dtype)


def _upper_word(x, factor):
    """Return ``x * factor >> 32`` for unsigned 32-bit integers, computed from their halves."""
    half, mask = np.uint32(16), np.uint32(0xFFFF)
    x_low, x_high = x & mask, x >> half
    low, high = np.uint32(factor & 0xFFFF), np.uint32(factor >> 16)
    middle = x_high * low + (x_low * low >> half)
    return x_high * high + (middle >> half) + (((middle & mask) + x_low * high) >> half)
