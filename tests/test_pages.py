"""The code of README and of pages that are no notebooks, and links that Sphinx does not check."""

import json
import os
from pathlib import Path
import re
import subprocess
import sys

import pytest

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


SETTING = """
import jax.numpy as jnp, numpyro, numpyro.distributions as dist, numpyro.contrib.einstein
from jax import random
from numpyro.contrib.einstein import RBFKernel
from numpyro.infer import MCMC
from numpyro.optim import Adagrad
from numpyro_repulsion import SGLD, SGLDR

key = random.key(0)
x = random.normal(random.key(1), (1000, 3))
y = random.bernoulli(random.key(2), 1 / (1 + jnp.exp(-x[:, 0]))).astype(int)

def model(x, y):
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("rows", len(y), subsample_size=500) as i:
        numpyro.sample("y", dist.Bernoulli(logits=x[i] @ beta), obs=y[i])

starts = random.normal(random.key(3), (20, 3))
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_pairs_of_migrating_run():
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "migrating.md").read_text(), re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        there, here = block.split("# here\n")
        scope: dict = {}
        exec(SETTING, scope)
        if there.startswith("# NumPyro"):
            exec(there, scope)
            assert scope["particles"]
        exec(here, scope)
        mean = scope["mcmc"].get_samples()["beta"].mean(0)
        assert abs(mean[0] - 1) < 0.5 and abs(mean[1]) < 0.5


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
PAGES = ["README.md", "CHANGELOG.md", "benchmarks/README.md", "benchmarks/details.md", "benchmarks/gpu.md"]
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
