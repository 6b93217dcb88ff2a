"""Repulsion that changes with the update count, and cycles of steps, inside the kernels.

That it is exact at every moment is shown in `test_stationarity.py`, with controls.
"""

from catalogue import INTERACTIONS
import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from numpyro.infer import MCMC

from numpyro_repulsion import (
    RBF,
    SGHMC,
    SGLD,
    SGLDR,
    Balanced,
    Cyclical,
    Gram,
    Independent,
    Overdamped,
    RandomFeatures,
    RandomGroups,
    Scheduled,
)

INNER = [
    *(INTERACTIONS[name].part for name in ("rbf", "sum, wide", "laplacian", "groups")),
    RandomFeatures(1.5, num_features=8),
]


@pytest.fixture
def u():
    return random.normal(random.key(0), (6, 2))


def at(interaction, weight):
    return Scheduled(interaction, lambda count: weight).at(random.key(3), 0)


def matrix(interaction, u):
    """K, by what it does to the unit vectors."""
    return interaction.couple(u).apply(jnp.eye(len(u)))


def quadratic(z):
    return jnp.sum(z**2) / 2


def run(kernel, num_chains=6, num_warmup=0, num_samples=10, dimension=2, key=0):
    mcmc = MCMC(
        kernel,
        num_warmup=num_warmup,
        num_samples=num_samples,
        num_chains=num_chains,
        chain_method="vectorized",
        progress_bar=False,
    )
    starts = random.normal(random.key(1), (num_chains, dimension))
    mcmc.run(random.key(key), init_params=starts if num_chains > 1 else starts[0], extra_fields=("step_size",))
    return mcmc


# Repulsion


@pytest.mark.parametrize("interaction", INNER, ids=repr)
def test_a_weight_of_one_is_the_interaction_and_of_zero_none(interaction, u):
    plain, one, zero = interaction.at(random.key(3), 0).couple(u), at(interaction, 1.0).couple(u), at(interaction, 0.0)
    zero, x = zero.couple(u), u + 1.0
    np.testing.assert_array_equal(one.apply(x), plain.apply(x))
    np.testing.assert_array_equal(one.repulsion, plain.repulsion)
    key = random.split(random.key(1))[0]
    np.testing.assert_array_equal(one.draw(random.key(1)), plain.draw(key))
    np.testing.assert_array_equal(zero.apply(x), x)
    np.testing.assert_array_equal(zero.repulsion, jnp.zeros_like(u))
    assert float(one.bound) == pytest.approx(float(plain.bound), rel=1e-6) and float(zero.bound) == 1.0
    noise = np.asarray(jax.vmap(zero.draw)(random.split(random.key(2), 2000)))
    assert abs((noise**2).mean() - 1.0) < 4.5 * (2 / noise.size) ** 0.5


@pytest.mark.parametrize("interaction", INNER, ids=repr)
def test_what_lies_between_is_a_mixture(interaction, u):
    mixed = at(interaction, 0.3)
    K = np.asarray(matrix(mixed, u))
    np.testing.assert_allclose(K, 0.3 * matrix(at(interaction, 1.0), u) + 0.7 * np.eye(6), atol=1e-6)
    derivatives = jax.jit(jax.jacfwd(lambda moved: matrix(mixed, moved)))(u)
    np.testing.assert_allclose(mixed.couple(u).repulsion, np.einsum("ijjd->id", derivatives), atol=1e-5)
    assert float(mixed.couple(u).bound) >= np.linalg.eigvalsh(K)[-1] * (1 - 1e-5)
    draws = np.asarray(jax.vmap(mixed.couple(u).draw)(random.split(random.key(1), 20_000)))
    products = np.einsum("nid,njd->nij", draws, draws) / 2
    error = products.std(0) / 20_000**0.5
    assert (np.abs(products.mean(0) - K) < 4.5 * error).all()
    # With the noise of the interaction alone it could not pass.
    assert (np.abs(products.mean(0) - matrix(at(interaction, 1.0), u)) > 9 * error).any()


def test_balanced_groups_stay_balanced(u):
    clouds = jnp.stack([u, u, u])
    coupling = at(Balanced(RBF(1.5)), 0.4).couple(clouds)
    np.testing.assert_allclose(coupling.draw(random.key(0)).sum(0), 0.0, atol=1e-4)
    np.testing.assert_allclose(coupling.white(random.key(0)).sum(0), 0.0, atol=1e-4)
    with pytest.raises(ValueError, match="set num_ensembles=2 or more"):
        SGLDR(potential_fn=quadratic, interaction=Scheduled(Balanced(RBF()), lambda count: 0.5))


def test_the_weight_is_that_of_the_update():
    # A weight of 0 is plain SGLD by another noise; switched at update 4, only what comes before is repelled.
    def end(interaction, num_samples):
        kernel = SGLDR(potential_fn=quadratic, step_size=0.1, num_steps=2, interaction=interaction)
        return run(kernel, num_samples=num_samples).last_state.z

    switched = Scheduled(RBF(1.0), lambda count: jnp.where(count < 4, 1.0, 0.0))
    always = Scheduled(RBF(1.0), lambda count: 1.0)
    assert np.array_equal(end(switched, 2), end(always, 2))
    assert not np.allclose(end(switched, 3), end(always, 3))


def test_values_beyond_are_clipped(u):
    x = u + 1.0
    for weight, inside in ((lambda count: 1.0 + count, 1.0), (lambda count: -1.0 * count, 0.0)):
        beyond = Scheduled(RBF(1.5), weight).at(None, 7).couple(u)
        np.testing.assert_array_equal(beyond.apply(x), at(RBF(1.5), inside).couple(u).apply(x))


def test_warmup_reckons_with_the_largest_eigenvalue(u):
    near, far = Scheduled(RBF(50.0), lambda count: 0.1), Scheduled(0.2 * RBF(1e-3), lambda count: 0.1)
    assert float(near.couple(u).bound) == float(RBF(50.0).couple(u).bound) > 2.0
    assert float(far.couple(u).bound) == 1.0


@pytest.mark.filterwarnings("ignore:Warmup found problems")
@pytest.mark.slow
def test_an_optax_schedule_is_a_weight_and_warmup_learns_the_rest():
    weight = optax.linear_schedule(1.0, 0.0, transition_steps=800)
    mcmc = run(SGLDR(potential_fn=quadratic, interaction=Scheduled(RBF(), weight)), 20, 60, 200)
    warmup = mcmc.last_state.warmup
    assert np.isfinite(warmup.bandwidth) and warmup.step.size > 0.01
    squares = (np.asarray(mcmc.get_samples(group_by_chain=True), float) ** 2).mean((1, 2))
    # The tolerated bias, and the standard error over particles, which are nearly independent.
    assert abs(squares.mean() - 1) < 0.05 + 4.5 * squares.std(ddof=1) / len(squares) ** 0.5


def test_a_kernel_not_known_to_be_positive_definite_is_tested_as_it_is():
    class Negative(type(RBF())):
        positive_definite = False

        def gram(self, u, bandwidth=None):
            gram, repulsion = super().gram(u, bandwidth)
            return gram - 2.0 * jnp.eye(len(u)), repulsion

    with pytest.raises(ValueError, match="not positive definite on the starting particles"):
        run(SGLDR(potential_fn=quadratic, step_size=0.1, interaction=Scheduled(Negative(1.0), lambda count: 0.1)))


def test_redrawn_groups_of_a_kernel_not_known_to_be_positive_definite(u):
    class Gaussian(Gram):
        def evaluate(self, x, y, bandwidth):
            return jnp.exp(-jnp.sum((x - y) ** 2) / 4)

    interaction = Scheduled(RandomGroups(Gaussian(), size=3), lambda count: 0.5)
    kernel = SGLDR(potential_fn=quadratic, step_size=0.01, interaction=interaction)
    kernel.init(random.split(random.key(0), 6), 0, u, (), {})
    gram, _ = interaction.at(random.key(0), 0).gram(u, None)
    np.testing.assert_allclose(jnp.trace(gram, axis1=1, axis2=2), 3 * (1 + 1e-3 / 2), rtol=1e-6)


def test_its_name_is_the_same_in_every_run():
    assert repr(Scheduled(RBF(1.0), lambda count: 1.0)) == f"Scheduled({RBF(1.0)!r}, weight=<lambda>)"


def test_wrong_settings_are_refused():
    for interaction in (Independent(), Balanced(), "rbf", RBF):
        with pytest.raises(TypeError, match="takes an interaction whose K depends on the particles"):
            Scheduled(interaction, lambda count: 1.0)
    for weight in (0.5, None):
        with pytest.raises(TypeError, match="must be a callable of the update count"):
            Scheduled(RBF(), weight)
    for first in (-0.1, 1.1, float("nan"), jnp.ones(2)):
        with pytest.raises(ValueError, match=r"must be a number in \[0, 1\]"):
            Scheduled(RBF(), lambda count, first=first: first)
    with pytest.raises(TypeError, match=r"Scheduled\(a \+ b, weight\)"):
        Scheduled(RBF(), lambda count: 1.0) + RBF()


# Cycles


def kernel_of(cycle, kind=SGLD, **kwargs):
    return kind(potential_fn=quadratic, step_size=cycle, **{"num_steps": 5} | kwargs)


def test_draws_are_of_the_cold_part_alone():
    cycle = Cyclical(0.4, length=25, exploration=0.4)
    mcmc = run(kernel_of(cycle), num_samples=8)
    # Ten hot updates at the beginning, and draws after each five of the others.
    expected = [float(cycle(count)) for count in (14, 19, 24)]
    steps = mcmc.get_extra_fields(group_by_chain=True)["step_size"]
    np.testing.assert_allclose(steps, np.tile((expected * 3)[:8], (6, 1)), rtol=1e-5)
    assert max(expected) < float(cycle(cycle.num_hot))
    assert int(mcmc.last_state.num_updates) == 3 * 10 + 8 * 5
    assert int(mcmc.last_state.warmup.iteration) == 8


def variances(cycle, num_draws, num_steps, makes_hot=True):
    """The variance of N(0, 1) under Euler's update, exactly, at the draws."""
    variance, found = 1.0, []
    for count in range(10**6):
        hot = count % cycle.length < cycle.num_hot
        if makes_hot or not hot:
            ε = float(cycle(count))
            variance = (1.0 - ε) ** 2 * variance + 2.0 * ε
        if not hot and (count % cycle.length - cycle.num_hot + 1) % num_steps == 0:
            found.append(variance)
        if len(found) == num_draws:
            return np.array(found)


def test_all_updates_of_a_cycle_are_made():
    # Short cold steps, which leave much of what the hot ones do.
    cycle = Cyclical(1.5, length=16, exploration=0.75)
    kernel = kernel_of(cycle, num_steps=2, interaction=Independent(), dynamics=Overdamped("euler"))
    z = np.asarray(run(kernel, 40_000, num_samples=6, dimension=1).get_samples(group_by_chain=True))[..., 0]
    error = (2 / len(z)) ** 0.5
    scores = ((z**2).mean(0) / variances(cycle, 6, 2) - 1.0) / error
    assert np.abs(scores).max() < 4.5, scores
    scores = ((z**2).mean(0) / variances(cycle, 6, 2, makes_hot=False) - 1.0) / error
    assert np.abs(scores).max() > 9.0, scores


@pytest.mark.parametrize(
    ("kind", "num_chains", "preconditioner", "num_warmup"),
    [
        (SGLD, 1, None, 0),
        pytest.param(SGLDR, 6, "diagonal", 50, marks=pytest.mark.slow),
        pytest.param(SGHMC, 1, None, 3, marks=pytest.mark.slow),
    ],
)
def test_resume_is_exact_over_the_end_of_a_cycle(kind, num_chains, preconditioner, num_warmup):
    # A cycle gives three draws, and arriving particles of warmup keep the count too.
    kernel = kernel_of(Cyclical(0.1, length=25, exploration=0.4), kind, preconditioner=preconditioner)
    whole = run(kernel, num_chains, num_warmup, 10)
    parts = run(kernel, num_chains, num_warmup, 5)
    first, state = parts.get_samples(group_by_chain=True), parts.last_state
    parts.post_warmup_state = state
    parts.run(state.rng_key if num_chains == 1 else jnp.repeat(state.rng_key[None], num_chains, 0))
    together = jnp.concatenate([first, parts.get_samples(group_by_chain=True)], 1)
    assert np.array_equal(whole.get_samples(group_by_chain=True), together)
    cycles = -(-(10 + num_warmup) // 3)
    for state in (whole.last_state, parts.last_state):
        assert int(state.num_updates) == 10 * cycles + 5 * (10 + num_warmup)
    assert (whole.get_extra_fields()["step_size"] < kernel.step_size(10)).all()


def test_warmup_then_run_goes_on_in_the_cycle():
    cycle = Cyclical(0.1, length=25, exploration=0.4)
    mcmc = MCMC(kernel_of(cycle), num_warmup=4, num_samples=3, num_chains=1, progress_bar=False)
    mcmc.warmup(random.key(0), init_params=jnp.ones(2))
    mcmc.run(random.key(1), extra_fields=("step_size",))
    expected = [float(cycle(count)) for count in (19, 24, 14)]
    np.testing.assert_allclose(mcmc.get_extra_fields()["step_size"], expected, rtol=1e-5)


def test_the_state_of_another_kernel_leads_to_the_next_whole_draw():
    cycle = Cyclical(0.4, length=25, exploration=0.4)
    for count in range(50):
        ahead = int(cycle.num_ahead(jnp.asarray(count), 5))
        made = (count + np.arange(ahead, ahead + 5)) % 25
        assert (made >= 10).all() and ahead < 10 + 5
    counts = jnp.array([0, 3, 10, 15, 20, 22, 25])
    assert cycle.num_ahead(counts, 5).tolist() == [10, 7, 0, 0, 0, 13, 10]


@pytest.mark.filterwarnings("ignore:A particle's update")
def test_what_diverges_in_the_hot_part_counts():
    def wall(z):  # A hot step leads to where the energy is not finite, a cold one does not.
        return jnp.where(jnp.abs(z) < 20.0, z**2, jnp.inf).sum() / 2

    cycle = Cyclical(1e6, length=1000, exploration=0.998)
    mcmc = run(SGLD(potential_fn=wall, step_size=cycle, num_steps=2), num_samples=1)
    assert float(cycle(998)) < 20.0
    assert int(mcmc.last_state.num_divergences) > 100 and mcmc.last_state.diverging.all()


def test_cycles_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"11 cold ones, .* multiple of num_steps=5.*length=20 or length=29"):
        kernel_of(Cyclical(0.1, length=21))
    with pytest.raises(ValueError, match=r"Use length=9, or another"):
        kernel_of(Cyclical(0.1, length=4))
    for length in (20, 29):
        kernel_of(Cyclical(0.1, length=length))
