"""The catalogue has every public part in it, and says of each what is so."""

import importlib
import inspect

from catalogue import DYNAMICS, GRADIENTS, INTERACTIONS, PRESETS, SCHEDULES, TABLES, having
import jax
from jax import random
import jax.numpy as jnp
import pytest

import numpyro_repulsion
from numpyro_repulsion import RBF, Independent, Rows, all_rows, minibatch
from numpyro_repulsion.bias import ExtrapolatedMeans, StepBias
from numpyro_repulsion.diagnostics import ControlledMeans
from numpyro_repulsion.dynamics import Dynamics
from numpyro_repulsion.findings import Diagnosis, Finding
from numpyro_repulsion.gradients import Gradient
from numpyro_repulsion.interactions import Gram, Interaction, Radial
from numpyro_repulsion.kernels import ParticleKernel
from numpyro_repulsion.moves import Basins, Move
from numpyro_repulsion.predictions import Predictions

#: Bases, which users write subclasses of; jumps that switch themselves on; what functions return; handlers.
NO_PARTS = {Dynamics, Gradient, Gram, Interaction, Move, ParticleKernel, Radial}
NO_PARTS |= {Basins, ControlledMeans, Diagnosis, ExtrapolatedMeans, Finding, Predictions, Rows, StepBias}
NO_PARTS |= {all_rows, minibatch}


def subclasses(base):
    """All public ones that the package has, by any name."""
    for kind in base.__subclasses__():
        if kind.__module__.startswith("numpyro_repulsion.") and not kind.__name__.startswith("_"):
            yield kind
        yield from subclasses(kind)


def public():
    """Every class that is a part: what the package offers, and subclasses of its bases that it offers elsewhere."""
    offered = {getattr(numpyro_repulsion, name) for name in numpyro_repulsion.__all__}
    for room, names in (numpyro_repulsion._NOW_IN | {"contrib": ""}).items():
        offered |= {getattr(importlib.import_module(f"numpyro_repulsion.{room}"), name) for name in names.split()}
    found = {kind for base in (Interaction, Dynamics, Gradient, Move, ParticleKernel) for kind in subclasses(base)}
    # Bases that only share code are in no `__all__` of a folder.
    folders = [value for value in vars(numpyro_repulsion).values() if inspect.ismodule(value)]
    named = {
        getattr(folder, name) for folder in folders for name in getattr(folder, "__all__", ()) if not name.isupper()
    }
    return {kind for kind in offered | (found & named) if inspect.isclass(kind)} - NO_PARTS


def kinds(part):
    """The class of a part, and of the parts it is made of."""
    if inspect.isclass(part):
        return {part}
    inner = vars(part).values() if hasattr(part, "__dict__") else ()
    flat = [x for value in inner for x in (value if isinstance(value, tuple) else (value,))]
    flat += [x for value in flat if isinstance(value, tuple) for x in value]
    return {type(part)}.union(*(kinds(x) for x in flat if type(x).__module__.startswith("numpyro_repulsion")))


def lacking(tables):
    seen = set().union(*(kinds(found.part) for table in tables.values() for found in table.values()))
    return {kind.__name__ for kind in public() if kind not in seen}


def test_every_public_part_is_in_the_catalogue():
    assert not lacking(TABLES), "add them to tests/catalogue.py, so that every battery has them"


@pytest.mark.parametrize(
    ("table", "names"),
    [
        ("INTERACTIONS", {"IMQ"}),
        ("DYNAMICS", {"Relativistic"}),
        ("GRADIENTS", {"SVRG"}),
        ("SCHEDULES", {"Cyclical"}),
        ("MOVES", {"Archive"}),
        ("PRESETS", {"SGNHTR"}),
    ],
)
def test_what_is_left_out_is_noticed(table, names):
    def has(found):
        return names & {kind.__name__ for kind in kinds(found.part)}

    left = {name: found for name, found in TABLES[table].items() if not has(found)}
    assert 0 < len(left) < len(TABLES[table]) or table == "MOVES"
    assert names <= lacking(TABLES | {table: left})


def test_flags_of_dynamics_gradients_and_presets_are_right():
    assert {name for name, found in DYNAMICS.items() if found.part.is_sampler} == set(having(DYNAMICS, "sampler"))
    for name, gradient in having(GRADIENTS, "rows").items():
        assert gradient.shared == ("shared" in GRADIENTS[name].flags)
        assert gradient.has_reference == ("reference" in GRADIENTS[name].flags)
    for name, found in PRESETS.items():
        assert found.part.__name__ == name
        assert found.part._default_interaction.interacts == ("repels" in found.flags)
    assert all(callable(schedule) for schedule in having(SCHEDULES, "falls").values())


@pytest.mark.parametrize("name", DYNAMICS)
def test_what_dynamics_carry(name):
    """Beside where particles are, where K is not the identity."""
    interaction = Independent() if "alone" in DYNAMICS[name].flags else RBF(1.0)

    def start(z):
        return DYNAMICS[name].part.init(random.key(0), z, lambda z: (jnp.sum(z**2, -1), 2 * z), interaction.couple)

    cloud = jax.eval_shape(start, jnp.ones((6, 2)))
    assert bool(cloud.memory) == ("memory" in DYNAMICS[name].flags)


def test_names_of_flags_are_known():
    known = {
        "INTERACTIONS": "interacts learns identity pairs redrawn many ensembles user law setting",
        "DYNAMICS": "sampler memory alone optimizer",
        "GRADIENTS": "rows shared reference own sweeps",
        "SCHEDULES": "measured cycle falls",
        "MOVES": "",
        "PRESETS": "repels momenta sampler",
    }
    for name, table in TABLES.items():
        assert set().union(*(found.flags for found in table.values())) == set(known[name].split()), name
    assert all(found.part is not None for found in INTERACTIONS.values())
