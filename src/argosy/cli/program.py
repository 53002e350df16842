"""Program: from typed words to the plain objects of a spec.

Called by `argosy run` and `argosy queue add`. Everything that can be wrong with the words or the files they name is refused
here, before anything is started. msgspec is imported only for a SPEC.toml or --set.
"""

from __future__ import annotations

import os

from argosy.cli.arguments import Arguments
from argosy.control.programs import (
    check_command,
    check_programs,
    check_script,
    working_directory,
)
from argosy.errors import ConfigError

TYPE_CHECKING = False  # typing itself costs more than reading a command line
if TYPE_CHECKING:
    from typing import Any

GANG_RESTARTS = 3
_MOST_SCRIPT_BYTES = 4 << 20
_ROLE_OPTIONS = (
    "ranks",
    "module",
    "threads",
    "spares",
    "min",
    "restart",
    "tty",
    "preload",
    "no_warm",
    "cpus",
    "memory",
)


class Program:
    """What to submit: the spec, variables and secrets that were given beside it."""

    __slots__ = ("env", "secrets", "spec")

    def __init__(self, spec: dict[str, Any], env: dict[str, str], secrets: dict[str, str]) -> None:
        self.spec = spec
        self.env = env
        self.secrets = secrets


def read_program(arguments: Arguments) -> Program:
    """The spec for `run [options] SCRIPT|SPEC.toml|-m MODULE|-- COMMAND`, checked as far as this machine can tell."""
    where = arguments.get("on", "local")
    if where != "local":
        raise ConfigError(
            f"--on {where} comes with a later release", fix="leave it out, or say --on local"
        )
    env, secrets = read_env(arguments), _read_secrets(arguments)
    script = arguments.word()
    if script.endswith(".toml"):
        spec = _read_file(arguments, script)
    else:
        spec = {"name": arguments.get("name") or "", "roles": _role(arguments, script)}
        spec["name"] = spec["name"] or _default_name(spec["roles"])
    _apply_run_options(spec, arguments)
    if secrets:
        for role in spec["roles"].values():
            role["secrets"] = [
                *role.get("secrets", []),
                *(n for n in secrets if n not in role.get("secrets", [])),
            ]
    if arguments.get("set") and not script.endswith(".toml"):
        spec = _apply_settings(spec, arguments.get("set"))
    _check_secrets(spec, secrets)
    _check_terminal(spec, arguments)
    return Program(spec, env, secrets)


def _role(arguments: Arguments, script: str) -> dict[str, Any]:
    role = _what_to_start(arguments, script)
    ranks = arguments.get("ranks")
    is_gang = ranks is not None
    if is_gang:
        role["gang"] = True
        role["count"] = ranks
    for name, key in (("threads", "threads"), ("spares", "spares"), ("min", "min")):
        if name in arguments.options:
            role[key] = arguments.options[name]
    if not is_gang and (arguments.get("spares") or arguments.get("min")):
        raise ConfigError("--spares and --min are for gangs", fix="say how many ranks: -n RANKS")
    if arguments.get("min", 1) > (ranks or 1):
        raise ConfigError(
            f"--min {arguments.get('min')} is more than -n {ranks}",
            fix=f"use --min {ranks} or less",
        )
    if not arguments.get("service") or "restart" in arguments.options:
        _apply_restarts(role, arguments.get("restart"), is_gang)
    if arguments.get("tty"):
        if role.get("count", 1) + role.get("spares", 0) > 1:
            raise ConfigError("--tty is for one process", fix="leave out -n, or say -n 1")
        role["tty"] = True
    _apply_warmth(role, arguments)
    if arguments.get("cpus"):
        role["cpu_request"] = arguments.get("cpus")
    if arguments.get("memory"):
        role["memory_request_bytes"] = arguments.get("memory")
    return {"train" if is_gang else "main": role}


def _what_to_start(arguments: Arguments, script: str) -> dict[str, Any]:
    module, rest = arguments.get("module"), arguments.rest
    if module and script:
        raise ConfigError(
            f"both -m {module} and {script} were given",
            fix=f"leave one out; arguments of the module come after `--`: -m {module} -- {script}",
        )
    if module:
        _check_module(module)
        return {"module": module, "arguments": rest or []}
    if script:
        check_script(script, working_directory())
        _check_python(script)
        return {"script": script, "arguments": rest or []}
    if rest:
        check_command(rest[0], working_directory(), os.environ.get("PATH", os.defpath))
        return {"command": rest}
    raise ConfigError(
        "there is nothing to run",
        fix=f"argosy {arguments.verb.name} SCRIPT, -m MODULE, SPEC.toml or -- COMMAND",
    )


def _apply_restarts(role: dict[str, Any], restarts: int | None, is_gang: bool) -> None:
    """Like torchrun's --max-restarts: so many failures of the program are mended, whatever progress was made between."""
    if restarts is None and not is_gang:
        return
    if restarts is None:
        role["restart"] = "transient"
        role["budget"] = {"user": GANG_RESTARTS, "no_progress": 0}
    elif restarts:
        # As often as was asked for, also when it says the same each time.
        role["restart"] = "transient"
        role["budget"] = {"user": restarts, "no_progress": 0, "same_error": 0}
    else:
        role["restart"] = "temporary"
        role["budget"] = {"user": 0, "host": 0, "hang": 0, "preemption": 0}


def _apply_warmth(role: dict[str, Any], arguments: Arguments) -> None:
    preload = arguments.get("preload")
    if (preload is not None or arguments.get("no_warm")) and "command" in role:
        raise ConfigError(
            "--preload and --no-warm are for Python scripts and modules; a command is always started by exec",
            fix="leave them out",
        )
    if preload is not None:
        role["preload"] = [part.strip() for part in preload.split(",") if part.strip()]
    if arguments.get("no_warm"):
        role["warm"] = False


def _apply_run_options(spec: dict[str, Any], arguments: Arguments) -> None:
    if arguments.get("name"):
        spec["name"] = arguments.get("name")
    for name in ("service", "tied", "queued"):
        if arguments.get(name):
            spec[name] = True
    for name in ("priority", "array", "share"):
        if name in arguments.options:
            spec[name] = arguments.options[name]
    if spec.get("tied") and (arguments.get("detach") or spec.get("service")):
        raise ConfigError("--tied contradicts --detach and --service", fix="leave one of them out")


def _read_file(arguments: Arguments, path: str) -> dict[str, Any]:
    for name in _ROLE_OPTIONS:
        if name in arguments.options:
            flag = next(o.flag for o in arguments.verb.options if o.name == name)
            raise ConfigError(
                f"{flag} is for scripts and commands; {path} says it for each role",
                fix="change the file, or use --set roles.ROLE.KEY=VALUE",
            )
    if arguments.rest:
        raise ConfigError(f"{path} takes no arguments after `--`", fix="put them into the file")
    import msgspec

    from argosy.config.files import load_spec

    document: dict[str, Any] = msgspec.to_builtins(load_spec(path, arguments.get("set", [])))
    check_programs(document, working_directory(), os.environ)
    return document


def _apply_settings(spec: dict[str, Any], overrides: list[str]) -> dict[str, Any]:
    """`--set` beside a script or module is for its own config, which only the program knows; `roles.…` is for the spec."""
    from argosy.config.overrides import parse_override

    own = [text for text in overrides if parse_override(text)[0][0] != "roles"]
    (role,) = spec["roles"].values()
    if "command" in role:
        own = []
    if own:
        import json

        from argosy.cli.settings import check_takes_settings

        if role.get("script"):
            check_takes_settings(role["script"], own)
        role["env"] = {**role.get("env", {}), "ARGOSY_SET": json.dumps(own)}
    rest = [text for text in overrides if text not in own]
    return _override(spec, rest) if rest else spec


def _override(spec: dict[str, Any], overrides: list[str]) -> dict[str, Any]:
    import msgspec

    from argosy.config.checks import check_spec
    from argosy.config.files import make_spec
    from argosy.config.overrides import apply_overrides

    changed = make_spec(apply_overrides(spec, overrides), source="--set")
    check_spec(changed)
    document: dict[str, Any] = msgspec.to_builtins(changed)
    check_programs(document, working_directory(), os.environ)
    return document


def _default_name(roles: dict[str, Any]) -> str:
    (role,) = roles.values()
    source = role.get("script") or role.get("module") or _program_of(role["command"])
    stem = source.rstrip("/").rsplit("/", 1)[-1].removesuffix(".py")
    letters = [
        letter if (letter.isalnum() and letter.isascii()) or letter in "_-" else "-"
        for letter in stem
    ]
    return "".join(letters).strip("-_")[:64]


def _program_of(command: list[str]) -> str:
    """What a command is about: `python -u train.py` is train.py, `python -m pkg.train` is pkg.train."""
    if command[0].rpartition("/")[2].startswith("python"):
        for word, following in zip(command[1:], [*command[2:], ""], strict=True):
            if word == "-m" and following:
                return following
            if word.endswith(".py"):
                return word
    return command[0]


def _check_python(script: str) -> None:
    """What is not Python by its name, its first line or, without an ending, its text would fail on every rank with a puzzling error."""
    if script.endswith((".py", ".pyw", ".pyz", ".zip")):
        return
    with open(script, "rb") as file:
        head = file.read(_MOST_SCRIPT_BYTES)
    first = head.partition(b"\n")[0]
    if first.startswith(b"#!") and b"python" in first:
        return
    ending = os.path.splitext(script)[1]
    if not ending and not first.startswith(b"#!") and _compiles(head):
        return
    if ending in (".yaml", ".yml", ".json"):
        raise ConfigError(f"{script} is no spec", fix="a spec is a TOML file: argosy run SPEC.toml")
    runnable = script if "/" in script else f"./{script}"
    mode = "" if os.access(script, os.X_OK) else f"chmod +x {script}; "
    raise ConfigError(
        f"{script} is not a Python script (those end with .py, or begin with #! and python)",
        fix=f"as a command: {mode}argosy run -- {runnable}",
    )


def _compiles(text: bytes) -> bool:
    try:
        compile(text, "script", "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return False
    return True


def _check_module(module: str) -> None:
    """Its top package must be found; nothing is imported."""
    import sys
    from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder

    top = module.split(".", 1)[0]
    extra = [part or "." for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    finders = (BuiltinImporter.find_spec(top), FrozenImporter.find_spec(top))
    if (
        not any(finders)
        and PathFinder.find_spec(top, [working_directory(), *extra, *sys.path]) is None
    ):
        raise ConfigError(
            f"there is no module {top!r} for {sys.executable}",
            fix="check its name, the directory you are in, and the environment that is active",
        )


def read_env(arguments: Arguments) -> dict[str, str]:
    """The variables given by --env."""
    env = {}
    for text in arguments.get("env", []):
        key, equals, value = text.partition("=")
        if not equals or not key or "\0" in text:
            raise ConfigError(f"--env {key!r} is not K=V", fix="example: --env LEVEL=3")
        env[key] = value
    return env


def _read_secrets(arguments: Arguments) -> dict[str, str]:
    """NAME=@file, or NAME from the environment; a value in argv would show in `ps`, so it is refused."""
    secrets = {}
    for text in arguments.get("secret", []):
        name, equals, source = text.partition("=")
        if not name.isidentifier():
            raise ConfigError(
                f"--secret {name!r} is not a name", fix="example: --secret TOKEN=@token.txt"
            )
        if equals and not source.startswith("@"):
            raise ConfigError(
                f"--secret {name}: its value must not stand on the command line, where others can read it",
                fix=f"put it into a file: --secret {name}=@FILE, or into the environment: --secret {name}",
            )
        if equals:
            secrets[name] = _read_secret_file(name, source[1:])
        elif name in os.environ:
            secrets[name] = os.environ[name]
        else:
            raise ConfigError(
                f"--secret {name}: there is no variable {name} in the environment",
                fix=f"export it, or use --secret {name}=@FILE",
            )
    return secrets


def _read_secret_file(name: str, path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except OSError as error:
        raise ConfigError(
            f"--secret {name}: {path} cannot be read: {error.strerror}", fix="check the path"
        )
    except UnicodeDecodeError:
        raise ConfigError(
            f"--secret {name}: {path} is not UTF-8 text", fix="encode it, e.g. base64"
        )


def _check_terminal(spec: dict[str, Any], arguments: Arguments) -> None:
    """What a terminal shows and JSON cannot both go to stdout; a run that nobody follows shows nothing."""
    is_followed = arguments.verb.name == "run" and not arguments.get("detach")
    if not arguments.get("json") or not is_followed or spec.get("service") or spec.get("array"):
        return
    for name, role in spec["roles"].items():
        if role.get("tty"):
            what = "--tty" if arguments.get("tty") else f"roles.{name}.tty"
            raise ConfigError(
                f"{what} shows the program on the terminal, --json prints JSON there",
                fix="leave one of them out, or add --detach",
            )


def _check_secrets(spec: dict[str, Any], given: dict[str, str]) -> None:
    for role_name, role in spec["roles"].items():
        for name in role.get("secrets", []):
            if name not in given:
                raise ConfigError(
                    f"role {role_name} wants the secret {name}, which was not given",
                    fix=f"--secret {name}=@FILE, or export it and say --secret {name}",
                )
