"""Signed manifests: an Ed25519 signature over MANIFEST.json, which then has the SHA-256 of every file.

Made by whoever commits, from a private key in a file; checked by whoever was given public keys. Needs `cryptography`, which is optional and said to
be missing only when a key is used. No torch.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from argosy.checkpoint import directio, fetches, names, tables
from argosy.checkpoint.commits import Staging
from argosy.checkpoint.directio import BLOCKS, FILES, Files
from argosy.checkpoint.fetches import Stored
from argosy.checkpoint.folders import Folder
from argosy.checkpoint.manifests import FileRecord, Manifest
from argosy.errors import CheckpointDamaged, ConfigError

_ALGORITHM = "ed25519"
_MOST_BYTES = 4096


class NotTrusted(CheckpointDamaged):
    """Nobody whose key was given has signed it; it may be whole all the same."""


class Signature(msgspec.Struct, frozen=True, kw_only=True):
    """MANIFEST.sig."""

    algorithm: str
    key: str
    signature: str


def make_keys(private: Path, public: Path) -> None:
    """A new pair of keys as PEM files; neither is replaced."""
    library, serialization = _library()
    key = library.Ed25519PrivateKey.generate()
    plain = serialization.NoEncryption()
    pem, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    _put_new(private, key.private_bytes(pem, form, plain), 0o600)
    shown = serialization.PublicFormat.SubjectPublicKeyInfo
    _put_new(public, key.public_key().public_bytes(pem, shown), 0o644)


def sign(manifest: bytes, private: Path) -> bytes:
    """The bytes of MANIFEST.sig."""
    library, serialization = _library()
    try:
        key = serialization.load_pem_private_key(private.read_bytes(), password=None)
    except (OSError, ValueError, TypeError) as failure:
        raise ConfigError(
            f"{private} is no private key that can be used: {failure}",
            fix="make one: openssl genpkey -algorithm ed25519 -out key.pem",
        )
    if not isinstance(key, library.Ed25519PrivateKey):
        raise ConfigError(f"{private} is a key of another kind", fix="use an Ed25519 key")
    raw = key.public_key().public_bytes_raw()
    found = Signature(algorithm=_ALGORITHM, key=_text(raw), signature=_text(key.sign(manifest)))
    return msgspec.json.encode(found) + b"\n"


def read_public(path: Path) -> bytes:
    """The 32 bytes of a public key in a PEM file."""
    library, serialization = _library()
    try:
        key = serialization.load_pem_public_key(path.read_bytes())
    except (OSError, ValueError, TypeError) as failure:
        raise ConfigError(
            f"{path} is no public key: {failure}",
            fix="make it: openssl pkey -in key.pem -pubout -out key.pub",
        )
    if not isinstance(key, library.Ed25519PublicKey):
        raise ConfigError(f"{path} is a key of another kind", fix="use an Ed25519 key")
    raw: bytes = key.public_bytes_raw()
    return raw


def is_signed(folder: Folder) -> bool:
    """Whether there is a signature; says nothing about whose."""
    return folder.place.read_small(names.SIGNATURE, _MOST_BYTES) is not None


def check(folder: Folder, keys: Sequence[bytes]) -> None:
    """The manifest was signed by one of these keys, and every file is the one that was signed; CheckpointDamaged otherwise."""
    check_manifest(folder, keys)
    for name, record in folder.manifest.files.items():
        with folder.naming_tensors():
            found = _digest(folder.stored(name), folder.files)
        if found != record.sha256:
            raise CheckpointDamaged(
                f"{name} of {folder.path.name} is not the file that was signed",
                fix="use another checkpoint",
            )


def check_manifest(folder: Folder, keys: Sequence[bytes]) -> None:
    """The signature over the manifest alone; every file must have a digest in it."""
    what = f"{folder.path.name}"
    said = _read(folder, what)
    library, _ = _library()
    raw = _bytes(said.key, what)
    if said.algorithm != _ALGORITHM or raw not in keys:
        raise NotTrusted(
            f"{what} is signed by a key that is not trusted",
            fix="trust the public key that belongs to the one it was signed with",
        )
    try:
        signature = _bytes(said.signature, what)
        library.Ed25519PublicKey.from_public_bytes(raw).verify(signature, folder.manifest_bytes)
    except _invalid():
        raise CheckpointDamaged(
            f"the signature of {what} is not that of its manifest", fix="use another checkpoint"
        )
    bare = [name for name, one in folder.manifest.files.items() if one.sha256 is None]
    if bare:
        raise CheckpointDamaged(
            f"{what} is signed, but has no digest of {bare[0]}", fix="use another checkpoint"
        )


def with_digests(staging: Staging, manifest: Manifest, files: Files = FILES) -> Manifest:
    """The manifest with the SHA-256 of every file; each is read back and must have its checksums."""
    found = {}
    for name, record in manifest.files.items():
        digest = record.sha256 or _digest_of_staged(staging, name, record, files)
        found[name] = msgspec.structs.replace(record, sha256=digest)
    return msgspec.structs.replace(manifest, files=found)


def _digest_of_staged(staging: Staging, name: str, record: FileRecord, files: Files) -> str:
    directory, file = staging.path, name
    if record.stored == "origin" and record.origin is not None:
        directory = staging.store.path / names.step_name(record.origin.step)
        file = record.origin.file
    opened = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        descriptor, is_direct = directio.open_data(
            files, file, opened, record.size, f"step {staging.step}"
        )
    finally:
        os.close(opened)
    try:
        stored = Stored(
            name=name,
            descriptor=descriptor,
            size=record.size,
            chunk_bytes=record.chunk_bytes,
            table=tables.unpack(record.crc32c, name),
            is_direct=is_direct,
            checkpoint=f"step {staging.step}",
        )
        return _digest(stored, files)
    finally:
        os.close(descriptor)


def _digest(stored: Stored, files: Files) -> str:
    found = hashlib.sha256()
    with BLOCKS.lent() as block:
        for start in range(0, stored.size, fetches.STRETCH_BYTES):
            stop = min(stored.size, start + fetches.STRETCH_BYTES)
            fetches.fetch(stored, start, stop, block, files)
            found.update(block.memory[: stop - start])
    return found.hexdigest()


def _read(folder: Folder, what: str) -> Signature:
    data = folder.place.read_small(names.SIGNATURE, _MOST_BYTES)
    if data is None:
        raise NotTrusted(
            f"{what} is not signed", fix="load it without trust(…), or use one that was signed"
        )
    try:
        return msgspec.json.decode(data, type=Signature)
    except (msgspec.DecodeError, UnicodeDecodeError) as failure:
        raise CheckpointDamaged(f"{names.SIGNATURE} of {what} cannot be read: {failure}")


def _bytes(text: str, what: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise CheckpointDamaged(f"{names.SIGNATURE} of {what} is no signature")


def _text(raw: bytes) -> str:
    return base64.b64encode(raw).decode("ascii")


def _put_new(path: Path, data: bytes, mode: int) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    except OSError as failure:
        raise directio.disk_error(failure, f"{path} cannot be made")
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)


def _library() -> tuple[Any, Any]:
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise ConfigError(
            "signatures need the package `cryptography`",
            fix="pip install '.[signatures]' in the clone",
        )
    return ed25519, serialization


def _invalid() -> type[Exception]:
    from cryptography.exceptions import InvalidSignature

    found: type[Exception] = InvalidSignature
    return found
