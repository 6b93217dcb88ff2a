"""Starts at draws of a guide or an earlier run, and around given values."""

import pickle
import warnings

import arviz
from jax import random
import jax.numpy as jnp
import numpy as np
import pytest
import xarray

import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS, SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoDelta, AutoMultivariateNormal, AutoNormal

from numpyro_repulsion import SGLDR, init_around, init_from_guide, init_from_idata, to_inference_data
from numpyro_repulsion.starts import JointStrategy

Y = np.random.default_rng(0).normal(3.0, 2.0, 100).astype(np.float32)


def model(y):
    mu = numpyro.sample("mu", dist.Normal(0, 10))
    sigma = numpyro.sample("sigma", dist.HalfNormal(5))
    weights = numpyro.sample("weights", dist.Dirichlet(jnp.ones(3)))
    numpyro.sample("y", dist.Normal(mu + 0 * weights.sum(), sigma), obs=y)


def starts(strategy, size=20, model=model):
    kernel = SGLDR(model, step_size=0.1, init_strategy=strategy)
    state = kernel.start(random.split(random.key(0), size), 0, None, (Y,), {})
    return {name: np.asarray(x) for name, x in state.z.items()}


@pytest.fixture(scope="module")
def fitted():
    guide = AutoMultivariateNormal(model)
    found = SVI(model, guide, numpyro.optim.Adam(0.05), Trace_ELBO()).run(random.key(1), 300, Y, progress_bar=False)
    return guide, found.params


def test_starts_are_draws_of_the_guide(fitted):
    guide, params = fitted
    z = starts(init_from_guide(guide, params), 200)
    draws = guide.sample_posterior(random.key(2), params, sample_shape=(4000,))
    error = 4.5 * draws["mu"].std() * (1 / 200 + 1 / 4000) ** 0.5
    assert abs(z["mu"].mean() - draws["mu"].mean()) < error
    assert abs(z["mu"].std() / draws["mu"].std() - 1) < 4.5 * (1 / 400) ** 0.5
    assert len(np.unique(z["mu"])) == 200


def network():
    for name in ("net/w", "net.w", "net/Dense_0.bias"):
        numpyro.sample(name, dist.Normal(0, 1).expand([2]).to_event(1))


@pytest.fixture
def of_network(pretended):
    mcmc = pretended(network)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of two names that differ by "/" only
        return mcmc.get_samples(group_by_chain=True), to_inference_data(mcmc)


def test_names_with_a_slash_are_known_again(of_network, tmp_path):
    """From a file, and where another site has the name that is left: "net/w" beside "net.w"."""
    draws, data = of_network
    data.to_netcdf(tmp_path / "data.nc")
    data = arviz.from_netcdf(tmp_path / "data.nc")
    values = init_from_idata(data).draw(None, 3)
    for name, x in draws.items():
        each = np.asarray(x).reshape(24, 2)
        assert (each == np.asarray(values[name])).all(1).sum() == 1
    kernel = SGLDR(network, step_size=0.1, init_strategy=init_from_idata(data))
    state = kernel.start(random.split(random.key(0), 4), 0, None, (), {})
    assert len(np.unique(state.z["net/w"], axis=0)) == 4


def test_dots_for_slashes_in_data_of_others(of_network):
    draws = {name.replace("/", "."): x for name, x in of_network[0].items() if name != "net.w"}
    strategy = init_from_idata(
        {"posterior": xarray.Dataset({k: (("chain", "draw", "n"), x) for k, x in draws.items()})}
    )

    def others():
        for name in ("net/w", "net/Dense_0.bias"):
            numpyro.sample(name, dist.Normal(0, 1).expand([2]).to_event(1))

    kernel = SGLDR(others, step_size=0.1, init_strategy=strategy)
    state = kernel.start(random.split(random.key(0), 4), 0, None, (), {})
    each = np.asarray(draws["net.w"]).reshape(24, 2)
    assert all((each == z).all(1).any() for z in np.asarray(state.z["net/w"]))
    seeded = numpyro.handlers.seed(others, 0)
    found = numpyro.handlers.trace(numpyro.handlers.substitute(seeded, substitute_fn=strategy)).get_trace()
    assert (each == np.asarray(found["net/w"]["value"])).all(1).any()


def earlier():
    draws = {"mu": np.arange(60.0).reshape(2, 30), "sigma": np.ones((2, 30)), "weights": np.full((2, 30, 3), 1 / 3)}
    return xarray.Dataset({name: (["chain", "draw", "k"][: x.ndim], x) for name, x in draws.items()})


def test_variables_that_are_no_draws_are_left_out():
    extra = {"scalar": ((), 3.0), "of_chains": (("chain",), np.ones(2)), "of_rows": (("row",), np.ones(9))}
    data = earlier().assign(extra)
    z = starts(init_from_idata({"posterior": data.transpose("k", "draw", "chain", ...)}))
    assert len(np.unique(z["mu"])) == 20 and z["weights"].shape == (20, 2)
    with pytest.raises(ValueError, match="no draws, variables with the dimensions chain and draw"):
        init_from_idata({"posterior": data[list(extra)]})


def test_values_of_a_start_belong_together():
    def draw(key, number):
        mu = random.normal(key)
        return {"mu": mu, "sigma": jnp.exp(mu), "weights": jnp.full(3, 1 / 3)}

    z = starts(JointStrategy(draw))
    np.testing.assert_allclose(z["sigma"], z["mu"], rtol=1e-5, atol=1e-6)


def test_starts_are_around_values():
    z = starts(init_around({"mu": 3.0, "sigma": 2.0, "weights": jnp.array([0.2, 0.3, 0.5])}, scale=0.05), 400)
    for name, center in (("mu", 3.0), ("sigma", np.log(2.0))):
        assert abs(z[name].mean() - center) < 4.5 * 0.05 / 20
        assert abs(z[name].std() / 0.05 - 1) < 4.5 / 800**0.5
    assert z["weights"].std(0).max() < 0.08
    # Scalars serve all entries of a site, and sites without values start as by init_to_uniform.
    z = starts(init_around({"mu": 3.0}, scale=0.05))
    assert np.ptp(z["sigma"]) > 0.5


def test_other_kernels_take_them_and_their_draws_are_starts(fitted):
    kernel = NUTS(model, init_strategy=init_from_guide(*fitted))
    mcmc = MCMC(kernel, num_warmup=5, num_samples=20, progress_bar=False)
    mcmc.run(random.key(0), Y)
    z, draws = starts(init_from_idata(arviz.from_numpyro(mcmc))), np.asarray(mcmc.get_samples()["mu"])
    assert all(np.isclose(value, draws, rtol=1e-5).any() for value in z["mu"])


def test_what_cannot_work_is_refused(fitted):
    with pytest.raises(ValueError, match="particles must start apart.*init_around"):
        init_from_guide(AutoDelta(model), {})
    with pytest.raises(TypeError, match="must be an automatic guide"):
        init_from_guide(model, {})
    with pytest.raises(ValueError, match="a group 'posterior'"):
        init_from_idata({})
    with pytest.raises(ValueError, match="a positive, finite number"):
        init_around({}, scale=0.0)

    def other(y):
        numpyro.sample("other", dist.Normal(0, 1))
        model(y)

    with pytest.raises(ValueError, match="no values for the latent sites \\['other'\\]"):
        starts(init_from_guide(*fitted), model=other)


def test_strategies_can_be_pickled():
    for strategy in (init_around({"mu": 3.0}), init_from_idata({"posterior": earlier()})):
        first = starts(strategy)
        again = starts(pickle.loads(pickle.dumps(strategy)))
        np.testing.assert_array_equal(first["mu"], again["mu"])


def test_guides_that_were_not_fitted_are_refused():
    for params in ({}, {"auto_loc": jnp.zeros(1)}):
        with pytest.raises(ValueError, match=r"gives no draws with these parameters.*result.params"):
            init_from_guide(AutoNormal(lambda: numpyro.sample("x", dist.Normal(0, 1))), params)
