"""The state of an optimizer of any kind as bytes, without pickle: a skeleton in JSON, then the raw bytes of its tensors.

Lists, dictionaries, numbers, texts and tensors go in and come out with the same bits; anything else is refused by name. Equal states have equal bytes, so that ranks can compare theirs and each
can write a share. Used by replicated.py. Knows nothing of ranks.
"""

from __future__ import annotations

import json
from typing import Any

import torch

from argosy.errors import ConfigError, DataError
from argosy.move.kernels import copy_crc32c
from argosy.train.seeds import mix

_LINE = 64
_FIX = (
    "keep numbers, texts, lists, dictionaries and tensors in state_dict(), or leave optimizer= out"
)


class Image:
    """The bytes of one state, in pieces: the skeleton, then each tensor."""

    def __init__(self, state: Any) -> None:
        self._places: dict[int, int] = {}
        self._tensors: list[torch.Tensor] = []
        skeleton = self._encode(state, "state")
        titles = [[str(t.dtype).removeprefix("torch."), list(t.shape)] for t in self._tensors]
        body = json.dumps([skeleton, titles], separators=(",", ":")).encode()
        head = torch.frombuffer(
            bytearray(len(body).to_bytes(8, "little") + body), dtype=torch.uint8
        )
        self.pieces = [head, *(_bytes(tensor) for tensor in self._tensors)]
        self.starts, at = [], 0
        for piece in self.pieces:
            self.starts.append(at)
            at += _up(piece.numel())
        self.num_bytes = at

    @property
    def checksum(self) -> int:
        """Equal for equal states."""
        return mix(*(copy_crc32c(None, piece) if piece.numel() else 0 for piece in self.pieces))

    def write(self, target: torch.Tensor, places: range | list[int]) -> None:
        """Put some pieces into the memory of a whole image; what is between two of them stays zero."""
        for place in places:
            start, piece = self.starts[place], self.pieces[place]
            stop = start + piece.numel()
            target[start:stop].copy_(piece)
            target[stop : start + _up(piece.numel())].zero_()

    def _encode(self, value: Any, where: str) -> Any:
        if value is None or isinstance(value, bool | int | float | str):
            if type(value) not in (type(None), bool, int, float, str):
                raise _unknown(value, where)
            return value
        if isinstance(value, torch.Tensor):
            if value.layout != torch.strided or value.device.type != "cpu":
                raise _unknown(value, where)
            # A tensor that is there twice comes out as one, too.
            place = self._places.setdefault(id(value), len(self._tensors))
            if place == len(self._tensors):
                self._tensors.append(value)
            return {"tensor": place}
        if isinstance(value, dict):
            pairs = [
                [self._encode(key, where), self._encode(each, f"{where}[{key!r}]")]
                for key, each in value.items()
            ]
            return {"dict": pairs}
        if type(value) in (list, tuple):
            kind = type(value).__name__
            return {kind: [self._encode(e, f"{where}[{i}]") for i, e in enumerate(value)]}
        raise _unknown(value, where)


def read(image: torch.Tensor) -> Any:
    """The state that an image was made of, in memory of its own."""
    length = int.from_bytes(image[:8].numpy().tobytes(), "little")
    try:
        skeleton, titles = json.loads(image[8 : 8 + length].numpy().tobytes())
        at = _up(8 + length)
        tensors = []
        for dtype, shape in titles:
            found = torch.empty(shape, dtype=getattr(torch, dtype))
            flat = found.reshape(-1).view(torch.uint8)
            flat.copy_(image[at : at + flat.numel()])
            tensors.append(found)
            at += _up(flat.numel())
    except (ValueError, RuntimeError, AttributeError) as error:
        raise DataError(f"an optimizer's state cannot be read: {error}", fix="use an older save")
    return _decode(skeleton, tensors)


def _decode(value: Any, tensors: list[torch.Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind == "tensor":
        return tensors[inner]
    if kind == "dict":
        return {_decode(key, tensors): _decode(each, tensors) for key, each in inner}
    found = [_decode(each, tensors) for each in inner]
    return tuple(found) if kind == "tuple" else found


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _unknown(value: Any, where: str) -> ConfigError:
    return ConfigError(f"the optimizer keeps a {type(value).__name__} as {where}", fix=_FIX)


def _up(value: int) -> int:
    return (value + _LINE - 1) // _LINE * _LINE
