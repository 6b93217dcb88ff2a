"""The verdict on a warmup, and whole warmups, against known answers."""

import warnings

import jax
from jax import random
import jax.numpy as jnp
from models import PRECISION, mean_of, moments, numbers, programs_of, vectorized, warmed
import numpy as np
import pytest

import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC

from numpyro_repulsion import SGHMC, SGLD, SGLDR, BiasBudget, ControlVariates, Subsampled
from numpyro_repulsion.dynamics import Cloud, Overdamped
from numpyro_repulsion.warmup import Preconditioner, WarmupPlan, WarmupState
from numpyro_repulsion.warmup.learned import WarmupDiagnosis, diagnose_warmup
from numpyro_repulsion.warmup.symptoms import Symptoms

noisy_mean = mean_of(lambda mu: dist.Normal(mu, 1))
FINE = WarmupDiagnosis(1000.0, 1000.0, condition=5.0, curvature_ratio=3.0, dependence=0.1, noise_ratio=0.1)


@pytest.mark.parametrize(
    ("field", "value", "name", "figure", "words"),
    [
        ("num_warmup", 20, "short_run", 20.0, "Warmup has only 20 iterations, too few"),
        ("effective_draws", 50.0, "slow_directions", 50.0, "ESS of only about 50"),
        ("bias", 0.3, "step_bias", 1.3**0.5 - 1, "sds may be about 14% too large"),
        ("condition", 100.0, "varying_curvature", 2.5, "LocScaleReparam"),
        ("curvature_ratio", 100.0, "varying_curvature", 4.0, "LocScaleReparam"),
        ("dependence", 1.0, "funnel", 1.0, "as in a funnel"),
        ("has_heavy_tails", True, "heavy_tails", None, "heavy tails"),
        ("has_basins", True, "several_basins", None, "in several modes"),
        ("noise_ratio", 20.0, "gradient_noise", 20.0, "Gradient noise (20 times the curvature)"),
        ("control_variates_off", True, "control_variates_off", None, "Control variates increased the gradient noise"),
        ("jumps_off", True, "jumps_off", None, "Jumps between modes were almost never accepted"),
    ],
)
def test_verdict_names_what_is_wrong(field, value, name, figure, words):
    (finding,) = FINE._replace(**{field: np.float32(value)}).findings()
    assert finding.name == name and words in str(finding)
    assert finding.figure == (None if figure is None else pytest.approx(figure))


def test_verdict_of_several_figures():
    assert FINE.findings() == WarmupDiagnosis().findings() == []
    # The step is raised until the run is worth 200, which rounding must not make a finding.
    assert FINE._replace(effective_draws=199.99).findings() == []
    assert [FINE._replace(bias=x).findings()[0].severity for x in (0.15, 0.3)] == ["warning", "error"]
    slow = FINE._replace(effective_draws=50.0)
    assert 'Set preconditioner="dense"' in slow._replace(is_diagonal=True).findings()[0].remedy
    assert "Raise `subsample_size`" in slow._replace(noise_ratio=2.0).findings()[0].remedy
    noisy = slow._replace(noise_ratio=20.0, thermostat_helps=True)
    assert all(finding.remedy.startswith("Use SGNHT") for finding in noisy.findings())
    # Networks keep to their basins, and their control variates always add noise.
    (finding,) = FINE._replace(has_basins=True, control_variates_off=True, is_prolonged=True).findings()
    assert finding.name == "several_basins" and "predict(mcmc, ...)" in finding.remedy


def expectations(kernel, *args, num_warmup=1000, num_samples=30, num_chains=20, seed=0, **kwargs):
    """What a warmup found, in words, and the run."""
    mcmc = vectorized(kernel, num_warmup, num_samples, num_chains)
    mcmc.run(random.key(seed), *args, **kwargs)
    return " ".join(map(str, kernel.findings(mcmc.last_state))), mcmc


def test_a_short_warmup_is_announced():
    with pytest.warns(UserWarning, match="num_warmup=20 is too short"):
        jax.eval_shape(lambda: SGLD(noisy_mean).start(random.split(random.key(0), 6), 20, None, (jnp.zeros(9), 2), {}))


@np.errstate(invalid="ignore")
def test_an_optimizer_has_no_draws_to_be_judged():
    cloud = Cloud(u := numbers(0, (1, 8, 3)), np.zeros((1, 8), np.float32), u @ PRECISION, ())
    plan = WarmupPlan(BiasBudget(), None, False, False)
    warmup = WarmupState.start(100, Preconditioner(), 1e-3, jnp.asarray(jnp.nan), cloud, plan)
    moments = warmup.moments.add(*(x.reshape(-1, 3) for x in (cloud.z, cloud.gradient)))
    symptoms = Symptoms.empty(8, 3, jnp.float32)
    warmup = jax.device_get(warmup._replace(moments=moments, symptoms=symptoms, effective_draws=jnp.asarray(50.0)))
    sampler, optimizer = (diagnose_warmup(warmup, BiasBudget(), Overdamped(noise=x)).findings() for x in (True, False))
    assert [finding.name for finding in sampler] == ["slow_directions"] and optimizer == []


@pytest.mark.parametrize("measures", [False, True])
def test_nothing_is_cut_where_the_noise_was_not_measured(measures):
    settings = {} if measures else {"step_size": 1e-3}
    kernel = SGLD(noisy_mean, preconditioner="dense", gradient=Subsampled(), **settings)
    _, state = programs_of(kernel, random.split(random.key(0), 4), 60, jnp.zeros(2000), 2)[-1]
    assert (state.learned.gradient_limit is not None) == measures


@pytest.mark.slow
def test_noise_that_rules_the_step_is_named():
    y = random.permutation(random.key(5), jnp.linspace(-30.0, 30.0, 2000))
    words, _ = expectations(SGLD(noisy_mean, gradient=Subsampled()), y, 2)
    assert "Use SGNHT" in words and "or raise `subsample_size`" in words
    # The likelihood is quadratic: control variates leave no noise at all.
    words, mcmc = expectations(SGLD(noisy_mean), y, 2)
    assert words == ""
    learned = mcmc.last_state.learned
    assert learned.reference is not None and learned.figures.noise < 1e-3


def curved(x, y, subsample_size):
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("rows", len(y), subsample_size=subsample_size) as i:
        numpyro.sample("y", dist.Bernoulli(logits=x[i] @ beta), obs=y[i])


@pytest.mark.slow
def test_minibatches_with_control_variates_give_the_posterior():
    # Logistic regression on 2000 rows in batches of 20, against quadrature.
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2000, 2)) @ np.array([[1.0, 0.7], [0.0, 0.5]])
    y = rng.random(2000) < 1 / (1 + np.exp(-x @ np.array([1.0, -1.0])))
    axes = np.meshgrid(np.linspace(0.3, 1.7, 141), np.linspace(-2.0, 0.0, 141), indexing="ij")
    grid = np.stack([axis.ravel() for axis in axes], -1)
    logits = grid @ x.T
    log_density = (logits * y - np.logaddexp(0, logits)).sum(1) - (grid**2).sum(1) / 2
    mean, variance = moments(grid, log_density)

    def scores(**kwargs):
        """Errors of means in their standard errors; and of variances, beyond what is tolerated."""
        data = jnp.asarray(x), jnp.asarray(y, jnp.int32)
        words, mcmc = expectations(SGLD(curved, **kwargs), *data, 20, num_warmup=300, num_samples=500)
        draws = np.asarray(mcmc.get_samples(group_by_chain=True)["beta"], float)
        square = (draws - mean) ** 2 / variance
        # Balanced noise makes ensemble means better than these standard errors of independent chains.
        errors = draws.mean(1) - mean, square.mean(1) - 1
        standard = [error.std(0, ddof=1) / 20**0.5 for error in errors]
        inflation = np.abs(errors[1].mean(0)) - 0.05
        return words, np.abs(errors[0].mean(0) / standard[0]), inflation / standard[1], mcmc.last_state.learned

    words, of_mean, of_variance, learned = scores()
    assert words == "" and learned.reference is not None
    assert (of_mean < 4.5).all() and (of_variance < 4.5).all()
    # Plain minibatches with the same step and scales inflate the variances.
    scale = np.asarray(learned.preconditioner.scale)
    _, _, of_variance, _ = scores(
        gradient=Subsampled(),
        step_size=float(learned.step_size),
        preconditioner=scale @ scale.T,
        dynamics=Overdamped("lm"),
    )
    assert (of_variance > 9.0).any()


def test_groups_share_what_is_learned():
    kernel = SGLDR(potential_fn=lambda z: jnp.sum(z**2) / 2, num_ensembles=2)
    starts = random.normal(random.key(1), (12, 2))
    keys = random.split(random.key(0), 12)
    warmup = warmed(kernel, keys, 60, 60, init_params=starts).warmup
    assert warmup.arrival.step_size.shape == (2, 6) and warmup.step_size.shape == ()
    # The moments are of all 12 particles, at every iteration of the last part.
    assert warmup.moments.number == 12 * (60 - int(0.7 * 60))


@pytest.mark.parametrize("preconditioner", ["auto", pytest.param(None, marks=pytest.mark.slow)])
def test_a_single_chain_learns_over_time(preconditioner):
    sd = jnp.array([0.01, 1.0, 100.0])
    kernel = SGLD(potential_fn=lambda z: jnp.sum((z / sd) ** 2) / 2, preconditioner=preconditioner)
    mcmc = MCMC(kernel, num_warmup=2000, num_samples=2000, progress_bar=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mcmc.run(random.key(0), init_params=jnp.array([1.0, -3.0, 50.0]))
    samples = np.asarray(mcmc.get_samples(), float) / np.asarray(sd)
    if preconditioner is None:
        # The step suits the stiffest direction, and the others hardly move.
        assert samples[:, 2].std() < 0.1
        return
    # Successive draws are ten updates of half a unit of time apart: independent, nearly.
    assert (np.abs(samples.mean(0)) < 4.5 * (1.1 / 2000) ** 0.5).all()
    assert (np.abs(samples.var(0) - 1) < 4.5 * (2.2 / 2000) ** 0.5 + 0.01).all()


def test_scales_that_are_learned_and_given():
    dimension = 5

    def shape(**kwargs):
        kernel = SGLD(potential_fn=lambda z: jnp.sum(z**2) / 2, **kwargs)
        starts = random.normal(random.key(1), (4, dimension))
        state = jax.eval_shape(lambda key: kernel.start(key, 100, starts, (), {}), random.split(random.key(0), 4))
        learned = state.warmup if hasattr(state, "warmup") else state.learned
        return None if (scale := learned.preconditioner.scale) is None else scale.shape

    assert shape() == shape(preconditioner="dense") == (dimension, dimension)
    assert shape(preconditioner="dense", step_size=0.1) == (dimension, dimension)
    assert shape(preconditioner="diagonal") == (dimension,)
    # A given step means what it means in plain SGLD.
    assert shape(step_size=0.1) is None and shape(preconditioner=None) is None
    assert shape(preconditioner=jnp.ones(dimension)) == (dimension,)


def random_mean(y, subsample_size, noise):
    mu = noisy_mean(y, subsample_size)
    numpyro.factor("estimate", noise * random.normal(numpyro.prng_key()) * mu)


def test_random_likelihoods_are_recognized():
    y = 5.0 + random.normal(random.key(5), (200,))
    # By default without control variates, and none on demand.
    _, mcmc = expectations(SGLD(random_mean), y, 20, 3.0, num_warmup=100, num_samples=300)
    assert mcmc.last_state.learned.reference is None
    draws = np.asarray(mcmc.get_samples(group_by_chain=True)["mu"], float)
    exact = float(y.sum() / (200 + 0.01))
    means = draws.mean(1)
    assert abs(means.mean() - exact) < 4.5 * max(means.std(ddof=1), draws.std() / 300**0.5) / 20**0.5
    with pytest.raises(ValueError, match="random .*prng_key.*Subsampled"):
        expectations(SGLD(random_mean, gradient=ControlVariates()), y, 20, 3.0)


def test_particles_arrive_under_a_random_likelihood():
    # A lucky estimate must not be kept for ever, which would hold its particle and shrink its steps.
    y = 5.0 + random.normal(random.key(5), (200,))
    state = warmed(SGLD(random_mean), random.split(random.key(0), 20), 49, 200, y, None, 5.0)
    assert len(np.unique(state.cloud.z)) == 20
    assert (state.warmup.arrival.step_size > 1e-3).all()


def test_long_gradients_are_cut_and_counted():
    # A wall that is met rarely, and only after warmup.
    def energy(z):
        return jnp.sum(z**2) / 2 + 1e6 * jnp.sum(jnp.maximum(z - 3.5, 0.0) ** 2)

    kernel = SGLD(potential_fn=energy, step_size=BiasBudget(0.5))
    starts = random.normal(random.key(1), (4, 1))
    state = kernel.init(random.split(random.key(0), 4), 100, starts, (), {})
    learned = state.learned._replace(step_size=jnp.asarray(0.1))
    over = state._replace(learned=learned, gradient=state.gradient.at[2].set(1e5))
    after = jax.jit(lambda state: kernel.sample(state, (), {}))(over)
    assert not after.diverging.any() and abs(float(after.cut_off) / 1e5 - 1.0) < 0.01
    # 20 standard deviations of a gradient, times the step, and noise.
    assert abs(after.z[2, 0] - starts[2, 0]) < 10.0


@pytest.mark.parametrize(("momentum", "stays"), [(0.0, False), (60.0, True)])
def test_what_is_cut_off_from_an_update_that_is_turned_back_does_not_count(momentum, stays):
    """Its gradient moves no particle."""

    def energy(z):
        return jnp.sum(z**2) / 2 + 1e6 * jnp.sum(jnp.maximum(z - 3.5, 0.0) ** 2)

    kernel = SGHMC(potential_fn=energy, num_steps=1)
    state = kernel.init(random.split(random.key(0), 4), 100, jnp.zeros((4, 1)), (), {})
    learned = state.learned._replace(step_size=jnp.asarray(0.1), gradient_limit=jnp.asarray(1.0))
    fast = jax.tree.map(lambda x: jnp.full_like(x, momentum), state.memory)
    state = state._replace(learned=learned, z=jnp.zeros((4, 1)), gradient=jnp.zeros((4, 1)), memory=fast)
    after = jax.jit(lambda state: kernel.sample(state, (), {}))(state)
    assert after.diverging.all() == stays and float(after.cut_off) == 0
