"""Writes ``docs/results.md``, or its short form, from the JSON of the benchmarks.

What the figures mean is written by hand, in ``benchmarks/findings``, and stands in the long form only, being about
those very figures: every number that a text there has with its error must stand in a table below it.

    python benchmarks/page.py [--short]
"""

import argparse
import importlib
import re

from record import HERE, Record

SECTIONS = {
    "gaussian": "Six particles on a Gaussian",
    "mixtures": "Two mixtures",
    "networks": "Neural networks on real data",
    "zero_tuning": "Nothing to tune",
    "peers": "Peers on 100,000 rows",
    "older_peers": "Peers that need an older JAX",
    "minibatches": "Whose minibatch, and how drawn",
    "growth": "How cost grows",
}
#: Not in the short form.
LONG = ("older_peers",)
DOCS = HERE.parent / "docs"


def require_in_tables(name: str, text: str, tables: str) -> None:
    """Refuses a text that quotes ``mean ± error`` as no table has them: of another run, or mistyped."""
    quoted = {" ".join(found.split()) for found in re.findall(r"-?[\d.,]*\d\s±\s[\d.,]*\d", text)}
    if wrong := sorted(number for number in quoted if number not in tables):
        raise SystemExit(f"findings/{name}.md quotes what no table of benchmarks/{name}.py has: {'; '.join(wrong)}.")


def section(name: str, title: str, short: bool) -> str:
    """One benchmark: its question, what was found, tables, picture and origin."""
    record = Record(name, short)
    module = importlib.import_module(name)
    # The last paragraph of a script's description is its command line.
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
        parts.append(f"![{title}]({record.picture.relative_to(DOCS).as_posix()})")
    parts.append(f"`benchmarks/{name}.py`; {record.origin()}")
    return "\n\n".join(parts)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true")
    short = parser.parse_args().short
    findings = HERE / "findings"
    if short:
        head = (
            "# Results, short form\n\nWhat `make bench` measures in a quarter of an hour on two cores: fewer repeats, "
            "smaller grids, the first data sets. The first four run two at a time, so their seconds are rough. "
            "Standard errors are large; what is concluded stands in [the results](results.md)."
        )
    else:
        head = "# Results\n\n" + (findings / "results.md").read_text().strip()
    shown = {name: title for name, title in SECTIONS.items() if not short or name not in LONG}
    parts = [head, *(section(name, title, short) for name, title in shown.items())]
    page = DOCS / ("results-short.md" if short else "results.md")
    page.write_text("\n\n".join(parts) + "\n")
    print(f"Wrote {page.relative_to(HERE.parent)}.")


if __name__ == "__main__":
    main()
