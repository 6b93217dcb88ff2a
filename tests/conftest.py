import itertools

import jax
from jax import random
import jax.numpy as jnp
import pytest

from numpyro.infer import MCMC, init_to_uniform

from numpyro_repulsion import SGLD
from numpyro_repulsion.gradients import ModelTarget

try:
    from jax import enable_x64
except ImportError:  # an older JAX
    from jax.experimental import enable_x64


@pytest.fixture
def x64():
    """64-bit arithmetic in the test that asks for it."""
    # JAX finds NumPy constants of traced programs by identity alone, and would hand out those of the other precision.
    jax.clear_caches()
    with enable_x64(True):
        yield
    jax.clear_caches()


#: Tests of one file after which compiled programs are dropped.
MOST_TESTS = 30


@pytest.fixture(autouse=True, scope="module")
def tests_of_file():
    """Drops the programs that a file's tests compiled: thousands of them would not fit into memory."""
    yield itertools.count(1)
    jax.clear_caches()


@pytest.fixture(autouse=True)
def forgotten_programs(tests_of_file):
    """The same within long files: a process has only so many memory maps, and the compiler dies without."""
    yield
    if next(tests_of_file) % MOST_TESTS == 0:
        jax.clear_caches()


@pytest.fixture(scope="session")
def pretended():
    """Makes an ``MCMC`` that looks as if it had run, with arbitrary draws: a run costs seconds to compile."""
    state = None

    def build(model, *args, kernel=SGLD, num_samples=6, num_chains=4, **kwargs):
        nonlocal state
        mcmc = MCMC(kernel(model, step_size=0.1), num_warmup=0, num_samples=num_samples, num_chains=num_chains,
                    chain_method="vectorized", progress_bar=False)  # fmt: skip
        if state is None:
            short = MCMC(SGLD(potential_fn=lambda z: z**2, step_size=0.1), num_warmup=0, num_samples=1, num_chains=4,
                         chain_method="vectorized", progress_bar=False)  # fmt: skip
            short.run(random.key(0), init_params=jnp.arange(4.0))
            state = short.last_state
        target = ModelTarget(model, args, kwargs)

        def draw(key):
            return target.constrain(target.draw(key, init_to_uniform))

        keys = random.split(random.key(num_samples), (num_chains, num_samples))
        fields = {"potential_energy": 1.0, "step_size": 0.1, "bandwidth": jnp.nan, "diverging": False}
        mcmc._args, mcmc._kwargs, mcmc._last_state = args, kwargs, state
        mcmc._states = {"z": jax.vmap(jax.vmap(draw))(keys)}
        mcmc._states |= {name: jnp.full(keys.shape, value) for name, value in fields.items()}
        return mcmc

    return build
