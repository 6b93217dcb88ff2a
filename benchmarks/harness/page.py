"""Writes the pages of results from stored JSON: ``docs/results.md`` and those of ``benchmarks``.

What the figures mean is written by hand, in ``benchmarks/findings``, and is about those very figures: every number that
a text there has with its error must stand in a table below it.

    python -m benchmarks.harness.page
"""

import importlib
import os
import pathlib
import re

from benchmarks.harness.index import PAGES
from benchmarks.harness.store import HERE, ROOT, Record

TITLES = {
    "docs/results.md": "Results",
    "benchmarks/details.md": "Results of details",
    "benchmarks/gpu.md": "Results on a GPU",
}
GPU = "benchmarks/gpu.md"
#: Studies of other pages that were run on a GPU too.
ON_GPU = ("overhead", "peers", "scale")


def section(record: Record, title: str, with_findings: bool, page: pathlib.Path) -> str:
    """One study: its question, what was found, tables, picture and origin."""
    name = record.name
    module = importlib.import_module(f"benchmarks.studies.{name}")
    # The last paragraph of a study's description is its command line.
    parts = [f"## {title}", module.__doc__.strip().rsplit("\n\n", 1)[0]]
    finding = HERE / "findings" / f"{name}.md"
    tables = module.tables(record) if record.rows else ""
    if with_findings and finding.exists():
        text = finding.read_text().strip()
        # Of another run, or mistyped.
        quoted = {" ".join(found.split()) for found in re.findall(r"-?[\d.,]*\d\s±\s[\d.,]*\d", text)}
        if wrong := sorted(number for number in quoted if number not in tables):
            raise SystemExit(f"findings/{name}.md quotes what no table of studies/{name}.py has: {'; '.join(wrong)}.")
        parts.append(text)
    if tables:
        parts.append(tables)
    if record.picture.exists():
        parts.append(f"![{title}]({pathlib.Path(os.path.relpath(record.picture, page.parent)).as_posix()})")
    parts.append(f"`benchmarks/studies/{name}.py`; {record.origin()}")
    return "\n\n".join(parts)


def write(listed: str) -> None:
    """Writes one page."""
    page, shown = ROOT / listed, PAGES[listed]
    parts = [f"# {TITLES[listed]}\n\n" + (HERE / "findings" / page.name).read_text().strip()]
    if listed == GPU:
        titles = {name: title for of_page in PAGES.values() for name, title in of_page.items()}
        shown = shown | {name: titles[name] for name in ON_GPU}
    for name, title in shown.items():
        record = Record(name, platform="gpu" if listed == GPU else "cpu")
        # Findings are about the figures of CPUs, but for what was run on a GPU alone.
        parts.append(section(record, title, listed != GPU or name not in ON_GPU, page))
    page.write_text("\n\n".join(parts) + "\n")
    print(f"Wrote {listed}.")


if __name__ == "__main__":
    for name in PAGES:
        write(name)
