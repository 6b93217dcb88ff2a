"""Writes ``docs/results.md``, or its short form, from the JSON of the benchmarks.

What the figures mean is written by hand, in ``benchmarks/findings``, and stands in the long form only, being about
those very figures.

    python benchmarks/page.py [--short]
"""

import argparse
import importlib

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


def section(name: str, title: str, short: bool) -> str:
    """One benchmark: its question, what was found, tables, picture and origin."""
    record = Record(name, short)
    module = importlib.import_module(name)
    # The last paragraph of a script's description is its command line.
    question = module.__doc__.strip().rsplit("\n\n", 1)[0]
    parts = [f"## {title}", question]
    finding = HERE / "findings" / f"{name}.md"
    if not short and finding.exists():
        parts.append(finding.read_text().strip())
    if record.rows:
        parts.append(module.tables(record))
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
            "smaller grids, the first data sets. Standard errors are large; what is concluded stands in "
            "[the results](results.md)."
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
