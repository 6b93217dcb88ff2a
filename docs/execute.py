"""Executes the notebooks, as many at a time as there are cores, and keeps their outputs where Sphinx finds them.

Sphinx recognizes a notebook by its code, not by its path. Nothing is kept from one call to the next: the pages always
show the outputs of the present code. With ``--store`` the notebooks get these outputs too, cleaned and small, and
docs/_static/gallery one thumbnail for each notebook (see docs/stored_outputs.py). Notebooks that the environment
variable STORED_NOTEBOOKS names are executed only if they are asked for; their pages show the outputs that they store.

    python docs/execute.py [--store] [names of notebooks ...]
"""

import argparse
import logging
import os
from pathlib import Path
import shutil
import sys
import time

from jupyter_cache import get_cache
from jupyter_cache.executors import load_executor
import nbformat
import stored_outputs as outputs

import numpyro_repulsion

DOCS = Path(__file__).parent
NOTEBOOKS = DOCS.parent / "notebooks"
GALLERY = DOCS / "_static" / "gallery"
CACHE = DOCS / "_build" / ".jupyter_cache"
#: Seconds that a cell may take.
LIMIT = 600


def store(path, notebook, executed):
    """Writes the outputs into the notebook, and its thumbnail; returns sentences on what is wrong with them."""
    outputs.store(notebook, executed, numpyro_repulsion.__version__)
    nbformat.write(nbformat.from_dict(notebook), path)
    GALLERY.joinpath(f"{path.stem.split('_', 1)[1]}.png").write_bytes(outputs.thumbnail(executed))
    found = list(outputs.problems(notebook))
    if (size := path.stat().st_size) > outputs.SIZE:
        found.append(f"It has {size:,} bytes; the limit is {outputs.SIZE:,}.")
    return found


def main(names, *, stored=False):
    notebooks = sorted(NOTEBOOKS.glob("*.ipynb"))
    if unknown := set(names) - {path.stem for path in notebooks}:
        raise SystemExit(f"No notebook is called {', '.join(sorted(unknown))}.")
    stored_already = os.environ.get("STORED_NOTEBOOKS", "").split()
    notebooks = [path for path in notebooks if (path.stem in names if names else path.stem not in stored_already)]
    # Notebooks show their figures whatever backend the shell chose.
    os.environ.pop("MPLBACKEND", None)
    shutil.rmtree(CACHE, ignore_errors=True)
    cache = get_cache(CACHE)
    for path in notebooks:
        cache.add_nb_to_project(path)
    logger = logging.getLogger("notebooks")
    began = time.perf_counter()
    found = load_executor("local-parallel", cache, logger).run_and_cache(timeout=LIMIT)
    print(f"{len(found.succeeded)} notebooks ran in {time.perf_counter() - began:.0f} s.")
    failed = [*found.excepted, *found.errored]
    for uri in failed:
        print(f"{uri} failed:\n{cache.get_project_record(uri).traceback}", file=sys.stderr)
    wrong = False
    for path in (path for path in notebooks if str(path) not in failed):
        notebook = nbformat.read(path, as_version=4)
        _, executed = cache.merge_match_into_notebook(notebook)
        if stored:
            for problem in store(path, notebook, executed):
                print(f"{path.name}: {problem}", file=sys.stderr)
                wrong = True
        elif cells := outputs.reworded(notebook, executed):
            which = ", ".join(map(str, cells))
            print(f"{path.name}: the stored outputs of code cells {which} are out of date; run `make store-notebooks`.")
    return bool(failed or wrong)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Execute the notebooks.")
    parser.add_argument("names", nargs="*", help="names of notebooks, such as 01_quickstart; by default all")
    parser.add_argument("--store", action="store_true", help="write the outputs into the notebooks, and the thumbnails")
    arguments = parser.parse_args()
    sys.exit(main(arguments.names, stored=arguments.store))
