"""Other samplers on the posteriors of real data: NUTS, nutpie and Laplace.

Each sampler gets the model as its user writes it, and one run in its own process of at most ten minutes (half an hour
for `gp_classification`); an unfinished run is scored by the draws it has. On `gp_classification` our kernels have 250 +
250 iterations, because an update takes twenty Cholesky factors of 400 rows. Seconds include compilation.

Errors are those of [real data](real.md). The ESS is that of the slowest mean and of the slowest squared distance from
the reference's mean. A gradient is one of all rows for one chain; for minibatches, the rows evaluated over all rows.
The total includes warmup, tuning and searches. nutpie has its own default settings; it and Laplace compute in double
precision. Our rows show the worst of three seeds. `flights_aircraft` has no reference.
"""

from functools import partial
import statistics

from benchmarks.harness.apart import apart
from benchmarks.harness.store import Record, placed, table
from benchmarks.problems import real

METHODS = "benchmarks.methods.real_peers"
LIMIT = {"gp_classification": 1800}
#: A process that has not stopped by itself, and runs of ours cannot, is ended when this many limits are over.
PATIENCE = 5

NUTS = ("NumPyro NUTS", "nuts", {}, "nothing")
DIAGONAL = ("nutpie, diagonal", "nutpie", {"low_rank": False}, "the potential and its gradient as functions")
LOW_RANK = ("nutpie, low rank", "nutpie", {"low_rank": True}, "the potential and its gradient as functions")
LAPLACE = ("Laplace", "laplace", {}, "the potential; the search for the mode is one's own")
KERNELS = ("SGLD", "SGHMC")
SHORTER = [
    (f"`{kernel}`, 250 + 250", "counted", {"kernel": kernel, "iterations": 250}, "nothing") for kernel in KERNELS
]
ESS = ("ess", "ess_square")
#: By how long they take; of which posterior, by which samplers.
PEERS = {
    **dict.fromkeys(("survival", "wine", "volatility"), (LAPLACE, DIAGONAL, LOW_RANK, NUTS)),
    **dict.fromkeys(("kin8nm", "bikes"), (LAPLACE, NUTS, DIAGONAL, LOW_RANK)),
    **dict.fromkeys(("protein", "flights", "flights_noncentered"), (LAPLACE, NUTS)),
    "flights_aircraft": (NUTS,),
    "gp_classification": (LAPLACE, DIAGONAL, LOW_RANK, NUTS, *SHORTER),
}


def measured(name, sampler, told, function, **arguments):
    """A row in a process of its own; the peer stops at its limit, and the process later."""
    limit = LIMIT.get(name, 600)
    found = apart(METHODS, function, PATIENCE * limit, name=name, limit=limit, **arguments)
    return {"problem": name, "sampler": sampler, "told": told} | found


def measure(record: Record) -> None:
    for name in PEERS:
        for kernel in KERNELS:
            if Record("real").select(problem=name, kernel=kernel):
                found = partial(apart, METHODS, "gradients_used", 1800, name=name, kernel=kernel)
                record.row(f"{name} / gradients of `{kernel}`", found)
        for sampler, function, arguments, told in PEERS[name]:
            key = f"{name} / {sampler}"
            record.row(key, partial(measured, name, sampler, told, function, **arguments))


def slowest(row):
    """The fewest effective draws, where all of them are known."""
    found = [row.get(what) for what in ESS]
    return min(value[0] for value in found) if all(found) else None


def stored(record, name):
    """Rows of ours that the study of real data has: the worst of its seeds, and the median of seconds."""
    rows = []
    for kernel in KERNELS:
        seeds = Record("real").select(problem=name, kernel=kernel)
        if not seeds:
            continue
        told = "rows of a minibatch" if name in real.MINIBATCHED else "nothing"
        row = {"sampler": f"`{kernel}`, worst of {len(seeds)}", "told": told}
        row |= {"seconds": statistics.median(seed["seconds"] for seed in seeds), "parameters": seeds[0]["parameters"]}
        for what in ("mean", "sd", "few mean", "few sd", "rhat", "ess"):
            if found := [seed[what] for seed in seeds if what in seed]:
                row[what] = (min if what == "ess" else max)(found)
        used = record.rows.get(f"{name} / gradients of `{kernel}`", {})
        rows.append(row | {key: used[key] for key in ("gradients", "in_all") if key in used})
    return rows


def line(name, row):
    """Of the first table."""
    what = "; ".join(row[key] for key in ("failed", "unfinished") if key in row)
    cells = [name, row["sampler"], str(row.get("parameters", "")), placed(row.get("seconds"), 0)]
    cells += [placed(row.get(key), 2) for key in ("mean", "sd", "few mean", "few sd")]
    # Draws from a Gaussian are independent.
    independent = row["sampler"] == "Laplace"
    cells += ["", "", ""] if independent else [placed(row.get("rhat"), 2), *(placed(row.get(k), 0) for k in ESS)]
    used = row.get("in_all")
    least = None if independent else slowest(row)
    cells += [placed(used, 0), placed(1000 * least / used if least and used else None, 1), row["told"]]
    return [*cells, what]


def tables(record: Record) -> str:
    lines = []
    for name in real.PROBLEMS:
        rows = stored(record, name)
        lines += [line(name, row) for row in (*rows, *record.select(problem=name)) if "sampler" in row]
    head = ["posterior", "sampler", "d", "seconds", "error of a mean, sd", "error of an sd", "of a mean, few levels"]
    head += ["of an sd, few levels", "R-hat", "least ESS", "least ESS of squares", "gradients in all"]
    return table([*head, "ESS per 1,000 gradients", "you supply, besides the model", "remark"], lines)
