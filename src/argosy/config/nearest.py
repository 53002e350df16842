"""Nearest names: the word a person probably meant.

Used wherever a key, a verb or an option is unknown. A word is near when it says the same in other letters (case, dashes), begins like a
known one or is contained in it as a part, or differs by a slip of the fingers. difflib is imported only when something is wrong.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

_LEAST_RATIO, _SURE_RATIO = 0.75, 0.85
_LEAST_BEGINNING = 3


def nearest(
    word: str,
    known: Iterable[str],
    *,
    meant: Mapping[str, str] | None = None,
    grave: Collection[str] = (),
) -> str:
    """The known word nearest to this one, or nothing when none is near.

    `meant`: known words by what others call the same. `grave`: known words that are named only when hardly anything else can be meant.
    """
    by_letters: dict[str, str] = {}
    for each in known:
        by_letters.setdefault(_letters(each), each)
    typed = _letters(word)
    if typed in by_letters:
        return by_letters[typed]
    synonym = (meant or {}).get(typed, "")
    if _letters(synonym) in by_letters:
        return by_letters[_letters(synonym)]
    # A word that is less alike must at least begin as it should.
    alike = [each for each in by_letters if each[:1] == typed[:1] and by_letters[each] not in grave]
    match = (
        _slipped(typed, by_letters, _SURE_RATIO)
        or _part(typed, by_letters)
        or _slipped(typed, alike, _LEAST_RATIO)
        or _beginning(typed, by_letters)
    )
    return by_letters[match] if match else ""


def _letters(word: str) -> str:
    """What is left when spelling habits are taken away; all options begin with dashes, so these say nothing."""
    return word.lower().lstrip("-").replace("_", "-")


def _slipped(typed: str, known: Iterable[str], least: float) -> str:
    """The best of those that are alike; one with the same letters in another order is as good as it gets."""
    import difflib

    best = ""
    for each in known:
        ratio = difflib.SequenceMatcher(None, each, typed).ratio()
        if len(typed) > 1 and sorted(each) == sorted(typed):
            ratio = 1.0
        elif each[:1] == typed[:1]:
            ratio += 0.05  # the first letter is seldom wrong
        if ratio >= least + (1e-9 if best else 0.0):
            best, least = each, ratio
    return best


def _beginning(typed: str, known: Iterable[str]) -> str:
    """The shortest that begins so."""
    if len(typed) < _LEAST_BEGINNING:
        return ""
    return min((each for each in known if each.startswith(typed)), key=len, default="")


def _part(typed: str, known: Iterable[str]) -> str:
    """The shortest of several words, one of which it is."""
    several = (each for each in known if typed in each.replace(" ", "-").split("-"))
    return min(several, key=len, default="")


def did_you_mean(
    word: str, known: Iterable[str], *, otherwise: str = "", meant: Mapping[str, str] | None = None
) -> str:
    """A fix that names the nearest word; else `otherwise`, else all known words."""
    words = list(known)
    match = nearest(word, words, meant=meant)
    if match:
        return f"did you mean `{match}`?"
    return otherwise or f"known are: {', '.join(sorted(words))}"
