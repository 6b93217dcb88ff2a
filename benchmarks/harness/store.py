"""What studies share: the JSON of their rows, and tables.

A study is a module with ``measure(record)``, which asks :meth:`Record.row` for one row after another, and
``tables(record)``, which returns Markdown. ``docs/figures/benchmarks.py`` draws its figure. A row in the JSON is not
measured again unless you ask for it, so you can stop and continue a run of hours.
"""

from collections.abc import Callable, Iterable
import datetime
import json
import os
import pathlib
import platform
import re
from typing import Any

import jax

import numpyro

import numpyro_repulsion

HERE = pathlib.Path(__file__).parents[1]
ROOT = HERE.parent


class Record:
    """The rows of one study, kept in ``benchmarks/results/full`` as they come; of a GPU in ``gpu``."""

    def __init__(self, name: str, again: bool = False, platform: str = "cpu"):
        form = "full" if platform == "cpu" else platform
        self.name = name
        self.path = HERE / "results" / form / f"{name}.json"
        stored = json.loads(self.path.read_text()) if self.path.exists() and not again else {}
        self.rows: dict[str, dict[str, Any]] = stored.get("rows", {})
        self.provenance: dict[str, Any] = stored.get("provenance", {})

    def row(self, key: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The row of that name: the stored one, or else ``measure()``, which is stored at once."""
        if key not in self.rows:
            row = measure()
            # Fewer cores than there are under `taskset`.
            cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
            # Earlier rows keep the version of JAX that they were measured with.
            for other in self.rows.values():
                other.setdefault("jax", self.provenance["versions"]["jax"])
            self.rows[key] = row | {"date": datetime.date.today().isoformat(), "cores": cores, "jax": jax.__version__}
            self.provenance = {
                "machine": f"{platform.machine()}, {os.cpu_count()} cores, {jax.devices()[0].device_kind}",
                "versions": {m.__name__: m.__version__ for m in (jax, numpyro, numpyro_repulsion)},
            }
            # A row is a line, so that differences can be read.
            rows = ",\n".join(f"{json.dumps(name)}: {json.dumps(row)}" for name, row in self.rows.items())
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # A run that is ended while it writes must not lose the rows of hours.
            scratch = self.path.with_suffix(".part")
            scratch.write_text(f'{{"provenance": {json.dumps(self.provenance)},\n"rows": {{\n{rows}\n}}}}\n')
            scratch.replace(self.path)
            print(key, {name: value for name, value in row.items() if len(str(value)) < 200}, flush=True)
        return self.rows[key]

    def select(self, **wanted: Any) -> list[dict[str, Any]]:
        return [row for row in self.rows.values() if all(row.get(key) == value for key, value in wanted.items())]

    def origin(self) -> str:
        """Machine, versions and dates, in a sentence."""
        if not self.rows:
            return "Not measured yet."
        dates = sorted(row["date"] for row in self.rows.values() if "date" in row)
        alone = sum(row.get("cores") == 1 for row in self.rows.values())
        held = f", {'all' if alone == len(self.rows) else alone} of {len(self.rows)} rows held to one core"
        jaxes = sorted({row.get("jax", self.provenance["versions"]["jax"]) for row in self.rows.values()})
        versions = self.provenance["versions"] | {"jax": " and ".join(jaxes)}
        versions = ", ".join(f"{name} {version}" for name, version in versions.items())
        parts = [" to ".join(dict.fromkeys((dates[0], dates[-1]))), self.provenance["machine"] + held * (alone > 0)]
        return "; ".join([*parts, versions]) + "."


def plain(name: str) -> str:
    """The displayed name of a stored sampler without this package's defaults, unlike the kernel of the same name."""
    shown = re.sub(r"^(SGLD|SGHMC)(\+R)?(?=$|, h)", lambda m: f"plain {m[1]}{' + repulsion' * bool(m[2])}", name)
    return shown.replace("balanced", "zero-sum noise")


def table(head: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    head = list(head)
    rows = ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *lines)]
    return "\n".join(rows)


def placed(value: Any, digits: int) -> str:
    """A number, or one with its site; nothing for ``None``."""
    if value is None:
        return ""
    number, site = value if isinstance(value, list | tuple) else (value, "")
    return f"{number:,.{digits}f}" + (f" ({site})" if site else "")


def pm(mean: float, error: float, digits: int = 3) -> str:
    """A mean and its standard error, as the tables have them; of one run there is no error."""
    form = ".1e" if abs(mean) >= 1e6 else f",.{digits if abs(mean) < 1000 else 0}f"
    return f"{mean:{form}}" + (f" ± {error:{form}}" if error == error else "")
