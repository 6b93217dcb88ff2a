"""The code that README shows."""

from pathlib import Path
import re

import pytest

README = Path(__file__).parents[1] / "README.md"


@pytest.mark.slow
def test_readme_runs_and_mixes(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    scope: dict = {}
    exec(code, scope)
    assert scope["data"]["posterior"]["beta"].shape == (20, 1000, 3)
    assert "have not mixed" not in capsys.readouterr().out
