"""Corpus: the Python standard library's own sources as a token file, so that demo and tests need no download.

`stdlib_corpus(path)` packs them byte by byte: files sorted by name, tests left out, about 16 MB at most. The same Python gives the same
bytes; calling it again with the same path costs a look at the sidecar. Several processes may call it at once.
"""

from __future__ import annotations

import os
import platform
import sysconfig
from pathlib import Path

from argosy.data.tokenfiles import TokenFile, read_sidecar
from argosy.data.tokenizers import ByteTokenizer
from argosy.data.tokenwriter import TokenWriter
from argosy.errors import DataError

MAX_BYTES = 16 << 20
_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


def stdlib_corpus(path: str | os.PathLike[str], max_bytes: int = MAX_BYTES) -> Path:
    """Write the corpus to `path` unless it is there; returns the path."""
    target = Path(path)
    root = Path(sysconfig.get_paths()["stdlib"])
    made_from = f"standard library of Python {platform.python_version()}, at most {max_bytes} bytes"
    if target.exists():
        _check_ours(target, made_from)
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    tokenizer = ByteTokenizer()
    taken = 0
    with TokenWriter(target, tokenizer, made_from=made_from) as writer:
        for file in find_sources(root):
            text = file.read_bytes()
            if not text or taken + len(text) > max_bytes:
                continue
            taken += len(text)
            writer.append_documents([text])
        writer.close()
    return target


def find_sources(root: Path) -> list[Path]:
    """The library's .py files in sorted order, without tests and installed packages."""
    found: list[Path] = []
    for directory, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in _LEFT_OUT)
        found += [Path(directory, name) for name in names if name.endswith(".py")]
    return sorted(found, key=lambda file: file.relative_to(root).as_posix())


def _check_ours(target: Path, made_from: str) -> None:
    """What is there must be this corpus: it is neither taken for it nor overwritten."""
    sidecar = read_sidecar(target)
    if sidecar is None or sidecar.made_from != made_from:
        found = sidecar.made_from if sidecar else "a file without a sidecar"
        raise DataError(
            f"{target} exists and is not the {made_from} (found: {found or 'another corpus'})",
            fix="name another path, or remove it",
        )
    TokenFile(target)
