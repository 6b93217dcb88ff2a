"""Every dynamics is the recipe of its D and Q: drift and diffusion agree with those by automatic differentiation."""

import catalogue
from catalogue import having
import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import pytest
from results import run

from numpyro_repulsion import IMQ, RBF, SGLD, SGLDR, Independent
from numpyro_repulsion.dynamics import (
    Cloud,
    Overdamped,
    Recipe,
    Relativistic,
    Thermostat,
    Underdamped,
    reject_nonfinite,
)

L, d = 3, 2
C, μ, c = 1.3, 0.7, 1.5


def potential(z):
    return jnp.sum(z**4) / 4 + z[0] * z[1]


energy_and_grad = jnp.vectorize(jax.value_and_grad(potential), signature="(d)->(),(d)")


def kronecker(interaction, x):
    return jnp.kron(gram(interaction, x[:, :d]), jnp.eye(d))


def gram(interaction, z):
    """K, also of balanced noise, which keeps no matrix of its own."""
    return jnp.eye(L) if interaction.couple(z).is_identity else interaction.gram(z, None)[0]


def blocks(rows, extra):
    """An ``(n, n)`` matrix from blocks over all particles' coordinates by kind, in the order of ``x.ravel()``."""
    stacked = jnp.block(rows)
    order = np.arange(L * (d + extra))
    kinds = [(i, k) for i in range(L) for k in range(d)]
    kinds += [(i, d + k) for i in range(L) for k in range(min(extra, d))]
    kinds += [(i, 2 * d) for i in range(L)] if extra > d else []
    for row, (i, k) in enumerate(kinds):
        order[i * (d + extra) + k] = row
    return stacked[jnp.ix_(order, order)]


def overdamped(interaction, T):
    return Overdamped("euler", temperature=T), Recipe(lambda x: kronecker(interaction, x), temperature=T)


def underdamped(interaction, T, kinetic=None):
    n = L * d
    zero = jnp.zeros((n, n))
    energy = {} if kinetic is None else {"energy": kinetic.energy}

    def D(x):
        return blocks([[zero, zero], [zero, C * jnp.eye(n)]], d)

    def Q(x):
        K = kronecker(interaction, x)
        return blocks([[zero, -K], [K, zero]], d)

    return Underdamped(C, T, kinetic), Recipe(D, Q, extra=d, temperature=T, **energy)


def relativistic(interaction, T):
    return underdamped(interaction, T, Relativistic(c))


def thermostat(interaction, T):
    n = L * d
    zero, corner = jnp.zeros((n, n)), jnp.zeros((n, L))

    def energy(extra):
        return jnp.sum(extra[..., :d] ** 2, -1) / 2 + μ * d * (extra[..., d] - C) ** 2 / 2

    def D(x):
        return blocks(
            [[zero, zero, corner], [zero, C * jnp.eye(n), corner], [corner.T, corner.T, jnp.zeros((L, L))]], d + 1
        )

    def Q(x):
        K, m = kronecker(interaction, x), x[:, d : 2 * d]
        pull = (jnp.eye(L)[:, None, :] * m[:, :, None] / (μ * d)).reshape(n, L)
        return blocks([[zero, -K, corner], [K, zero, pull], [corner.T, -pull.T, jnp.zeros((L, L))]], d + 1)

    return Thermostat(C, T, μ), Recipe(D, Q, extra=d + 1, energy=energy, temperature=T)


def ensemble(cloud):
    return jnp.concatenate((cloud.z, *cloud.memory), -1)


def steps(dynamics, interaction, cloud):
    """``(ε, white) -> x`` after one step, with white noise that is given."""

    @jax.jit
    def step(ε, white):
        def couple(u):
            root = jnp.linalg.cholesky(gram(interaction, u))
            return interaction.couple(u)._replace(draw=lambda key: root @ white, white=lambda key: white)

        return ensemble(dynamics.step(random.key(0), cloud, energy_and_grad, couple, ε))

    return step


def limit(f, ε=1e-4):
    """``f(ε)`` as ε → 0, for f smooth in ε: an error of third order."""
    return (8 * f(ε / 4) - 6 * f(ε / 2) + f(ε)) / 3


# The sum has its parts in it.
INTERACTIONS = having(catalogue.INTERACTIONS, "law") | having(catalogue.INTERACTIONS, "identity")
INTERACTIONS = [
    pytest.param(interaction, marks=() if name == "sum, wide" else pytest.mark.slow)
    for name, interaction in INTERACTIONS.items()
]


@pytest.mark.parametrize("temperature", [pytest.param(1.0, marks=pytest.mark.slow), 0.5])
@pytest.mark.parametrize("interaction", INTERACTIONS, ids=repr)
@pytest.mark.parametrize("system", [overdamped, underdamped, relativistic, thermostat])
def test_drift_and_diffusion_are_those_of_the_recipe(system, interaction, temperature):
    with jax.enable_x64(True):
        dynamics, recipe = system(interaction, temperature)
        z = random.normal(random.key(0), (L, d))
        cloud = dynamics.init(random.key(1), z, energy_and_grad, interaction.couple)
        cloud = Cloud(z, *energy_and_grad(z), tuple(random.normal(random.key(2), x.shape) for x in cloud.memory))
        x = ensemble(cloud)
        step = steps(dynamics, interaction, cloud)

        def still(ε):
            return step(ε, jnp.zeros((L, d)))

        drift = limit(lambda ε: (still(ε) - x) / ε)
        slope = cloud.gradient
        if recipe.extra:
            slope = jnp.concatenate((slope, jax.grad(lambda e: recipe.energy(e).sum())(x[:, d:])), -1)
        np.testing.assert_allclose(drift, jax.jit(recipe.drift)(x, slope), rtol=1e-6, atol=1e-7)

        def covariance(ε):
            columns = [
                (step(ε, e.reshape(L, d)) - still(ε)).ravel() / (2 * ε * temperature) ** 0.5 for e in jnp.eye(L * d)
            ]
            return sum(jnp.outer(column, column) for column in columns)

        np.testing.assert_allclose(limit(covariance), recipe.D(x), rtol=1e-6, atol=1e-7)


def test_drift_without_its_divergence_is_told_apart():
    # The control: had the built-in forgotten Γ, or T in front of it, the comparison above would see it.
    with jax.enable_x64(True):

        @jax.jit
        def drifts(x):
            slope = energy_and_grad(x)[1]
            plain = -kronecker(RBF(1.0), x) @ slope.ravel()
            return *(overdamped(RBF(1.0), T)[1].drift(x, slope) for T in (1.0, 0.5)), plain.reshape(L, d)

        warm, cold, plain = drifts(random.normal(random.key(0), (L, d)))
        assert np.abs(warm - plain).max() > 0.01
        assert np.abs(warm - cold).max() > 0.01


def test_one_step_is_that_of_the_built_in_dynamics():
    # Where D = I the square roots agree too, so that the same key gives the same noise.
    couple, start = Independent().couple, jnp.ones((1, L, d))

    @jax.jit
    def step(z):
        cloud = Overdamped("euler").init(random.key(1), z, energy_and_grad, couple)
        both = (Overdamped("euler"), Recipe(lambda x: jnp.eye(x.size)))
        return [dynamics.step(random.key(2), cloud, energy_and_grad, couple, 0.1).z for dynamics in both]

    one, other = step(start)
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    assert np.abs(one - start).min() > 1e-3


def draws(recipe, kernel=SGLD, **kwargs):
    setting = {"step_size": 0.05, "dynamics": recipe, "num_steps": 10} | kwargs
    kernel = kernel(potential_fn=lambda z: jnp.sum(z**2) / 2, **setting)
    mcmc = run(kernel, num_warmup=20, num_samples=1600, num_chains=8)
    return np.asarray(mcmc.get_samples(group_by_chain=True), float)


def test_state_dependent_diffusion_keeps_the_posterior():
    def D(x):
        return jnp.diag(1.0 / (1.0 + x.ravel() ** 2))

    def variance(recipe):
        squares = (draws(recipe) ** 2).mean((1, 2))
        return squares.mean(), squares.std(ddof=1) / len(squares) ** 0.5

    mean, error = variance(Recipe(D))
    assert abs(mean - 1) < 4.5 * error + 0.025  # Euler's bias at ε = 0.05 is at most ε/2

    class Forgetful(Recipe):
        def drift(self, x, slope):
            return -(self.D(x) @ slope.ravel()).reshape(x.shape)

    mean, error = variance(Forgetful(D))
    assert abs(mean - 1) > 9 * error + 0.025


def identity(x):
    return jnp.eye(x.size)


@pytest.mark.filterwarnings("ignore:num_warmup=20 is too short")
@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: draws(Recipe(lambda x: -jnp.eye(x.size))), ValueError, "semidefinite; its smallest eigenvalue is -1"),
        (lambda: draws(Recipe(lambda x: jnp.tri(x.size))), ValueError, "`D` must be symmetric; D - D.T has entries up"),
        (lambda: draws(Recipe(lambda x: jnp.eye(2))), ValueError, r"of shape \(16, 16\); got shape \(2, 2\)"),
        (lambda: draws(Recipe(identity, identity)), ValueError, r"`Q` must be skew-symmetric; Q \+ Q.T has entries up"),
        (lambda: draws(Recipe(identity), SGLDR), ValueError, "contains the interaction in D and Q"),
        (lambda: draws(Recipe(identity), step_size=None), ValueError, "cannot adapt the step size of.*; give `step_"),
        (lambda: Recipe(3), TypeError, "`D` must be a function"),
        (lambda: Recipe(identity, 3), TypeError, "`Q` must be a function"),
        (lambda: Recipe(identity, temperature=0.0), ValueError, "`temperature` must be a positive"),
    ],
)
def test_what_is_refused(make, error, words):
    with pytest.raises(error, match=words):
        make()


# The generator identity with momenta: on exact draws E[𝓛f] = 0, with 𝓛f = b·∇f + T D:∇²f and b the drift.

JOINT = {
    "z₁·m₂": lambda x: x[0, 0] * x[1, d],
    "Σ‖z‖²": lambda x: jnp.sum(x[:, :d] ** 2),
    "‖mean z‖²": lambda x: jnp.sum(x[:, :d].mean(0) ** 2),
    "sin z₁ m₁": lambda x: jnp.sin(x[0, 0]) * x[0, d],
    "m₁·m₂ exp(−‖z₁ − z₂‖²)": lambda x: x[0, d] * x[1, d] * jnp.exp(-jnp.sum((x[0, :d] - x[1, :d]) ** 2)),
    "Σ tanh(z) m": lambda x: jnp.sum(jnp.tanh(x[:, :d]) * x[:, d : 2 * d]),
    "m₁² and the last": lambda x: x[0, d] ** 2 * x[0, -1] + x[1, -1] ** 2,
}


def exponential(z):
    """The potential of the logarithm of an exponential variable, in each coordinate: lopsided, with exact draws."""
    return jnp.sum(jnp.exp(z) - z)


def generator_scores(system, interaction, forget=False, seed=0, draws=20_000):
    dynamics, recipe = system(interaction, 1.0)
    if forget:  # without TΓ
        recipe = Recipe(recipe.D, recipe.Q, recipe.extra, recipe.energy, temperature=1e-12)
    z_key, init_key = random.split(random.key(seed))
    z = jnp.log(random.exponential(z_key, (draws, L, d)))
    # Momenta, and friction, as the dynamics draws them.
    couple = Independent().couple
    cloud = dynamics.init(init_key, z, jnp.vectorize(jax.value_and_grad(exponential), signature="(d)->(),(d)"), couple)

    def generator(x, slope):
        if recipe.extra:
            slope = jnp.concatenate((slope, jax.grad(lambda e: recipe.energy(e).sum())(x[:, d:])), -1)
        drift, D = recipe.drift(x, slope), recipe.D(x)

        def of(f):
            hessian = jax.hessian(f)(x).reshape(x.size, x.size)
            return jnp.sum(drift * jax.grad(f)(x)) + jnp.sum(D * hessian)

        return {name: of(f) for name, f in JOINT.items()}

    values = jax.tree.map(
        lambda v: np.asarray(v, np.float64), jax.jit(jax.vmap(generator))(ensemble(cloud), cloud.gradient)
    )
    return {name: v.mean() / (v.std(ddof=1) / len(v) ** 0.5) for name, v in values.items()}


SYSTEMS = [underdamped, *(pytest.param(x, marks=pytest.mark.slow) for x in (relativistic, thermostat))]


@pytest.mark.parametrize("interaction", [RBF(1.0), pytest.param(IMQ(2.0), marks=pytest.mark.slow)], ids=repr)
@pytest.mark.parametrize("system", SYSTEMS)
def test_generator_identity_with_momenta(system, interaction):
    scores = generator_scores(system, interaction)
    assert max(map(abs, scores.values())) < 4.5, scores


@pytest.mark.parametrize("system", SYSTEMS)
def test_generator_identity_with_momenta_fails_without_repulsion(system):
    scores = generator_scores(system, RBF(1.0), forget=True)
    assert max(map(abs, scores.values())) > 9, scores


@pytest.mark.parametrize(
    "matrices",
    [
        {"D": lambda x: jnp.diag(1.0 + 3.0 * jnp.clip(x.ravel(), -1.0, 0.0))},  # indefinite where x < -1/3
        {"D": lambda x: jnp.eye(x.size) + jnp.tril(jnp.full((x.size, x.size), (x < 0).any() * 0.1), -1)},
        {"D": lambda x: jnp.eye(x.size), "Q": lambda x: jnp.full((x.size, x.size), (x < 0).any() * 0.1)},
    ],
    ids=["indefinite", "asymmetric", "not skew"],
)
def test_matrices_that_turn_wrong_hold_the_particles(matrices):
    """They are right where the run begins, and wrong where it gets to: it must not go on as if they were right."""
    dynamics = Recipe(**matrices)
    couple = Independent().couple

    def energy_and_grad(z):
        return jnp.sum(z**2, -1) / 2, z

    for start, is_right in ((1.0, True), (-1.0, False)):
        cloud = dynamics.init(random.key(0), jnp.full((1, 3, 2), start), energy_and_grad, couple)
        if is_right:
            dynamics.check(jax.tree.map(np.asarray, cloud))
        moved, held = reject_nonfinite(cloud, dynamics.step(random.key(1), cloud, energy_and_grad, couple, 0.01))
        assert held.all() != is_right and (moved.z == cloud.z).all() != is_right
