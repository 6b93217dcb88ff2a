"""The data that plots of calibration show."""

import numpy as np
import pytest

from numpyro_repulsion.plots import plot_calibration
from numpyro_repulsion.predictions import Predictions

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


def gaussian(spread, rows=2000):
    rng = np.random.default_rng(0)
    return Predictions("y", replicates=spread * rng.normal(size=(500, rows)), observed=rng.normal(size=rows))


def categorical(power, rows=4000):
    """Classes drawn from probabilities, and predictions with these probabilities sharpened by a power."""
    rng = np.random.default_rng(1)
    true = rng.dirichlet(np.ones(3), size=rows)
    observed = (rng.uniform(size=(rows, 1)) > true.cumsum(1)).sum(1)
    told = true**power / (true**power).sum(1, keepdims=True)
    return Predictions("y", replicates=observed[None], observed=observed, probabilities=told)


def test_coverage_is_that_of_the_predictions():
    ax = plot_calibration(gaussian(1.0), label="right")
    plot_calibration(gaussian(3.0), ax=ax, label="wide")
    plot_calibration(gaussian(0.3), ax=ax, label="narrow")
    lines = {line.get_label(): line for line in ax.lines if line.get_gid()}
    assert len({line.get_color() for line in lines.values()}) == 3
    for name, found in (("right", gaussian(1.0)), ("wide", gaussian(3.0)), ("narrow", gaussian(0.3))):
        x, y = lines[name].get_data()
        for prob in (0.3, 0.9):
            assert y[np.argmin(abs(x - prob))] == pytest.approx(found.coverage(prob), abs=1e-9)
    _, right = lines["right"].get_data()
    inside = np.linspace(0, 1, 101)
    assert (abs(right - inside) < 4.5 * np.sqrt(inside * (1 - inside) / 2000) + 1 / 500).all()
    assert lines["wide"].get_ydata()[50] > 0.7 and lines["narrow"].get_ydata()[50] < 0.3
    assert len(ax.collections) == 1  # one band for all


def test_histograms_of_transforms_bend_as_said():
    checks = {1.0: lambda d: abs(d - 1).max() < 0.3, 3.0: lambda d: d[5] > 2, 0.3: lambda d: d[0] > 2}
    for spread, check in checks.items():
        ax = plot_calibration(gaussian(spread), "pit")
        (steps,) = (patch for patch in ax.patches if patch.get_gid())
        density = steps.get_data().values
        assert density.mean() == pytest.approx(1.0)
        assert check(density)


def test_reliability_is_a_diagonal_or_the_error_says_so():
    (points,) = (line for line in plot_calibration(categorical(1.0)).lines if line.get_gid())
    confidence, right = points.get_data()
    assert (abs(confidence - right) < 4.5 * np.sqrt(confidence * (1 - confidence) / 400)).all()
    ax = plot_calibration(categorical(3.0), label="sharp")
    text = ax.get_legend().get_texts()[0].get_text()
    assert text.startswith("sharp: calibration error") and float(text.split()[-1]) > 0.08
    assert float(plot_calibration(categorical(1.0)).get_legend().get_texts()[0].get_text().split()[-1]) < 0.03


@pytest.mark.parametrize(
    ("predictions", "settings", "error", "message"),
    [
        (np.zeros(3), {}, TypeError, "predict"),
        (gaussian(1.0), {"kind": "roc"}, ValueError, "one of"),
        (gaussian(1.0), {"kind": "reliability"}, ValueError, "does not have classes: set kind='coverage' or 'pit"),
        (categorical(1.0), {"kind": "pit"}, ValueError, "has classes: set kind='reliability'"),
        (Predictions("y", replicates=np.zeros((3, 2))), {}, ValueError, "no observations"),
        (gaussian(1.0), {"bins": 0}, ValueError, "bins"),
    ],
)
def test_wrong_calls_say_what_to_write(predictions, settings, error, message):
    with pytest.raises(error, match=message):
        plot_calibration(predictions, **settings)
    assert not plt.get_fignums()
