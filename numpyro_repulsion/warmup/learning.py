"""One iteration of warmup: every learner sees the stage, the state and the cloud, and updates what it learns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import jax

from numpyro_repulsion.dynamics import Cloud, Dynamics
from numpyro_repulsion.gradients import Reference
from numpyro_repulsion.interactions import Interaction
from numpyro_repulsion.warmup.curvature import CorrectableEnergyAndGrad
from numpyro_repulsion.warmup.state import WarmupPlan, WarmupState
from numpyro_repulsion.warmup.windows import Stage

__all__ = ["Learner", "Sampler", "warmup_update"]


class Sampler(Protocol):
    """What learners know of the sampler that is warmed up."""

    @property
    def plan(self) -> WarmupPlan:
        """What there is to learn."""

    @property
    def interaction(self) -> Interaction: ...

    @property
    def dynamics(self) -> Dynamics: ...

    @property
    def num_steps(self) -> int:
        """Updates in an iteration."""

    @property
    def shares_minibatches(self) -> bool:
        """Whether the particles of a group share their minibatch."""

    def energy_and_grad(self, warmup: WarmupState) -> CorrectableEnergyAndGrad:
        """U and ∇U in whitened coordinates."""

    def energy_on_common_rows(self, warmup: WarmupState, u: jax.Array) -> jax.Array:
        """The potential energies of particles on the same rows, ``(G, L)``."""

    def evaluate_reference(self, key: jax.Array, reference: Reference, cloud: Cloud) -> Reference:
        """The reference with U and ∇U over all rows at its position."""


#: ``(key, stage, warmup, cloud, sampler) -> (warmup, cloud)``
Learner = Callable[[jax.Array, Stage, WarmupState, Cloud, Sampler], tuple[WarmupState, Cloud]]


def warmup_update(
    keys: jax.Array, stage: Stage, warmup: WarmupState, cloud: Cloud, sampler: Sampler, learners: tuple[Learner, ...]
) -> tuple[WarmupState, Cloud]:
    """What one more iteration teaches, learner by learner, and its count.

    :param keys: one for each learner.
    :param cloud: the particles, in whitened coordinates.
    :return: what was learned, and the cloud in its new coordinates.
    """
    warmup = warmup._replace(iteration=stage.done)
    for learner, own_key in zip(learners, keys, strict=True):
        warmup, cloud = learner(own_key, stage, warmup, cloud, sampler)
    return warmup, cloud
