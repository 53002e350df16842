"""The programs of the data guide run as they stand."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "data.md"


@pytest.mark.multiprocess
def test_programs_of_the_data_guide_run_as_shown(tmp_path):
    programs = re.findall(r"```python\n# (\w+)\.py\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert [name for name, _ in programs] == ["corpus", "mixture", "dataset", "documents"]
    # One process for all of them: torch is imported once.
    driver = "import runpy\n" + "".join(f"runpy.run_path('{name}.py')\n" for name, _ in programs)
    for name, text in [*programs, ("driver", driver)]:
        (tmp_path / f"{name}.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "driver.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    assert "torch.Size([4, 256]) torch.Size([4, 256])" in done.stdout
    assert "of the places" in done.stdout
