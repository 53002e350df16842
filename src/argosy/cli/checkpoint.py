"""`argosy checkpoint`: list, show, verify, compare, export, import, pin and clean up checkpoints.

A thin layer over argosy.checkpoint. What needs torch (diff, export, import) runs in a process of its own, torchtask.py; the rest reads manifests and
files alone. `--json` prints one object on stdout.
"""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from argosy.checkpoint import cleaning, collection, names, signatures
from argosy.checkpoint.cleaning import Cleaned
from argosy.checkpoint.commits import Store
from argosy.checkpoint.listings import Listing, Report
from argosy.checkpoint.peers.recalls import PeerListing
from argosy.checkpoint.retention import Keep, check
from argosy.cli.arguments import Arguments
from argosy.cli.bars import byte_bar
from argosy.cli.paint import Paint, count, duration, render_table, size
from argosy.cli.stores import (
    bytes_of,
    directory_of,
    folder_of,
    newest_of,
    path_of,
    step_of,
    store_of,
    store_on_disk,
    target_of,
)
from argosy.cli.torchtask import run_task
from argosy.errors import ArgosyError, CheckpointDamaged, ConfigError

_SHOWN = 20
_FORMS = ("hf", "dcp", "torch")


def ls(arguments: Arguments) -> int:
    """`argosy checkpoint ls STORE`."""
    listing = store_of(arguments)
    pins = listing.pins()
    rows = [_row(listing, step, pins) for step in listing.steps()]
    if arguments.get("json"):
        more = {"silent": listing.silent} if isinstance(listing, PeerListing) else {}
        print(json.dumps({"store": listing.where, "checkpoints": rows, **more}))
        return 0
    if not rows:
        print(f"no checkpoints in {listing.where}")
        return 0
    shown = [
        [
            str(row["step"]),
            duration(time.time() - row["saved_at"]) + " ago" if row["saved_at"] else "-",
            size(row["bytes"]),
            size(row["own_bytes"]),
            _metrics(row["metrics"]) or "-",
            _remark(row),
        ]
        for row in rows
    ]
    headers = ["STEP", "SAVED", "SIZE", "NEW", "METRICS", ""]
    print(render_table(headers, shown, Paint(sys.stdout)), end="")
    return 0


def _row(listing: Listing, step: int, pins: dict[int, str]) -> dict[str, Any]:
    row: dict[str, Any] = {"step": step, "saved_at": 0.0, "bytes": 0, "own_bytes": 0}
    row |= {"metrics": {}, "pinned": pins.get(step), "fault": None}
    try:
        with listing.folder(step) as folder:
            manifest = folder.manifest
            row |= {
                "saved_at": manifest.saved_at,
                "bytes": sum(record.size for record in manifest.files.values()),
                "own_bytes": collection.own_bytes(manifest),
                "metrics": manifest.metrics,
            }
            folder.check_files()
    except ArgosyError as failure:
        row["fault"] = failure.what
    return row


def _metrics(metrics: dict[str, float | None]) -> str:
    return " ".join(
        f"{name}=" + ("not finite" if value is None else f"{value:.6g}")
        for name, value in metrics.items()
    )


def _remark(row: dict[str, Any]) -> str:
    if row["fault"]:
        return f"cannot be used: {row['fault']}"
    return f"pinned: {row['pinned'] or 'without a reason'}" if row["pinned"] is not None else ""


def show(arguments: Arguments) -> int:
    """`argosy checkpoint show STORE [STEP]`."""
    with folder_of(arguments) as folder:
        manifest = folder.manifest
        facts: dict[str, Any] = {
            "path": folder.place.where,
            "step": manifest.step,
            "run": manifest.run,
            "saved_at": manifest.saved_at,
            "writer": manifest.writer,
            "parent": manifest.parent.step if manifest.parent else None,
            "world": manifest.world.get("size"),
            "metrics": manifest.metrics,
            "tensors": len(manifest.tensors),
            "aliases": len(manifest.aliases),
            "bytes": sum(record.size for record in manifest.files.values()),
            "signed": signatures.is_signed(folder),
        }
        files = [_file_row(name, record) for name, record in manifest.files.items()]
        tensors = [
            {"name": name, "class": one.kind, "dtype": one.dtype, "shape": list(one.shape)}
            for name, one in manifest.tensors.items()
        ]
        values = folder.trees() if arguments.get("values") else None
    if arguments.get("json"):
        more: dict[str, Any] = {"tensors": tensors} if arguments.get("tensors") else {}
        more |= {"values": values} if values is not None else {}
        print(json.dumps({**facts, "files": files, **more}))
        return 0
    paint = Paint(sys.stdout)
    facts["bytes"] = size(facts["bytes"])
    facts["saved_at"] = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.saved_at))
    for name, value in facts.items():
        print(f"{paint(f'{name:<10}', 'dim')} {'-' if value in (None, '', {}) else value}")
    print()
    rows = [[one["name"], one["class"], size(one["bytes"]), one["from"] or ""] for one in files]
    print(render_table(["FILE", "CLASS", "SIZE", ""], rows, paint), end="")
    if arguments.get("tensors"):
        print()
        rows = [
            [t["name"], t["class"], t["dtype"], "×".join(map(str, t["shape"]))] for t in tensors
        ]
        print(render_table(["TENSOR", "CLASS", "DTYPE", "SHAPE"], rows, paint), end="")
    if values is not None:
        print("\n" + json.dumps(values, indent=1, ensure_ascii=False))
    return 0


def _file_row(name: str, record: Any) -> dict[str, Any]:
    origin = f"as in step {record.origin.step}" if record.origin else None
    return {"name": name, "class": record.kind, "bytes": record.size, "from": origin}


def verify(arguments: Arguments) -> int:
    """`argosy checkpoint verify STORE [STEP]`."""
    listing, step = target_of(arguments)
    steps = (
        listing.steps() if arguments.get("all") else [newest_of(listing) if step is None else step]
    )
    keys = [signatures.read_public(Path(one)) for one in arguments.get("key", [])]
    reports, untrusted = [], set[int]()
    for one in steps:
        with byte_bar(f"verifying step {one}", bytes_of(listing, one)) as progress:
            report = listing.verify(one, progress=progress)
        if keys and report.is_good and not _is_trusted(listing, one, keys, report):
            untrusted.add(one)
        reports.append(report)
    told = [
        {
            "step": report.step,
            "faults": report.faults,
            "bytes_read": report.bytes_read,
            "is_good": report.is_good,
            "is_unreadable": report.is_unreadable,
        }
        for report in reports
    ]
    if arguments.get("json"):
        print(json.dumps({"store": listing.where, "checkpoints": told}))
    else:
        for report in reports:
            print(f"step {report.step}: {_verdict(report, report.step in untrusted)}")
            for fault in report.faults:
                print(f"  {fault}")
    bad = [report for report in reports if not report.is_good]
    if not bad:
        return 0
    is_unknown = all(report.is_unreadable for report in bad)
    return ConfigError.exit_code if is_unknown else CheckpointDamaged.exit_code


def _verdict(report: Report, is_untrusted: bool) -> str:
    if report.is_good or is_untrusted:
        trust = ", but not to be trusted" if is_untrusted else ""
        return f"whole, {size(report.bytes_read)} read{trust}"
    return "not known: it cannot be read" if report.is_unreadable else "damaged"


def _is_trusted(listing: Listing, step: int, keys: list[bytes], report: Report) -> bool:
    """Whether it is what one of the keys has signed; why not goes into the report."""
    try:
        with listing.folder(step) as folder:
            signatures.check(folder, keys)
    except ArgosyError as failure:
        report.faults.append(failure.what)
        return False
    return True


def diff(arguments: Arguments) -> int:
    """`argosy checkpoint diff [STORE] FIRST SECOND`."""
    *store, first, second = arguments.words
    listing = store_of(arguments) if store else None
    paths = [str(directory_of(listing, word)) for word in (first, second)]
    found = run_task({"task": "diff", "paths": paths}, "comparing")
    if arguments.get("json"):
        print(json.dumps(found))
        return 0
    paint = Paint(sys.stdout)
    changed = sorted(found["changed"], key=lambda one: (_place(one), -_distance(one), one["name"]))
    shown = changed if arguments.get("all") else changed[:_SHOWN]
    between = f"step {found['first']} to {found['second']}"
    if found["first"] == found["second"]:
        between = f"{paths[0]} to {paths[1]}"
    print(f"{between}: {count(len(changed), 'tensor')} changed, {found['unchanged']} did not")
    if shown:
        rows = [
            [
                one["name"],
                f"{_distance(one):.4g}",
                "-" if one["max_ulp"] is None else f"{one['max_ulp']:.0f}",
                f"{one['changed_share']:.2%}",
            ]
            for one in shown
        ]
        print(render_table(["TENSOR", "MAX ABS", "ULP", "CHANGED"], rows, paint), end="")
    if len(shown) < len(changed):
        print(f"{len(changed) - len(shown)} more; --all shows them")
    words = {
        "only_first": "only in first",
        "only_second": "only in second",
        "reshaped": "of another shape or dtype",
    }
    for what, text in words.items():
        if found[what]:
            print(f"{text}: {_few(found[what])}")
    if found["stuck"]:
        print(paint(f"alarm: trained and unchanged: {_few(found['stuck'])}", "red"))
    return 0


def _place(one: dict[str, Any]) -> int:
    """Weights first; random streams, whose differences are the largest and say nothing, last."""
    if one["name"].startswith("streams/"):
        return 3
    return {"model": 0, "frozen": 0, "optimizer": 1}.get(one["kind"], 2)


def _distance(one: dict[str, Any]) -> float:
    """JSON has no infinity: what is not a number on one side alone comes as null."""
    return math.inf if one["max_abs"] is None else float(one["max_abs"])


def export(arguments: Arguments) -> int:
    """`argosy checkpoint export STORE [STEP]`."""
    out = arguments.get("out")
    if not out:
        raise ConfigError("--out says what to make", fix="example: --out model-hf")
    if path_of(out, "checkpoint export STORE [STEP] --out PATH").exists():
        raise ConfigError(f"{out} exists and is not replaced", fix="choose another path")
    listing, step = target_of(arguments)
    path = listing.directory_of(newest_of(listing) if step is None else step)
    request = {"task": "export", "paths": [str(path), str(Path(out).absolute())]}
    request["form"] = _form(arguments) or "hf"
    if arguments.get("dtype"):
        request["dtype"] = arguments.get("dtype")
    if arguments.get("key"):
        request["key"] = arguments.get("key")
    found = run_task(request, f"exporting {path.name}")
    if arguments.get("json"):
        print(json.dumps(found))
    else:
        print(f"{out}: step {found['step']} as {found['form']}, {size(found['bytes'])}")
        if found["form"] == "hf" and not (Path(out) / "config.json").exists():
            # Without it transformers make a model of their default size, which may take all memory.
            print(
                "  it has no config.json, which from_pretrained needs: "
                f"model.config.save_pretrained({out!r}) puts it there"
            )
    return 0


def take_in(arguments: Arguments) -> int:
    """`argosy checkpoint import STORE SOURCE`."""
    store, source = (path_of(word, arguments.verb.usage).absolute() for word in arguments.words)
    request = {
        "task": "import",
        "paths": [str(source), str(store)],
        "step": arguments.get("step", 0),
        "form": _form(arguments),
    }
    found = run_task(request, f"importing {source.name}")
    if arguments.get("json"):
        print(json.dumps(found))
    else:
        print(
            f"{store / names.step_name(found['step'])}: {count(found['tensors'], 'tensor')} from {found['form']}, {size(found['bytes'])}"
        )
    return 0


def pin(arguments: Arguments) -> int:
    """`argosy checkpoint pin STORE STEP`."""
    listing = store_of(arguments)
    step = step_of(arguments.words[1])
    if arguments.get("remove"):
        listing.unpin(step)
    else:
        listing.pin(step, arguments.get("why", listing.pins().get(step, "")))
    if arguments.get("json"):
        print(json.dumps({"step": step, "pinned": listing.pins().get(step)}))
    else:
        print(f"step {step} is {'no longer ' if arguments.get('remove') else ''}pinned")
    return 0


def gc(arguments: Arguments) -> int:
    """`argosy checkpoint gc STORE`."""
    listing = store_on_disk(arguments.words[0])
    hours = arguments.get("older_than")
    keep = check(
        Keep(
            last=arguments.get("last"),
            every=arguments.get("every"),
            best=arguments.get("best"),
            best_is_highest=bool(arguments.get("highest")),
            expire_seconds=None if hours is None else hours * 3600,
            free_bytes=arguments.get("free", 0),
        )
    )
    is_dry = bool(arguments.get("dry"))
    cleaning.check_metric(listing, keep)
    store = Store(listing.path)
    try:
        store.lock("argosy checkpoint gc")
        found = cleaning.collect(store, listing, is_dry=is_dry)
        cleaned = cleaning.clean(store, listing, keep, verify=_watched(listing), is_dry=is_dry)
    finally:
        store.close()
    cleaned.leftovers, cleaned.idle_pins = found.leftovers, found.idle_pins
    if arguments.get("json"):
        print(json.dumps({"dry": is_dry, **msgspec.to_builtins(cleaned)}))
    else:
        _tell_cleaned(cleaned, is_dry)
    return 0


def _tell_cleaned(cleaned: Cleaned, is_dry: bool) -> None:
    would = "would go" if is_dry else "removed"
    for name in cleaned.leftovers:
        print(f"{name}: {would}: left by a session that has ended")
    for step in cleaned.idle_pins:
        print(f"pin of step {step}: {would}: there is no such checkpoint")
    for one in cleaned.removed:
        print(f"step {one.step}: {would}: {one.why}")
    for text in cleaned.damaged:
        print(f"not counted: {text}")
    print(
        f"{count(len(cleaned.removed), 'checkpoint')} {would}, {size(cleaned.freed_bytes)}"
        + (
            f"; step {cleaned.verified} was read and is whole"
            if cleaned.verified is not None
            else ""
        )
    )


def _watched(listing: Listing) -> Any:
    def verify_one(step: int) -> Report:
        with byte_bar(f"verifying step {step}", bytes_of(listing, step)) as progress:
            return listing.verify(step, progress=progress)

    return verify_one


def _form(arguments: Arguments) -> str | None:
    form: str | None = arguments.get("form")
    if form is not None and form not in _FORMS:
        raise ConfigError(f"--form {form!r} is not known", fix=f"one of {', '.join(_FORMS)}")
    return form


def _few(found: list[str]) -> str:
    return ", ".join(found[:5]) + (f" and {len(found) - 5} more" if len(found) > 5 else "")
