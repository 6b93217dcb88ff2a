import jax
import pytest

try:
    from jax import enable_x64
except ImportError:  # an older JAX
    from jax.experimental import enable_x64


@pytest.fixture
def x64():
    """64-bit arithmetic in the test that asks for it."""
    with enable_x64(True):
        yield


@pytest.fixture(autouse=True, scope="module")
def forgotten_programs():
    """Drops the programs that a file's tests compiled: thousands of them would not fit into memory."""
    yield
    jax.clear_caches()
