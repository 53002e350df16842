"""Does an error say that a peer was lost? Then it is collateral: some other process failed first.

Asked by the controller when it ranks the exits of a gang, and by `argosy why`, so that both name the same first cause. Only
what the exception itself says counts, never its frames: files and directories may have any name.
"""

from __future__ import annotations

import json

_WORDS = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "socket timeout",
    "distbackenderror",
    "distnetworkerror",
    "diststoreerror",
    "processgroup",
    "gloo",
    "nccl",
    "tcpstore",
    "generationchanged",
    "a member left",
    "peer lost: rank",
)


def is_peer_loss(error: str) -> bool:
    """Whether the error (a traceback, or an error file in torch's JSON form) is that of a lost peer."""
    text = exception_of(error).lower()
    return any(word in text for word in _WORDS)


def exception_of(error: str) -> str:
    """What the exception says, without the frames of its traceback."""
    text = error.strip()
    if text.startswith("{"):
        try:
            message = json.loads(text)["message"]
        except (ValueError, KeyError, TypeError):
            return text
        text = str(message.get("message", "")) if isinstance(message, dict) else str(message)
    return "\n".join(line for line in text.splitlines() if not line.startswith(" "))
