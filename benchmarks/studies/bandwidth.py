"""``RBF("learned")``, a learned bandwidth, beside the rule: the same runs, nothing else set or a smaller bias budget.

Both read nothing but the clouds of warmup, so that gradients are equal: twenty particles (ten on the paper's
exponentials), 300 + 300 iterations of ten updates. Each cell has the root mean square over parameters of the errors of
means, in posterior standard deviations, and that of the relative errors of standard deviations, averaged over seeds, ±
a standard error; "budget 0.01" is `step_size=BiasBudget(0.01, min_draws=0)`. References from draws have errors of about
0.01 of their own.

Below, what the criterion predicts on N(0, I), beside long runs of 3,000 updates at steps of the default budget, and how
well one window of 500 updates knows the same for the mean, by batch means.

Without the data folder the posteriors of posteriordb are left out, and it says so.

    NUMPYRO_REPULSION_DATA=... python -m benchmarks.studies.bandwidth [--short] [--again]
"""

from functools import cache

import jax
from jax import lax, random
import jax.numpy as jnp
import numpy as np

from numpyro.infer import init_to_sample, init_to_uniform

from benchmarks.harness.runs import mean_and_error
from benchmarks.harness.store import Record, pm, run, table
from benchmarks.problems.posteriordb import Posterior, data_folder, posteriordb
from numpyro_repulsion import RBF, SGHMCR, SGLDR, BiasBudget, Overdamped, enable_live_warnings
from numpyro_repulsion.targets import exponential_mixture, gaussian, gaussian_mixture, moments
from numpyro_repulsion.warmup import gains

WARMUP = KEPT = 300
POSTERIORDB = ("eight_schools_noncentered", "kidscore_momiq")
BANDWIDTHS = {"rule": None, "learned": "learned"}
#: Of the curves: dimensions, and bandwidths over the rule's.
DIMENSIONS, MULTIPLES = (2, 5, 20), (1 / 8, 1 / 2, 1.0, 2.0, 8.0)


def autoregressive():
    """Twenty dimensions, correlated by 0.9 to the power of the distance."""
    index = np.arange(20)
    covariance = 0.9 ** np.abs(index[:, None] - index)
    return Posterior(gaussian, (np.zeros(20), covariance), reference={"z": (np.zeros(20), np.ones(20))})


def with_moments(model):
    found = moments(model).items()
    return Posterior(
        model, reference={site: (np.asarray(mean), np.asarray(variance) ** 0.5) for site, (mean, variance) in found}
    )


#: Targets without data, with how many particles.
MADE_HERE = {
    "gaussian, d = 20, correlated": (autoregressive, 20),
    "exponential mixture, 10 particles": (lambda: with_moments(exponential_mixture), 10),
    "3 × 3 mixture": (lambda: with_moments(gaussian_mixture), 20),
}
#: Kernels, and what is set.
SETTINGS = {
    "`SGLDR`": (SGLDR, {}),
    "`SGLDR`, budget 0.01": (SGLDR, {"step_size": BiasBudget(0.01, min_draws=0)}),
    "`SGHMCR`": (SGHMCR, {}),
}


@cache
def curve(dimension, length=3000, size=20):
    """The rule's bandwidth, clouds, and a program of repeated runs on N(0, I) from exact starts."""
    dynamics = Overdamped("lm")
    clouds = random.normal(random.key(0), (32, size, dimension))

    def energy_and_grad(z):
        return 0.5 * jnp.sum(z**2, -1), z

    def one(key, h, step_size):
        start_key, memory_key, key = random.split(key, 3)
        z = random.normal(start_key, (size, dimension))

        def couple(z):
            return RBF().couple(z, h)

        def update(cloud, key):
            cloud = dynamics.step(key, cloud, energy_and_grad, couple, step_size)
            return cloud, (cloud.z.mean(0), (cloud.z**2).mean(0))

        cloud = dynamics.init(memory_key, z, energy_and_grad, couple)
        _, (mean, square) = lax.scan(update, cloud, random.split(key, length))
        window = jnp.mean(mean[:500].reshape(10, 50, -1).mean(1).var(0, ddof=1))
        return mean.mean(0), square.mean(0), window

    return RBF().learn_bandwidth(clouds), clouds, jax.jit(jax.vmap(one, (0, None, None)))


def on_curve(dimension, multiple, repeats, length=3000, size=20):
    """Effective draws of means and squares at a multiple of the rule's bandwidth.

    By their squared errors over repeated runs, and as predicted from clouds; and the relative standard deviation of
    what batch means of one window of 500 updates say of those of the means.
    """
    rule, clouds, program = curve(dimension, length, size)
    found = gains(RBF("learned"), clouds, multiple * rule, 0.05)
    means, squares, window = program(random.split(random.key(1), repeats), multiple * rule, found.step)
    return {
        "part": "curve",
        "dimension": dimension,
        "multiple": multiple,
        "draws_of_mean": float(1.0 / jnp.mean(means**2)),
        "draws_of_square": float(2.0 / jnp.mean(squares.var(0, ddof=1))),
        "predicted_of_mean": float(found.mean / 2.0 * found.step * size * length),
        "predicted_of_square": float(found.square * found.step * size * length),
        "noise": float(window.std(ddof=1) / window.mean()),
        "repeats": repeats,
    }


def runs(kernel, posterior, particles, seeds):
    """Means and standard deviations of every site, bandwidth and step of one run for each seed, compiled once."""
    args, kwargs = posterior.args, posterior.kwargs
    constrain = jax.vmap(kernel.postprocess_fn(args, kwargs))

    @jax.jit
    def sample(state):
        def iterate(state, _):
            state = kernel.sample(state, args, kwargs)
            return state, state.z

        state, _ = lax.scan(iterate, state, length=WARMUP)
        state, z = lax.scan(iterate, state, length=KEPT)
        draws = constrain(jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), z))
        summaries = {site: (draws[site].mean(0), draws[site].std(0)) for site in posterior.reference}
        return summaries, state.bandwidth[0], state.step_size[0]

    # Seeds below 100 were used while the criterion was made.
    for seed in range(100, 100 + seeds):
        state = kernel.init(random.split(random.key(seed), particles), WARMUP, None, args, kwargs)
        yield jax.tree.map(np.asarray, sample(state))


def errors(summaries, reference):
    """Root mean squares, over parameters, of the errors of means and of the relative errors of deviations."""
    means = [np.ravel((summaries[site][0] - mean) / sd) for site, (mean, sd) in reference.items()]
    deviations = [np.ravel(summaries[site][1] / sd - 1.0) for site, (_, sd) in reference.items()]
    return [float(np.mean(np.concatenate(x) ** 2) ** 0.5) for x in (means, deviations)]


def on_posterior(name, setting, which, seeds):
    """Errors of one kernel with the rule or a learned bandwidth, and the median bandwidth and step."""
    make, particles = MADE_HERE.get(name, (lambda: posteriordb(name), 20))
    posterior = make()
    strategy = init_to_uniform if name in MADE_HERE else init_to_sample  # Or starts would be exact draws.
    kernel, settings = SETTINGS[setting]
    built = kernel(posterior.model, interaction=RBF(BANDWIDTHS[which]), init_strategy=strategy, **settings)
    found = [
        (*errors(summaries, posterior.reference), float(h), float(step))
        for summaries, h, step in runs(built, posterior, particles, seeds)
    ]
    mean, sd, bandwidth, step = np.array(found).T
    return {
        "part": "posterior",
        "posterior": name,
        "setting": setting,
        "which": which,
        "seeds": seeds,
        "mean_error": mean_and_error(mean),
        "sd_error": mean_and_error(sd),
        "bandwidth": float(np.median(bandwidth)),
        "step_size": float(np.median(step)),
    }


def measure(record: Record) -> None:
    enable_live_warnings(False)
    names, settings, seeds = [*POSTERIORDB, *MADE_HERE], list(SETTINGS), 32
    if data_folder() is None:
        print("NUMPYRO_REPULSION_DATA is not set: the posteriors of posteriordb are left out.")
        names = list(MADE_HERE)
    if record.short:
        names, settings, seeds = list(MADE_HERE)[:1], settings[:1], 4
    for name in names:
        for setting in settings:
            for which in BANDWIDTHS:
                record.row(f"{name}, {setting}, {which}", lambda at=(name, setting, which): on_posterior(*at, seeds))
        jax.clear_caches()
    for dimension in DIMENSIONS[:1] if record.short else DIMENSIONS:
        for multiple in MULTIPLES:
            record.row(
                f"d = {dimension}, {multiple:g} h",
                lambda at=(dimension, multiple): on_curve(*at, 16 if record.short else 96),
            )


def tables(record: Record) -> str:
    pairs = {}
    for row in record.select(part="posterior"):
        pairs.setdefault((row["posterior"], row["setting"]), {})[row["which"]] = row
    lines = []
    for names, pair in pairs.items():
        rows = [pair[which] for which in BANDWIDTHS]
        cells = (f"{pm(*row['mean_error'], digits=4)} · {pm(*row['sd_error'], digits=4)}" for row in rows)
        lines.append([*names, *cells, ", ".join(f"{row['bandwidth']:.3g}" for row in rows)])
    seeds = record.select(part="posterior")[0]["seeds"]
    posteriors = table(["posterior", "kernel", *BANDWIDTHS, "median h, rule and learned"], lines)
    lines = [
        [
            str(row["dimension"]),
            f"{row['multiple']:g}",
            *(f"{row[f'draws_of_{x}']:,.0f} (predicted {row[f'predicted_of_{x}']:,.0f})" for x in ("mean", "square")),
            f"{row['noise']:.0%}",
        ]
        for row in record.select(part="curve")
    ]
    head = ("d", "h / rule", "effective draws, means", "effective draws, squares", "noise of a window")
    repeats = record.select(part="curve")[0]["repeats"]
    return f"{posteriors}\n\n{seeds} seeds.\n\n{table(head, lines)}\n\n{repeats} runs."


if __name__ == "__main__":
    run(__doc__, "bandwidth", measure, tables, None)
