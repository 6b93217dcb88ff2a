"""The noise of minibatches by the order of control variates: the picture of ``docs/minibatch-noise.md``.

Writes ``docs/_static/minibatch-noise.png`` and prints the slopes by regression.
"""

from __future__ import annotations

import jax
from jax import random
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from style import BLUE, GREY, VERMILION, save

import numpyro
import numpyro.distributions as dist

from numpyro_repulsion import ControlVariates
from numpyro_repulsion.gradients import ModelTarget, Reference, evaluate_reference

COLORS = {0: GREY, 1: BLUE, 2: VERMILION}
LABELS = {0: "none", 1: "first order", 2: "second order"}
ROWS, DIMENSION, BATCH = 20_000, 20, 200
DISTANCES = 2.0 ** np.arange(-3.0, 3.5)
MINIBATCHES, POINTS = 64, 20


def regression(x, y):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([DIMENSION]).to_event(1))
    with numpyro.plate("rows", ROWS, subsample_size=BATCH) as i:
        numpyro.sample("y", dist.Bernoulli(logits=x[i] @ b), obs=y[i])


def noise(target, unravel, reference, scale):
    """The mean variance of the gradient by distance and order, in units of the posterior, ``(distance, order)``."""
    direction = random.normal(random.key(1), (POINTS, DIMENSION))
    direction = direction / jnp.linalg.norm(direction, axis=-1, keepdims=True) * DIMENSION**0.5

    @jax.jit
    def at(distance, order):
        z = (reference.position + distance * direction @ scale.T)[None]
        used = reference._replace(order=order)
        slopes = jax.lax.map(
            lambda key: ControlVariates().energy_and_grad(key, target, unravel, z, used)[1] @ scale,
            random.split(random.key(2), MINIBATCHES),
        )
        return jnp.var(slopes, 0, ddof=1).mean()

    return np.array([[float(at(distance, order)) for order in LABELS] for distance in DISTANCES])


def main():
    x = random.normal(random.key(0), (ROWS, DIMENSION))
    y = random.bernoulli(random.key(3), jax.nn.sigmoid(x @ jnp.linspace(-1.0, 1.0, DIMENSION))).astype(float)
    target = ModelTarget(regression, (x, y))
    z, unravel = ravel_pytree({"b": jnp.zeros(DIMENSION)})
    for _ in range(10):
        empty = Reference.none(z.shape, z.dtype, 2, True)._replace(position=z)
        reference = jax.jit(lambda empty: evaluate_reference(random.key(0), target, unravel, empty, 20))(empty)
        z = z - jnp.linalg.solve(reference.hessian, reference.gradient)
    scale = jnp.linalg.inv(jnp.linalg.cholesky(reference.hessian)).T
    found = noise(target, unravel, reference, scale)
    figure, axes = plt.subplots(figsize=(7.0, 3.6))
    near = DISTANCES <= 2.0
    for column, (order, label) in zip(found.T, LABELS.items(), strict=True):
        slope = np.polyfit(np.log(DISTANCES[near]), np.log(column[near]) / 2, 1)[0]
        print(f"{label}: the standard deviation grows as distance ** {slope:.2f}; variance at 1 sd {column[3]:.2g}")
        axes.loglog(DISTANCES, column, "o-", color=COLORS[order], markersize=3)
        axes.annotate(
            label, (DISTANCES[-1], column[-1]), (6, 0), textcoords="offset points", va="center", color=COLORS[order]
        )
    axes.axvspan(0.7, 1.4, color="0.93", lw=0)
    axes.annotate("most draws", (1.0, found.min()), ha="center", color="0.4")
    axes.set(
        xlabel="distance from the reference, in posterior sds",
        ylabel="variance of the gradient",
        xlim=(DISTANCES[0], 30.0),
    )
    axes.xaxis.set_major_formatter("{x:g}")
    save(figure, "minibatch-noise.png")


if __name__ == "__main__":
    main()
