"""The paper's Tables 3 and 4: a network of 50 ReLU units on six UCI sets, by our samplers and by what else there is.

Every method makes 2000 updates with minibatches of 100 rows for each of 20 points; kernels with nothing set measure
curvature and noise besides, which is counted in the last table. A step set by hand is the one with the
highest log-likelihood on a fifth of the training rows, after a fit to the others; then all are fitted. Samplers keep
every tenth update of the last half; the kernels with nothing set have 1600 updates of warmup and keep every tenth of
400. ± is a standard error over splits.

The short form has two splits of yacht, fewer steps and not all methods. Without the data folder either form runs on
scikit-learn's diabetes set, with splits of its own.

    NUMPYRO_REPULSION_DATA=... python -m benchmarks.studies.networks [--short] [--again]
"""

from functools import partial

import jax
from jax import random
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from benchmarks.harness.runs import mean_and_error, warmup_gradients
from benchmarks.harness.store import Record, pm, run, table
from benchmarks.methods.networks import (
    BATCH,
    METHODS,
    NUM_STEPS,
    PARTICLES,
    RATE_CHOSEN,
    UPDATES,
    WARMUP,
    Fits,
    network,
    one,
)
from benchmarks.problems.posteriordb import data_folder
from benchmarks.problems.uci import OWN, SHOWN, UCI, split, widths
from numpyro_repulsion import SGNHT, SVGD, SVRG, enable_live_warnings
from numpyro_repulsion.plots.style import COLOURS

#: Evaluates the model for each pair of points, so that a step is fitted in minutes.
SLOW = "NumPyro's SVGD"
SLOW_SPLITS = {"yacht": 8, **dict.fromkeys(set(UCI) - {"yacht"}, 3)}
CHOSEN = "`SGNHT(model)`"
#: The same kernel, where each particle has references of its own.
WITH_REFERENCES = "`SGNHT(model, gradient=SVRG())`"
#: An optimizer whose rate a tournament chooses.
TOURNAMENT = "`SVGD(model)`, Adagrad"
#: The kernels whose gradients are counted, and how many an update takes after warmup.
COUNTED = {
    CHOSEN: (SGNHT(network), 1),
    WITH_REFERENCES: (SGNHT(network, gradient=SVRG()), 2),
    TOURNAMENT: (SVGD(network, dynamics=RATE_CHOSEN), 1),
}
#: Not in the short form.
LONG = (
    *(SLOW, "SGLD+R, off for the last half", "SGHMC+R", "`SGLDR(model)`", "`SGHMC(model)`", "`SGHMCR(model)`"),
    WITH_REFERENCES,
    TOURNAMENT,
    *("MC dropout of 1 %, 20 networks", "MC dropout of 5 %, 20 networks"),
    *("20 MAP networks, Laplace in the last layer", "BlackJAX's SGHMC"),
)
MEASURES = {"log_likelihood": "log-likelihood", "rmse": "RMSE"}
#: What others published, on splits of the same sizes: (log-likelihood, RMSE). The paper is arXiv 1812.00071, Tables 3
#: and 4; PBP is arXiv 1502.05336, SVGD arXiv 1608.04471; figures of these two were not checked in the originals.
QUOTED = {
    "SGLD, the paper": {
        "bostonHousing": ("−2.551 ± 0.018", "2.392 ± 0.018"),
        "kin8nm": ("0.826 ± 0.005", "0.104 ± 0.001"),
        "naval-propulsion-plant": ("3.379 ± 0.011", "0.008 ± 0.000"),
        "protein-tertiary-structure": ("−2.991 ± 0.000", "4.810 ± 0.003"),
        "wine-quality-red": ("−0.765 ± 0.008", "0.522 ± 0.004"),
        "yacht": ("−1.211 ± 0.020", "0.942 ± 0.015"),
    },
    "SGLD+R, the paper": {
        "bostonHousing": ("−2.575 ± 0.007", "2.295 ± 0.017"),
        "kin8nm": ("0.831 ± 0.006", "0.104 ± 0.001"),
        "naval-propulsion-plant": ("3.428 ± 0.019", "0.008 ± 0.000"),
        "protein-tertiary-structure": ("−2.987 ± 0.001", "4.794 ± 0.003"),
        "wine-quality-red": ("−0.750 ± 0.007", "0.514 ± 0.004"),
        "yacht": ("−1.172 ± 0.026", "0.894 ± 0.029"),
    },
    "PBP, Hernández-Lobato and Adams (2015)": {
        "bostonHousing": ("−2.57", "3.01"),
        "kin8nm": ("0.90", "0.10"),
        "naval-propulsion-plant": ("3.73", "0.01"),
        "protein-tertiary-structure": ("−2.97", "4.73"),
        "wine-quality-red": ("−0.97", "0.64"),
        "yacht": ("−1.63", "1.02"),
    },
    "SVGD, Liu and Wang (2016)": {
        "bostonHousing": ("−2.50", "2.96"),
        "kin8nm": ("0.98", "0.090"),
        "naval-propulsion-plant": ("4.09", "0.004"),
        "protein-tertiary-structure": ("−2.95", "4.61"),
        "wine-quality-red": ("−0.93", "0.61"),
        "yacht": ("−1.23", "0.86"),
    },
}
#: A legend where no point is.
ABOVE = {"frameon": False, "fontsize": 8, "loc": "lower left", "bbox_to_anchor": (0.0, 1.0), "ncols": 2}
#: Of the kernels with nothing set the one with the highest log-likelihood on the validation rows of splits 10 to 14 of
#: yacht and Boston, before any test row was scored.
#: What is compared on the same splits: the first should be better.
PAIRS = (
    ("SGLD+R", "SGLD"),
    ("SGLD+R, off for the last half", "SGLD+R"),
    ("SVGD, Adagrad", "20 networks, Adagrad"),
    *(("SVGD, Adagrad", peer) for peer in ("20 MAP networks", SLOW)),
    *((CHOSEN, peer) for peer in ("SGLD", "20 MAP networks", SLOW)),
    *((CHOSEN, peer) for peer in LONG[-4:]),
    ("`SGLDR(model)`", "`SGLD(model)`"),
    ("`SGHMCR(model)`", "`SGHMC(model)`"),
    *((WITH_REFERENCES, peer) for peer in (CHOSEN, "20 MAP networks", "SVGD, Adagrad")),
    *((TOURNAMENT, peer) for peer in ("SVGD, Adagrad", "20 MAP networks")),
)


def plan(short: bool) -> list[tuple[str, int]]:
    """Sets and splits, in an order that makes the first ones useful."""
    if data_folder() is None:
        return [(name, number) for name in OWN for number in range(2 if short else OWN[name])]
    if short:
        return [("yacht", number) for number in range(2)]
    parts = ((0, 5), (5, 20))
    return [(name, k) for first, last in parts for name in UCI for k in range(first, min(last, UCI[name]))]


def wide(name: str) -> dict:
    """A row: what makes intervals wide on a set's first split."""
    X, y, X_test, y_test, _ = (jnp.asarray(x, jnp.float32) for x in split(name, 0))
    draws = jax.jit(partial(METHODS[CHOSEN].fit, 0.0))(random.key(0), X, y)
    found = {key: float(value) for key, value in widths(draws, X_test, y_test).items()}
    return {"data": name, "split": 0, "fitted": CHOSEN} | found


def gradients(name: str, label: str) -> dict:
    """A row: how many gradients a kernel with nothing set takes for each point, on a set's first split."""
    data = split(name, 0)
    X, y = (jnp.asarray(x, jnp.float32) for x in (data.X, data.y))
    kernel, afterwards = COUNTED[label]
    in_warmup = warmup_gradients(kernel, (X, y), {"subsample_size": BATCH}, WARMUP, PARTICLES)
    left = (UPDATES - NUM_STEPS * WARMUP) * afterwards
    return {"data": name, "split": 0, "counted": label, "gradients": in_warmup + left}


def measure(record: Record) -> None:
    enable_live_warnings(False)
    if data_folder() is None:
        print("NUMPYRO_REPULSION_DATA is not set: scikit-learn's diabetes set takes the place of UCI's.")
    fits, current = Fits(), None
    splits = plan(record.short)
    for name in () if record.short else dict(splits):
        record.row(f"{name} / widths", partial(wide, name))
        for label in COUNTED:
            record.row(f"{name} / gradients of {label}", partial(gradients, name, label))
    todo = [(name, number, label) for name, number in splits for label in METHODS if label != SLOW]
    todo += [(name, number, SLOW) for name, number in splits if number < SLOW_SPLITS.get(name, 0)]
    for name, number, label in todo:
        if record.short and label in LONG:
            continue
        if name != current:
            fits, current = Fits(), name
            jax.clear_caches()
        key = f"{name} / {number} / {label}"
        record.row(key, partial(one, fits, name, number, label, record.short))


def values(record: Record, name: str, label: str, measure: str) -> dict[int, float | None]:
    """A measure of a method on a set, for each split."""
    return {row["split"]: row[measure] for row in record.select(data=name, method=label)}


def differences(record: Record, name: str, pair: tuple[str, str], measure: str) -> list[float]:
    """Of two methods on the splits that both have, positive where the first is better."""
    ours, theirs = (values(record, name, label, measure) for label in pair)
    sign = 1 if measure == "log_likelihood" else -1
    shared = [k for k in ours if ours[k] is not None and theirs.get(k) is not None]
    return [sign * (ours[k] - theirs[k]) for k in shared]


def known_sets(record: Record) -> list[str]:
    return [name for name in SHOWN if record.select(data=name)]


def known_methods(record: Record) -> list[str]:
    return [label for label in METHODS if record.select(method=label)]


def digits(name: str, measure: str) -> int:
    return 4 if measure == "rmse" and name in ("naval-propulsion-plant", "kin8nm") else 3


def scores_table(record: Record, measure: str) -> str:
    sets = known_sets(record)
    splits = {name: len({row["split"] for row in record.select(data=name)}) for name in sets}
    means = {}
    for name in sets:
        for label in METHODS:
            found = values(record, name, label, measure).values()
            finite = [x for x in found if x is not None]
            if found:
                means[name, label] = (
                    *(mean_and_error(finite) if finite else (np.nan, np.nan)),
                    len(finite),
                    len(found),
                )
    sign = 1 if measure == "log_likelihood" else -1

    def cell(name, label):
        if (name, label) not in means:
            return "not run"
        mean, error, finite, total = means[name, label]
        text = pm(mean, error, digits(name, measure)) if finite else "none finite"
        # Beside those that have all splits.
        rivals = [sign * m for (other, _), (m, _, n, _) in means.items() if other == name and n == splits[name]]
        text = f"**{text}**" if finite == splits[name] and sign * mean == max(rivals) else text
        text += f" ({total} split{'s' * (total > 1)})" if total < splits[name] else ""
        return text + (f" ({total - finite} not finite)" if finite < total else "")

    lines = [[label, *(cell(name, label) for name in sets)] for label in known_methods(record)]
    which = list(MEASURES).index(measure)
    for source, quoted in QUOTED.items():
        if set(sets) & set(quoted):
            lines.append([f"*{source}*", *(quoted[name][which] if name in quoted else "" for name in sets)])
    head = [MEASURES[measure], *(f"{SHOWN[name]} ({splits[name]} splits)" for name in sets)]
    return table(head, lines)


def differences_table(record: Record) -> str:
    sets = known_sets(record)
    lines = []
    for pair in PAIRS:
        for measure, title in MEASURES.items():
            found = {name: differences(record, name, pair, measure) for name in sets}
            found = {name: mean_and_error(numbers) for name, numbers in found.items() if numbers}
            if not found:
                continue
            cells = [pm(*found[name], digits(name, measure)) if name in found else "not run" for name in sets]
            better = sum(mean > 0 for mean, _ in found.values())
            enough = sum(mean > -error for mean, error in found.values())
            lines.append(
                [f"{pair[0]} and {pair[1]}", title, *cells, f"{better} of {len(found)}", f"{enough} of {len(found)}"]
            )
    head = ["gain of the first", "", *(SHOWN[name] for name in sets), "better", "within an error, or better"]
    return table(head, lines)


def calibration_table(record: Record) -> str:
    sets = known_sets(record)

    def cell(name, label):
        shares = [
            [x for x in values(record, name, label, f"coverage_{share}").values() if x is not None]
            for share in (50, 90)
        ]
        return " · ".join(pm(*mean_and_error(found), 2) for found in shares) if all(shares) else "not run"

    lines = [[label, *(cell(name, label) for name in sets)] for label in known_methods(record)]
    return table(["in the intervals of 50 % · 90 %", *(SHOWN[name] for name in sets)], lines)


def widths_table(record: Record) -> str:
    rows = record.select(fitted=CHOSEN)
    keys = ("noise", "each", "mean", "apart", "median_over_rms")
    lines = [[SHOWN[row["data"]], *(f"{row[key]:.3f}" for key in keys)] for row in rows]
    head = [f"{CHOSEN}, first split, in deviations of the responses", "noise", "error of each network", "of their mean"]
    return table([*head, "how far apart they are", "median error over root mean square (Gaussian: 0.674)"], lines)


def costs_table(record: Record) -> str:
    lines = []
    for label in known_methods(record):
        rows = record.select(method=label)
        if METHODS[label].steps:
            steps = sorted({row["step"] for row in rows})
            chosen = f"{steps[0]:g} to {steps[-1]:g}" if len(steps) > 1 else f"{steps[0]:g}"
            edge = f"{sum(row['at_edge'] for row in rows)} of {len(rows)}"
            taken = f"{UPDATES:,}, and {len(rows[0]['steps'])} times as many to choose the step"
        else:
            by = label if label in COUNTED else CHOSEN
            counts = sorted(row["gradients"] for row in record.select(counted=by))
            chosen, edge = "measured", ""
            taken = f"{counts[0]:,} to {counts[-1]:,}, counted in {by}" if counts else "not counted"
            taken += ", and passes over all rows" if by == WITH_REFERENCES else ""
        seconds = " · ".join(
            f"{np.median([row.get(key, 0.0) for row in rows]):.1f}" for key in ("tuning_seconds", "seconds")
        )
        lines.append([label, chosen, edge, taken, seconds])
    head = ["", "step", "at the edge of those tried", "gradients for each point", "seconds, to choose · to fit"]
    return table(head, lines)


def tables(record: Record) -> str:
    where = "scikit-learn's diabetes set, splits of our own" if "diabetes" in known_sets(record) else "UCI sets"
    parts = [f"{where}; ± is a standard error over splits."]
    parts += [scores_table(record, measure) for measure in MEASURES]
    parts += [differences_table(record), calibration_table(record)]
    parts += [widths_table(record)] if record.select(fitted=CHOSEN) else []
    return "\n\n".join([*parts, costs_table(record)])


def draw(record: Record):
    """What repulsion gains on the same splits, and how often responses lie in predictive intervals."""
    sets = known_sets(record)
    figure, axes = plt.subplots(1, 3, figsize=(13, 3.8), layout="constrained", width_ratios=(1, 1, 1.4))
    pairs = {PAIRS[0]: "all the way", ("SGLD+R, off for the last half", "SGLD"): "off for the last half"}
    pairs = {pair: label for pair, label in pairs.items() if record.select(method=pair[0])}
    for ax, (measure, title) in zip(axes[:2], MEASURES.items(), strict=True):
        for k, (pair, label) in enumerate(pairs.items()):
            found = np.array([mean_and_error(differences(record, name, pair, measure)) for name in sets])
            if measure == "rmse":
                # Each set has a unit of its own.
                base = [mean_and_error(x for x in values(record, name, "SGLD", measure).values() if x) for name in sets]
                found *= 100 / np.array(base)[:, :1]
            style = {"fmt": "o", "color": COLOURS[k], "capsize": 3, "label": label}
            ax.errorbar(found[:, 0], np.arange(len(sets)) + 0.2 * k - 0.1, xerr=found[:, 1], **style)
        ax.axvline(0, color="grey", lw=0.8)
        if measure == "rmse":
            # Of some sets by a thousandth, of others by a multiple.
            ax.set_xscale("symlog", linthresh=1)
        ax.set_yticks(range(len(sets)), [SHOWN[name] for name in sets])
        ax.set_ylim(len(sets) - 0.5, -0.5)
        ax.set_xlabel(f"gain of SGLD+R over SGLD, {title}" + (", % of SGLD's" if measure == "rmse" else ""))
    axes[0].legend(**ABOVE)
    labels = known_methods(record)
    for k, share in enumerate((50, 90)):
        for i, label in enumerate(labels):
            found = [values(record, name, label, f"coverage_{share}").values() for name in sets]
            means = [mean_and_error(x for x in some if x is not None)[0] for some in found]
            axes[2].plot(means, [i] * len(means), "|", color=COLOURS[k], ms=9)
            axes[2].plot(np.nanmean(means), i, "o", color=COLOURS[k], label=f"{share} %" if i == 0 else None)
        axes[2].axvline(share / 100, color=COLOURS[k], lw=0.8, ls="--")
    axes[2].set_yticks(range(len(labels)), [label.replace("`", "") for label in labels])
    axes[2].set_ylim(len(labels) - 0.5, -0.5)
    axes[2].set_xlabel("share of responses in predictive intervals (bars: sets, dots: their mean)")
    axes[2].legend(**ABOVE)
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
    return figure


if __name__ == "__main__":
    run(__doc__, "networks", measure, tables, draw)
