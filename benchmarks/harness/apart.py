"""A row measured in a process of its own, which is ended when its time is up, so that no peer can stop a study.

python -m benchmarks.harness.apart MODULE FUNCTION ARGUMENTS PATH
"""

import importlib
import json
import pathlib
import subprocess
import sys
import tempfile
import traceback
from typing import Any

from benchmarks.harness.store import ROOT


def apart(module: str, function: str, killed_after: float, **arguments: Any) -> dict[str, Any]:
    """What the function of that module returns, or ``{"failed": why}`` if it raises, dies or takes too long.

    :param killed_after: how many seconds the process may take.
    :param arguments: of the function; they and what it returns go through JSON.
    """
    with tempfile.TemporaryDirectory() as folder:
        path, errors = pathlib.Path(folder) / "row.json", pathlib.Path(folder) / "errors.txt"
        command = [sys.executable, "-m", "benchmarks.harness.apart", module, function, json.dumps(arguments), str(path)]
        with errors.open("w") as stream, subprocess.Popen(command, cwd=ROOT, stderr=stream) as child:
            try:
                child.wait(killed_after)
            except subprocess.TimeoutExpired:
                child.kill()
                return {"failed": f"ended after {killed_after:.0f} s"}
        row = json.loads(path.read_text()) if path.exists() else {"failed": f"exit status {child.returncode}"}
        if "failed" in row:
            print(errors.read_text().strip()[-3000:], flush=True)
        return row


def main() -> None:
    module, function, arguments, path = sys.argv[1:]
    try:
        row = getattr(importlib.import_module(module), function)(**json.loads(arguments))
    except Exception as error:
        traceback.print_exc()
        row = {"failed": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
    pathlib.Path(path).write_text(json.dumps(row))


if __name__ == "__main__":
    main()
