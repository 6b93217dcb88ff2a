"""Executes the notebooks, as many at a time as there are cores, and keeps their outputs where Sphinx finds them.

Sphinx recognizes a notebook by its code, and not by where it lies. Nothing is kept from one call to the next: what the
pages show is what the code does.

    python docs/execute.py [names of notebooks ...]
"""

import logging
from pathlib import Path
import shutil
import sys
import time

from jupyter_cache import get_cache
from jupyter_cache.executors import load_executor

DOCS = Path(__file__).parent
NOTEBOOKS = DOCS.parent / "notebooks"
CACHE = DOCS / "_build" / ".jupyter_cache"
#: Seconds that a cell may take.
LIMIT = 600


def main(names):
    notebooks = sorted(NOTEBOOKS.glob("*.ipynb"))
    if unknown := set(names) - {path.stem for path in notebooks}:
        raise SystemExit(f"No notebook is called {', '.join(sorted(unknown))}.")
    shutil.rmtree(CACHE, ignore_errors=True)
    cache = get_cache(CACHE)
    for path in notebooks:
        if not names or path.stem in names:
            cache.add_nb_to_project(path)
    logger = logging.getLogger("notebooks")
    began = time.perf_counter()
    found = load_executor("local-parallel", cache, logger).run_and_cache(timeout=LIMIT)
    print(f"{len(found.succeeded)} notebooks ran in {time.perf_counter() - began:.0f} s.")
    for uri in (*found.excepted, *found.errored):
        print(f"{uri} failed:\n{cache.get_project_record(uri).traceback}", file=sys.stderr)
    return bool(found.excepted or found.errored)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
