"""The tokens that the training benchmarks read: bytes of the Python standard library's sources, in a file of the measurement's own."""

from __future__ import annotations

import sysconfig
from pathlib import Path

BYTES = 4 << 20


def write_tokens(directory: Path) -> Path:
    """Bytes as uint16, two files to a plain file without a sidecar: any side can read it."""
    path = directory / "tokens.bin"
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = b"\n".join(source.read_bytes() for source in sources)[:BYTES]
    # Little-endian uint16: each byte and a zero.
    wide = bytearray(2 * len(text))
    wide[::2] = text
    path.write_bytes(wide)
    return path
