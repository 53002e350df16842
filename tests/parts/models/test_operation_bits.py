"""Every operation that GPT uses gives the same bits in every process, at every repeat and at every address."""

import json
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parent / "bits_of_operations.py"


def test_every_operation_of_the_models_gives_one_digest_in_every_process_at_every_address():
    processes = [
        subprocess.Popen([sys.executable, str(PROGRAM)], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=100)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    first, second = map(json.loads, outputs)
    assert {name: digests for name, digests in first.items() if len(digests) != 1} == {}
    assert first == second
    assert len(first) == 20
