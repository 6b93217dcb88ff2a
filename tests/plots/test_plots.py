"""The data that plots show, and not only that something is drawn."""

from functools import partial
from statistics import NormalDist
import sys

from jax import random
import jax.numpy as jnp
from models import vectorized
import numpy as np
import pytest
from results import run

import numpyro
import numpyro.distributions as dist
from numpyro.infer import NUTS

from numpyro_repulsion import RBF, SGLDR, SVGD, Balanced, ensemble_mcse, to_inference_data
from numpyro_repulsion.plots import animate_particles, plot_particles, plot_running_estimates
from numpyro_repulsion.plots.draws import COLORS

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")
from matplotlib.collections import LineCollection, PathCollection  # noqa: E402
from matplotlib.colors import to_rgba  # noqa: E402
import matplotlib.pyplot as plt  # noqa: E402

DRAWS = np.asarray(random.normal(random.key(0), (6, 30, 2))).cumsum(1)
THREE = {"a": np.zeros((6, 5, 3))}


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


def model():
    numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("feature", 3):
        numpyro.sample("beta", dist.Normal(0, jnp.array([1.0, 10.0, 100.0])))


@pytest.fixture(scope="module")
def mcmc():
    return run(SGLDR(model, step_size=0.1, num_ensembles=2), num_samples=12, thinning=2)


@pytest.fixture(scope="module")
def data(mcmc):
    return to_inference_data(mcmc, coords={"feature": ["small", "medium", "large, with a comma"]})


@pytest.fixture(scope="module")
def svgd():
    return run(SVGD(potential_fn=lambda z: z @ z / 2, step_size=0.1), num_samples=12)


def dots(ax):
    """The points of each scatter that is no ring, in the order drawn."""
    found = [x for x in ax.collections if isinstance(x, PathCollection) and x.get_zorder() == 3]
    return [np.asarray(x.get_offsets()) for x in found], [tuple(x.get_facecolors()[0][:3]) for x in found]


def trails(ax):
    return [np.asarray(x.get_segments()) for x in ax.collections if isinstance(x, LineCollection)]


def rgb(*colors):
    return [to_rgba(color)[:3] for color in colors]


# Particles


def test_the_last_cloud():
    ax = plot_particles(DRAWS)
    (points,), colors = dots(ax)
    np.testing.assert_array_equal(points, DRAWS[:, -1])
    assert colors == rgb(COLORS[0])
    assert (ax.get_xlabel(), ax.get_ylabel(), ax.get_aspect()) == ("z[0]", "z[1]", 1.0)
    assert not trails(ax) and ax.get_legend() is None
    inside = np.array([ax.get_xlim(), ax.get_ylim()])
    assert (inside[:, 0] < points.min(0)).all() and (points.max(0) < inside[:, 1]).all()
    assert np.ptp(inside[0]) == pytest.approx(np.ptp(inside[1]))


def test_trajectories_by_ensemble():
    ax = plot_particles(DRAWS, trajectories=True, num_ensembles=3)
    points, colors = dots(ax)
    assert colors == rgb(*COLORS[:3])
    lines = trails(ax)
    assert [line.shape for line in lines] == [(2, 30, 2)] * 3
    np.testing.assert_array_equal(np.concatenate(lines), DRAWS)
    np.testing.assert_array_equal(np.concatenate(points), DRAWS[:, -1])
    rings = [x for x in ax.collections if isinstance(x, PathCollection) and x.get_zorder() == 2]
    np.testing.assert_array_equal(np.concatenate([x.get_offsets() for x in rings]), DRAWS[:, 0])
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["ensemble 0", "ensemble 1", "ensemble 2"]
    assert [tuple(x.get_edgecolors()[0][:3]) for x in rings] == rgb(*COLORS[:3])
    assert dots(plot_particles(DRAWS, num_ensembles=2, colors=("C0", "C1")))[1] == rgb("C0", "C1")
    # Many have a scale of colors.
    ax = plot_particles(np.concatenate([DRAWS, DRAWS]), num_ensembles=12)
    assert len(set(dots(ax)[1])) == 12 and ax.get_legend() is None


@pytest.mark.parametrize(
    ("iterations", "expected"),
    [
        (3, [3]),
        (-2, [28]),
        (slice(5, 20, 5), [5, 10, 15]),
        ((4, 2), [4, 2]),
        (range(3), [0, 1, 2]),
        (np.arange(30) > 27, [28, 29]),
    ],
)
def test_iterations(iterations, expected):
    ax = plot_particles(DRAWS, iterations=iterations)
    np.testing.assert_array_equal(dots(ax)[0][0], DRAWS[:, expected].reshape(-1, 2))


def test_axes_are_reused():
    figure, (left, right) = plt.subplots(1, 2)
    assert plot_particles(DRAWS, limits=(-3, 3), ax=right, color="k", s=7, label="here") is right
    assert not left.has_data() and plt.get_fignums() == [figure.number]
    assert right.get_xlim() == (-3, 3) and right.get_ylim() == (-3, 3)
    (scatter,) = right.collections
    assert scatter.get_sizes() == [7] and scatter.get_label() == "here" and dots(right)[1] == rgb("k")
    # What is already framed stays so.
    plot_particles(100 + DRAWS, ax=right)
    assert right.get_xlim() == (-3, 3)
    plot_particles(DRAWS, limits=((-1, 2), (-3, 4)), ax=left)
    assert left.get_xlim() == (-1, 2) and left.get_ylim() == (-3, 4)


def test_runs_and_their_inference_data_are_drawn_alike(mcmc, data):
    samples = mcmc.get_samples(group_by_chain=True)
    expected = np.stack((samples["mu"], samples["beta"][..., 2]), -1)
    for source, name in ((mcmc, "beta[2]"), (samples, "beta[2]"), (data, "beta[large, with a comma]")):
        ax = plot_particles(source, pair=("mu", name), trajectories=True)
        np.testing.assert_array_equal(np.concatenate(trails(ax)), expected)
        assert ax.get_xlabel() == "mu" and ax.get_ylabel() == name
        # Another variable may be of another size altogether.
        assert ax.get_aspect() == "auto"
        assert len(dots(ax)[0]) == (1 if source is samples else 2)
    ax = plot_particles({"beta": samples["beta"]}, pair=(2, -3))
    np.testing.assert_array_equal(dots(ax)[0][0], samples["beta"][:, -1, [2, 0]])
    assert ax.get_xlabel() == "beta[2]"


def test_an_optimizer_has_a_path_and_its_data_the_last_cloud(svgd):
    path = np.asarray(svgd.get_samples(group_by_chain=True))
    np.testing.assert_array_equal(trails(plot_particles(svgd, trajectories=True))[0], path)
    data = to_inference_data(svgd)
    np.testing.assert_array_equal(dots(plot_particles(data))[0][0], path[:, -1])
    for source in (svgd, data):
        with pytest.raises(ValueError, match="path of an optimizer"):
            plot_running_estimates(source, 0)


@pytest.mark.slow
def test_chains_of_other_kernels_are_ensembles():
    mcmc = vectorized(NUTS(lambda: numpyro.sample("z", dist.Normal(jnp.zeros(2), 1).to_event(1))), 5, 5, 3)
    mcmc.run(random.key(0))
    assert len(dots(plot_particles(mcmc))[0]) == 3


def contours(ax):
    return [x for x in ax.collections if isinstance(x, matplotlib.contour.QuadContourSet)]


def test_contours_hold_their_shares():
    ax = plot_particles(DRAWS, lambda z: z @ z / 2, levels=(0.9, 0.5), limits=(-5, 5))
    areas, lines = contours(ax)
    assert areas.filled and not lines.filled
    for path, mass in zip(lines.get_paths(), (0.5, 0.9), strict=True):
        radius = np.linalg.norm(path.vertices, axis=1)
        # Of a Gaussian in the plane; a cell of the grid is 0.06 wide.
        np.testing.assert_allclose(radius, np.sqrt(-2 * np.log(1 - mass)), atol=0.02)


def test_contours_where_the_potential_is_infinite():
    ax = plot_particles(DRAWS, lambda z: jnp.where(z[0] > 0, z @ z / 2, jnp.inf), limits=(-4, 4))
    corners = np.concatenate([path.vertices for path in contours(ax)[1].get_paths()])
    assert corners[:, 0].min() > -0.05
    assert not contours(plot_particles(DRAWS, lambda z: 0.0 * z[0], limits=(-4, 4)))  # flat
    with pytest.raises(ValueError, match="nowhere finite"):
        plot_particles(DRAWS, lambda z: jnp.nan * z[0])


def test_particles_that_are_nowhere_do_not_frame_the_picture():
    draws = DRAWS.copy()
    draws[0] = np.nan
    ax = plot_particles(draws)
    assert ax.get_xlim() == plot_particles(DRAWS[1:]).get_xlim()
    with pytest.raises(ValueError, match="no particle has a finite position"):
        plot_particles(np.full((6, 3, 2), np.inf))


@pytest.mark.parametrize(
    ("draws", "options", "error", "message"),
    [
        (DRAWS[0, 0], {}, ValueError, r"shape \(particles, draws, ...\) and not empty; got \(2,\)"),
        (DRAWS[:, :0], {}, ValueError, r"not empty; got \(6, 0, 2\).*x\[:, None\]"),
        (DRAWS[:, -1], {}, ValueError, "have 1: name two"),
        (THREE["a"], {}, ValueError, r"have 3: name two by `pair`, of 'z\[0\]'.*by their numbers"),
        (THREE, {"pair": ("a[0]", "a[3]")}, ValueError, r"no coordinate 'a\[3\]'; name one, such as 'a\[0\]'"),
        ({"a": DRAWS, "b": DRAWS}, {"pair": (0, 1)}, ValueError, "several variables"),
        ({"a": DRAWS, "b": DRAWS[:4]}, {}, ValueError, "same number of particles and of draws"),
        ({}, {}, ValueError, "no variables"),
        ("run", {}, TypeError, "an array .*got str"),
        (DRAWS, {"pair": (0, 2)}, ValueError, "no coordinate 2: the draws have 2"),
        (DRAWS, {"pair": "z"}, ValueError, "`pair` must be two"),
        (DRAWS, {"pair": (0, 1.5)}, TypeError, "named by a label"),
        (DRAWS, {"iterations": 30}, ValueError, "draws 0 to 29; got 30"),
        (DRAWS, {"iterations": []}, ValueError, "choose at least one of 30 draws"),
        (DRAWS, {"iterations": 3, "trajectories": True}, ValueError, "two draws or more"),
        (DRAWS, {"num_ensembles": 4}, ValueError, "must divide the number of particles; got 4 for 6"),
        (DRAWS, {"limits": (0, np.inf)}, ValueError, "`limits` must be"),
        (DRAWS, {"potential": 3}, TypeError, "function of one point"),
        (DRAWS, {"potential": lambda z: z}, ValueError, "must return a scalar"),
        (DRAWS, {"potential": jnp.sum, "levels": (0.5, 1.0)}, ValueError, "shares of the mass"),
        (DRAWS, {"colors": ["red"] * 3}, ValueError, "one for each of 1 ensembles; got 3"),
        (DRAWS, {"ax": "axes"}, TypeError, "plt.subplots"),
    ],
)
def test_bad_input_is_refused(draws, options, error, message):
    with pytest.raises(error, match=message):
        plot_particles(draws, **options)
    assert not [number for number in plt.get_fignums() if plt.figure(number).axes[0].has_data()]


@pytest.mark.parametrize("draw", [plot_particles, animate_particles, plot_running_estimates])
def test_matplotlib_is_needed(draw, monkeypatch):
    for name in ("matplotlib", "matplotlib.pyplot"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match='extra "plots"'):
        draw(DRAWS)


# Animation


def test_animation(tmp_path):
    from PIL import Image

    animation = animate_particles(DRAWS, lambda z: z @ z / 2, iterations=slice(0, 8, 2), trail=2, num_ensembles=2)
    animation.save(tmp_path / "cloud.gif", writer="pillow", dpi=30)
    with Image.open(tmp_path / "cloud.gif") as image:
        assert image.n_frames == 4
    # As its last frame left them.
    (ax,) = plt.gcf().axes
    points, colors = dots(ax)
    assert colors == rgb(*COLORS[:2])
    np.testing.assert_array_equal(np.concatenate(points), DRAWS[:, 6])
    np.testing.assert_array_equal(np.concatenate(trails(ax)), DRAWS[:, 2:8:2])
    assert [text.get_text() for text in ax.texts] == ["draw 6"]
    inside = np.array([ax.get_xlim(), ax.get_ylim()])
    shown = DRAWS[:, 0:8:2]
    assert (inside[:, 0] < shown.min((0, 1))).all() and (shown.max((0, 1)) < inside[:, 1]).all()
    with pytest.raises(ValueError, match="0 or more"):
        animate_particles(DRAWS, trail=-1)
    with pytest.raises(ValueError, match="milliseconds"):
        animate_particles(DRAWS, interval=0)


# Running estimates


def band(ax, which=-1):
    """Below and above, of a band drawn by `fill_between`."""
    path = ax.collections[which].get_paths()[-1]  # the last where there are gaps
    vertices = path.vertices
    xs = np.unique(vertices[:, 0])
    sides = [vertices[vertices[:, 0] == x, 1] for x in xs]
    return xs, np.array([side.min() for side in sides]), np.array([side.max() for side in sides])


def test_repeats_have_a_median_and_a_band():
    repeats = np.asarray(random.normal(random.key(1), (7, 6, 20)))
    ax = plot_running_estimates(list(repeats), truth=0.5, prob=0.8, label="A")
    running = repeats.mean(1).cumsum(1) / np.arange(1, 21)
    line, truth = ax.lines
    np.testing.assert_array_equal(line.get_xdata(), np.arange(1, 21))
    np.testing.assert_allclose(line.get_ydata(), np.median(running, 0), atol=1e-6)
    assert set(truth.get_ydata()) == {0.5} and truth.get_color() == "black"
    xs, low, high = band(ax)
    np.testing.assert_array_equal(xs, np.arange(1, 21))
    np.testing.assert_allclose(low, np.quantile(running, 0.1, 0), atol=1e-6)
    np.testing.assert_allclose(high, np.quantile(running, 0.9, 0), atol=1e-6)
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("iteration", "running mean of z")
    # A second kernel beside the first gets a color of its own, and the truth stays one.
    assert plot_running_estimates(list(repeats + 1), truth=0.5, label="B", ax=ax) is ax
    assert [line.get_color() for line in ax.lines] == [COLORS[0], "black", COLORS[1], "black"]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["A", "B", "truth"]
    assert len(plt.get_fignums()) == 1


def test_one_run_has_standard_errors():
    draws = np.asarray(random.normal(random.key(2), (8, 300)), float)
    draws[4:] = -0.9 * draws[:4]  # as if balanced within one ensemble
    ax = plot_running_estimates(draws, prob=0.9)
    xs, low, high = band(ax)
    # Before, nothing is known.
    assert 10 < xs[0] < 100 and xs[-1] == 300
    np.testing.assert_allclose(ax.lines[0].get_ydata(), draws.mean(0).cumsum() / np.arange(1, 301))
    half = NormalDist().inv_cdf(0.95) * ensemble_mcse(draws)
    assert high[-1] - low[-1] == pytest.approx(2 * half, rel=1e-6)
    # Two ensembles would add up, wrongly here.
    xs, low, high = band(plot_running_estimates(draws, num_ensembles=2))
    assert high[-1] - low[-1] == pytest.approx(2 * NormalDist().inv_cdf(0.95) * ensemble_mcse(draws, 2), rel=1e-6)
    assert high[-1] - low[-1] > 3 * half
    # Too few for an error.
    (short,) = plot_running_estimates(draws[:, :9]).collections
    assert not ax.get_legend() and not short.get_paths()


def test_functions_of_a_draw(mcmc, data):
    samples = mcmc.get_samples(group_by_chain=True)

    def total(draw):
        return draw["mu"] + draw["beta"].sum()

    expected = samples["mu"] + samples["beta"].sum(-1)
    for source in (mcmc, data, samples):
        ax = plot_running_estimates(source, total)
        np.testing.assert_allclose(ax.lines[0].get_ydata()[-1], expected.mean(), rtol=1e-4)
        # Every second iteration is kept, which a dictionary cannot say.
        assert ax.lines[0].get_xdata()[-1] == (6 if source is samples else 12)
        assert ax.get_ylabel() == "running mean of total"
    ax = plot_running_estimates(data, "beta[medium]")
    np.testing.assert_allclose(ax.lines[0].get_ydata()[-1], samples["beta"][..., 1].mean(), rtol=1e-4)
    ax = plot_running_estimates(DRAWS, lambda z: z[0] * z[1])
    np.testing.assert_allclose(ax.lines[0].get_ydata()[-1], DRAWS.prod(-1).mean(), rtol=1e-4)
    assert ax.get_ylabel() == "running mean"


def test_ensembles_that_are_balanced_are_one(pretended):
    kernel = partial(SGLDR, interaction=Balanced(RBF(1.0)), num_ensembles=2)
    mcmc = pretended(lambda: numpyro.sample("z", dist.Normal(0, 1)), kernel=kernel, num_samples=400)
    draws = mcmc._states["z"]["z"]
    mcmc._states["z"]["z"] = draws.at[2:].set(-0.9 * draws[:2])
    draws = np.asarray(mcmc.get_samples(group_by_chain=True)["z"], float)
    assert ensemble_mcse(draws) != pytest.approx(ensemble_mcse(draws, 2), rel=0.01)
    for source in (mcmc, to_inference_data(mcmc)):
        _, low, high = band(plot_running_estimates(source))
        assert high[-1] - low[-1] == pytest.approx(2 * NormalDist().inv_cdf(0.95) * ensemble_mcse(draws), rel=1e-4)


def test_times():
    for times in (60.0, np.linspace(2.0, 60.0, 30)):
        ax = plot_running_estimates(DRAWS, 0, times=times)
        np.testing.assert_allclose(ax.lines[0].get_xdata(), np.linspace(2.0, 60.0, 30))
        assert ax.get_xlabel() == "seconds" and ax.get_xlim() == (0, 60)


@pytest.mark.parametrize(
    ("runs", "options", "error", "message"),
    [
        (DRAWS, {}, ValueError, "2 coordinates: name one by `estimand`"),
        ([], {}, ValueError, "no runs"),
        ([DRAWS, DRAWS[:, :9]], {"estimand": 0}, ValueError, r"same number of iterations and draws; got \[30, 9\]"),
        (DRAWS, {"estimand": lambda z: z}, ValueError, "must return a scalar"),
        (DRAWS, {"estimand": 0, "prob": 90}, ValueError, "between 0 and 1; got 90"),
        (DRAWS, {"estimand": 0, "truth": "exact"}, ValueError, "finite number; got 'exact'"),
        (DRAWS, {"estimand": 0, "times": "now"}, ValueError, "`times` must be"),
        (DRAWS, {"estimand": 0, "times": np.ones(30)}, ValueError, "increasing"),
    ],
)
def test_bad_estimates_are_refused(runs, options, error, message):
    with pytest.raises(error, match=message):
        plot_running_estimates(runs, **options)
