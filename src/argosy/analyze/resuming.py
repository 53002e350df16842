"""Resuming: the words that go on with what a run has saved.

Called by story.py for a person who watches a run, and by the command line for one who has stopped it. Pure, over the fact of the run's
submission. What that fact does not hold, variables given by `--env` for one, is not said; a line that would start something else is never said.
"""

from __future__ import annotations

from argosy.config.warmth import DEFAULT_PRELOAD

TYPE_CHECKING = False  # typing itself costs more than reading a command line
if TYPE_CHECKING:
    from typing import Any

_OPTIONS = {
    "threads": "--threads", "min": "--min", "spares": "--spares", "cpu_request": "--cpus",
    "memory_request_bytes": "--memory",
}  # fmt: skip
_PROGRAM = ("script", "module", "command", "arguments")
_TYPED = {*_OPTIONS, *_PROGRAM, "gang", "count", "restart", "budget", "preload", "warm", "env"}
"""Keys of a role that options of `argosy run` make."""
_SETTINGS = "ARGOSY_SET"
"""What `--set` has made: the checkpoint brings it."""


def how_to_go_on(
    submitted: dict[str, Any], role: str, directory: str, *, size: int | None = None
) -> str:
    """The command, or in words what to do where no command does the same."""
    command = resume_command(submitted, role, directory, size=size)
    if command is not None:
        return command
    return f"start it as before, with --resume {directory} among the arguments of {role}"


def resume_command(
    submitted: dict[str, Any], role: str, directory: str, *, size: int | None = None
) -> str | None:
    """The command that goes on with what a role of a run has saved in its directory; None for what only a spec can say.

    `size` is the number of ranks that the role was given last, if not that of its submission.
    """
    roles = submitted.get("spec", {}).get("roles", {})
    spec = roles.get(role, {})
    if size is not None:
        spec = {**spec, "count": size}
    # What an array tells its members is not on any command line.
    if len(roles) != 1 or not _is_typed(spec) or submitted.get("array_index") is not None:
        return None
    import shlex

    resume = ["--resume", directory]
    if spec.get("command"):
        program = ["--", *_without_resume(spec["command"]), *resume]
    else:
        source = [spec["script"]] if spec.get("script") else ["-m", spec["module"]]
        program = [*source, "--", *_without_resume(spec.get("arguments", [])), *resume]
    return shlex.join(["argosy", "run", *_options(spec), *program])


def _is_typed(spec: dict[str, Any]) -> bool:
    """Whether a command line can say all of it, and its program takes what is added at the end of it."""
    if not _TYPED.issuperset(spec) or set(spec.get("env", {})) - {_SETTINGS}:
        return False
    command = spec.get("command")
    if command:
        return not any(_takes_text(word) for word in command)
    return bool(spec.get("script") or spec.get("module"))


def _takes_text(word: str) -> bool:
    """`-c`, `-lc` of a shell: what follows the text is no argument of the program."""
    return word.startswith("-") and word.endswith("c") and word[1:].isalpha()


def _options(spec: dict[str, Any]) -> list[str]:
    is_gang = bool(spec.get("gang"))
    words = ["-n", str(spec.get("count", 1))] if is_gang else []
    for key, flag in _OPTIONS.items():
        if key in spec:
            words += [flag, f"{spec[key]:.15g}" if isinstance(spec[key], float) else str(spec[key])]
    budget = spec.get("budget", {})
    if spec.get("restart", "temporary") == "temporary":
        words += ["--restart", "0"] if is_gang else []
    elif not is_gang or budget.get("same_error") == 0:
        words += ["--restart", str(budget.get("user", 3))]
    if tuple(spec.get("preload", DEFAULT_PRELOAD)) != DEFAULT_PRELOAD:
        words += ["--preload", ",".join(spec["preload"])]
    return words if spec.get("warm", True) else [*words, "--no-warm"]


def _without_resume(given: list[str]) -> list[str]:
    words, left = [], list(given)
    while left:
        word = left.pop(0)
        if word == "--resume":
            del left[:1]
        elif not word.startswith("--resume="):
            words.append(word)
    return words
