"""The program in the reference of models runs as it stands."""

import re
from pathlib import Path

REFERENCE = Path(__file__).parents[3] / "docs" / "reference" / "models.md"


def test_the_program_of_the_reference_runs_and_describes_its_model(capsys):
    program = re.search(r"```python\n(.*?)```", REFERENCE.read_text(), re.DOTALL)
    exec(compile(program[1], str(REFERENCE), "exec"), {})
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first.startswith("GPT: ")
    assert last
