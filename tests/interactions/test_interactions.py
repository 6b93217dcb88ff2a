"""K, Γ and the noise, against definitions written out here."""

from dataclasses import FrozenInstanceError
from functools import partial
from itertools import pairwise, product
import pickle

from catalogue import INTERACTIONS, Cosine, Laplace, having
import jax
from jax import lax, random
import jax.numpy as jnp
import numpy as np
from programs import shapes
import pytest
from scipy.linalg import block_diag
from scipy.spatial.distance import cdist
from scipy.stats import kstest, norm

from numpyro_repulsion import IMQ, RBF, Antithetic, Balanced, Independent
from numpyro_repulsion.dynamics import Overdamped
from numpyro_repulsion.interactions import (
    Coupling,
    Gram,
    Interaction,
    Laplacian,
    Radial,
    RandomGroups,
    Sum,
    balanced,
    median_bandwidth,
)

#: Beyond so many standard errors a deviation is none of chance: 6 in 10 million for one normal number.
SIGMAS = 5.0
PAIRS = having(INTERACTIONS, "pairs")
PARTS = PAIRS | having(INTERACTIONS, "identity") | having(INTERACTIONS, "many")
PARTS |= {name: INTERACTIONS[name].part for name in ("scheduled, half",)}
BANDWIDTH = 2.1


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


def applied(coupling, shape):
    """K of each group, by what it does to the unit vectors."""
    return coupling.apply(jnp.broadcast_to(jnp.eye(shape[-2]), (*shape[:-1], shape[-2])))


#: In the full test alone: others have these in them.
WITHIN = {"rbf, learned", "imq", "radial of a user", "scaled", "sum", "laplacian"}
WITHIN |= {"random features without a weight", "groups of another kernel"}


@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.slow] * (x in WITHIN)) for x in PARTS])
def test_a_coupling_applies_K_and_repels_by_its_divergence(x64, name):
    """Of two groups: symmetric, positive semidefinite, below the bound, and apart from each other."""
    interaction = PARTS[name]

    @jax.jit
    def figures(u):
        def gram(u):
            return applied(interaction.couple(u, BANDWIDTH), u.shape)

        coupling, derivatives = interaction.couple(u, BANDWIDTH), jax.jacfwd(gram)(u)
        divergence = jnp.stack([jnp.einsum("ijjd->id", derivatives[g, :, :, g]) for g in (0, 1)])
        across = jnp.abs(derivatives[0, :, :, 1]).max()
        expected = [matrix(interaction, group) for group in u] if name in PAIRS else gram(u)
        diagonal, repulsion = (
            jnp.broadcast_to(coupling.diagonal, u.shape[:2]),
            jnp.broadcast_to(coupling.repulsion, u.shape),
        )
        return gram(u), jnp.asarray(expected), diagonal, repulsion, divergence, across, coupling.bound

    clouds = np.random.default_rng(0).normal(size=(2, 6, 3))
    for u in (5.0 * clouds, 0.05 * clouds, clouds):
        gram, expected, diagonal, repulsion, divergence, across, bound = map(np.asarray, figures(u))
        np.testing.assert_allclose(gram, expected, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(gram, gram.swapaxes(1, 2), rtol=0, atol=1e-14)
        np.testing.assert_allclose(diagonal, np.diagonal(gram, axis1=1, axis2=2), rtol=1e-12)
        np.testing.assert_allclose(repulsion, divergence, rtol=1e-9, atol=1e-12)
        values = np.linalg.eigvalsh(gram)
        assert values.min() > -1e-12 and values.max() <= bound * (1 + 1e-12)
        assert bound <= 6 * np.abs(gram).max() and across == 0  # the bound is of use
    assert (np.abs(divergence).max() > 1e-2) == interaction.interacts
    if name in PAIRS:
        assert jnp.ndim(interaction.couple(clouds, BANDWIDTH).diagonal) == (2 if interaction.diagonal_varies else 0)


def test_rbf_and_imq_are_what_they_say(x64):
    x, y = jnp.array([1.0, 2.0]), jnp.array([0.5, 4.0])
    assert float(RBF(3.0).evaluate(x, y)) == pytest.approx(np.exp(-4.25 / 3))
    assert float(IMQ(3.0).evaluate(x, y)) == pytest.approx((1 + 4.25 / 3) ** -0.5)
    assert float(RBF().evaluate(x, y, 3.0)) == float(RBF(3.0).evaluate(x, y)) == float(RBF(3.0).evaluate(x, y, 9.0))


def assert_covariance(noise, expected):
    """Whether draws ``(n, L, d)`` have covariance ``expected ⊗ I``, by the standard errors of all entries."""
    count, size, dim = noise.shape
    flat = np.asarray(noise).reshape(count, size * dim)
    products = flat[:, :, None] * flat[:, None, :]
    error = products.std(0) / count**0.5
    deviation = np.abs(products.mean(0) - np.kron(expected, np.eye(dim)))
    assert (deviation < SIGMAS * error + 1e-6).all()
    assert (np.abs(flat.mean(0)) < SIGMAS * flat.std(0) / count**0.5 + 1e-6).all()


def draws(interaction, u, count=20_000):
    """Noise for a cloud; all in one program, for each operation outside of one is compiled by itself."""

    @jax.jit
    def of(u, keys):
        return jax.vmap(interaction.couple(u, BANDWIDTH).draw)(keys)

    return of(u, random.split(random.key(0), count))


@partial(jax.jit, static_argnums=0)
def gram_of(interaction, u):
    return applied(interaction.couple(u, BANDWIDTH), u.shape)


@pytest.mark.parametrize(
    "name",
    [
        "laplacian",
        "sum with a user's",
        "scheduled, half",
        "random features",
        "random features without a weight",
        "groups",
        "independent",
    ],
)
def test_noise_has_covariance_K(name):
    """And that of two groups is independent."""
    u = cloud(12, 2).reshape(2, 6, 2)
    noise, gram = draws(PARTS[name], u).reshape(-1, 12, 2), block_diag(*gram_of(PARTS[name], u))
    assert_covariance(noise, gram)
    for wrong in (1.15 * gram, *[np.diag(np.diag(gram))] * PARTS[name].interacts):
        with pytest.raises(AssertionError):
            assert_covariance(noise, wrong)


def test_balanced_noise_sums_to_zero_with_white_slices():
    """Within each group; that of a single particle is plain."""
    noise = np.asarray(draws(Balanced(), cloud(6, 2).reshape(2, 3, 2)))
    np.testing.assert_allclose(noise.sum(2), 0.0, atol=1e-5)
    # Slices have unit variance, and share the −1 that makes the sum zero.
    within = 3 / 2 * (np.eye(3) - 1 / 3)
    assert_covariance(noise.reshape(-1, 6, 2), np.kron(np.eye(2), within))
    u = cloud(1, 2)
    assert (Balanced().couple(u).draw(random.key(0)) == Independent().couple(u).draw(random.key(0))).all()


def test_balanced_groups_have_the_law_of_their_interaction_and_cancel_across():
    u = cloud(9, 2).reshape(3, 3, 2)
    noise = np.asarray(draws(Balanced(RBF(1.0)), u))
    roots = np.linalg.cholesky(jax.jit(lambda u: jnp.stack([matrix(RBF(1.0), points) for points in u]))(u))
    white = np.linalg.solve(roots, noise[:100])
    np.testing.assert_allclose(white.sum(1), 0.0, atol=1e-3)
    across = 3 / 2 * (np.eye(3) - 1 / 3)
    expected = np.einsum("gh,gij,hkj->gihk", across, roots, roots).reshape(9, 9)
    assert_covariance(noise.reshape(-1, 9, 2), expected)
    balanced, plain = (everything(part)(u, u) for part in (Balanced(RBF(1.0)), RBF(1.0)))
    for found, known in zip(balanced[:2], plain[:2], strict=True):
        np.testing.assert_array_equal(found, known)
    for u in (cloud(), cloud()[None]):
        with pytest.raises(ValueError, match=r"at least two of them.*num_ensembles=2"):
            Balanced(RBF(1.0)).couple(u)


def all_pairs_of_coordinates(interaction, size=17, dim=5):
    """Whether anything as big as all differences of coordinates is formed."""

    def work(u, key):
        coupling = interaction.couple(u, BANDWIDTH)
        return coupling.apply(u), coupling.repulsion, coupling.draw(key), coupling.bound

    program = jax.make_jaxpr(work)(jnp.zeros((size, dim)), random.key(0))
    found = list(shapes(program.jaxpr))
    assert (size, size) in found
    return any(np.prod(shape) >= size * size * dim for shape in found)


def test_memory_does_not_grow_with_pairs_times_dimension():
    class Naive(RBF):
        def gram(self, u, bandwidth):
            return jnp.exp(-((u[:, None] - u) ** 2).sum(-1)) + jnp.eye(len(u)), u

    assert not any(map(all_pairs_of_coordinates, (RBF(), 0.5 * RBF() + 0.5 * IMQ(1.0))))
    assert all_pairs_of_coordinates(Naive())


def everything(interaction, bandwidth=1.0):
    @jax.jit
    def of(u, x):
        coupling = interaction.couple(u, bandwidth)
        return coupling.apply(x), coupling.repulsion, coupling.draw(random.key(0)), coupling.bound

    return of


@pytest.mark.parametrize("interaction", [RBF(), 0.5 * RBF() + 0.5 * IMQ(), Cosine()], ids=repr)
def test_close_particles_stay_finite_in_float32(interaction):
    u, of = cloud(200, 3), everything(interaction, 1e5)
    for near in (u, u.at[1].set(u[0]), jnp.ones((200, 3))):
        found = of(near, near)
        assert found[0].dtype == jnp.float32 and all(jnp.isfinite(value).all() for value in found)
    # Those at one place do not repel each other.
    np.testing.assert_allclose(found[1], 0.0, atol=1e-5)


@pytest.mark.parametrize("interaction", [RBF(), 2.0 * Laplace()], ids=repr)
def test_a_runaway_particle_leaves_the_others_alone(interaction):
    of, x = everything(interaction), cloud(seed=1)
    for distance, runaway in product((1e19, 1e30, -3e38), (0, 2, 5)):
        u = cloud().at[runaway, 1].set(distance)
        others = jnp.delete(jnp.arange(len(u)), runaway)
        product_, repulsion, noise, bound = of(u, x.at[runaway].set(0.0))
        expected = of(u[others], x[others])
        np.testing.assert_allclose(repulsion[others], expected[1], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(repulsion[runaway], 0.0, atol=1e-6)
        np.testing.assert_allclose(product_[others], expected[0], rtol=1e-5, atol=1e-6)
        assert jnp.isfinite(noise).all()
        assert float(bound) == pytest.approx(float(expected[3]), rel=1e-5)


def test_distances_are_precise_far_from_the_origin():
    u = (np.random.default_rng(0).normal(size=(20, 4)) + 1e4).astype(np.float32)
    exact = cdist(u.astype(np.float64), u.astype(np.float64), "sqeuclidean")
    gram = jax.jit(lambda u: RBF(1.0, nugget=1e-9).gram(u)[0])(u)
    np.testing.assert_allclose(gram, np.exp(-exact), rtol=1e-4, atol=1e-5)


def test_median_bandwidth_is_the_median_rule(x64):
    """Pairs across groups do not count, and where it has no value any other will do."""
    rng = np.random.default_rng(0)
    for groups, size in ((1, 3), (2, 4)):
        u = rng.normal(size=(groups, size, 3)) + 100.0 * np.arange(groups)[:, None, None]
        squared = [((g[i] - g[j]) ** 2).sum() for g in u for i in range(size) for j in range(i)]
        assert float(jax.jit(median_bandwidth)(u)) == pytest.approx(np.median(squared) / np.log(size), rel=1e-10)
    lost, far = rng.normal(size=(2, 6, 3))
    lost[0], far[:4] = np.nan, 1e200 * far[:4]
    for u in (np.ones((6, 3)), lost, far):
        assert 0 < jax.jit(median_bandwidth)(u) < np.inf


def is_identity(interaction):
    seen = []
    at = interaction.at(random.key(0), 3)
    jax.eval_shape(lambda u: seen.append(bool(at.couple(u, BANDWIDTH).is_identity)), jnp.ones((2, 6, 2)))
    return seen[0]


def test_flags_are_those_of_the_catalogue():
    for name, found in INTERACTIONS.items():
        assert found.part.learns_bandwidth == ("learns" in found.flags), name
        assert found.part.interacts == ("interacts" in found.flags), name
        assert found.part.balances_ensembles == ("ensembles" in found.flags), name
        assert is_identity(found.part) == ("identity" in found.flags), name


def test_who_learns_a_bandwidth_within_another():
    learns = (Laplacian(RBF(1.0) + IMQ()), RandomGroups(RBF()), 2.0 * RBF(), RBF(1.0) + IMQ(), Balanced(RBF()))
    has = (Laplacian(RBF(1.0)), 2.0 * RBF(1.0), Balanced(RBF(1.0)), RBF(1.0) + Independent(), Cosine())
    assert all(interaction.learns_bandwidth for interaction in learns)
    assert not any(interaction.learns_bandwidth for interaction in has)
    with pytest.raises(ValueError, match="no bandwidth yet"):
        RBF().couple(cloud())


def test_what_cannot_be_added():
    for expression in (
        lambda: Balanced() + RBF(),
        lambda: RBF() + Balanced(),
        lambda: Balanced() * 0.5,
        lambda: Balanced(RBF()) + Balanced(RBF()),
        lambda: Balanced(Independent()),
        lambda: Antithetic() + RBF(),
        lambda: 2.0 * Antithetic(),
        lambda: Balanced(Antithetic()),
        lambda: Laplacian(Antithetic()),
        lambda: Laplacian(Independent()),
        lambda: Laplacian(Cosine()),
        lambda: Laplacian(Laplacian()),
        lambda: Laplacian(RBF() + Cosine()),
        lambda: Balanced(Balanced(RBF())),
        lambda: 1.0 + RBF(),
    ):
        with pytest.raises(TypeError):
            expression()
    for expression in (lambda: Balanced() + RBF(), lambda: 2.0 * Balanced()):
        with pytest.raises(TypeError, match=r"Only interactions with a Gram matrix.*Balanced\(a \+ b\)"):
            expression()
    with pytest.raises(TypeError, match=r"write Balanced\(\)"):
        Balanced(Independent())


def test_bad_settings_are_refused():
    for kind, name in ((RBF, "bandwidth"), (RBF, "nugget"), (Laplace, "bandwidth"), (Laplacian, "strength")):
        with pytest.raises(ValueError, match=f"{kind.__name__}: `{name}` must be a positive, finite number"):
            kind(**{name: 0.0})
    for interaction in (RBF(), Independent(), RBF() + IMQ()):
        with pytest.raises(ValueError, match="`weight` must be a positive, finite number"):
            0.0 * interaction


def test_a_laplacian_may_be_made_within_a_program():
    outside = Laplacian(RBF(1.0))
    found, expected = jax.jit(lambda u: [part.couple(u).repulsion for part in (Laplacian(RBF(1.0)), outside)])(cloud())
    np.testing.assert_array_equal(found, expected)


def test_kernels_that_may_be_negative_have_no_laplacian():
    class Wave(Radial):
        def profile(self, s):
            return jnp.cos(jnp.sqrt(s + 1e-6)) * jnp.exp(-s / 20)

    for interaction in (Wave(), RBF() + Wave()):
        with pytest.raises(ValueError, match="nowhere negative"):
            Laplacian(interaction)


def test_laplacian_leaves_what_all_have_in_common_as_it_is(x64):
    u = cloud()
    applied_to_ones = jax.jit(lambda u: Laplacian(RBF(1.0), 3.0).couple(u).apply(jnp.ones_like(u)))(u)
    np.testing.assert_allclose(applied_to_ones, 1.0, rtol=1e-12)
    parts = (RBF(), Laplacian(), 0.5 * Laplacian(strength=3.0), Laplacian() + Independent())
    h, *others = jax.jit(lambda u: [part.learn_bandwidth(u) for part in parts])(u[None])
    np.testing.assert_allclose(others, h, rtol=0.01)


# Antithetic noise


def by_coordinate(noise, u):
    """Noise of each group in the order of each coordinate, ``(draw, group, rank, coordinate)``."""
    order = np.argsort(np.asarray(u).reshape(-1, *u.shape[-2:]), -2)
    return np.take_along_axis(np.asarray(noise, float).reshape(len(noise), *order.shape), order[None], 2)


@pytest.mark.parametrize("shape", [(3, 8), (2, 7), (2,), (3,), (127,)])
def test_antithetic_noise_is_opposed_in_pairs_of_neighbors_and_stratified(x64, shape):
    u = random.normal(random.key(0), (*shape, 3))
    found = by_coordinate(draws(Antithetic(), u, 200), u)
    size, is_odd = shape[-1], shape[-1] % 2
    # Of an odd number, the first three sum to zero.
    np.testing.assert_allclose(found[:, :, : 3 * is_odd].sum(2), 0.0, atol=1e-6)
    first, second = (found[:, :, 3 * is_odd + k :: 2] for k in (0, 1))
    np.testing.assert_array_equal(first, -second)
    if first.shape[2] > 1:
        # The one that goes up changes from pair to pair, and from draw to draw.
        assert (first[:, :, 1:] * first[:, :, :-1] < 0).all() and 0.3 < (first > 0).mean() < 0.7
    upper = 2.0 * norm.sf(np.abs(first))
    if is_odd:
        # R² of the first three is exponential, and the sum of their squares is 3 R² / 2.
        radius = np.exp(-np.sum(found[:, :, :3] ** 2, 2, keepdims=True) / 3.0)
        upper = np.concatenate([radius, upper], 2)
    np.testing.assert_allclose(np.diff(np.sort(upper, 2), axis=2), 1.0 / (size // 2), atol=1e-4)


def assert_normal(found):
    """Each entry of draws ``(draw, entry, coordinate)`` is N(0, I): its quantiles, and products of coordinates."""
    count, number = len(found), found[0].size
    worst = min(kstest(x, "norm").pvalue for x in found.reshape(count, -1).T)
    assert worst > 1e-6 / number, worst
    for f in (lambda x: x, lambda x: x**2 - 1.0, np.sign):
        products = f(found) * f(np.roll(found, 1, -1))
        error = products.std(0) / count**0.5
        assert (np.abs(products.mean(0)) < SIGMAS * error).all()


@pytest.mark.parametrize("shape", [(3, 8), (2,), (7,), (3,)])
def test_antithetic_noise_of_each_particle_is_standard_normal(x64, shape):
    u = random.normal(random.key(0), (*shape, 3))
    assert_normal(np.asarray(draws(Antithetic(), u)).reshape(20_000, -1, 3))


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
    with pytest.raises(AssertionError):
        assert_normal(np.asarray(draws(Antithetic(), u)))


def test_antithetic_noise_of_one_particle_is_plain():
    u = random.normal(random.key(0), (3, 1, 2))
    assert_covariance(draws(Antithetic(), u)[:, :, 0], np.eye(3))


def test_particles_at_one_place_have_ranks_of_their_own():
    """Where all start together or one has moved to another: equal ranks would not cancel."""
    u = jnp.zeros((6, 2)).at[1, 0].set(-1.0)
    ranks = jax.jit(balanced._ranks)(u)
    for column in ranks.T:
        assert sorted(column.tolist()) == list(range(6))
    assert ranks[1, 0] == 0
    np.testing.assert_array_equal(draws(Antithetic(), u, 10).sum(1), 0.0)


def test_many_particles_are_paired_in_blocks(x64):
    u = random.normal(random.key(0), (2, 201, 3))
    noise = np.asarray(draws(Antithetic(), u, 2000))
    for start, end in pairwise((0, 64, 128, 201)):
        block = noise[:, :, start:end]
        np.testing.assert_allclose(block.sum(2), 0.0, atol=1e-6)
        found = by_coordinate(block, u[:, start:end])
        np.testing.assert_array_equal(found[:, :, -1], -found[:, :, -2])
    # Blocks have numbers of their own.
    assert np.abs(np.corrcoef(np.abs(noise[:, 0, 0, 0]), np.abs(noise[:, 0, -1, 0]))[0, 1]) < SIGMAS / 2000**0.5
    assert_normal(noise[:, :, ::10].reshape(2000, -1, 3))


@pytest.mark.parametrize("size", [100, 300])
def test_antithetic_noise_makes_no_array_of_all_pairs(size):
    u = jnp.zeros((size, 1000))
    program = jax.jit(lambda u, key: Antithetic().couple(u).draw(key)).lower(u, random.key(0)).compile()
    # Ranks and quantiles; an array of all pairs of a block has 20 times as many entries as the cloud, or more.
    assert program.memory_analysis().temp_size_in_bytes < 8 * u.nbytes


@pytest.mark.slow
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


def test_algebra(x64):
    assert 2 * (RBF() + 3 * IMQ()) == 2 * RBF() + 6 * IMQ() == Sum(((2.0, RBF()), (6.0, IMQ())))
    assert RBF() * 2 == 2 * RBF()
    assert (RBF() + IMQ()) + Independent() == RBF() + (IMQ() + Independent())
    assert repr(0.9 * RBF(1.0) + 0.1 * Independent()) == "0.9 * RBF(bandwidth=1.0, nugget=0.001) + 0.1 * Independent()"
    # Sums share the learned bandwidth.
    shared, given = 0.5 * RBF() + 0.5 * IMQ(1.0), 0.5 * RBF(3.0) + 0.5 * IMQ(1.0)
    one, other = jax.jit(lambda u: (shared.gram(u, 3.0)[0], given.gram(u, None)[0]))(cloud())
    np.testing.assert_allclose(one, other, rtol=1e-12)


def test_interactions_are_values():
    for found in INTERACTIONS.values():
        again = pickle.loads(pickle.dumps(found.part))
        assert again == found.part and hash(again) == hash(found.part) and repr(again) == repr(found.part)
        assert found.part != RBF(0.123)
        with pytest.raises(FrozenInstanceError):
            found.part.weight = 2.0


def test_what_is_not_implemented_says_so():
    class Kernelless(Gram):
        pass

    with pytest.raises(NotImplementedError, match="Interaction does not implement `couple`"):
        Interaction().couple(cloud())
    with pytest.raises(NotImplementedError, match="Kernelless does not implement `evaluate`"):
        Kernelless().couple(cloud())


def test_figures_have_no_operations():
    with pytest.raises(TypeError, match="contains statistics only"):
        Coupling.of_figures(2.0, 1.0, False).apply(3.0)
    with pytest.raises(TypeError, match="does not have a Gram matrix within a group"):
        Balanced().gram(jnp.zeros((3, 2)), None)
