"""Networks where they saw no rows: UCI sets without the middle third of one input, by samplers and by optimizers.

For each input in turn, the rows in the middle third of its values are left out of the fit and scored (Foong and others,
arXiv 1909.00719, call these gap splits). The network, its 2000 updates and the methods are those of
[the networks study](../docs/results.md#neural-networks-on-real-data). A peer's rate is the one that was chosen most
often on the standard splits of the set; no row of a gap chooses anything. ± is a standard error over the inputs.

    NUMPYRO_REPULSION_DATA=... python -m benchmarks.studies.gaps [--short] [--again]
"""

from collections import Counter
from functools import partial

import jax
from jax import random
import jax.numpy as jnp
import numpy as np

from benchmarks.harness.runs import mean_and_error
from benchmarks.harness.store import Record, pm, run, table
from benchmarks.methods.networks import METHODS
from benchmarks.problems.posteriordb import data_folder
from benchmarks.problems.uci import gap, in_units, num_inputs, score, split
from numpyro_repulsion import enable_live_warnings

SETS = {"yacht": "yacht", "bostonHousing": "Boston", "wine-quality-red": "wine", "kin8nm": "kin8nm"}
NOTHING_SET = ("`SGNHT(model)`", "`SGLD(model)`", "`SGLDR(model)`", "`SVGD(model)`, Adagrad")
PEERS = ("20 MAP networks", "SVGD, Adagrad")
LABELS = (*NOTHING_SET, *PEERS)
#: Which differences are shown.
PAIRS = (*((label, "20 MAP networks") for label in NOTHING_SET), ("`SGLDR(model)`", "`SGLD(model)`"))


def usual_step(name: str, label: str) -> float:
    """The step chosen most often on the standard splits; 0 where there is nothing to choose."""
    found = Counter(row["step"] for row in Record("networks", short=False).select(data=name, method=label))
    return 0.0 if label in NOTHING_SET else found.most_common(1)[0][0]


def program(label: str):
    """A fit and its scores, on the left-out rows and on those of the fit."""

    @jax.jit
    def fitted(step, key, X, y, X_test, y_test):
        draws = METHODS[label].fit(step, key, X, y)
        return score(draws, X_test, y_test), score(draws, X, y)

    return fitted


def scored(fit, name: str, number: int | None, label: str) -> dict:
    """A row: one input's gap, or, with ``None``, the first standard split for comparison."""
    data = split(name, 0) if number is None else gap(name, number)
    arrays = [jnp.asarray(x, jnp.float32) for x in data[:4]]
    step = usual_step(name, label)
    left_out, fitted = (
        {key: float(value) for key, value in in_units(found, data.unit).items()}
        for found in fit(jnp.float32(step), random.key(0 if number is None else number), *arrays)
    )
    row = {"data": name, "input": number, "method": label, "step": step, "fitted": fitted["log_likelihood"]} | left_out
    print(name, number, label, {k: round(v, 3) for k, v in left_out.items()}, flush=True)
    return row


def measure(record: Record) -> None:
    enable_live_warnings(False)
    if data_folder() is None:
        print("NUMPYRO_REPULSION_DATA is not set: there is nothing to fit.")
        return
    for name in list(SETS)[: 1 if record.short else None]:
        for label in NOTHING_SET[:1] + PEERS[:1] if record.short else LABELS:
            fit = program(label)
            for number in range(num_inputs(name)):
                record.row(f"{name} / {number} / {label}", partial(scored, fit, name, number, label))
            jax.clear_caches()


def differences(record: Record, name: str, pair: tuple[str, str]) -> list[float]:
    first, second = (
        {row["input"]: row["log_likelihood"] for row in record.select(data=name, method=label)} for label in pair
    )
    return [first[k] - second[k] for k in first if k in second]


def tables(record: Record) -> str:
    sets = [name for name in SETS if record.select(data=name)]
    lines = []
    for label in LABELS:
        cells = []
        for name in sets:
            rows = record.select(data=name, method=label)
            if not rows:
                cells.append("not run")
                continue
            likelihoods = [row["log_likelihood"] for row in rows]
            covered = np.mean([row["coverage_90"] for row in rows])
            fitted = np.mean([row["fitted"] for row in rows])
            cells.append(
                f"{pm(*mean_and_error(likelihoods), 2)} · {np.median(likelihoods):.2f} · {covered:.2f} · {fitted:.2f}"
            )
        lines.append([label, *cells])
    what = "log-likelihood: mean · median · share of rows in 90 % intervals · mean on the rows of the fit"
    head = [what, *(SETS[name] for name in sets)]
    pairs = []
    for pair in PAIRS:
        cells = []
        for name in sets:
            found = differences(record, name, pair)
            better = sum(x > 0 for x in found)
            cells.append(f"{np.median(found):.3f} · {better} of {len(found)}" if found else "not run")
        pairs.append([f"{pair[0]} and {pair[1]}", *cells])
    second = ["median gain of the first · inputs on which it is better", *(SETS[name] for name in sets)]
    return table(head, lines) + "\n\n" + table(second, pairs)


if __name__ == "__main__":
    run(__doc__, "gaps", measure, tables, None)
