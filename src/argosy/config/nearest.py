"""Nearest names: the word a person probably meant.

Used wherever a key, a verb or an option is unknown. difflib is imported only when something is wrong.
"""

from __future__ import annotations

from collections.abc import Iterable


def nearest(word: str, known: Iterable[str]) -> str:
    """The known word nearest to this one, or nothing when none is near."""
    import difflib

    matches = difflib.get_close_matches(word.lower(), list(known), n=1, cutoff=0.6)
    return matches[0] if matches else ""


def did_you_mean(word: str, known: Iterable[str], *, otherwise: str = "") -> str:
    """A fix that names the nearest word; else `otherwise`, else all known words."""
    words = list(known)
    match = nearest(word, words)
    if match:
        return f"did you mean `{match}`?"
    return otherwise or f"known are: {', '.join(sorted(words))}"
