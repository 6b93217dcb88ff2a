"""Repulsion that changes with the update count, and cycles of steps, inside the kernels.

That it is exact at every moment is shown in `test_stationarity.py`, with controls.
"""

from catalogue import INTERACTIONS
import jax
from jax import random
import jax.numpy as jnp
from models import vectorized
import numpy as np
import optax
import pytest

from numpyro_repulsion import RBF, SGLD, SGLDR, Balanced, Cyclical, Independent
from numpyro_repulsion.dynamics import Overdamped
from numpyro_repulsion.interactions import Gram, RandomFeatures, RandomGroups, Scheduled

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
    mcmc = vectorized(kernel, num_warmup, num_samples, num_chains)
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


@pytest.mark.slow
def test_an_optax_schedule_is_a_weight_and_warmup_learns_the_rest():
    weight = optax.linear_schedule(1.0, 0.0, transition_steps=800)
    mcmc = run(SGLDR(potential_fn=quadratic, interaction=Scheduled(RBF(), weight)), 20, 60, 200)
    learned = mcmc.last_state.learned
    assert np.isfinite(learned.bandwidth) and learned.step_size > 0.01
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
    return kind(potential_fn=quadratic, step_size=cycle, **{"num_steps": cycle.length} | kwargs)


def test_draws_are_the_ends_of_cycles():
    """The variance of N(0, 1) under Euler's update is known; short last steps leave much of what the first ones do."""
    cycle = Cyclical(1.5, length=8)
    kernel = kernel_of(cycle, interaction=Independent(), dynamics=Overdamped("euler"))
    mcmc = run(kernel, 40_000, num_samples=3, dimension=1)
    np.testing.assert_allclose(mcmc.get_extra_fields()["step_size"], float(cycle(7)), rtol=1e-5)
    z = np.asarray(mcmc.get_samples(group_by_chain=True))[..., 0]
    variance, expected = 1.0, []
    for count in range(24):
        ε = float(cycle(count))
        variance = (1.0 - ε) ** 2 * variance + 2.0 * ε
        expected.append(variance)
    scores = ((z**2).mean(0) / expected[7::8] - 1.0) / (2 / len(z)) ** 0.5
    assert np.abs(scores).max() < 4.5, scores
    # The control: the longest step of a cycle.
    scores = ((z**2).mean(0) / expected[0::8] - 1.0) / (2 / len(z)) ** 0.5
    assert np.abs(scores).max() > 9.0, scores


def test_cycles_that_do_not_fit_are_refused():
    for num_steps in (1, 5, 30):
        with pytest.raises(ValueError, match="A cycle of 20 updates gives one draw.* num_steps=20, or a multiple"):
            kernel_of(Cyclical(0.1, length=20), num_steps=num_steps)
    kernel_of(Cyclical(0.1, length=20), num_steps=40)
