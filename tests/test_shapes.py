"""Arrays have the shapes that annotations name, in all rooms that a run enters; see `check_shapes.py`."""

import os
from pathlib import Path
import subprocess
import sys

import numpyro_repulsion

TESTS = Path(__file__).parent


def test_shapes_are_those_of_the_annotations():
    flag = "--jaxtyping-packages=numpyro_repulsion,beartype.beartype"
    command = [sys.executable, "-m", "pytest", "--noconftest", "-q", flag, str(TESTS / "check_shapes.py")]
    paths = os.pathsep.join((str(Path(numpyro_repulsion.__file__).parents[1]), str(TESTS)))
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": paths})
    assert done.returncode == 0, done.stdout[-5000:]
