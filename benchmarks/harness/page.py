"""Writes the pages of results from stored JSON: ``docs/results.md``, its short form, and ``benchmarks/details.md``.

What the figures mean is written by hand, in ``benchmarks/findings``, and stands in the long forms only, being about
those very figures: every number that a text there has with its error must stand in a table below it.

    python -m benchmarks.harness.page [--short | --details]
"""

import argparse
import importlib
import os
import pathlib
import re

from benchmarks.harness.index import PAGES
from benchmarks.harness.store import HERE, ROOT, Record

#: Not in the short form.
LONG = ("coverage", "older_peers", "real", "real_peers")
SHORT_HEAD = (
    "# Results, short form\n\nWhat `make bench` measures in a quarter of an hour on two cores: fewer repeats, "
    "smaller grids, the first data sets. The first four run two at a time, so their seconds are rough. "
    "Standard errors are large; what is concluded stands in [the results](results.md)."
)


def require_in_tables(name: str, text: str, tables: str) -> None:
    """Refuses a text that quotes ``mean ± error`` as no table has them: of another run, or mistyped."""
    quoted = {" ".join(found.split()) for found in re.findall(r"-?[\d.,]*\d\s±\s[\d.,]*\d", text)}
    if wrong := sorted(number for number in quoted if number not in tables):
        raise SystemExit(f"findings/{name}.md quotes what no table of studies/{name}.py has: {'; '.join(wrong)}.")


def section(name: str, title: str, short: bool, page: pathlib.Path) -> str:
    """One study: its question, what was found, tables, picture and origin."""
    record = Record(name, short)
    module = importlib.import_module(f"benchmarks.studies.{name}")
    # The last paragraph of a study's description is its command line.
    question = module.__doc__.strip().rsplit("\n\n", 1)[0]
    parts = [f"## {title}", question]
    finding = HERE / "findings" / f"{name}.md"
    tables = module.tables(record) if record.rows else ""
    if not short and finding.exists():
        text = finding.read_text().strip()
        require_in_tables(name, text, tables)
        parts.append(text)
    if tables:
        parts.append(tables)
    if record.picture.exists():
        parts.append(f"![{title}]({pathlib.Path(os.path.relpath(record.picture, page.parent)).as_posix()})")
    parts.append(f"`benchmarks/studies/{name}.py`; {record.origin()}")
    return "\n\n".join(parts)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--short", action="store_true", help="the short form of the results")
    which.add_argument("--details", action="store_true", help="the studies of details")
    arguments = parser.parse_args()
    short = arguments.short
    listed = "benchmarks/details.md" if arguments.details else "docs/results.md"
    page = ROOT / ("docs/results-short.md" if short else listed)
    head = SHORT_HEAD
    if not short:
        title = "Results of details" if arguments.details else "Results"
        head = f"# {title}\n\n" + (HERE / "findings" / page.name).read_text().strip()
    shown = {name: title for name, title in PAGES[listed].items() if not short or name not in LONG}
    parts = [head, *(section(name, title, short, page) for name, title in shown.items())]
    page.write_text("\n\n".join(parts) + "\n")
    print(f"Wrote {page.relative_to(ROOT)}.")


if __name__ == "__main__":
    main()
