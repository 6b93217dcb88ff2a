"""The list of studies in ``benchmarks/README.md``, from their docstrings; and the titles of their pages.

Imports nothing but the standard library, so that a quick test can check it.

    python -m benchmarks.harness.index
"""

import ast
import pathlib

HERE = pathlib.Path(__file__).resolve().parents[1]
README = HERE / "README.md"
BEGIN, END = "<!-- Made by `make bench-index`: -->", "<!-- End of the index. -->"
#: The study that runs on a GPU alone: its page has the GPU results of other studies too.
GPU = "accelerator"
#: The title of each study's page in ``docs/benchmarks``, in the order of the pages.
PAGES = {
    "crossover": "From how many rows on",
    "coverage": "Interval coverage",
    "collection": "Accuracy on 49 posteriors",
    "second_order": "Bias with minibatches",
    "many_effects": "Thousands of effects",
    "real": "Real data",
    "real_peers": "Real data: other samplers",
    "peers": "Other libraries on 100,000 rows",
    "measure": "Current samplers by one measure",
    "networks": "Neural networks on UCI data",
    "mixtures": "Two mixtures of the paper",
    "gaussian": "Six particles on a Gaussian",
    "learning_coefficients": "Local learning coefficients",
    "growth": "How cost grows",
    "overhead": "Overhead per update",
    "first_run": "First runs",
    "scale": "Data on disk and several devices",
    GPU: "Results on a GPU",
}


def page_of(name: str) -> str:
    """The path of a study's page."""
    return f"docs/benchmarks/{'gpu' if name == GPU else name.replace('_', '-')}.md"


def study_lines() -> str:
    """A line for each study, in the order of the pages."""
    if odd := set(PAGES) ^ {path.stem for path in (HERE / "studies").glob("[a-z]*.py")}:
        raise SystemExit(f"Either in studies/ or in PAGES of harness/index.py, not in both: {', '.join(sorted(odd))}.")
    lines = ["| `make` | question | results |", "| --- | --- | --- |"]
    for name, title in PAGES.items():
        text = (HERE / "studies" / f"{name}.py").read_text(encoding="utf-8")
        asks = ast.get_docstring(ast.parse(text)).split("\n")[0].replace("``", "`")
        lines.append(f"| `bench-{name.replace('_', '-')}` | {asks} | [{title}](../{page_of(name)}) |")
    return "\n".join(lines)


def updated(text: str) -> str:
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n\n{study_lines()}\n\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    README.write_text(updated(README.read_text(encoding="utf-8")), encoding="utf-8")
