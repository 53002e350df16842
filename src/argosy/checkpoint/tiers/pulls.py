"""A checkpoint from an object store into a store on disk: every chunk verified, then committed like a save.

For `argosy checkpoint pull`; loads read the objects themselves. What comes out is an ordinary checkpoint: decrypted, with all of its files. No torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import msgspec

from argosy.checkpoint import collection, directio, fetches, manifests, names
from argosy.checkpoint.commits import Staging, Store
from argosy.checkpoint.directio import FILES, Buffer, Files
from argosy.checkpoint.fetches import STRETCH_BYTES, Job, Statistics
from argosy.checkpoint.folders import Folder
from argosy.errors import ConfigError

_MOST_SIGNATURE_BYTES = 4096


def pull(
    folder: Folder,
    store: Store,
    *,
    progress: Callable[[int], None] = lambda num_bytes: None,
    threads: int = fetches.THREADS,
    files: Files = FILES,
) -> int:
    """Bytes that were fetched; the store must be locked. Nothing is left behind when it fails."""
    signature = folder.place.read_small(names.SIGNATURE, _MOST_SIGNATURE_BYTES)
    manifest, data = folder.manifest, folder.manifest_bytes
    if signature is None:
        whole = {
            name: msgspec.structs.replace(record, origin=None, stored="here")
            for name, record in manifest.files.items()
        }
        manifest = msgspec.structs.replace(manifest, files=whole)
        data = manifests.encode(manifest)
    elif collection.needs_of(manifest):
        raise ConfigError(
            f"{folder.place.where} is signed and refers to step {collection.needs_of(manifest)[0]}",
            fix="load it from where it is",
        )
    num_bytes = sum(record.size for record in manifest.files.values())
    staging = store.stage(folder.step)
    try:
        directio.check_space(files, staging.fd, num_bytes, f"step {folder.step}")
        for name in manifest.files:
            _fetch_file(folder, staging, name, progress, threads, files)
        staging.commit(data, signature)
    except BaseException:
        staging.abandon()
        raise
    return num_bytes


def _fetch_file(
    folder: Folder,
    staging: Staging,
    name: str,
    progress: Callable[[int], None],
    threads: int,
    files: Files,
) -> None:
    stored = folder.stored(name)
    try:
        descriptor = files.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, staging.fd)
        try:
            files.reserve(descriptor, stored.size)

            def job(start: int, stop: int) -> Job:
                def fetch(block: Buffer) -> int:
                    fetches.fetch(stored, start, stop, block, folder.files)
                    directio.write_all(files, descriptor, block.memory[: stop - start], start)
                    progress(stop - start)
                    return stop - start

                return fetch

            starts = range(0, stored.size, STRETCH_BYTES)
            jobs = [job(at, min(stored.size, at + STRETCH_BYTES)) for at in starts]
            with folder.naming_tensors():
                fetches.run(jobs, Statistics(), threads)
            files.flush(descriptor)
        finally:
            os.close(descriptor)
    except OSError as failure:
        raise directio.disk_error(failure, f"{staging.path / name} cannot be written")
