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
