"""The code of README and of pages that are no notebooks, and links that Sphinx does not check."""

import ast
from contextlib import suppress
import importlib
import json
import os
from pathlib import Path
import re
import subprocess
import sys

from models import vectorized
import numpy as np
import pytest
from words import EXCEPTIONS, LEFT_OUT, private_words

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


@pytest.mark.slow
def test_large_data_runs_from_top_to_bottom(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "scale.md").read_text(), re.DOTALL)
    assert len(blocks) == 5
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(blocks)], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "'x': Rows(shape=(20000, 4), dtype=float32)" in done.stdout and "P('particles',)" in done.stdout


@pytest.mark.slow
def test_readme_runs_and_mixes(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    scope: dict = {}
    exec(code, scope)
    assert scope["mcmc"].get_samples(group_by_chain=True)["slope"].shape == (20, 500, 5)
    assert "No problems found" in capsys.readouterr().out


def code_of(name):
    """The blocks of code of a page."""
    return re.findall(r"```python\n(.*?)```", (DOCS / name).read_text(), re.DOTALL)


SETTING, *PAIRS = code_of("coming-from.md")


def test_pairs_of_coming_from_have_two_sides():
    assert len(PAIRS) == 9
    for pair in PAIRS:
        there, here = pair.split("\n# here\n")
        assert re.match(r"# (NumPyro|BlackJAX|posteriors|SGMCMCJax)\n", there)
        ast.parse(there)
        ast.parse(here)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("number", range(len(PAIRS)))
def test_pairs_of_coming_from_run(number):
    there, here = PAIRS[number].split("\n# here\n")
    scope: dict = {}
    exec(SETTING, scope)
    if there.startswith("# NumPyro"):  # Other packages are not installed.
        exec(there, scope)
    exec(here, scope)
    draws = scope["mcmc"].get_samples(group_by_chain=True)["beta"]
    # Against NUTS: means of 0.90, 0.05 and 0.02, and standard deviations of 0.07.
    last = draws[:, len(draws[0]) // 2 :] if "positions" not in scope else scope["positions"][:, None]
    assert abs(last.mean((0, 1)) - np.array([0.9, 0.05, 0.02])).max() < 0.08
    assert "positions" in scope or abs(last.std((0, 1)) / 0.07 - 1).max() < 0.4


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_code_of_the_faq_runs():
    plain, goes_on, begins_again, many = code_of("faq.md")
    scope: dict = {}
    exec(SETTING + plain, scope)
    mcmc = scope["mcmc"] = vectorized(scope["kernel"], 0, 5, 4)
    x, y = scope["x"], scope["y"]
    mcmc.run(scope["key"], x, y)
    exec(goes_on, scope)
    assert mcmc.last_state.num_updates == 100
    exec(begins_again, scope)
    assert mcmc.last_state.num_updates == 50
    scope["ys"] = np.stack([y, 1 - y])
    exec(many, scope)
    assert abs(scope["means"] - np.array([[0.9, 0.05, 0.02], [-0.9, -0.05, -0.02]])).max() < 0.1


def missing(source):
    """The names that code imports from the package, but that it does not have."""
    found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom) and node.module]
    names = [(node.module, x.name) for node in found if node.module.startswith("numpyro_repulsion") for x in node.names]
    return [name for module, name in names if not has(module, name)]


def has(module, name):
    with suppress(ImportError):
        return hasattr(importlib.import_module(module), name)
    return False


def test_scripts_and_notebooks_import_what_exists():
    scripts = (path for folder in ("docs", "examples", "benchmarks") for path in ROOT.glob(f"{folder}/**/*.py"))
    sources = [path.read_text() for path in scripts if "_build" not in path.parts]
    for path in ROOT.glob("notebooks/*.ipynb"):
        cells = json.loads(path.read_text())["cells"]
        sources += ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert not [name for source in sources for name in missing(source)]
    assert missing("from numpyro_repulsion import SGLD, scores\nfrom numpyro_repulsion.none import a") == [
        "scores",
        "a",
    ]


def anchors(page):
    """The names that headings of a Markdown page get from GitHub."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def markdown(page):
    """The text of a page, or of a notebook's cells without code."""
    if page.suffix == ".md":
        return page.read_text()
    cells = json.loads(page.read_text())["cells"]
    return "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


# Sphinx checks links of docs/, but leaves out those of notebooks that lead to no file.
PAGES = ["README.md", "CHANGELOG.md", "benchmarks/README.md"]
NOTEBOOKS = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("page", [*PAGES, *NOTEBOOKS])
def test_links_lead_somewhere(page):
    page = ROOT / page
    links = re.findall(r"\]\(([^)\s]+)\)", markdown(page))
    for link in (link for link in links if "://" not in link):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), f"{page.name} leads to {link}, and no such file is there."
        if anchor:
            assert anchor in anchors(target), f"{page.name} leads to {link}, and no such heading is there."


#: All that is written for users; docs/notebooks holds copies.
GENERATED = ("_build", "notebooks")
PROSE = [
    "README.md",
    *(
        str(page.relative_to(ROOT))
        for page in sorted(DOCS.rglob("*.md"))
        if page.relative_to(DOCS).parts[0] not in GENERATED
    ),
    *NOTEBOOKS,
]


@pytest.mark.parametrize("page", PROSE)
def test_pages_write_the_words_of_the_field(page):
    found = private_words(page, markdown(ROOT / page))
    assert not found, f"{page} has {len(found)} places to write otherwise (tests/words.py):\n" + "\n".join(found)


def test_private_words_are_found_in_prose_alone():
    page = """
# A cloud

(arrival)=
The posterior of `cloud` is no
sampler, and $\\text{cloud}$ has not. See [here](https://cloud.example/basin).

```python
cloud = "basin"
```

```{note}
Of draws, 5 % are worth four draws.
```

| cloud | What it is |
"""
    names = [found.split(":")[0] for found in private_words("page", page)]
    assert sorted(names) == ["cloud", "cloud", "has not", "is no", "opening", "percent", "worth"]
    assert not private_words("page", "What is it? There is no bias. It has not mixed: 5% of draws are no longer alike.")
    assert not private_words(LEFT_OUT[0], page)


@pytest.mark.parametrize(("page", "name"), EXCEPTIONS)
def test_exceptions_are_needed(page, name):
    found = private_words("elsewhere", markdown(ROOT / page))
    assert any(place.startswith(f"{name}:") for place in found)
