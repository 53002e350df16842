"""Digests of the user's own source files: the script and what it imported from beside or beneath itself.

Taken by `launch` for the run's record, so that a resume with other code is noticed. Libraries are not looked at: versions that decide numbers are in the numerics fingerprint.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Mapping

import argosy

_LIBRARIES = ("site-packages", "dist-packages")


def digest_sources() -> dict[str, str]:
    """Short digests by path, relative to the script's directory; empty where there is no script."""
    script = _script()
    if not script:
        return {}
    directory = os.path.dirname(script)
    own = os.path.dirname(os.path.abspath(argosy.__file__))
    found = {}
    for module in [sys.modules["__main__"], *list(sys.modules.values())]:
        path = os.path.abspath(getattr(module, "__file__", None) or "")
        is_library = path.startswith((own + os.sep, sys.prefix + os.sep, sys.base_prefix + os.sep))
        if not path.startswith(directory + os.sep) or (is_library and path != script):
            continue
        name = os.path.relpath(path, directory)
        if name.endswith(".py") and not any(part in _LIBRARIES for part in name.split(os.sep)):
            found[name] = _digest(path)
    return {name: digest for name, digest in sorted(found.items()) if digest}


def name_script() -> str:
    """The script among them; empty where there is none."""
    return os.path.basename(_script())


def find_changed(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Files that both know and that differ: what is new is imported by something that has changed."""
    return [name for name in before if name in after and before[name] != after[name]]


def is_replaced(script: str, before: Mapping[str, str], after: Mapping[str, str]) -> bool:
    """Whether the script that a run began with is not part of the program any more, under whatever name."""
    return script in before and script not in after and before[script] not in after.values()


def _script() -> str:
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    return os.path.abspath(main) if main else ""


def _digest(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.sha256(file.read()).hexdigest()[:16]
    except OSError:
        return ""  # it has been removed since it was imported
