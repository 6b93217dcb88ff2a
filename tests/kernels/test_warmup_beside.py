"""Warmup beside the sampler: what its programs are, what passes, and what a run leaves behind."""

import gc
from pathlib import Path

import jax
from jax import random
import jax.numpy as jnp
from models import programs_of, vectorized
import numpy as np
import pytest

import numpyro
import numpyro.distributions as dist

from benchmarks.harness.house import equations
from numpyro_repulsion import SGLD, run_in_pieces
from numpyro_repulsion.checkpointing import directory, identity
from numpyro_repulsion.checkpointing.directory import Directory
from numpyro_repulsion.gradients.target import quickly
from numpyro_repulsion.kernels import bound, programs
from numpyro_repulsion.kernels.programs import Programs, compiler_options

KEYS, Y = random.split(random.key(0), 6), 2.0 + random.normal(random.key(1), (40,))


def model(y, center=0.0):
    mu = numpyro.sample("mu", dist.Normal(center, 10).expand([2]).to_event(1))
    with numpyro.plate("rows", len(y), subsample_size=8) as i:
        numpyro.sample("y", dist.Normal(mu.sum(), 1), obs=y[i])


#: Whose programs are compiled once for all tests that do not need their own.
KERNEL = SGLD(model)


def size(kernel):
    """The number of equations of an iteration after warmup, and of the arrays of its state."""
    function, state = programs_of(kernel, KEYS, 100, Y)[-1]
    return len(list(equations(jax.make_jaxpr(function)(state).jaxpr))), len(jax.tree.leaves(state))


def test_the_program_of_draws_holds_no_learner():
    number, leaves = size(SGLD(model))
    assert number <= 1200 and leaves <= 25
    # Nothing that is off is in it: jumps and control variates.
    assert size(SGLD(model, gradient="plain"))[0] < number
    # Those of warmup hold none either: learners are functions of the host.
    for warmup, state in programs_of(SGLD(model), KEYS, 100, Y)[:-1]:
        assert len(list(equations(jax.make_jaxpr(warmup)(state).jaxpr))) <= 1200


def test_iterations_of_warmup_pass_or_are_frozen_draws():
    mcmc = vectorized(KERNEL, 60, 5)
    mcmc.warmup(random.key(0), Y)
    assert int(mcmc.last_state.iteration) == 60
    again = vectorized(KERNEL, 60, 5)
    again.warmup(random.key(0), Y, collect_warmup=True)
    learned = again.last_state.learned
    jax.tree.map(np.testing.assert_array_equal, mcmc.last_state.learned, learned)
    draws = again.get_samples(group_by_chain=True)["mu"]
    assert draws.shape == (6, 60, 2) and (draws[:, 1:] != draws[:, :-1]).any(-1).all()
    assert np.unique(again.get_extra_fields()["step_size"]).tolist() == [float(learned.step_size)]
    assert int(mcmc.last_state.num_updates) == 600 and int(again.last_state.num_updates) == 1200
    # Nothing is learned in the run after it.
    again.run(random.key(1), Y)
    jax.tree.map(np.testing.assert_array_equal, again.last_state.learned, learned)
    assert np.unique(again.get_extra_fields()["bandwidth"]).tolist() == [float(learned.bandwidth)]


def test_without_anything_to_learn_iterations_of_warmup_are_updates():
    mcmc = vectorized(SGLD(model, step_size=1e-3, gradient="plain"), 7, 5)
    mcmc.run(random.key(0), Y)
    state = mcmc.last_state
    assert int(state.num_updates) == 120 and not state.origin.has_warmed and state.learned.packed is None


def test_an_interrupted_warmup_leaves_a_kernel_that_works(monkeypatch):
    kernel, plain = KERNEL, SGLD.warm
    expected = kernel.init(KEYS, 60, None, (Y,), {})

    def interrupted(*arguments):
        plain(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(SGLD, "warm", interrupted)
    with pytest.raises(KeyboardInterrupt):
        kernel.init(KEYS, 60, None, (Y,), {})
    monkeypatch.undo()
    found = kernel.init(KEYS, 60, None, (Y,), {})
    jax.tree.map(np.testing.assert_array_equal, found.z, expected.z)


def test_a_bar_of_its_own(monkeypatch, capsys):
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    mcmc = vectorized(KERNEL, 60, 5)
    mcmc.progress_bar = True  # NumPyro switches it off in tests.
    mcmc.warmup(random.key(0), Y)
    assert "warmup: 100%" in capsys.readouterr().err


def test_pieces_of_warmup_are_stored_and_go_on(tmp_path, monkeypatch):
    """A process that dies in a piece of warmup, or just after it, goes on to the same draws."""

    def run(directory):
        mcmc = vectorized(KERNEL, 60, 20)
        run_in_pieces(mcmc, random.key(0), Y, piece_size=25, directory=directory)
        return np.asarray(mcmc.get_samples()["mu"])

    plain, whole = Directory.save, run(None)
    for dies in (0, 2):
        saved = []

        def save(self, *arguments, saved=saved, dies=dies):
            plain(self, *arguments)
            saved.append(arguments[0])
            if len(saved) > dies:
                raise KeyboardInterrupt

        monkeypatch.setattr(Directory, "save", save)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / str(dies))
        assert saved == [25, 50, 60, 80][: dies + 1]
        monkeypatch.undo()
        assert np.array_equal(run(tmp_path / str(dies)), whole)


def test_options_follow_from_shapes():
    def is_quick(X, y):
        def linear(X, y):
            numpyro.sample("y", dist.Normal((X @ jnp.ones(1000)).reshape(-1, *[1] * (y.ndim - 1)), 1.0), obs=y)
            numpyro.sample("z", dist.Normal())

        return "xla_backend_optimization_level" in compiler_options(SGLD(linear).bind((X, y)), 1000, 20, 2)

    few, many = (SGLD(model).bind((jnp.zeros(rows),)) for rows in (40, 40_000_000))
    assert compiler_options(few, 1000, 20, 2)["xla_backend_optimization_level"] == 0
    assert "xla_backend_optimization_level" not in compiler_options(few, 100_000_000, 20, 2)
    assert compiler_options(many, 1000, 20, 2) == compiler_options(few, 1000, 20, 2)  # minibatches have 8 rows
    assert is_quick(jnp.zeros((1000, 1000)), jnp.zeros(1000))  # a product of matrices
    assert not is_quick(jnp.zeros((1000, 1000)), jnp.zeros((1000, 1000)))  # as many observations
    shared = SGLD(model)
    shared._num_runs = 100_000  # as `calibrate` may know
    assert "xla_backend_optimization_level" not in compiler_options(shared.bind((jnp.zeros(40),)), 1000, 20, 2)


def test_options_are_the_same_if_a_program_asks_first():
    # As of runs in pieces, which trace their programs first; a run that resumes must compile the same ones.
    outside, within = quickly(), []
    quickly.cache_clear()
    jax.make_jaxpr(lambda: within.append(quickly()))()
    assert within == [outside]


def test_programs_of_forgotten_kernels_are_dropped(monkeypatch):
    monkeypatch.setattr(programs, "NUM_KEPT", 2)
    sampler = KERNEL.bind((Y,))

    def same(bound, settings, x):
        return x

    found = [Programs(KERNEL) for _ in range(3)]
    for one in found:
        one(same, sampler, None, Y, options={})
    assert [len(one._compiled) for one in found] == [0, 1, 1]
    assert np.array_equal(found[0](same, sampler, None, Y, options={}), Y)


def test_arrays_that_would_lose_precision_are_no_inputs():
    """As inputs they would be narrowed, and warmup would see other data than the draws."""
    seconds, may = 1.7e9 + np.arange(200.0), programs._may_be_input
    assert not may(seconds) and not may(np.array([2**40, 1])) and may(seconds - seconds.mean()) and may(np.arange(3))
    assert may(np.full((3, 2), 0.1)) and may(np.array([1.0, np.nan, 2.0])) and may(np.array(0.1))


def test_a_directory_goes_on_where_the_digest_of_the_model_is_another(tmp_path, monkeypatch):
    """As with another JAX: the references are evaluated again, and no update is rejected for them."""
    plain, digest, makers = Directory.save, bound.digest_of_program, identity.makers()
    for dies in (1, 3):
        saved = []

        def save(self, *arguments, saved=saved, dies=dies):
            plain(self, *arguments)
            saved.append(arguments[0])
            if len(saved) == dies:
                raise KeyboardInterrupt

        def run(path=tmp_path / str(dies)):
            mcmc = vectorized(SGLD(model), 60, 40)
            run_in_pieces(mcmc, random.key(0), Y, piece_size=30, directory=path)
            return mcmc

        monkeypatch.setattr(Directory, "save", save)
        with pytest.raises(KeyboardInterrupt):
            run()
        monkeypatch.undo()
        for module in (bound, identity):
            monkeypatch.setattr(module, "digest_of_program", lambda *args: digest(*args) + " by another JAX")
        monkeypatch.setattr(directory, "makers", lambda: makers | {"jax": "another"})
        with pytest.warns(UserWarning, match="may round differently"):
            mcmc = run()
        assert int(mcmc.last_state.num_flagged_updates) == 0 and mcmc.last_state.learned.reference is not None
        monkeypatch.undo()


@pytest.mark.slow
def test_a_process_can_fit_many_models():
    """Linux allows 65,530 memory maps; NumPyro and JAX keep the programs of draws."""

    def fit(number):
        mcmc = vectorized(SGLD(model), 50, 10, 4)
        mcmc.run(random.key(number), Y, float(number))
        gc.collect()
        return Path("/proc/self/maps").read_bytes().count(b"\n")

    maps = [fit(number) for number in range(14)]
    assert max(np.diff(maps[9:])) < 400


def test_one_program_serves_all_strides_of_a_bar(caplog):
    def count(stride):
        kernel = SGLD(model)
        caplog.clear()
        with jax.log_compiles():
            state = kernel.start(KEYS, 60, None, (Y,), {})
            for _ in range(0, 60, stride):
                state = kernel.warm(state, stride, 60, (Y,), {})
        return sum("Compiling jit(_on_arrays)" in message for message in caplog.messages)

    assert count(5) == count(60) <= 9
