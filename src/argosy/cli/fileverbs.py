"""Verbs about files: token files and checkpoints; the second part of the table in verbs.py. Text only."""

from __future__ import annotations

from argosy.cli.grammar import JSON, Option, Verb

_STORE = (
    "STORE is the directory that a program saves into, a run (its id, the beginning of one, its name, or its directory), or an address:\n"
    "s3://bucket/prefix, gs://…, az://…, file:///directory."
)
_SECRET = Option("--secret FILE", "the key of an encrypted object store, 32 bytes")
_PEERS = Option("--peers", "what the memory of its peers holds of it, instead of the disk")

FILE_VERBS = (
    Verb(
        "data pack",
        "data pack [options] [INPUT...]",
        "text, JSONL or source code into a token file",
        entry="argosy.cli.data:pack",
        options=(
            Option(
                "--out FILE", "the token file to make; FILE.json and FILE.documents stand beside it"
            ),
            Option(
                "--tokenizer NAME", "`bytes` (default), a tokenizer.json, or a Hugging Face name"
            ),
            Option("--text", "inputs are text: a file is a document"),
            Option("--jsonl FIELD", "inputs are JSON lines: this field of a line is a document"),
            Option("--code DIR", "source code: every text file in DIR is a document", many=True),
            Option("--glob PATTERN", "which files inside directories, e.g. '*.py'", many=True),
            Option("--workers N", "processes; default: one for each CPU", kind="count"),
            Option("--overwrite", "replace FILE if it exists, at the very end"),
            JSON,
        ),
        details=(
            "INPUT is a file or a directory. Without --text, --jsonl or --code the names decide: .jsonl is JSON lines (field `text`),\n"
            "a directory is source code, anything else is text. Work lies in FILE.partial/ until it is done: after Ctrl-C or a kill\n"
            "the same command goes on where it stopped. The result has the same bytes with any number of workers."
        ),
        examples=(
            "argosy data pack --code src --glob '*.py' --out code.bin",
            "argosy data pack books/*.jsonl --jsonl text --tokenizer tokenizer.json --out books.bin",
        ),
    ),
    Verb(
        "data show",
        "data show FILE",
        "what a token file holds, and whether it is whole",
        entry="argosy.cli.data:show",
        options=(
            Option("--samples", "also some tokens, as text if the tokenizer is at hand"),
            Option("--verify", "read all of it and compare its SHA-256"),
            Option("--dtype NAME", "uint16 or uint32, for a file without a sidecar"),
            JSON,
        ),
        examples=("argosy data show code.bin --samples",),
    ),
    Verb(
        "checkpoint ls",
        "checkpoint ls STORE",
        "the checkpoints of a directory, an object store or peers' memory",
        entry="argosy.cli.checkpoint:ls",
        options=(_PEERS, _SECRET, JSON),
        details=_STORE,
        examples=(
            "argosy checkpoint ls checkpoints",
            "argosy checkpoint ls train",
            "argosy checkpoint ls train --peers",
            "argosy checkpoint ls s3://bucket/runs/one",
        ),
    ),
    Verb(
        "checkpoint show",
        "checkpoint show STORE [STEP]",
        "what a checkpoint holds; the newest unless a step is named",
        entry="argosy.cli.checkpoint:show",
        options=(
            Option("--tensors", "every tensor with its class, dtype and shape"),
            Option("--values", "everything that is no tensor"),
            _PEERS,
            _SECRET,
            JSON,
        ),
        details="STORE is a directory, a step-… directory itself, a run, or an address.",
        examples=("argosy checkpoint show checkpoints 1000 --tensors",),
    ),
    Verb(
        "checkpoint verify",
        "checkpoint verify STORE [STEP]",
        "read every byte and compare it with what was saved",
        entry="argosy.cli.checkpoint:verify",
        options=(
            Option("--all", "every checkpoint, not only the newest"),
            Option("--key FILE", "also demand a signature by this public key", many=True),
            _PEERS,
            _SECRET,
            JSON,
        ),
        details="Ends with 65 when something is damaged, and says which file, bytes and tensors; with 64 when all else is whole and something cannot be read by this program, or not now: a newer format, no key, a failing disk.",
        examples=("argosy checkpoint verify checkpoints --all",),
    ),
    Verb(
        "checkpoint diff",
        "checkpoint diff [STORE] FIRST SECOND",
        "how two checkpoints differ, tensor by tensor",
        entry="argosy.cli.checkpoint:diff",
        options=(
            Option("--all", "every tensor that changed, not only the twenty that did most"),
            JSON,
        ),
        details=(
            "FIRST and SECOND are steps of STORE, or step-… directories, which need none. For each tensor: the largest difference, as a number and in units\n"
            "in the last place, and the share of elements that changed. An alarm names trained tensors that have not changed.\n"
            "A difference is infinite (null in JSON) where one side is not a number."
        ),
        examples=(
            "argosy checkpoint diff checkpoints 900 1000",
            "argosy checkpoint diff one/checkpoints/step-000001000 two/checkpoints/step-000001000",
        ),
    ),
    Verb(
        "checkpoint export",
        "checkpoint export STORE [STEP]",
        "write a checkpoint for another program",
        entry="argosy.cli.checkpoint:export",
        options=(
            Option("--out PATH", "what to make; must not exist"),
            Option(
                "--form FORM",
                "`hf` (a Hugging Face directory, default), `dcp` (torch.distributed.checkpoint), `torch` (torch.save)",
            ),
            Option("--dtype NAME", "hf: floating-point weights as this dtype, e.g. bfloat16"),
            Option("--key KEY", "hf: the module saved under this key; default: model"),
            JSON,
        ),
        details="Every byte is checked on the way. PATH appears when it is whole.",
        examples=("argosy checkpoint export checkpoints --out model-hf --dtype bfloat16",),
    ),
    Verb(
        "checkpoint import",
        "checkpoint import STORE SOURCE",
        "take another program's checkpoint in as a step",
        entry="argosy.cli.checkpoint:take_in",
        options=(
            Option("--step STEP", "its step; default: 0", kind="number"),
            Option("--form FORM", "`hf`, `dcp` or `torch`; found by what lies there unless said"),
            JSON,
        ),
        details="Files of torch are read weights-only: nothing in them is run.",
        examples=("argosy checkpoint import checkpoints model-hf",),
    ),
    Verb(
        "checkpoint push",
        "checkpoint push STORE URL [STEP]",
        "send a checkpoint to an object store; the newest unless a step is named",
        entry="argosy.cli.objects:push",
        options=(
            Option("--all", "every checkpoint, the oldest first"),
            Option("--secret FILE", "encrypt with the 32 bytes of this file"),
            JSON,
        ),
        details=(
            "URL is s3://bucket/prefix, gs://…, az://… or file:///directory; credentials come from the environment. What is there already is\n"
            "not sent again, nor what an earlier step there has unchanged. Refused while a run uploads from STORE, and into another run's prefix."
        ),
        examples=("argosy checkpoint push checkpoints s3://bucket/runs/one",),
    ),
    Verb(
        "checkpoint pull",
        "checkpoint pull URL STORE [STEP]",
        "fetch a checkpoint from an object store; the newest unless a step is named",
        entry="argosy.cli.objects:pull",
        options=(
            Option("--secret FILE", "decrypt with the 32 bytes of this file"),
            JSON,
        ),
        details="Every byte is checked on the way; the checkpoint appears in STORE when it is whole.",
        examples=("argosy checkpoint pull s3://bucket/runs/one checkpoints 1000",),
    ),
    Verb(
        "checkpoint pin",
        "checkpoint pin STORE STEP",
        "keep a checkpoint for ever",
        entry="argosy.cli.checkpoint:pin",
        options=(
            Option("--why TEXT", "who keeps it and why"),
            Option("--remove", "let retention decide again"),
            JSON,
        ),
        examples=('argosy checkpoint pin checkpoints 1000 --why "paper, table 2"',),
    ),
    Verb(
        "checkpoint gc",
        "checkpoint gc STORE",
        "remove what saves left half done, and checkpoints that the rules let go",
        entry="argosy.cli.checkpoint:gc",
        options=(
            Option("--last N", "keep the newest N", kind="count"),
            Option("--every N", "keep steps that N divides", kind="count"),
            Option("--best METRIC", "keep the one where this metric is lowest"),
            Option("--highest", "with --best: where it is highest"),
            Option(
                "--older-than HOURS", "let those go that are older, but the last", kind="amount"
            ),
            Option("--free SIZE", "let the oldest go until this much is free", kind="bytes"),
            Option("--dry", "only say what would go"),
            JSON,
        ),
        details=(
            "Without --last, --every, --best, --older-than or --free no checkpoint goes. Pinned ones never go, nor what they need; and nothing\n"
            "goes before a newer one has been read and found whole. Refused while something is being saved there,\n"
            "and while a script has the store open for saving."
        ),
        examples=("argosy checkpoint gc checkpoints --last 3 --every 1000 --dry",),
    ),
)
