"""Warnings while a run goes on, from the host, which sees each state at the progress bar and between pieces."""

import warnings

import jax
from jax import random
from jax.experimental.compilation_cache import compilation_cache
import jax.numpy as jnp
from models import vectorized
import pytest

from numpyro_repulsion import SGLD, SGLDR, run_in_pieces

SIX = random.normal(random.key(1), (6, 2))


def quartic(z):
    return jnp.sum(z**4)


def make(kernel, num_warmup=0, num_samples=20):
    mcmc = vectorized(kernel, num_warmup, num_samples)
    mcmc.progress_bar = True  # NumPyro switches it off in tests.
    return mcmc


def said(run):
    """The warnings of a function, and nothing that is said late."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(each.message) for each in caught if issubclass(each.category, RuntimeWarning)]


def in_pieces(mcmc, **settings):
    run_in_pieces(mcmc, random.key(0), piece_size=7, **settings)


def at_once(mcmc, **settings):
    mcmc.run(random.key(0), **settings)


@pytest.mark.parametrize("run", [at_once, in_pieces])
def test_the_first_divergence_is_said_once(run):
    mcmc = make(SGLDR(potential_fn=quartic, step_size=10.0))
    found = said(lambda: run(mcmc, init_params=SIX))
    assert len(found) == 1 and "flagged `diverging`" in found[0]
    # A second run of the same kernel says it again.
    assert len(said(lambda: run(mcmc, init_params=SIX))) == 1
    assert not said(lambda: run(make(SGLDR(potential_fn=quartic, step_size=1e-3)), init_params=SIX))


@pytest.mark.parametrize("many", [False, True])
def test_rare_divergences_of_a_run_with_a_warmup_are_not_said(many):
    """As many as one in a thousand of a run as long as its warmup: 6 of these."""

    def spike(z):
        return jnp.sum(z**2) / 2 + jnp.where(jnp.abs(z).max() > (1.0 if many else 3.6), jnp.inf, 0.0)

    kernel = SGLD(potential_fn=spike, step_size=0.1)
    mcmc = make(kernel, num_warmup=100, num_samples=50)
    found = [one for one in said(lambda: at_once(mcmc, init_params=SIX / 10)) if "flagged" in one]
    count = int(mcmc.last_state.num_flagged_updates)
    assert count > 6 if many else 0 < count <= 6
    assert len(found) == many


@pytest.mark.parametrize("run", [at_once, in_pieces])
def test_problems_of_the_warmup_are_said_at_its_end(run):
    mcmc = make(SGLD(potential_fn=lambda z: z @ z, num_steps=1), num_warmup=60, num_samples=10)  # hardly moves
    found = said(lambda: run(mcmc, init_params=SIX))
    assert len(found) == 1 and "Warmup found problems" in found[0] and "an ESS of only about" in found[0]


def test_a_run_from_a_state_says_nothing_of_its_warmup():
    kernel = SGLD(potential_fn=lambda z: jnp.array([1.0, 1e-4]) @ z**2, num_steps=1)
    mcmc = make(kernel, num_warmup=60, num_samples=10)
    assert len(said(lambda: mcmc.warmup(random.key(0), init_params=SIX))) == 1
    mcmc.post_warmup_state = mcmc.last_state
    assert not said(lambda: mcmc.run(random.key(2)))


def test_another_kernel_does_not_repeat_old_divergences():
    mcmc = make(SGLDR(potential_fn=quartic, step_size=10.0))
    assert len(said(lambda: at_once(mcmc, init_params=SIX))) == 1
    other = make(SGLDR(potential_fn=quartic, step_size=10.0))
    other.post_warmup_state = mcmc.last_state
    assert not said(lambda: other.run(random.key(2)))


@pytest.fixture
def cache(tmp_path):
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    compilation_cache.reset_cache()
    yield tmp_path
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


@pytest.mark.parametrize(("run", "progress_bar"), [(at_once, True), (at_once, False), (in_pieces, False)])
def test_programs_are_kept_by_jax(run, progress_bar, cache):
    mcmc = make(SGLDR(potential_fn=quartic, step_size=1e-3))
    mcmc.progress_bar = progress_bar
    run(mcmc, init_params=SIX)
    programs = {path.name.split("-")[0] for path in cache.glob("jit_*-cache")}
    loops = {"jit__body_fn", "jit__fori_collect_loop", "jit_advance"}
    assert programs & loops
