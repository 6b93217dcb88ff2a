"""Models with hundreds to thousands of effects: are the scales right, and what does it cost?

With default settings, `MCMC(kernel(model), 500, 500, num_chains=20)` runs beside NUTS on all rows (4 vectorized chains,
300 + 300 iterations), ChEES-HMC (20 chains, 300 + 300), HMC in the coordinates that `SGLD` learned (4 chains, 100 + 300
trajectories of length 1.5, with the time of that warmup), each ended after ten minutes, and NumPyro's SVI with
minibatches (20,000 steps of Adam). Errors of scales are those of posterior means of their logarithms, in posterior
standard deviations of the reference; the sds of effects are relative to the reference's. ESS and R-hat are the worst of
all scales and of up to 100 entries of each other site. The two large problems have no reference. Findings include
notes, as of a few `flagged_updates`. Seconds are processor time of the whole run, with compilation.
"""

from collections.abc import Callable
from functools import partial
import time

import jax
from jax import lax, random
import jax.numpy as jnp
import numpy as np

from numpyro.diagnostics import effective_sample_size, split_gelman_rubin
from numpyro.infer import HMC, MCMC, NUTS, SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoLowRankMultivariateNormal, AutoNormal
import numpyro.optim

from benchmarks.harness.apart import apart
from benchmarks.harness.runs import vectorized
from benchmarks.harness.store import Record, table
from benchmarks.methods.current_peers import Flat, run_chees
from benchmarks.problems import effects
from numpyro_repulsion import SGHMC, SGLD, all_rows, diagnose, to_inference_data

KERNELS = {"SGLD": SGLD, "SGHMC": SGHMC}
ALL_ROWS = {"NUTS": "nuts", "ChEES-HMC": "chees", "HMC in learned coordinates": "hmc"}
GUIDES = {"AutoNormal": AutoNormal, "AutoLowRank": AutoLowRankMultivariateNormal}
SEEDS, LIMIT, MOST = 3, 600.0, 100


def scores(problem: effects.ManyEffects, name: str, draws: dict) -> dict:
    """Errors against the reference, R-hat and ESS of draws ``(chain, draw, ...)``."""
    known, row, mixing = effects.reference(name), {"scales": {}, "others": {}}, []
    for site in problem.sites:
        x = np.asarray(draws[site], float)
        x = x.reshape(*x.shape[:2], -1)
        x = np.log(x) if site in problem.scales else x
        some = x[..., np.unique(np.linspace(0, x.shape[-1] - 1, MOST).astype(int))]
        some = some[..., some.std((0, 1)) > 1e-9]
        if x.shape[0] > 1:
            mixing.append((split_gelman_rubin(some), effective_sample_size(some)))
        if known:
            mean, sd = (known[f"{site} {what}"].astype(float) for what in ("mean", "sd"))
            free = sd > 1e-6
            off, wide = (x.mean((0, 1)) - mean)[free] / sd[free], x.std((0, 1))[free] / sd[free]
            if site in problem.scales:
                row["scales"][site] = float(off[np.abs(off).argmax()])
            elif site in problem.effects:
                row["others"][site] = [float(np.abs(off).max()), float(wide.mean())]
    if mixing:
        rhat, ess = (np.concatenate(x) for x in zip(*mixing, strict=True))
        row |= {"rhat": float(rhat.max()), "ess": float(ess.min()), "ess 5%": float(np.quantile(ess, 0.05))}
    return row


def run(name: str, method: str, kernel: Callable, iterations: int, chains: int, seed: int = 0) -> tuple[MCMC, dict]:
    problem, began = effects.PROBLEMS[name](), time.process_time()
    mcmc = vectorized(kernel(problem.model), iterations, iterations, chains)
    mcmc.run(random.key(seed), **problem.data)
    jax.block_until_ready(mcmc.get_samples())
    row = {"name": name, "method": method, "seed": seed, "seconds": time.process_time() - began}
    return mcmc, row | scores(problem, name, mcmc.get_samples(group_by_chain=True))


def ours(name: str, kernel: str, seed: int) -> dict:
    mcmc, row = run(name, kernel, KERNELS[kernel], 500, 20, seed)
    attrs = to_inference_data(mcmc).posterior.attrs
    row |= {key: attrs[key] for key in ("control_variates", "step_size")}
    return row | {"findings": [finding.name for finding in diagnose(mcmc)]}


def nuts(name: str) -> dict:
    return run(name, "NUTS", lambda model: NUTS(all_rows(model)), 300, 4)[1]


def chees(name: str) -> dict:
    problem, began = effects.PROBLEMS[name](), time.process_time()
    flat = Flat(all_rows(problem.model), kwargs=problem.data)
    keys, starts = random.split(random.key(0)), flat.starts(random.key(1), 20)
    positions = jax.jit(partial(run_chees, flat.log_density, warmup=300, draws=300))(keys, starts)[0]
    return scored(name, "ChEES-HMC", began, flat, jnp.moveaxis(positions, 1, 0))


def hmc(name: str) -> dict:
    """HMC on all rows, in the coordinates of SGLD after its warmup."""
    problem, began = effects.PROBLEMS[name](), time.process_time()
    mcmc = vectorized(SGLD(problem.model), 500, 1, 20)
    mcmc.run(random.key(0), **problem.data)
    mover, cloud = mcmc.sampler.parts(mcmc.last_state, (), problem.data)
    learned, flat = mcmc.last_state.learned, Flat(all_rows(problem.model), kwargs=problem.data)

    def energy(u):
        found = mover.recover(learned, u)
        volume = 0.0 if learned.centering is None else mover.centered(learned.centering).log_volume(found)
        return flat.potential(mover.unravel(found.z)) - volume

    kernel = HMC(potential_fn=energy, adapt_mass_matrix=False, trajectory_length=1.5)
    mcmc = MCMC(kernel, num_warmup=100, num_samples=300, num_chains=4, chain_method="vectorized", progress_bar=False)
    mcmc.run(random.key(1), init_params=cloud.z.reshape(-1, flat.dimension)[:4])
    positions = lax.map(lambda u: mover.recover(learned, u).z, mcmc.get_samples(group_by_chain=True))
    return scored(name, "HMC in learned coordinates", began, flat, positions)


def scored(name, method, began, flat, positions):
    """The row of positions ``(chain, draw, d)``."""
    draws = flat.sites(jax.block_until_ready(positions).reshape(-1, flat.dimension))
    draws = {site: np.asarray(x).reshape(*positions.shape[:2], *x.shape[1:]) for site, x in draws.items()}
    row = {"name": name, "method": method, "seed": 0, "seconds": time.process_time() - began}
    return row | scores(effects.PROBLEMS[name](), name, draws)


def svi(name: str, guide: str) -> dict:
    problem, began = effects.PROBLEMS[name](), time.process_time()
    fitted = GUIDES[guide](problem.model)
    found = SVI(problem.model, fitted, numpyro.optim.Adam(0.01), Trace_ELBO()).run(
        random.key(0), 20_000, progress_bar=False, **problem.data
    )
    draws = fitted.sample_posterior(random.key(1), found.params, sample_shape=(1000,))
    row = {"name": name, "method": guide, "seed": 0, "seconds": time.process_time() - began}
    return row | scores(problem, name, {site: draws[site][None] for site in problem.sites})


def measure(record: Record) -> None:
    for seed in range(SEEDS):
        for name in effects.PROBLEMS:
            for kernel in KERNELS:
                record.row(f"{name} / {kernel} / {seed}", partial(ours, name, kernel, seed))
    for name in effects.PROBLEMS:
        for title, method in ALL_ROWS.items():
            record.row(f"{name} / {title}", partial(apart, __name__, method, LIMIT, name=name))
        for guide in GUIDES:
            record.row(f"{name} / {guide}", partial(apart, __name__, "svi", LIMIT, name=name, guide=guide))


def tables(record: Record) -> str:
    lines = []
    for key, row in record.rows.items():
        if "failed" in row:
            name, method = key.split(" / ")
            lines.append([name, method, "", *[""] * 7, row["failed"]])
            continue
        worst = max(row["scales"].items(), key=lambda x: abs(x[1]), default=("", np.nan))
        wide = min(row["others"].items(), key=lambda x: -abs(x[1][1] - 1.0), default=("", (np.nan, np.nan)))
        cells = [row["name"], f"`{row['method']}`", str(row["seed"]), row.get("control_variates") or ""]
        cells += [f"{row['seconds']:.0f}"]
        cells += [f"{worst[1]:+.2f} ({worst[0]})", f"{wide[1][1]:.3f} ({wide[0]})"] if row["scales"] else ["", ""]
        cells += [f"{row[what]:{form}}" if what in row else "" for what, form in (("rhat", ".2f"), ("ess", ".0f"))]
        cells += [f"{row['ess'] / row['seconds']:.1f}" if "ess" in row else ""]
        lines.append([*cells, ", ".join(row.get("findings", []))])
    head = ["posterior", "method", "seed", "control variates", "CPU s", "largest error of a log scale, sd"]
    head += ["sds of effects, ratio", "R-hat", "ESS", "ESS per CPU s", "findings"]
    return table(head, lines)
