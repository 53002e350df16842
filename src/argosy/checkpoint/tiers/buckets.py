"""An object store, as the rest of tiers/ needs it: list, read ranges, put, create only what is not there, remove; with retries and a deadline.

The only file that knows `obstore`, which is imported when a bucket is made. Errors that trying again cannot mend are told at once, the others when
the patience is over. A `file://` address is a directory, flushed to its disk. No torch.
"""

from __future__ import annotations

import logging
import math
import os
import random
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

from argosy.errors import ArgosyError, ConfigError, HomeError, NotFoundError, TimedOut

_LOG = logging.getLogger("argosy.checkpoint")
_CLIENT = ("allow_http", "connect_timeout", "timeout", "read_timeout", "proxy_url")
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
_MARK = "argosymark"
_STATUS = re.compile(r"status code: (\d{3})")
_PASSING = (408, 409, 425, 429)
"""Refusals that trying again may mend."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 10.0
PART_BYTES = 8 << 20
_MOST_PARTS = 9000
_PARTS_AT_ONCE = 3

T = TypeVar("T")

_used_by = 0
"""The process that first reached a store over the network here: the library's threads do not survive a fork, and it would wait for them for ever."""


@dataclass(frozen=True)
class Found:
    """An object that is there."""

    size: int
    tag: str
    """Changes when the object does."""
    mark: str | None = None


class Bucket:
    """The objects under one address."""

    def __init__(
        self,
        url: str,
        options: dict[str, str] | None = None,
        *,
        patience_seconds: float = 60.0,
        is_made: bool = True,
    ) -> None:
        """With `is_made` a directory that is not there is made; buckets never are."""
        self.url = url.rstrip("/")
        self.patience_seconds = patience_seconds
        self.until = math.inf
        """When everything is given up, by the monotonic clock."""
        self._library = _library()
        self.directory = _directory_of(self.url)
        self._refuse_fork()
        self._store = self._opened(dict(options or {}), is_made)

    def list(self, prefix: str = "") -> dict[str, Found]:
        """All objects whose path begins with these parts."""

        def call() -> dict[str, Found]:
            stream = self._library.list(self._store, prefix or None, chunk_size=1000)
            return {
                one["path"]: Found(one["size"], one["e_tag"] or "")
                for some in stream
                for one in some
            }

        try:
            return self._again("listed", call)
        except FileNotFoundError as failure:
            if self.directory is not None:
                return {}
            raise self._missing(failure)

    def look(self, path: str) -> Found | None:
        """One object; None when it is not there."""

        def call() -> Found:
            found = self._library.get(self._store, path, options={"head": True})
            mark = {str(key).lower(): value for key, value in found.attributes.items()}.get(_MARK)
            return Found(found.meta["size"], found.meta["e_tag"] or "", mark)

        return self._if_there(f"asked for {path}", call)

    def read(self, path: str) -> bytes | None:
        """All of a small object; None when it is not there."""
        return self._if_there(
            f"read: {path}", lambda: bytes(self._library.get(self._store, path).bytes())
        )

    def read_range(self, path: str, start: int, length: int) -> Any:
        """Bytes of an object, fewer at its end; None when it is not there."""
        return self._if_there(
            f"read: {path}",
            lambda: self._library.get_range(self._store, path, start=start, length=length),
        )

    def put(
        self, path: str, size: int, pieces: Callable[[], Iterator[bytes]], mark: str = ""
    ) -> str:
        """Send an object, in parts when it is large, and replace what was there; its tag. `pieces` begins anew with each attempt."""
        part = max(PART_BYTES, -(-size // _MOST_PARTS))
        attributes = {_MARK: mark} if mark and self.directory is None else None

        def call() -> str:
            put = self._library.put
            if size <= part:
                whole = b"".join(pieces())
                done = put(self._store, path, whole, attributes=attributes, use_multipart=False)
            else:
                done = put(
                    self._store,
                    path,
                    pieces(),
                    attributes=attributes,
                    use_multipart=True,
                    chunk_size=part,
                    max_concurrency=_PARTS_AT_ONCE,
                )
            return str(done["e_tag"] or "")

        try:
            return self._again(f"sent: {path}", call)
        except FileNotFoundError as failure:
            raise self._missing(failure)

    def create(self, path: str, data: bytes) -> bool:
        """Put an object only if there is none; whether there was none."""
        exists = self._library.exceptions.AlreadyExistsError

        def call() -> bool:
            try:
                self._library.put(self._store, path, data, mode="create")
            except exists:
                return False
            return True

        try:
            is_new = self._again(f"created: {path}", call)
        except FileNotFoundError as failure:
            raise self._missing(failure)
        self.flush([path])
        return is_new

    def remove(self, paths: Sequence[str]) -> None:
        """Delete objects; those that have gone already are fine."""
        for path in paths:
            self._if_there(f"removed: {path}", partial(self._library.delete, self._store, path))
        if self.directory is not None:
            for path in paths:
                _remove_halves(self.directory / path)
                try:
                    (self.directory / path).parent.rmdir()
                except OSError:
                    pass  # others lie there

    def flush(self, paths: Iterable[str]) -> None:
        """Objects that were put survive loss of power: object stores promise it, a directory is made to."""
        if self.directory is None:
            return
        folders = {self.directory, *((self.directory / path).parent for path in paths)}
        for path in paths:
            _remove_halves(self.directory / path)
        try:
            for one in [*(self.directory / path for path in paths), *folders]:
                descriptor = os.open(one, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
        except OSError as failure:
            raise HomeError(f"{self.url} cannot be flushed: {failure.strerror}")

    def _if_there(self, what: str, call: Callable[[], T]) -> T | None:
        try:
            return self._again(what, call)
        except FileNotFoundError:
            return None

    def _again(self, what: str, call: Callable[[], T]) -> T:
        """Try until it works, cannot work, or the patience is over; FileNotFoundError is the caller's."""
        global _used_by
        self._refuse_fork()
        if self.directory is None:
            _used_by = os.getpid()
        deadline = min(time.monotonic() + self.patience_seconds, self.until)
        pause = _FIRST_PAUSE
        while True:
            try:
                return call()
            except (FileNotFoundError, ArgosyError):
                raise
            except (self._library.exceptions.BaseError, OSError, NotImplementedError) as failure:
                self._refuse(what, failure)
                wait = pause * random.uniform(0.5, 1.0)
                if time.monotonic() + wait > deadline:
                    raise TimedOut(
                        f"{self.url} cannot be {what}: {_first_line(failure)}",
                        fix="see whether the object store answers; what is there is untouched",
                    )
                _LOG.info("%s: trying again: %s", self.url, _first_line(failure))
            time.sleep(wait)
            pause = min(_LONGEST_PAUSE, 2 * pause)

    def _refuse_fork(self) -> None:
        if self.directory is None and _used_by not in (0, os.getpid()):
            raise ConfigError(
                f"{self.url} cannot be used in a fork of process {_used_by}, which has used an object store",
                fix="use object stores only after the fork, or start processes by spawn",
            )

    def _refuse(self, what: str, failure: Exception) -> None:
        """Raise when trying again cannot help."""
        known = self._library.exceptions
        text = _first_line(failure)
        said = _STATUS.search(text)
        status = int(said[1]) if said else 0
        denied = (known.PermissionDeniedError, known.UnauthenticatedError, PermissionError)
        if isinstance(failure, denied) or status in (401, 403):
            raise ConfigError(
                f"{self.url} cannot be {what}: not allowed: {text}",
                fix="give credentials that may (the environment's, or options=…)",
            )
        if status == 404:
            raise self._missing(failure)
        never = (known.InvalidPathError, known.NotSupportedError, NotImplementedError)
        if isinstance(failure, never) or (400 <= status < 500 and status not in _PASSING):
            raise HomeError(f"{self.url} cannot be {what}: {text}", fix="see what the store says")
        if self.directory is not None and isinstance(failure, OSError):
            raise HomeError(f"{self.url} cannot be {what}: {text}", fix="look at the directory")

    def _missing(self, failure: Exception) -> NotFoundError:
        return NotFoundError(
            f"{self.url}: there is no such bucket: {_first_line(failure)}",
            fix="make the bucket, or correct the address",
        )

    def _opened(self, options: dict[str, str], is_made: bool) -> Any:
        from obstore import store

        from_url: Any = store.from_url
        client: dict[str, Any] = {"timeout": "60s", "connect_timeout": "10s"}
        client |= {name: options.pop(name) for name in _CLIENT if name in options}
        endpoint = options.get("endpoint") or next(
            (os.environ[name] for name in _ENDPOINTS if name in os.environ), ""
        )
        if endpoint.startswith("http://"):
            client.setdefault("allow_http", True)
        retries = {"max_retries": 2, "retry_timeout": timedelta(seconds=30)}
        try:
            if self.directory is not None:
                if not is_made and not self.directory.is_dir():
                    raise NotFoundError(f"{self.url} is not there", fix="correct the address")
                self.directory.mkdir(parents=True, exist_ok=True)
                return from_url(f"file://{urlsplit(self.url).path}")
            return from_url(self.url, config=options, client_options=client, retry_config=retries)
        except OSError as failure:
            raise HomeError(f"{self.url} cannot be made: {failure.strerror}")
        except (self._library.exceptions.BaseError, ValueError, TypeError) as failure:
            raise ConfigError(
                f"{self.url} cannot be used: {_first_line(failure)}",
                fix="use s3://bucket/prefix, gs://…, az://… or file:///directory, and options that the store knows",
            )


def _first_line(failure: BaseException) -> str:
    """The libraries' texts go on for a page."""
    return (str(failure).strip().splitlines() or [type(failure).__name__])[0][:300]


def _remove_halves(path: Path) -> None:
    """What the library leaves beside a file of a directory when it is killed while it writes."""
    for left in path.parent.glob(f"{path.name}#*"):
        left.unlink(missing_ok=True)


def _directory_of(url: str) -> Path | None:
    parts = urlsplit(url)
    if parts.scheme != "file":
        return None
    if parts.netloc or not parts.path.startswith("/"):
        raise ConfigError(f"{url} is no directory of this host", fix="use file:///directory")
    return Path(unquote(parts.path))


def _library() -> Any:
    try:
        import obstore
        import obstore.exceptions
    except ImportError:
        raise ConfigError(
            "object stores need the package `obstore`", fix="pip install '.[objects]' in the clone"
        )
    return obstore
