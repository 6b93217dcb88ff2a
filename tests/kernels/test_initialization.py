"""Where particles start by default: at draws from the prior, and nearer to each other where energies explode."""

from dataclasses import replace

from jax import random
from jax.nn import relu
import jax.numpy as jnp
import numpy as np

import numpyro
import numpyro.distributions as dist

from numpyro_repulsion import SGLD, init_around
from numpyro_repulsion.kernels import initialization

X = random.normal(random.key(0), (60, 3))
Y = jnp.sin(X[:, 0])
LAYERS, WIDTH, PARTICLES = 5, 16, 10


def network(x, y):
    """Weights N(0, 1), so that each layer multiplies signals by about three."""
    signal = x
    for layer in range(LAYERS):
        shape = (signal.shape[-1], WIDTH if layer < LAYERS - 1 else 1)
        weights = numpyro.sample(f"w{layer}", dist.Normal(0, 1).expand(shape).to_event(2))
        signal = signal @ weights if layer == LAYERS - 1 else relu(signal @ weights)
    with numpyro.plate("rows", len(x), subsample_size=20) as i:
        numpyro.sample("y", dist.Normal(signal[i, 0], 0.1), obs=y[i])


def line(x, y):
    w = numpyro.sample("w", dist.Normal(0, 100).expand([3]).to_event(1))
    with numpyro.plate("rows", len(x), subsample_size=20) as i:
        numpyro.sample("y", dist.Normal(x[i] @ w, 0.1), obs=y[i])


def start(model, **settings):
    return SGLD(model, **settings).init(random.split(random.key(1), PARTICLES), 0, None, (X, Y), {})


def test_exploding_starts_are_contracted(monkeypatch):
    contracted = start(network, step_size=1e-6)
    monkeypatch.setattr(initialization, "START", replace(initialization.START, explosion=np.inf))
    drawn = start(network, step_size=1e-6)
    assert np.median(drawn.potential_energy) > 1e3 * np.median(contracted.potential_energy)
    for name, z in contracted.z.items():
        center = np.median(drawn.z[name], 0)
        shares = np.std(z - center) / np.std(drawn.z[name] - center)
        power = np.log(shares) / np.log(initialization.START.contraction)
        np.testing.assert_allclose(power, np.round(power), atol=0.02)
        assert power > 0.9
    # They are still apart.
    assert all(len({row.tobytes() for row in np.asarray(z)}) == PARTICLES for z in contracted.z.values())


def test_starts_far_from_a_quadratic_stay_draws_of_the_prior():
    keys = random.split(random.key(0), 200)
    state = SGLD(line, step_size=1e-6).init(keys, 0, None, (X, Y), {})
    # With a standard error of 100 / sqrt(2 · 600).
    assert np.median(state.potential_energy) > 1e5 and abs(np.std(state.z["w"]) - 100.0) < 5 * 100 / 1200**0.5


def test_starts_that_the_user_chose_stay(monkeypatch):
    strategy = init_around({f"w{i}": 1.0 for i in range(LAYERS)}, scale=1.0)
    found = start(network, step_size=1e-6, init_strategy=strategy)
    monkeypatch.setattr(initialization, "START", replace(initialization.START, explosion=np.inf))
    usual = start(network, step_size=1e-6, init_strategy=strategy)
    for name in found.z:
        np.testing.assert_array_equal(found.z[name], usual.z[name])
