"""Runs on rows of the host or of a disk: those of arrays up to rounding; and what is no use of rows is refused."""

import itertools
import pickle

import jax
from jax import lax, random
import jax.numpy as jnp
from models import vectorized
import numpy as np
import pytest

import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS

from numpyro_repulsion import (
    SGLD,
    SGLDR,
    ControlVariates,
    FullData,
    Rows,
    Sweeps,
    predict,
    rows as host,
    run_in_pieces,
    summary,
    to_inference_data,
)
from numpyro_repulsion.gradients import ModelTarget, minibatch
from numpyro_repulsion.rows import count_nan

N = 300
RNG = np.random.default_rng(0)
X = RNG.standard_normal((N, 3)).astype(np.float32)
Y = (RNG.random(N) < 1 / (1 + np.exp(-X[:, 0]))).astype(np.int32)


#: Another program rounds the same operations differently; draws have a standard deviation of about 0.1.
ROUNDING = 1e-4


def by_index(x, y, batch=20, more=0):
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("rows", len(x) + more, subsample_size=batch) as i:
        numpyro.sample("y", dist.Bernoulli(logits=x[i] @ beta), obs=y[i])


def by_subsample(x, y, batch=20, more=0):
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("rows", len(x) + more, subsample_size=batch):
        logits = numpyro.subsample(x, event_dim=1) @ beta
        numpyro.sample("y", dist.Bernoulli(logits=logits), obs=numpyro.subsample(y, event_dim=0))


class File:
    """A file that is indexed like those of HDF5: by rows in order, each once."""

    def __init__(self, array):
        self.shape, self.dtype, self._array = array.shape, array.dtype, array

    def __getitem__(self, rows):
        assert isinstance(rows, slice) or (np.diff(rows) > 0).all()
        return self._array[rows]


def on_disk(array, tmp_path):
    np.save(tmp_path / "x.npy", array)
    return np.load(tmp_path / "x.npy", mmap_mode="r")


def draws(kernel, *args, num_warmup=0, **settings):
    mcmc = vectorized(kernel, num_warmup, 4, 4, **settings)
    mcmc.run(random.key(0), *args)
    return np.asarray(mcmc.get_samples()["beta"]), mcmc


@pytest.fixture(scope="module")
def on_arrays():
    """The draws, and the run."""
    return draws(SGLD(by_index, step_size=1e-3), jnp.asarray(X), jnp.asarray(Y))


@pytest.mark.parametrize(
    ("model", "gradient"),
    [(by_index, ControlVariates(block_size=5)), (by_subsample, Sweeps())],
)
def test_draws_are_those_of_arrays(tmp_path, model, gradient):
    def of(x, y):
        return draws(SGLD(model, step_size=1e-3, gradient=gradient), x, y)[0]

    expected = of(jnp.asarray(X), jnp.asarray(Y))
    np.testing.assert_allclose(of(Rows(on_disk(X, tmp_path)), Rows(Y)), expected, atol=ROUNDING)
    # The control: rows in another order.
    assert np.abs(of(Rows(X[::-1].copy()), Rows(Y[::-1].copy())) - expected).max() > 30 * ROUNDING


@pytest.mark.slow
def test_warmup_is_that_of_arrays():
    expected, mcmc = draws(SGLDR(by_index), jnp.asarray(X), jnp.asarray(Y), num_warmup=100)
    found, same = draws(SGLDR(by_index), Rows(X), Rows(Y), num_warmup=100)
    np.testing.assert_allclose(found, expected, atol=ROUNDING)
    for field in ("step_size", "bandwidth"):
        np.testing.assert_allclose(getattr(same.last_state, field), getattr(mcmc.last_state, field), rtol=ROUNDING)


@pytest.mark.parametrize("wrap", [lambda x: x, jnp.asarray, File, lambda x: x.astype(">f4")])
def test_rows_are_those_of_any_source(wrap):
    rows = Rows(wrap(X))
    assert (rows.shape, rows.dtype, rows.ndim, len(rows), rows.nbytes) == ((N, 3), np.float32, 2, N, X.nbytes)
    i = jnp.array([[5, 2], [5, N - 1]])
    for found in (rows[i], jax.jit(lambda i: rows[i])(i), jax.vmap(lambda i: rows[i])(i)):
        np.testing.assert_array_equal(found, X[np.asarray(i)])
    np.testing.assert_array_equal(jax.vmap(lambda i: rows[i], 1, 1)(i), X[np.asarray(i)])
    np.testing.assert_array_equal(rows[4], X[4])
    np.testing.assert_array_equal(rows[i, 1], X[np.asarray(i), 1])
    np.testing.assert_array_equal(rows[i[0], :, None], X[np.asarray(i[0]), :, None])
    np.testing.assert_array_equal(np.concatenate(list(rows.blocks())), X)


def test_rows_of_one_array_are_one():
    """So that programs which JAX keeps for them serve again."""
    assert Rows(X) == Rows(X) and hash(Rows(X)) == hash(Rows(X)) and Rows(X) != Rows(X.copy()) and Rows(X) != X


@pytest.mark.parametrize(
    "rows",
    [
        [[5, 6, 7, 8, 9], [298, 299, 0, 1, 2]],
        [[0, 1, 2, 3, 4, 5, 6, 7]],
        [[7, 8, 9, 10], [3, 3, 3, 3]],
        [[4], [9]],
        [[]],
        [[-2, -1, 0, 1, 2, 3]],
    ],
)
def test_blocks_are_read_from_files(rows):
    rows = np.array(rows, np.int32)
    np.testing.assert_array_equal(Rows(File(X)).read(rows), X[rows])


def test_rows_are_taken_inside_loops_and_gradients():
    rows = Rows(X)

    def energy(z, i):
        return lax.scan(lambda total, j: (total + jnp.sin(z * rows[i[j]]).sum(), None), 0.0, jnp.arange(2))[0]

    i = jnp.array([3, 7])
    expected = jax.grad(lambda z: jnp.sin(z * X[np.asarray(i)]).sum())(0.5)
    np.testing.assert_allclose(jax.jit(jax.grad(energy))(0.5, i), expected, rtol=1e-5)
    curvature = jax.jit(jax.hessian(energy))(0.5, i)
    np.testing.assert_allclose(curvature, -(X[[3, 7]] ** 2 * np.sin(0.5 * X[[3, 7]])).sum(), rtol=1e-4)


def test_types_are_those_of_jax():
    assert Rows(np.arange(3)).dtype == np.int32 and Rows(np.arange(3)).source.dtype == np.int64
    assert Rows(np.zeros((3, 2), np.uint8))[jnp.arange(2)].dtype == np.uint8
    rows = Rows(np.arange(3) / 7)
    assert rows[0].dtype == np.float32
    with jax.enable_x64():
        assert rows[jnp.array([2])].dtype == np.float64 and rows[2] == 2 / 7


def test_pickles_hold_names_of_files(tmp_path):
    array = on_disk(X, tmp_path)
    stored = pickle.dumps(Rows(array))
    assert len(stored) < 500 < len(pickle.dumps(Rows(X)))
    for rows in (Rows(array), Rows(X), Rows(array[5:]), Rows(array.T), Rows(jnp.asarray(X))):
        found = pickle.loads(pickle.dumps(rows))
        np.testing.assert_array_equal(found.source, rows.source)
        np.testing.assert_array_equal(found[1], rows[1])


def test_the_same_rows_are_read_once():
    counted = []

    class Counted(File):
        def __getitem__(self, rows):
            counted.append(rows)
            return super().__getitem__(rows)

    rows = Rows(Counted(X))
    first, again = rows.read(np.array([1, 2])), rows.read(np.array([1, 2]))
    assert len(counted) == 1
    np.testing.assert_array_equal(first, again)
    rows.read(np.array([2, 1]))
    assert len(counted) == 2


def test_arguments_of_the_program(on_arrays):
    """``jit_model_args`` hands the model what it makes of a pytree."""
    expected, _ = on_arrays
    for wrap in (Rows, lambda x: Rows(jnp.asarray(x))):
        found, _ = draws(SGLD(by_index, step_size=1e-3), wrap(X), wrap(Y), jit_model_args=True)
        np.testing.assert_allclose(found, expected, atol=ROUNDING)
    rows = Rows(jnp.asarray(X))
    assert isinstance(jax.tree.map(np.asarray, rows).source, np.ndarray)
    # As NumPyro compares the arguments of runs.
    one, other = (jax.tree.map(lambda x: np.asarray(x).tobytes(), Rows(jnp.asarray(x))) for x in (X, X.copy()))
    assert one == other and hash(one) == hash(other)


def test_results_of_a_run(on_arrays):
    found, mcmc = draws(SGLD(by_index, step_size=1e-3), Rows(X), Rows(Y))
    expected, other = on_arrays
    np.testing.assert_allclose(found, expected, atol=ROUNDING)
    assert "particles" in str(summary(mcmc))
    found, expected = (to_inference_data(run, log_likelihood=True) for run in (mcmc, other))
    for group in ("log_likelihood", "observed_data"):
        np.testing.assert_allclose(found[group]["y"], expected[group]["y"], rtol=1e-3)
    seen, known = predict(mcmc, Rows(X[:9]), Rows(Y[:9])), predict(other, X[:9], Y[:9])
    np.testing.assert_allclose(seen.mean, known.mean, rtol=1e-3)


def test_other_samplers_take_rows():
    def whole(x, y):
        by_index(x, y, None)

    def means(x, y):
        mcmc = MCMC(NUTS(whole), num_warmup=50, num_samples=50, progress_bar=False)
        mcmc.run(random.key(0), x, y)
        return mcmc.get_samples()["beta"].mean(0)

    np.testing.assert_allclose(means(Rows(X), Rows(Y)), means(jnp.asarray(X), jnp.asarray(Y)), rtol=1e-3)


@pytest.mark.parametrize(
    "use",
    [
        lambda x: x @ jnp.ones(3),
        lambda x: jnp.ones(N) @ x,
        lambda x: jnp.mean(x),
        lambda x: jnp.exp(x),
        lambda x: np.asarray(x),
        lambda x: x[:10],
        lambda x: x[X[:, 0] > 0],
        lambda x: x[jnp.array([0.0, 1.0])],
        lambda x: x[None],
        lambda x: list(x),
        lambda x: x * 2.0,
    ],
)
def test_uses_but_by_rows_are_refused(use):
    with pytest.raises(TypeError, match="inside the plate|by integers|not iterable|unsupported operand"):
        use(Rows(X))


@pytest.mark.parametrize(
    ("source", "error", "words"),
    [
        ([1.0, 2.0], TypeError, "np.asarray"),
        (iter([1.0]), TypeError, "open_memmap"),
        (None, TypeError, "NoneType"),
        (Rows(X), TypeError, "got Rows"),
        (np.array(["a", "b"]), TypeError, "Encode categories"),
        (np.array([None, 1.0]), TypeError, "takes numbers"),
        (np.array(3.0), ValueError, "with rows"),
        (np.zeros((0, 3)), ValueError, r"\(0, 3\)"),
    ],
)
def test_what_is_no_array_of_numbers_is_refused(source, error, words):
    with pytest.raises(error, match=words):
        Rows(source)


def test_columns_of_tables_are_taken_by_place():
    pandas = pytest.importorskip("pandas")
    column = pandas.Series([1.0, 2.0, 3.0], index=[2, 0, 1])
    assert Rows(column)[0] == 1.0


def test_rows_that_do_not_exist():
    for rows in (Rows(X), Rows(jnp.asarray(X)), Rows(File(X))):
        with pytest.raises(IndexError, match=f"no row {N}"):
            rows[N]
        np.testing.assert_array_equal(rows[-1], X[-1])
    with pytest.raises(IndexError, match=f"no row {N + 5}"):
        Rows(File(X)).read(np.arange(N - 3, N + 6))

    with pytest.raises(ValueError, match=f"entry {N} of an axis of length {N}.* plate 'rows' of size {N + 1}"):
        ModelTarget(by_index, (Rows(X), Rows(Y)), {"more": 1})
    with pytest.raises(ValueError, match=f"has {N + 1} rows, and axis 0"):
        ModelTarget(by_subsample, (Rows(X), Rows(Y)), {"more": 1})


def only_labels(x, y):
    """Covariates of fixed rows with labels of the minibatch, as a slice of an array would be."""
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("rows", N, subsample_size=20) as i:
        numpyro.sample("y", dist.Bernoulli(logits=x[jnp.arange(20)] @ beta), obs=y[i])


def for_a_whole_minibatch(x, y):
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("rows", N, subsample_size=20) as i:
        numpyro.factor("y", dist.Bernoulli(logits=x[i] @ beta).log_prob(y[i]).sum())


@pytest.mark.parametrize("model", [only_labels, for_a_whole_minibatch])
def test_wrong_models_are_refused_as_those_of_arrays(model):
    with pytest.raises(ValueError) as expected:
        ModelTarget(model, (jnp.asarray(X), jnp.asarray(Y)))
    with pytest.raises(ValueError) as found:
        ModelTarget(model, (Rows(X), Rows(Y)))
    assert str(found.value) == str(expected.value)


def test_two_plates_take_rows_of_one_array():
    """Of minibatches of several particles."""
    x = RNG.standard_normal((40, 12, 2)).astype(np.float32)
    rows = {"rows": RNG.integers(0, 40, (4, 5)), "columns": RNG.integers(0, 12, (4, 4))}

    def model(x):
        z = numpyro.sample("z", dist.Normal(0, 1).expand([2]).to_event(1))
        with (
            numpyro.plate("rows", 40, dim=-2, subsample_size=5),
            numpyro.plate("columns", 12, dim=-1, subsample_size=4),
        ):
            numpyro.sample("x", dist.Normal(z, 1).to_event(1), obs=numpyro.subsample(x, 1))

    def energies(x, rows):
        target = ModelTarget(model, (x,))
        return jax.jit(jax.vmap(lambda i: target.potential_energy({"z": jnp.ones(2)}, i, random.key(0))))(rows)

    expected = energies(jnp.asarray(x), rows)
    np.testing.assert_allclose(energies(Rows(x), rows), expected, rtol=1e-5)
    # The control: other columns.
    assert np.abs(energies(Rows(x), rows | {"columns": rows["columns"][::-1]}) / expected - 1).max() > 0.01


def test_nan_is_found_and_named():
    x = X.copy()
    x[N - 1, 2] = np.nan
    assert ModelTarget(by_index, (Rows(x), Rows(Y))).find_nan() == ["1 in the model's args[0]"]
    assert count_nan(Rows(Y)) == 0
    with pytest.raises(ValueError, match="NaN: 1 in the model's args"):
        draws(SGLD(by_index, step_size=1e-3), Rows(x), Rows(Y))


def test_data_that_a_device_does_not_hold(tmp_path, monkeypatch):
    monkeypatch.setattr(minibatch, "device_memory", lambda: 4 * X.nbytes - 4)
    with pytest.raises(ValueError, match="leave it on disk"):
        ModelTarget(by_index, (on_disk(X, tmp_path), Y))
    with pytest.raises(ValueError, match="subsample_size"):
        draws(SGLD(lambda x, y: by_index(x, y, None), step_size=1e-3), Rows(X), Rows(Y))
    with pytest.raises(ValueError, match="FullData"):
        draws(SGLD(by_index, step_size=1e-3, gradient=FullData()), Rows(X), Rows(Y))
    draws(SGLD(by_index, step_size=1e-3), Rows(X), Rows(Y))
    monkeypatch.setattr(minibatch, "device_memory", lambda: 4 * X.nbytes)
    ModelTarget(by_index, (on_disk(X, tmp_path), Y))
    monkeypatch.undo()
    assert minibatch.device_memory() > 2**20


def test_digests_are_those_of_values(monkeypatch):
    assert Rows(X).digest() == Rows(X.copy()).digest() == Rows(File(X)).digest()
    other = X.copy()
    other[N - 1] += 1
    assert len({Rows(x).digest() for x in (X, other, X.reshape(3, N), X.view(np.int32))}) == 4
    # Of more than so many bytes, some rows speak for all.
    monkeypatch.setattr(host, "DIGEST_BYTES", 10)
    long = np.arange(5000)
    for changed in (0, 4999):
        other = long.copy()
        other[changed] += 1
        assert Rows(long).digest() != Rows(other).digest()
    assert Rows(long).digest() != Rows(np.where(long < 1000, long, -1)).digest()


def in_pieces(directory, dies=False):
    """A run that may die in its second piece."""
    x, y = (np.load(f"{directory}/{name}.npy", mmap_mode="r") for name in "xy")
    kernel, count = SGLD(by_index), itertools.count()

    def die(*_):
        if next(count):
            raise KeyboardInterrupt

    if dies:
        kernel.warn_of_flagged = die
    mcmc = vectorized(kernel, 50, 20, 4)
    run_in_pieces(mcmc, random.key(0), Rows(x), Rows(y), piece_size=10, directory=f"{directory}/run")
    return np.asarray(mcmc.get_samples()["beta"])


@pytest.mark.slow
def test_a_run_that_died_goes_on_bit_for_bit(tmp_path):
    """`test_checkpointing.py` kills whole processes."""
    for directory in (tmp_path, whole := tmp_path / "whole"):
        directory.mkdir(exist_ok=True)
        np.save(directory / "x.npy", X), np.save(directory / "y.npy", Y)
    with pytest.raises(KeyboardInterrupt):
        in_pieces(tmp_path, dies=True)
    np.testing.assert_array_equal(in_pieces(tmp_path), in_pieces(whole))
    # Other data are another run.
    np.save(tmp_path / "y.npy", 1 - Y)
    with pytest.raises(ValueError, match="args"):
        in_pieces(tmp_path)
