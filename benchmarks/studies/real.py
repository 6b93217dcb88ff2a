"""Real data, default settings: `MCMC(SGLD(model), 1000, 1000, num_chains=20)` and `SGHMC` on ten posteriors.

Errors are measured against long NUTS runs: the largest error of a mean in posterior standard deviations, the largest
relative error of a standard deviation, the largest R-hat and the lowest ESS of any scalar, and the findings of
`diagnose`. Seconds are processor time of the whole run, with compilation. References come from equivalent models,
reparameterized by hand.
"""

from functools import partial

from benchmarks.harness.store import Record, placed, table
from benchmarks.methods.real_peers import OURS, ours
from benchmarks.problems import real


def measure(record: Record) -> None:
    for seed in range(3):
        for name in real.PROBLEMS:
            for kernel in OURS:
                record.row(f"{name} / {kernel} / {seed}", partial(ours, name, kernel, seed))


def tables(record: Record) -> str:
    lines = []
    for row in record.rows.values():
        cells = [row["problem"], row["kernel"], str(row["seed"]), str(row["parameters"]), f"{row['seconds']:.0f}"]
        cells += [f"{row[what][0]:.{digits}f} ({row[what][1]})" for what, digits in (("rhat", 2), ("ess", 0))]
        cells += [placed(row.get(what), 2) for what in ("mean", "sd", "few mean", "few sd")]
        lines.append([*cells, ", ".join(row["findings"])])
    head = ["posterior", "kernel", "seed", "d", "seconds", "R-hat", "least ESS", "error of a mean, sd"]
    return table([*head, "error of an sd", "of a mean, few levels", "of an sd, few levels", "findings"], lines)
