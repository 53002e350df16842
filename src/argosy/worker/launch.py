"""`ar.launch(main, Config)`: the same program by `python train.py`, `python train.py -n 4` and `argosy run train.py -n 4`.

Reads config and options, makes the `Run`, sets threads and seeds, and calls `main`: at once in a process that Argosy started, on
forked ranks of a household otherwise, in this very process with `-n 1`. What is wrong with the words is said in two lines before
anything is started.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import shlex
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from argosy import __version__
from argosy.errors import LEFT_CODE, REFUSALS, ArgosyError, ConfigError
from argosy.move import broker
from argosy.native import isa
from argosy.protocol import link as links
from argosy.worker import births, records, stops
from argosy.worker import gang as gangs
from argosy.worker.commandline import Options, help_text, read_options
from argosy.worker.household import keep_house
from argosy.worker.notices import say
from argosy.worker.run import Run
from argosy.worker.settings import build_config, digest, to_plain
from argosy.worker.sources import digest_sources, name_script

_DEFAULT_LANES = 8
"""More ranks than lanes would have nothing to do."""
_FAREWELL_SECONDS = 5.0
INTERRUPTED_CODE = 130
_NEEDED_BY_RANKS = (
    "torch._dynamo",
    "torch._inductor",
    "argosy.data.datasets",
    "argosy.data.mixtures",
    "argosy.train.trainer",
)

Main = Callable[..., object]


def launch(
    main: Main, config_type: type[Any] | None = None, argv: Sequence[str] | None = None
) -> None:
    """Call `main(run, config)`, or `main(run)` without a config, on every rank; `argv` is `sys.argv[1:]` unless given.

    Returns when the work has succeeded; else the process exits with the first cause's code.
    """
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError("launch was called in a thread", fix="call it in the main thread")
    is_member = links.is_under_argosy()
    try:
        options = read_options(sys.argv[1:] if argv is None else argv, os.environ, config_type)
        if options.is_help:
            sys.stdout.write(help_text(config_type))
            return
        if is_member and options.ranks is not None and births.PARENT not in os.environ:
            raise ConfigError(
                f"-n {options.ranks} inside a run", fix="say it to argosy: argosy run -n RANKS"
            )
        run = _make_run(config_type, options, is_member=is_member)
    except ArgosyError as error:
        _refuse(error, is_member=is_member)
    num_ranks = 1 if is_member else options.ranks or _default_ranks(run.config)
    if num_ranks == 1:
        _run_here(main, run, is_member=is_member)
        return
    code = _keep_house(main, run, num_ranks)
    if code:
        sys.exit(code)


def _run_here(main: Main, run: Run, *, is_member: bool) -> None:
    """This process is the rank."""
    if births.PARENT in os.environ:
        births.live(lambda: _run_main(main, run))
    if not is_member:
        os.environ.update(isa.environment(os.environ))
    stops.watch(interrupts=not is_member)
    try:
        _run_main(main, run, is_watched=True, resume="" if is_member else _resume_words(run))
    except REFUSALS as error:
        _discard_if_unused(run)
        _refuse(error, is_member=is_member)
    except KeyboardInterrupt:
        if is_member or not stops.is_asked():
            raise
        say(f"stopped at once; {_describe_newest(run)}")
        sys.exit(INTERRUPTED_CODE)
    finally:
        stops.forget()
        if not is_member:
            # A notebook, or a loop over settings: the next launch is another run.
            gangs.leave()
            broker.end_run()


def _keep_house(main: Main, run: Run, num_ranks: int) -> int:
    """This process is the parent of the ranks."""
    os.environ.update(isa.environment(os.environ))
    # What every rank needs is imported once, before the first fork: also what torch imports when an optimizer is made and
    # deterministic algorithms are asked for, which takes seconds. A replacement must not wait for it.
    for name in _NEEDED_BY_RANKS:
        importlib.import_module(name)

    environment = {
        "ARGOSY_RUN": f"{run.name}-{os.getpid()}",
        "ARGOSY_RUN_NAME": run.name,
        "OMP_NUM_THREADS": str(run.threads),
    }
    say(f"{num_ranks} ranks, {run.directory}")
    try:
        end = keep_house(
            lambda: _run_main(main, run),
            num_ranks=num_ranks,
            directory=str(run.directory),
            environment=environment,
            resume=_resume_words(run),
        )
    except ArgosyError as error:
        _discard_if_unused(run)
        _refuse(error, is_member=False)
    if end.is_refusal:
        _discard_if_unused(run)
    return end.code


def _run_main(main: Main, run: Run, *, is_watched: bool = False, resume: str = "") -> None:
    """The user's program on this rank, with its threads and seeds. `resume` is what to tell a person who has stopped it."""
    import torch

    from argosy.train.seeds import seed_all

    if not is_watched:
        stops.watch()
    torch.set_num_threads(run.threads)
    seed_all(run.seed)
    try:
        if run.config is None:
            main(run)
        else:
            main(run, run.config)
    except SystemExit as left:
        if left.code == LEFT_CODE and stops.is_asked():
            if resume:
                how = f"go on: {resume}" if run.last_saved else "there was nothing to save"
                say(f"stopped; {how}")
            stops.die()
        run.finish(has_failed=bool(left.code))
        raise
    except Exception:  # the user's program: what it has trained is not lost, if its loop is over
        run.finish(has_failed=True)
        raise
    run.finish()


def _describe_newest(run: Run) -> str:
    """What is left of a run that was ended before it could save."""
    newest = records.find_newest_save(run.directory)
    if newest is None:
        return "nothing was saved"
    step, path = newest
    loss = "" if step == run.last_saved else "nothing was saved at its end; "
    return f"{loss}step {step} is saved in {path}; go on: {_resume_words(run)}"


def _resume_words(run: Run) -> str:
    """The command that goes on with this run."""
    program = sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv[1:])]
    directory = run.directory
    with contextlib.suppress(ValueError):
        directory = directory.relative_to(Path.cwd())
    return shlex.join(["python", *program, "--resume", str(directory)])


def _discard_if_unused(run: Run) -> None:
    """What was refused before it did anything leaves nothing behind."""
    if run.is_new:
        records.discard_unused(run.directory)


def _make_run(config_type: type[Any] | None, options: Options, *, is_member: bool) -> Run:
    """The config, recorded in the run's directory."""
    before = records.read_record(Path(options.resume)) if options.resume else {}
    overrides = [*before.get("overrides", []), *options.overrides]
    if config_type is None and overrides:
        raise ConfigError(
            f"--set {overrides[0]}: this program has no config", fix="launch(main, Config)"
        )
    config = None if config_type is None else build_config(config_type, overrides)
    name = options.name or os.environ.get("ARGOSY_RUN_NAME") or before.get("name") or _script_name()
    seed = _first_given(options.seed, before.get("seed"), 0)
    threads = _first_given(options.threads, before.get("threads"), _threads_of_run(is_member))
    plain = to_plain(config)
    record: records.Record = {
        "name": name,
        "seed": seed,
        "threads": threads,
        "config": plain,
        "digest": digest([plain, seed]),
        "overrides": overrides,
        "argosy": __version__,
        "lineage": list(before.get("lineage", [])),
        "source": digest_sources(),
        "script": name_script(),
    }
    if before:
        _note_changes(before, record, options)
    directory, is_new = _settle_directory(name, options, record, is_member=is_member)
    is_same = bool(options.resume) and directory == Path(options.resume).absolute()
    run = Run(
        name=name,
        directory=directory,
        config=config,
        seed=seed,
        threads=threads,
        resume_from=Path(options.resume).absolute() if options.resume else None,
        allows_drift="drift" in options.allowed,
    )
    run.is_new = is_new
    if is_same:
        # Only when something has come of it: what is refused leaves the run as it was, and the next resume too.
        run.when_lasting = lambda: records.write_changed(directory, record)
    return run


def _note_changes(before: records.Record, record: records.Record, options: Options) -> None:
    """On resume a `--set` is the consent: the difference is shown and begins a new lineage."""
    changes = records.check_consent(before, record, options.overrides, options.allowed)
    if changes:
        if os.environ.get("RANK", "0") == "0":
            for line in changes:
                say(f"the run goes on with another {line}")
        entry = {"at": time.time(), "from": before["digest"], "changes": changes}
        record["lineage"].append(entry)


def _settle_directory(
    name: str, options: Options, record: records.Record, *, is_member: bool
) -> tuple[Path, bool]:
    """The run's directory, with its record, and whether it was made here."""
    given = os.environ.get("ARGOSY_RUN_DIRECTORY") if is_member else None
    resumed = str(Path(options.resume).absolute()) if options.resume else ""
    is_new = False
    if given and given != resumed:
        directory = Path(given)
        records.write_first(directory, record)
    elif given or (resumed and options.directory in ("", options.resume)):
        directory = Path(resumed)
    else:
        is_new = not (options.directory and Path(options.directory).exists())
        directory = records.make_directory(name, options.directory)
        records.write_first(directory, record)
    return directory, is_new


def _refuse(error: ArgosyError, *, is_member: bool) -> NoReturn:
    """Two lines, and no restart: another start would say the same."""
    say(str(error))
    own = links.current() if is_member else None
    if own is not None:
        with contextlib.suppress(ArgosyError):
            own.wait_welcome(timeout=_FAREWELL_SECONDS)
            own.say({"say": "fail", "reason": error.what, "code": error.exit_code})
    sys.exit(error.exit_code)


def _default_ranks(config: Any) -> int:
    """One rank per usable core, and not more than there are lanes."""
    lanes = getattr(config, "lanes", None)
    most = lanes if isinstance(lanes, int) and lanes > 0 else _DEFAULT_LANES
    return max(1, min(len(os.sched_getaffinity(0)), most))


def _threads_of_run(is_member: bool) -> int:
    """One per rank, unless the cluster was told otherwise."""
    given = os.environ.get("OMP_NUM_THREADS", "") if is_member else ""
    return int(given) if given.isdigit() and int(given) > 0 else 1


def _first_given(*values: Any) -> int:
    return int(next(value for value in values if value is not None))


def _script_name() -> str:
    main = sys.modules.get("__main__")
    path = getattr(main, "__file__", None) or sys.argv[0] or "program"
    stem = os.path.splitext(os.path.basename(path))[0]
    if stem == "__main__":
        stem = os.path.basename(os.path.dirname(os.path.abspath(path)))
    return re.sub(r"[^A-Za-z0-9_-]+", "-", stem).strip("-_")[:64] or "program"
