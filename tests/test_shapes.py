"""What flows between rooms has the shapes that annotations name, and a part with others is seen.

The checks must be there before the package is imported, so they run in a process of their own: `shape_runs.py`.
"""

import json
import os
from pathlib import Path
import re
import subprocess
import sys

import pytest
from shape_runs import WRONG

import numpyro_repulsion

TESTS = Path(__file__).parent
PACKAGE = "numpyro_repulsion"

#: One function of each room, and the helpers of the learners.
ROOMS = [
    "interactions.base.Gram.gram",
    "interactions.base.Gram.learn_bandwidth",
    "interactions.linear_cost.RandomGroups.couple",
    "interactions.scheduled.Scheduled.couple",
    "interactions.balanced.Balanced.couple",
    "dynamics.overdamped.Overdamped.init",
    "dynamics.overdamped.Overdamped.step",
    "dynamics.underdamped.Underdamped.step",
    "dynamics.thermostat.Thermostat.step",
    "dynamics.recipe.Recipe.step",
    "dynamics.descent.Descent.step",
    "dynamics.base.reject_nonfinite",
    "dynamics.base.turn_back",
    "dynamics.step_error.EulerError.max_step_for_bias",
    "gradients.minibatch.Gradient.energy_and_grad",
    "gradients.minibatch.Subsampled.rows",
    "gradients.sweeps._Update.rows",
    "gradients.control.ControlVariates.energy_and_grad",
    "gradients.control.evaluate_reference",
    "gradients.posterior.ModelTarget.potential_energy",
    "gradients.centering.CenteredTarget.to_coordinates",
    "warmup.arrival.update_arrival",
    "warmup.arrival.arrive",
    "warmup.adam.descend",
    "warmup.adam.Surroundings.add",
    "warmup.centering.update_centering",
    "warmup.step_size.update_reference",
    "warmup.scales.update_scales",
    "warmup.preconditioner.Moments.to_preconditioner",
    "warmup.preconditioner.Preconditioner.whiten",
    "warmup.hessian.hessian_and_noise",
    "warmup.hessian.extremes",
    "warmup.hessian.mean_diagonal",
    "warmup.hessian.shrink_noisy_directions",
    "warmup.bandwidth.update_bandwidth",
    "warmup.bandwidth.gains",
    "warmup.step_size.update_step_size",
    "warmup.curvature.estimate_curvature",
    "warmup.diagnosis.update_symptoms",
    "warmup.diagnosis.diagnose_warmup",
    "warmup.windows.Stage.of",
    "warmup.state.WarmupState.start",
    "moves.archive.Archive.propose",
    "moves.base.Move.jump",
    "kernels.iteration.clip",
    "kernels.iteration.clip_coordinates",
    "kernels.warming.WarmupIteration.energy_on_common_rows",
]


def python(*arguments):
    """Run a program with the package of this checkout, and return what it prints."""
    paths = os.pathsep.join((str(Path(numpyro_repulsion.__file__).parents[1]), str(TESTS)))
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": paths}
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return done.stdout


@pytest.fixture(scope="module")
def found():
    """What the checks saw; the process fails if any part or run has other shapes than its annotations say."""
    return json.loads(python(str(TESTS / "shape_runs.py")))


def test_shapes_are_those_of_the_annotations(found):
    assert {f"{PACKAGE}.{name}" for name in ROOMS} - set(found["checked"]) == set()


@pytest.mark.parametrize("name", WRONG)
def test_a_part_with_a_wrong_shape_is_seen(found, name):
    assert re.search(r"(Float|Bool)\[", found["raised"][name])
    # Without checks it runs: nothing else would tell.
    WRONG[name]()


def test_the_package_needs_no_jaxtyping():
    program = (
        "import sys; sys.modules['jaxtyping'] = None; import jax; from numpyro_repulsion import shapes; "
        "print({getattr(shapes, name) for name in shapes.__all__} == {jax.Array, jax.Array | float})"
    )
    assert python("-c", program) == "True\n"
