"""How warmup centers hierarchical sites, and that the draws stay those of the model."""

from dataclasses import replace
from functools import partial

import jax
from jax import random
import jax.numpy as jnp
from models import vectorized, warmed
import numpy as np
import pytest
import results

import numpyro
from numpyro.diagnostics import effective_sample_size
import numpyro.distributions as dist

from numpyro_repulsion import SGHMC, SGLD, SVGD, SVRG, Archive, diagnose, run_in_pieces, to_inference_data
from numpyro_repulsion.gradients import ModelTarget
from numpyro_repulsion.kernels import warmup_host
from numpyro_repulsion.warmup import scales
from numpyro_repulsion.warmup.curvature import draw_seed
from numpyro_repulsion.warmup.windows import ENDS

EFFECTS = jnp.array([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
ERRORS = jnp.array([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])


def schools(effects, unit=1.0):
    """Eight schools (Rubin, 1981), written centered."""
    mu = numpyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = numpyro.sample("tau", dist.HalfCauchy(5.0))
    with numpyro.plate("schools", 8):
        theta = numpyro.sample("theta", dist.Normal(mu, tau))
        numpyro.sample("y", dist.Normal(theta, unit * ERRORS), obs=effects)


def funnel():
    v = numpyro.sample("v", dist.Normal(0.0, 3.0))
    numpyro.sample("x", dist.Normal(0.0, jnp.exp(v / 2)).expand([9]).to_event(1))


run = partial(results.run, num_warmup=1000, num_samples=1000, num_chains=20)


def centering(mcmc):
    return np.asarray(mcmc.last_state.learned.centering.share)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [SGLD, SGHMC])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_funnel_is_drawn_from(kernel, seed):
    mcmc = run(kernel(funnel), key=seed)
    np.testing.assert_allclose(centering(mcmc), [1.0] + 9 * [0.0], atol=0.02)
    v, x = (np.asarray(mcmc.get_samples(group_by_chain=True)[name], float) for name in "vx")
    # Draws of one particle are correlated, so errors come from means of particles.
    for values, expected in ((v, 0.0), (v**2, 9.0), (x / np.exp(v / 2)[..., None], 0.0), ((v < -3), 0.1587)):
        means = values.reshape(20, -1).mean(1)
        assert abs(means.mean() - expected) < 4.5 * means.std(ddof=1) / 20**0.5 + 0.03 * abs(expected)
    assert not [finding for finding in diagnose(mcmc) if finding.severity == "error"]


@pytest.mark.slow
def test_without_it_the_neck_is_missed():
    mcmc = run(SGLD(funnel, reparam=None))
    assert mcmc.last_state.learned.centering is None
    assert mcmc.get_samples()["v"].std() < 2.7
    assert "funnel" in [finding.name for finding in diagnose(mcmc)]


def shares_by_definition(tau):
    """The range in which the shares of the schools lie that 20 particles of the posterior find, ``(2, 8)``."""
    means = np.random.default_rng(0).choice(np.asarray(tau, float) ** 2, (200_000, 20)).mean(1)
    curvature = 1.0 + np.quantile(means, [1e-4, 1.0 - 1e-4])[:, None] / np.asarray(ERRORS) ** 2
    return 1.0 - 1.0 / curvature


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [SGLD, SGHMC])
def test_eight_schools(kernel):
    mcmc = run(kernel(schools), EFFECTS)
    draws = mcmc.get_samples()
    low, high = shares_by_definition(draws["tau"])
    shares = centering(mcmc)
    assert (shares[:2] == 1).all() and (low < shares[2:]).all() and (shares[2:] < high).all()
    # The control: errors a quarter as large determine the effects better.
    assert not (run(kernel(schools), EFFECTS, 0.25).last_state.learned.centering.share[2:] < high).all()
    # posteriordb, eight_schools-eight_schools_noncentered: 4.41 and 3.31, 3.60 and 3.20
    assert abs(draws["mu"].mean() - 4.41) < 0.1 and abs(draws["mu"].std() - 3.31) < 0.15
    assert abs(draws["tau"].mean() - 3.60) < 0.15 and abs(draws["tau"].std() - 3.20) < 0.3


def schools_by_hand(effects, unit=1.0):
    """Eight schools, written non-centered."""
    mu = numpyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = numpyro.sample("tau", dist.HalfCauchy(5.0))
    with numpyro.plate("schools", 8):
        eta = numpyro.sample("eta", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(mu + tau * eta, unit * ERRORS), obs=effects)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [SGLD, SGHMC])
def test_products_by_hand_are_centered_as_far_as_the_data_say(kernel):
    for unit, low, high in ((1.0, 0.0, 0.4), (0.05, 0.9, 1.0)):
        mcmc = run(kernel(schools_by_hand), EFFECTS, unit)
        assert mcmc.last_state.learned.centering.powers.tolist() == [1.0]
        shares = centering(mcmc)[:8]
        assert low <= shares.min() and shares.max() <= high
        draws = mcmc.get_samples()
        assert abs(draws["eta"] ** 2).mean() < 2.0  # draws are those of the site that the model has
        if unit == 1.0:
            assert abs(draws["mu"].mean() - 4.41) < 0.1 and abs(draws["tau"].mean() - 3.60) < 0.15
            assert abs(draws["tau"].std() - 3.20) < 0.3


@pytest.mark.slow
def test_minibatches_of_products_by_hand_need_it():
    """A ridge of scale times effects, which rows determine: without other coordinates particles crawl along it."""
    group, x = jnp.arange(20_000) % 40, random.normal(random.key(1), (20_000,))
    true = 0.7 * random.normal(random.key(2), (40,))
    y = 1.0 + 0.5 * x + true[group] + random.normal(random.key(3), (20_000,))

    def rows(x, group, y):
        mu, b = (numpyro.sample(name, dist.Normal(0.0, 5.0)) for name in ("mu", "b"))
        tau = numpyro.sample("tau", dist.HalfNormal(2.0))
        z = numpyro.sample("z", dist.Normal(0.0, 1.0).expand([40]).to_event(1))
        with numpyro.plate("rows", len(y), subsample_size=200) as i:
            numpyro.sample("y", dist.Normal(mu + b * x[i] + tau * z[group[i]], 1.0), obs=y[i])

    def slowest(kernel):
        draws = run(kernel, x, group, y).get_samples(group_by_chain=True)
        return min(float(effective_sample_size(np.asarray(draws[name], float))) for name in ("mu", "tau"))

    assert slowest(SGLD(rows)) > 5.0 * slowest(SGLD(rows, reparam=None))


@pytest.mark.filterwarnings("ignore:Warmup found problems", "ignore:Updates were flagged")
def test_states_hold_the_sites_of_the_model_and_go_on_in_their_coordinates(x64, tmp_path):
    # In the neck, single precision does not hold the deviation of an effect from its mean.
    effects, settings = jnp.asarray(EFFECTS, float), {"extra_fields": ("potential_energy",)}
    mcmc, parts = (vectorized(kernel, 60, 10, 8) for kernel in 2 * (SGLD(schools, num_steps=2),))
    mcmc.run(random.key(0), effects, **settings)
    run_in_pieces(parts, random.key(0), effects, piece_size=4, directory=tmp_path, **settings)
    # Programs without optimization may round differently.
    for name, values in mcmc.get_samples().items():
        np.testing.assert_allclose(values, parts.get_samples()[name], rtol=1e-6)
    state = mcmc.last_state
    assert set(mcmc.get_samples()) == set(state.z) == {"mu", "tau", "theta"}
    target = ModelTarget(schools, (effects,))
    energies = jax.vmap(lambda z: target.potential_energy(z, {}, random.key(0)))(state.z)
    np.testing.assert_allclose(state.potential_energy, energies, rtol=1e-4)
    assert centering(mcmc).min() < 0.9
    assert abs(state.potential_energy - state.coordinates[1]).max() > 0.1
    data = to_inference_data(mcmc)
    assert data["posterior"].attrs["centering"].startswith("theta 0.")
    np.testing.assert_allclose(data["sample_stats"]["lp"][:, -1], -energies, rtol=1e-4)


@pytest.mark.parametrize(
    "settings", [{"reparam": None}, {"step_size": 0.01}, {"preconditioner": None}, {"moves": Archive()}]
)
def test_kernels_that_keep_the_coordinates_of_the_model(settings):
    assert centers(SGLD(schools)) and not centers(SGLD(schools, **settings))


def centers(kernel, particles=6):
    state = jax.eval_shape(lambda: kernel.start(random.split(random.key(0), particles), 100, None, (EFFECTS,), {}))
    # Nothing is learned with a given step.
    return getattr(state, "warmup", getattr(state, "learned", None)).centering is not None


def test_optimizers_few_particles_and_own_references_keep_them_too():
    assert not centers(SVGD(schools)) and not centers(SGLD(schools), 3)

    def rows(y):
        tau = numpyro.sample("tau", dist.HalfNormal(1.0))
        theta = numpyro.sample("theta", dist.Normal(0.0, tau))
        with numpyro.plate("rows", 8, subsample_size=2) as i:
            numpyro.sample("y", dist.Normal(theta, 1.0), obs=y[i])

    assert centers(SGLD(rows)) and not centers(SGLD(rows, gradient=SVRG()))


def test_energies_go_on_where_coordinates_change(monkeypatch):
    """At 30 % of warmup a reference is in use, in the old coordinates until it moves."""

    def rows(y):
        mu = numpyro.sample("mu", dist.Normal(0.0, 1000.0))
        tau = numpyro.sample("tau", dist.HalfNormal(5.0))
        theta = numpyro.sample("theta", dist.Normal(mu, tau).expand([6]).to_event(1))
        with numpyro.plate("rows", len(y), subsample_size=30) as i:
            numpyro.sample("y", dist.Normal(theta[i % 6], 20.0), obs=y[i])

    y = 400.0 + 20.0 * random.normal(random.key(5), (300,))
    kernel, keys = SGLD(rows, num_steps=1), random.split(random.key(0), 8)

    def sees(curvature):
        monkeypatch.setattr(scales, "CENTERING", replace(scales.CENTERING, sd=0.0))
        monkeypatch.setattr(scales, "mean_diagonal", lambda rng, u, gradients: np.full(u.shape[-1], curvature))

    sees(np.inf)
    before = warmed(kernel, keys, 29, 100, y)
    assert (before.warmup.centering.share == 1).all() and before.warmup.reference.order
    sees(0.0)
    after = kernel.warm(before, 1, 100, (y,), {})
    assert (after.warmup.centering.share == 0).sum() == 6 and after.warmup.reference.order
    # Evaluated by the reference of the old coordinates, they would be seventy times as high.
    there, here = (kernel.freeze(x, (y,), {}, False, 0).potential_energy.mean() for x in (before, after))
    assert here < 1.5 * there


def bounded(y, upper):
    """The transform of tau depends on an argument of the model."""
    mu = numpyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = numpyro.sample("tau", dist.Uniform(0.0, upper))
    with numpyro.plate("school", len(y)):
        z = numpyro.sample("z", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(mu + tau * z, 10.0), obs=y)


def test_arguments_may_be_inputs_of_the_program():
    draws = []
    for jit_model_args in (False, True):
        mcmc = vectorized(SGLD(bounded, num_steps=2), 60, 3, 6, jit_model_args=jit_model_args)
        mcmc.run(random.key(0), EFFECTS, 20.0)
        draws.append(mcmc.get_samples()["tau"])
        assert len(mcmc.last_state.learned.centering.powers) == 1
    np.testing.assert_allclose(*draws, rtol=1e-3)

    def other(y, upper):
        mu, tau = numpyro.sample("mu", dist.Normal(0.0, 5.0)), numpyro.sample("tau", dist.Uniform(0.0, upper))
        with numpyro.plate("school", len(y)):
            z = numpyro.sample("z", dist.Normal(0.0, 1.0))
            numpyro.sample("y", dist.Normal(mu + tau + z, 10.0), obs=y)

    with pytest.raises(ValueError, match="this kernel's model has others"):
        SGLD(other, num_steps=2).sample(mcmc.last_state, (EFFECTS, 20.0), {})


def test_a_traced_argument_does_not_hide_that_another_changed():
    """The number of rows in a minibatch is a plain number beside traced data."""

    def rows(y, batch):
        mu = numpyro.sample("mu", dist.Normal(0.0, 5.0))
        with numpyro.plate("rows", 40, subsample_size=batch) as i:
            numpyro.sample("y", dist.Normal(mu, 1.0), obs=y[i])

    kernel, found = SGLD(rows), {}
    y = jnp.arange(40.0)
    for batch in (4, 8):
        kernel.bind((y, 4))
        jax.eval_shape(lambda y, batch=batch: found.update({batch: kernel.bind((y, batch)).target.plates}) or y, y)
    assert found == {4: {"rows": (40, 4)}, 8: {"rows": (40, 8)}}


def test_learners_draw_numbers_of_their_own_in_each_window(monkeypatch):
    def drawn(seed):
        found = []

        def draw(rng, window, warmup, cloud, sampler):
            found.append(draw_seed(rng))
            return warmup, cloud

        monkeypatch.setattr(warmup_host, "LEARNERS", (draw, draw))
        kernel, keys = SGLD(potential_fn=lambda z: z @ z / 2), random.split(random.key(seed), 4)
        warmed(kernel, keys, 100, 100, init_params=jnp.ones((4, 2)))
        return found

    numbers = drawn(0) + drawn(1)
    assert len(set(numbers)) == len(numbers) == 4 * len(ENDS)
    assert drawn(0) == numbers[: 2 * len(ENDS)]


def test_energies_are_those_of_the_new_coordinates_at_once():
    effects, keys = jnp.asarray(EFFECTS, float), random.split(random.key(0), 20)
    kernel = SGLD(schools, num_steps=2)
    before, after = (warmed(kernel, keys, iterations, 100, effects) for iterations in (24, 25))
    shares = [np.asarray(each.warmup.centering.share) for each in (before, after)]
    assert (shares[0] == 1.0).all() and shares[1].min() < 0.9
    state = kernel.freeze(after, (effects,), {}, False, 0)
    target = ModelTarget(schools, (effects,))
    energies = jax.vmap(lambda z: target.potential_energy(z, {}, random.key(0)))(state.z)
    np.testing.assert_allclose(state.potential_energy, energies, rtol=1e-4)
