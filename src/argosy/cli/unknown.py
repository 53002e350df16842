"""Unknown verbs: what a person probably meant by a word that is none.

Called by app.py and help.py when a command line begins with something else; names the nearest verb, what other tools call the same,
or the words that may follow a first one (`queue`, `checkpoint`, `data`).
"""

from __future__ import annotations

import os

from argosy.cli.verbs import VERBS
from argosy.config.nearest import nearest
from argosy.errors import ConfigError

_MEANT = {
    "list": "ps", "ls": "ps", "top": "ps", "jobs": "ps", "start": "run", "launch": "run", "torchrun": "run",
    "submit": "queue add", "enqueue": "queue add", "cancel": "queue cancel", "tail": "logs", "output": "logs",
    "rm": "stop", "delete": "stop", "terminate": "stop", "end": "stop", "shutdown": "down", "init": "up",
    "explain": "why", "describe": "why", "history": "events", "resize": "scale", "shell": "exec", "ssh": "exec",
    "debug": "stacks", "backtrace": "stacks", "pystack": "stacks", "inject": "fault", "check": "doctor", "info": "status",
    "example": "demo", "ckpt": "checkpoint", "checkpoints": "checkpoint", "dataset": "data",
}  # fmt: skip
"""What others call it."""
_GRAVE = ("stop", "kill", "down")
"""What ends runs, without a word more the newest or all of them."""
_MEANT_BELOW = {
    "list": "ls", "new": "add", "submit": "add", "remove": "cancel", "rm": "cancel", "delete": "cancel", "info": "show",
    "cat": "show", "check": "verify", "compare": "diff", "clean": "gc", "prune": "gc", "make": "pack", "inspect": "show",
}  # fmt: skip


def words_below(first: str) -> list[str]:
    """The second words of verbs that begin so: `add`, `cancel`, `ls` of `queue`."""
    names = [verb.name for verb in VERBS]
    return [name.partition(" ")[2] for name in names if name.startswith(f"{first} ")]


def unknown_verb(words: list[str]) -> ConfigError:
    """The error for a command line, or a request for help, that begins with no verb."""
    first, below = words[0], words_below(words[0])
    if below:
        return _unknown_below(first, words[1] if len(words) > 1 else "", below)
    if os.path.isfile(first):
        return ConfigError(f"there is no verb {first!r}", fix=f"to start it: argosy run {first}")
    known = dict.fromkeys(word for verb in VERBS for word in (verb.name.split()[0], verb.name))
    match = nearest(first, known, meant=_MEANT, grave=_GRAVE)
    fix = f"did you mean `argosy {match}`?" if match else "`argosy help` lists the verbs"
    return ConfigError(f"there is no verb {first!r}", fix=fix)


def _unknown_below(first: str, second: str, below: list[str]) -> ConfigError:
    some = ", ".join(below)
    if not second or second.startswith("-"):
        return ConfigError(
            f"`argosy {first}` needs a second word", fix=f"one of {some}; see `argosy help {first}`"
        )
    match = nearest(second, below, meant=_MEANT_BELOW)
    fix = f"did you mean `argosy {first} {match}`?" if match else f"`argosy {first}` has {some}"
    return ConfigError(f"there is no verb '{first} {second}'", fix=fix)
