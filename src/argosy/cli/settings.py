"""Settings: whether a script can take the `--set key=value` that stand beside it.

Called by program.py, only when there are some. Refused is what can be told for certain from the source: a script that never mentions Argosy and
imports nothing but the standard library and libraries that do not know Argosy has no config. Of all others the program itself decides.
"""

from __future__ import annotations

import os
import sys

from argosy.errors import ConfigError

_MOST_BYTES = 1 << 20
_STRANGERS = {
    "torch", "torchvision", "torchaudio", "numpy", "scipy", "pandas", "matplotlib", "PIL", "tqdm", "transformers", "datasets",
    "tokenizers", "safetensors", "sklearn", "einops", "yaml",
}  # fmt: skip
"""Libraries without a config of ours behind them."""
_DETOURS = ("argosy", "launch", "importlib", "runpy", "__import__", "exec(", "sys.path")
"""Words by which a program may come to a config although it does not import one."""


def check_takes_settings(script: str, settings: list[str]) -> None:
    """ConfigError when the script certainly has no config: what was set would be lost in silence."""
    if not _is_without_config(script):
        return
    key, _, value = settings[0].partition("=")
    raise ConfigError(
        f"--set {settings[0]}: {script} has no config, it never calls argosy.launch",
        fix=f"if it has an option of that name: argosy run … {script} -- --{key.strip()} {value.strip()}",
    )


def _is_without_config(script: str) -> bool:
    try:
        with open(script, encoding="utf-8") as file:
            text = file.read(_MOST_BYTES + 1)
    except (OSError, UnicodeDecodeError):
        return False
    if len(text) > _MOST_BYTES or any(word in text.lower() for word in _DETOURS):
        return False
    imports = _imports(text)
    if imports is None or not imports <= sys.stdlib_module_names | _STRANGERS:
        return False
    # A module beside the script goes before the library of its name.
    beside = os.path.dirname(os.path.abspath(script))
    return not any(
        os.path.exists(os.path.join(beside, name)) or os.path.exists(f"{beside}/{name}.py")
        for name in imports
    )


def _imports(text: str) -> set[str] | None:
    """The top names of all modules that it imports anywhere; None when it cannot be read."""
    import ast

    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return None
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or ".").partition(".")[0] if not node.level else ".")
    return found
