"""Minibatched Bayesian logistic regression with repelling particles: is a breast tumour benign?

Prints the posterior summary and the accuracy on held-out patients, and writes to ``demo-output/`` the draws
(``posterior.nc``) and their traces (``trace.png``). With ``--nuts`` it also runs NUTS on the same posterior and
prints how far apart the two are.
"""

from __future__ import annotations

import argparse
from pathlib import Path
import time

import arviz as az
from jax import random
from jax.nn import sigmoid
import jax.numpy as jnp
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler

import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS

from numpyro_repulsion import SGLDR, summary, to_inference_data

OUTPUT = Path("demo-output")
SHOWN = ["worst radius", "worst texture", "worst smoothness", "worst concave points"]


def load():
    """Standardized training and test sets, and the names of the columns."""
    data = load_breast_cancer()
    parts = train_test_split(data.data, data.target, test_size=0.25, random_state=0, stratify=data.target)
    x_train, x_test, y_train, y_test = parts
    scaler = StandardScaler().fit(x_train)
    arrays = (scaler.transform(x_train), scaler.transform(x_test), y_train, y_test)
    return *map(jnp.asarray, arrays), [str(name) for name in data.feature_names]


def model(x, y, batch_size=None):
    intercept = numpyro.sample("intercept", dist.Normal(0, 2.5))
    with numpyro.plate("feature", x.shape[1]):
        beta = numpyro.sample("beta", dist.Normal(0, 0.5))
    with numpyro.plate("patient", len(x), subsample_size=batch_size) as i:
        numpyro.sample("benign", dist.Bernoulli(logits=intercept + x[i] @ beta), obs=y[i])


def probabilities(samples, x):
    """The posterior probability that each tumour is benign."""
    return sigmoid(samples["intercept"][:, None] + samples["beta"] @ x.T).mean(0)


def compare(samples, reference):
    """Prints the largest differences of a posterior mean, in posterior standard deviations, and of a deviation."""
    flat, exact = (jnp.column_stack([draws["intercept"], draws["beta"]]) for draws in (samples, reference))
    scale = exact.std(0)
    means = jnp.abs(flat.mean(0) - exact.mean(0)) / scale
    spreads = jnp.abs(flat.std(0) / scale - 1)
    print(f"Against NUTS: means differ by at most {means.max():.2f} posterior sd, sds by at most {spreads.max():.0%}.")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nuts", action="store_true", help="compare with NUTS on all rows")
    arguments = parser.parse_args()
    OUTPUT.mkdir(exist_ok=True)
    x_train, x_test, y_train, y_test, features = load()

    # Twenty particles, each with its own 64 of the 426 rows in every update. Nothing is set by hand.
    mcmc = MCMC(SGLDR(model), num_warmup=1000, num_samples=1000, num_chains=20, chain_method="vectorized")
    began = time.perf_counter()
    mcmc.run(random.key(0), x_train, y_train, batch_size=64)
    samples = mcmc.get_samples()
    accuracy = (probabilities(samples, x_test) > 0.5) == y_test
    print(f"Sampled in {time.perf_counter() - began:.0f} s.\n")

    data = to_inference_data(mcmc, coords={"feature": features})
    print(summary(data))
    print(f"\nTest accuracy: {accuracy.mean():.1%} of {len(y_test)} patients.")
    if arguments.nuts:
        nuts = MCMC(NUTS(model), num_warmup=1000, num_samples=4000, num_chains=4, chain_method="vectorized")
        began = time.perf_counter()
        nuts.run(random.key(1), x_train, y_train)
        exact = nuts.get_samples()
        print(f"NUTS sampled in {time.perf_counter() - began:.0f} s.")
        compare(samples, exact)

    data.to_netcdf(OUTPUT / "posterior.nc")
    save_trace(data, OUTPUT / "trace.png")
    print(f"Wrote {OUTPUT / 'posterior.nc'} and {OUTPUT / 'trace.png'}.")


def save_trace(data, path):
    shown = {"var_names": ["beta"], "coords": {"feature": SHOWN}, "compact": False}
    if hasattr(az, "plot_trace_dist"):  # ArviZ 1.x
        az.plot_trace_dist(data, figure_kwargs={"figsize": (11, 9)}, visuals={"trace": {"alpha": 0.4}}, **shown)
    else:
        az.plot_trace(data, legend=False, figsize=(11, 9), **shown)
    figure = plt.gcf()
    figure.suptitle("Log-odds of a benign tumour per standard deviation of a measurement; one color for each particle")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
