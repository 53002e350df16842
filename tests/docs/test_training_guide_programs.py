"""The programs of the training guide run as they stand."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "training.md"
PROGRAMS = {"features": 2, "adversaries": 1, "sharpness": 1, "llama": 1}
"""Ranks of each; that the bits do not depend on them is tested elsewhere."""


@pytest.mark.multiprocess
def test_programs_of_the_training_guide_run_as_shown(tmp_path):
    found = dict(re.findall(r"```python\n# (\w+)\.py\n(.*?)```", GUIDE.read_text(), re.DOTALL))
    assert list(found) == list(PROGRAMS)
    if importlib.util.find_spec("transformers") is None:
        del found["llama"]
    started = []
    for name, text in found.items():
        (tmp_path / f"{name}.py").write_text(text)
        command = [sys.executable, f"{name}.py", "-n", str(PROGRAMS[name])]
        started.append(
            subprocess.Popen(
                command,
                cwd=tmp_path,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    ends = [process.communicate(timeout=250) for process in started]
    for process, (output, errors) in zip(started, ends, strict=True):
        assert process.returncode == 0, errors
        assert "loss" in output
