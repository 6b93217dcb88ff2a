"""Runs in pieces: bit for bit those of ``MCMC.run``, in one process or over many that were killed."""

import errno
import itertools
import os
from pathlib import Path
import pickle
import signal
import subprocess
import sys
import warnings

import jax
from jax import random
import jax.numpy as jnp
from models import quadratic, vectorized
import numpy as np
import pytest
from results import SIX

import numpyro
import numpyro.distributions as dist
from numpyro.infer import NUTS

from numpyro_repulsion import (
    SGHMC,
    SGHMCR,
    SGLD,
    SGLDR,
    SGNHT,
    SVGD,
    SVRG,
    Archive,
    ControlVariates,
    FullData,
    Polynomial,
    Subsampled,
    Sweeps,
    load_draws,
    run_in_pieces,
    summary,
    to_inference_data,
)
from numpyro_repulsion.checkpointing.directory import Directory, plan


def regression(X, y, scale=1.0):
    beta = numpyro.sample("beta", dist.Normal(0, scale).expand([3]).to_event(1))
    sigma = numpyro.sample("sigma", dist.Gamma(3, 1))
    numpyro.deterministic("twice", 2 * beta)
    with numpyro.plate("rows", 40, subsample_size=8) as i:
        numpyro.sample("y", dist.Normal(X[i] @ beta, sigma), obs=y[i])


def data():
    X = random.normal(random.key(0), (40, 3))
    return X, X @ jnp.array([1.0, -1.0, 0.5]) + random.normal(random.key(1), (40,))


def make(kernel, num_warmup=9, num_samples=30, **kwargs):
    return vectorized(kernel, num_warmup, num_samples, **kwargs)


def plain(step_size=0.05, **kwargs):
    return SGLDR(potential_fn=quadratic, step_size=step_size, num_steps=2, **kwargs)


def leaves(tree):
    found = jax.tree.leaves(tree)
    return [np.asarray(random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x) for x in found]


def assert_same(run, other):
    """The same bits: draws, extra fields and last state."""
    for a, b in ((run._states, other._states), (run.last_state, other.last_state)):
        assert jax.tree.structure(a) == jax.tree.structure(b)
        for x, y in zip(leaves(a), leaves(b), strict=True):
            assert x.dtype == y.dtype and x.shape == y.shape
            assert x.tobytes() == y.tobytes()


# Bits


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A finished run in a directory."""
    path = tmp_path_factory.mktemp("runs") / "begun"
    mcmc = make(SGLDR(regression, step_size=1e-3, num_steps=2))
    run_in_pieces(mcmc, random.key(0), *data(), piece_size=7, extra_fields=("z.beta",), directory=path)
    return path, mcmc


def test_pieces_have_the_draws_of_a_thinned_run():
    whole, parts = (make(plain(), num_warmup=5, num_samples=16, thinning=3) for _ in range(2))
    whole.run(random.key(0), init_params=SIX)
    run_in_pieces(parts, random.key(0), init_params=SIX, piece_size=7)
    np.testing.assert_allclose(
        parts.get_samples(group_by_chain=True), whole.get_samples(group_by_chain=True), rtol=1e-4
    )


@pytest.mark.slow
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize(
    ("kernel", "settings"),
    [
        (lambda: SGLD(regression), {"thinning": 2}),
        (lambda: SGLDR(regression, gradient=ControlVariates(shared=True)), {"jit_model_args": True}),
        (lambda: SGLDR(regression, gradient=Subsampled(), num_ensembles=2), {"thinning": 4}),
        (lambda: SVGD(regression, gradient=FullData()), {}),
        (lambda: SGHMCR(regression), {"thinning": 3}),
        (lambda: SGNHT(regression, gradient=SVRG()), {}),
        (lambda: SGHMC(regression, gradient=Sweeps()), {}),
        (lambda: SGLD(regression, gradient=FullData(), moves=Archive()), {}),
        (lambda: SGLD(regression, step_size=1e-3), {"num_chains": 1, "chain_method": "parallel"}),
        (lambda: SGLD(regression), {"num_chains": 1, "num_warmup": 0}),
    ],
)
def test_pieces_are_one_run_of_every_kernel(kernel, settings, double, tmp_path):
    with jax.enable_x64(double), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of warmups as short as these
        settings = {"num_warmup": 60, "num_samples": 41} | settings
        if settings["num_warmup"] == 0:
            settings["num_warmup"] = 60  # a single chain with a measured step
        key, args = (random.PRNGKey if double else random.key)(1), data()
        whole = make(kernel(), **settings)
        whole.run(key, *args)
        for size, directory in ((13, None), (29, tmp_path)):
            parts = make(kernel(), **settings)
            run_in_pieces(parts, key, *args, piece_size=size, directory=directory)
            assert_same(whole, parts)


@pytest.mark.slow
def test_goes_on_from_a_stored_state_as_a_run_does():
    first, whole, parts = (make(plain(), num_warmup=0, num_samples=20) for _ in range(3))
    first.run(random.key(0), init_params=SIX)
    whole.post_warmup_state = first.last_state
    parts.post_warmup_state = pickle.loads(pickle.dumps(first.last_state))
    whole.run(random.key(1))
    run_in_pieces(parts, random.key(1), piece_size=6)
    assert_same(whole, parts)


def test_a_state_that_orbax_stored_is_the_same(tmp_path):
    checkpoint = pytest.importorskip("orbax.checkpoint")
    for i, key in enumerate((random.key(0), random.PRNGKey(0))):
        state = plain().init(random.split(key, 6), 0, SIX, (), {})
        with checkpoint.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / str(i), state)
        with checkpoint.StandardCheckpointer() as checkpointer:
            like = jax.eval_shape(lambda key=key: plain().init(random.split(key, 6), 0, SIX, (), {}))
            found = checkpointer.restore(tmp_path / str(i), like)
        assert jax.tree.structure(found) == jax.tree.structure(state)
        assert all(map(np.array_equal, leaves(found), leaves(state)))


# What users see


def test_one_program_for_all_pieces_and_one_bar(monkeypatch, capsys, caplog, tmp_path):
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    mcmc = make(plain(), num_samples=100, progress_bar=True)
    with jax.log_compiles():
        run_in_pieces(mcmc, random.key(0), init_params=SIX, piece_size=9, directory=tmp_path / "a")
        run_in_pieces(mcmc, random.key(1), init_params=SIX, piece_size=9)
        text = capsys.readouterr().err
        run_in_pieces(mcmc, random.key(0), init_params=SIX, piece_size=9, directory=tmp_path / "a")
    compiled = [message for message in caplog.messages if "Compiling" in message and "advance" in message]
    assert len(compiled) == 1
    bars = text.strip().split("\n")
    assert len(bars) == 2 and all(bar.split("\r")[-1].startswith("sample: 100%") for bar in bars)
    assert text.count("| 0/109") == 2
    assert "2 steps/draw, ε = 0.05" in text
    assert "%" not in capsys.readouterr().err


@pytest.mark.slow
def test_results_are_those_of_a_run(begun):
    path, mcmc = begun
    mcmc.print_summary()
    table = summary(mcmc)
    assert "6 particles in 1 ensemble" in str(table) and "sigma" in table.index
    posterior = to_inference_data(mcmc)["posterior"]
    draws = load_draws(path)
    assert draws.is_complete and draws.num_iterations == 39
    assert set(draws.samples) == {"beta", "sigma", "twice"}
    assert set(draws.extra_fields) == {"potential_energy", "step_size", "bandwidth", "diverging", "z.beta"}
    for name, value in draws.samples.items():
        assert np.array_equal(posterior[name], value) and not value.flags.writeable
    assert np.array_equal(np.load(path / "draws" / "beta.npy"), draws.samples["beta"])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_samples": 31}, "num_samples was 30 and is 31"),
        ({"key": 1}, "key differs"),
        ({"kernel": lambda: SGLD(regression, step_size=1e-3)}, "kernel was SGLDR and is SGLD; .*interaction was RBF"),
        ({"step_size": Polynomial(1e-3)}, "step_size differs"),
        ({"data": "y"}, r"the model's args\[1\] differs"),
        ({"scale": 2.0}, r"the model's kwargs\['scale'\] is new.*the density of site 'beta' differs"),
        ({"extra_fields": ("gradient",)}, "field gradient is new.* field z.beta is missing"),
    ],
)
def test_another_run_is_refused(change, words, begun):
    change = dict(change)
    kernel = SGLDR(regression, step_size=change.pop("step_size", 1e-3), num_steps=2)
    kernel = change.pop("kernel", lambda: kernel)()
    X, y = data()
    y = y.at[3].add(1e-3) if change.pop("data", None) else y
    key, more = change.pop("key", 0), {"extra_fields": ("z.beta",)}
    more |= {n: change.pop(n) for n in ("scale", "extra_fields") if n in change}
    with pytest.raises(ValueError, match=f"(?s)contains another run: .*{words}.*Give another"):
        run_in_pieces(make(kernel, **change), random.key(key), X, y, **more, directory=begun[0])


def test_wrong_use(tmp_path, monkeypatch):
    def run(mcmc=None, **kwargs):
        run_in_pieces(make(plain()) if mcmc is None else mcmc, random.key(0), **({"init_params": SIX} | kwargs))

    for size in (0, 1.5, True, "all"):
        with pytest.raises(ValueError, match="`piece_size` must be an integer, 1 or more"):
            run(piece_size=size)
    with pytest.raises(TypeError, match="a kernel of this package.*got MCMC with NUTS"):
        run(make(NUTS(regression)))
    with pytest.raises(TypeError, match="`extra_fields` must be a tuple"):
        run(extra_fields="gradient")
    with pytest.raises(ValueError, match='needs chain_method="vectorized"'):
        run(make(plain(), chain_method=jax.vmap))
    with pytest.raises(ValueError, match="one start for each chain, a leading axis of 6"):
        run(init_params=SIX[:4])
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="contains other files .notes.txt"):
        run(directory=tmp_path)
    with pytest.raises(OSError, match="cannot be made"):
        run(directory=tmp_path / "notes.txt")
    with pytest.raises(FileNotFoundError, match="contains no run"):
        load_draws(tmp_path)
    other = Directory(tmp_path / "taken", 10)
    with pytest.raises(RuntimeError, match="Another run is writing"):
        run(directory=tmp_path / "taken")
    other.close()
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(PermissionError, match="cannot be written to"):
        run(directory=tmp_path / "taken")


# Deaths


class Death(BaseException):
    """The end of a process, as far as its files are concerned: nothing is written after it."""


OPERATIONS = ("open", "write", "fsync", "replace", "posix_fallocate", "ftruncate", "mkdir", "unlink")


class Fate:
    """Ends the process at its n-th operation on files: before it, after it, or half-way through a write."""

    def __init__(self, monkeypatch, when, how, end):
        self.count, self.when, self.how, self.end = 0, when, how, end
        for name in OPERATIONS:
            monkeypatch.setattr(os, name, self._doomed(name, getattr(os, name)))

    def _doomed(self, name, operation):
        def doomed(*args, **kwargs):
            self.count += 1
            if self.count < self.when:
                return operation(*args, **kwargs)
            if self.count == self.when and self.how == "after":
                operation(*args, **kwargs)
            if self.count == self.when and self.how == "torn" and name == "write":
                operation(args[0], args[1][: len(args[1]) // 2])
            return self.end()

        return doomed


def die():
    raise Death


class Tale:
    """A run without a sampler: what it should save is known beforehand."""

    num_rows, piece = 11, 4
    states = tuple({"n": np.arange(3) + i, "key": random.key(i), "old": random.PRNGKey(i)} for i in range(num_rows + 1))

    def __init__(self, path):
        self.path = path
        self.saved = 0
        shapes = {"z": {"x/y": jax.ShapeDtypeStruct((3, 2), "float32"), "X_y": jax.ShapeDtypeStruct((3,), "float64")}}
        shapes |= {"diverging": jax.ShapeDtypeStruct((3,), "bool"), "none": jax.ShapeDtypeStruct((3, 0), "int32")}
        self.files = plan(dict(sorted(shapes.items())), "z", 3, self.num_rows)

    def rows(self, first, stop):
        number = np.arange(3)[:, None] * 100 + np.arange(first, stop)
        return [
            np.broadcast_to(
                number.reshape(*number.shape, *[1] * (len(f.shape) - 2)), (*number.shape, *f.shape[2:])
            ).astype(f.dtype)
            for f in self.files
        ]

    def go(self):
        """Goes on to the end."""
        directory = Directory(self.path, self.num_rows)
        try:
            directory.open({"name": "tale"}, self.files)
            done, found = directory.restore(LIKE) or (0, self.states[0])
            assert done >= self.saved, "what was saved is lost"
            for a, b in zip(leaves(found), leaves(self.states[done]), strict=True):
                assert np.array_equal(a, b)
            while done < self.num_rows:
                stop = min(done + self.piece, self.num_rows)
                directory.save(stop, self.states[stop], done, self.rows(done, stop))
                self.saved = done = stop
            for a, b in zip(directory.draws(), self.rows(0, self.num_rows), strict=True):
                assert a.dtype == b.dtype and np.array_equal(a, b)
        finally:
            directory.close()


LIKE = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), jax.tree.map(jnp.asarray, Tale.states[0]))


@pytest.mark.parametrize("how", ["torn", *(pytest.param(x, marks=pytest.mark.slow) for x in ("before", "after"))])
def test_death_at_every_operation_on_files_loses_nothing(how, tmp_path):
    deaths = 0
    for when in itertools.count(1):
        tale = Tale(tmp_path / str(when))
        with pytest.MonkeyPatch.context() as patch:
            Fate(patch, when, how, die)
            try:
                tale.go()
                break
            except Death:
                deaths += 1
        tale.go()
    assert deaths > 40


def test_death_after_death_loses_nothing(tmp_path):
    moments = np.random.default_rng(0)
    for number in range(8):
        tale, alive = Tale(tmp_path / str(number)), False
        while not alive:
            with pytest.MonkeyPatch.context() as patch:
                Fate(patch, moments.integers(1, 40), moments.choice(["before", "after", "torn"]), die)
                try:
                    tale.go()
                    alive = True
                except Death:
                    pass
        tale.go()


def test_torn_files_are_recognized(tmp_path):
    def damage(path, position):
        content = bytearray(path.read_bytes())
        if position is None:
            content = content[: len(content) // 2]
        else:
            content[position] ^= 1
        path.write_bytes(content)

    number = itertools.count()

    def told():
        tale = Tale(tmp_path / str(next(number)))
        tale.go()
        tale.saved = 8
        return tale

    newest = "state-0.npz"  # of three pieces
    size = (told().path / newest).stat().st_size
    positions = (None, *range(0, size, 101))
    recognized = 0
    for position in positions:
        tale = told()
        damage(tale.path / newest, position)
        try:  # Some bytes of a zip file mean nothing.
            with pytest.warns(UserWarning, match="is damaged. The run continues from iteration 8"):
                tale.go()
            recognized += 1
        except pytest.fail.Exception:
            assert position is not None
    assert recognized > len(positions) / 2
    tale = told()
    damage(tale.path / "draws" / "X_y.npy", -1)
    with pytest.warns(UserWarning, match="is damaged. The run continues from iteration 8"):
        tale.go()
    for name in ("state-0.npz", "state-1.npz"):
        damage(tale.path / name, None)
    with pytest.raises(ValueError, match="No saved state in .* is intact"):
        tale.go()
    tale = told()
    damage(tale.path / "draws" / "X_y.npy", None)
    with pytest.raises(ValueError, match=r"X_y.npy has \d+ bytes, not \d+: draws were lost"):
        tale.go()


def test_full_disk(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    tale = Tale(tmp_path / "a")
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full, raising=False)
        with pytest.raises(OSError, match="there is no room for 0.0 MiB of draws .No space left on device"):
            tale.go()
    assert not list((tmp_path / "a" / "draws").iterdir())
    for when in range(1, 60, 4):
        tale = Tale(tmp_path / str(when))
        with monkeypatch.context() as patch:
            fate = Fate(patch, 10**6, "before", None)
            write = os.write
            patch.setattr(os, "write", lambda *args: full() if fate.count > when else write(*args))  # noqa: B023
            with pytest.raises(OSError, match="No space left on device") as error:
                tale.go()
            assert error.value.errno == errno.ENOSPC
        if tale.saved:
            assert "What was saved before is intact: the same call continues from there" in str(error.value)
        assert not list(tale.path.glob("*.part"))
        tale.go()


#: A process that ends by its own kill -9, at an operation on files.
DOOMED = """
import os, signal, sys
sys.path[:0] = {folders!r}
import pytest
import test_checkpointing as here

directory, how, when, learned = sys.argv[1:]
mcmc, args, options = here.killed_run(learned == "True")
here.Fate(pytest.MonkeyPatch(), int(when), how, lambda: os.kill(os.getpid(), signal.SIGKILL))
here.run_in_pieces(mcmc, *args, **options, directory=directory)
"""


def killed_run(learned):
    """The run that is killed, and what it is called with."""
    if learned:
        mcmc = make(SGLDR(regression), num_warmup=400, num_samples=801, thinning=2)
        return mcmc, (random.key(5), *data()), {"piece_size": 50}
    return make(plain(), 100, 3001), (random.key(5),), {"init_params": SIX, "piece_size": 50}


MOMENTS = [*zip(itertools.cycle(["before", "torn", "after"]), (5, 20, 33, 47, 60, 78), strict=False)]


@pytest.mark.parametrize(
    ("learned", "fates"),
    [(False, [("torn", 95)]), *(pytest.param(x, MOMENTS, marks=pytest.mark.slow) for x in (False, True))],
)
@pytest.mark.skipif(sys.platform == "win32", reason="no kill -9")
def test_kill_minus_nine(learned, fates, tmp_path):
    script = DOOMED.format(folders=[str(folder) for folder in Path(__file__).parents[:2]])
    for how, when in fates:
        command = [sys.executable, "-W", "ignore", "-c", script, str(tmp_path), how, str(when), str(learned)]
        process = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert process.returncode == -signal.SIGKILL, process.stderr
    (parts, args, options), (whole, _, _) = killed_run(learned), killed_run(learned)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        run_in_pieces(parts, *args, **options, directory=tmp_path)
        # Not `whole.run`, whose program may round differently where nothing is optimized.
        run_in_pieces(whole, *args, **options)
    assert_same(whole, parts)
