"""`argosy version`."""

from __future__ import annotations

import json
import sys

from argosy import __version__
from argosy.cli.arguments import Arguments


def version(arguments: Arguments) -> int:
    """Print the version, with --json also that of Python."""
    if arguments.get("json"):
        python = ".".join(map(str, sys.version_info[:3]))
        print(json.dumps({"version": __version__, "python": python, "executable": sys.executable}))
    else:
        print(f"argosy {__version__}")
    return 0
