from __future__ import annotations

import os
import subprocess
import sys

import pytest

from argosy.control.keeper.tracebacks import last_traceback, read_last_traceback
from argosy.protocol.lastwords import last_words, why_hopeless


def printed(source, tmp_path):
    """What Python itself prints as it ends over this source."""
    path = tmp_path / "program.py"
    path.write_text(source)
    done = subprocess.run([sys.executable, "-S", path], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    return done.stderr


IN_THREAD = (
    "import sys, threading\none = threading.Thread(target=lambda: 1 / 0)\none.start()\none.join()\n"
)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{}['missing']", "KeyError: 'missing'"),
        ("raise ValueError", "ValueError"),
        ("import sys\nprint('begun', file=sys.stderr)\nimport nowhere", "ModuleNotFoundError"),
        ("try:\n  1/0\nexcept ZeroDivisionError:\n  raise OSError('later')", "OSError: later"),
        ("import json\njson.loads('{')", "json.decoder.JSONDecodeError: Expecting property"),
        ("def f(:\n    pass", "SyntaxError: invalid syntax"),
        ("def f():\npass", "IndentationError: expected an indented block"),
        ("exec('def f(:')", "SyntaxError: invalid syntax"),
        ("def f(): f()\nf()", "RecursionError: maximum recursion depth exceeded"),
        ("raise ValueError('size:\\n\\tof a\\n\\tof b')", "ValueError: size:"),
        ("class A:\n  def __del__(self): 1/0\na = A()\nraise OSError('first')", "OSError: first"),
        (f"{IN_THREAD}sys.exit(1)", "ZeroDivisionError: division by zero"),
        (f"{IN_THREAD}raise OSError('main')", "OSError: main"),
    ],
)
def test_the_exception_that_ended_a_program_is_found_in_what_python_printed(
    source, words, tmp_path
):
    found = last_traceback(printed(source, tmp_path))
    assert last_words(found).startswith(words)
    assert found.startswith(("Traceback (most recent call last):", "  File "))


def test_a_source_that_cannot_run_is_known_by_what_python_printed(tmp_path):
    assert "SyntaxError" in why_hopeless(last_traceback(printed("def f(:", tmp_path)))


def test_ranks_before_the_lines_and_warnings_after_them_do_not_hide_it():
    text = (
        "[rank1]: Traceback (most recent call last):\n"
        '[rank1]:   File "crash.py", line 8, in <module>\n'
        "[rank1]: KeyError: 'missing'\n"
        "[rank1]:[W1116 13:30:00.1 ProcessGroup.cpp:1] Warning: destroy_process_group() was not called\n"
        "/lib/resource_tracker.py:254: UserWarning: resource_tracker: 1 leaked object\n"
        "  warnings.warn('resource_tracker: 1 leaked object')\n"
    )
    assert last_traceback(text) == (
        'Traceback (most recent call last):\n  File "crash.py", line 8, in <module>\n'
        "KeyError: 'missing'"
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no luck\n",
        "Error: no luck\n",
        "  indented\nError: no luck\n",
        "Traceback (most recent call last):\n  File x\nKeyError: 1\nretrying\ngave up\n",
        "Traceback (most recent call last):\n  File x\n",
        "Traceback (most recent call last):\n  File x\nno exception: this\n",
    ],
)
def test_what_ends_with_anything_else_is_no_traceback(text):
    assert last_traceback(text) == ""


def test_only_the_end_of_a_plain_file_is_read(tmp_path):
    path = tmp_path / "err"
    path.write_bytes(
        b"\xff" * (1 << 20) + b"\nTraceback (most recent call last):\n  x\nKeyError: 1\n"
    )
    assert last_words(read_last_traceback(str(path))) == "KeyError: 1"
    assert read_last_traceback(str(tmp_path / "none")) == ""
    os.mkfifo(tmp_path / "pipe")
    assert read_last_traceback(str(tmp_path / "pipe")) == ""
