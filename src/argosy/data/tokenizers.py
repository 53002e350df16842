"""Tokenizers: text into numbers, for `argosy data pack`.

Bytes need nothing but numpy; every other name is a file or a model of the Hugging Face library `tokenizers`, an optional extra.
A tokenizer's SHA-256 goes into the sidecar of what it made, so files of different vocabularies are never mixed.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from argosy.data.order import Integers
from argosy.data.tokenfiles import DTYPES
from argosy.errors import ConfigError

_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>", "[SEP]")


class Tokenizer(Protocol):
    """What the packer needs."""

    name: str
    sha256: str
    vocabulary_size: int
    end_of_document: int | None

    @property
    def dtype(self) -> Literal["uint16", "uint32"]:
        """The narrowest that holds the vocabulary."""

    def encode(self, texts: Sequence[bytes]) -> tuple[npt.NDArray[Any], Integers]:
        """The tokens of all texts in one array, without any ends, and how many each text has."""

    def decode(self, tokens: npt.NDArray[Any]) -> str:
        """Text for people."""


class ByteTokenizer:
    """A byte is a token; 256 ends a document."""

    name = "bytes"
    sha256 = ""
    vocabulary_size = 257
    end_of_document: int | None = 256

    @property
    def dtype(self) -> Literal["uint16", "uint32"]:
        """257 values need two bytes."""
        return "uint16"

    def encode(self, texts: Sequence[bytes]) -> tuple[npt.NDArray[Any], Integers]:
        """The bytes as they are, whatever their encoding."""
        tokens = np.frombuffer(b"".join(texts), np.uint8).astype("<u2")
        return tokens, np.fromiter(map(len, texts), np.int64)

    def decode(self, tokens: npt.NDArray[Any]) -> str:
        """As UTF-8; the end of a document becomes ␄."""
        pieces = np.split(tokens, np.flatnonzero(tokens >= 256))
        texts = [
            piece[piece < 256].astype(np.uint8).tobytes().decode(errors="replace")
            for piece in pieces
        ]
        return "␄".join(texts)


class HuggingFaceTokenizer:
    """A tokenizer of the library `tokenizers`: a `tokenizer.json`, or the name of a published model."""

    def __init__(self, name: str) -> None:
        library = _import_library(name)
        try:
            if os.path.exists(name):
                self._tokenizer = library.Tokenizer.from_file(name)
            else:
                self._tokenizer = library.Tokenizer.from_pretrained(name)
        # The library raises plain Exception for everything: a bad file, an unknown name, no network.
        except Exception as error:  # noqa: BLE001
            raise ConfigError(
                f"tokenizer {name!r} cannot be loaded: {str(error).splitlines()[0][:200]}",
                fix="name a tokenizer.json on disk, a published model, or `bytes`",
            )
        self.name = name
        self.sha256 = hashlib.sha256(self._tokenizer.to_str().encode()).hexdigest()
        self.vocabulary_size = int(self._tokenizer.get_vocab_size(with_added_tokens=True))
        known = (self._tokenizer.token_to_id(end) for end in _ENDS)
        self.end_of_document = next((number for number in known if number is not None), None)

    @property
    def dtype(self) -> Literal["uint16", "uint32"]:
        """Two bytes up to 65 536 tokens."""
        return "uint16" if self.vocabulary_size <= 1 << 16 else "uint32"

    def encode(self, texts: Sequence[bytes]) -> tuple[npt.NDArray[Any], Integers]:
        """All texts in one call: the library works on them in native threads."""
        decoded = [text.decode(errors="replace") for text in texts]
        encodings = self._tokenizer.encode_batch(decoded, add_special_tokens=False)
        ids = [np.asarray(encoding.ids, DTYPES[self.dtype]) for encoding in encodings]
        tokens = np.concatenate([np.empty(0, DTYPES[self.dtype]), *ids])
        return tokens, np.fromiter(map(len, ids), np.int64)

    def decode(self, tokens: npt.NDArray[Any]) -> str:
        """The library's own decoding."""
        return str(self._tokenizer.decode([int(token) for token in tokens]))


def encode_texts(
    tokenizer: Tokenizer, texts: Sequence[bytes], are_ends: Sequence[bool]
) -> tuple[npt.NDArray[Any], Integers]:
    """Tokens of all texts, and where documents end: after each text that is one's end stands the token for it, if there is one."""
    tokens, lengths = tokenizer.encode(texts)
    is_end = np.fromiter(are_ends, np.bool_)
    if tokenizer.end_of_document is not None:
        lengths = lengths + is_end
    ends: Integers = np.cumsum(lengths)[is_end]
    if tokenizer.end_of_document is None:
        return tokens, ends
    whole = np.full(len(tokens) + len(ends), tokenizer.end_of_document, tokens.dtype)
    is_text = np.ones(len(whole), np.bool_)
    is_text[ends - 1] = False
    whole[is_text] = tokens
    return whole, ends


def load_tokenizer(name: str) -> Tokenizer:
    """`bytes`, a file, or a published name."""
    return ByteTokenizer() if name == "bytes" else HuggingFaceTokenizer(name)


def _import_library(name: str) -> Any:
    import importlib

    try:
        return importlib.import_module("tokenizers")
    except ImportError:
        raise ConfigError(
            f"tokenizer {name!r} needs the package tokenizers, which is not installed",
            fix="pip install '.[tokenizers]' in the clone, or use --tokenizer bytes",
        )
