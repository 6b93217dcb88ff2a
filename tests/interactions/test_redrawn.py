"""Interactions for many particles: K, Γ and noise without a matrix of all pairs."""

import dataclasses

import catalogue
from catalogue import having
import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro.infer import MCMC

from numpyro_repulsion import RBF, SGHMCR, SGLDR, Balanced
from numpyro_repulsion.interactions import Gram, RandomFeatures, RandomGroups

INTERACTIONS = tuple(having(catalogue.INTERACTIONS, "many").values())


def matrix(interaction, u):
    """K, by what it does to the unit vectors."""
    return interaction.couple(u).apply(jnp.eye(len(u)))


@pytest.fixture
def u():
    return random.normal(random.key(0), (6, 2))


def test_random_features_are_the_kernel_they_say(u):
    interaction = catalogue.INTERACTIONS["random features"].part
    w = interaction._frequencies(u, 1.5)
    cosines = np.cos(np.einsum("ijd,fd->ijf", u[:, None] - u[None], w)).mean(-1)
    np.testing.assert_allclose(matrix(interaction, u), 0.4 * np.eye(6) + 0.6 * cosines, atol=1e-5)


def test_random_features_are_the_gaussian_kernel_on_average(u):
    def one(key):
        return matrix(RandomFeatures(1.5, num_features=4, weight=0.5, key=key), u)

    draws = np.asarray(jax.vmap(one)(random.split(random.key(1), 4000)))
    exact = 0.5 * np.eye(6) + 0.5 * (RBF(1.5, nugget=1e-9).gram(u, None)[0])
    error = draws.std(0) / 4000**0.5
    assert (np.abs(draws.mean(0) - exact) < 4.5 * error + 1e-5).all()


def test_groups_are_blocks(u):
    interaction = catalogue.INTERACTIONS["groups"].part
    full = np.asarray(RBF(1.5).gram(u, None)[0])
    K = np.asarray(matrix(interaction, u))
    seen = (K != 0).astype(int)
    np.testing.assert_allclose(K[K != 0], full[K != 0], rtol=1e-5)
    assert (seen.sum(1) == 3).all() and (seen @ seen == 3 * seen).all()


@pytest.mark.parametrize("interaction", INTERACTIONS, ids=repr)
def test_repulsion_is_the_divergence_of_k(interaction, u):
    derivatives = jax.jit(jax.jacfwd(lambda moved: matrix(interaction, moved)))(u)  # (i, j, particle, d)
    expected = np.einsum("ijjd->id", derivatives)
    np.testing.assert_allclose(interaction.couple(u).repulsion, expected, atol=1e-5)
    assert np.abs(expected).max() > 0.05


@pytest.mark.parametrize("interaction", INTERACTIONS, ids=repr)
def test_noise_has_covariance_k(interaction, u):
    coupling = interaction.couple(u)
    draws = np.asarray(jax.vmap(coupling.draw)(random.split(random.key(1), 40_000)))
    products = np.einsum("nid,njd->nij", draws, draws) / 2
    error = products.std(0) / 40_000**0.5
    assert (np.abs(products.mean(0) - matrix(interaction, u)) < 4.5 * error + 1e-6).all()


@pytest.mark.parametrize("interaction", INTERACTIONS, ids=repr)
def test_bound_is_one(interaction, u):
    largest = np.linalg.eigvalsh(matrix(interaction, u))[-1]
    assert float(interaction.couple(u).bound) >= largest * (1 - 1e-5)


@pytest.mark.parametrize("interaction", INTERACTIONS, ids=repr)
def test_groups_of_the_cloud_do_not_meet(interaction, u):
    clouds = jnp.stack([u, u + 1.0])
    moved = clouds.at[1].add(0.3)
    one, other = (interaction.couple(x).repulsion for x in (clouds, moved))
    np.testing.assert_allclose(one[0], other[0], atol=1e-6)
    assert interaction.couple(clouds).draw(random.key(0)).shape == clouds.shape


def run(kernel, **kwargs):
    setting = {"num_warmup": 60, "num_samples": 10, "num_chains": 60, "chain_method": "vectorized"} | kwargs
    mcmc = MCMC(kernel, **setting, progress_bar=False)
    mcmc.run(random.key(0), init_params=random.normal(random.key(1), (setting["num_chains"], 2)))
    return mcmc


@pytest.mark.parametrize(
    ("kernel", "interaction"),
    [
        (SGLDR, RandomFeatures()),
        *(
            pytest.param(kernel, interaction, marks=pytest.mark.slow)
            for kernel, interaction in (
                (SGHMCR, RandomFeatures()),
                (SGLDR, RandomGroups(RBF(), size=10)),
                (SGHMCR, RandomGroups(RBF(), size=10)),
            )
        ),
    ],
    ids=repr,
)
def test_warmup_learns_what_they_need(kernel, interaction):
    mcmc = run(kernel(potential_fn=lambda z: jnp.sum(z**2) / 2, interaction=interaction), num_samples=200)
    learned = mcmc.last_state.learned
    assert np.isfinite(learned.bandwidth) and learned.step_size > 0.01
    z = np.asarray(mcmc.get_samples(group_by_chain=True), float)
    squares = (z**2).mean((1, 2))
    # The tolerated bias, and the standard error over particles, which are nearly independent.
    assert abs(squares.mean() - 1) < 0.05 + 4.5 * squares.std(ddof=1) / len(squares) ** 0.5


@pytest.mark.parametrize("interaction", [RandomFeatures(1.0), RandomGroups(RBF(1.0), size=10)], ids=repr)
def test_every_update_draws_anew(interaction):
    def end(kind):
        frozen = kind(
            **{name: getattr(interaction, name) for name in (f.name for f in dataclasses.fields(interaction))}
        )
        setting = {"step_size": 0.1, "interaction": frozen, "num_steps": 2}
        return run(SGLDR(potential_fn=lambda z: jnp.sum(z**2) / 2, **setting), num_warmup=0).last_state.z

    class Frozen(type(interaction)):
        def at(self, key, count):
            return self

    assert not np.allclose(end(type(interaction)), end(Frozen))


def test_groups_of_a_kernel_that_is_not_positive_definite_are_refused():
    class Indefinite(Gram):
        def evaluate(self, x, y, bandwidth):
            return jnp.sum((x - y) ** 2)

    kernel = SGLDR(
        potential_fn=lambda z: jnp.sum(z**2) / 2, interaction=RandomGroups(Indefinite(), size=10), step_size=0.1
    )
    with pytest.raises(ValueError, match="not positive definite on the starting particles"):
        run(kernel, num_warmup=0)


def test_wrong_settings_are_refused(u):
    for kwargs in ({"bandwidth": -1.0}, {"num_features": 0}, {"weight": 1.0}):
        with pytest.raises(ValueError, match=next(iter(kwargs))):
            RandomFeatures(**kwargs)
    with pytest.raises(ValueError, match="`size` must be an integer, 2 or more"):
        RandomGroups(RBF(), size=1)
    with pytest.raises(TypeError, match="takes an interaction with a Gram matrix"):
        RandomGroups(Balanced())
    with pytest.raises(ValueError, match="needs a multiple of 4 particles in each ensemble; got 6"):
        RandomGroups(RBF(1.0), size=4).couple(u)
    with pytest.raises(TypeError, match="Only interactions with a Gram matrix can be added"):
        RandomFeatures() + RBF()
