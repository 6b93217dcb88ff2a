"""The paper's Tables 3 and 4: a network of 50 ReLU units on six UCI sets, by our samplers and by alternatives.

Every method makes 2,000 updates of 20 networks, with minibatches of 100 rows for each. A step set by hand is the one
with the highest log-likelihood on a fifth of the training rows, after a fit to the others; then all rows are fitted.
Samplers keep every tenth update of the last half. Kernels with default settings have 1,600 updates of warmup, keep
every tenth of 400, and also measure curvature and noise, which the table of costs counts. ± is a standard error over
splits.
"""

from collections.abc import Iterable
from functools import partial
import itertools
import json

import jax
import numpy as np

from benchmarks.harness.runs import mean_and_error
from benchmarks.harness.store import HERE, Record, plain, pm, table
from benchmarks.methods.networks import COUNTED, METHODS, SHOWN, UCI, UPDATES, Fits, gradients, one

#: Evaluates the model for each pair of points, so that a step is fitted in minutes.
SLOW = "NumPyro's SVGD"
SLOW_SPLITS = {"yacht": 8, **dict.fromkeys(set(UCI) - {"yacht"}, 3)}
CHOSEN, WITH_REFERENCES = COUNTED
MEASURES = {"log_likelihood": "log-likelihood", "rmse": "RMSE"}
#: What the paper printed, arXiv 1812.00071, Tables 3 and 4, on splits of the same sizes: (log-likelihood, RMSE).
QUOTED = json.loads((HERE / "references" / "paper.json").read_text())
#: What is compared on the same splits: the first should be better.
PAIRS = (
    ("SGLD+R", "SGLD"),
    ("SVGD, Adagrad", "20 networks, Adagrad"),
    *(("SVGD, Adagrad", peer) for peer in ("20 MAP networks", SLOW)),
    *((CHOSEN, peer) for peer in ("SGLD", "20 MAP networks", SLOW, "20 MAP networks, Laplace in the last layer")),
    ("`SGLDR(model)`", "`SGLD(model)`"),
    ("`SGHMCR(model)`", "`SGHMC(model)`"),
    *((WITH_REFERENCES, peer) for peer in (CHOSEN, "20 MAP networks", "SVGD, Adagrad")),
)


def measure(record: Record) -> None:
    for name in UCI:
        for label in COUNTED:
            record.row(f"{name} / gradients of {label}", partial(gradients, name, label))
        fits = Fits()
        for number, label in itertools.product(range(UCI[name]), METHODS):
            if label != SLOW or number < SLOW_SPLITS[name]:
                record.row(f"{name} / {number} / {label}", partial(one, fits, name, number, label))
        jax.clear_caches()


def values(record: Record, name: str, label: str, measure: str) -> dict[int, float | None]:
    """A measure of a method on a set, for each split."""
    return {row["split"]: row[measure] for row in record.select(data=name, method=label)}


def differences(record: Record, name: str, pair: tuple[str, str], measure: str) -> list[float]:
    """Of two methods on the splits that both have, positive where the first is better."""
    ours, theirs = (values(record, name, label, measure) for label in pair)
    sign = 1 if measure == "log_likelihood" else -1
    shared = [k for k in ours if ours[k] is not None and theirs.get(k) is not None]
    return [sign * (ours[k] - theirs[k]) for k in shared]


def known(record: Record, field: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if record.select(**{field: name})]


def digits(name: str, measure: str) -> int:
    return 4 if measure == "rmse" and name in ("naval-propulsion-plant", "kin8nm") else 3


def scores_table(record: Record, measure: str) -> str:
    sets = known(record, "data", SHOWN)
    splits = {name: len({row["split"] for row in record.select(data=name)}) for name in sets}
    means = {}
    for name in sets:
        for label in METHODS:
            found = values(record, name, label, measure).values()
            finite = [x for x in found if x is not None]
            if found:
                means[name, label] = (*mean_and_error(finite), len(finite), len(found))
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

    lines = [[plain(label), *(cell(name, label) for name in sets)] for label in known(record, "method", METHODS)]
    which = list(MEASURES).index(measure)
    for source, quoted in QUOTED.items():
        if set(sets) & set(quoted):
            lines.append([f"*{source}*", *(quoted[name][which] if name in quoted else "" for name in sets)])
    head = [MEASURES[measure], *(f"{SHOWN[name]} ({splits[name]} splits)" for name in sets)]
    return table(head, lines)


def differences_table(record: Record) -> str:
    sets = known(record, "data", SHOWN)
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
            cells += [f"{better} of {len(found)}", f"{enough} of {len(found)}"]
            lines.append([" and ".join(map(plain, pair)), title, *cells])
    head = ["gain of the first", "measure", *(SHOWN[name] for name in sets), "better", "within an error, or better"]
    return table(head, lines)


def calibration_table(record: Record) -> str:
    sets = known(record, "data", SHOWN)

    def cell(name, label):
        of_share = (values(record, name, label, f"coverage_{share}").values() for share in (50, 90))
        shares = [[x for x in found if x is not None] for found in of_share]
        return " · ".join(pm(*mean_and_error(found), 2) for found in shares) if all(shares) else "not run"

    lines = [[plain(label), *(cell(name, label) for name in sets)] for label in known(record, "method", METHODS)]
    return table(["coverage of intervals of 50% · 90%", *(SHOWN[name] for name in sets)], lines)


def costs_table(record: Record) -> str:
    lines = []
    for label in known(record, "method", METHODS):
        rows = record.select(method=label)
        if METHODS[label].steps:
            steps = sorted({row["step"] for row in rows})
            chosen = f"{steps[0]:g} to {steps[-1]:g}" if len(steps) > 1 else f"{steps[0]:g}"
            edge = f"{sum(row['at_edge'] for row in rows)} of {len(rows)}"
            taken = f"{UPDATES:,}, and {len(rows[0]['steps'])} times as many to choose the step"
        else:
            by = label if label in COUNTED else CHOSEN
            counts = sorted(row["gradients"] for row in record.select(counted=by))
            chosen, edge = "adapted", ""
            taken = f"{counts[0]:,} to {counts[-1]:,}, counted in {by}" if counts else "not counted"
            taken += ", and passes over all rows" if by == WITH_REFERENCES else ""
        seconds = (np.median([row.get(key, 0.0) for row in rows]) for key in ("tuning_seconds", "seconds"))
        lines.append([plain(label), chosen, edge, taken, " · ".join(f"{x:.1f}" for x in seconds)])
    head = ["costs", "step", "at the edge of those tried", "gradients for each point", "seconds, to choose · to fit"]
    return table(head, lines)


def tables(record: Record) -> str:
    parts = {title: scores_table(record, measure) for measure, title in MEASURES.items()}
    parts |= {"Differences on the same splits": differences_table(record), "Coverage": calibration_table(record)}
    parts["Costs"] = costs_table(record)
    return "\n\n".join(f"**{title}**\n\n{part}" for title, part in parts.items())
