"""How a cloud of particles lies on the devices of a mesh."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import jax
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from numpyro_repulsion.processes import are_several

#: The axes of a mesh over which particles and rows of data lie.
PARTICLES, ROWS = "particles", "rows"
#: With fewer parameters, the matrix of an interaction takes as much communication as they do.
MIN_PARAMETERS = 1000

#: A pytree of arrays.
Tree = TypeVar("Tree")


def check_mesh(num_particles: int, num_groups: int) -> None:
    """Raise ``ValueError`` if particles in groups cannot lie on the devices of the mesh of ``jax.set_mesh``, or if it
    does not have the devices of all processes."""
    mesh = jax.sharding.get_abstract_mesh()
    if are_several() and mesh.size < jax.device_count():
        raise ValueError(
            f"JAX has {jax.process_count()} processes here, and each of them would make the same run by itself. Share "
            f'the run by `with jax.set_mesh(jax.make_mesh(({jax.device_count()},), ("{PARTICLES}",), '
            "axis_types=(jax.sharding.AxisType.Auto,))):` around it, or start the processes without "
            "jax.distributed.initialize(), each with a key of its own."
        )
    # Inside of a pmap, as that of ``chain_method="parallel"``, each device makes a run of its own.
    if mesh.empty or mesh.size == 1 or set(mesh.axis_types) == {AxisType.Manual}:
        return
    names = mesh.axis_names
    auto = f"axis_types=(jax.sharding.AxisType.Auto,) * {len(names)}"
    if not set(names) <= {PARTICLES, ROWS}:
        raise ValueError(
            f"A mesh may have the axes '{PARTICLES}' and '{ROWS}'; got {names}. Write "
            f'jax.make_mesh(({mesh.size},), ("{PARTICLES}",), axis_types=(jax.sharding.AxisType.Auto,)).'
        )
    if set(mesh.axis_types) != {AxisType.Auto}:
        raise ValueError(
            "The mesh has explicit axes, the default of jax.make_mesh, which NumPyro's loops do not support. Write "
            f"jax.make_mesh({mesh.axis_sizes}, {names}, {auto})."
        )
    count = num_devices(PARTICLES)
    if num_groups % count and (num_particles // num_groups) % count:
        groups = f" in {num_groups} ensembles" if num_groups > 1 else ""
        raise ValueError(
            f"{num_particles} particles{groups} cannot be shared equally by {count} devices. Use a multiple of "
            f"{count} as the number of chains{', in each ensemble, or as the number of ensembles' if groups else ''}."
        )


def place_particles(tree: Tree) -> Tree:
    """Put arrays ``(L, ...)`` on the devices of the mesh, each with its particles."""
    return tree if num_devices(PARTICLES) == 1 else _placed(tree, PartitionSpec(PARTICLES))


def place_everywhere(tree: Tree) -> Tree:
    """Put whole arrays on all devices if these belong to several processes, so that each process can read them."""
    return _placed(tree, PartitionSpec()) if are_several() else tree


@dataclass(frozen=True)
class Layout:
    """The part of a cloud ``(G, L, d)`` that each of the devices of the mesh has."""

    #: Where each device has whole particles: the groups, the particles of each group, or, without a mesh, all of them.
    particles: PartitionSpec | None
    #: Whether each device has a part of the parameters of all particles, except for gradients. With K at hand, all else
    #: in an update of particles that interact is then done in place, or all devices would need the cloud three times.
    parameters: bool = False

    @staticmethod
    def of(shape: tuple[int, ...], interacts: bool) -> Layout:
        """Return the layout of a cloud ``(G, L, d)``, in which particles may need each other, on the mesh of JAX."""
        count = num_devices(PARTICLES)
        if count == 1:
            return Layout(None)
        if shape[0] % count == 0:
            return Layout(PartitionSpec(PARTICLES))
        is_large = shape[2] >= MIN_PARAMETERS and shape[2] % count == 0
        return Layout(PartitionSpec(None, PARTICLES), interacts and is_large)

    def place(self, tree: Tree) -> Tree:
        """Put arrays ``(G, L)`` and ``(G, L, d)`` on the devices, as the cloud lies between gradients."""
        if not self.parameters:
            return self.place_particles(tree)
        return jax.tree.map(lambda x: _placed(x, PartitionSpec(*(None, None, PARTICLES)[: x.ndim])), tree)

    def place_particles(self, tree: Tree) -> Tree:
        """Put such arrays on the devices by whole particles, as the cloud lies for gradients."""
        return tree if self.particles is None else _placed(tree, self.particles)


def num_devices(axis: str) -> int:
    """Return over how many devices an axis of the mesh of ``jax.set_mesh`` extends; 1 without a mesh."""
    return dict(jax.sharding.get_abstract_mesh().shape).get(axis, 1)


def _placed(tree, spec):
    return jax.tree.map(lambda x: lax.with_sharding_constraint(x, spec), tree)
