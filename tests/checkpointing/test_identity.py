"""Which runs in pieces are the same: models and parts are told apart by what they compute."""

import json
import os
from pathlib import Path
import subprocess
import sys

import jax
from jax import random
import jax.numpy as jnp
from models import programs_of, vectorized
import numpy as np
import pytest
from results import SIX

import numpyro
import numpyro.distributions as dist
from numpyro.infer import init_to_uniform

from numpyro_repulsion import RBF, SGLD, SGLDR, Independent, Polynomial, Subsampled, run_in_pieces
from numpyro_repulsion.checkpointing import identity
from numpyro_repulsion.checkpointing.directory import Directory
from numpyro_repulsion.checkpointing.identity import trace
from numpyro_repulsion.interactions import Scheduled

N = 200
X = np.random.default_rng(0).normal(size=(N, 2)).astype(np.float32)


class Accepted(Exception):
    """The directory is the run's, which need not go on."""


@pytest.fixture
def begin(tmp_path, monkeypatch):
    """Begins a run, or goes on with it, up to where it would compute."""

    def accept(*_):
        raise Accepted

    monkeypatch.setattr(Directory, "restore", accept)

    def begin(kernel, *args, directory="run", **kwargs):
        mcmc = vectorized(kernel, kwargs.pop("num_warmup", 60))
        with pytest.raises(Accepted):
            run_in_pieces(mcmc, random.key(0), *args, directory=tmp_path / directory, **kwargs)

    return begin


def regression(sd=1.0, factor=1.0, data=X):
    """A model that is made by a function, with data in its closure."""

    def model():
        beta = numpyro.sample("beta", dist.Normal(0, 1).expand([2]).to_event(1))
        sigma = numpyro.sample("sigma", dist.HalfNormal(sd))
        numpyro.deterministic("more", factor * beta)
        with numpyro.plate("rows", N, subsample_size=20) as i:
            numpyro.sample("y", dist.Normal(0.0, sigma), obs=jnp.asarray(data)[i] @ beta)

    return model


def bare(slope=1.0, **kwargs):
    """A potential energy: a number in it, or in a function of one's own, makes another run."""
    return SGLD(potential_fn=lambda z: slope * jnp.sum(z**2) / 2, **({"step_size": 0.1, "num_steps": 2} | kwargs))


def starting(radius):
    def strategy(site=None):
        return init_to_uniform(site, radius=radius)

    return SGLD(regression(), step_size=0.01, init_strategy=strategy)


@pytest.mark.parametrize(
    ("make", "some", "other", "words", "settings"),
    [
        (lambda x: SGLD(regression(sd=x), step_size=0.01), 1.0, 0.2, "the density of site 'sigma' differs", {}),
        (lambda x: SGLD(regression(data=x), step_size=0.01), X, X + 1e-3, "the density of site 'y' differs", {}),
        (lambda x: SGLD(regression(factor=x), step_size=0.01), 1.0, 2.0, "what an iteration computes differs", {}),
        (starting, 2.0, 1.0, "how particles start differs", {}),
        (bare, 1.0, 1.0 + 1e-6, "what an iteration computes differs", {"init_params": SIX}),
        (lambda x: bare(step_size=lambda n: jnp.where(n == 77, x, 1.0)), 1.0, 0.5, "what an", {"init_params": SIX}),
    ],
)
def test_what_differs_is_noticed_and_what_does_not_is_not(make, some, other, words, settings, begin):
    begin(make(some), **settings)
    begin(make(some), **settings)
    with pytest.raises(ValueError, match=f"(?s)contains another run: .*{words}.*Give another directory"):
        begin(make(other), **settings)


def test_energies_that_are_not_finite_accept_no_model(begin):
    """The same as above where all energies that are compared are infinite, or NaN."""
    for number, far in enumerate((jnp.inf, jnp.nan)):

        def far_away(slope, far=far):
            kernel = bare()
            kernel.__dict__["potential_fn"] = lambda z: jnp.where(z[0] < 50.0, far, slope * jnp.sum(z**2))
            return kernel

        begin(far_away(1.0), init_params=SIX + 100.0, directory=str(number))
        with pytest.raises(ValueError, match="what an iteration computes differs; .*not finite wherever"):
            begin(far_away(2.0), init_params=SIX + 100.0, directory=str(number))


def test_the_size_of_pieces_does_not_matter_nor_what_a_kernel_remembers(begin):
    kernel = SGLDR(regression())
    begin(kernel, piece_size=7)
    begin(kernel, piece_size=9)
    begin(SGLDR(regression()), piece_size=9)


def edit(path, change):
    run = json.loads(path.read_text())
    change(run)
    path.write_text(json.dumps(run))


def test_another_version_compares_densities(begin, tmp_path, monkeypatch):
    """Programs of other versions differ; the densities of sites tell models apart."""
    begin(SGLD(regression(), step_size=0.01))
    monkeypatch.setattr(identity, "makers", makers := lambda: {"jax": "9.9.9"})
    monkeypatch.setattr(sys.modules[Directory.__module__], "makers", makers)
    edit(tmp_path / "run" / "run.json", lambda run: run["identity"].update({"what an iteration computes": "digest 0"}))
    with pytest.warns(UserWarning, match="began with a different jax"):
        begin(SGLD(regression(), step_size=0.01))
    # Of one prior alone; in the sum over thousands of rows it would be lost.
    with pytest.raises(ValueError, match="contains another run: .*the density of site 'sigma' differs"):
        begin(SGLD(regression(sd=1.001), step_size=0.01))
    lost = [name for name in json.loads((tmp_path / "run" / "run.json").read_text())["identity"] if "density" in name]
    edit(tmp_path / "run" / "run.json", lambda run: run["identity"].update({name: [np.nan] * 5 for name in lost}))
    with pytest.raises(ValueError, match="is not finite wherever it was evaluated"):
        begin(SGLD(regression(), step_size=0.01))


def test_callbacks_are_compared_by_what_they_give(begin):
    """A digest says nothing of a Python function that the program calls."""

    def make(mean):
        def call(function, like, z):
            return jax.pure_callback(function, like, z, vmap_method="sequential")

        @jax.custom_jvp
        def energy(z):
            return call(lambda z: np.float32(((z - mean) ** 2).sum() / 2), jnp.float32(0), z)

        energy.defjvp(lambda z, t: (energy(z[0]), call(lambda z: z - np.float32(mean), z[0], z[0]) @ t[0]))
        return SGLD(potential_fn=energy, step_size=0.1, num_steps=1)

    begin(make(0.0), init_params=SIX, num_warmup=0)
    begin(make(0.0), init_params=SIX, num_warmup=0)
    with pytest.raises(ValueError, match="the potential energy differs"):
        begin(make(1.0), init_params=SIX, num_warmup=0)


def enumerated():
    def model():
        weights = numpyro.sample("weights", dist.Dirichlet(jnp.ones(2)))
        means = numpyro.sample("means", dist.Normal(0, 1).expand([2]).to_event(1))
        with numpyro.plate("rows", N, subsample_size=20) as i:
            kind = numpyro.sample("kind", dist.Categorical(weights), infer={"enumerate": "parallel"})
            numpyro.sample("y", dist.Normal(means[kind], 1.0), obs=jnp.asarray(X)[i, 0])

    return SGLD(model, step_size=0.01)


def default():
    return SGLDR(regression())


def parts():
    interaction = Scheduled(0.5 * RBF(1.0) + 0.5 * Independent(), lambda n: 1.0 / (1.0 + n))
    return SGLD(regression(), step_size=Polynomial(0.1), interaction=interaction, gradient=Subsampled(shared=True))


def digests(names):
    """Of the start and the iterations of kernels that are made by functions of this file, each on a line."""

    def of(kernel):
        keys = random.split(random.key(0), 6)
        start = trace(lambda keys: kernel.start(keys, 60, None, (), {}), keys)[0]
        return " ".join([start, *(trace(run, state)[0] for run, state in programs_of(kernel, keys, 60))])

    return "\n".join(of(globals()[name]()) for name in names)


@pytest.mark.parametrize(
    "names", [("parts",), pytest.param(("default", "enumerated"), marks=pytest.mark.slow)], ids=str
)
def test_another_process_has_the_same_digest(names):
    if "enumerated" in names:
        pytest.importorskip("funsor")
    folders = [str(folder) for folder in Path(__file__).parents[:2]]
    script = f"import sys; sys.path[:0] = {folders!r}; import test_identity as here; print(here.digests({names!r}))"
    environment = os.environ | {"PYTHONHASHSEED": "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"}
    command = [sys.executable, "-c", script]
    process = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    assert process.stdout.strip() == digests(names)
