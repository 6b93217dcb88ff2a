"""The list of studies in ``benchmarks/README.md``, from their docstrings; and on which page each study stands.

Imports nothing but the standard library, so that a quick test can check it.

    python -m benchmarks.harness.index
"""

import ast
import pathlib
import re

HERE = pathlib.Path(__file__).resolve().parents[1]
README = HERE / "README.md"
BEGIN, END = "<!-- Made by `make bench-index`: -->", "<!-- End of the index. -->"
#: Which page shows which studies, in which order, under which titles.
PAGES = {
    "docs/results.md": {
        "crossover": "From how many rows on",
        "gaussian": "Six particles on a Gaussian",
        "mixtures": "Two mixtures",
        "networks": "Neural networks on real data",
        "coverage": "Coverage",
        "second_order": "The bias that is left",
        "peers": "Peers on 100,000 rows",
        "growth": "How cost grows",
        "real": "Real data",
        "real_peers": "Peers on real data",
    },
    "benchmarks/details.md": {
        "overhead": "Overhead",
        "first_run": "A first run",
        "learning_coefficients": "Local learning coefficients",
        "scale": "Large data and many devices",
        "measure": "Current samplers by one measure",
        "collection": "Forty-nine posteriors",
    },
    "benchmarks/gpu.md": {"accelerator": "Rounding, agreement, a million rows"},
}


def study_lines() -> str:
    """A line for each study, in the order of the pages."""
    listed = {name for titles in PAGES.values() for name in titles}
    if odd := listed ^ {path.stem for path in (HERE / "studies").glob("[a-z]*.py")}:
        raise SystemExit(f"Either in studies/ or in PAGES of harness/index.py, not in both: {', '.join(sorted(odd))}.")
    lines = ["| `make` | asks | results |", "| --- | --- | --- |"]
    for page, titles in PAGES.items():
        for name, title in titles.items():
            text = (HERE / "studies" / f"{name}.py").read_text(encoding="utf-8")
            asks = ast.get_docstring(ast.parse(text)).split("\n")[0].replace("``", "`")
            there = pathlib.Path(page).name if page.startswith("benchmarks/") else f"../{page}"
            # What GitHub calls a heading in addresses.
            anchor = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
            lines.append(f"| `bench-{name.replace('_', '-')}` | {asks} | [{title}]({there}#{anchor}) |")
    return "\n".join(lines)


def updated(text: str) -> str:
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n\n{study_lines()}\n\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    README.write_text(updated(README.read_text(encoding="utf-8")), encoding="utf-8")
