"""What JAX would change in silence is refused: numbers beyond the range of its types, and masks of NumPy."""

import jax
from jax import random
import jax.numpy as jnp
from models import vectorized
import numpy as np
import pytest

import numpyro
import numpyro.distributions as dist

from numpyro_repulsion import SGLD, Rows, predict
from numpyro_repulsion.gradients import ModelTarget
from numpyro_repulsion.rows import losses

N = 40
Y = np.arange(N, dtype=np.float32)
OBSERVED = jnp.asarray(Y)
ONE = np.arange(N) == N - 3


def line(x, y=OBSERVED):
    slope = numpyro.sample("slope", dist.Normal(0, 1))
    with numpyro.plate("rows", len(x), subsample_size=min(8, len(x))) as i:
        numpyro.sample("y", dist.Normal(slope * x[i].real, 1), obs=None if y is None else y[i])


def whole(x, y=OBSERVED):
    numpyro.sample("y", dist.Normal(numpyro.sample("slope", dist.Normal(0, 1)) * x, 1), obs=y)


def run(model, *args, **kwargs):
    vectorized(SGLD(model, step_size=1e-5), 0, 2, 4).run(random.key(0), *args, **kwargs)


#: Data of which JAX makes others, and what is said of their largest value.
WRONG = {
    "int64": (np.arange(N) * 2**40, str((N - 1) * 2**40)),
    "negative": (-np.arange(N) * 2**30, str((1 - N) * 2**30)),
    "just beyond": (np.where(ONE, 2**31, -(2**31)), "value 2147483648"),
    "uint64": (np.where(ONE, 2**32, 0).astype(np.uint64), "value 4294967296"),
    "float64": (np.where(ONE, -1e300, np.inf), r"value -1e\+300"),
    "beside NaN": (np.where(ONE, 1e39, np.nan), r"value 1e\+39"),
    "complex128": (np.where(ONE, 1e300j, 0), r"value 1e\+300"),
    "other order of bytes": ((np.arange(N) * 2**40).astype(">i8"), str((N - 1) * 2**40)),
}
RIGHT = {
    "int64": np.where(ONE, 2**31 - 1, -(2**31)),
    "float64": np.where(ONE, 3e38, 1e-300),
    "int8": ONE.astype(np.int8),
}


@pytest.mark.parametrize("name", WRONG)
def test_numbers_out_of_range_are_refused(name):
    array, words = WRONG[name]
    for model, args, kwargs, where in (
        (line, (array,), {}, r"args\[0\]"),
        (whole, (), {"x": array}, r"kwargs\['x'\]"),
        (line, (Rows(array),), {}, r"args\[0\]"),
    ):
        with pytest.raises(ValueError, match=f"The model's {where}.* has .*{words}.* whose limit is .*enable_x64"):
            run(model, *args, **kwargs)
    with pytest.raises(ValueError, match=words):
        Rows(array)[np.arange(N)]


@pytest.mark.parametrize("name", RIGHT)
def test_numbers_in_range_are_accepted(name):
    assert not losses(RIGHT[name]) and not losses(Rows(RIGHT[name]))
    ModelTarget(line, (RIGHT[name],))
    assert Rows(RIGHT[name])[np.arange(N)].shape == (N,)


def test_double_precision_loses_nothing(x64):
    for array, _ in WRONG.values():
        assert Rows(array)[np.arange(N)].dtype == array.dtype.newbyteorder("=")
    for name in ("int64", "uint64", "float64", "complex128"):
        ModelTarget(line, (WRONG[name][0],))
    rows = Rows(WRONG["int64"][0])
    assert not losses(rows)
    with jax.enable_x64(False):
        assert "whose limit is" in losses(rows)


def test_other_entries_into_a_model(pretended):
    """New data of a prediction, a table, and observations that are no arguments."""
    mcmc = pretended(line, Y)
    for new in (np.full(3, 1e300), Rows(np.full(3, 1e300))):
        with pytest.raises(ValueError, match=r"args\[0\].* has the value 1e\+300"):
            predict(mcmc, new, None)
    pandas = pytest.importorskip("pandas")
    with pytest.raises(ValueError, match=r"args\[0\].* has the value 1e\+300"):
        run(whole, pandas.Series(np.full(N, 1e300)))
    with pytest.raises(ValueError, match=r"The observed site 'y' has the value 1e\+300"):
        run(lambda: whole(1.0, np.full(N, 1e300)))


class Variable:
    """A file that hides missing values by a mask, like those of netCDF."""

    def __init__(self, array):
        self.shape, self.dtype, self._array = array.shape, array.dtype, array

    def __getitem__(self, rows):
        return self._array[rows]


@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.float64])
def test_masks_of_numpy_are_refused(dtype):
    hidden = np.ma.array(Y.astype(dtype), mask=ONE)
    with pytest.raises(ValueError, match=r"args\[0\] has 1 masked entries.*numpyro.handlers.mask"):
        run(whole, hidden)
    with pytest.raises(ValueError, match=r"args\[0\].* has 1 masked entries"):
        run(line, Rows(hidden))
    for rows in (np.arange(N), np.arange(0, N, 3)[::-1], np.flatnonzero(ONE)):  # a block, and single rows
        for source in (hidden, Variable(hidden)):
            if ONE[rows].any():
                with pytest.raises(ValueError, match="1 masked entries"):
                    Rows(source)[rows]
    none = np.ma.array(Y.astype(dtype))
    np.testing.assert_array_equal(Rows(none)[np.arange(N)], Y)
    np.testing.assert_array_equal(Rows(Variable(none))[np.arange(N)], Y)
    ModelTarget(line, (Rows(none),))


def test_no_rows_are_read_for_types_that_lose_nothing():
    class Untouched(Variable):
        def __getitem__(self, rows):
            raise AssertionError("read")

    assert not losses(Rows(Untouched(np.zeros(N, np.uint8))))
    assert not losses(jnp.zeros(3, jnp.int32))
    with pytest.raises(AssertionError, match="read"):
        losses(Rows(Untouched(np.zeros(N, np.int64))))
