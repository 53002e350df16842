"""`argosy checkpoint push` and `pull`: a checkpoint to an object store and back.

A thin layer over argosy.checkpoint.tiers. `--json` prints one object on stdout.
"""

from __future__ import annotations

import json
import os
import time

import msgspec

from argosy.checkpoint import names
from argosy.checkpoint.commits import Store
from argosy.checkpoint.listings import Listing
from argosy.checkpoint.tiers import claims, pulls, uploads
from argosy.cli.arguments import Arguments
from argosy.cli.bars import byte_bar
from argosy.cli.paint import size
from argosy.cli.stores import bytes_of, path_of, remote_of, step_words, store_on_disk, wanted_step


def push(arguments: Arguments) -> int:
    """`argosy checkpoint push STORE URL [STEP]`."""
    listing = store_on_disk(arguments.words[0])
    remote = remote_of(arguments, arguments.words[1], is_made=True)
    steps = listing.steps() if arguments.get("all") else [wanted_step(listing, arguments.words[2:])]
    alone = claims.lock_uploads(listing.path, time.monotonic())
    found = []
    try:
        number = claims.claim(remote.bucket, listing.path, "")
        for step in steps:
            with (
                byte_bar(f"pushing step {step}", bytes_of(listing, step)) as progress,
                listing.folder(step) as folder,
            ):
                told = progress or (lambda num_bytes: None)
                found.append(uploads.upload(folder, remote, claim=number, pace=told))
    finally:
        os.close(alone)
    if arguments.get("json"):
        told_steps = [msgspec.to_builtins(one) for one in found]
        print(json.dumps({"url": remote.where, "checkpoints": told_steps}))
        return 0
    for one in found:
        if not one.is_new:
            print(f"step {one.step}: is there already")
            continue
        more = f", {size(one.referred_bytes)} unchanged since an earlier step"
        there = f", {size(one.found_bytes)} were there"
        print(
            f"step {one.step}: {size(one.sent_bytes)} sent"
            + (more if one.referred_bytes else "")
            + (there if one.found_bytes else "")
        )
    return 0


def pull(arguments: Arguments) -> int:
    """`argosy checkpoint pull URL STORE [STEP]`."""
    path = path_of(arguments.words[1], arguments.verb.usage)
    remote = remote_of(arguments, arguments.words[0])
    step = wanted_step(remote, arguments.words[2:] or step_words(arguments.words[0]))
    store = Store(path)
    try:
        store.lock("argosy checkpoint pull")
        is_new = not Listing(store.path).steps()
        with (
            remote.folder(step) as folder,
            byte_bar(f"pulling step {step}", bytes_of(remote, step)) as progress,
        ):
            told = progress or (lambda num_bytes: None)
            num_bytes = pulls.pull(folder, store, progress=told)
        if is_new:
            claims.adopt(remote.bucket, store.path)
    finally:
        store.close()
    path = store.path / names.step_name(step)
    if arguments.get("json"):
        print(json.dumps({"step": step, "path": str(path), "bytes": num_bytes}))
    else:
        print(f"{path}: {size(num_bytes)} from {remote.where}")
    return 0
