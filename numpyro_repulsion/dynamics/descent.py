"""Descent of a cloud with the steps of an optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from numpyro_repulsion.dynamics.base import Cloud, Dynamics
from numpyro_repulsion.dynamics.step_error import UnknownError


@dataclass(frozen=True)
class Descent(Dynamics):
    r"""SVGD with the steps of an optax optimizer. Not a sampler.

    .. math::
        Z \leftarrow Z - \epsilon\, R(K \nabla U(Z) - \Gamma)

    R is a gradient transformation *without* a learning rate: ``optax.scale_by_rss()`` for Adagrad,
    ``optax.scale_by_adam()`` for Adam. ``step_size``, a number or a schedule, is the learning rate. There is no noise
    (``D = 0``) and no stationary distribution. The fixed points are clouds with :math:`K \nabla U = \Gamma`, as for
    plain :class:`~numpyro_repulsion.SVGD`. With ``interaction=Independent()`` each particle is optimized alone: an
    ensemble of modes.

    Without a ``step_size`` the rate is 0.05: by Adagrad or Adam an update moves each coordinate by about that much, at
    first, in the units of the model. For a network compare a few rates, a factor of three apart, on held-out rows.

    If parameters differ in scale, as in networks, this needs far fewer updates than plain steps. With minibatches,
    average directions too: ``optax.chain(optax.scale_by_rss(0.0), optax.ema(0.9, debias=False))`` takes the steps of
    NumPyro's Adagrad. Every particle has separate accumulators, which an update that is rejected does not change.

    On a few hundred rows a network that descends for long becomes certain of these rows, or useless.

    :param optimizer: an object with the optax interface: ``init(params)`` and ``update(gradient, state, params)`` for
        one particle ``(d,)``.
    :raises TypeError: for anything else, such as an optax function that was not called.
    :raises ValueError: for an optimizer with a learning rate, such as ``optax.adam(0.1)``, whose updates point down
        the gradient and not up.

    **References:**

    1. *Stein Variational Gradient Descent: A General Purpose Bayesian Inference Algorithm*, Q. Liu and D. Wang,
       https://arxiv.org/abs/1608.04471
    2. *Adaptive Subgradient Methods for Online Learning and Stochastic Optimization*, J. Duchi, E. Hazan and Y. Singer,
       Journal of Machine Learning Research 12, 2011

    **Example**

    .. doctest::

        >>> import optax
        >>> from numpyro_repulsion import SVGD
        >>> from numpyro_repulsion.dynamics import Descent
        >>> kernel = SVGD(potential_fn=lambda z: z**2 / 2, dynamics=Descent(optax.scale_by_rss()))
    """

    optimizer: Any

    default_step = 0.05
    is_sampler = False

    def __post_init__(self):
        if not all(callable(getattr(self.optimizer, name, None)) for name in ("init", "update")):
            raise TypeError(
                "Descent: `optimizer` must be a gradient transformation with `init` and `update`, such as "
                f"optax.scale_by_adam(); got {self.optimizer!r}."
            )
        params, up = np.zeros(1, np.float32), np.ones(1, np.float32)
        with jax.ensure_compile_time_eval():
            first, _ = self.optimizer.update(up, self.optimizer.init(params), params)
        if not first[0] > 0.0:
            raise ValueError(
                "Descent: `optimizer` must point up the gradient, as transformations without a learning rate do, such "
                f"as optax.scale_by_adam() or optax.scale_by_rss(); for a gradient of 1 it gave {float(first[0]):.3g}. "
                "`step_size` is the learning rate."
            )

    def step_error(self, coupling):
        return UnknownError(
            "A bias budget does not apply to an optimizer: give a learning rate, such as step_size=0.01, or omit "
            "`step_size`."
        )

    def init(self, key, z, energy_and_grad, couple):
        memory = [x.reshape(*z.shape[:-1], -1) for x in jax.tree.leaves(_each(self.optimizer.init, z)(z))]
        energy, gradient = energy_and_grad(z)
        return Cloud(z, energy, gradient, tuple(memory))

    def step(self, key, cloud, energy_and_grad, couple, step_size):
        z, coupling = cloud.z, couple(cloud.z)
        slope = coupling.apply(cloud.gradient) - coupling.repulsion
        leaves, structure = jax.tree.flatten(jax.eval_shape(_each(self.optimizer.init, z), z))
        own = [x.reshape(like.shape) for x, like in zip(cloud.memory, leaves, strict=True)]
        state = jax.tree.unflatten(structure, own)
        direction, state = _each(self.optimizer.update, z)(slope, state, z)
        memory = (x.reshape(old.shape) for x, old in zip(jax.tree.leaves(state), cloud.memory, strict=True))
        z = z - step_size * direction
        energy, gradient = energy_and_grad(z)
        return Cloud(z, energy, gradient, tuple(memory))


def _each(function, z):
    """Map a function of one particle over the leading axes of ``z``, ``(..., L, d)``."""
    for _ in z.shape[:-1]:
        function = jax.vmap(function)
    return function
