"""K, Γ and the noise, against definitions written out here."""

from dataclasses import FrozenInstanceError
from itertools import pairwise
import pickle

from catalogue import INTERACTIONS, Cosine, Laplace, having
import jax
from jax import lax, random
import jax.numpy as jnp
import numpy as np
from programs import shapes
import pytest
from scipy.spatial.distance import cdist
from scipy.stats import kstest, norm

from numpyro_repulsion import IMQ, RBF, Antithetic, Balanced, Independent
from numpyro_repulsion.dynamics import Overdamped
from numpyro_repulsion.interactions import (
    Gram,
    Interaction,
    Laplacian,
    Radial,
    RandomGroups,
    Sum,
    balanced,
    median_bandwidth,
    squared_distances,
)

#: Beyond so many standard errors a deviation is none of chance: 6 in 10 million for one normal number.
SIGMAS = 5.0


GRAMS = having(INTERACTIONS, "pairs")
ALL = GRAMS | having(INTERACTIONS, "identity")
BANDWIDTH = 2.1

grams = pytest.mark.parametrize("interaction", GRAMS.values(), ids=GRAMS)
everything = pytest.mark.parametrize("interaction", ALL.values(), ids=ALL)


def cloud(size=6, dim=3, seed=0):
    return random.normal(random.key(seed), (size, dim))


def matrix(interaction, u, bandwidth=BANDWIDTH):
    """K, by the definition: the kernel of each pair, and the nugget on the diagonal."""
    if isinstance(interaction, Sum):
        return sum(weight * matrix(term, u, bandwidth) for weight, term in interaction.terms)
    if not isinstance(interaction, Gram):
        return jnp.eye(len(u))
    if isinstance(interaction, Laplacian):
        pairs = interaction.strength * matrix(interaction.interaction, u, bandwidth)
        between = pairs - jnp.diag(jnp.diag(pairs))
        return jnp.eye(len(u)) + jnp.diag(between.sum(1)) - between
    pairs = jax.vmap(lambda x: jax.vmap(lambda y: interaction.evaluate(x, y, bandwidth))(u))(u)
    return pairs + interaction.nugget * jnp.eye(len(u))


def divergence(interaction, u, bandwidth=BANDWIDTH):
    """Γ_i = Σ_j ∂K_ij / ∂u_j, by automatic differentiation of the whole matrix."""
    return jnp.einsum("ijjd->id", jax.jacobian(lambda v: matrix(interaction, v, bandwidth))(u))


def columns(coupling, u):
    """K, by applying it to the unit vectors."""
    return jax.vmap(lambda unit: coupling.apply(jnp.broadcast_to(unit[:, None], u.shape))[:, 0])(jnp.eye(len(u))).T


@everything
def test_apply_is_the_matrix(x64, interaction):
    u, x = cloud(), cloud(seed=1)
    coupling = interaction.couple(u, BANDWIDTH)
    np.testing.assert_allclose(coupling.apply(x), matrix(interaction, u) @ x, rtol=1e-12, atol=1e-12)


@everything
def test_repulsion_is_the_divergence_of_the_matrix(x64, interaction):
    u = cloud()
    expected = divergence(interaction, u)
    given = jnp.broadcast_to(interaction.couple(u, BANDWIDTH).repulsion, u.shape)
    np.testing.assert_allclose(given, expected, rtol=1e-12, atol=1e-12)
    if interaction.interacts:  # with the sign flipped, or without Γ, it could not pass
        assert jnp.abs(expected).max() > 1e-2


def test_repulsion_repels(x64):
    u = jnp.array([[0.0], [1.0]])
    for interaction in (RBF(1.0), IMQ(1.0), Laplace(1.0)):
        left, right = interaction.couple(u).repulsion
        assert left < 0 < right


def test_rbf_and_imq_are_what_they_say(x64):
    x, y = jnp.array([1.0, 2.0]), jnp.array([0.5, 4.0])
    assert float(RBF(3.0).evaluate(x, y)) == pytest.approx(np.exp(-4.25 / 3))
    assert float(IMQ(3.0).evaluate(x, y)) == pytest.approx((1 + 4.25 / 3) ** -0.5)
    assert float(RBF().evaluate(x, y, 3.0)) == float(RBF(3.0).evaluate(x, y)) == float(RBF(3.0).evaluate(x, y, 9.0))


@everything
def test_matrix_is_symmetric_and_positive_semidefinite(x64, interaction):
    for u in (cloud(), cloud(20, 1, 1), 0.01 * cloud(20, 2, 2)):
        gram = columns(interaction.couple(u, BANDWIDTH), u)
        np.testing.assert_allclose(gram, gram.T, rtol=0, atol=1e-14)
        assert jnp.linalg.eigvalsh(gram).min() > -1e-12


@everything
def test_bound_is_above_the_largest_eigenvalue(x64, interaction):
    for u in (cloud(), 0.1 * cloud(20, 2, 1), 5.0 * cloud(20, 2, 2)):
        largest = jnp.linalg.eigvalsh(matrix(interaction, u)).max()
        bound = interaction.couple(u, BANDWIDTH).bound
        assert largest <= bound * (1 + 1e-12)
        assert bound <= len(u) * jnp.abs(matrix(interaction, u)).max()  # and of use


def assert_covariance(noise, expected):
    """Whether draws ``(n, L, d)`` have covariance ``expected ⊗ I``, by the standard errors of all entries."""
    count, size, dim = noise.shape
    flat = noise.reshape(count, size * dim)
    products = flat[:, :, None] * flat[:, None, :]
    error = products.std(0) / count**0.5
    deviation = jnp.abs(products.mean(0) - jnp.kron(expected, jnp.eye(dim)))
    assert (deviation < SIGMAS * error + 1e-6).all()
    assert (jnp.abs(flat.mean(0)) < SIGMAS * flat.std(0) / count**0.5 + 1e-6).all()


def draws(coupling, count=20_000, seed=0):
    return jax.vmap(coupling.draw)(random.split(random.key(seed), count))


@grams
def test_noise_has_covariance_K(interaction):
    u = cloud(4, 2)
    noise, gram = draws(interaction.couple(u, BANDWIDTH)), matrix(interaction, u)
    assert_covariance(noise, gram)
    with pytest.raises(AssertionError):
        assert_covariance(noise, 1.15 * gram)
    with pytest.raises(AssertionError):
        assert_covariance(noise, jnp.diag(jnp.diag(gram)))


def test_nugget_is_in_the_noise():
    u = cloud(4, 2)
    noise = draws(RBF(1.0, nugget=0.2).couple(u))
    assert_covariance(noise, matrix(RBF(1.0, nugget=0.2), u))
    with pytest.raises(AssertionError):
        assert_covariance(noise, matrix(RBF(1.0, nugget=1e-6), u))


def test_independent_noise_is_white():
    assert_covariance(draws(Independent().couple(cloud(4, 2))), jnp.eye(4))


def test_balanced_noise_sums_to_zero_with_white_slices():
    noise = draws(Balanced().couple(cloud(4, 2)))
    np.testing.assert_allclose(noise.sum(1), 0.0, atol=1e-5)
    # Slices have unit variance, and share the −1 that makes the sum zero.
    assert_covariance(noise, 4 / 3 * (jnp.eye(4) - 1 / 4))


def test_balanced_noise_of_one_particle_is_plain():
    u = cloud(1, 2)
    assert (Balanced().couple(u).draw(random.key(0)) == Independent().couple(u).draw(random.key(0))).all()


def test_balanced_noise_in_groups_is_balanced_within_each():
    noise = draws(Balanced().couple(cloud(6, 2).reshape(2, 3, 2)))
    np.testing.assert_allclose(noise.sum(2), 0.0, atol=1e-5)
    within = 3 / 2 * (jnp.eye(3) - 1 / 3)
    assert_covariance(noise.reshape(-1, 6, 2), jnp.kron(jnp.eye(2), within))


def test_balanced_groups_have_the_law_of_their_interaction_and_cancel_across():
    u = cloud(9, 2).reshape(3, 3, 2)
    coupling, plain = Balanced(RBF(1.0)).couple(u), RBF(1.0).couple(u)
    noise = draws(coupling)
    for group, points in enumerate(u):
        assert_covariance(noise[:, group], matrix(RBF(1.0), points))
    roots = jnp.linalg.cholesky(jnp.stack([matrix(RBF(1.0), points) for points in u]))
    white = jnp.linalg.solve(roots, noise[:100])
    np.testing.assert_allclose(white.sum(1), 0.0, atol=1e-3)
    across = 3 / 2 * (jnp.eye(3) - 1 / 3)
    expected = jnp.einsum("gh,gij,hkj->gihk", across, roots, roots).reshape(9, 9)
    assert_covariance(noise.reshape(-1, 9, 2), expected)
    assert (coupling.repulsion == plain.repulsion).all()
    assert (coupling.apply(u) == plain.apply(u)).all()


def test_balanced_interaction_needs_groups():
    for u in (cloud(), cloud()[None]):
        with pytest.raises(ValueError, match=r"at least two of them.*num_ensembles=2"):
            Balanced(RBF(1.0)).couple(u)


@everything
def test_groups_are_coupled_separately(x64, interaction):
    u, x = cloud(8, 3).reshape(2, 4, 3), cloud(8, 3, 1).reshape(2, 4, 3)
    together = interaction.couple(u, BANDWIDTH)
    apart = [interaction.couple(group, BANDWIDTH) for group in u]
    expected = jnp.stack([coupling.apply(y) for coupling, y in zip(apart, x, strict=True)])
    np.testing.assert_allclose(together.apply(x), expected, rtol=1e-12, atol=1e-14)
    expected = jnp.stack([jnp.broadcast_to(coupling.repulsion, (4, 3)) for coupling in apart])
    np.testing.assert_allclose(jnp.broadcast_to(together.repulsion, u.shape), expected, rtol=1e-12, atol=1e-14)
    # Eigenvalues of a batch of matrices are rounded apart from those of one.
    assert together.bound >= max(coupling.bound for coupling in apart) * (1.0 - 1e-12)


@grams
def test_noise_of_groups_is_independent(interaction):
    u = cloud(4, 2).reshape(2, 2, 2)
    blocks = jax.scipy.linalg.block_diag(*[matrix(interaction, group) for group in u])
    assert_covariance(draws(interaction.couple(u, BANDWIDTH)).reshape(-1, 4, 2), blocks)


def all_pairs_of_coordinates(interaction, size=17, dim=5):
    """Whether anything as big as all differences of coordinates is formed."""

    def work(u, key):
        coupling = interaction.couple(u, BANDWIDTH)
        return coupling.apply(u), coupling.repulsion, coupling.draw(key), coupling.bound

    program = jax.make_jaxpr(work)(jnp.zeros((size, dim)), random.key(0))
    found = list(shapes(program.jaxpr))
    assert (size, size) in found
    return any(np.prod(shape) >= size * size * dim for shape in found)


@pytest.mark.parametrize("interaction", [RBF(), IMQ(), 0.5 * RBF() + 0.5 * IMQ(1.0)], ids=repr)
def test_memory_does_not_grow_with_pairs_times_dimension(interaction):
    assert not all_pairs_of_coordinates(interaction)


def test_memory_of_a_naive_kernel_would_be_seen():
    class Naive(RBF):
        def gram(self, u, bandwidth):
            return jnp.exp(-((u[:, None] - u) ** 2).sum(-1)) + jnp.eye(len(u)), u

    assert all_pairs_of_coordinates(Naive())


@pytest.mark.parametrize("interaction", [RBF(), IMQ(), Laplace(), 0.5 * RBF() + 0.5 * IMQ()], ids=repr)
@pytest.mark.parametrize("u", [jnp.ones((200, 3)), cloud(200, 3), cloud(200, 3).at[1].set(cloud(200, 3)[0])])
def test_close_particles_stay_finite_in_float32(interaction, u):
    coupling = interaction.couple(u, 1e5)
    assert u.dtype == jnp.float32
    for value in (coupling.apply(u), coupling.repulsion, coupling.draw(random.key(0)), coupling.bound):
        assert jnp.isfinite(value).all()


@pytest.mark.parametrize("interaction", [RBF(), IMQ(), Cosine()], ids=repr)
def test_coincident_particles_do_not_repel_each_other(interaction):
    u = jnp.ones((5, 3))
    np.testing.assert_allclose(interaction.couple(u, 1.0).repulsion, 0.0, atol=1e-6)


@pytest.mark.parametrize("interaction", [RBF(1.0), IMQ(1.0), Laplace(1.0), 2.0 * RBF(1.0)], ids=repr)
@pytest.mark.parametrize("distance", [1e19, 1e30, -3e38])
@pytest.mark.parametrize("runaway", [0, 2, 5])
def test_a_runaway_particle_leaves_the_others_alone(interaction, distance, runaway):
    u = cloud().at[runaway, 1].set(distance)
    others = jnp.delete(jnp.arange(len(u)), runaway)
    given, alone = interaction.couple(u), interaction.couple(u[others])
    np.testing.assert_allclose(given.repulsion[others], alone.repulsion, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(given.repulsion[runaway], 0.0, atol=1e-6)
    x = cloud(seed=1)
    np.testing.assert_allclose(
        given.apply(x.at[runaway].set(0.0))[others], alone.apply(x[others]), rtol=1e-5, atol=1e-6
    )
    assert jnp.isfinite(given.draw(random.key(0))).all()
    assert float(given.bound) == pytest.approx(float(alone.bound), rel=1e-5)


def test_squared_distances_far_from_the_origin():
    near = np.random.default_rng(0).normal(size=(20, 4))
    u = (near + 1e4).astype(np.float32)
    exact = cdist(u.astype(np.float64), u.astype(np.float64), "sqeuclidean")
    given = squared_distances(jnp.asarray(u))
    np.testing.assert_allclose(given, exact, rtol=1e-5, atol=1e-5)
    assert (jnp.diag(given) == 0).all() or jnp.diag(given).max() < 1e-5


def test_squared_distances_to_a_runaway_are_infinite():
    u = cloud().at[2].set(1e25)
    given = squared_distances(u)
    assert jnp.isinf(given[2]).all()
    others = jnp.array([0, 1, 3, 4, 5])
    exact = cdist(np.asarray(u)[others], np.asarray(u)[others], "sqeuclidean")
    np.testing.assert_allclose(given[jnp.ix_(others, others)], exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [2, 3, 6, 7])
def test_median_bandwidth_is_the_median_rule(x64, size):
    u = np.random.default_rng(size).normal(size=(size, 3))
    squared = [((u[i] - u[j]) ** 2).sum() for i in range(size) for j in range(i)]
    assert float(median_bandwidth(jnp.asarray(u))) == pytest.approx(np.median(squared) / np.log(size), rel=1e-12)


def test_median_bandwidth_of_groups_ignores_pairs_across(x64):
    u = np.random.default_rng(0).normal(size=(2, 4, 3)) + np.array([0.0, 100.0])[:, None, None]
    squared = [((g[i] - g[j]) ** 2).sum() for g in u for i in range(4) for j in range(i)]
    assert float(median_bandwidth(jnp.asarray(u))) == pytest.approx(np.median(squared) / np.log(4), rel=1e-10)


def test_median_bandwidth_is_always_usable():
    for u in (jnp.ones((5, 2)), cloud().at[0].set(jnp.nan), cloud().at[:4].multiply(1e25)):
        assert 0 < median_bandwidth(u) < jnp.inf


def test_sums_share_the_learned_bandwidth(x64):
    u = cloud()
    given = columns((0.5 * RBF() + 0.5 * IMQ(1.0)).couple(u, 3.0), u)
    expected = 0.5 * columns(RBF(3.0).couple(u), u) + 0.5 * columns(IMQ(1.0).couple(u), u)
    np.testing.assert_allclose(given, expected, rtol=1e-12)


@pytest.mark.parametrize("found", INTERACTIONS.values(), ids=INTERACTIONS)
def test_who_learns_who_interacts_and_who_is_the_identity(found):
    """As the catalogue has it; and what K is, is seen on a cloud."""
    interaction, flags = found.part, found.flags
    assert interaction.learns_bandwidth == ("learns" in flags)
    assert interaction.interacts == ("interacts" in flags)
    assert interaction.balances_ensembles == ("ensembles" in flags)
    u = cloud(6, 2).reshape((2, 3, 2) if "ensembles" in flags else (6, 2))
    coupling = interaction.at(random.key(0), 3).couple(u, BANDWIDTH)
    assert bool(coupling.is_identity) == ("identity" in flags)
    x = u + 1.0
    assert np.array_equal(coupling.apply(x), x) == ("identity" in flags)
    assert bool(jnp.any(coupling.repulsion != 0)) == ("interacts" in flags)


def test_who_learns_a_bandwidth_within_another():
    learns = (Laplacian(RBF(1.0) + IMQ()), RandomGroups(RBF()), 2.0 * RBF(), RBF(1.0) + IMQ(), Balanced(RBF()))
    has = (Laplacian(RBF(1.0)), 2.0 * RBF(1.0), Balanced(RBF(1.0)), RBF(1.0) + Independent(), Cosine())
    assert all(interaction.learns_bandwidth for interaction in learns)
    assert not any(interaction.learns_bandwidth for interaction in has)


def test_a_missing_bandwidth_is_named():
    with pytest.raises(ValueError, match="no bandwidth yet"):
        RBF().couple(cloud())


@pytest.mark.parametrize(
    "expression",
    [
        lambda: Balanced() + RBF(),
        lambda: RBF() + Balanced(),
        lambda: 0.5 * RBF() + Balanced(),
        lambda: Balanced() + 0.5 * RBF(),
        lambda: 0.5 * Balanced(),
        lambda: Balanced() * 0.5,
        lambda: Balanced(RBF()) + Balanced(RBF()),
        lambda: Independent() + Balanced(),
        lambda: Balanced(Independent()),
        lambda: Antithetic() + RBF(),
        lambda: RBF() + Antithetic(),
        lambda: 2.0 * Antithetic(),
        lambda: Balanced(Antithetic()),
        lambda: Laplacian(Antithetic()),
        lambda: Laplacian(Independent()),
        lambda: Laplacian(Cosine()),
        lambda: Laplacian(Laplacian()),
        lambda: Laplacian(RBF() + Cosine()),
        lambda: Balanced(Balanced(RBF())),
        lambda: RBF() + 1.0,
        lambda: 1.0 + RBF(),
        lambda: RBF() + "IMQ",
    ],
)
def test_what_cannot_be_added(expression):
    with pytest.raises(TypeError):
        expression()


def test_balanced_says_what_to_write_instead():
    with pytest.raises(TypeError, match=r"Balanced\(a \+ b\)"):
        Balanced() + RBF()
    with pytest.raises(TypeError, match="cannot be scaled"):
        2.0 * Balanced()
    with pytest.raises(TypeError, match=r"write Balanced\(\)"):
        Balanced(Independent())


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), "1"])
@pytest.mark.parametrize("name", ["bandwidth", "nugget"])
@pytest.mark.parametrize("kind", [RBF, IMQ, Laplace])
def test_bad_settings_are_refused(kind, name, value):
    with pytest.raises(ValueError, match=f"{kind.__name__}: `{name}` must be a positive, finite number"):
        kind(**{name: value})


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_bad_weights_are_refused(weight):
    for interaction in (RBF(), Independent(), RBF() + IMQ()):
        with pytest.raises(ValueError, match="`weight` must be a positive, finite number"):
            weight * interaction


def test_a_laplacian_may_be_made_within_a_program():
    u = random.normal(random.key(0), (1, 4, 2))
    found = jax.jit(lambda u: Laplacian(RBF(1.0)).couple(u).repulsion)(u)
    np.testing.assert_allclose(found, Laplacian(RBF(1.0)).couple(u).repulsion, rtol=1e-5, atol=1e-6)


def test_kernels_that_may_be_negative_have_no_laplacian():
    class Wave(Radial):
        def profile(self, s):
            return jnp.cos(jnp.sqrt(s + 1e-6)) * jnp.exp(-s / 20)

    for interaction in (Wave(), RBF() + Wave()):
        with pytest.raises(ValueError, match="nowhere negative"):
            Laplacian(interaction)
    for strength in (0.0, -1.0, float("nan"), "1"):
        with pytest.raises(ValueError, match="Laplacian: `strength` must be a positive, finite number"):
            Laplacian(strength=strength)


def test_laplacian_leaves_what_all_have_in_common_as_it_is(x64):
    u = cloud()
    coupling = Laplacian(RBF(1.0), 3.0).couple(u)
    np.testing.assert_allclose(coupling.apply(jnp.ones_like(u)), 1.0, rtol=1e-12)
    h = float(RBF().learn_bandwidth(u[None]))
    for interaction in (Laplacian(), 0.5 * Laplacian(strength=3.0), Laplacian() + Independent()):
        assert float(interaction.learn_bandwidth(u[None])) == pytest.approx(h, rel=0.01)


@grams
def test_diagonal_is_that_of_the_matrix(x64, interaction):
    clouds = jnp.stack([cloud(), cloud(seed=1)])
    expected = [jnp.diag(matrix(interaction, u)) for u in clouds]
    diagonal = interaction.couple(clouds, BANDWIDTH).diagonal
    np.testing.assert_allclose(jnp.broadcast_to(diagonal, (2, 6)), expected, rtol=1e-12)
    assert jnp.ndim(diagonal) == (2 if interaction.diagonal_varies else 0)


SIZES = [(8,), (3, 8), (2,), (3,), (2, 7), (20,), (127,)]


def by_coordinate(noise, u):
    """Noise of each group in the order of each coordinate, ``(draw, group, rank, coordinate)``."""
    order = np.argsort(np.asarray(u).reshape(-1, *u.shape[-2:]), -2)
    return np.take_along_axis(np.asarray(noise, float).reshape(len(noise), *order.shape), order[None], 2)


@pytest.mark.parametrize("shape", SIZES)
def test_antithetic_noise_is_opposed_in_pairs_of_neighbors(x64, shape):
    u = random.normal(random.key(0), (*shape, 3))
    found = by_coordinate(draws(Antithetic().couple(u), 200), u)
    is_odd = shape[-1] % 2
    # Of an odd number, the first three sum to zero.
    np.testing.assert_allclose(found[:, :, : 3 * is_odd].sum(2), 0.0, atol=1e-6)
    first, second = (found[:, :, 3 * is_odd + k :: 2] for k in (0, 1))
    np.testing.assert_array_equal(first, -second)
    if first.shape[2] > 1:
        # The one that goes up changes from pair to pair, and from draw to draw.
        assert (first[:, :, 1:] * first[:, :, :-1] < 0).all() and 0.3 < (first > 0).mean() < 0.7


@pytest.mark.parametrize("shape", SIZES)
def test_magnitudes_of_antithetic_noise_are_stratified(x64, shape):
    u = random.normal(random.key(0), (*shape, 3))
    found = by_coordinate(draws(Antithetic().couple(u), 200), u)
    size = shape[-1]
    upper = 2.0 * norm.sf(np.abs(found[:, :, 3 * (size % 2) :: 2]))
    if size % 2:
        # R² of the first three is exponential, and the sum of their squares is 3 R² / 2.
        radius = np.exp(-np.sum(found[:, :, :3] ** 2, 2, keepdims=True) / 3.0)
        upper = np.concatenate([radius, upper], 2)
    gaps = np.diff(np.sort(upper, 2), axis=2)
    np.testing.assert_allclose(gaps, 1.0 / (size // 2), atol=1e-4)


def assert_normal(found):
    """Each entry of draws ``(draw, entry, coordinate)`` is N(0, I): its quantiles, and products of coordinates."""
    count, number = len(found), found[0].size
    worst = min(kstest(x, "norm").pvalue for x in found.reshape(count, -1).T)
    assert worst > 1e-6 / number, worst
    for f in (lambda x: x, lambda x: x**2 - 1.0, np.sign):
        products = f(found) * f(np.roll(found, 1, -1))
        error = products.std(0) / count**0.5
        assert (np.abs(products.mean(0)) < SIGMAS * error).all()


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("shape", [(8,), (3, 8), (2,), (7,), (3,)])
def test_antithetic_noise_of_each_particle_is_standard_normal(x64, shape, seed):
    u = random.normal(random.key(seed), (*shape, 3))
    found = np.asarray(draws(Antithetic().couple(u), 20_000, seed)).reshape(20_000, -1, 3)
    assert_normal(found)


@pytest.mark.parametrize("broken", ["phase", "sign", "shared"])
def test_antithetic_noise_of_another_law_is_told_apart(x64, broken, monkeypatch):
    """The same phase always, the same sign always, or the same numbers for all coordinates."""
    plain = balanced.uniform

    def uniform(key, shape, dtype):
        found = plain(key, shape, dtype)
        if broken == "shared":
            return jnp.broadcast_to(found[..., :1], shape)
        return found.at[["phase", "sign"].index(broken)].set(0.3)

    monkeypatch.setattr(balanced, "uniform", uniform)
    u = random.normal(random.key(0), (8, 3))
    found = np.asarray(draws(Antithetic().couple(u), 20_000))
    with pytest.raises(AssertionError):
        assert_normal(found)


def test_antithetic_noise_of_one_particle_is_plain():
    u = random.normal(random.key(0), (3, 1, 2))
    assert_covariance(draws(Antithetic().couple(u))[:, :, 0], jnp.eye(3))


def test_particles_at_one_place_have_ranks_of_their_own():
    """Where all start together or one has moved to another: equal ranks would not cancel."""
    u = jnp.zeros((6, 2)).at[1, 0].set(-1.0)
    ranks = balanced._ranks(u)
    for column in ranks.T:
        assert sorted(column.tolist()) == list(range(6))
    assert ranks[1, 0] == 0
    np.testing.assert_array_equal(draws(Antithetic().couple(u), 10).sum(1), 0.0)


@pytest.mark.parametrize("size", [128, 201])
def test_many_particles_are_paired_in_blocks(x64, size):
    u = random.normal(random.key(0), (2, size, 3))
    noise = np.asarray(draws(Antithetic().couple(u), 2000))
    first = size // 64 - 1
    ends = [*range(0, 64 * first + 1, 64), size]
    for start, end in pairwise(ends):
        block = noise[:, :, start:end]
        np.testing.assert_allclose(block.sum(2), 0.0, atol=1e-6)
        found = by_coordinate(block, u[:, start:end])
        np.testing.assert_array_equal(found[:, :, -1], -found[:, :, -2])
    # Blocks have numbers of their own.
    assert np.abs(np.corrcoef(np.abs(noise[:, 0, 0, 0]), np.abs(noise[:, 0, -1, 0]))[0, 1]) < SIGMAS / 2000**0.5
    assert_normal(noise.reshape(2000, -1, 3))


@pytest.mark.parametrize("size", [20, 100, 300])
def test_antithetic_noise_makes_no_array_of_all_pairs(size):
    u = jnp.zeros((size, 1000))
    program = jax.jit(lambda u, key: Antithetic().couple(u).draw(key)).lower(u, random.key(0)).compile()
    # Ranks and quantiles; an array of all pairs of a block has 20 times as many entries as the cloud, or more.
    assert program.memory_analysis().temp_size_in_bytes < 8 * u.nbytes


def test_antithetic_noise_makes_averages_of_squares_precise():
    """Twenty particles at N(0, I) in three dimensions: a fifth of the variance of independent noise, by theory less."""
    dynamics, step_size = Overdamped("lm"), 0.05

    def spread(interaction, seed):
        def run(key):
            def update(cloud, key):
                cloud = dynamics.step(key, cloud, lambda z: (jnp.sum(z**2, -1) / 2, z), interaction.couple, step_size)
                return cloud, jnp.mean(cloud.z**2, 0)

            start = random.normal(random.fold_in(key, 1), (20, 3))
            cloud = dynamics.init(key, start, lambda z: (jnp.sum(z**2, -1) / 2, z), interaction.couple)
            return lax.scan(update, cloud, random.split(key, 400))[1].mean(0)

        return np.asarray(jax.jit(jax.vmap(run))(random.split(random.key(seed), 100))).var()

    independent, antithetic = spread(Independent(), 0), spread(Antithetic(), 1)
    # Variances of 300 averages each have relative errors of 8 %.
    assert antithetic < independent / 3
    assert spread(Balanced(), 2) > independent / 2


def test_algebra():
    assert 2 * (RBF() + 3 * IMQ()) == 2 * RBF() + 6 * IMQ() == Sum(((2.0, RBF()), (6.0, IMQ())))
    assert RBF() * 2 == 2 * RBF()
    assert (RBF() + IMQ()) + Independent() == RBF() + (IMQ() + Independent())
    assert repr(0.9 * RBF(1.0) + 0.1 * Independent()) == "0.9 * RBF(bandwidth=1.0, nugget=0.001) + 0.1 * Independent()"


@pytest.mark.parametrize("interaction", [found.part for found in INTERACTIONS.values()], ids=INTERACTIONS)
def test_interactions_are_values(interaction):
    again = pickle.loads(pickle.dumps(interaction))
    assert again == interaction and hash(again) == hash(interaction) and repr(again) == repr(interaction)
    assert interaction != RBF(0.123)
    with pytest.raises(FrozenInstanceError):
        interaction.weight = 2.0


@everything
def test_couple_works_under_jit_and_vmap(x64, interaction):
    u = jnp.stack([cloud(), cloud(seed=1)])

    def gamma(v):
        return jnp.broadcast_to(interaction.couple(v, BANDWIDTH).repulsion, v.shape)

    expected = jnp.stack([gamma(v) for v in u])
    np.testing.assert_allclose(jax.jit(jax.vmap(gamma))(u), expected, rtol=1e-12, atol=1e-14)


def test_what_is_not_implemented_says_so():
    class Empty(Interaction):
        pass

    class Kernelless(Gram):
        pass

    with pytest.raises(NotImplementedError, match="Empty does not implement `couple`"):
        Empty().couple(cloud())
    with pytest.raises(NotImplementedError, match="Kernelless does not implement `evaluate`"):
        Kernelless().couple(cloud())
