"""What do data on disk and several devices cost? Update rates, bytes sent, and a file larger than the allowed memory.

- *Rates.* Logistic regression, 200,000 rows of 50 covariates (40 MB), 20 particles with minibatches of 500 rows each:
  arrays, and the same data as `Rows` in memory and on disk (in the page cache). Programs run in turns in one process,
  after compilation; a ratio is the median of the rounds' ratios.
- *Bytes.* The bytes that one of four devices receives from the others in one update, read from the compiled program; 16
  particles, 2,100 parameters, so all positions take 134 kB. The devices are virtual.
- *A large file.* 14 million rows of 36 covariates, 2.0 GB, converted from a stream and fitted with default settings and
  1.9 GB for everything but mapped files (`RLIMIT_DATA`). The run is interrupted in its middle and started again.
- *First runs.* The same regression with more rows: seconds of a run of 300 + 300 iterations, ten updates each,
  compilation included, and the peak memory of its process, which contains the data once.
"""

import functools
import itertools
import math
import os
from pathlib import Path
import re
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time

import jax
from jax import random
import jax.numpy as jnp
import numpy as np

from benchmarks.harness.apart import apart
from benchmarks.harness.runs import in_turns, through_mcmc, vectorized
from benchmarks.harness.store import ROOT, Record, table
from benchmarks.problems.targets import logistic_regression
from numpyro_repulsion import RBF, SGHMCR, SGLD, SGLDR, SVGD, ControlVariates, Rows, Subsampled, run_in_pieces
from numpyro_repulsion.interactions import RandomFeatures

STEP_SIZE, NUM_PARTICLES = 1e-6, 20
logistic = functools.partial(logistic_regression, subsample_size=500)
SINGLE, BLOCKS = "single rows", "blocks of 100"
SOURCES = ("arrays", "`Rows`, a JAX array", "`Rows`, in memory", "`Rows`, on disk")
#: Of the large file: rows, covariates, bytes for everything but mapped files.
LARGE = 14_000_000, 36, 1_900_000_000


def stream(num_rows, num_covariates, size=100_000):
    """Batches of covariates and labels."""
    rng = np.random.default_rng(0)
    beta = rng.standard_normal(num_covariates) / num_covariates**0.5
    for first in range(0, num_rows, size):
        x = rng.standard_normal((min(size, num_rows - first), num_covariates), np.float32)
        yield {"x": x, "y": rng.random(len(x)) < 1 / (1 + np.exp(-x @ beta))}


def written(num_rows, num_covariates, folder) -> dict[str, Rows]:
    """Write a stream as files, whose rows are in random order already, and open them."""
    shapes = {"x": (np.float32, (num_rows, num_covariates)), "y": (bool, (num_rows,))}
    files = {name: np.lib.format.open_memmap(f"{folder}/{name}.npy", "w+", *kind) for name, kind in shapes.items()}
    first = 0
    for batch in stream(num_rows, num_covariates):
        for name, file in files.items():
            file[first : first + len(batch[name])] = batch[name]
        first += len(batch["y"])
    return opened(folder)


def opened(folder) -> dict[str, Rows]:
    return {name: Rows(np.load(f"{folder}/{name}.npy", mmap_mode="r")) for name in ("x", "y")}


def rates() -> dict:
    """Milliseconds for an update by source, and the ratio of its rate to that of arrays."""
    num_rows, num_updates, rounds = 200_000, 200, 9
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        on_disk = written(num_rows, 50, folder)
        host = {name: np.asarray(rows.source) for name, rows in on_disk.items()}
        device = {name: jnp.asarray(array) for name, array in host.items()}
        rows = ({name: Rows(array) for name, array in arrays.items()} for arrays in (device, host))
        given = dict(zip(SOURCES, (device, *rows, on_disk), strict=True))
        for label, block in ((SINGLE, 1), (BLOCKS, 100)):
            kernel = SGLD(logistic, step_size=STEP_SIZE, gradient=Subsampled(block_size=block))
            program = through_mcmc(kernel, num_updates, NUM_PARTICLES)
            programs = {
                name: lambda key, data=data, program=program: program(key, *data.values())
                for name, data in given.items()
            }
            seconds = in_turns(programs, (), rounds)
            for name, times in seconds.items():
                ratio = statistics.median(a / b for a, b in zip(seconds["arrays"], times, strict=True))
                row = {"milliseconds": 1e3 * statistics.median(times) / num_updates, "ratio": ratio}
                found.setdefault(label, {})[name] = row
    return found


SENT = {
    **{"SGLD": SGLD, "SGLDR": SGLDR, "SGHMCR": SGHMCR, "SVGD": SVGD},
    "SGLDR, RandomFeatures": functools.partial(SGLDR, interaction=RandomFeatures()),
    "SGLDR, 4 ensembles": functools.partial(SGLDR, interaction=RBF(), num_ensembles=4),
    **{"SGLD, rows": SGLD, "SGLDR, rows": SGLDR},
}


def sent(name: str) -> dict:
    """Kilobytes that one of four devices gets from the others in an update; in a process of its own."""
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
    kernel = SENT[name](functools.partial(logistic_regression, subsample_size=200), step_size=STEP_SIZE)
    (batch,) = stream(8000, 2100, 8000)
    axis, kind = ("rows", Rows) if name.endswith("rows") else ("particles", jnp.asarray)
    with jax.set_mesh(jax.make_mesh((4,), (axis,), axis_types=(jax.sharding.AxisType.Auto,))):
        x, y = kind(batch["x"]), kind(batch["y"])
        state = kernel.init(random.split(random.key(0), 16), 0, None, (x, y), {})
        text = jax.jit(lambda state: kernel.sample(state, (x, y), {})).lower(state).compile().as_text()
    operation = r"= (.*?) (?:all-gather|all-reduce|reduce-scatter|collective-permute|all-to-all)(?:-start)?\("
    sizes = {"pred": 1, "s32": 4, "u32": 4, "f32": 4}
    total = 0
    for line in text.splitlines():
        if "while/body" in line and (match := re.search(operation, line)):
            for kind, shape in re.findall(r"(\w+)\[([\d,]*)\]", match[1]):
                total += sizes[kind] * math.prod(int(k) for k in shape.split(",") if k)
    return {"kilobytes": total / 1e3}


def fit_large(folder: str, num_samples: int) -> dict:
    """Fit the large file; in a process of its own, with its memory limited."""
    resource.setrlimit(resource.RLIMIT_DATA, (LARGE[2], LARGE[2]))
    rows = opened(folder)
    kernel = SGLD(functools.partial(logistic_regression, subsample_size=1000), gradient=ControlVariates(block_size=100))
    mcmc = vectorized(kernel, 500, num_samples, NUM_PARTICLES)
    began = time.perf_counter()
    run_in_pieces(mcmc, random.key(0), rows["x"], rows["y"], piece_size=100, directory=f"{folder}/run")
    seconds = time.perf_counter() - began
    beta = np.asarray(mcmc.get_samples()["beta"])
    rng = np.random.default_rng(0)
    truth = rng.standard_normal(beta.shape[1]) / beta.shape[1] ** 0.5
    return {
        "seconds": seconds,
        "worst_z": float(np.abs((beta.mean(0) - truth) / beta.std(0)).max()),
        "digest": float(np.float64(beta.sum())),
        "gigabytes": rows["x"].nbytes / 1e9,
    }


def large() -> dict:
    """Convert, fit, kill, go on."""
    num_samples = 500
    with tempfile.TemporaryDirectory(dir=os.environ.get("NUMPYRO_REPULSION_SCRATCH")) as folder:
        began = time.perf_counter()
        written(*LARGE[:2], folder)
        converted = time.perf_counter() - began
        call = f"from benchmarks.studies.scale import fit_large; fit_large({folder!r}, {num_samples})"
        again = functools.partial(apart, __name__, "fit_large", 7200, folder=folder, num_samples=num_samples)
        with subprocess.Popen([sys.executable, "-c", call], cwd=ROOT) as child:
            # Two states are saved: the run is past its second piece.
            while child.poll() is None and not (Path(folder) / "run" / "state-1.npz").exists():
                time.sleep(0.2)
            child.send_signal(signal.SIGKILL)
        resumed = again()
        (Path(folder) / "run").rename(Path(folder) / "killed")
        whole = again()
    return whole | {"converted": converted, "rows": LARGE[0], "is_same": resumed["digest"] == whole["digest"]}


def first_run(num_rows: int, source: str) -> dict:
    """Seconds and the peak of memory of a first run; in a process of its own."""
    (batch,) = stream(num_rows, 50, num_rows)
    kind = jnp.asarray if source == "arrays" else Rows
    x, y = map(kind, batch.values())
    del batch
    mcmc = vectorized(SGLD(logistic), 300, 300, NUM_PARTICLES, progress_bar=True)
    began = time.perf_counter()
    mcmc.run(random.key(0), x, y)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {"seconds": time.perf_counter() - began, "peak_gib": peak}


FIRST = {"arrays": "arrays", "rows": "`Rows`, in memory"}
FIRST_ROWS = (20_000, 500_000, 2_000_000)


def measure(record: Record) -> None:
    record.row("rates", rates)
    if jax.default_backend() != "cpu":
        return  # What follows is about virtual devices and disks.
    call = functools.partial(apart, __name__)
    for name in SENT:
        record.row(f"sent {name}", functools.partial(call, "sent", 600, name=name))
    record.row("large", large)
    for number, source in itertools.product(FIRST_ROWS, FIRST):
        run_of = functools.partial(call, "first_run", 1800, num_rows=number, source=source)
        record.row(f"first run {source} {number}", run_of)


def tables(record: Record) -> str:
    parts = []
    lines, found = [], record.rows["rates"]
    for name in SOURCES:
        cells = (found[label][name] for label in (SINGLE, BLOCKS))
        lines.append([name, *(f"{cell[of]:.2f}" for cell in cells for of in ("milliseconds", "ratio"))])
    head = ["", f"{SINGLE}: ms per update", "rate of arrays", f"{BLOCKS}: ms per update", "rate of arrays"]
    parts.append(table(head, lines))
    if (row := record.rows.get("large")) is not None:
        lines = [[name, f"{record.rows[f'sent {name}']['kilobytes']:.1f}"] for name in SENT]
        parts.append(table(["over four devices", "kB sent to each in an update"], lines))
        head = ["rows", "GB", "GB allowed", "s to write", "s to fit", "largest distance of a mean from the truth, sd"]
        cells = [f"{row['rows']:,}", f"{row['gigabytes']:.1f}", f"{LARGE[2] / 1e9:.1f}", f"{row['converted']:.0f}"]
        cells += [f"{row['seconds']:.0f}", f"{row['worst_z']:.2f}"]
        cells.append("the same draws" if row["is_same"] else "**other draws**")
        parts.append(table([*head, "after a restart"], [cells]))
        lines = []
        for number in FIRST_ROWS:
            rows = [record.rows.get(f"first run {source} {number}", {}) for source in FIRST]
            cells = [f"{row['seconds']:.0f} · {row['peak_gib']:.1f}" if "seconds" in row else "" for row in rows]
            lines.append([f"{number:,}", f"{number * 51 * 4 / 1e6:.0f}", *cells])
        parts.append(table(["rows", "MB", *(f"{name}: s · GiB at the peak" for name in FIRST.values())], lines))
    return "\n\n".join(parts)
