"""Clouds and rows on several devices: the draws of one device, and what these send to each other."""

import json
import os
from pathlib import Path
import re
import subprocess
import sys

import jax
import numpy as np
from on_devices import FAULTS, GRADIENTS, QUICK, SLOW, WIDE_CASES, N
import pytest

from numpyro_repulsion.layout import Layout, check_mesh, num_devices

#: Sums in another order round differently; draws have a spread of about 0.3.
ROUNDING = 1e-4


def on_devices(part, directory):
    """Draws by case and mesh, and facts, of a process with four devices."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
    program, path = Path(__file__).with_name("on_devices.py"), directory / "found.npz"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-W", "ignore", program, part, path], env=environment, check=True)
    with np.load(path) as arrays:
        return dict(arrays) | json.loads(str(arrays["facts"]))


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    return on_devices("quick", tmp_path_factory.mktemp("quick"))


@pytest.fixture(scope="module")
def slow(tmp_path_factory):
    return on_devices("slow", tmp_path_factory.mktemp("slow"))


def differs(found, name):
    return np.abs(found[name] - found[f"{name.split('/')[0]}/one"]).max()


def check(found, name, meshes):
    moved = np.abs(np.diff(found[f"{name}/one"].reshape(8, 4, -1), axis=1)).mean()
    assert moved > 100 * ROUNDING, "equal draws would say nothing"
    for where in meshes:
        assert differs(found, f"{name}/{where}") < ROUNDING, where
        # Each device has the draws of its particles.
        assert found["sharding"][f"{name}/{where}"] == ("P()" if where == "rows" else "P('particles',)")


@pytest.mark.parametrize("name", QUICK)
def test_draws_are_those_of_one_device(quick, name):
    check(quick, name, QUICK[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_draws_of_other_runs_are_those_of_one_device(slow, name):
    check(slow, name, SLOW[name])


def test_gradients_are_those_of_one_device_and_faults_show(quick):
    def off(name, where):
        one = quick[f"gradient {name}/None"]
        return (np.abs(quick[f"gradient {name}/{where}"] - one) / np.abs(one).max(0)).max()

    assert all(off(name, where) < ROUNDING for name in GRADIENTS for where in ("both", "rows"))
    assert all(not off("SGHMC", name) < 30 * ROUNDING for name in FAULTS)


def test_results_inside_of_a_mesh(quick):
    """Which the program made without an error."""
    found, last, words = quick["last row"]
    assert found == last and "no row 803" in words


@pytest.mark.slow
@pytest.mark.parametrize("name", WIDE_CASES)
def test_parameters_over_devices(slow, name):
    """The cloud is sent twice for each gradient, a quarter of it by each device; otherwise three times, whole."""
    assert differs(slow, f"wide {name}/particles") < ROUNDING
    cloud = 4 * 8 * 1200
    assert slow["bytes"][f"wide {name}"] < 0.6 * cloud
    assert slow["bytes"][f"wide {name} by particles"] > 2 * cloud


def test_what_devices_send(quick):
    sent = quick["bytes"]
    assert sent["groups"] == 0
    # The mean of balanced noise; and the gradients of all particles with their energies.
    assert sent["SGLD"] <= 4 * 6 + 16
    assert sent["SGLD, rows"] <= 4 * 8 * (6 + 1) + 16


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("explicit axes", r"explicit axes.*jax.make_mesh\(\(4,\), \('particles',\), axis_types=.*Auto"),
        ("other axes", r"axes 'particles' and 'rows'; got \('x',\)"),
        ("odd number of particles", "6 particles cannot be shared equally by 4 devices"),
        ("odd number of particles in groups", "12 particles in 2 ensembles cannot"),
        ("odd minibatch", "42 rows in a minibatch of the plate 'rows'.*subsample_size=40"),
        ("odd number of blocks", "40 rows.*multiple of 80"),
        ("odd number of rows", f"{N} rows"),
        ("crossed plates", "A site uses rows of all the plates.*'a', 'b'"),
        ("rows outside of the plate", "outside of it"),
        ("integers of 64 bits", "(has the value 10995.*){2}"),
        ("rows on a device", r"Rows\(numpy.asarray"),
    ],
)
def test_what_devices_cannot_share_is_refused(quick, case, words):
    assert re.search(words, quick["refused"][case], re.DOTALL), quick["refused"][case]


def test_without_a_mesh_nothing_is_placed():
    assert num_devices("particles") == 1
    assert Layout.of((1, 4, 2000), interacts=True) == Layout(None)
    cloud = np.ones((1, 4, 2000))
    assert Layout(None).place(cloud) is cloud and Layout(None).place_particles(cloud) is cloud


def test_the_mesh_of_a_pmap_is_none_of_the_users():
    """NumPyro's chain_method="parallel" makes one, with an axis of its own name."""

    def mesh(kind):
        return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((2,), ("own",), axis_types=(kind,)))

    with mesh(jax.sharding.AxisType.Manual):
        check_mesh(num_particles=1, num_groups=1)
    with mesh(jax.sharding.AxisType.Auto), pytest.raises(ValueError, match="may have the axes 'particles' and 'rows'"):
        check_mesh(num_particles=1, num_groups=1)
