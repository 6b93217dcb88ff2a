"""Writes the pages of ``docs/benchmarks``, but for their summary, from stored JSON.

The texts in ``benchmarks/findings`` are written by hand: every number that a text there has with its error must stand
in a table of its study. Large tables become CSV files, to which the page links.

    python -m benchmarks.harness.page
"""

import csv
import importlib
import re

from benchmarks.harness.index import GPU, PAGES, page_of
from benchmarks.harness.store import HERE, ROOT, Record

#: Studies that were run on a GPU too.
ON_GPU = ("overhead", "peers", "scale")
#: A larger table becomes a file.
CELLS = 50


def folded(tables: str, stem: str) -> str:
    """Replaces large tables by links to CSV files; a table's name is the bold line before it."""
    blocks: list[str] = []
    for block in tables.split("\n\n"):
        lines = [[cell.strip() for cell in line[1:-1].split(" | ")] for line in block.split("\n")]
        if not block.startswith("|") or (len(lines) - 2) * len(lines[0]) <= CELLS:
            blocks.append(block)
            continue
        name = blocks.pop().strip("*") if blocks and blocks[-1].startswith("**") else "All rows"
        file = f"tables/{stem}-{re.sub('[^a-z0-9]+', '-', name.lower()).strip('-')}.csv"
        path = ROOT / "docs" / "benchmarks" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", newline="") as stream:
            rows = (line for k, line in enumerate(lines) if k != 1)
            csv.writer(stream).writerows([re.sub(r"[*`]", "", cell) for cell in line] for line in rows)
        blocks.append(f"[{name} (CSV, {len(lines) - 2} rows)]({file})")
    return "\n\n".join(blocks)


def section(name: str, platform: str = "cpu") -> tuple[str, str, str]:
    """One study: its question and how it was measured, its tables, and where they come from."""
    module, record = importlib.import_module(f"benchmarks.studies.{name}"), Record(name, platform=platform)
    origin = f"`benchmarks/studies/{name}.py`; {record.origin()}"
    return module.__doc__.strip(), module.tables(record) if record.rows else "", origin


def write(name: str) -> None:
    """Writes one page: figure, finding, how it was measured, tables."""
    how, tables, origin = section(name, "gpu" if name == GPU else "cpu")
    finding = (HERE / "findings" / f"{name}.md").read_text().strip()
    quoted = {" ".join(found.split()) for found in re.findall(r"-?[\d.,]*\d\s±\s[\d.,]*\d", finding)}
    if wrong := sorted(number for number in quoted if number not in tables):
        raise SystemExit(f"findings/{name}.md quotes what no table of studies/{name}.py has: {'; '.join(wrong)}.")
    parts = [f"# {PAGES[name]}"]
    if (ROOT / "docs" / "_static" / "results" / f"{name}.png").exists():
        parts.append(f"![{PAGES[name]}](../_static/results/{name}.png)")
    parts += [finding, "## How it was measured", how, "## Tables", folded(tables, name), origin]
    for other in ON_GPU if name == GPU else ():
        _, tables, origin = section(other, "gpu")
        parts += [f"### {PAGES[other]}", folded(tables, other), origin]
    (ROOT / page_of(name)).write_text("\n\n".join(part for part in parts if part) + "\n")
    print(f"Wrote {page_of(name)}.")


if __name__ == "__main__":
    for study in PAGES:
        write(study)
