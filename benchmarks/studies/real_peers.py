"""Other samplers on the posteriors of real data: what NUTS, HMCECS, BlackJAX's SGLD, nutpie and Laplace make of them.

Each has the model as its user writes it, and a run of its own, in a process of its own that may take ten minutes (half
an hour for `gp_classification`, and three times as long for SGLD's grid); what is not finished then is scored by the
draws it has. Two thousand iterations of ours on `gp_classification` take hours: there they are 250 + 250. Seconds
include compilation.
Errors are those of [real data](#real-data), and effective draws those of the slowest mean and of the slowest squared
distance from the reference's mean, on which the standard deviation depends. A gradient is one of all rows for one
chain: of minibatches, the rows looked at over all rows. "In all" are those of warmup, tuning and searches too.
HMCECS and SGLD are for minibatches: they do not apply to models without. HMCECS expands about a point that 3,000 steps
of Adam on minibatches find (`AutoDelta`), and SGLD's control variates too. SGLD's step is the best of a grid of powers
of ten and of the half powers beside the best, the one with the smallest worst error of a mean: only the reference knows
it, so no user does, and its seconds are those of that step alone. nutpie's settings are its own; it and Laplace compute
in double precision. Our rows are those of the study of real data, at the worst of its seeds; it stored no effective
draws of squares. `flights_aircraft` has no reference.

The second table is about d of 300 to 1,000 and all rows: effective draws for each gradient, of ours and of nutpie. An
ensemble's effective draws come from `ensemble_ess` and, beside it, from NumPyro's `effective_sample_size`, which takes
particles for chains.

    NUMPYRO_REPULSION_DATA=... python -m benchmarks.studies.real_peers [--short] [--again]
"""

from functools import partial
import statistics

from benchmarks.harness.apart import apart
from benchmarks.harness.store import Record, run, table
from benchmarks.problems import real

METHODS = "benchmarks.methods.real_peers"
LIMIT = {"gp_classification": 1800}
#: A process that has not stopped by itself, and runs of ours cannot, is ended when this many limits are over.
PATIENCE = 5

NUTS = ("NumPyro NUTS", "nuts", {}, "nothing")
HMCECS = (
    "NumPyro HMCECS",
    "hmcecs",
    {},
    "a point to expand about (Adam's steps and rates), rows of a minibatch, blocks",
)
SGLD = (
    "BlackJAX SGLD, control variates",
    "sgld_control_variates",
    {},
    "the step (best of a grid, by the reference), such a point, rows of a minibatch; the loop is one's own",
)
DIAGONAL = ("nutpie, diagonal", "nutpie", {"low_rank": False}, "the potential and its gradient as functions")
LOW_RANK = ("nutpie, low rank", "nutpie", {"low_rank": True}, "the potential and its gradient as functions")
LAPLACE = ("Laplace", "laplace", {}, "the potential; the search for the mode is one's own")


KERNELS = ("SGLD", "SGHMC")


def ours(kernel, **settings):
    length = settings.get("iterations", 1000)
    return (f"`{kernel}`, {length} + {length}", "ours", {"kernel": kernel} | settings, "nothing")


#: By how long they take; of which posterior, by which samplers.
PEERS = {
    "survival": (LAPLACE, DIAGONAL, LOW_RANK, NUTS),
    "wine": (LAPLACE, DIAGONAL, LOW_RANK, NUTS),
    "routes": (DIAGONAL, LOW_RANK, ours("SGLD"), ours("SGHMC")),
    "volatility_500": (DIAGONAL, LOW_RANK, ours("SGLD"), ours("SGHMC")),
    "volatility": (LAPLACE, DIAGONAL, LOW_RANK, NUTS, ours("SGLD"), ours("SGHMC")),
    "kin8nm": (LAPLACE, NUTS, DIAGONAL, LOW_RANK, HMCECS, SGLD),
    "bikes": (LAPLACE, NUTS, DIAGONAL, LOW_RANK, HMCECS, SGLD),
    "kin8nm, all rows": (ours("SGLD"), ours("SGHMC")),
    "protein": (LAPLACE, NUTS, HMCECS, SGLD),
    "flights": (LAPLACE, HMCECS, SGLD, NUTS),
    "flights_noncentred": (LAPLACE, HMCECS, SGLD, NUTS),
    "flights_aircraft": (NUTS,),
    # An update takes twenty Cholesky factors of 400 rows.
    "gp_classification": (
        LAPLACE,
        DIAGONAL,
        LOW_RANK,
        NUTS,
        ours("SGLD", iterations=250),
        ours("SGHMC", iterations=250),
    ),
}
SHORT = ("survival", "wine")
#: Posteriors of the second table, and under which other names their rows are stored.
FULL_DATA = {
    "routes": ("routes",),
    "volatility_500": ("volatility_500",),
    "volatility": ("volatility",),
    "kin8nm": ("kin8nm", "kin8nm, all rows"),
    "gp_classification": ("gp_classification",),
}


def measured(name, sampler, told, function, **arguments):
    """A row in a process of its own; the peer stops at its limit, and the process later."""
    limit = LIMIT.get(name, 600)
    found = apart(
        METHODS,
        function,
        PATIENCE * limit,
        name=name,
        limit=limit,
        **arguments,
    )
    return {"problem": name, "sampler": sampler, "told": told} | found


def counted(name, kernel):
    """The name of the row with the gradients that ours took."""
    return f"{name} / gradients of `{kernel}`"


def measure(record: Record) -> None:
    for name in SHORT if record.short else PEERS:
        for kernel in KERNELS:
            if Record("real", short=False).select(problem=name, kernel=kernel):
                found = partial(apart, METHODS, "gradients_used", 1800, name=name, kernel=kernel)
                record.row(counted(name, kernel), found)
        for sampler, function, arguments, told in PEERS[name]:
            key = f"{name} / {sampler}"
            row = record.row(key, partial(measured, name, sampler, told, function, **arguments))
            print(key, {k: v for k, v in row.items() if k not in ("problem", "sampler", "told", "date", "cores")})
            print(flush=True)


def cell(value, digits):
    """A number, or one with its site."""
    if value is None:
        return ""
    number, site = value if isinstance(value, list | tuple) else (value, "")
    return f"{number:,.{digits}f}" + (f" ({site})" if site else "")


def slowest(row, which=("ess", "ess_square")):
    """The fewest effective draws, where all of them are known."""
    found = [row.get(what) for what in which]
    return min(value[0] for value in found) if all(found) else None


def stored(record, name):
    """Rows of ours that the study of real data has: the worst of its seeds, and the median of seconds."""
    rows = []
    for kernel in KERNELS:
        seeds = Record("real", short=False).select(problem=name, kernel=kernel)
        if not seeds:
            continue
        row = {"sampler": f"`{kernel}`, worst of {len(seeds)}", "told": "nothing", "draws": [20, 1000]}
        row["seconds"] = statistics.median(seed["seconds"] for seed in seeds)
        row["parameters"] = seeds[0]["parameters"]
        for what in ("mean", "sd", "few mean", "few sd", "rhat", "ess"):
            if found := [seed[what] for seed in seeds if what in seed]:
                row[what] = (min if what == "ess" else max)(found)
        if real.load(name).subsample_size:
            row["told"] = "rows of a minibatch"
        used = record.rows.get(counted(name, kernel), {})
        rows.append(row | {key: used[key] for key in ("gradients", "in_all") if key in used})
    return rows


def line(name, row):
    """Of the first table."""
    what = "; ".join(row[key] for key in ("failed", "unfinished") if key in row)
    cells = [name, row["sampler"], str(row.get("parameters", "")), cell(row.get("seconds"), 0)]
    cells += [cell(row.get(key), 2) for key in ("mean", "sd", "few mean", "few sd")]
    # Draws from a Gaussian are independent.
    independent = row["sampler"] == "Laplace"
    cells += ["", "", ""] if independent else [cell(row.get("rhat"), 2), *(cell(row.get(k), 0) for k in ESS)]
    used = row.get("in_all")
    least = None if independent else slowest(row)
    cells += [cell(used, 0), cell(1000 * least / used if least and used else None, 1), row["told"]]
    if "step" in row:
        what = "; ".join(filter(None, (f"step {row['step']:.1g}", what)))
    if "accepted" in row:
        what = "; ".join(filter(None, (f"{100 * row['accepted']:.0f} % of blocks accepted", what)))
    return [*cells, what]


ESS = ("ess", "ess_square")
HEAD = (
    *("posterior", "sampler", "d", "seconds", "mean", "sd", "mean, few levels", "sd, few levels", "R-hat"),
    *("effective draws", "of squares", "gradients in all", "effective draws in 1000 of them", "has to be told", ""),
)


def peers_table(record):
    lines = []
    for name in SHORT if record.short else real.NAMES:
        rows = stored(record, name)
        mine = {row["sampler"].split(",")[0] for row in rows}
        for row in record.select(problem=name):
            if row["sampler"].split(",")[0] not in mine:
                rows.append(row)
        lines += [line(name, row) for row in rows]
    return table(HEAD, lines)


def full_data_table(record):
    lines = []
    for name, stored_as in FULL_DATA.items():
        rows = [row for other in stored_as for row in record.select(problem=other)]
        for row in rows:
            is_ours = row["sampler"].startswith("`")
            if not (is_ours or row["sampler"].startswith("nutpie")):
                continue
            kinds = {"": ESS}
            if is_ours:
                kinds = {"`ensemble_ess`": ("ensemble", "ensemble_square"), "`effective_sample_size`": ESS}
            for by, (mean, square) in kinds.items():
                unknown = max(row.get(f"{what}_unknown", 0) for what in (mean, square))
                # The slowest are among the unknown ones.
                least = None if unknown else slowest(row, (mean, square))
                cells = [name, row["sampler"], by, str(row.get("parameters", ""))]
                cells += [cell(row.get(key), 2) for key in ("mean", "sd", "rhat")]
                cells += [cell(row.get(key), 0) for key in (mean, square)]
                for used in ("gradients", "in_all"):
                    known = least and row.get(used)
                    cells += [cell(row.get(used), 0), cell(1000 * least / row[used] if known else None, 1)]
                what = [row[key] for key in ("failed", "unfinished") if key in row]
                if unknown:
                    what.append(f"not determined for {unknown} scalars, which are left out")
                lines.append([*cells, "; ".join(what)])
    head = ["posterior, all rows", "sampler", "effective draws by", "d", "mean", "sd", "R-hat", "effective draws"]
    head += ["of squares", "gradients after warmup", "effective draws in 1000", "gradients in all"]
    return table([*head, "effective draws in 1000", ""], lines)


def tables(record: Record) -> str:
    parts = [peers_table(record)]
    if not record.short:
        parts.append(full_data_table(record))
    return "\n\n".join(parts)


if __name__ == "__main__":
    run(__doc__, "real_peers", measure, tables, None)
