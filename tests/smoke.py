"""What a freshly installed package must do: ``make release`` runs this where nothing else of the tests is installed.

It is no test of pytest, whose configuration is not at hand there.
"""

from importlib.metadata import version
import pathlib
import sys
import tempfile

import arviz
import jax
from jax import random
import jax.numpy as jnp

import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC

import numpyro_repulsion
from numpyro_repulsion import SGLDR, load_draws, run_in_pieces, summary, to_inference_data


def model(x, y):
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("row", len(x), subsample_size=100) as i:
        numpyro.sample("y", dist.Bernoulli(logits=x[i] @ beta), obs=y[i])


def main() -> None:
    here = pathlib.Path(numpyro_repulsion.__file__)
    assert "site-packages" in here.parts, f"this is {here}, not the installed package"
    assert version("numpyro-repulsion") == numpyro_repulsion.__version__
    assert (here.parent / "py.typed").exists()
    truth = jnp.array([1.0, -1.0, 0.5])
    x = random.normal(random.key(1), (1000, 3))
    y = random.bernoulli(random.key(2), jax.nn.sigmoid(x @ truth)).astype(jnp.float32)
    mcmc = MCMC(SGLDR(model), num_warmup=300, num_samples=300, num_chains=10, chain_method="vectorized")
    mcmc.run(random.key(0), x, y)
    table = summary(mcmc)
    # Four standard errors of logistic regression on a thousand rows are 0.3 at most.
    assert (abs(table["mean"].astype(float).to_numpy() - truth) < 0.4).all(), table
    data = to_inference_data(mcmc)
    assert data["posterior"]["beta"].shape == (10, 300, 3)
    with tempfile.TemporaryDirectory() as directory:
        kernel = SGLDR(model, step_size=1e-4)
        pieces = MCMC(kernel, num_warmup=0, num_samples=20, num_chains=4, chain_method="vectorized", progress_bar=False)
        run_in_pieces(pieces, random.key(0), x, y, piece_size=10, directory=directory)
        assert load_draws(directory).samples["beta"].shape[-1] == 3
    if "plots" in sys.argv[1:]:
        import matplotlib

        from numpyro_repulsion.plots import plot_particles

        matplotlib.use("Agg")
        plot_particles(mcmc, pair=[0, 1])
    print(f"Python {sys.version.split()[0]}, ArviZ {arviz.__version__}, JAX {jax.__version__}: works.")


if __name__ == "__main__":
    main()
