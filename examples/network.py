"""A Bayesian network that reads handwritten digits, and knows when it cannot.

Fits a network of 50 ReLU units to scikit-learn's 8 × 8 digits by minibatches, with nothing set. Prints the accuracy and
the log likelihood of held-out digits, and how sure the network is of digits that are turned on their side; writes
``demo-output/network.png``.
"""

from __future__ import annotations

import argparse
from pathlib import Path
import time

from jax import random
from jax.nn import relu
import jax.numpy as jnp
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC

import numpyro_repulsion
from numpyro_repulsion import predict
from numpyro_repulsion.plots import plot_calibration

OUTPUT = Path("demo-output")
HIDDEN, CLASSES = 50, 10


def weights(name, *shape, sd):
    return numpyro.sample(name, dist.Normal(0.0, sd).expand(shape).to_event(2))


def model(images, digits=None):
    # ReLUs keep the size of signals if weights have a variance of two over the number of inputs.
    first = weights("first", images.shape[1] + 1, HIDDEN, sd=(2.0 / images.shape[1]) ** 0.5)
    second = weights("second", HIDDEN + 1, CLASSES, sd=1.0)
    with numpyro.plate("image", len(images), subsample_size=min(len(images), 100)) as i:
        hidden = relu(images[i] @ first[1:] + first[0])
        logits = hidden @ second[1:] + second[0]
        numpyro.sample("digit", dist.Categorical(logits=logits), obs=None if digits is None else digits[i])


def load():
    """Training and test images, ``(rows, 64)``, and their digits."""
    data = load_digits()
    images = data.data / 8.0 - 1.0
    parts = train_test_split(images, data.target, test_size=0.25, random_state=0, stratify=data.target)
    return [jnp.asarray(part, None if part.ndim == 1 else jnp.float32) for part in parts]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kernel", default="SGNHT", help="name of a kernel")
    parser.add_argument("--num-warmup", type=int, default=500)
    parser.add_argument("--num-samples", type=int, default=200)
    arguments = parser.parse_args()
    OUTPUT.mkdir(exist_ok=True)
    train, test, train_digits, test_digits = load()

    kernel = getattr(numpyro_repulsion, arguments.kernel)(model, num_steps=10)
    size = {"num_warmup": arguments.num_warmup, "num_samples": arguments.num_samples, "num_chains": 20}
    mcmc = MCMC(kernel, **size, chain_method="vectorized")
    began = time.perf_counter()
    mcmc.run(random.key(0), train, train_digits)
    print(f"Sampled in {time.perf_counter() - began:.0f} s.")

    found = predict(mcmc, test, test_digits)
    right = found.probabilities.argmax(-1) == test_digits
    likelihood = found.log_likelihood.mean()
    print(f"Right about {right.mean():.1%} of {len(right)} test digits; mean log likelihood {likelihood:.3f}.")
    turned = predict(mcmc, jnp.rot90(test.reshape(-1, 8, 8), axes=(1, 2)).reshape(-1, 64))
    sure = [float((entry.probabilities.max(-1) > 0.9).mean()) for entry in (found, turned)]
    print(f"More than 90 % sure of {sure[0]:.0%} of them, and of {sure[1]:.0%} when they are turned on their side.")

    figure, axes = plt.subplots(1, 2, figsize=(9, 4.2), layout="constrained")
    plot_calibration(found, ax=axes[0])
    for entry, label in ((found, "upright"), (turned, "on their side")):
        axes[1].hist(entry.probabilities.max(-1), np.linspace(0.1, 1.0, 19), alpha=0.6, label=label)
    axes[1].set(xlabel="probability of the most probable digit", ylabel="test images")
    axes[1].legend(frameon=False)
    figure.savefig(OUTPUT / "network.png", dpi=120)
    print(f"Wrote {OUTPUT / 'network.png'}.")


if __name__ == "__main__":
    main()
