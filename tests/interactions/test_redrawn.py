"""Random features, random groups, and repulsion that changes with the update count; cycles of steps in the kernels.

That K, Γ and the noise belong together is shown in `test_interactions.py`, and that a schedule is exact at every moment
in `test_stationarity.py`, with controls.
"""

from catalogue import INTERACTIONS
import jax
from jax import random
import jax.numpy as jnp
from models import quadratic
import numpy as np
import pytest
from results import run

from numpyro_repulsion import RBF, SGLD, SGLDR, Balanced, Cyclical, Independent
from numpyro_repulsion.dynamics import Overdamped
from numpyro_repulsion.interactions import Gram, RandomFeatures, RandomGroups, Scheduled


@pytest.fixture
def u():
    return random.normal(random.key(0), (6, 2))


def at(interaction, weight):
    return Scheduled(interaction, lambda count: weight).at(random.key(3), 0)


def matrix(interaction, u):
    """K, by what it does to the unit vectors."""
    return jax.jit(lambda u: interaction.couple(u).apply(jnp.eye(len(u))))(u)


# Redrawn


def test_random_features_are_the_kernel_they_say(u):
    interaction = INTERACTIONS["random features"].part
    w = interaction._frequencies(u, 1.5)
    cosines = np.cos(np.einsum("ijd,fd->ijf", u[:, None] - u[None], w)).mean(-1)
    np.testing.assert_allclose(matrix(interaction, u), 0.4 * np.eye(6) + 0.6 * cosines, atol=1e-5)


def test_random_features_are_the_gaussian_kernel_on_average(u):
    def one(key):
        return matrix(RandomFeatures(1.5, num_features=4, weight=0.5, key=key), u)

    draws = np.asarray(jax.jit(jax.vmap(one))(random.split(random.key(1), 4000)))
    exact = 0.5 * np.eye(6) + 0.5 * matrix(RBF(1.5, nugget=1e-9), u)
    error = draws.std(0) / 4000**0.5
    assert (np.abs(draws.mean(0) - exact) < 4.5 * error + 1e-5).all()


def test_groups_are_blocks(u):
    interaction = INTERACTIONS["groups"].part
    full, K = np.asarray(matrix(RBF(1.5), u)), np.asarray(matrix(interaction, u))
    seen = (K != 0).astype(int)
    np.testing.assert_allclose(K[K != 0], full[K != 0], rtol=1e-5)
    assert (seen.sum(1) == 3).all() and (seen @ seen == 3 * seen).all()


@pytest.mark.slow
def test_warmup_learns_what_they_need():
    kernel = SGLDR(potential_fn=quadratic, interaction=RandomFeatures())
    mcmc = run(kernel, num_chains=60, num_warmup=60, num_samples=200)
    learned = mcmc.last_state.learned
    assert np.isfinite(learned.bandwidth) and learned.step_size > 0.01
    squares = (np.asarray(mcmc.get_samples(group_by_chain=True), float) ** 2).mean((1, 2))
    # The tolerated bias, and the standard error over particles, which are nearly independent.
    assert abs(squares.mean() - 1) < 0.05 + 4.5 * squares.std(ddof=1) / len(squares) ** 0.5


def test_every_update_draws_anew(u):
    class Frozen(RandomGroups):
        def at(self, key, count):
            return self

    def end(kind):
        kernel = SGLDR(potential_fn=quadratic, step_size=0.1, interaction=kind(RBF(1.0), size=3), num_steps=2)
        return run(kernel, num_samples=10).last_state.z

    assert not np.allclose(end(RandomGroups), end(Frozen))
    one, two = (matrix(RandomFeatures(1.0).at(random.key(seed), 0), u) for seed in (0, 1))
    assert not np.allclose(one, two)


# Scheduled


@pytest.mark.parametrize("name", ["rbf", "groups"])
def test_what_lies_between_is_a_mixture(name, u):
    interaction = INTERACTIONS[name].part
    plain = interaction.at(random.key(3), 0).couple(u)
    one, zero, mixed = (at(interaction, weight).couple(u) for weight in (1.0, 0.0, 0.3))
    x, key = u + 1.0, random.split(random.key(1))[0]
    np.testing.assert_array_equal(one.apply(x), plain.apply(x))
    np.testing.assert_array_equal(one.repulsion, plain.repulsion)
    np.testing.assert_array_equal(one.draw(random.key(1)), plain.draw(key))
    np.testing.assert_array_equal(zero.apply(x), x)
    np.testing.assert_array_equal(zero.repulsion, jnp.zeros_like(u))
    np.testing.assert_allclose(mixed.apply(x), 0.3 * plain.apply(x) + 0.7 * x, atol=1e-6)
    np.testing.assert_allclose(mixed.repulsion, 0.3 * plain.repulsion, atol=1e-6)
    assert float(one.bound) == pytest.approx(float(plain.bound), rel=1e-6) and float(zero.bound) == 1.0
    for weight, inside in ((lambda count: 1.0 + count, one), (lambda count: -1.0 * count, zero)):
        beyond = Scheduled(interaction, weight).at(random.key(3), 7).couple(u)
        np.testing.assert_array_equal(beyond.apply(x), inside.apply(x))


def test_balanced_groups_stay_balanced(u):
    clouds = jnp.stack([u, u, u])

    @jax.jit
    def noise(key, clouds):
        coupling = at(Balanced(RBF(1.5)), 0.4).couple(clouds)
        return coupling.draw(key), coupling.white(key)

    for found in noise(random.key(0), clouds):
        np.testing.assert_allclose(found.sum(0), 0.0, atol=1e-4)
    with pytest.raises(ValueError, match="set num_ensembles=2 or more"):
        SGLDR(potential_fn=quadratic, interaction=Scheduled(Balanced(RBF()), lambda count: 0.5))


def test_the_weight_is_that_of_the_update():
    # A weight of 0 is plain SGLD by another noise; switched at update 4, only what comes before is repelled.
    def draws(weight):
        interaction = Scheduled(RBF(1.0), weight)
        kernel = SGLDR(potential_fn=quadratic, step_size=0.1, num_steps=2, interaction=interaction)
        return run(kernel, num_samples=3).get_samples(group_by_chain=True)

    switched, always = draws(lambda count: jnp.where(count < 4, 1.0, 0.0)), draws(lambda count: 1.0)
    assert np.array_equal(switched[:, :2], always[:, :2])
    assert not np.allclose(switched[:, 2], always[:, 2])


def test_warmup_reckons_with_the_largest_eigenvalue(u):
    near, far = Scheduled(RBF(50.0), lambda count: 0.1), Scheduled(0.2 * RBF(1e-3), lambda count: 0.1)
    assert float(near.couple(u).bound) == float(RBF(50.0).couple(u).bound) > 2.0
    assert float(far.couple(u).bound) == 1.0


def test_kernels_not_known_to_be_positive_definite_are_tested(u):
    """As they are without a schedule, and in the groups that are drawn."""

    class Negative(Gram):
        def evaluate(self, x, y, bandwidth):
            return jnp.sum((x - y) ** 2)

    class Gaussian(Gram):
        def evaluate(self, x, y, bandwidth):
            return jnp.exp(-jnp.sum((x - y) ** 2) / 4)

    def scheduled(gram):
        return Scheduled(RandomGroups(gram, size=3), lambda count: 0.1)

    for interaction in (scheduled(Negative()), RandomGroups(Negative(), size=3)):
        kernel = SGLDR(potential_fn=quadratic, step_size=0.01, interaction=interaction)
        with pytest.raises(ValueError, match="not positive definite on the starting particles"):
            kernel.init(random.split(random.key(0), 6), 0, u, (), {})
    kernel = SGLDR(potential_fn=quadratic, step_size=0.01, interaction=scheduled(Gaussian()))
    kernel.init(random.split(random.key(0), 6), 0, u, (), {})
    gram, _ = kernel.interaction.at(random.key(0), 0).gram(u, None)
    np.testing.assert_allclose(jnp.trace(gram, axis1=1, axis2=2), 3 * (1 + 1e-3 / 10), rtol=1e-6)


def test_wrong_settings_are_refused(u):
    with pytest.raises(ValueError, match="weight"):
        RandomFeatures(weight=1.0)
    with pytest.raises(ValueError, match="`size` must be an integer, 2 or more"):
        RandomGroups(RBF(), size=1)
    with pytest.raises(TypeError, match="takes an interaction with a Gram matrix"):
        RandomGroups(Balanced())
    with pytest.raises(ValueError, match="needs a multiple of 4 particles in each ensemble; got 6"):
        RandomGroups(RBF(1.0), size=4).couple(u)
    for interaction in (Independent(), Balanced(), "rbf", RBF):
        with pytest.raises(TypeError, match="takes an interaction whose K depends on the particles"):
            Scheduled(interaction, lambda count: 1.0)
    for weight in (0.5, None):
        with pytest.raises(TypeError, match="must be a callable of the update count"):
            Scheduled(RBF(), weight)
    for first in (-0.1, 1.1, float("nan"), jnp.ones(2)):
        with pytest.raises(ValueError, match=r"must be a number in \[0, 1\]"):
            Scheduled(RBF(), lambda count, first=first: first)
    for interaction in (RandomFeatures(), Scheduled(RBF(), lambda count: 1.0)):
        with pytest.raises(TypeError, match=r"with a Gram matrix can be added.*Scheduled\(a \+ b, weight\)"):
            interaction + RBF()
    # The name is the same in every run.
    assert repr(Scheduled(RBF(1.0), lambda count: 1.0)) == f"Scheduled({RBF(1.0)!r}, weight=<lambda>)"


# Cycles


def test_draws_are_the_ends_of_cycles():
    """The variance of N(0, 1) under Euler's update is known; short last steps leave much of what the first ones do."""
    cycle = Cyclical(1.5, length=8)
    kernel = SGLD(potential_fn=quadratic, step_size=cycle, num_steps=8, interaction=Independent(),
                  dynamics=Overdamped("euler"))  # fmt: skip
    starts = random.normal(random.key(1), (40_000, 1))
    mcmc = run(kernel, num_samples=3, num_chains=40_000, init_params=starts, extra_fields=("step_size",))
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
            SGLD(potential_fn=quadratic, step_size=Cyclical(0.1, length=20), num_steps=num_steps)
    SGLD(potential_fn=quadratic, step_size=Cyclical(0.1, length=20), num_steps=40)
