"""Runs of several processes: the draws of one, what they must agree on, and what happens when one of them ends."""

from contextlib import ExitStack
import json
import os
from pathlib import Path
import re
import shutil
import signal
import socket
import subprocess
import sys
from uuid import uuid4

import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_repulsion.processes import agree, broadcast, by_the_first, here, is_spread, must_stop

#: Sums in another order round differently; draws have a spread of about 0.3.
ROUNDING = 1e-4
PROGRAM = Path(__file__).with_name("on_processes.py")


def started(part, directory, processes=2, program=PROGRAM):
    """The processes of a run, which have four devices together, and the files of what they say.

    No pipes: one that nobody reads yet fills up, and its process waits for the reader, and the others for it.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={4 // processes}"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    found = []
    for number in range(processes):
        command = [sys.executable, "-W", "ignore", program, part, directory, str(number), str(processes), str(port)]
        said = directory / f"said-{uuid4().hex}"
        with said.open("w") as file:
            found.append((subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT), said))
    return found


def found_by(part, directory, processes=2):
    """What each process found, as arrays and facts."""
    with ExitStack() as stack:
        running = started(part, directory, processes)
        for process, _ in running:
            stack.enter_context(process)
            stack.callback(process.kill)  # If another one fails, they would wait for it.
        for process, said in running:
            assert process.wait(timeout=600) == 0, said.read_text()
    found = []
    for number in range(processes):
        with np.load(directory / f"{part}-{processes}-{number}.npz") as arrays:
            found.append(dict(arrays) | json.loads(str(arrays["facts"])))
    return found


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    directory = tmp_path_factory.mktemp("quick")
    return found_by("quick", directory), *found_by("quick", directory, processes=1)


@pytest.fixture(scope="module")
def slow(tmp_path_factory):
    directory = tmp_path_factory.mktemp("slow")
    return found_by("slow", directory), *found_by("slow", directory, processes=1)


def check(found, name):
    both, one = found
    assert np.abs(np.diff(one[name], axis=0)).mean() > 100 * ROUNDING, "equal draws would say nothing"
    np.testing.assert_array_equal(both[0][name], both[1][name])
    assert np.abs(both[0][name] - one[name]).max() < ROUNDING


@pytest.mark.parametrize("name", ["particles", "rows of a file", "rows of an array"])
def test_draws_are_those_of_one_process(quick, name):
    check(quick, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["warmup", "plain array", "whole"])
def test_draws_of_other_runs_are_those_of_one_process(slow, name):
    check(slow, name)


@pytest.mark.slow
def test_all_processes_read_results_of_data_in_parts(slow):
    both, one = slow
    assert both[0]["together"] == both[1]["together"] == one["together"] == 2 * [f"beta[{k}]" for k in range(6)]


def test_one_process_reads_the_results_alone(quick):
    both, one = quick
    assert both[0]["alone"] == one["alone"] and "alone" not in both[1]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("other data", r"On process 1, the model's args\[0\] differs.*make_array_from_process_local_data"),
        ("another step", "On process 1, step_size differs"),
        ("no mesh", r"2 processes here.*jax.set_mesh\(jax.make_mesh\(\(4,\)"),
        ("missing numbers", r"1 in the model's args\[0\]"),
        ("more samples", "On process 1, num_samples differs"),
        ("a bar in one process", "On process 1, progress_bar differs"),
        ("more arguments", "On process 1, the kernel or the names of the arguments differ"),
        ("alone with parts", "divided among several processes. Call this in all processes, inside"),
        ("odd number of rows", "798 rows of an array cannot be shared equally by 4 devices"),
    ],
)
def test_wrong_uses_are_refused_in_all_processes(quick, case, words):
    both, _ = quick
    assert re.search(words, both[0]["refused"][case], re.DOTALL), both[0]["refused"][case]
    assert both[0]["refused"][case] == both[1]["refused"][case]


@pytest.mark.slow
def test_a_killed_run_goes_on_bit_for_bit(slow, tmp_path):
    (first, _), (second, _) = started("killed", tmp_path)
    assert second.wait(timeout=600) == -signal.SIGKILL
    first.kill()  # JAX ends it by itself, but in a minute or two.
    first.wait()
    shutil.copytree(tmp_path, tmp_path / "other")
    for found in found_by("after killed", tmp_path):
        np.testing.assert_array_equal(found["resumed"], slow[0][0]["whole"])
    # By one process the run goes on too, and rounds differently.
    (found,) = found_by("after killed", tmp_path / "other", processes=1)
    assert np.abs(found["resumed"] - slow[0][0]["whole"]).max() < ROUNDING


@pytest.mark.slow
def test_a_stopped_run_saves_and_leaves_and_goes_on_bit_for_bit(slow, tmp_path):
    for process, said in started("stopped", tmp_path):
        assert process.wait(timeout=600) == 1
        words = r"A signal stopped the run after \d+ of 64 iterations. The same call continues"
        assert re.search(words, said.read_text())
    for found in found_by("after stopped", tmp_path):
        np.testing.assert_array_equal(found["resumed"], slow[0][0]["whole"])


@pytest.mark.slow
def test_the_script_of_the_page_runs(tmp_path):
    page = (PROGRAM.parents[1] / "docs" / "several-processes.md").read_text()
    script = re.search(r"```python\n(.*?)```", page, re.DOTALL)[1]
    for was, now in {
        "import jax\n": 'import sys, jax\njax.config.update("jax_cpu_collectives_implementation", "gloo")\n',
        "initialize()": 'initialize(f"127.0.0.1:{sys.argv[5]}", num_processes=2, process_id=int(sys.argv[3]))',
        "/shared/run": str(tmp_path / "run"),
        '"num_warmup": 1000, "num_samples": 1000': '"num_warmup": 50, "num_samples": 50',
        '"x.npy"': repr(str(tmp_path / "x.npy")),
        '"y.npy"': repr(str(tmp_path / "y.npy")),
    }.items():
        assert was in script, was
        script = script.replace(was, now, 1)
    x = np.random.default_rng(0).standard_normal((2000, 3))
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", (x[:, 0] > 0).astype(int))
    (tmp_path / "fit.py").write_text(script)
    found = []
    for process, said in started("", tmp_path, program=tmp_path / "fit.py"):
        process.wait(timeout=600)
        found.append(said.read_text())
    assert "beta[2]" in found[0] and "beta[2]" not in found[1], found


def test_one_process_agrees_with_itself():
    agree({"a value": "1"})
    assert broadcast(b"bytes") == b"bytes" and by_the_first(lambda: 3) == 3 and not must_stop(0)
    tree = {"x": jnp.ones(2)}
    assert here(tree)["x"] is tree["x"] and not is_spread(tree["x"]) and not is_spread(2.0)
