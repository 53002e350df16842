"""Dtypes by torch's names, without torch: their sizes, and which cast keeps the meaning of a value.

Used by plans, which are pure and may run where no torch is loaded. Only dtypes that the runtime moves are here.
"""

from __future__ import annotations

from argosy.errors import ConfigError

_FLOATS = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
# (bytes, bits that hold a magnitude, is signed)
_INTEGERS = {
    "int64": (8, 63, True),
    "int32": (4, 31, True),
    "int16": (2, 15, True),
    "int8": (1, 7, True),
    "uint64": (8, 64, False),
    "uint32": (4, 32, False),
    "uint16": (2, 16, False),
    "uint8": (1, 8, False),
}
_OTHERS = {
    "bool": 1,
    "complex64": 8,
    "complex128": 16,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
}


def itemsize(dtype: str) -> int:
    """Bytes of one element."""
    if dtype in _FLOATS:
        return _FLOATS[dtype]
    if dtype in _INTEGERS:
        return _INTEGERS[dtype][0]
    if dtype in _OTHERS:
        return _OTHERS[dtype]
    raise ConfigError(f"dtype {dtype} cannot be moved", fix="use a dense dtype of torch")


def can_cast(source: str, destination: str) -> bool:
    """Equal, both floating, or an integer into one that holds all its values."""
    itemsize(source)
    itemsize(destination)
    if source == destination:
        return True
    if source in _FLOATS and destination in _FLOATS:
        return True
    if source in _INTEGERS and destination in _INTEGERS:
        _, bits, is_signed = _INTEGERS[source]
        _, room, may_sign = _INTEGERS[destination]
        return room >= bits and (may_sign or not is_signed)
    return False


def narrower(first: str, second: str) -> str:
    """The one with fewer bytes; the first when they are equal."""
    return second if itemsize(second) < itemsize(first) else first
