"""Streams as shuffled arrays on disk: every row once, in a random order, with its labels."""

import numpy as np
import pytest
from scipy import stats

from numpyro_repulsion import Rows
from numpyro_repulsion.rows import conversion


def batches(sizes=(7, 0, 300, 1), dtype=np.float32):
    first = 0
    for size in sizes:
        number = np.arange(first, first + size)
        yield {"x": np.stack([number, -number], 1).astype(dtype), "label": number % 5}
        first += size


def test_every_row_is_there_once_with_its_label(tmp_path):
    rows = Rows.convert(batches(), tmp_path / "data", progress_bar=False)
    assert list(rows) == ["x", "label"]
    x, label = (rows[name].source for name in rows)
    assert isinstance(x, np.memmap) and x.shape == (308, 2) and x.dtype == np.float32 and label.dtype == np.int64
    np.testing.assert_array_equal(np.sort(x[:, 0]), np.arange(308))
    np.testing.assert_array_equal(x[:, 1], -x[:, 0])
    np.testing.assert_array_equal(label, x[:, 0] % 5)
    again = Rows.open(tmp_path / "data")
    np.testing.assert_array_equal(again["x"].source, x)
    assert {path.name for path in (tmp_path / "data").iterdir()} == {"x.npy", "label.npy", "columns.txt"}
    assert list(tmp_path.iterdir()) == [tmp_path / "data"]


def test_orders_are_uniform(tmp_path):
    """Over seeds, row 0 is equally likely to be anywhere; as is the row next to it."""
    for mean_of in (lambda order: order.index(0), lambda order: (order.index(1) - order.index(0)) % 6):
        counts = np.zeros(6, int)
        for seed in range(300):
            rows = Rows.convert(
                [{"i": np.arange(6)}], tmp_path / f"{id(mean_of)}-{seed}", seed=seed, progress_bar=False
            )
            counts[mean_of(rows["i"].source.tolist())] += 1
        counts = counts[counts > 0]
        assert stats.chisquare(counts).pvalue > 1e-4, counts


def test_an_order_is_that_of_its_seed(tmp_path):
    first, same, other = (
        Rows.convert(batches(), tmp_path / name, seed=seed, progress_bar=False)["x"].source
        for name, seed in (("a", 3), ("b", 3), ("c", 4))
    )
    np.testing.assert_array_equal(first, same)
    assert (first != other).any()


def test_what_exists_is_kept(tmp_path):
    Rows.convert(batches(), tmp_path / "data", progress_bar=False)
    with pytest.raises(ValueError, match="Rows.open"):
        Rows.convert(batches(), tmp_path / "data", progress_bar=False)
    with pytest.raises(ValueError, match="no directory that Rows.convert wrote"):
        Rows.open(tmp_path)


@pytest.mark.parametrize(
    ("stream", "error", "words"),
    [
        ([], ValueError, "no rows"),
        ([{"x": np.zeros(0)}], ValueError, "no rows"),
        ([{}], ValueError, "no columns"),
        ([np.zeros(3)], TypeError, "got a ndarray"),
        ([{"x": np.zeros(3), "y": np.zeros(2)}], ValueError, "equally many rows"),
        ([{"x": np.zeros(3)}, {"y": np.zeros(3)}], ValueError, "same columns"),
        ([{"x": np.zeros(3)}, {"x": np.zeros((3, 2))}], ValueError, "same columns"),
        ([{"x": np.zeros(3)}, {"x": np.zeros(3, int)}], ValueError, "same columns"),
        ([{"x": ["a", "b"]}], TypeError, "Encode categories"),
        ([{"x": [1.0, None]}], TypeError, "missing values"),
        ([{"x": [[1.0], [1.0, 2.0]]}], TypeError, "no array of numbers"),
        ([{"x": 3.0}], ValueError, "no axis of rows"),
        ([{"a/b": np.zeros(3)}], ValueError, "another name"),
        ([{3: np.zeros(3)}], ValueError, "another name"),
    ],
)
def test_streams_that_are_no_columns_are_refused(tmp_path, stream, error, words):
    with pytest.raises(error, match=words):
        Rows.convert(stream, tmp_path / "data", progress_bar=False)
    assert not list(tmp_path.iterdir())


def test_an_interrupted_conversion_leaves_nothing(tmp_path):
    def stream():
        yield from batches()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Rows.convert(stream(), tmp_path / "data", progress_bar=False)
    assert not list(tmp_path.iterdir())


def test_a_part_is_in_memory_at_a_time(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(conversion.np, "fromfile", lambda *args: seen.append(np.memmap(*args)) or seen[-1])
    Rows.convert(batches((20_000,)), tmp_path / "data", progress_bar=False)
    assert len(seen) == conversion.NUM_PARTS and max(map(len, seen)) < 2 * 20_000 / conversion.NUM_PARTS
