"""`argosy data`: pack text, JSONL or source code into token files, and show what is in one.

A thin layer over argosy.data.packing and argosy.data.tokenfiles, which need numpy alone; torch is never imported here. The bar is drawn on a terminal
only; `--json` prints one object on stdout.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from argosy.cli.arguments import Arguments
from argosy.cli.bars import growing_bar
from argosy.cli.paint import Paint, duration, size
from argosy.data.inputs import PackSettings
from argosy.data.packing import pack as pack_files
from argosy.data.tokenfiles import TokenFile
from argosy.data.tokenizers import Tokenizer, load_tokenizer
from argosy.errors import ConfigError

SAMPLES = 3
SAMPLE_TOKENS = 128


def pack(arguments: Arguments) -> int:
    """`argosy data pack INPUT... --out FILE`."""
    inputs, settings = _read_request(arguments)
    out = arguments.get("out")
    if not out:
        raise ConfigError("--out says which file to make", fix="example: --out code.bin")
    started = time.monotonic()
    try:
        with growing_bar(f"packing {Path(out).name}") as on_progress:
            packed = pack_files(inputs, out, settings, on_progress)
    except KeyboardInterrupt:
        print("argosy: stopped; the same command goes on from here", file=sys.stderr)
        raise
    seconds = time.monotonic() - started
    if arguments.get("json"):
        facts = msgspec.structs.asdict(packed)
        print(json.dumps({**facts, "seconds": round(seconds, 3)}))
        return 0
    skipped = f", {packed.skipped} skipped that are no text" if packed.skipped else ""
    resumed = (
        f", {packed.resumed_shards} of {packed.shards} shards from before"
        if packed.resumed_shards
        else ""
    )
    print(
        f"{packed.out}: {packed.tokens:,} tokens ({packed.dtype}, {packed.tokenizer}) of {packed.documents:,} documents\n"
        f"  {packed.files:,} file{'s' * (packed.files != 1)}{skipped}, {size(packed.input_bytes)} in {duration(seconds)}{resumed}"
    )
    return 0


def show(arguments: Arguments) -> int:
    """`argosy data show FILE`."""
    file = TokenFile(arguments.word(), arguments.get("dtype"))
    if arguments.get("verify"):
        file.verify()
    facts = _facts(file, is_verified=bool(arguments.get("verify")))
    if arguments.get("samples"):
        facts["samples"] = _samples(file)
    if arguments.get("json"):
        print(json.dumps(facts))
        return 0
    paint = Paint(sys.stdout)
    samples = facts.pop("samples", [])
    for name, value in facts.items():
        shown = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else value
        print(f"{paint(f'{name:<16}', 'dim')} {'-' if value is None else shown}")
    for sample in samples:
        print(paint(f"\ntokens {sample['start']:,} to {sample['end']:,}", "bold"))
        print(sample["text"] if sample["text"] is not None else sample["tokens"])
    return 0


def _read_request(arguments: Arguments) -> tuple[list[str], PackSettings]:
    code = arguments.get("code", [])
    chosen = [flag for flag in ("text", "jsonl", "code") if arguments.get(flag)]
    if len(chosen) > 1:
        raise ConfigError(f"--{chosen[0]} and --{chosen[1]}", fix="one kind of input at a time")
    inputs = [*arguments.words, *code]
    if not inputs:
        raise ConfigError(
            "`argosy data pack` needs inputs", fix="name files or directories, or --code DIR"
        )
    kind = chosen[0] if chosen else _guess_kind(inputs)
    settings = PackSettings(
        kind=kind,  # type: ignore[arg-type]
        field=arguments.get("jsonl") or "text",
        tokenizer=arguments.get("tokenizer") or "bytes",
        globs=tuple(arguments.get("glob", [])),
        workers=arguments.get("workers"),
        should_overwrite=bool(arguments.get("overwrite")),
    )
    return inputs, settings


def _guess_kind(inputs: list[str]) -> str:
    """By the names: .jsonl is JSONL, a directory is source code, anything else is text; never a mix."""
    kinds = {
        "jsonl" if name.endswith(".jsonl") else "code" if Path(name).is_dir() else "text"
        for name in inputs
    }
    if len(kinds) > 1:
        raise ConfigError(
            f"inputs of several kinds: {', '.join(sorted(kinds))}",
            fix="say --text, --jsonl FIELD or --code DIR",
        )
    return kinds.pop()


def _facts(file: TokenFile, *, is_verified: bool) -> dict[str, Any]:
    sidecar = file.sidecar
    return {
        "file": str(file.path),
        "tokens": file.count,
        "dtype": file.dtype,
        "bytes": file.count * file.tokens.itemsize,
        "documents": sidecar.documents if sidecar else None,
        "tokenizer": sidecar.tokenizer if sidecar else None,
        "vocabulary_size": sidecar.vocabulary_size if sidecar else None,
        "end_of_document": sidecar.end_of_document if sidecar else None,
        "made_from": (sidecar.made_from or None) if sidecar else None,
        "fingerprint": file.fingerprint,
        "checked": "all bytes" if is_verified else "size and 64 spots",
    }


def _samples(file: TokenFile) -> list[dict[str, Any]]:
    """Some tokens from the beginning, the middle and the end, as text if the tokenizer can be had."""
    tokenizer = _tokenizer_of(file)
    last = max(file.count - SAMPLE_TOKENS, 0)
    samples = []
    for start in sorted({last * part // (SAMPLES - 1) for part in range(SAMPLES)}):
        tokens = file.tokens[start : start + SAMPLE_TOKENS]
        text = tokenizer.decode(tokens) if tokenizer else None
        end = start + len(tokens)
        samples.append({"start": start, "end": end, "tokens": tokens.tolist(), "text": text})
    return samples


def _tokenizer_of(file: TokenFile) -> Tokenizer | None:
    if file.sidecar is None:
        return None
    try:
        tokenizer = load_tokenizer(file.sidecar.tokenizer)
    except ConfigError:
        return None
    return tokenizer if tokenizer.sha256 == file.sidecar.tokenizer_sha256 else None
