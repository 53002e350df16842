"""Encrypted objects: AES-256-GCM per chunk, a key of its own for every object that is sent, so that no nonce can repeat.

A `Secret` is a file of 32 bytes; a `Seal` belongs to one object and seals or opens chunks of it. The layout is in docs/reference/checkpoint-format.md.
Needs `cryptography`, which is said to be missing only when a key is used. No torch.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
from pathlib import Path
from typing import Any

import msgspec

import argosy
from argosy.checkpoint import checksums, names, tables
from argosy.errors import CheckpointDamaged, ConfigError

_MAGIC = b"argosy-aes-gcm-1"
_SALT_BYTES = 32
HEADER_BYTES = len(_MAGIC) + _SALT_BYTES
TAG_BYTES = 16
_KEY_BYTES = 32


class Sealed(msgspec.Struct, frozen=True, kw_only=True):
    """MANIFEST.json of an encrypted checkpoint, but for its own checksum."""

    format: str = names.FORMAT
    version: int = names.VERSION
    requires: tuple[str, ...] = (names.ENCRYPTED,)
    step: int
    writer: str = ""
    key: str
    sealed: str


class Seal:
    """One object's key and name."""

    def __init__(self, cipher: Any, salt: bytes, name: str) -> None:
        self._cipher = cipher
        self._name = name
        self.header = _MAGIC + salt

    def seal(self, data: memoryview | bytes, first: int, count: int, chunk_bytes: int) -> bytes:
        """Chunks from number `first` of `count` on, encrypted, each with its tag."""
        view, found = memoryview(data), []
        for at in range(0, len(view), chunk_bytes):
            index = first + at // chunk_bytes
            piece = view[at : at + chunk_bytes]
            found.append(self._cipher.encrypt(_nonce(index), piece, self._extra(index, count)))
        return b"".join(found)

    def open(
        self, data: memoryview | bytes, into: memoryview, first: int, count: int, chunk_bytes: int
    ) -> int:
        """Decrypt whole chunks; how many plain bytes. CheckpointDamaged names the chunk that is not what was sealed."""
        view, done = memoryview(data), 0
        step = chunk_bytes + TAG_BYTES
        for at in range(0, len(view), step):
            index = first + at // step
            try:
                plain = self._cipher.decrypt(
                    _nonce(index), view[at : at + step], self._extra(index, count)
                )
            except _invalid():
                raise CheckpointDamaged(
                    f"{self._name}: chunk {index} is not what was encrypted",
                    fix="use another checkpoint, or a copy of this one",
                )
            into[done : done + len(plain)] = plain
            done += len(plain)
        return done

    def _extra(self, index: int, count: int) -> bytes:
        return f"{self._name}#{index}/{count}".encode()


class Secret:
    """The key of a store."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw
        self.identity = hmac.digest(raw, b"argosy-checkpoint key", "sha256").hex()[:16]

    @classmethod
    def read(cls, path: Path | str) -> Secret:
        """From its file."""
        try:
            raw = Path(path).read_bytes()
        except OSError as failure:
            raise ConfigError(
                f"the key {path} cannot be read: {failure.strerror}", fix="give the key's file"
            )
        if len(raw) != _KEY_BYTES:
            raise ConfigError(
                f"the key {path} has {len(raw)} bytes, not {_KEY_BYTES}",
                fix=f"make one: head -c {_KEY_BYTES} /dev/urandom > key",
            )
        _library()
        return cls(raw)

    def sealing(self, name: str) -> Seal:
        """For an object that is about to be sent; another one each time."""
        return self._seal(secrets.token_bytes(_SALT_BYTES), name)

    def opening(self, header: bytes, name: str) -> Seal:
        """For an object that begins so."""
        if len(header) != HEADER_BYTES or not header.startswith(_MAGIC):
            raise CheckpointDamaged(
                f"{name} is not encrypted as its checkpoint says", fix="use another checkpoint"
            )
        return self._seal(header[len(_MAGIC) :], name)

    def _seal(self, salt: bytes, name: str) -> Seal:
        aead, derive = _library()
        return Seal(aead.AESGCM(derive(self._raw, salt)), salt, name)


def sealed_size(size: int, chunk_bytes: int) -> int:
    """Of an object that holds so many plain bytes."""
    return HEADER_BYTES + size + TAG_BYTES * tables.num_chunks(size, chunk_bytes)


def mark_of(size: int, chunk_bytes: int, crc32c: str, key: str) -> str:
    """By which an object of data is known to hold what is to be sent."""
    return hashlib.sha256(f"{size}\n{chunk_bytes}\n{crc32c}\n{key}".encode()).hexdigest()


def seal_manifest(secret: Secret, step: int, data: bytes) -> bytes:
    """The bytes of MANIFEST.json that hold a plain one."""
    seal = secret.sealing(_manifest_name(step))
    text = base64.b64encode(seal.header + seal.seal(data, 0, 1, max(1, len(data)))).decode("ascii")
    said = Sealed(
        step=step, writer=f"argosy {argosy.__version__}", key=secret.identity, sealed=text
    )
    body = msgspec.json.encode(said)[:-1]
    return body + b',"crc32c":%d}\n' % checksums.of_bytes(body)


def open_manifest(secret: Secret | None, step: int, data: bytes, where: str) -> bytes:
    """The plain manifest in what lies there, which may be plain itself."""
    if names.ENCRYPTED.encode() not in data[:256]:
        if secret is not None:
            raise ConfigError(
                f"{where} is not encrypted, and a key was given: anybody may have put it there",
                fix="leave the key out to read it all the same",
            )
        return data
    try:
        said = msgspec.json.decode(data, type=Sealed)
        sealed = base64.b64decode(said.sealed, validate=True)
    except (msgspec.DecodeError, UnicodeDecodeError, binascii.Error, ValueError):
        raise CheckpointDamaged(
            f"the manifest of {where} cannot be read", fix="use another checkpoint"
        )
    if secret is None:
        raise ConfigError(
            f"{where} is encrypted with the key {said.key}",
            fix="give the key's file: Objects(…, key=FILE), or --secret FILE",
        )
    if said.key != secret.identity:
        raise ConfigError(
            f"{where} is encrypted with the key {said.key}, this one is {secret.identity}",
            fix="give the file of that key",
        )
    seal = secret.opening(sealed[:HEADER_BYTES], _manifest_name(step))
    size = len(sealed) - HEADER_BYTES - TAG_BYTES
    plain = bytearray(max(0, size))
    seal.open(sealed[HEADER_BYTES:], memoryview(plain), 0, 1, max(1, size))
    return bytes(plain)


def _manifest_name(step: int) -> str:
    return f"{names.step_name(step)}/{names.MANIFEST}"


def _nonce(index: int) -> bytes:
    return index.to_bytes(12, "big")


def _library() -> tuple[Any, Any]:
    try:
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.ciphers import aead
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF
    except ImportError:
        raise ConfigError(
            "encryption needs the package `cryptography`",
            fix="pip install '.[objects]' in the clone",
        )

    def derive(raw: bytes, salt: bytes) -> bytes:
        info = b"argosy-checkpoint object"
        return HKDF(hashes.SHA256(), _KEY_BYTES, salt, info).derive(raw)

    return aead, derive


def _invalid() -> type[Exception]:
    from cryptography.exceptions import InvalidTag

    found: type[Exception] = InvalidTag
    return found
