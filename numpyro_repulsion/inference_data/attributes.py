"""Attributes of inference data, which describe the run; and the check that a run has draws."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import numpy as np

import numpyro
from numpyro.infer import MCMC

from numpyro_repulsion.findings import Finding, to_json
from numpyro_repulsion.gradients import ModelTarget, ravel_cloud
from numpyro_repulsion.kernels import (
    ParticleKernel,
    bound_of,
    coupling_of,
    has_other_data,
    kernel_of,
    require_draws,
    share_flagged,
)
from numpyro_repulsion.schedules import BiasBudget

__all__ = ["attributes", "require_run"]


#: The finding about a run with other data than its warmup; it replaces the findings of that warmup.
OTHER_DATA = Finding(
    "other_data",
    "warning",
    None,
    "This run has other data than its warmup, so step size, scales and all else that warmup learned may not fit.",
    "Warm up on these data, unless both are alike.",
)


#: Momenta below this share of their temperature are cold. Noise and long steps of a thermostat leave more than 0.8.
MIN_TEMPERATURE = 0.5


def require_run(mcmc: MCMC) -> ParticleKernel:
    """Return the kernel of a run.

    :raises TypeError: if ``mcmc`` is not an ``MCMC`` with a kernel of this package.
    :raises ValueError: if it has no draws.
    """
    kernel = kernel_of(mcmc, "to_inference_data", " For other kernels use arviz.from_numpyro.")
    require_draws(mcmc)
    return kernel


def attributes(mcmc: MCMC, kernel: ParticleKernel, target: ModelTarget | None) -> dict[str, Any]:
    """Return the attributes that describe a run."""
    state = mcmc.last_state
    plates = target.plates if target is not None else {}
    measured = isinstance(kernel.step_size, BiasBudget)
    is_other = has_other_data(mcmc)
    findings = ([OTHER_DATA] if is_other else kernel.findings(state)) + _of_momenta(kernel, state)
    bias = float(np.ravel(state.warmup.step.bias)[0])
    coupling, num_independent = coupling_of(mcmc)
    return {
        "created_at": datetime.now(UTC).isoformat(),
        "inference_library": "numpyro_repulsion",
        "numpyro_version": numpyro.__version__,
        "algorithm": type(kernel).__name__,
        "is_sampler": str(kernel.dynamics.is_sampler).lower(),
        "interaction": repr(kernel.interaction),
        "dynamics": repr(kernel.dynamics),
        "moves": repr(kernel.moves),
        "gradient": repr(bound_of(mcmc).gradient),
        "minibatches": ", ".join(f"{size} of {total} {name}" for name, (total, size) in plates.items()),
        "centering": _centering(state),
        "preconditioner": "None" if kernel.preconditioner is None else str(kernel.preconditioner),
        "step_size_rule": _step_size_rule(kernel.step_size),
        "step_size": float(np.ravel(state.step_size)[0]),
        "step_size_measured": str(measured).lower(),
        "step_size_bias": np.nan if bias < 0.0 or is_other else bias,
        "remedy": "warm up on these data" if is_other and measured else kernel.remedy,
        "findings": to_json(findings),
        "other_data": str(is_other).lower(),
        "coupling": coupling,
        "num_independent": num_independent,
        "num_particles": mcmc.num_chains,
        "num_ensembles": kernel.num_ensembles,
        "ensemble": np.repeat(np.arange(kernel.num_ensembles), mcmc.num_chains // kernel.num_ensembles),
        "num_steps": kernel.num_steps,
        "num_warmup": mcmc.num_warmup,
        "thinning": mcmc.thinning,
        "num_flagged_updates": int(np.sum(state.num_flagged_updates)),
        "share_flagged": share_flagged(mcmc),
    }


def _of_momenta(kernel, state):
    """Return a finding about momenta that are far colder than in equilibrium, so that particles hardly move."""
    found = kernel.dynamics.kinetic_temperature(state.memory)
    if found is None or not kernel.dynamics.is_sampler:
        return []
    share = float(found) / kernel.dynamics.temperature
    # The mean of n squares has a standard deviation of sqrt(2 / n).
    if not share < min(MIN_TEMPERATURE, 1.0 - 4.0 * (2.0 / state.memory[0].size) ** 0.5):
        return []
    message = f"Momenta have {100 * share:.0f} % of their temperature, so particles hardly move."
    remedy = "Leave `step_size` to warmup, or raise `num_warmup`: the friction of a thermostat falls slowly."
    return [Finding("cold_momenta", "error", share, message, remedy)]


def _step_size_rule(step_size):
    """Return how the step size is found, in words."""
    return "schedule" if callable(step_size) else repr(step_size)


def _centering(state):
    """Return by how much hierarchical sites are centered, in words; empty if all sites are as in the model."""
    centering = state.warmup.scales.centering
    if centering is None:
        return ""
    shares = ravel_cloud(state.z)[1](centering.share)
    ranges = {name: (float(x.min()), float(x.max())) for name, x in shares.items() if x.size and (x != 1.0).any()}
    return ", ".join(f"{name} {low:.2f} to {high:.2f}" for name, (low, high) in ranges.items())
