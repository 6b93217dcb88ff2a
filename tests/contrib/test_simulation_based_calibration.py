"""Simulation-based calibration: what it draws and where it puts that, ranks of known posteriors, bands, errors."""

from jax import random
import jax.numpy as jnp
import numpy as np
import pytest

import numpyro
from numpyro.contrib.control_flow import scan
import numpyro.distributions as dist
from numpyro.infer import NUTS

from numpyro_repulsion import SGLD, SVGD, Independent, Rows, minibatch
from numpyro_repulsion.contrib import Calibration, calibrate
from numpyro_repulsion.contrib.calibration import _Simulated, simultaneous_band
from numpyro_repulsion.dynamics import Overdamped

X = np.linspace(-1.0, 1.0, 40)
Y = np.arange(40.0)


def regression(x, y):
    slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 0.3))
    with numpyro.plate("rows", len(y), subsample_size=10) as i:
        numpyro.sample("y", dist.Normal(slope * x[i], scale), obs=y[i])


def of_all_rows(x, y):
    slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Normal(slope * x, 1.0), obs=y)


@pytest.mark.parametrize("model", [regression, of_all_rows, minibatch(of_all_rows, 10)])
def test_data_of_all_rows_take_the_place_of_the_observations(model):
    simulated = _Simulated(model, (X,), {"y": Y})
    truth, data = simulated.drawn(random.key(3))
    assert data[0] is X and data[1].shape == (40,) and data[1].dtype == Y.dtype
    np.testing.assert_array_equal(truth["y"], data[1].astype(np.float32))
    residuals = truth["y"] - truth["slope"] * X
    assert abs(np.std(residuals) / truth.get("scale", 1.0) - 1.0) < 0.4
    other, _ = simulated.drawn(random.key(4))
    assert other["slope"] != truth["slope"]
    seen = numpyro.handlers.trace(numpyro.handlers.seed(simulated, random.key(0))).get_trace(data)
    assert np.isin(seen["y"]["value"], truth["y"]).all()


def drawn(model, *args, seed=0, **kwargs):
    simulated = _Simulated(model, args, kwargs)
    truth, arrays = simulated.drawn(random.key(seed))
    return truth, [arrays[place] for place in sorted(arrays)]


def counted(y):
    numpyro.sample("y", dist.Poisson(numpyro.sample("rate", dist.Gamma(200.0, 1.0))), obs=y)


def test_sites_without_a_plate_draw_as_many_observations_of_their_type():
    _, (counts,) = drawn(counted, np.arange(50))
    assert counts.shape == (50,) and counts.dtype == np.arange(5).dtype and counts.std() > 5
    with pytest.raises(ValueError, match="int8 is too narrow"):
        drawn(counted, np.arange(50, dtype=np.int8))
    # Whole numbers as observations of a continuous site do not round what is drawn.
    _, (_, y) = drawn(of_all_rows, X, np.arange(40))
    assert y.dtype.kind == "f" and (y != np.round(y)).all()


def test_missing_observations_stay_missing_and_the_rest_is_as_it_was():
    def masked(x, y, names):
        slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
        numpyro.deterministic("residual", y - slope * x)
        with numpyro.handlers.mask(mask=~jnp.isnan(y)):
            numpyro.sample("y", dist.Normal(slope * x, 1.0), obs=y)

    given = np.where(Y < 3, np.nan, Y)
    truth, (x, y) = drawn(masked, X, given, ["a"])
    assert x is X and np.isnan(y[:3]).all() and np.isfinite(y[3:]).all() and (y[3:] != given[3:]).all()
    assert set(truth) == {"slope", "y"}


def test_posteriors_are_drawn_for_each_data_set():
    found = calibrate(
        SGLD(regression), X, Y, num_datasets=3, num_warmup=100, num_samples=100, num_chains=8, progress_bar=False
    )
    assert found.ranks["slope"].shape == (3,) and "y" not in found.ranks and found.errors == [[], [], []]
    # Posteriors of standard deviation 0.26 around the true values: of unchanged data, all ranks would be near 0.
    assert 0.0 < found.ranks["slope"].min() < found.ranks["slope"].max() < 1.0
    assert repr(found).startswith("Calibration(3 data sets, 0 with errors, 2 parameters")


def test_constants_have_uniform_ranks():
    def with_constants(y):
        slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
        numpyro.deterministic("both", jnp.stack([jnp.zeros(()), slope]))
        numpyro.sample("y", dist.Normal(slope, 1.0), obs=y)

    kernel = SGLD(with_constants, step_size=0.01)
    ranks = calibrate(kernel, Y, num_datasets=3, num_warmup=0, num_samples=20, num_chains=4, progress_bar=False).ranks
    np.testing.assert_allclose(ranks["both"][:, 1], ranks["slope"])
    assert len(np.unique(ranks["both"][:, 0])) == 3 and (ranks["both"][:, 0] > 0).all()


def lagged(y):
    slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
    numpyro.sample("y", dist.Normal(slope * jnp.roll(y, 1), 1.0), obs=y)


def with_a_factor(y):
    slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
    numpyro.factor("likelihood", -((y - slope) ** 2).sum())


def improper(y):
    slope = numpyro.sample("slope", dist.ImproperUniform(dist.constraints.real, (), ()))
    numpyro.sample("y", dist.Normal(slope, 1.0), obs=y)


def transformed(y):
    numpyro.sample("y", dist.Normal(numpyro.sample("slope", dist.Normal(0.0, 1.0)), 1.0), obs=jnp.log1p(y))


def wide(y):
    numpyro.sample("y", dist.LogNormal(1000.0 + numpyro.sample("shift", dist.Normal(0.0, 1.0)), 1.0), obs=y)


def chain(y):
    slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))

    def step(carry, y):
        return numpyro.sample("y", dist.Normal(slope * carry, 1.0), obs=y), None

    scan(step, 0.0, y)


def with_a_mask_of_observations(y):
    slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
    with numpyro.handlers.mask(mask=y > 5.0):
        numpyro.sample("y", dist.Normal(slope, 1.0), obs=y)


def censored(y):
    slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
    numpyro.sample("y", dist.RightCensoredDistribution(dist.Normal(slope, 1.0), y > 20.0), obs=y)


def with_a_number_of_levels(y):
    levels = numpyro.sample("levels", dist.Normal(0.0, 1.0).expand([int(y.max())]))
    numpyro.sample("y", dist.Normal(levels[0], 1.0), obs=y)


def with_a_param(y):
    numpyro.sample("y", dist.Normal(numpyro.sample("slope", dist.Normal(numpyro.param("center", 0.0), 1.0))), obs=y)


def twice(y):
    slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
    numpyro.sample("y", dist.Normal(slope, 1.0), obs=y)
    numpyro.sample("again", dist.Normal(slope, 2.0), obs=y)


def without_observations(y):
    numpyro.sample("slope", dist.Normal(y.mean(), 1.0))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lagged, r"\['y'\] depend on the observations themselves"),
        (with_a_factor, r"factor, the sites \['likelihood'\]"),
        (improper, "improper prior"),
        (transformed, "none of the arguments equal them"),
        (wide, "'y' drawn from the prior are not finite"),
        (chain, r"\['y'\] depend on the observations themselves"),
        (with_a_mask_of_observations, r"\['y'\] depend on the observations themselves"),
        (censored, r"without censoring, at the sites \['y'\]"),
        (with_a_number_of_levels, "from the values of its arrays outside of JAX"),
        (with_a_param, r"Fix the parameters \['center'\]"),
        (twice, r"an argument of its own; the model observes \['y', 'again'\]"),
        (without_observations, "an argument of its own"),
    ],
)
def test_models_without_data_to_draw_are_refused(model, message):
    with pytest.raises(ValueError, match=message):
        calibrate(SGLD(model), 1.0 + Y)


def test_two_arguments_with_the_same_values_are_refused():
    with pytest.raises(ValueError, match="2 of the arguments equal them"):
        calibrate(SGLD(of_all_rows), Y, Y)


def test_other_kernels_and_settings_are_refused():
    with pytest.raises(TypeError, match="a kernel of this package"):
        calibrate(NUTS(regression), X, Y)
    with pytest.raises(ValueError, match="made from a `potential_fn` has no model"):
        calibrate(SGLD(potential_fn=lambda z: z["x"] ** 2), X, Y)
    with pytest.raises(ValueError, match="SVGD optimizes"):
        calibrate(SVGD(regression), X, Y)
    with pytest.raises(ValueError, match="in place of Rows"):
        calibrate(SGLD(regression), Rows(X), Y)
    with pytest.raises((TypeError, ValueError), match="`num_datasets` must be"):
        calibrate(SGLD(regression), X, Y, num_datasets=0)


def test_errors_name_the_data_set():
    with pytest.raises(ValueError) as caught:
        calibrate(SGLD(regression), X, Y, num_warmup=0, progress_bar=False)
    assert caught.value.__notes__ == ["This is data set 0, of the key random.fold_in(rng_key, 0)."]


@pytest.mark.parametrize("number", [30, 300])
def test_bands_hold_uniform_ranks_as_often_as_they_say(number):
    at = np.linspace(0.01, 0.99, 99)
    low, high = simultaneous_band(number, at, 0.9)
    ranks = np.random.default_rng(1).uniform(size=(4000, number))
    share = np.stack([(ranks <= x).mean(1) for x in at], 1)
    held = ((low <= share) & (share <= high)).all(1).mean()
    # Shares are discrete: a band holds at least what it says.
    assert 0.9 - 4 * np.sqrt(0.09 / 4000) < held < 0.95
    # Where simulations are too few it is that of Bonferroni, which is wider.
    bounds = [simultaneous_band(number, at, prob) for prob in (0.99, 0.9999, 1 - 1e-6)]
    widths = [(high - low).sum() for low, high in bounds]
    assert (high - low).sum() < widths[0] < widths[1] < widths[2]


def calibration(exponent):
    """Ranks of 200 data sets; an exponent other than 1 shifts them."""
    return Calibration({"a": np.random.default_rng(0).uniform(size=(200, 2, 3)) ** exponent}, [[]] * 200)


@pytest.mark.parametrize(("exponent", "is_calibrated"), [(1.0, True), (1.6, False)])
def test_what_ranks_tell(exponent, is_calibrated):
    plt = pytest.importorskip("matplotlib.pyplot")
    found = calibration(exponent)
    error = np.sqrt(0.9 * 0.1 / 200)
    assert found.coverage(0.9)["a"].shape == found.p_values()["a"].shape == (2, 3)
    assert (np.abs(found.coverage(0.9)["a"] - 0.9) < 4 * error).all() == is_calibrated
    assert (found.p_values()["a"].min() > 0.01 / 6) == is_calibrated
    ax = found.plot()
    assert (ax.get_legend() is None) == is_calibrated
    assert found.plot(ax=ax) is ax
    plt.close("all")


@pytest.mark.slow
@pytest.mark.parametrize("step_size", ["auto", 0.08])
def test_runs_with_too_long_a_step_are_found_out(step_size):
    """With 40 rows the precision is 14.7, so that this step widens a variance 1 / (1 - 0.08 * 14.7 / 2) = 2.4 times."""
    kernel = SGLD(of_all_rows, step_size=step_size, interaction=Independent(), dynamics=Overdamped("euler"))
    found = calibrate(kernel, X, Y, num_datasets=100, num_warmup=100, num_samples=200, progress_bar=False)
    covered = np.sqrt(0.5 * 0.5 / 100)
    assert (abs(found.coverage(0.5)["slope"] - 0.5) < 3 * covered) == (step_size == "auto"), found.coverage(0.5)
    assert sum(map(bool, found.errors)) == (0 if step_size == "auto" else 100)
    assert found.p_values()["slope"] > 0.001 or step_size != "auto", repr(found)
