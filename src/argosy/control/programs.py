"""Programs: can what a spec names be started from here?

Called by the command line and by `argosy.submit` before anything is started, so that a misspelt script is one clear error and
not a failed run. It looks at files and never runs them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from argosy.errors import ConfigError

TYPE_CHECKING = False  # typing itself costs more than reading a command line
if TYPE_CHECKING:
    from typing import Any

_OF_THIS_PROCESS = ("/dev/stdin", "/dev/fd/", "/proc/")


def working_directory() -> str:
    """The directory the command was typed in; ConfigError when it has been deleted meanwhile."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise ConfigError(
            "the current directory does not exist any more",
            fix="cd to a directory that does (`cd .` if it was made again)",
        )


def check_programs(spec: dict[str, Any], cwd: str, environ: Mapping[str, str]) -> None:
    """Refuse a spec whose programs cannot be started from here, saying which and why; interpreters get their full path."""
    for role, role_spec in spec["roles"].items():
        base = os.path.normpath(os.path.join(cwd, os.path.expanduser(role_spec.get("cwd") or "")))
        if not os.path.isdir(base):
            raise ConfigError(
                f"role {role}: its working directory {base} does not exist", fix=f"mkdir -p {base}"
            )
        path = role_spec.get("env", {}).get("PATH") or environ.get("PATH", os.defpath)
        if role_spec.get("python"):
            # The warm parent is started elsewhere and with another PATH.
            role_spec["python"] = check_command(os.path.expanduser(role_spec["python"]), base, path)
        if role_spec.get("script"):
            check_script(role_spec["script"], base)
        elif role_spec.get("command"):
            check_command(role_spec["command"][0], base, path)
        probe = (role_spec.get("ready") or {}).get("command")
        if probe and "/" not in probe[0]:  # what has a path may yet be made, by the process itself
            check_command(probe[0], base, path)


def check_script(script: str, cwd: str) -> None:
    """A script must be a file that can be read."""
    path = os.path.join(cwd, script)
    if os.path.isdir(path):
        raise ConfigError(f"{script} is a directory", fix="name a script in it, or use -m PACKAGE")
    if not os.path.exists(path):
        raise ConfigError(f"{script} does not exist in {cwd}", fix=_near_file(script, cwd))
    if not os.path.isfile(path) or os.path.normpath(path).startswith(_OF_THIS_PROCESS):
        # What a pipe has is gone when it is read, and a descriptor of this process is another thing to those that are started.
        raise ConfigError(
            f"{script} is no file that others can read", fix="write the script to a file"
        )
    if not os.access(path, os.R_OK):
        raise ConfigError(f"{script} cannot be read", fix=f"chmod u+r {script}")


def check_command(program: str, cwd: str, path: str) -> str:
    """A command must be found, and be executable; where it was found."""
    if not program:
        raise ConfigError("the command has an empty name", fix="name the program to start")
    if "/" in program:
        candidates = [os.path.join(cwd, program)]
    else:
        candidates = [os.path.join(cwd, part, program) for part in path.split(os.pathsep)]
    found = [os.path.normpath(candidate) for candidate in candidates if os.path.isfile(candidate)]
    for candidate in found:
        if os.access(candidate, os.X_OK):
            return candidate
    if found:
        raise ConfigError(f"{program} is not executable", fix=f"chmod +x {found[0]}")
    if any(os.path.isdir(candidate) for candidate in candidates):
        raise ConfigError(f"{program} is a directory", fix="name a program in it")
    where = f"in {cwd}" if "/" in program else "on PATH"
    here = os.path.isfile(os.path.join(cwd, program))
    fix = f"it is in {cwd}: write ./{program}" if here else "check its name, or give its full path"
    if program == "python":
        fix = "write python3, or name the script alone: argosy run SCRIPT"
    raise ConfigError(f"there is no command {program!r} {where}", fix=fix)


def _near_file(script: str, cwd: str) -> str:
    from argosy.config.nearest import nearest

    folder, name = os.path.split(os.path.join(cwd, script))
    try:
        names = os.listdir(folder)
    except OSError:
        return f"{folder} does not exist either"
    match = nearest(name, names)
    return (
        f"did you mean `{os.path.join(os.path.dirname(script), match)}`?"
        if match
        else "check the path"
    )
