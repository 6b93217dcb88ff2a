"""The posterior is stationary: shown on exact draws, over one step, and in the long run; each with controls that fail.

Every statistic is compared with its own standard error. With |z| <= 4.5 for each of some hundred comparisons the whole
file passes for more than 99.9 % of the seeds.
"""

from functools import cache, partial
from typing import NamedTuple

from catalogue import INTERACTIONS, having, wave
import jax
from jax import lax, random
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_repulsion import IMQ, RBF, Antithetic, Balanced, Independent
from numpyro_repulsion.dynamics import Cloud, Overdamped, Relativistic, Thermostat, Underdamped
from numpyro_repulsion.interactions import RandomFeatures, RandomGroups, Scheduled, median_bandwidth

LIMIT = 4.5


class Law(NamedTuple):
    """A law on R^d with its potential, exact draws, and functions with known means."""

    energy: callable
    draw: callable  # (key, shape) -> (*shape, d)
    moments: dict  # name -> (function of z (..., d), mean)


def _gaussian_draw(key, shape):
    return random.normal(key, (*shape, 2)) * jnp.array([1.0, 2.0])


def _mixture_draw(key, shape):
    weight_key, value_key = random.split(key)
    rate = jnp.where(random.bernoulli(weight_key, 1 / 3, shape), 1.5, 0.5)
    return jnp.log(random.exponential(value_key, shape) / rate)[..., None]


GAUSSIAN = Law(  # N(0, diag(1, 4))
    lambda z: 0.5 * (z[0] ** 2 + z[1] ** 2 / 4.0),
    _gaussian_draw,
    {
        "E x": (lambda z: z[..., 0], 0.0),
        "E x²": (lambda z: z[..., 0] ** 2, 1.0),
        "E y²": (lambda z: z[..., 1] ** 2, 4.0),
        "E xy": (lambda z: z[..., 0] * z[..., 1], 0.0),
    },
)
MIXTURE = Law(  # the paper's mixture of exponentials, in y = log x
    lambda z: -jnp.logaddexp(jnp.log(0.5) - 1.5 * jnp.exp(z[0]), jnp.log(1 / 3) - 0.5 * jnp.exp(z[0])) - z[0],
    _mixture_draw,
    {
        "E x": (lambda z: jnp.exp(z[..., 0]), 14 / 9),
        "E log x": (lambda z: z[..., 0], -np.euler_gamma - np.log(1.5) / 3 + 2 * np.log(2) / 3),
        "E (log x)²": (
            lambda z: z[..., 0] ** 2,
            np.pi**2 / 6 + (np.euler_gamma + np.log(1.5)) ** 2 / 3 + 2 * (np.euler_gamma - np.log(2)) ** 2 / 3,
        ),
    },
)
LAWS = {"gaussian": GAUSSIAN, "exponential mixture": MIXTURE}

GRAM = having(INTERACTIONS, "law")


# Negative controls: one thing wrong each. They wrap `couple`, so that everything else is the code under test.


def without_repulsion(interaction, u):
    return interaction.couple(u)._replace(repulsion=0.0)


def with_repulsion_flipped(interaction, u):
    coupling = interaction.couple(u)
    return coupling._replace(repulsion=-coupling.repulsion)


def with_nugget_in_noise_only(interaction, u):
    coupling = interaction.couple(u)
    return coupling._replace(apply=lambda x: coupling.apply(x) - 0.3 * x)


def with_unscaled_repulsion(interaction, u):
    # K follows the schedule, and Γ does not.
    return interaction.couple(u)._replace(repulsion=interaction.interaction.couple(u).repulsion)


def with_moving_bandwidth(interaction, u):
    # What a bandwidth by the median rule of the present particles does; the rule is frozen in real runs.
    return jnp.vectorize(_moving, signature="(l,d)->(l,d),(l,l)")(u)


def _moving(u):
    gram, repulsion = RBF().gram(u, median_bandwidth(u))
    return repulsion, gram


def with_unscaled_balance(interaction, u):
    size = u.shape[-2]
    coupling = interaction.couple(u)
    scale = ((size - 1) / size) ** 0.5
    # Momenta take their noise from `white`.
    return coupling._replace(draw=lambda key: scale * coupling.draw(key), white=lambda key: scale * coupling.white(key))


def force_of(law):
    return jnp.vectorize(jax.value_and_grad(law.energy), signature="(d)->(),(d)")


def z_score(samples, mean=0.0):
    samples = np.asarray(samples, np.float64)
    return (samples.mean() - mean) / (samples.std(ddof=1) / len(samples) ** 0.5)


# 1. Generator identity


JOINT_FUNCTIONS = {
    "z₁·z₂": lambda z: z[0] @ z[1],
    "Σ‖z‖²": lambda z: jnp.sum(z**2),
    "‖mean‖²": lambda z: jnp.sum(z.mean(0) ** 2),
    "sin z₁ cos z₂": lambda z: jnp.sin(z[0, 0]) * jnp.cos(z[1, -1]),
    "exp(−‖z₁ − z₂‖²)": lambda z: jnp.exp(-jnp.sum((z[0] - z[1]) ** 2)),
    "Σ tanh": lambda z: jnp.sum(jnp.tanh(z)),
}


def generator(drift_and_gram, f, z):
    """``𝓛f = Σ_i b_i·∇_i f + Σ_ij K_ij tr ∇_i ∇_jᵀ f`` at one cloud ``(L, d)``."""
    drift, gram = drift_and_gram(z)
    hessian = jax.hessian(f)(z)  # (L, d, L, d)
    return jnp.sum(drift * jax.grad(f)(z)) + jnp.einsum("ij,iaja->", gram, hessian)


def recipe(law, interaction, wrap=None):
    energy_and_grad = force_of(law)

    def drift_and_gram(z):
        if wrap is with_moving_bandwidth:
            repulsion, gram = _moving(z)
            return repulsion - gram @ energy_and_grad(z)[1], gram
        coupling = interaction.couple(z) if wrap is None else wrap(interaction, z)
        gram = interaction.gram(z, None)[0]
        return coupling.repulsion - coupling.apply(energy_and_grad(z)[1]), gram

    return drift_and_gram


def generator_scores(law, interaction, wrap=None, seed=0, draws=20_000, size=5):
    clouds = law.draw(random.key(seed), (draws, size))
    drift_and_gram = recipe(law, interaction, wrap)

    @jax.jit
    @jax.vmap
    def values(z):
        return {name: generator(drift_and_gram, f, z) for name, f in JOINT_FUNCTIONS.items()}

    return {name: z_score(value) for name, value in values(clouds).items()}


def laws_and(names, core, seeds=()):
    """Cases ``(law, name, seed)``: quick are those of the Gaussian and of the core, with the first seed."""

    def case(law, name, seed):
        is_quick = name in core and seed == 0 and (law == "gaussian" or name in ("sum, wide", "independent"))
        return pytest.param(law, name, seed, marks=() if is_quick else pytest.mark.slow)

    return [case(law, name, seed) for law in LAWS for name in names for seed in (0, *seeds)]


#: The sum has the RBF and the IMQ kernel in it.
CORE = {"sum, wide", "rbf, large nugget", "laplacian, wide", "scheduled, half", "independent"}


@pytest.mark.parametrize(("law", "interaction", "seed"), laws_and([*GRAM, "independent"], CORE, range(1, 6)))
def test_generator_identity(law, interaction, seed):
    scores = generator_scores(LAWS[law], INTERACTIONS[interaction].part, seed=seed)
    assert max(map(abs, scores.values())) < LIMIT, scores


@pytest.mark.parametrize("law", ["gaussian", pytest.param("exponential mixture", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("wrap", "interaction"),
    [
        (without_repulsion, GRAM["sum, wide"]),
        pytest.param(without_repulsion, GRAM["laplacian, wide"], marks=pytest.mark.slow),
        (with_repulsion_flipped, GRAM["sum, wide"]),
        (with_nugget_in_noise_only, RBF(2.0, nugget=0.3)),
        (with_unscaled_repulsion, GRAM["scheduled, half"]),
        (with_moving_bandwidth, RBF()),
    ],
)
def test_generator_identity_fails_when_broken(law, wrap, interaction):
    # What a moving bandwidth lacks fades with the number of particles: look at three.
    size = 3 if wrap is with_moving_bandwidth else 5
    scores = generator_scores(LAWS[law], interaction, wrap, size=size)
    assert max(map(abs, scores.values())) > 2 * LIMIT, scores


# 2. One step of the real update, from exact draws: E f(Z') − E f(Z) is of second order in the step


def step_scores(law, interaction, dynamics, functions, wrap=None, seed=0, draws=200_000, size=4, step_size=1e-2):
    couple = interaction.couple if wrap is None else partial(wrap, interaction)
    energy_and_grad = force_of(law)

    @jax.jit
    def run(key):
        draw_key, init_key, step_key = random.split(key, 3)
        z = law.draw(draw_key, (draws, size))
        cloud = dynamics.init(init_key, z, energy_and_grad, couple)
        moved = dynamics.step(step_key, cloud, energy_and_grad, couple, step_size)
        return {name: jax.vmap(f)(moved.z) - jax.vmap(f)(z) for name, f in functions.items()}

    return {name: z_score(values) for name, values in run(random.key(seed)).items()}


ONE_PARTICLE_FUNCTIONS = {"‖z₁‖²": lambda z: z[0] @ z[0], "Σ cos": lambda z: jnp.sum(jnp.cos(z[0]))}


@pytest.mark.parametrize(("law", "interaction", "seed"), laws_and(GRAM, {"sum, wide", "rbf, large nugget"}))
def test_one_step_of_sgldr(law, interaction, seed):
    scores = step_scores(LAWS[law], GRAM[interaction], Overdamped(), JOINT_FUNCTIONS, seed=seed)
    assert max(map(abs, scores.values())) < LIMIT, scores


@pytest.mark.parametrize("law", ["gaussian", pytest.param("exponential mixture", marks=pytest.mark.slow)])
@pytest.mark.parametrize("interaction", [Independent(), Balanced(), Antithetic()])
def test_one_step_of_sgld(law, interaction):
    # Leimkuhler-Matthews noise is correlated in time, so it is tested over time, below.
    scores = step_scores(LAWS[law], interaction, Overdamped("euler"), ONE_PARTICLE_FUNCTIONS)
    assert max(map(abs, scores.values())) < LIMIT, scores


@pytest.mark.parametrize(
    ("wrap", "interaction"), [(without_repulsion, RBF(2.0)), (with_nugget_in_noise_only, RBF(2.0, nugget=0.3))]
)
def test_one_step_fails_when_broken(wrap, interaction):
    scores = step_scores(GAUSSIAN, interaction, Overdamped(), JOINT_FUNCTIONS, wrap)
    assert max(map(abs, scores.values())) > 2 * LIMIT, scores


def test_one_step_of_svgd_is_not_stationary():
    scores = step_scores(GAUSSIAN, RBF(2.0), Overdamped(noise=False), JOINT_FUNCTIONS)
    assert scores["Σ‖z‖²"] < -2 * LIMIT


# 3. The long run


def long_run(law, interaction, dynamics, *, step_size, updates, size, replicas, seed=0, wrap=None):
    """Time averages of the law's moments, one per replica, each from exact draws."""
    energy_and_grad = force_of(law)

    def couple_at(count):
        current = interaction.at(None, count)
        return current.couple if wrap is None else partial(wrap, current)

    @jax.jit
    def run(key):
        draw_key, init_key, loop_key = random.split(key, 3)
        z = law.draw(draw_key, (replicas, size))
        cloud = dynamics.init(init_key, z, energy_and_grad, couple_at(0))

        def update(cloud, now):
            key, count = now
            cloud = dynamics.step(key, cloud, energy_and_grad, couple_at(count), step_size)
            return cloud, {name: f(cloud.z).mean(-1) for name, (f, _) in law.moments.items()}

        _, means = lax.scan(update, cloud, (random.split(loop_key, updates), jnp.arange(updates)))
        return {name: value.mean(0) for name, value in means.items()}

    return run(random.key(seed))


def extrapolated_scores(law, *args, step_size, updates, seed=0, **kwargs):
    """The moments at ε → 0, from runs at ε and 2ε: the bias of first order cancels."""
    fine = long_run(law, *args, step_size=step_size, updates=2 * updates, seed=seed, **kwargs)
    coarse = long_run(law, *args, step_size=2 * step_size, updates=updates, seed=seed + 1, **kwargs)
    return {name: z_score(2 * fine[name] - coarse[name], mean) for name, (_, mean) in law.moments.items()}


SAMPLERS = {
    "SGLDR, sum": (GRAM["sum, wide"], Overdamped()),
    "SGLDR, RBF": (RBF(2.0), Overdamped()),
    "SGLDR, IMQ": (IMQ(1.0), Overdamped()),
    "SGLDR, RBF, averaged": (RBF(2.0), Overdamped("lm")),
    "SGLD, independent": (Independent(), Overdamped("euler")),
    "SGLD, balanced": (Balanced(), Overdamped("euler")),
    "SGLD, independent, averaged": (Independent(), Overdamped("lm")),
    "SGLD, balanced, averaged": (Balanced(), Overdamped("lm")),
    "SGLD, antithetic": (Antithetic(), Overdamped("lm")),
    "SGLDR, Laplacian": (GRAM["laplacian, wide"], Overdamped()),
    "SGLDR, random features": (RandomFeatures(2.0, num_features=8, weight=0.7), Overdamped()),
    "SGLDR, groups": (RandomGroups(RBF(2.0), size=3), Overdamped()),
    "SGLDR, scheduled": (Scheduled(RBF(2.0), wave), Overdamped()),
    "SGLDR, scheduled, averaged": (Scheduled(RBF(2.0), wave), Overdamped("lm")),
    "SGLDR, scheduled features": (Scheduled(RandomFeatures(2.0, num_features=8), wave), Overdamped()),
    "SGHMC, independent": (Independent(), Underdamped()),
    "SGHMC, balanced": (Balanced(), Underdamped(friction=2.0)),
    "SGHMC, antithetic": (Antithetic(), Underdamped()),
    "SGHMCR, Laplacian": (GRAM["laplacian, wide"], Underdamped()),
    "SGHMC, relativistic": (Independent(), Underdamped(kinetic=Relativistic(2.0))),
    "SGHMCR, RBF": (RBF(2.0), Underdamped()),
    "SGHMCR, IMQ": (IMQ(1.0), Underdamped(friction=2.0)),
    "SGHMCR, sum, relativistic": (GRAM["sum, wide"], Underdamped(kinetic=Relativistic(2.0))),
    "SGHMCR, scheduled": (Scheduled(RBF(2.0), wave), Underdamped()),
    "SGNHT, independent": (Independent(), Thermostat()),
    "SGNHT, balanced": (Balanced(), Thermostat(friction=2.0, inertia=2.0)),
    "SGNHTR, RBF": (RBF(2.0), Thermostat()),
    "SGNHTR, scheduled": (Scheduled(RBF(2.0), wave), Thermostat()),
}
LONG = {
    "gaussian": {"step_size": 0.02, "updates": 1000, "size": 6, "replicas": 100},
    "exponential mixture": {"step_size": 0.01, "updates": 1500, "size": 6, "replicas": 100},
}


#: Those whose noise or momenta enter in a way of their own; the others are variations, or one update tells.
DISTINCT = {
    "SGLDR, RBF",
    "SGLDR, RBF, averaged",
    "SGLD, balanced, averaged",
    "SGLDR, groups",
    "SGHMC, relativistic",
    "SGHMCR, RBF",
    "SGNHTR, RBF",
}


@pytest.mark.parametrize(("law", "sampler", "seed"), laws_and(SAMPLERS, DISTINCT, range(10, 13)))
def test_long_run(law, sampler, seed):
    scores = extrapolated_scores(LAWS[law], *SAMPLERS[sampler], seed=seed, **LONG[law])
    assert max(map(abs, scores.values())) < LIMIT, scores


@pytest.mark.parametrize(
    ("wrap", "interaction", "dynamics"),
    [
        pytest.param(
            wrap,
            interaction,
            dynamics,
            # Many replicas, or several arrays each: the long ones. A control of one dynamics is that of the test.
            marks=pytest.mark.slow
            if isinstance(interaction, RandomFeatures) or dynamics != Overdamped("euler")
            else (),
        )
        for dynamics in (Overdamped("euler"), Overdamped("lm"), Underdamped(), Thermostat())
        for wrap, interaction in (
            (without_repulsion, RBF(2.0)),
            (without_repulsion, RandomFeatures(2.0, num_features=8, weight=0.7)),
            (with_nugget_in_noise_only, RBF(2.0, nugget=0.3)),
            (with_unscaled_balance, Balanced()),
        )
        # With momenta the noise does not see K; and a thermostat makes good what the noise lacks.
        if isinstance(dynamics, Overdamped)
        or "repulsion" in wrap.__name__
        or (isinstance(dynamics, Underdamped) and wrap is with_unscaled_balance)
    ],
)
def test_long_run_fails_when_broken(wrap, interaction, dynamics):
    # Few features repel less, and momenta even out: what is wrong takes more replicas to be seen.
    is_faint = isinstance(interaction, RandomFeatures) or (
        isinstance(dynamics, Underdamped) and interaction == Balanced()
    )
    setting = LONG["gaussian"] | ({"replicas": 400} if is_faint else {})
    scores = extrapolated_scores(GAUSSIAN, interaction, dynamics, wrap=wrap, **setting)
    assert not max(map(abs, scores.values())) <= 2 * LIMIT, scores


@pytest.mark.parametrize(
    "dynamics",
    [pytest.param(d, marks=pytest.mark.slow) for d in (Underdamped(), Overdamped(), Overdamped("lm"), Thermostat())],
)
def test_repulsion_may_come_and_go_if_its_divergence_does_too(dynamics):
    # More particles, which feel more of each other.
    setting = LONG["gaussian"] | {"size": 20}
    for wrap in (None, with_unscaled_repulsion):
        scores = extrapolated_scores(GAUSSIAN, Scheduled(RBF(2.0), wave), dynamics, wrap=wrap, **setting)
        largest = max(map(abs, scores.values()))
        assert largest < LIMIT if wrap is None else not largest <= 2 * LIMIT, scores


class Anticipating(Overdamped):
    """Averages the white noise instead of the colored: C_t meets ξ_{t−1}, on which it depends."""

    def init(self, key, z, energy_and_grad, couple):
        return Cloud(z, *energy_and_grad(z), (random.normal(key, z.shape),))

    def step(self, key, cloud, energy_and_grad, couple, step_size):
        coupling, white = couple(cloud.z), random.normal(key, cloud.z.shape)
        root = jnp.linalg.cholesky(coupling.apply(_eye(cloud.z)))
        noise = jnp.sqrt(2.0 * step_size) * root @ ((white + cloud.memory[0]) / 2)
        z = cloud.z + step_size * (coupling.repulsion - coupling.apply(cloud.gradient)) + noise
        return Cloud(z, *energy_and_grad(z), (white,))


def _eye(z):
    return jnp.broadcast_to(jnp.eye(z.shape[1]), (z.shape[0], z.shape[1], z.shape[1]))


@pytest.mark.slow
def test_averaged_noise_must_not_anticipate():
    # A wide kernel and many replicas, for the effect is small.
    setting = LONG["gaussian"] | {"replicas": 400}
    scores = extrapolated_scores(GAUSSIAN, RBF(8.0), Overdamped("lm"), **setting)
    assert max(map(abs, scores.values())) < LIMIT, scores
    scores = extrapolated_scores(GAUSSIAN, RBF(8.0), Anticipating("lm"), **setting)
    assert not max(map(abs, scores.values())) <= 2 * LIMIT, scores


# `test_recipe.py` has drift and diffusion at another temperature.
@pytest.mark.slow
@pytest.mark.parametrize(("interaction", "T"), [(RBF(2.0), 0.25), (Independent(), 2.0)])
def test_temperature_scales_the_variance(interaction, T):
    law = GAUSSIAN._replace(
        draw=lambda key, shape: T**0.5 * _gaussian_draw(key, shape),
        moments={name: (f, T * mean) for name, (f, mean) in GAUSSIAN.moments.items()},
    )
    scores = extrapolated_scores(law, interaction, Overdamped("euler", temperature=T), **LONG["gaussian"])
    assert max(map(abs, scores.values())) < LIMIT, scores


# 4. Balanced and antithetic noise: one particle's law over time is that of independent noise


@cache
def two_time_moments(interaction, integrator, *, lag=20, replicas=40_000, size=4, seed=0, wrap=None):
    """Functions of one particle at two times, in many independent ensembles."""
    dynamics, energy_and_grad = Overdamped(integrator), force_of(MIXTURE)
    couple = interaction.couple if wrap is None else partial(wrap, interaction)

    @jax.jit
    def run(key):
        draw_key, init_key, loop_key = random.split(key, 3)
        cloud = dynamics.init(init_key, MIXTURE.draw(draw_key, (replicas, size)), energy_and_grad, couple)

        def update(cloud, key):
            return dynamics.step(key, cloud, energy_and_grad, couple, 0.05), None

        first, _ = lax.scan(update, cloud, random.split(loop_key, 2 * lag)[:lag])
        second, _ = lax.scan(update, first, random.split(loop_key, 2 * lag)[lag:])
        a, b = first.z[:, 0, 0], second.z[:, 0, 0]
        return {"ab": a * b, "a²b²": a**2 * b**2, "(b − a)²": (b - a) ** 2, "sin": jnp.sin(a) * jnp.sin(b), "b²": b**2}

    return run(random.key(seed))


def difference_scores(x, y):
    return {
        name: float(
            (x[name].mean() - y[name].mean()) / jnp.sqrt(x[name].var() / x[name].size + y[name].var() / y[name].size)
        )
        for name in x
    }


@pytest.mark.parametrize("interaction", [Balanced(), Antithetic()])
@pytest.mark.parametrize(
    # Without a memory one step tells: `test_one_step_of_sgld`.
    ("integrator", "seed"),
    [
        ("lm", 0),
        *(pytest.param(*x, marks=pytest.mark.slow) for x in (("euler", 0), ("euler", 1), ("lm", 1), ("lm", 2))),
    ],
)
def test_noise_that_cancels_leaves_one_particle_as_it_is(interaction, integrator, seed):
    cancelling = two_time_moments(interaction, integrator, seed=2 * seed)
    independent = two_time_moments(Independent(), integrator, seed=2 * seed + 1)
    scores = difference_scores(cancelling, independent)
    assert max(map(abs, scores.values())) < LIMIT, scores


def test_balanced_noise_without_its_scale_is_told_apart():
    balanced = two_time_moments(Balanced(), "euler", wrap=with_unscaled_balance)
    independent = two_time_moments(Independent(), "euler", seed=1)
    assert max(map(abs, difference_scores(balanced, independent).values())) > 2 * LIMIT


def test_antithetic_noise_that_depends_on_the_order_is_told_apart():
    # Of a pair the left one always goes left: pairs may be taken from the past, signs may not.
    def ordered(interaction, u):
        coupling = interaction.couple(u)
        outward = jnp.sign(u - u.mean(-2, keepdims=True))
        return coupling._replace(draw=lambda key: outward * jnp.abs(coupling.draw(key)))

    antithetic = two_time_moments(Antithetic(), "euler", wrap=ordered)
    independent = two_time_moments(Independent(), "euler", seed=1)
    assert max(map(abs, difference_scores(antithetic, independent).values())) > 2 * LIMIT


@pytest.mark.slow
def test_groups_balanced_against_each_other_keep_the_law_of_one_group():
    def one_group(interaction, seed):
        dynamics, energy_and_grad = Overdamped(), force_of(GAUSSIAN)

        def one(key):
            draw_key, init_key, loop_key = random.split(key, 3)
            cloud = dynamics.init(init_key, GAUSSIAN.draw(draw_key, (3, 4)), energy_and_grad, interaction.couple)

            def update(cloud, key):
                return dynamics.step(key, cloud, energy_and_grad, interaction.couple, 0.05), None

            cloud, _ = lax.scan(update, cloud, random.split(loop_key, 30))
            z = cloud.z[0]
            return {"z₁·z₂": z[0] @ z[1], "‖z₁‖²": z[0] @ z[0], "cos": jnp.cos(z[0, 0]) * jnp.cos(z[1, 0])}

        return jax.jit(jax.vmap(one))(random.split(random.key(seed), 10_000))

    scores = difference_scores(one_group(Balanced(RBF(2.0)), 0), one_group(RBF(2.0), 1))
    assert max(map(abs, scores.values())) < LIMIT, scores


# 5. Hard clouds


def test_many_particles_and_a_wide_bandwidth_stay_stationary():
    setting = {"step_size": 5e-4, "updates": 400, "size": 200, "replicas": 8}
    moments = long_run(GAUSSIAN, RBF(50.0), Overdamped(), **setting)
    scores = {name: z_score(moments[name], mean) for name, (_, mean) in GAUSSIAN.moments.items()}
    assert max(map(abs, scores.values())) < LIMIT, scores


def test_coincident_particles_separate():
    energy_and_grad, couple, dynamics = force_of(GAUSSIAN), RBF(2.0).couple, Overdamped()

    def update(cloud, key):
        return dynamics.step(key, cloud, energy_and_grad, couple, 0.05), None

    cloud = dynamics.init(random.key(0), jnp.ones((50, 6, 2)), energy_and_grad, couple)
    cloud, _ = jax.jit(lambda cloud: lax.scan(update, cloud, random.split(random.key(1), 2000)))(cloud)
    assert jnp.isfinite(cloud.z).all()
    x, y = cloud.z[..., 0], cloud.z[..., 1]
    # By then the 50 clouds are independent draws of 6 particles each.
    assert abs(z_score((x**2).mean(-1), 1 / (1 - 0.025))) < LIMIT
    assert abs(z_score((y**2).mean(-1), 4 / (1 - 0.025 / 4))) < LIMIT
