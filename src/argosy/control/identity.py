"""Names that the deciders give: runs, attempts, commands; and jitter that needs no random state.

All are functions of what they name, so a replay of the log or of a simulation gives the same ones. Called by the
coordinator, the supervisor and the simulator; never draws from a clock or a generator.
"""

from __future__ import annotations

import hashlib

_DIGITS = "0123456789abcdefghjkmnpqrstvwxyz"


def run_id(counter: int, seed: str) -> str:
    """Short, unique in the cluster: the counter, and four characters that make ids of two clusters differ."""
    digest = hashlib.blake2b(f"{seed}/{counter}".encode(), digest_size=4).digest()
    return "r" + _base32(counter) + _base32(int.from_bytes(digest, "big"))[-4:].rjust(4, "0")


def counter_of(run: str) -> int | None:
    """The counter in a run's id; None: it is no id of a run."""
    digits = run[1:-4]
    if not run.startswith("r") or not digits or not set(run[1:]) <= set(_DIGITS):
        return None
    counter = 0
    for digit in digits:
        counter = counter * 32 + _DIGITS.index(digit)
    return counter


def attempt_id(run: str, role: str, index: int, number: int) -> str:
    """Readable and unique: `RUN.ROLE.INDEX.NUMBER`."""
    return f"{run}.{role}.{index}.{number}"


def run_of(attempt: str) -> str:
    """The run an attempt id belongs to."""
    return attempt.partition(".")[0]


def is_attempt(name: object) -> bool:
    """Whether a name is an attempt of a run; the keeper also has helpers and errands."""
    return isinstance(name, str) and name.count(".") == 3


def fraction(*parts: object) -> float:
    """A number in [0, 1) that depends on the parts alone."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=6).digest(), "big") / (1 << 48)


def token(attempt: str, secret: str) -> str:
    """What a worker shows to prove that it is this attempt."""
    return hashlib.blake2b(f"{secret}/{attempt}".encode(), digest_size=16).hexdigest()


def _base32(number: int) -> str:
    digits = ""
    while True:
        number, rest = divmod(number, 32)
        digits = _DIGITS[rest] + digits
        if number == 0:
            return digits
