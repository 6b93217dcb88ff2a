"""What dynamics with momenta share: how K enters, the error of a step, and the temperature of the momenta."""

from __future__ import annotations

import jax.numpy as jnp

from numpyro_repulsion.dynamics.base import Dynamics
from numpyro_repulsion.dynamics.step_error import MomentumError, UnknownError
from numpyro_repulsion.noise import normal

__all__ = ["Momenta"]


class Momenta(Dynamics):
    """Base class of dynamics with momenta: how K enters, and the error of a step."""

    friction: float

    def hamiltonian(self, cloud):
        return cloud.potential_energy + jnp.sum(cloud.memory[0] ** 2, -1) / 2

    def kinetic_temperature(self, memory):
        return jnp.mean(memory[0] ** 2)

    def turned(self, cloud):
        return cloud._replace(memory=(-cloud.memory[0], *cloud.memory[1:]))

    def _splits(self, coupling):
        """Whether an update is symmetric and so second order."""
        return coupling.is_identity

    def _kick(self, coupling, gradient):
        repulsion = coupling.repulsion
        return (repulsion if self.temperature == 1.0 else self.temperature * repulsion) - coupling.apply(gradient)

    def _white(self, key, z, coupling):
        """Return standard normal noise, balanced if the interaction balances it."""
        return normal(key, z.shape, z.dtype) if coupling.white is None else coupling.white(key)

    def step_error(self, coupling):
        if jnp.ndim(coupling.diagonal):
            # The drift by K m then distorts volumes, a first-order bias without a known bound.
            return UnknownError(
                f"With {type(self).__name__} no step can be measured for an interaction whose K_ii depends on the "
                "particles, such as Laplacian(); give `step_size`, use SGLDR, or, for your own kernel with "
                "constant k(x, x), set `diagonal_varies = False` in its class."
            )
        return MomentumError(coupling, self.friction, self._splits(coupling))
