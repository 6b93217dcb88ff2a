"""Writes the pages of results from stored JSON: ``docs/results.md``, its short form, and those of ``benchmarks``.

What the figures mean is written by hand, in ``benchmarks/findings``, and stands in the long forms only, being about
those very figures: every number that a text there has with its error must stand in a table below it.

    python -m benchmarks.harness.page [--short | --details | --gpu]
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
#: Studies of other pages that were run on a GPU too.
ON_GPU = ("overhead", "peers", "particles", "scale")
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


def section(record: Record, title: str, with_findings: bool, page: pathlib.Path) -> str:
    """One study: its question, what was found, tables, picture and origin."""
    name = record.name
    module = importlib.import_module(f"benchmarks.studies.{name}")
    # The last paragraph of a study's description is its command line.
    question = module.__doc__.strip().rsplit("\n\n", 1)[0]
    parts = [f"## {title}", question]
    finding = HERE / "findings" / f"{name}.md"
    tables = module.tables(record) if record.rows else ""
    if with_findings and finding.exists():
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
    which.add_argument("--gpu", action="store_true", help="the studies that were run on a GPU")
    arguments = parser.parse_args()
    short = arguments.short
    listed, title = "docs/results.md", "Results"
    if arguments.details:
        listed, title = "benchmarks/details.md", "Results of details"
    if arguments.gpu:
        listed, title = "benchmarks/gpu.md", "Results on a GPU"
    page = ROOT / ("docs/results-short.md" if short else listed)
    head = SHORT_HEAD if short else f"# {title}\n\n" + (HERE / "findings" / page.name).read_text().strip()
    shown = {name: title for name, title in PAGES[listed].items() if not short or name not in LONG}
    if arguments.gpu:
        titles = {name: title for of_page in PAGES.values() for name, title in of_page.items()}
        shown |= {name: titles[name] for name in ON_GPU}
    parts = [head]
    for name, title in shown.items():
        record = Record(name, short, platform="gpu" if arguments.gpu else "cpu")
        # Findings are about the figures of CPUs, but for what was run on a GPU alone.
        parts.append(section(record, title, not short and not (arguments.gpu and name in ON_GPU), page))
    page.write_text("\n\n".join(parts) + "\n")
    print(f"Wrote {page.relative_to(ROOT)}.")


if __name__ == "__main__":
    main()
