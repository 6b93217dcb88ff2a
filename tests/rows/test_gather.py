"""Rows that several threads read are those that one reads."""

import os

import numpy as np
import pytest

from numpyro_repulsion.rows import gather as module
from numpyro_repulsion.rows.gather import gather

RNG = np.random.default_rng(0)
X = RNG.standard_normal((1000, 3))
KINDS = {
    "double": X,
    "of no width": X[:, 0],
    "big-endian": X.astype(">f4"),
    "part of each row": np.repeat(X, 2, 1)[:, ::2],
    "whole numbers": (100 * X).astype(np.int8)[..., None],
    "truth": X > 0,
}


@pytest.fixture
def several(monkeypatch):
    """Let four threads read however few rows, and return how many parts they were asked for."""
    parts = []
    threads = module._threads()
    monkeypatch.setattr(module, "PART_BYTES", 1)
    monkeypatch.setattr(module, "_num_cores", lambda: 4)

    class Watched:
        def submit(self, *work):
            parts.append(work[1:])
            return threads.submit(*work)

    monkeypatch.setattr(module, "_threads", Watched)
    return parts


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(101,), (7, 13), (2, 3, 5), (2,)])
def test_parts_are_put_together(several, kind, shape):
    source = KINDS[kind]
    rows = RNG.integers(-1000, 1000, shape)
    found = gather(source, rows)
    assert several, "one thread read all"
    assert found.shape == source[rows].shape and found.dtype == source.dtype
    np.testing.assert_array_equal(found, source[rows])


def test_files(several, tmp_path):
    np.save(tmp_path / "x.npy", X)
    rows = RNG.integers(0, 1000, (4, 50)).astype(np.int32)
    np.testing.assert_array_equal(gather(np.load(tmp_path / "x.npy", mmap_mode="r"), rows), X[rows])
    assert len(several) == 3


def test_few_bytes_are_left_to_one_thread(several, monkeypatch):
    monkeypatch.setattr(module, "PART_BYTES", 1 << 18)
    rows = RNG.integers(0, 1000, 2000)
    np.testing.assert_array_equal(gather(X, rows), X[rows])
    assert not several
    # The control: so many rows that each of four threads has its 256 kB.
    rows = RNG.integers(0, 1000, 50_000)
    np.testing.assert_array_equal(gather(X, rows), X[rows])
    assert len(several) == 3


def test_no_rows(several):
    assert gather(X, np.zeros((0,), int)).shape == (0, 3)
    assert gather(X[:, :0], np.zeros((5,), int)).shape == (5, 0)


def test_an_error_of_a_thread_is_raised(several, monkeypatch):
    def take(source, rows, *_):
        if 999 in rows:
            raise OSError("the disk is gone")

    monkeypatch.setattr(module.np, "take", take)
    with pytest.raises(OSError, match="the disk is gone"):
        gather(X, np.arange(1000))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
@pytest.mark.filterwarnings("ignore")  # JAX warns of any fork.
def test_a_child_process_has_threads_of_its_own():
    before = module._threads()
    before.submit(int).result()
    child = os.fork()
    if child == 0:
        threads = module._threads()
        os._exit(threads is before or threads.submit(int).result(10))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
