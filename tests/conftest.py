"""What all tests share: a cache of compiled programs, and live warnings only where they are tested."""

from contextlib import suppress
import gc
import itertools
import os
from pathlib import Path

#: Compiled programs, kept from one run of the tests to the next. ``JAX_COMPILATION_CACHE_DIR`` names another place.
CACHE = Path(__file__).resolve().parents[1] / ".cache" / "jax"
#: So many bytes of it at most: beyond, the oldest programs are removed before tests begin.
LARGEST_CACHE = 2**30
# By the environment, which JAX reads when it is imported, so that processes that tests start have it too. Its own bound
# on the size would make both workers wait for a lock, and look through thousands of files, at each program.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

import jax  # noqa: E402
from jax import random  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from models import vectorized  # noqa: E402
import pytest  # noqa: E402
from results import X, Y, logistic, run  # noqa: E402

from numpyro.infer import init_to_uniform  # noqa: E402

from numpyro_repulsion import SGLD, SGLDR, to_inference_data  # noqa: E402
from numpyro_repulsion.gradients import ModelTarget  # noqa: E402


class Precision:
    """Programs are dropped between tests with ``x64`` and tests without it, and kept from one such test to the next.

    JAX finds NumPy constants of traced programs by identity alone, and would hand out those of the other precision.
    """

    is_double = False

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item):
        before, self.is_double = self.is_double, "x64" in getattr(item, "fixturenames", ())
        if self.is_double != before:
            jax.clear_caches()


def pytest_configure(config):
    # Python looks through everything that lives, traced programs above all, after every few thousand new objects.
    gc.freeze()
    gc.set_threshold(200_000, 20, 100)
    config.pluginmanager.register(Precision())
    if not hasattr(config, "workerinput"):
        trim()


#: Doctests of presets that `make test` runs: without repulsion, and with it. The others differ from them in a word.
DOCTESTS = {"SGLD", "SGHMCR"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        file, _, name = item.nodeid.partition("::")
        if file == "numpyro_repulsion/kernels/presets.py" and name.rpartition(".")[2] not in DOCTESTS:
            item.add_marker(pytest.mark.slow)
    # The precision changes, and programs are dropped, once in each file.
    files = list(dict.fromkeys(item.path for item in items))
    items.sort(key=lambda item: (files.index(item.path), "x64" in getattr(item, "fixturenames", ())))


def trim():
    """Remove what was never written to its end, and the oldest programs of a cache that is too large."""
    found = []
    for path in CACHE.glob("*-cache"):
        with suppress(FileNotFoundError):  # another run of the tests was faster
            found.append((path.stat().st_mtime, path.stat().st_size, path))
    left = sum(size for _, size, _ in found)
    for _, size, path in sorted(found):
        if left > LARGEST_CACHE or not size:
            path.unlink(missing_ok=True)
            left -= size


@pytest.fixture
def x64():
    """64-bit arithmetic in the test that asks for it."""
    with jax.enable_x64(True):
        yield


#: A look at what the process holds after so many quick tests, and after each slow one.
TESTS = 10
#: The compiler dies beyond 65,530 memory maps, of which a program takes several.
MOST_MAPS = 25_000
#: So much more memory than after programs were dropped the last time.
MOST_BYTES = 2**29
COUNT = itertools.count(1)


def resident():
    """Bytes of memory in use, or infinity where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return float("inf")


def is_crowded(before):
    """Whether compiled programs fill the process; always where the system does not say."""
    if resident() > before + MOST_BYTES:
        return True
    return Path("/proc/self/maps").read_bytes().count(b"\n") > MOST_MAPS


@pytest.fixture(scope="session")
def room():
    """The memory in use after programs were dropped, in a list."""
    return [resident()]


@pytest.fixture(autouse=True)
def forgotten_programs(room, request):
    """Drops compiled programs before they fill the process."""
    yield
    is_slow = request.node.get_closest_marker("slow") is not None
    if (is_slow or next(COUNT) % TESTS == 0) and is_crowded(min(room[0], 2**40)):
        jax.clear_caches()
        gc.collect()
        room[0] = resident()


@pytest.fixture(scope="session")
def pretended():
    """Makes an ``MCMC`` that looks as if it had run, with arbitrary draws: a run costs seconds to compile."""
    state = None

    def build(model, *args, kernel=SGLD, num_samples=6, num_chains=4, **kwargs):
        nonlocal state
        mcmc = vectorized(kernel(model, step_size=0.1), 0, num_samples, num_chains)
        if state is None:
            short = vectorized(SGLD(potential_fn=lambda z: z**2, step_size=0.1), 0, 1, 4)
            short.run(random.key(0), init_params=jnp.arange(4.0))
            state = short.last_state
        target = ModelTarget(model, args, kwargs)

        def draw(key):
            return target.constrain(target.draw(key, init_to_uniform))

        keys = random.split(random.key(num_samples), (num_chains, num_samples))
        fields = {"potential_energy": 1.0, "step_size": 0.1, "bandwidth": jnp.nan, "diverging": False}
        mcmc._args, mcmc._kwargs, mcmc._last_state = args, kwargs, state
        mcmc._states = {"z": jax.jit(jax.vmap(jax.vmap(draw)))(keys)}
        mcmc._states |= {name: jnp.full(keys.shape, value) for name, value in fields.items()}
        return mcmc

    return build


@pytest.fixture(scope="session")
def logistic_run():
    """A run of `results.logistic` by two ensembles that repel, and its inference data: to be read, not changed."""
    kernel, fields = SGLDR(logistic, step_size=1e-3, num_ensembles=2), ("gradient", "z.beta", "memory")
    mcmc = run(kernel, X, Y, extra_fields=fields)
    return mcmc, to_inference_data(mcmc)
