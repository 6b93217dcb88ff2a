"""One iteration of warmup: every learner sees the stage, the state and the cloud, and updates what it learns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import jax
from jax import random

from numpyro_repulsion.adaptation.measurement import CorrectableForce
from numpyro_repulsion.adaptation.tuning import Learned, Tuning
from numpyro_repulsion.adaptation.windows import Stage
from numpyro_repulsion.dynamics import Cloud, Dynamics
from numpyro_repulsion.gradients import Anchor
from numpyro_repulsion.interactions import Interaction

__all__ = ["Learner", "Sampler", "warmup_update"]


class Sampler(Protocol):
    """What learners know of the sampler that is warmed up."""

    @property
    def learned(self) -> Learned:
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

    def force(self, tuning: Tuning) -> CorrectableForce:
        """U and ∇U in whitened coordinates."""

    def score(self, tuning: Tuning, u: jax.Array) -> jax.Array:
        """The potential energies of particles on the same rows, ``(G, L)``."""

    def evaluate_reference(self, key: jax.Array, reference: Anchor, cloud: Cloud) -> Anchor:
        """The reference with U and ∇U over all rows at its position."""


#: ``(key, stage, tuning, cloud, sampler) -> (tuning, cloud)``
Learner = Callable[[jax.Array, Stage, Tuning, Cloud, Sampler], tuple[Tuning, Cloud]]


def warmup_update(
    key: jax.Array, stage: Stage, tuning: Tuning, cloud: Cloud, sampler: Sampler, learners: tuple[Learner, ...]
) -> tuple[Tuning, Cloud]:
    """What one more iteration teaches, learner by learner, and its count.

    :param cloud: the particles, in whitened coordinates.
    :return: the tuning, and the cloud in its new coordinates.
    """
    tuning = tuning._replace(iteration=stage.done)
    for learner, own_key in zip(learners, random.split(key, len(learners)), strict=True):
        tuning, cloud = learner(own_key, stage, tuning, cloud, sampler)
    return tuning, cloud
