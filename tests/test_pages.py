"""The code of a documentation page that is no notebook."""

import os
from pathlib import Path
import re
import subprocess
import sys

import pytest

DOCS = Path(__file__).parents[1] / "docs"


@pytest.mark.slow
def test_large_data_runs_from_top_to_bottom(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "large-data.md").read_text(), re.DOTALL)
    assert len(blocks) == 5
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(blocks)], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "'x': Rows(shape=(20000, 4), dtype=float32)" in done.stdout and "P('particles',)" in done.stdout
