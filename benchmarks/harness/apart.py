"""A row measured in a process of its own, which is ended when its time is up, so that no peer can stop a study.

python -m benchmarks.harness.apart MODULE FUNCTION ARGUMENTS PATH
"""

import importlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import traceback
from typing import Any
import warnings

from benchmarks.harness.store import ROOT


def apart(
    module: str, function: str, killed_after: float, environment: dict[str, str] | None = None, **arguments: Any
) -> dict[str, Any]:
    """What the function of that module returns, or ``{"failed": why}`` if it raises, dies or takes too long.

    Arguments and what is returned go through JSON; ``environment`` is set beside that of this process.
    """
    with tempfile.TemporaryDirectory() as folder:
        path, errors = pathlib.Path(folder) / "row.json", pathlib.Path(folder) / "errors.txt"
        command = [sys.executable, "-m", "benchmarks.harness.apart", module, function, json.dumps(arguments), str(path)]
        settings: dict[str, Any] = {"cwd": ROOT, "env": os.environ | (environment or {})}
        with errors.open("w") as stream:
            try:
                done = subprocess.run(command, stderr=stream, timeout=killed_after, **settings)
            except subprocess.TimeoutExpired:
                return {"failed": f"ended after {killed_after:.0f} s"}
        row = json.loads(path.read_text()) if path.exists() else {"failed": f"exit status {done.returncode}"}
        if "failed" in row:
            print(errors.read_text().strip()[-3000:], flush=True)
        return row


def main() -> None:
    warnings.simplefilter("ignore")
    module, function, arguments, path = sys.argv[1:]
    try:
        row = getattr(importlib.import_module(module), function)(**json.loads(arguments))
    except Exception as error:
        traceback.print_exc()
        row = {"failed": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
    pathlib.Path(path).write_text(json.dumps(row))


if __name__ == "__main__":
    main()
