"""The benchmarks' index is up to date, and their folders stand on each other in one direction."""

import ast
from pathlib import Path
import runpy

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
#: What each folder may import; studies do not import each other.
ARROWS = {
    "harness": {"harness"},
    "problems": {"harness", "problems"},
    "methods": {"harness", "problems", "methods"},
    "studies": {"harness", "problems", "methods"},
}

if not (BENCHMARKS / "studies").exists():
    pytest.skip("the source distribution is without the benchmarks", allow_module_level=True)


def test_index_is_up_to_date():
    index = runpy.run_path(str(BENCHMARKS / "harness" / "index.py"))
    text = index["README"].read_text(encoding="utf-8")
    assert index["updated"](text) == text, "run `make bench-index`"


def test_imports_run_downward():
    wrong = [
        f"{folder}/{path.name}: {node.module}"
        for folder, allowed in ARROWS.items()
        for path in (BENCHMARKS / folder).glob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        # `from benchmarks.problems import real` names the folder too.
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("benchmarks.")
        if node.module.split(".")[1] not in allowed
    ]
    assert not wrong


def test_findings_and_rows_belong_to_studies():
    studies = {path.stem for path in (BENCHMARKS / "studies").glob("*.py")}
    assert {path.stem for path in (BENCHMARKS / "findings").glob("*.md")} == studies
    assert {path.stem for path in (BENCHMARKS / "results").rglob("*.json")} <= studies


def test_summary_lists_all_pages():
    index = runpy.run_path(str(BENCHMARKS / "harness" / "index.py"))
    pages = {(BENCHMARKS.parent / index["page_of"](name)).stem for name in index["PAGES"]}
    folder = BENCHMARKS.parent / "docs" / "benchmarks"
    assert {path.stem for path in folder.glob("*.md")} == pages | {"index"}, "run `make bench-pages`"
    assert pages == set((folder / "index.md").read_text(encoding="utf-8").split(":hidden:")[1].split("```")[0].split())
