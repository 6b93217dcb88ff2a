"""The named kernels: each chooses default parts of `ParticleKernel`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numpyro_repulsion.dynamics import Overdamped, Thermostat, Underdamped
from numpyro_repulsion.interactions import RBF, Independent
from numpyro_repulsion.kernels.base import ParticleKernel


class SGLD(ParticleKernel):
    r"""Stochastic-gradient Langevin dynamics of L particles in parallel, tuned by its warmup.

    It adds to plain SGLD, which is :meth:`plain`: noise that sums to zero over the particles, averaged over two
    updates; control variates; a preconditioner; centering of hierarchies; and jumps between basins.

    :math:`z_i \leftarrow z_i - \epsilon \nabla U(z_i) + \sqrt{2\epsilon}\, \xi_i`, that is ``D = I``, ``Q = 0``, ``Γ =
    0``. As ε → 0 every particle's stationary distribution is the posterior. By default the noise is *balanced*
    (:class:`~numpyro_repulsion.Balanced`: it sums to zero over an ensemble, which does not change the distribution of a
    particle and makes averages over particles far more precise) and averaged over two updates
    (:class:`~numpyro_repulsion.dynamics.Overdamped`: a bias of second order in ε).

    **References:**

    1. *Bayesian Learning via Stochastic Gradient Langevin Dynamics*, M. Welling and Y. W. Teh, ICML 2011

    **Example**

    .. doctest::

        >>> from jax import random
        >>> import jax.numpy as jnp
        >>> import numpyro
        >>> import numpyro.distributions as dist
        >>> from numpyro.infer import MCMC
        >>> from numpyro_repulsion import SGLD

        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     with numpyro.plate("rows", len(y), subsample_size=10) as i:
        ...         numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])

        >>> mcmc = MCMC(SGLD(model, step_size=1e-3), num_warmup=50, num_samples=50, num_chains=4,
        ...             chain_method="vectorized", progress_bar=False)
        >>> mcmc.run(random.key(0), jnp.arange(100.0) / 100)
        >>> mcmc.get_samples(group_by_chain=True)["mu"].shape
        (4, 50)
    """

    @classmethod
    def plain(cls, model: Callable, step_size: float | Callable, **settings) -> SGLD:
        """Return SGLD as published, a baseline: Euler's method with independent noise and plain minibatches.

        :param model: a NumPyro model.
        :param step_size: ε, or a schedule of it.
        :param settings: other arguments, such as ``num_steps``.
        """
        given: dict[str, Any] = {"interaction": Independent(), "dynamics": Overdamped("euler"), "gradient": "plain"}
        given |= {"preconditioner": None, "reparam": None, "moves": False, "step_size": step_size}
        return cls(model, **(given | settings))


class SGLDR(ParticleKernel):
    r"""SGLD with repulsion (SGLD+R): particles that repel each other, with noise that keeps the posterior stationary.

    .. math::
        Z \leftarrow Z + \epsilon\,(-K \nabla U(Z) + \Gamma) + \sqrt{2 \epsilon}\; C \xi,
        \qquad C C^\top = K_{ij} = k(z_i, z_j), \qquad \Gamma_i = \sum_j \nabla_{z_j} K_{ij}

    that is ``D = K ⊗ I`` and ``Q = 0`` in the complete recipe. As ε → 0 the stationary distribution is
    ``∏_i π(z_i)``: L independent draws from the posterior at any one time. The bandwidth is frozen before draws are
    kept, because K may depend on the particles only through k. There is no factor ``1/L``: the paper's step is L times
    ours, and ``interaction=Independent()`` is exactly parallel SGLD. A given ``step_size`` is the ε of this equation.
    If warmup measures the step, the noise is averaged over two updates
    (:class:`~numpyro_repulsion.dynamics.Overdamped`), which has less bias for the same step; not with ``moves``, which
    cannot carry such noise. All this is in the whitened coordinates that warmup learns, where K is evaluated too.

    Needs ``MCMC(..., num_chains=L, chain_method="vectorized")`` with L of 2 or more per ensemble. The default
    interaction is :class:`~numpyro_repulsion.RBF`.

    **References:**

    1. *Stochastic Gradient MCMC with Repulsive Forces*, V. Gallego and D. Ríos Insua,
       https://arxiv.org/abs/1812.00071

    **Example**

    .. doctest::

        >>> from jax import random
        >>> import numpyro
        >>> import numpyro.distributions as dist
        >>> from numpyro.infer import MCMC
        >>> from numpyro_repulsion import SGLDR

        >>> def model():
        ...     numpyro.sample("rate", dist.Gamma(5, 1))

        >>> mcmc = MCMC(SGLDR(model), num_warmup=500, num_samples=500, num_chains=6,
        ...             chain_method="vectorized", progress_bar=False)
        >>> mcmc.run(random.key(0))
        >>> bool((mcmc.get_samples()["rate"] > 0).all())
        True
    """

    _default_interaction = RBF()
    _measured_dynamics = Overdamped(integrator="lm")


class SVGD(ParticleKernel):
    r"""Stein variational gradient descent: :class:`SGLDR` with the noise off. An optimizer, not a sampler.

    :math:`Z \leftarrow Z + \epsilon\,(-K \nabla U(Z) + \Gamma)` moves a cloud of particles toward a set of points
    that represents the posterior. The product distribution is *not* stationary; the spread of few particles is too
    small, and successive clouds are not draws. The result is the last cloud:
    :func:`~numpyro_repulsion.to_inference_data` and :func:`~numpyro_repulsion.summary` keep only that one. There is
    no factor ``1/L``. ``step_size`` may be any schedule of optax, and ``dynamics=Descent(...)`` takes the steps of an
    optimizer of optax, such as Adagrad: see :class:`~numpyro_repulsion.dynamics.Descent`.

    The default interaction is :class:`~numpyro_repulsion.RBF`.

    **References:**

    1. *Stein Variational Gradient Descent: A General Purpose Bayesian Inference Algorithm*, Q. Liu and D. Wang,
       https://arxiv.org/abs/1608.04471

    **Example**

    .. doctest::

        >>> from jax import random
        >>> import jax.numpy as jnp
        >>> from numpyro.infer import MCMC
        >>> from numpyro_repulsion import SVGD
        >>> mcmc = MCMC(SVGD(potential_fn=lambda z: jnp.sum(z**2) / 2, step_size=0.05), num_warmup=100,
        ...             num_samples=1, num_chains=5, chain_method="vectorized", progress_bar=False)
        >>> mcmc.run(random.key(0), init_params=3.0 + random.normal(random.key(1), (5, 2)))
        >>> mcmc.last_state.z.shape
        (5, 2)
    """

    _default_interaction = RBF()
    _default_dynamics = Overdamped(noise=False)


class SGHMC(ParticleKernel):
    r"""Stochastic-gradient Hamiltonian Monte Carlo of L particles in parallel.

    Particles with momenta, friction and noise, :class:`~numpyro_repulsion.dynamics.Underdamped` with ``K = I``: ``D =
    diag(0, C I)``, ``Q = [[0, −I], [I, 0]]``, ``Γ = 0``. As ε → 0 every particle's stationary distribution is the
    posterior. The noise is balanced by default (:class:`~numpyro_repulsion.Balanced`), and an update is BAOAB, of
    second order in ε. ``step_size`` is a time step: ε moves a particle about as far as a step ``ε²/2`` of
    :class:`SGLD`.

    Friction, temperature and kinetic energy are those of ``dynamics=Underdamped(...)``.

    **References:**

    1. *Stochastic Gradient Hamiltonian Monte Carlo*, T. Chen, E. B. Fox and C. Guestrin,
       https://arxiv.org/abs/1402.4102

    **Example**

    .. doctest::

        >>> from jax import random
        >>> import numpyro
        >>> import numpyro.distributions as dist
        >>> from numpyro.infer import MCMC
        >>> from numpyro_repulsion import SGHMC
        >>> def model():
        ...     numpyro.sample("rate", dist.Gamma(5, 1))
        >>> mcmc = MCMC(SGHMC(model, step_size=0.1), num_warmup=50, num_samples=50, num_chains=4,
        ...             chain_method="vectorized", progress_bar=False)
        >>> mcmc.run(random.key(0))
        >>> mcmc.get_samples(group_by_chain=True)["rate"].shape
        (4, 50)
    """

    _default_dynamics = Underdamped()


class SGHMCR(ParticleKernel):
    r"""SGHMC with repulsion (SGHMC+R): particles with momenta that repel each other through the curl matrix Q.

    .. math::
        dz = K m\, dt, \qquad dm = (-K \nabla U + \Gamma - C m)\, dt + \sqrt{2 C}\; dW

    that is ``D = diag(0, C I)``, ``Q = [[0, −K], [K, 0]]`` and Γ, the divergence of K, in the momenta alone
    (:class:`~numpyro_repulsion.dynamics.Underdamped`). As ε → 0 the stationary distribution of the positions is
    ``∏_i π(z_i)``. The noise is white, so K needs no square root.

    Needs ``MCMC(..., num_chains=L, chain_method="vectorized")`` with L of 2 or more per ensemble. The default
    interaction is :class:`~numpyro_repulsion.RBF`.

    **References:**

    1. *Stochastic Gradient MCMC with Repulsive Forces*, V. Gallego and D. Ríos Insua,
       https://arxiv.org/abs/1812.00071

    **Example**

    .. doctest::

        >>> from jax import random
        >>> import numpyro
        >>> import numpyro.distributions as dist
        >>> from numpyro.infer import MCMC
        >>> from numpyro_repulsion import SGHMCR
        >>> def model():
        ...     numpyro.sample("rate", dist.Gamma(5, 1))
        >>> mcmc = MCMC(SGHMCR(model, step_size=0.05), num_warmup=50, num_samples=50, num_chains=6,
        ...             chain_method="vectorized", progress_bar=False)
        >>> mcmc.run(random.key(0))
        >>> bool((mcmc.get_samples()["rate"] > 0).all())
        True
    """

    _default_interaction = RBF()
    _default_dynamics = Underdamped()


class SGNHT(ParticleKernel):
    r"""The stochastic-gradient Nosé-Hoover thermostat of L particles in parallel.

    SGHMC whose friction adapts to the noise in the gradient: :class:`~numpyro_repulsion.dynamics.Thermostat` with ``K =
    I``. As ε → 0 every particle's stationary distribution is the posterior, even with gradient noise that is the same
    in all directions. The noise is balanced by default (:class:`~numpyro_repulsion.Balanced`), and an update is
    BADODAB, of second order.

    **References:**

    1. *Bayesian Sampling Using Stochastic Gradient Thermostats*, N. Ding, Y. Fang, R. Babbush, C. Chen, R. D. Skeel
       and H. Neven, NIPS 2014

    **Example**

    .. doctest::

        >>> from jax import random
        >>> import numpyro
        >>> import numpyro.distributions as dist
        >>> from numpyro.infer import MCMC
        >>> from numpyro_repulsion import SGNHT
        >>> def model():
        ...     numpyro.sample("rate", dist.Gamma(5, 1))
        >>> mcmc = MCMC(SGNHT(model, step_size=0.1), num_warmup=50, num_samples=50, num_chains=4,
        ...             chain_method="vectorized", progress_bar=False)
        >>> mcmc.run(random.key(0))
        >>> mcmc.get_samples(group_by_chain=True)["rate"].shape
        (4, 50)
    """

    _default_dynamics = Thermostat()


class SGNHTR(ParticleKernel):
    r"""SGNHT with repulsion (SGNHT+R): :class:`SGHMCR` in which each particle has a friction ζ that adapts.

    :math:`dm = (-K \nabla U + \Gamma - \zeta m)\, dt + \sqrt{2 C}\; dW` with
    :math:`d\zeta = (\|m\|^2 / d - 1)\, dt / \mu` (:class:`~numpyro_repulsion.dynamics.Thermostat`). As ε → 0 the
    stationary distribution of the positions is ``∏_i π(z_i)``.

    Needs ``MCMC(..., num_chains=L, chain_method="vectorized")`` with L of 2 or more per ensemble. The default
    interaction is :class:`~numpyro_repulsion.RBF`.

    **References:**

    1. *Stochastic Gradient MCMC with Repulsive Forces*, V. Gallego and D. Ríos Insua,
       https://arxiv.org/abs/1812.00071

    **Example**

    .. doctest::

        >>> from jax import random
        >>> import numpyro
        >>> import numpyro.distributions as dist
        >>> from numpyro.infer import MCMC
        >>> from numpyro_repulsion import SGNHTR
        >>> def model():
        ...     numpyro.sample("rate", dist.Gamma(5, 1))
        >>> mcmc = MCMC(SGNHTR(model, step_size=0.05), num_warmup=50, num_samples=50, num_chains=6,
        ...             chain_method="vectorized", progress_bar=False)
        >>> mcmc.run(random.key(0))
        >>> bool((mcmc.get_samples()["rate"] > 0).all())
        True
    """

    _default_interaction = RBF()
    _default_dynamics = Thermostat()
