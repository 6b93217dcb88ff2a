"""Predictions against those of NumPyro and of exact mixtures."""

from functools import partial

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import pytest
from results import run as ran

import numpyro
from numpyro.contrib.control_flow import scan
import numpyro.distributions as dist
from numpyro.infer import Predictive, log_likelihood

from numpyro_repulsion import SGLD, SVGD, FullData, predict
from numpyro_repulsion.predictions import Predictions

pytestmark = [
    pytest.mark.filterwarnings("ignore:num_warmup"),
]

X = jnp.linspace(-2.0, 2.0, 60)
NOISE = random.normal(random.key(0), (60,))
NEW = jnp.array([-3.0, 0.0, 1.0, 4.0])


def line(x, y=None):
    slope = numpyro.sample("slope", dist.Normal(0, 1))
    scale = numpyro.sample("scale", dist.HalfNormal(1))
    f = numpyro.deterministic("f", slope * x)
    with numpyro.plate("rows", len(x), subsample_size=min(len(x), 30)) as i:
        numpyro.sample("y", dist.Normal(f[i], scale), obs=None if y is None else y[i])


def classes(x, y=None):
    slope = numpyro.sample("slope", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Categorical(logits=x[:, None] * slope), obs=y)


run = partial(ran, num_samples=40, num_chains=5, num_warmup=100)


@pytest.fixture(scope="module")
def fitted():
    return run(SGLD(line), X, 0.8 * X + 0.5 * NOISE)


def test_moments_are_those_of_the_mixture(fitted):
    found = predict(fitted, NEW)
    draws = fitted.get_samples()
    means = np.asarray(draws["slope"], float)[:, None] * np.asarray(NEW, float)
    np.testing.assert_allclose(found.mean, means.mean(0), rtol=1e-4, atol=1e-5)
    variance = means.var(0) + (np.asarray(draws["scale"], float) ** 2).mean()
    np.testing.assert_allclose(found.sd, np.sqrt(variance), rtol=1e-4)
    assert found.replicates.shape == (200, 4) and found.probabilities is None
    assert found.observed is None and found.log_likelihood is None


def test_replicates_are_draws_of_the_mixture(fitted):
    x = jnp.full((2000,), 3.0)
    found = predict(fitted, x, rng_key=random.key(5))
    mixture = dist.Normal(3.0 * fitted.get_samples()["slope"], fitted.get_samples()["scale"])
    for q in (0.05, 0.5, 0.9):
        # 2000 rows of 200 replicates each: as many values as draws from the mixture
        pooled = np.quantile(found.replicates, q)
        exact = float(mixture.cdf(pooled).mean())
        assert abs(exact - q) < 4.5 * (q * (1 - q) / found.replicates.size) ** 0.5
    assert found.quantile(0.5).shape == (2000,) and found.quantile([0.1, 0.9]).shape == (2, 2000)
    assert len(np.unique(found.replicates[:, 0])) == 200
    again = predict(fitted, x, rng_key=random.key(6))
    assert not np.array_equal(found.replicates, again.replicates)


def test_log_likelihoods_are_those_of_numpyro(fitted):
    y = jnp.array([0.0, 0.2, 1.0, 3.0])
    found = predict(fitted, NEW, y)
    # NumPyro would take the deterministic site of the old rows.
    draws = {name: value for name, value in fitted.get_samples().items() if name != "f"}
    by_numpyro = np.asarray(log_likelihood(line, draws, NEW, y)["y"], float)
    exact = np.logaddexp.reduce(by_numpyro, 0) - np.log(len(by_numpyro))
    np.testing.assert_allclose(found.log_likelihood, exact, rtol=1e-4)
    np.testing.assert_array_equal(found.observed, y)


def test_chunks_make_no_difference(fitted, monkeypatch):
    y = jnp.zeros(4)
    whole = predict(fitted, NEW, y, num_draws=97)
    monkeypatch.setattr("numpyro_repulsion.inference_data.rows.CHUNK_SIZE", 10)
    parts = predict(fitted, NEW, y, num_draws=97)
    for name in ("mean", "sd", "log_likelihood", "replicates"):
        np.testing.assert_allclose(getattr(parts, name), getattr(whole, name), rtol=1e-5, atol=1e-6)
    assert len(parts.replicates) == 97


def test_all_rows_of_a_subsampled_plate_are_predicted(fitted):
    assert predict(fitted, X).mean.shape == X.shape
    assert predict(fitted, X, X).log_likelihood.shape == X.shape


def test_deterministic_sites_vary_by_the_draws_alone(fitted):
    found = predict(fitted, NEW, site="f")
    values = Predictive(line, fitted.get_samples())(random.key(0), NEW)["f"]
    np.testing.assert_allclose(found.mean, values.mean(0), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found.sd, np.asarray(values, float).std(0), rtol=1e-3, atol=1e-6)
    np.testing.assert_allclose(found.replicates, values, rtol=1e-5)
    assert (predict(fitted, NEW).sd > found.sd).all()


def test_classes_have_probabilities():
    y = (X > 0).astype(int) + (X > 1)
    mcmc = run(SGLD(classes), X, y)
    found = predict(mcmc, NEW, jnp.array([0, 0, 1, 2]))
    slope = np.asarray(mcmc.get_samples()["slope"], float)
    each = np.asarray(jax.nn.softmax(NEW[None, :, None] * slope[:, None], -1))
    np.testing.assert_allclose(found.probabilities, each.mean(0), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found.probabilities.sum(-1), 1.0, rtol=1e-5)
    np.testing.assert_allclose(
        found.log_likelihood, np.log(each.mean(0)[np.arange(4), [0, 0, 1, 2]]), rtol=1e-4, atol=1e-5
    )
    assert found.mean is None and found.sd is None
    with pytest.raises(ValueError, match="no order"):
        found.pit()


@pytest.mark.parametrize("seed", [1, 2])
def test_calibration_is_told_and_its_lack(seed):
    """Observations from the mixture itself are covered as often as they should be; from a wider one, they are not."""
    draws, rows = 400, 3000
    key, other = random.split(random.key(seed))
    replicates = np.asarray(random.poisson(key, 4.0, (draws, rows)))
    observed = np.asarray(random.poisson(other, 4.0, (rows,)))
    found = Predictions("y", replicates, observed)
    for prob in (0.5, 0.9):
        assert abs(found.coverage(prob) - prob) < 4.5 * (prob * (1 - prob) / rows) ** 0.5 + 1 / draws
    counts = np.histogram(found.pit(), 10, (0, 1))[0]
    assert (abs(counts - rows / 10) < 4.5 * (rows * 0.09) ** 0.5 + rows / draws).all()
    wide = Predictions("y", replicates, 2 * observed - 4)
    assert wide.coverage(0.9) < 0.8


def test_models_of_several_sites_name_one():
    def two(x, y=None):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        for name in ("a", "b"):
            numpyro.sample(name, dist.StudentT(3.0, mu).expand([2]), obs=y)

    mcmc = run(SGLD(two), 0.0, jnp.zeros(2), num_samples=10)
    with pytest.raises(ValueError, match=r"one of \['a', 'b'\]; got None, and the model observes several"):
        predict(mcmc, 0.0)
    assert predict(mcmc, 0.0, site="b").mean.shape == (2,)
    with pytest.raises(ValueError, match="one of .* got 'c'"):
        predict(mcmc, 0.0, site="c")


def test_an_optimizer_predicts_by_its_last_cloud():
    mcmc = run(SVGD(line), X, 0.8 * X + 0.5 * NOISE)
    found = predict(mcmc, NEW)
    slope = np.asarray(mcmc.get_samples(group_by_chain=True)["slope"])[:, -1]
    np.testing.assert_allclose(found.mean, slope.mean() * NEW, rtol=1e-4, atol=1e-5)
    assert len(found.replicates) == 5


def test_effects_of_rows_are_refused_for_other_rows():
    def rows(y=None, count=5):
        with numpyro.plate("rows", count):
            z = numpyro.sample("z", dist.Normal(0, 1))
            numpyro.sample("y", dist.Normal(z, 1), obs=y)

    mcmc = run(SGLD(rows, gradient=FullData()), jnp.zeros(5), num_samples=10)
    assert predict(mcmc).mean.shape == (5,)
    with pytest.raises(ValueError, match="'z' has the shape \\(3,\\), and its draws have \\(5,\\)"):
        predict(mcmc, count=3)


def test_distributions_without_moments_use_replicates():
    def skewed(y=None):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        base = dist.TransformedDistribution(dist.Normal(mu, 0.1), dist.transforms.SigmoidTransform())
        with numpyro.plate("rows", 5):
            numpyro.sample("y", base, obs=y)

    mcmc = run(SGLD(skewed), jnp.full(5, 0.6), num_samples=20)
    found = predict(mcmc)
    np.testing.assert_allclose(found.mean, found.replicates.mean(0), rtol=1e-5)
    assert (found.sd > 0).all()


def test_wrong_calls_say_what_to_write(fitted):
    with pytest.raises(TypeError, match="does not take these arguments"):
        predict(fitted, NEW, covariates=3)
    with pytest.raises(TypeError, match="PRNG key"):
        predict(fitted, NEW, rng_key=3)
    with pytest.raises(ValueError, match="num_draws"):
        predict(fitted, NEW, num_draws=0)
    with pytest.raises(ValueError, match="from 0 to 1"):
        predict(fitted, NEW).quantile(5)
    with pytest.raises(ValueError, match="no observations"):
        predict(fitted, NEW).coverage()
    with pytest.raises(ValueError, match="between 0 and 1"):
        predict(fitted, NEW, NEW).coverage(1.5)
    potential = run(SGLD(potential_fn=lambda z: 0.5 * z**2), init_params=jnp.zeros(5), num_samples=5)
    with pytest.raises(ValueError, match="potential_fn"):
        predict(potential)


def test_too_many_replicates_are_refused(fitted, monkeypatch):
    monkeypatch.setattr("numpyro_repulsion.inference_data.rows.MAX_BYTES", 1000)
    with pytest.raises(ValueError, match="Lower `num_draws`"):
        predict(fitted, NEW)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_replicates_have_keys_of_their_own(count):
    """Effects of new groups come from their prior, independent of the noise of the observations."""

    def groups(count=0, y=None):
        mu = numpyro.sample("mu", dist.Normal(0, 0.01))
        effects = [numpyro.sample(f"new {group}", dist.Normal(0, 1)) for group in range(count)]
        numpyro.sample("y", dist.Normal(mu + sum(effects), 1), obs=y)

    mcmc = run(SGLD(groups, gradient=FullData()), y=0.0, num_samples=200)
    found = predict(mcmc, count, 0.0).replicates  # observed, so that the model draws no noise itself
    # Were an effect the noise again, the variance would be count + 3 in place of count + 1.
    expected = count + 1.0
    assert abs(found.var() - expected) < 4.5 * expected * (2.0 / len(found)) ** 0.5


def test_latent_sites_inside_a_scan():
    def walk(y=None):
        def step(x, _):
            x = numpyro.sample("x", dist.Normal(0.9 * x, 0.1))
            return x, x

        _, xs = scan(step, 0.0, None, length=4)
        with numpyro.plate("times", 4):
            numpyro.sample("y", dist.Normal(xs, 0.5), obs=y)

    mcmc = run(SGLD(walk, gradient=FullData()), jnp.ones(4), num_samples=20)
    found = predict(mcmc)
    np.testing.assert_allclose(found.mean, np.asarray(mcmc.get_samples()["x"], float).mean(0), rtol=1e-4, atol=1e-5)


def test_sites_observed_inside_a_scan_are_refused():
    def observed(y):
        mu = numpyro.sample("mu", dist.Normal(0, 1))

        def step(carry, value):
            numpyro.sample("y", dist.Normal(mu, 1), obs=value)
            return carry, None

        scan(step, 0.0, y)

    mcmc = run(SGLD(observed, gradient=FullData()), jnp.ones(4), num_samples=10)
    with pytest.raises(ValueError, match="inside a `scan`"):
        predict(mcmc, jnp.ones(4))


def test_observations_of_another_shape_are_refused():
    y = X * 0.5 + 0.1 * NOISE
    mcmc = run(SGLD(line), X, y)
    with pytest.raises(ValueError, match=r"'y' have shape \(60, 1\), and the site has \(60,\).*y\[:, 0\]"):
        predict(mcmc, X, y[:, None])
    found = predict(mcmc, X, y)
    assert (
        repr(found)
        == f"Predictions('y', 200 draws, shape (60,), mean log likelihood {found.log_likelihood.mean():.4g})"
    )
    assert repr(predict(mcmc, X)) == "Predictions('y', 200 draws, shape (60,))"


def test_observations_may_share_one_distribution():
    def same(y):
        numpyro.sample("y", dist.Normal(numpyro.sample("mu", dist.Normal(0, 1)), 1.0), obs=y)

    assert predict(run(SGLD(same), NOISE), NOISE).log_likelihood.shape == (60,)
