"""How networks with nothing set compare with optimizers as the budget grows, from 2,000 updates to 20,000 and 200,000.

Sets, splits and methods are those of [the networks study](../docs/results.md#neural-networks-on-real-data), whose rows
are those of 2,000 updates here; 20,000 are made on the first three splits of each set, 200,000 on the first of the
four smaller ones. A peer's rate is chosen anew for each length, on validation rows. *Stopped early* has both chosen so:
the rate and the length, up to the one that heads the column. ± is a standard error over splits.

    NUMPYRO_REPULSION_DATA=... python -m benchmarks.studies.budgets [--short] [--again]
"""

from functools import partial

import jax

from benchmarks.harness.runs import mean_and_error
from benchmarks.harness.store import Record, pm, run, table
from benchmarks.methods.networks import Fits, one
from benchmarks.problems.posteriordb import data_folder
from benchmarks.problems.uci import SHOWN, UCI
from numpyro_repulsion import enable_live_warnings

NOTHING_SET = ("`SGNHT(model)`", "`SGHMC(model)`", "`SGHMCR(model)`")
PEERS = ("20 MAP networks", "SVGD, Adagrad")
SMALL = ("yacht", "bostonHousing", "wine-quality-red", "kin8nm")
#: What is compared on the same splits: the first should be better. The peers are also stopped early.
PAIRS = (
    ("`SGNHT(model)`", "20 MAP networks"),
    ("`SGNHT(model)`", "SVGD, Adagrad"),
    ("`SGHMCR(model)`", "`SGHMC(model)`"),
)
#: Updates, the sets, how many splits, and which methods.
PLAN = (
    (20_000, tuple(UCI), 3, NOTHING_SET + PEERS),
    (200_000, SMALL, 1, NOTHING_SET[:1] + PEERS),
)
SHORT = ((6_000, ("yacht",), 1, NOTHING_SET[:1] + PEERS[:1]),)
FIRST = 2000


def measured(fits: Fits, *arguments) -> dict:
    return one(fits, *arguments) | {"updates": fits.updates}


def measure(record: Record) -> None:
    enable_live_warnings(False)
    if data_folder() is None:
        print("NUMPYRO_REPULSION_DATA is not set: there is nothing to fit.")
        return
    for updates, sets, splits, labels in SHORT if record.short else PLAN:
        for name in sets:
            for label in labels:
                fits = Fits(updates)
                for number in range(splits):
                    fitted = partial(measured, fits, name, number, label, record.short)
                    record.row(f"{name} / {number} / {label} / {updates}", fitted)
                jax.clear_caches()


def budgets(record: Record) -> list[int]:
    return sorted({row["updates"] for row in record.rows.values()})


def all_rows(record: Record) -> dict[tuple, dict]:
    """The rows of all lengths by set, split, method and updates."""
    keys = ("data", "split", "method")
    stored = Record("networks", record.short).rows.values()
    first = [row | {"updates": FIRST} for row in stored if row.get("method") in NOTHING_SET + PEERS]
    return {(*(row[key] for key in keys), row["updates"]): row for row in (*first, *record.rows.values())}


def likelihood(rows: dict, name: str, number: int, label: str, updates: int, early: bool = False) -> float | None:
    """The test log-likelihood; of a peer that is stopped ``early`` at the length with the best validation rows."""
    if not early:
        return rows.get((name, number, label, updates), {}).get("log_likelihood")
    found = [row for (*key, length), row in rows.items() if key == [name, number, label] and length <= updates]
    if not found or max(row["updates"] for row in found) < updates:
        return None
    best = max(found, key=lambda row: max(x for x in row["validation"] if x is not None))
    return best["log_likelihood"]


def tables(record: Record) -> str:
    rows, lengths = all_rows(record), [FIRST, *budgets(record)]
    sets = [name for name in SHOWN if record.select(data=name)]
    methods = [(label, False) for label in NOTHING_SET] + [(label, early) for label in PEERS for early in (False, True)]

    def on(name, updates):
        return sorted({row["split"] for row in record.select(data=name, updates=updates)})

    parts = []
    for updates in lengths[1:]:
        here = [name for name in sets if on(name, updates)]
        for title, length in ((f"{FIRST:,} updates", FIRST), (f"{updates:,} updates", updates)):
            lines = []
            for label, early in methods:
                if early and length == FIRST:
                    continue
                cells = []
                for name in here:
                    found = [likelihood(rows, name, k, label, length, early) for k in on(name, updates)]
                    cells.append(pm(*mean_and_error(found)) if None not in found else "not run")
                if set(cells) != {"not run"}:
                    lines.append([label + (", stopped early" if early else ""), *cells])
            splits = f"log-likelihood, {title}, the splits of {updates:,}"
            parts.append(table([splits, *(f"{SHOWN[name]} ({len(on(name, updates))})" for name in here)], lines))
        lines = []
        for ours, theirs in PAIRS:
            for early in (False, True) if theirs in PEERS else (False,):
                cells, reached = [], 0
                for name in here:
                    pairs = [
                        (likelihood(rows, name, k, ours, updates), likelihood(rows, name, k, theirs, updates, early))
                        for k in on(name, updates)
                    ]
                    gains = [a - b for a, b in pairs if a is not None and b is not None]
                    if not gains:
                        cells.append("not run")
                        continue
                    mean, error = mean_and_error(gains)
                    reached += mean > -(error if error == error else 0.0)
                    cells.append(pm(mean, error))
                if set(cells) != {"not run"}:
                    lines.append([f"{ours} and {theirs}{', stopped early' if early else ''}", *cells, str(reached)])
        head = [
            f"gain of the first, {updates:,} updates",
            *(SHOWN[name] for name in here),
            "within an error, or better",
        ]
        parts.append(table(head, lines))
    return "\n\n".join(parts)


if __name__ == "__main__":
    run(__doc__, "budgets", measure, tables, None)
