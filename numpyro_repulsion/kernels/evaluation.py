"""The posterior in the coordinates in which the sampler moves, as the learners of warmup see it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from numpyro_repulsion.dynamics import Cloud, Dynamics
from numpyro_repulsion.gradients import (
    CentredTarget,
    Centring,
    ModelTarget,
    Recovered,
    Reference,
    Target,
    evaluate_reference,
    fingerprint,
    likelihood_energies,
    rows_to_compare,
)
from numpyro_repulsion.interactions import Interaction
from numpyro_repulsion.kernels.bound import BoundSampler
from numpyro_repulsion.layout import Layout
from numpyro_repulsion.shapes import Count, Numbers, Vectors
from numpyro_repulsion.warmup import WarmupPlan, WarmupState

__all__ = ["Evaluation"]


@dataclass(frozen=True, eq=False)
class Evaluation:
    """A bound sampler that evaluates the posterior for a cloud ``(G, L, d)`` in whitened coordinates.

    - **bound** - the kernel and the posterior.
    - **plan** - what its warmup learns.
    - **unravel** - the function from flat positions to those of the sites.
    - **row_seed** - the seed of the orders of rows, for gradients that depend on the number of the update.
    - **data** - the identity of the posterior; ``None`` without references, and where the data have no values.
    """

    bound: BoundSampler
    plan: WarmupPlan
    unravel: Callable
    row_seed: Count
    data: np.ndarray | None

    @property
    def dynamics(self) -> Dynamics:
        return self.bound.kernel.dynamics

    @property
    def interaction(self) -> Interaction:
        return self.bound.kernel.interaction

    @property
    def num_steps(self) -> int:
        return self.bound.kernel.num_steps

    @property
    def shares_minibatches(self) -> bool:
        return self.bound.gradient.shared

    @property
    def minibatch_size(self) -> int:
        """The number of rows in a minibatch, of the plate with the fewest."""
        return min((batch for _, batch in self.bound.target.plates.values()), default=1)

    def target(self, warmup: WarmupState) -> Target:
        """Return the posterior in the coordinates that the preconditioner whitens."""
        centring, target = warmup.scales.centring, self.bound.target
        return target if centring is None else self.centred(centring)

    def layout(self, u: Vectors) -> Layout:
        """Return how a cloud lies on the devices."""
        shape = u.shape[0], u.shape[1], u.shape[2]
        return Layout.of(shape, self.interaction.interacts or self.dynamics.interacts)

    def recover(self, warmup: WarmupState, u: Vectors) -> Recovered:
        """Return the particles ``(..., d)`` in the coordinates of the model."""
        y = warmup.scales.preconditioner.to_positions(u)
        target = self.target(warmup)
        if not isinstance(target, CentredTarget):
            return Recovered.of(y, jnp.zeros_like(y), jnp.ones_like(y), jnp.zeros_like(y))
        return jax.tree.map(lambda x: x.reshape(y.shape), jax.vmap(target.recover)(y.reshape(-1, y.shape[-1])))

    def centred(self, centring: Centring) -> CentredTarget:
        """Return the posterior in coordinates of another centring."""
        # Only models have sites that can be centred.
        return CentredTarget(cast(ModelTarget, self.bound.target), centring, self.unravel)

    def energy_and_grad(self, warmup: WarmupState, num_updates: Count | None = None) -> Callable:
        """Return ``(key, u) -> (U, ∇U)``; an optional third argument says whether to use control variates.

        :param num_updates: how many updates were done before; ``None`` for rows that no update depends on.
        """
        gradient, target = self.bound.gradient, self.target(warmup)
        if num_updates is not None:
            gradient = gradient.at(num_updates, self.row_seed)
        change, reference = warmup.scales.preconditioner, warmup.reference
        if reference is not None:
            reference = reference._replace(in_use=reference.in_use & ~reference.is_stale)

        def energy_and_grad(key, u, corrected=None):
            used = reference if reference is None or corrected is None else reference._replace(in_use=corrected)
            layout = self.layout(u)
            z = layout.place_particles(change.to_positions(u))
            found = layout.place_particles(gradient.energy_and_grad(key, target, self.unravel, z, used))
            energy, slope = layout.place(found)
            return energy, change.whiten_gradient(slope)

        return energy_and_grad

    def energy_on_common_rows(self, warmup: WarmupState, u: Vectors) -> Numbers:
        """Return U at all particles on the same rows, with the same randomness, ``(G, L)``."""
        target = self.target(warmup)
        one = jnp.vectorize(lambda z: fingerprint(target, self.unravel, z), signature="(d)->()")
        return one(warmup.scales.preconditioner.to_positions(u))

    def energies_to_compare(self, *places: tuple[WarmupState, Cloud]) -> list[Numbers]:
        """Return energies of the likelihood alone, on the same rows for all; or U, where all rows are used."""
        if not self.bound.target.plates:
            return [cloud.potential_energy for _, cloud in places]
        rows = rows_to_compare(self.bound.target)

        def energies(place):
            centring, z = place
            target = self.bound.target if centring is None else self.centred(centring)
            particles = jax.vmap(self.unravel)(z.reshape(-1, z.shape[-1]))
            return likelihood_energies(target, particles, rows).reshape(z.shape[:-1]).astype(z.dtype)

        own = [(state.scales.centring, state.scales.preconditioner.to_positions(cloud.z)) for state, cloud in places]
        # A loop, so that the model is compiled once.
        return list(lax.map(energies, jax.tree.map(lambda *x: jnp.stack(x), *own)))

    def evaluate_reference(self, key: jax.Array, warmup: WarmupState, reference: Reference, cloud: Cloud) -> Reference:
        """Return the reference with U and ∇U over all rows at its position."""
        new = evaluate_reference(key, self.target(warmup), self.unravel, reference, cloud.potential_energy.size)
        if self.data is not None:
            return new._replace(data=jnp.asarray(self.data, jnp.uint32))
        # What the host said last. Any words say that there is a reference.
        first = 1 if warmup.data is None else jnp.maximum(warmup.data, 1)
        return new._replace(data=jnp.asarray(jnp.where(reference.data.any(), reference.data, first), jnp.uint32))
