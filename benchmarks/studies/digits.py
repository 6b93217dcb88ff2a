"""Digits by a small convolutional network: what do kernels with default settings say next to tuned ensembles?

Scikit-learn's 8 x 8 digits without the nines: 1,078 of 1,197 training rows and 539 of 600 test rows. Eight 3 x 3
filters, mean pooling and 32 hidden ReLU units, weights N(0, 2 / inputs), 2,713 parameters. All methods start 20
particles at draws from the prior and make 3,000 updates with minibatches of 100 rows. Kernels with default settings use
2,000 of them as warmup, keep every tenth of the others, and take further gradients to measure curvature and noise. The
others are optimizers with a constant rate: the one with the lowest negative log-likelihood (NLL) on a fifth of the
training rows, after a fit to the other rows with another seed. They predict by their last networks. Scores of *one MAP
network* are means over the 20 networks of a run, each alone; its rate is chosen by the same mean.

The calibration error compares top probability and accuracy in 15 bins of equal width. AUROC is that of the predictive
entropy: known test digits against the same digits rotated by 90°, and against all 180 nines, which no network was
trained on. 0.5 is chance, and below it predictions are surer of the unknown images. ± is a standard error over three
seeds, of starts and minibatches. It leaves out that there is one split, whose 539 test rows are a sample too: an
accuracy of 97 % is known to 0.7 %. A prediction set of 90 % holds the most probable classes, and the last of them with
the probability that makes it 90 %; ± is binomial there. Core-seconds are process time on one core, for a run with its
compilation, without predictions; "to choose" is the sum over all rates.

    python -m benchmarks.studies.digits [--short] [--again]
"""

from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.harness.runs import mean_and_error, warmup_gradients
from benchmarks.harness.store import Record, plt, pm, run, table
from benchmarks.methods.digits import BATCH, METHODS, NUM_STEPS, PARTICLES, fitted, probabilities
from benchmarks.problems.digits import LEFT_OUT, score, split
from numpyro_repulsion import diagnose, enable_live_warnings
from numpyro_repulsion.plots.style import COLOURS

LENGTH, SHORT_LENGTH = (200, 100), (40, 20)
NUM_SEEDS, TUNING_SEED = 3, 100
CHOSEN, SINGLE, ENSEMBLE = "`SGNHT(model)`", "one MAP network", "20 MAP networks"
SHORT = (CHOSEN, ENSEMBLE)
MEASURES = {
    "accuracy": "accuracy, %",
    "nll": "NLL",
    "calibration_error": "calibration error",
    "auroc_rotated": "AUROC, rotated",
    "auroc_left_out": "AUROC, nines",
}
#: Of the prediction sets.
SHARE = 0.9
#: How the groups of images are drawn.
GROUPS = {"known": "known", "rotated": "rotated", "left_out": "nines"}


@lru_cache(maxsize=1)
def _fit(make, rate, seed: int, length: tuple[int, int], validation: bool):
    """A run, kept for the next row: the MAP networks are scored together and alone."""
    return fitted(make(rate), split(validation), seed, length)


def tried(label: str, length: tuple[int, int], rate: float) -> dict:
    """A row: the validation score of one rate, of the networks together and alone."""
    data = split(validation=True)
    mcmc, seconds = _fit(METHODS[label].make, rate, TUNING_SEED, length, True)
    row = {"tuned": label, "rate": rate, "core_seconds": seconds}
    for name, alone in (("together", False), ("alone", True)):
        found = probabilities(mcmc, data.X_test, alone)[:, np.arange(len(data.y_test)), np.asarray(data.y_test)]
        nll = -np.log(found + np.finfo(float).tiny).mean()
        row[name] = float(nll) if np.isfinite(nll) else None
    return row


def one(label: str, length: tuple[int, int], seed: int, rate: float | None) -> dict:
    """A row: the scores of a method on the test rows, and the counts for the figure."""
    method, data = METHODS[label], split()
    mcmc, seconds = _fit(method.make, rate, seed, length, False)
    parts = np.cumsum([len(data.X_test), len(data.rotated)])
    found = probabilities(mcmc, jnp.concatenate([data.X_test, data.rotated, data.left_out]), method.alone)
    known, rotated, left_out = np.split(found, parts, axis=1)
    digits = np.asarray(data.y_test)
    scores = [score(*entry) for entry in zip(known, [digits] * len(known), rotated, left_out, strict=True)]
    row = {"method": label, "seed": seed, "rate": rate, "core_seconds": seconds}
    row |= {name: float(np.mean([entry[name] for entry in scores])) for name in MEASURES}
    for bins in ("confidence_bins", "entropy_bins"):
        row[bins] = {
            key: np.round(np.sum([entry[bins][key] for entry in scores], 0), 2).tolist() for key in scores[0][bins]
        }
    return row | {"errors": [finding.name for finding in diagnose(mcmc) if finding.severity == "error"]}


def best_rate(record: Record, label: str, length: tuple[int, int]) -> float | None:
    """The rate with the best validation score; ``None`` of a kernel that measures its step."""
    method = METHODS[label]
    # MAP networks alone are those of the ensemble.
    tuned = ENSEMBLE if label == SINGLE else label
    rows = [record.row(f"{tuned} / rate {rate:g}", partial(tried, tuned, length, rate)) for rate in method.rates]
    by = "alone" if method.alone else "together"
    return min(((row[by], row["rate"]) for row in rows if row[by] is not None), default=(0, None))[1]


def answers(label: str, length: tuple[int, int], rate: float | None) -> dict:
    """A row: how many rotated test digits the first seed takes for each class."""
    mcmc, _ = _fit(METHODS[label].make, rate, 0, length, False)
    found = probabilities(mcmc, split().rotated)[0].argmax(1)
    return {"answering": label, "counts": np.bincount(found, minlength=LEFT_OUT).tolist()}


def sets(label: str, length: tuple[int, int], rate: float | None) -> dict:
    """A row: how often the prediction sets of 90 % of the first seed hold the digit."""
    method, data = METHODS[label], split()
    mcmc, _ = _fit(method.make, rate, 0, length, False)
    found = probabilities(mcmc, data.X_test, method.alone)
    own = np.take_along_axis(found, np.asarray(data.y_test)[None, :, None], -1)
    above = np.where(found > own, found, 0.0).sum(-1)
    # The last class of a set is in it with the probability that completes the share.
    covered = np.clip((SHARE - above) / np.maximum(own[..., 0], np.finfo(float).tiny), 0.0, 1.0)
    return {"covering": label, "coverage": float(covered.mean()), "rows": len(data.y_test)}


def gradients(length: tuple[int, int]) -> dict:
    """A row: how many gradients the warmup of `SGNHT` takes for each particle."""
    data = split()
    kernel = METHODS[CHOSEN].make(None)
    counted = warmup_gradients(kernel, (data.X, data.y), {"subsample_size": BATCH}, length[0], PARTICLES)
    return {"counted": CHOSEN, "gradients": counted, "updates": NUM_STEPS * length[0]}


def measure(record: Record) -> None:
    enable_live_warnings(False)
    length = SHORT_LENGTH if record.short else LENGTH
    labels = [label for label in METHODS if label in SHORT] if record.short else list(METHODS)
    rates = {label: best_rate(record, label, length) for label in labels}
    for seed in range(1 if record.short else NUM_SEEDS):
        for label in labels:
            row = record.row(f"{label} / seed {seed}", partial(one, label, length, seed, rates[label]))
            print(label, seed, {key: row[key] for key in ("rate", *MEASURES, "core_seconds", "errors")}, flush=True)
            if seed == 0:
                record.row(f"sets of {label}", partial(sets, label, length, rates[label]))
            if seed == 0 and label in SHORT:
                record.row(f"rotated digits by {label}", partial(answers, label, length, rates[label]))
            jax.clear_caches()
    record.row(f"gradients of {CHOSEN}", partial(gradients, length))


def known_methods(record: Record) -> list[str]:
    return [label for label in METHODS if record.select(method=label)]


def _cell(values, digits: int) -> str:
    values = list(values)
    return pm(*(mean_and_error(values) if len(values) > 1 else (values[0], np.nan)), digits)


def tables(record: Record) -> str:
    lines, costs = [], []
    for label in known_methods(record):
        rows = record.select(method=label)
        cells = [_cell((100 * row["accuracy"] for row in rows), 1)]
        cells += [_cell((row[name] for row in rows), 3) for name in list(MEASURES)[1:]]
        lines.append([label, *cells])
        if label == SINGLE:
            continue
        tuning = record.select(tuned=label)
        rate = f"{rows[0]['rate']:g} of {tuning[0]['rate']:g} to {tuning[-1]['rate']:g}" if tuning else "measured"
        to_choose = f"{sum(row['core_seconds'] for row in tuning):.0f}" if tuning else ""
        costs.append([label, rate, to_choose, f"{np.mean([row['core_seconds'] for row in rows]):.0f}"])
    parts = [table(["on test rows", *MEASURES.values()], lines)]
    parts.append(table(["", "rate", "core-seconds to choose", "core-seconds to fit"], costs))
    if rates := [row for row in record.rows.values() if "tuned" in row]:
        found = [
            [row["tuned"], f"{row['rate']:g}", *(f"{row[key]:.3f}" for key in ("together", "alone"))] for row in rates
        ]
        parts.append(table(["NLL of validation rows", "rate", "of the mixture", "mean of each network alone"], found))
    if covering := [row for row in record.rows.values() if "covering" in row]:
        cells = [
            [row["covering"], pm(row["coverage"], (row["coverage"] * (1 - row["coverage"]) / row["rows"]) ** 0.5, 2)]
            for row in covering
        ]
        parts.append(table(["first seed", f"test digits in prediction sets of {100 * SHARE:.0f} %"], cells))
    if said := [row for row in record.rows.values() if "answering" in row]:
        head = ["rotated test digits taken for", *map(str, range(LEFT_OUT))]
        parts.append(table(head, [[row["answering"], *map(str, row["counts"])] for row in said]))
    for row in record.select(counted=CHOSEN):
        taken = f"{row['gradients']:,} gradients for each particle in {row['updates']:,} updates"
        parts.append(f"The warmup of {CHOSEN} takes {taken}.")
    return "\n\n".join(parts)


def _sum(record: Record, label: str, bins: str) -> dict[str, np.ndarray]:
    rows = record.select(method=label)
    return {key: np.sum([row[bins][key] for row in rows], 0) for key in rows[0][bins]}


def draw(record: Record):
    """Accuracy against top probability, and the entropy of known, rotated and unknown digits."""
    labels = [label for label in (CHOSEN, ENSEMBLE, SINGLE) if record.select(method=label)]
    shown = labels[:: len(labels) - 1]
    figure, axes = plt.subplots(1, 1 + len(shown), figsize=(4 * (1 + len(shown)), 3.6), layout="constrained")
    axes[0].plot([0, 1], [0, 1], color="grey", lw=0.8)
    for colour, label in zip(COLOURS, labels, strict=False):
        bins = _sum(record, label, "confidence_bins")
        share = bins["count"] / bins["count"].sum()
        # Bins with hardly any rows would only show chance.
        full = share > 0.005
        x, y = (bins[key][full] / bins["count"][full] for key in ("confidence", "right"))
        axes[0].plot(x, y, "o-", color=colour, ms=4, label=label.strip("`"))
    axes[0].set(xlabel="top probability", ylabel="share that is right", xlim=(0.2, 1.02), ylim=(0.2, 1.02))
    axes[0].legend(frameon=False, fontsize=8)
    for ax, label in zip(axes[1:], shown, strict=True):
        for colour, (name, counts) in zip(COLOURS, _sum(record, label, "entropy_bins").items(), strict=False):
            edges = np.linspace(0, np.log(LEFT_OUT), len(counts) + 1)
            ax.stairs(counts / counts.sum(), edges, color=colour, lw=1.5, label=GROUPS[name])
        ax.set(title=label.strip("`"), xlabel="entropy of the prediction", ylabel="share of images")
        ax.legend(frameon=False, fontsize=8)
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
    return figure


if __name__ == "__main__":
    run(__doc__, "digits", measure, tables, draw)
