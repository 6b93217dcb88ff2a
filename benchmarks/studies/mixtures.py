"""The paper's two mixtures, Tables 1 and 2 and Figures 3 to 6: exponentials, and nine Gaussians on a grid.

10, 20 or 100 particles start uniformly in (−2, 2) of the unconstrained space and make 500 updates of warmup and 500 of
which every tenth is kept. Protocols: (a) one step for all, as in the paper; (b) each sampler's best step and bandwidth,
chosen on other seeds; (c) default settings. NumPyro samplers take several gradients per iteration or none.

Errors are mean absolute errors over 200 repeats (for two coordinates, their mean). The ESS is the exact variance over
the mean squared error of E X, bias included; the nominal ESS is NumPyro's estimate, which treats particles as
independent chains. The energy distance is measured from the exact distribution. Inflation is the variance within the
modes over its exact value; for the exponentials it is that of the logarithm. SVGD's result is its last particles.
"""

from functools import partial
import itertools

import jax
from jax import lax
import jax.numpy as jnp
from jax.scipy.special import i0e, i1e
import numpy as np

from numpyro.diagnostics import effective_sample_size
from numpyro.infer import AIES, ESS, NUTS, init_to_uniform

from benchmarks.harness.runs import mean_and_error, repeats
from benchmarks.harness.store import Record, plain, pm, table
from benchmarks.problems.targets import exponential_mixture, gaussian_mixture
from numpyro_repulsion import RBF, SGHMC, SGHMCR, SGLD, SGLDR, SVGD, Archive, Independent
from numpyro_repulsion.dynamics import Overdamped

MODELS = {"exponentials": exponential_mixture, "Gaussians": gaussian_mixture}
#: One step for all, in protocol (a): the paper does not print its own.
STEPS = (0.01, 0.03, 0.1)
#: RBF's h; ``None`` is the one that warmup finds.
BANDWIDTHS = (None, 0.1, 0.3, 1.0, 3.0)
TUNING_SEED = 10_000
CLOUDS = [(target, size) for target in MODELS for size in (10, 20, 100)]
MODES, VARIANCE = np.array(list(itertools.product((-2.0, 0.0, 2.0), repeat=2))), 0.1
GRID, REPEATS = np.geomspace(0.003, 1.0, 11), 200


REPULSIVE = {"SGLD+R": SGLDR, "SGHMC+R": SGHMCR, "SVGD": SVGD}


def kernels(model):
    """Kernels with a step to be set, from it and a bandwidth."""

    def plain(kernel, **settings):
        return lambda step, h: kernel(model, step_size=step, init_strategy=init_to_uniform, **settings)

    return {
        "SGLD": plain(SGLD, interaction=Independent(), dynamics=Overdamped("euler")),
        "SGLD, balanced": plain(SGLD),
        "SGHMC": plain(SGHMC, interaction=Independent()),
        **{
            name: lambda step, h, kernel=kernel: plain(kernel, interaction=RBF(h))(step, h)
            for name, kernel in REPULSIVE.items()
        },
    }


def nothing_set(target):
    """Kernels with nothing set but the start, and the moves on the grid of modes."""
    made = {"SGLD": SGLD, "SGLD+R": SGLDR, "SGHMC": SGHMC, "SGHMC+R": SGHMCR}
    if target == "Gaussians":
        made |= {f"{name}, archive": partial(made[name], moves=Archive()) for name in ("SGLD", "SGLD+R", "SGHMC")}
    made |= {f"NumPyro's {kernel.__name__}": kernel for kernel in (NUTS, AIES, ESS)}
    return {name: partial(kernel, MODELS[target], init_strategy=init_to_uniform) for name, kernel in made.items()}


class Exponentials:
    """What is compared of draws from the mixture of exponentials."""

    mean, square = 14 / 9, 152 / 27
    criterion = "mean_error"
    # The logarithm of an exponential has mean -γ - log λ and variance π²/6.
    shift = -np.euler_gamma - np.array([1 / 3, 2 / 3]) @ np.log([1.5, 0.5])
    spread = np.pi**2 / 6 + 2 / 9 * np.log(3.0) ** 2

    def __call__(self, x):
        return {
            "mean": x.mean(0)[None],
            "mean_error": abs(x.mean() - self.mean),
            "square_error": abs((x**2).mean() - self.square),
            "inflation": ((np.log(x) - self.shift) ** 2).mean() / self.spread,
        }


class Gaussians:
    """What is compared of draws from the nine Gaussians."""

    mean, square = 0.0, 8 / 3 + 0.1
    criterion = "distance"

    def __init__(self):
        own = mean_distance(MODES, 2 * VARIANCE).mean()

        def distance(x):
            within = lax.map(lambda y: jnp.linalg.norm(x - y, axis=-1).mean(), x, batch_size=200)
            return 2 * mean_distance(x, VARIANCE).mean() - within.mean() - own

        self.distance = jax.jit(distance)

    def __call__(self, x):
        nearest = ((x[:, None] - MODES) ** 2).sum(-1).argmin(1)
        share = np.bincount(nearest, minlength=9) / len(x)
        return {
            "mean": x.mean(0),
            "mean_error": np.abs(x.mean(0)).mean(),
            "square_error": np.abs((x**2).mean(0) - self.square).mean(),
            "occupancy": np.abs(share - 1 / 9).sum() / 2,
            "distance": float(self.distance(jnp.asarray(x))),
            "inflation": ((x - MODES[nearest]) ** 2).mean() / VARIANCE,
        }


def mean_distance(x, variance):
    """The mean distance of each point from draws of ``N(c, variance · I)``, over the nine c (Rice)."""
    q = ((x[:, None] - MODES) ** 2).sum(-1) / (4.0 * variance)
    return ((np.pi * variance / 2.0) ** 0.5 * ((1.0 + 2.0 * q) * i0e(q) + 2.0 * q * i1e(q))).mean(-1)


def summarize(draws, score, last=False):
    """Means and standard errors over repeats, of draws ``(seed, particle, draw, ...)``."""
    finite = np.isfinite(draws).reshape(len(draws), -1).all(1)
    row = {"repeats": len(draws), "not_finite": int((~finite).sum())}
    draws = draws[finite]
    if len(draws) < 2:
        return row
    kept = draws[:, :, -1:] if last else draws
    scores = [score(x.reshape(-1, *x.shape[2:])) for x in kept]
    means = np.array([s.pop("mean") for s in scores])
    row |= {name: mean_and_error([s[name] for s in scores]) for name in scores[0]}
    row["effective"] = float((score.square - score.mean**2) / ((means - score.mean) ** 2).mean())
    if not last:
        row["nominal"] = float(np.mean([np.min(effective_sample_size(x)) for x in draws]))
    return row


def measure(record):
    for target, size in CLOUDS:
        score = Exponentials() if target == "exponentials" else Gaussians()
        at = {"target": target, "particles": size}
        runs = {"num_chains": size, "num_warmup": 50, "num_samples": 50}
        record.row(f"{target} {size} exact", partial(independent, at, score))
        for name, make in kernels(MODELS[target]).items():
            hand_set(record, at | {"sampler": name}, make, score, runs)
        for name, make in nothing_set(target).items():
            record.row(f"{target} {size} d {name}", partial(alone, at | {"sampler": name}, make, score, runs))
        jax.clear_caches()


def alone(at, make, score, runs):
    """Protocol (d): a row of a kernel with nothing set."""
    if at["sampler"].startswith("NumPyro"):
        runs = runs | {"num_warmup": 500, "num_samples": 500, "thinning": 10}
    adapts = not at["sampler"].startswith("NumPyro")
    draws, seconds = repeats(lambda step: make(), adapts=adapts, **runs)(0.0, range(REPEATS))
    return at | {"protocol": "d", "seconds": seconds} | summarize(draws, score)


def hand_set(record, at, make, score, runs):
    """Protocols (a) and (b) of one kernel."""
    name, target, size = at["sampler"], at["target"], at["particles"]
    last, tuning = name == "SVGD", 8 if size == 100 else 32
    # Compiled where a row asks for it, once for each bandwidth; the rule's is learned.
    programs = {
        h: repeats(lambda step, h=h: make(step, h), adapts=h is None and name in REPULSIVE, **runs) for h in BANDWIDTHS
    }

    def trial(h):
        draws = [programs[h](step, TUNING_SEED + np.arange(tuning))[0] for step in GRID]
        rows = [summarize(x, score, last) for x in draws]
        kept = {key: [row.get(key, (None,))[0] for row in rows] for key in (score.criterion, "inflation")}
        return at | {"protocol": "grid", "h": h, "steps": GRID.tolist(), "seeds": tuning} | kept

    def report(protocol, h, step):
        draws, seconds = programs[h](step, range(REPEATS))
        row = at | {"protocol": protocol, "h": h, "step": float(step), "seconds": seconds}
        return row | summarize(draws, score, last)

    for step in STEPS:
        record.row(f"{target} {size} a {name} {step}", lambda step=step: report("a", None, step))
    tried = BANDWIDTHS if name in REPULSIVE else (None,)
    trials = [record.row(f"{target} {size} grid {name} {h}", partial(trial, h)) for h in tried]
    record.row(f"{target} {size} b {name}", lambda: report("b", *best(trials, score.criterion)))


def best(trials, criterion):
    pairs = ((row, i) for row in trials for i, value in enumerate(row[criterion]) if value is not None)
    row, i = min(pairs, key=lambda pair: pair[0][criterion][pair[1]])
    return row["h"], row["steps"][i]


def independent(at, score):
    """Draws of the exact law, as many as the samplers keep."""
    rng, shape = np.random.default_rng(1), (REPEATS, at["particles"], 50)
    if at["target"] == "Gaussians":
        draws = MODES[rng.integers(9, size=shape)] + VARIANCE**0.5 * rng.standard_normal((*shape, 2))
    else:
        draws = rng.exponential(1 / np.where(rng.random(shape) < 1 / 3, 1.5, 0.5))
    return at | {"protocol": "exact", "sampler": "independent draws"} | summarize(draws, score)


#: In which tables have them, whenever they were measured.
ORDER = (
    *("independent draws", "SGLD", "SGLD, balanced", "SGLD+R", "SGHMC", "SGHMC+R", "SVGD"),
    *("SGLD, archive", "SGLD+R, archive", "SGHMC, archive", "NumPyro's NUTS", "NumPyro's AIES", "NumPyro's ESS"),
)
PROTOCOLS = {"exact": "", "a": "(a) one step", "b": "(b) its best", "d": "(c) default settings"}


def tables(record: Record) -> str:
    sections = []
    for target in MODELS:
        measures = ["mean_error", "square_error", *(["occupancy", "distance"] * (target == "Gaussians")), "inflation"]
        found = [row for row in record.select(target=target) if row["protocol"] in PROTOCOLS]
        found.sort(key=lambda row: (row["particles"], [*PROTOCOLS].index(row["protocol"]), ORDER.index(row["sampler"])))
        lines = []
        for row in found:
            name = row["sampler"] if row["protocol"] == "d" else plain(row["sampler"])
            cells = [str(row["particles"]), PROTOCOLS[row["protocol"]], name, *settings_of(row)]
            cells += [*(cell(row, measured) for measured in measures), str(row["repeats"])]
            cells += [f"{row[key]:,.0f}" if key in row else "" for key in ("effective", "nominal")]
            a_second = "effective" in row and "seconds" in row
            lines.append([*cells, f"{row['effective'] / row['seconds']:,.0f}" if a_second else ""])
        names = {"mean_error": "error of E X", "square_error": "error of E X²", "distance": "energy distance"}
        head = ["particles", "protocol", "sampler", "step", "h", *(names.get(name, name) for name in measures)]
        sections.append(f"**{target}**\n\n{table([*head, 'repeats', 'ESS', 'nominal ESS', 'ESS per second'], lines)}")
    return "\n\n".join(sections)


def settings_of(row):
    if "step" not in row:
        return "", ""
    h = "rule" if row["h"] is None else f"{row['h']:g}"
    return f"{row['step']:.3g}", h if row["sampler"] in REPULSIVE else ""


def cell(row, name):
    lost = f" ({row['not_finite']} not finite)" if row["not_finite"] and name == "mean_error" else ""
    return pm(*row[name], 4 if name == "distance" else 3) + lost if name in row else f"not finite{lost}"
