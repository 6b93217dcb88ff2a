"""Conversion of runs to ArviZ, on whichever ArviZ is installed: these tests run on 0.23 and on 1.x."""

import importlib.metadata

import arviz
import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import pytest
from results import X, Y, logistic, made, run

import numpyro
import numpyro.distributions as dist

from numpyro_repulsion import RBF, SGLD, SGLDR, SVGD, predict, to_inference_data

NEW_ARVIZ = int(importlib.metadata.version("arviz").split(".")[0]) >= 1


@pytest.fixture(scope="module")
def mcmc(logistic_run):
    return logistic_run[0]


@pytest.fixture(scope="module")
def data(logistic_run):
    return logistic_run[1]


def groups(data):
    return {name.strip("/") for name in data.groups} - {""} if NEW_ARVIZ else set(data.groups())


def test_groups_have_chains_draws_and_plates(mcmc, data):
    assert type(data).__name__ == ("DataTree" if NEW_ARVIZ else "InferenceData")
    posterior, stats = data["posterior"], data["sample_stats"]
    dims = {name: posterior[name].dims for name in posterior.data_vars}
    assert dims == {
        "beta": ("chain", "draw", "features"),
        "total": ("chain", "draw"),
        "scale": ("chain", "draw", "scale_dim_0"),
        "logits": ("chain", "draw", "rows"),
    }
    assert dict(posterior.sizes) == {"chain": 6, "draw": 20, "features": 3, "scale_dim_0": 2, "rows": 40}
    samples, fields = mcmc.get_samples(group_by_chain=True), mcmc.get_extra_fields(group_by_chain=True)
    for name in samples:
        np.testing.assert_array_equal(posterior[name].values, samples[name])
    # Of the fields that the run was asked for, those that are arrays.
    assert set(stats.data_vars) == {"lp", "step_size", "bandwidth", "diverging", "gradient", "z.beta"}
    assert stats["gradient"].shape == (6, 20, 5) and stats["z.beta"].shape == (6, 20, 3)
    np.testing.assert_array_equal(stats["lp"].values, -fields["potential_energy"])
    np.testing.assert_allclose(stats["step_size"].values, 1e-3)
    assert stats["diverging"].dtype == bool and not stats["diverging"].values.any()
    np.testing.assert_array_equal(data["observed_data"]["y"].values, Y)
    assert data["observed_data"]["y"].dims == ("rows",)


def test_deterministic_sites_are_computed_over_all_rows(mcmc, data):
    assert "logits" not in mcmc.get_samples()
    samples = mcmc.get_samples(group_by_chain=True)
    expected = jnp.einsum("ij,cdj->cdi", X, samples["beta"]) * samples["scale"][..., :1]
    np.testing.assert_allclose(data["posterior"]["logits"].values, expected, rtol=1e-4, atol=1e-5)
    without = to_inference_data(mcmc, deterministic=False)["posterior"]
    assert "logits" not in without.data_vars and "total" in without.data_vars


def test_observed_data_is_left_out_aloud_where_a_model_insists_on_its_rows(pretended):
    def stubborn(y):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with numpyro.plate("rows", 40, subsample_size=8) as i:
            numpyro.sample("y", dist.Normal(mu + jnp.zeros(8), 1), obs=y[i])

    mcmc = pretended(stubborn, X[:, 0])
    with pytest.warns(UserWarning, match="observed_data is left out.*all rows of \\['rows'\\]"):
        data = to_inference_data(mcmc)
    assert data["posterior"]["mu"].shape == (4, 6)
    with pytest.raises(ValueError, match="log_likelihood cannot be computed: the model fails.*all rows of"):
        to_inference_data(mcmc, log_likelihood=True)


def test_attributes_and_coordinates_name_the_algorithm_and_the_ensembles(data):
    attributes = data["posterior"].attrs
    assert attributes["algorithm"] == "SGLDR"
    assert attributes["interaction"] == repr(RBF())
    assert attributes["gradient"] == "ControlVariates(shared=False, block_size=1, order=None)"
    assert attributes["minibatches"] == "8 of 40 rows"
    assert attributes["step_size"] == pytest.approx(1e-3)
    assert attributes["num_steps"] == 10
    assert list(attributes["ensemble"]) == [0, 0, 0, 1, 1, 1]
    for group in ("posterior", "sample_stats"):
        assert list(data[group].coords["ensemble"].values) == [0, 0, 0, 1, 1, 1]
    assert data["posterior"]["beta"].groupby("ensemble").mean(...).shape == (2,)


def test_arviz_reads_and_stores_it(data, tmp_path):
    assert any("hat" in name for name in arviz.summary(data, var_names=["beta"]).columns)
    pytest.importorskip("h5py")
    path = tmp_path / "posterior.nc"
    if NEW_ARVIZ:
        import xarray

        data.to_netcdf(path, engine="h5netcdf")
        again = xarray.open_datatree(path, engine="h5netcdf")
    else:
        data.to_netcdf(str(path), engine="h5netcdf")
        again = arviz.from_netcdf(str(path), engine="h5netcdf")
    np.testing.assert_array_equal(again["posterior"]["beta"].values, data["posterior"]["beta"].values)
    assert list(again["posterior"].attrs["ensemble"]) == [0, 0, 0, 1, 1, 1]


def test_coords_and_dims(mcmc):
    data = to_inference_data(mcmc, coords={"features": ["a", "b", "c"], "part": [1, 2]}, dims={"scale": ["part"]})
    assert data["posterior"]["beta"].sel(features="b").shape == (6, 20)
    assert data["posterior"]["scale"].dims == ("chain", "draw", "part")
    # Results may be written to.
    data["sample_stats"]["diverging"].values[0, 3] = True
    assert data["sample_stats"]["diverging"].values.sum() == 1
    for given, message in (
        ({"coords": {"features": ["a", "b"]}}, r"coords\['features'\] must have 3 values, one for each entry; got 2"),
        ({"dims": {"scale": ["a", "b"]}}, r"`dims\['scale'\]` must have at most 1 names, .*; got \['a', 'b'\]"),
        ({"dims": {"scale": ["features"]}}, "Dimension 'features' has size 3, and would have 2 for 'scale'"),
    ):
        with pytest.raises(ValueError, match=message):
            to_inference_data(mcmc, **given)


def fields(mcmc):
    return {"posterior": mcmc.get_samples(group_by_chain=True), "sample_stats": mcmc.get_extra_fields(True)}


@pytest.mark.slow
def test_warmup():
    def model():
        numpyro.sample("x", dist.Normal(0, 1))

    mcmc = made(SGLDR(model, step_size=0.01), num_warmup=7, num_samples=9, num_chains=4)
    mcmc.warmup(random.key(0), collect_warmup=True)
    kept = fields(mcmc)
    with pytest.raises(ValueError, match="draws of warmup; ask for \\['prior'\\] after mcmc.run"):
        to_inference_data(mcmc, prior=random.key(0))
    warmup = to_inference_data(mcmc)
    assert groups(warmup) == {"warmup_posterior", "warmup_sample_stats"}
    with pytest.raises(ValueError, match="must come from this run, with 6 chains"):
        to_inference_data(run(SGLD(model, step_size=0.1)), warmup=warmup)
    mcmc.run(random.key(1))
    assert groups(to_inference_data(mcmc)) == {"posterior", "sample_stats"}
    data = to_inference_data(mcmc, warmup=warmup)
    np.testing.assert_array_equal(data["warmup_posterior"]["x"].values, kept["posterior"]["x"])
    np.testing.assert_array_equal(data["warmup_sample_stats"]["lp"].values, -kept["sample_stats"]["potential_energy"])
    np.testing.assert_array_equal(data["posterior"]["x"].values, fields(mcmc)["posterior"]["x"])
    assert data["warmup_posterior"].sizes["draw"] == 7 and data["posterior"].sizes["draw"] == 9
    # A run that carries on where another stopped has draws, not warmup.
    mcmc.post_warmup_state = mcmc.last_state
    assert "posterior" in groups(to_inference_data(mcmc))
    for other in (to_inference_data(mcmc), 3, {}):
        with pytest.raises(ValueError, match="`warmup` is what to_inference_data.*collect_warmup=True"):
            to_inference_data(mcmc, warmup=other)


def test_axes_and_kinds_of_observations(pretended):
    def model():
        x = numpyro.sample("x", dist.Normal(0, 1))
        numpyro.sample("nothing", dist.Normal(0, 1).expand([0]).to_event(1))
        with numpyro.plate("left", 2, dim=-3), numpyro.plate("right", 3, dim=-1):
            numpyro.sample("gap", dist.Normal(x, 1), obs=jnp.zeros((2, 1, 3)))
            simplex = numpyro.sample("simplex", dist.Dirichlet(jnp.ones(4)), infer={"event_dims": ["part"]})
            numpyro.deterministic("first", simplex[..., 0])
            numpyro.deterministic("behind", jnp.zeros((5, 2, 1, 3)))
            numpyro.deterministic("unlike", x)
            numpyro.sample("flag", dist.Bernoulli(0.5), obs=jnp.zeros((2, 1, 3), bool))
            numpyro.sample("count", dist.Poisson(1.0), obs=jnp.ones((2, 1, 3), jnp.int32))
        numpyro.sample("scalar", dist.Normal(x, 1), obs=1.0)

    data = to_inference_data(pretended(model), log_likelihood=True, posterior_predictive=random.key(0))
    gap, posterior = ("left", "gap_dim_1", "right"), data["posterior"]
    assert posterior["x"].dims == ("chain", "draw") and posterior["unlike"].dims == ("chain", "draw")
    assert posterior["nothing"].shape == (4, 6, 0)
    assert posterior["simplex"].dims == ("chain", "draw", "left", "simplex_dim_1", "right", "part")
    assert posterior["first"].dims == ("chain", "draw", "left", "first_dim_1", "right")
    assert posterior["behind"].dims == ("chain", "draw", "behind_dim_0", "left", "behind_dim_2", "right")
    observed = data["observed_data"]
    assert observed["gap"].dims == gap and observed["scalar"].dims == () and observed["flag"].dtype == bool
    assert observed["count"].dtype.kind == "i"
    for group in ("log_likelihood", "posterior_predictive"):
        assert data[group]["gap"].dims == ("chain", "draw", *gap) and data[group]["scalar"].dims == ("chain", "draw")
    assert data["posterior_predictive"]["count"].dtype.kind == "i"


def test_names_that_collide_are_told_apart_aloud(pretended):
    def model():
        for name in ("a.b", "a/b", "chain", "x_plate"):
            numpyro.sample(name, dist.Normal(0, 1))
        with numpyro.plate("a.b_", 2), numpyro.plate("draw", 3):
            numpyro.sample("y", dist.Normal(0, 1))
        with numpyro.handlers.scope(prefix="group"), numpyro.plate("plate", 2):
            numpyro.sample("x", dist.Normal(0, 1))

    mcmc = pretended(model)
    with pytest.warns(UserWarning) as warned:
        data = to_inference_data(mcmc, dims={"a/b": []}, coords={"draw": ["x", "y", "z"]})
    assert {str(warning.message) for warning in warned} == {
        "'a/b' is called 'a.b__' here, because 'a.b' is taken.",
        "'chain' is called 'chain_' here, because 'chain' is taken.",
        "'draw' is called 'draw_' here, because 'draw' is taken.",
    }
    samples = mcmc.get_samples(group_by_chain=True)
    for name, safe in {"a.b": "a.b", "a/b": "a.b__", "chain": "chain_", "y": "y"}.items():
        np.testing.assert_array_equal(data["posterior"][safe].values, samples[name])
    assert data["posterior"]["y"].dims == ("chain", "draw", "draw_", "a.b_")
    assert data["posterior"]["group.x"].dims == ("chain", "draw", "group.plate")
    assert list(data["posterior"].coords["draw_"].values) == ["x", "y", "z"]


def test_potential_fn():
    def energy(z):
        return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(z))

    start = {"a": jnp.arange(6.0), "b": [jnp.ones((6, 2))]}
    mcmc = run(SGLD(potential_fn=energy, step_size=0.01), num_warmup=5, num_samples=9, init_params=start)
    data = to_inference_data(mcmc)
    assert set(data["posterior"].data_vars) == {"z[a]", "z[b][0]"} and "observed_data" not in groups(data)
    with pytest.raises(ValueError, match="has no model to compute \\['log_likelihood'\\]"):
        to_inference_data(mcmc, log_likelihood=True)
    with pytest.raises(ValueError, match="made from a `potential_fn` has no model to predict from"):
        predict(mcmc)


def test_an_optimizer_leaves_its_last_cloud(pretended):
    mcmc = pretended(logistic, X, Y, kernel=SVGD)
    cloud = to_inference_data(mcmc)["posterior"]["beta"].values
    np.testing.assert_array_equal(cloud, mcmc.get_samples(group_by_chain=True)["beta"][None, :, -1])
