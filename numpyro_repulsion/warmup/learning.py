"""One iteration of warmup: each learner in turn updates the warmup state, and may move or rescale the cloud."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import jax

from numpyro_repulsion.dynamics import Cloud, Dynamics
from numpyro_repulsion.gradients import CentredTarget, Centring, Recovered, Reference
from numpyro_repulsion.interactions import Interaction
from numpyro_repulsion.shapes import Numbers, Vectors
from numpyro_repulsion.warmup.curvature import CorrectableEnergyAndGrad
from numpyro_repulsion.warmup.state import WarmupPlan, WarmupState
from numpyro_repulsion.warmup.windows import Stage

__all__ = ["Learner", "Sampler", "warmup_update"]


class Sampler(Protocol):
    """What learners may use of the sampler."""

    @property
    def plan(self) -> WarmupPlan:
        """What this warmup learns."""

    @property
    def interaction(self) -> Interaction: ...

    @property
    def dynamics(self) -> Dynamics: ...

    @property
    def num_steps(self) -> int:
        """How many updates one iteration makes."""

    @property
    def shares_minibatches(self) -> bool:
        """Whether the particles of a group share their minibatch."""

    @property
    def minibatch_size(self) -> int:
        """The number of rows in a minibatch."""

    def energy_and_grad(self, warmup: WarmupState) -> CorrectableEnergyAndGrad:
        """Return the function for U and ∇U in whitened coordinates."""

    def energy_on_common_rows(self, warmup: WarmupState, u: Vectors) -> Numbers:
        """Return the potential energies of all particles on the same rows, ``(G, L)``."""

    def energies_to_compare(self, *places: tuple[WarmupState, Cloud]) -> list[Numbers]:
        """Return by how much particles fit: energies without the prior, on the same rows for all, ``(G, L)`` each."""

    def recover(self, warmup: WarmupState, u: Vectors) -> Recovered:
        """Return the particles in the coordinates of the model."""

    def centred(self, centring: Centring) -> CentredTarget:
        """Return the posterior in coordinates of another centring."""

    def evaluate_reference(self, key: jax.Array, warmup: WarmupState, reference: Reference, cloud: Cloud) -> Reference:
        """Return the reference with U and ∇U over all rows at its position."""


#: ``(key, stage, warmup, cloud, sampler) -> (warmup, cloud)``
Learner = Callable[[jax.Array, Stage, WarmupState, Cloud, Sampler], tuple[WarmupState, Cloud]]


def warmup_update(
    keys: Sequence[jax.Array],
    stage: Stage,
    warmup: WarmupState,
    cloud: Cloud,
    sampler: Sampler,
    learners: tuple[Learner, ...],
) -> tuple[WarmupState, Cloud]:
    """Count the iteration and run every learner in order.

    :param keys: one for each learner.
    :param cloud: the particles, in whitened coordinates.
    :return: the new warmup state, and the cloud in the new coordinates.
    """
    warmup = warmup._replace(iteration=stage.done)
    for learner, own_key in zip(learners, keys, strict=True):
        warmup, cloud = learner(own_key, stage, warmup, cloud, sampler)
    return warmup, cloud
