"""Local posteriors: potential energies by hand, exact Gaussian ones, and what is refused."""

import inspect
import pickle

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import pytest
from results import run

import numpyro
from numpyro.contrib.control_flow import scan
import numpyro.distributions as dist
from numpyro.handlers import scale, scope, seed, trace
from numpyro.infer.reparam import LocScaleReparam

from numpyro_repulsion import SGLD, ensemble_mcse, init_around, predict, to_inference_data
from numpyro_repulsion.contrib import Localized
from numpyro_repulsion.gradients import ModelTarget

pytestmark = [pytest.mark.filterwarnings("ignore:num_warmup")]

#: A z-score beyond which a test fails; chance does that once in 150,000 times.
LIMIT = 4.5
N, BATCH = 12, 4
Y = jnp.linspace(-1.0, 2.0, N)
CENTER = {"mu": np.array([0.5, 0.3]), "sigma": 1.5, "weights": np.array([0.2, 0.3, 0.5])}
GAMMA, BETA = 3.0, 0.25
Z = {"mu": jnp.array([0.1, 0.2]), "sigma": jnp.array(0.4), "weights": jnp.array([0.3, -0.8])}


def model(y, batch=BATCH):
    mu = numpyro.sample("mu", dist.Normal(0, 2).expand([2]).to_event(1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(2))
    weights = numpyro.sample("weights", dist.Dirichlet(jnp.ones(3)))
    with numpyro.plate("rows", len(y), subsample_size=batch) as i:
        numpyro.sample("y", dist.Normal(mu.sum() + weights[0], sigma), obs=y[i])


def by_hand(z, rows, gamma=GAMMA, beta=BETA, tethered=("mu", "sigma", "weights")):
    """U of the local posterior, from NumPyro's densities of a model without plates."""
    simplex = dist.biject_to(dist.constraints.simplex)
    sigma, weights = jnp.exp(z["sigma"]), simplex(z["weights"])
    prior = dist.Normal(0, 2).log_prob(z["mu"]).sum() + dist.HalfNormal(2).log_prob(sigma) + z["sigma"]
    prior += dist.Dirichlet(jnp.ones(3)).log_prob(weights) + simplex.log_abs_det_jacobian(z["weights"], weights)
    likelihood = dist.Normal(z["mu"].sum() + weights[0], sigma).log_prob(Y[rows]).sum() * N / len(rows)
    center = {"mu": CENTER["mu"], "sigma": np.log(1.5), "weights": simplex.inv(jnp.asarray(CENTER["weights"]))}
    distance = sum(((z[name] - center[name]) ** 2).sum() for name in tethered)
    return -(prior + beta * likelihood - gamma / 2 * distance)


def energy(model, z, rows=None, *args):
    target = ModelTarget(model, (Y, *args))
    return target.potential_energy(z, {} if rows is None else {"rows": rows}, random.key(0))


LOCAL = Localized(model, center=CENTER, strength=GAMMA, inverse_temperature=BETA)


def test_potential_energies_are_those_by_hand(x64):
    """With all rows, and with minibatches: the tether counts once, and β multiplies N / B."""
    z = jax.tree.map(lambda x: jnp.asarray(np.asarray(x), float), Z)
    target = ModelTarget(LOCAL, (Y,))
    for rows in (np.arange(N), np.array([1, 4, 5, 9]), np.array([2, 3])):
        found = target.potential_energy(z, {"rows": rows}, random.key(0))
        np.testing.assert_allclose(found, by_hand(z, rows), rtol=1e-12)
        wrong = by_hand(z, rows, gamma=GAMMA * N / len(rows) if len(rows) < N else 2 * GAMMA)
        assert abs(found - wrong) > 0.1


def test_forms_of_the_handler():
    """As a decorator, which can be used again; with a signature; pickled; of some sites, and without a temperature."""
    part = Localized(model, center={"sigma": 1.5}, strength=GAMMA)
    expected = by_hand(Z, np.arange(N), beta=1.0, tethered=["sigma"])
    np.testing.assert_allclose(energy(part, Z, np.arange(N)), expected, rtol=2e-6)
    make = Localized(center=CENTER, strength=GAMMA, inverse_temperature=BETA)
    rows = np.array([1, 4, 5, 9])
    for local in (make(model), make(model), pickle.loads(pickle.dumps(LOCAL))):
        np.testing.assert_allclose(energy(local, Z, rows), by_hand(Z, rows), rtol=2e-6)
    assert list(inspect.signature(LOCAL).parameters) == ["y", "batch"] and LOCAL.__name__ == "model"
    with pytest.raises(TypeError, match="has no model yet"):
        make(Y, BATCH)

    @Localized(center=CENTER, strength=GAMMA)
    def decorated(y):
        model(y)

    np.testing.assert_allclose(energy(decorated, Z, rows), by_hand(Z, rows, beta=1.0), rtol=2e-6)


def test_as_a_context():
    with trace() as sites, seed(rng_seed=0), Localized(center=CENTER, strength=GAMMA):
        model(Y)
    assert sites["tether"]["fn"].log_prob(sites["tether"]["value"]) < 0
    assert sites["tether"]["cond_indep_stack"] == [] and sites["tether"]["scale"] is None


def test_a_failed_run_leaves_nothing_behind():
    def failing(y):
        model(y)
        if y is None:
            raise RuntimeError

    local = Localized(failing, center=CENTER, strength=GAMMA)
    for _ in range(2):
        with pytest.raises((RuntimeError, TypeError)), seed(rng_seed=0):
            local(None)
    rows = np.arange(N)
    np.testing.assert_allclose(energy(local, Z, rows), by_hand(Z, rows, beta=1.0), rtol=2e-6)


def test_other_weights_are_kept():
    """A weight by `handlers.scale` inside, outside, and of a site that uses rows outside of its plate."""
    rows, z = np.array([1, 4, 5, 9]), {"mu": jnp.array(0.3)}

    def weighted(y, by=lambda i: N / len(i)):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        i = numpyro.plate("rows", N, subsample_size=BATCH)
        with i as rows:
            pass
        with scale(scale=by(rows)):
            numpyro.sample("y", dist.Normal(mu, 1), obs=y[rows])

    local = Localized(weighted, center={"mu": 1.0}, strength=2.0, inverse_temperature=0.5)
    expected = -dist.Normal(0, 1).log_prob(0.3) + 0.7**2
    expected -= 0.5 * N / len(rows) * dist.Normal(0.3, 1).log_prob(Y[rows]).sum()
    np.testing.assert_allclose(energy(local, z, rows), expected, rtol=1e-6)
    assert not ModelTarget(local, (Y,)).rows_outside
    with pytest.raises(ValueError, match="that of 4 of 12 rows"):
        ModelTarget(local, (Y, lambda i: 1.0))
    # A constant weight fits one number of rows only, with and without a temperature.
    assert ModelTarget(local, (Y, lambda i: N / BATCH)).rows_outside == {"y": ["rows"]}


def test_factors_belong_to_the_likelihood_or_not():
    def with_factor(y):
        mu = numpyro.sample("mu", dist.LogNormal(0, 1))  # whose transform has a volume
        numpyro.factor("likelihood", dist.Normal(mu, 1).log_prob(y).sum())

    z, center = {"mu": jnp.array(0.3)}, {"mu": 2.0}
    prior = dist.Normal(0, 1).log_prob(0.3) - (0.3 - np.log(2.0)) ** 2 / 2
    likelihood = dist.Normal(jnp.exp(0.3), 1).log_prob(Y).sum()
    for factors, power in ((["likelihood"], 0.5), ([], 1.0)):
        local = Localized(with_factor, center=center, strength=1.0, inverse_temperature=0.5, factors=factors)
        np.testing.assert_allclose(energy(local, z), -(prior + power * likelihood), rtol=1e-6)
    plain = Localized(with_factor, center=center, strength=1.0)
    np.testing.assert_allclose(energy(plain, z), -(prior + likelihood), rtol=1e-6)
    with pytest.raises(ValueError, match="factor 'likelihood'.*factors=\\['likelihood'\\] or factors=\\[\\]"):
        energy(Localized(with_factor, center=center, strength=1.0, inverse_temperature=0.5), z)
    with pytest.raises(ValueError, match="names \\['other'\\], and the model has the factors \\['likelihood'\\]"):
        energy(Localized(with_factor, center=center, strength=1.0, factors=["other"]), z)


def test_sites_of_scopes_and_scans():
    def chain(y):
        with scope(prefix="net"):
            start = numpyro.sample("start", dist.HalfNormal(1))

        def step(x, y):
            x = numpyro.sample("x", dist.Normal(x, 1))
            numpyro.sample("y", dist.Normal(x, 0.5), obs=y)
            return x, None

        scan(step, start, y)

    z = {"net/start": jnp.array(0.2), "x": jnp.linspace(0.0, 1.0, N)}
    center = {"net": {"start": 0.7}, "x": np.full(N, 0.3)}
    local = Localized(chain, center=center, strength=2.0, inverse_temperature=0.5)
    start = jnp.exp(0.2)
    expected = dist.HalfNormal(1).log_prob(start) + 0.2 + 0.5 * dist.Normal(z["x"], 0.5).log_prob(Y).sum()
    expected += dist.Normal(jnp.append(start, z["x"][:-1]), 1).log_prob(z["x"]).sum()
    expected -= (0.2 - np.log(0.7)) ** 2 + ((z["x"] - 0.3) ** 2).sum()
    np.testing.assert_allclose(energy(local, z), -expected, rtol=1e-5)
    # Nested values have the names of modules.
    found = Localized(center={"net": {"Dense_0": {"kernel": np.ones((2, 3)), "bias": 0.0}}, "s": 1.0}, strength=1.0)
    assert list(found.center) == ["net/Dense_0.kernel", "net/Dense_0.bias", "s"]


def hierarchical(y):
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    tau = numpyro.sample("tau", dist.LogNormal(0, 1))
    with numpyro.plate("groups", 4):
        theta = numpyro.sample("theta", dist.Normal(mu, tau))
    numpyro.sample("y", dist.Normal(theta, 1), obs=y)


def test_partial_centering_keeps_the_posterior():
    """The tether is one of values, whatever the coordinates of a hierarchical site."""
    y, center = jnp.array([1.0, 2.0, 0.0, -1.0]), {"theta": np.array([0.5, 1.0, 0.0, -0.5]), "mu": 0.4}
    local = Localized(hierarchical, center=center, strength=2.0)
    target = ModelTarget(local, (y,))
    assert set(target.location_scale) == {"theta"}
    z = {"mu": jnp.array(0.1), "tau": jnp.array(-0.3), "theta": jnp.array([0.3, 0.8, -0.2, 0.1])}
    # Non-centered, theta = mu + tau * y, so log |d theta / d y| = 4 log tau.
    moved = z | {"theta": (z["theta"] - 0.1) / jnp.exp(-0.3)}
    found = target.centered_energy(moved, {}, random.key(0), {"theta": jnp.zeros(4)})
    np.testing.assert_allclose(found, target.potential_energy(z, {}, random.key(0)) + 4 * 0.3, rtol=1e-5)
    # A site that the user's own handler inside has replaced has no value to hold.
    inner = numpyro.handlers.reparam(hierarchical, config={"theta": LocScaleReparam(0.0)})
    with pytest.raises(ValueError, match="names \\['theta'\\].*'theta_decentered'"):
        ModelTarget(Localized(inner, center=center, strength=2.0), (y,))


def test_discrete_sites():
    def mixture(y):
        mu = numpyro.sample("mu", dist.Normal(0, 1).expand([2]).to_event(1))
        with numpyro.plate("rows", len(y), subsample_size=BATCH) as i:
            c = numpyro.sample("c", dist.Bernoulli(0.4))
            numpyro.sample("y", dist.Normal(mu[c], 1), obs=y[i])

    rows, z = np.array([1, 4, 5, 9]), {"mu": jnp.array([0.3, -0.2])}
    local = Localized(mixture, center={"mu": np.array([1.0, -1.0])}, strength=2.0)
    tether = (0.7**2 + 0.8**2) * 2.0 / 2
    np.testing.assert_allclose(energy(local, z, rows), energy(mixture, z, rows) + tether, rtol=1e-6)
    with pytest.raises(ValueError, match="'c' is summed over"):
        energy(Localized(mixture, center={"mu": np.ones(2)}, strength=2.0, inverse_temperature=0.5), z, rows)
    with pytest.raises(ValueError, match="'c' is discrete"):
        energy(Localized(mixture, center={"c": np.ones(4)}, strength=2.0), z, rows)


@pytest.mark.parametrize(
    ("center", "settings", "error", "match"),
    [
        ([1.0], {}, TypeError, "must be a dictionary of latent sites.*got list"),
        ({"mu": "here"}, {}, TypeError, "value of 'mu'.*array of numbers; got 'here'"),
        ({"mu": np.array([np.nan, 0.0])}, {}, ValueError, "value of 'mu'.*not finite"),
        ({}, {}, ValueError, "`center` is empty"),
        (CENTER, {"strength": 0.0}, ValueError, "`strength` must be a positive, finite number; got 0.0"),
        (CENTER, {"inverse_temperature": 0}, ValueError, "`inverse_temperature` must be a positive"),
        (CENTER, {"factors": "f"}, TypeError, "Write \\['f'\\]"),
        (CENTER | {"nu": 1.0}, {}, ValueError, "names \\['nu'\\], which are not latent sites.*It has \\['mu', 'sigma'"),
        (CENTER | {"y": Y}, {}, ValueError, "names \\['y'\\]"),
        (CENTER | {"mu": 0.5}, {}, ValueError, "has the shape \\(2,\\), and its value in `center` has \\(\\)"),
        (CENTER | {"sigma": -0.4}, {}, ValueError, "'sigma'.*outside the site's support.*Give the constrained"),
        (CENTER, {"factors": ["f"]}, ValueError, "the model has no factors"),
    ],
)
def test_what_cannot_work_is_refused(center, settings, error, match):
    with pytest.raises(error, match=match):
        ModelTarget(Localized(model, center=center, **({"strength": 1.0} | settings)), (Y,))
    with pytest.raises(ValueError, match="localized already"):
        Localized(LOCAL, center=CENTER, strength=1.0)


# Draws of a Gaussian local posterior.

ROWS = 200
X = random.normal(random.key(1), (ROWS, 2))
TARGETS = X @ jnp.array([1.0, -0.5]) + random.normal(random.key(2), (ROWS,))
AT = np.array([0.5, 0.5])
STRENGTH, POWER = 20.0, 0.05


def regression(x, y, size=20):
    w = numpyro.sample("w", dist.Normal(0, 3).expand([2]).to_event(1))
    with numpyro.plate("rows", ROWS, subsample_size=size) as i:
        numpyro.sample("y", dist.Normal(x[i] @ w, 1), obs=y[i])


def exact(strength=STRENGTH, power=POWER):
    x, y = np.asarray(X, float), np.asarray(TARGETS, float)
    precision = (1 / 9 + strength) * np.eye(2) + power * x.T @ x
    mean = np.linalg.solve(precision, strength * AT + power * x.T @ y)
    return mean, np.sqrt(np.diag(np.linalg.inv(precision)))


def agrees(mcmc, mean, sd):
    """Whether means and standard deviations are right, within Monte Carlo error and the bias of the step size."""
    draws = np.asarray(mcmc.get_samples(group_by_chain=True)["w"], float)
    error = ensemble_mcse(draws)
    excess, sd_error = draws.std((0, 1)) - sd, ensemble_mcse(draws, method="sd")
    # Balanced noise cancels in the mean, and of rows like these no other is left, so what remains is rounding.
    is_mean = (np.abs(draws.mean((0, 1)) - mean) < LIMIT * error + 1e-5 * sd).all()
    is_sd = ((-LIMIT * sd_error < excess) & (excess < 0.025 * sd + LIMIT * sd_error)).all()
    return bool(is_mean), bool(is_sd)


def test_draws_are_those_of_the_local_posterior():
    """With nothing set but the start, by minibatches: a step may widen a variance by 5 %."""
    local = Localized(regression, center={"w": AT}, strength=STRENGTH, inverse_temperature=POWER)
    kernel = SGLD(local, init_strategy=init_around({"w": AT}))
    mcmc = run(kernel, X, TARGETS, key=3, num_warmup=300, num_samples=600, num_chains=8)
    assert agrees(mcmc, *exact()) == (True, True)
    # The controls: a tether of half the strength, and a likelihood of full power.
    assert agrees(mcmc, *exact(strength=STRENGTH / 2)) == (False, False)
    assert agrees(mcmc, *exact(power=1.0)) == (False, False)


def test_results_of_a_run_know_the_tether(pretended):
    mcmc = pretended(Localized(regression, center={"w": AT}, strength=STRENGTH), X, TARGETS)
    data = to_inference_data(mcmc, log_likelihood=True)
    assert data["log_likelihood"]["y"].shape == (4, 6, ROWS)
    assert predict(mcmc, X, TARGETS).mean.shape == (ROWS,)
