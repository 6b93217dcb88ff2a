"""Models with many sites, as those that a Python loop makes: what grows with their number is compilation."""

import os
from pathlib import Path
import resource
import subprocess
import sys

from jax import make_jaxpr, random
import jax.numpy as jnp
from models import programs_of, vectorized
from programs import equations
import pytest

import numpyro
import numpyro.distributions as dist
from numpyro.infer import NUTS

from numpyro_repulsion import SGLDR

SIZE = 2000
#: How many times the CPU time of NUTS's first run this takes at most. 1.13 was measured (97 s and 86 s), here nearly
#: all of it in XLA, which makes several kernels for each site in each of the five copies of the model's gradient.
#: Sites that share a latent scale cost more: 2.7 times as much as in NUTS with 40 of them.
MOST = 1.5


def regression(count):
    """A regression whose coefficients are sites of their own, and its data."""
    x = random.normal(random.key(1), (SIZE, count))
    y = x @ random.normal(random.key(2), (count,)) + random.normal(random.key(3), (SIZE,))

    def model(x, y, batch=None):
        b = jnp.stack([numpyro.sample(f"b{k}", dist.Normal(0, 1)) for k in range(count)])
        with numpyro.plate("row", SIZE, subsample_size=batch) as i:
            # A function that nothing else uses, by which copies of the model are counted.
            numpyro.sample("y", dist.Normal(x[i] @ jnp.arctan(b), 1), obs=y[i])

    return model, x, y


def test_an_iteration_has_few_copies_of_the_model():
    model, *data = regression(3)
    kernel = SGLDR(model)
    *_, (iterate, state) = programs_of(kernel, random.split(random.key(0), 20), 100, *data, batch=20)
    assert 0 < sum(equation.primitive.name == "atan" for equation in equations(make_jaxpr(iterate)(state).jaxpr)) <= 8


def run(method, count):
    model, x, y = regression(count)
    kernel, chains, arguments = (NUTS(model), 4, {}) if method == "NUTS" else (SGLDR(model), 20, {"batch": 200})
    vectorized(kernel, 100, 100, chains).run(random.key(0), x, y, **arguments)


@pytest.mark.slow
def test_the_first_run_with_150_sites_takes_little_more_than_that_of_nuts():
    def seconds(method):
        environment = {k: v for k, v in os.environ.items() if k not in ("JAX_COMPILATION_CACHE_DIR", "XLA_FLAGS")}
        path = os.pathsep.join([*sys.path, str(Path(__file__).parent)])
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, __file__, method], check=True, env=environment | {"PYTHONPATH": path})
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime - before.ru_utime

    ours, others = seconds("SGLDR"), seconds("NUTS")
    assert ours < MOST * others, f"{ours:.0f} s of CPU time against {others:.0f} s"


if __name__ == "__main__":
    run(sys.argv[1], 150)
