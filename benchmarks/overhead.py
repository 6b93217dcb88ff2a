"""What interaction costs, and what ``MCMC`` costs, per update: one process, programs compiled first, then in turns.

The model is the one-hidden-layer network of the paper (50 units, minibatches of 100 rows of its own for each of 50
particles) on synthetic data of the size of the Boston set. Prints a table; writes ``overhead.json`` beside this file.

    python benchmarks/overhead.py [--rounds 9] [--updates 500]
"""

import argparse
import json
import os
import pathlib
import platform
import statistics
import time

import jax
from jax import lax, random
import jax.numpy as jnp
import numpyro
from numpyro.infer import MCMC
from numpyro.infer.util import initialize_model
from numpyro.handlers import substitute

import numpyro_repulsion
from numpyro_repulsion import RBF, SGLD, SGLDR, Independent, Overdamped
from numpyro_repulsion.gradients import draw_indices
from numpyro_repulsion.targets import bayesian_neural_network

NUM_PARTICLES, STEP_SIZE, NUM_STEPS = 50, 1e-6, 10


def bare_scan(model, X, y, num_updates, start):
    """SGLD by hand: a scan of the vmapped gradient of NumPyro's potential, and white noise."""

    def indexed(*args, _rows):
        return substitute(model, data=_rows)(*args)

    plates = {"data": (X.shape[0], 100)}
    info = initialize_model(
        random.key(0), indexed, model_args=(X, y), model_kwargs={"_rows": {"data": jnp.arange(100)}}, dynamic_args=True
    )

    def energy(z, rows):
        return info.potential_fn(X, y, _rows=rows)(z)

    @jax.jit
    def run(key, z):
        def update(z, key):
            rows_key, noise_key = random.split(key)
            rows = jax.vmap(lambda k: draw_indices(k, plates))(random.split(rows_key, NUM_PARTICLES))
            gradient = jax.vmap(jax.grad(energy))(z, rows)
            leaves, treedef = jax.tree.flatten(z)
            noise = jax.tree.unflatten(
                treedef, [random.normal(k, x.shape) for k, x in zip(random.split(noise_key, len(leaves)), leaves)]
            )
            z = jax.tree.map(lambda x, g, n: x - STEP_SIZE * g + (2 * STEP_SIZE) ** 0.5 * n, z, gradient, noise)
            return z, None

        def iteration(z, keys):
            z, _ = lax.scan(update, z, keys)
            return z, z

        keys = random.split(key, num_updates).reshape(-1, NUM_STEPS)
        return lax.scan(iteration, z, keys)[1]

    return lambda key: run(key, start)
