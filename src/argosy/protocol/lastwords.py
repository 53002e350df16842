"""Last words: what the error that a process left says about another start of it.

One rule for a cluster (control/restarts.py) and a household (worker/failures.py): an error of the source itself comes again, and so, most likely,
does one that was said twice without progress in between; but not what a program said after it had worked for long. Pure.
"""

from __future__ import annotations

from argosy.protocol.peerloss import exception_of

_OF_THE_SOURCE = (
    "SyntaxError",
    "IndentationError",
    "TabError",
    "ImportError",
    "ModuleNotFoundError",
    "NameError",
)
"""Exceptions that are a matter of the source: the same source raises them again."""
TOGETHER_SECONDS = 2.0
"""Ends that one failure causes come within this time, in any order."""
_NUMBERS = {2: "twice", 3: "three times"}


def last_words(error: str) -> str:
    """The last line of what the exception says; empty when it left none."""
    return exception_of(error).strip().rpartition("\n")[2]


def words_that_count(said: str, *, is_long: bool) -> str:
    """The last words of a program that had done nothing; one that lived long has worked, whether it told of steps or not."""
    return "" if is_long else said


def why_hopeless(error: str) -> str:
    """Why another start of a program that has done nothing yet would end in the same way; empty: it may not."""
    said = last_words(error)
    if said.partition(":")[0] not in _OF_THE_SOURCE:
        return ""
    return f"another start would end in the same way: {said}"


def describe_repeats(times: int) -> str:
    """That the same was said so often."""
    return f"it failed {_NUMBERS.get(times, f'{times} times')} in the same way without progress in between"
