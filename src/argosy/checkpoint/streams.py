"""Random streams as plain values: python's, numpy's, torch's and its accelerator's default ones, and generators of the user's own.

States are numbers, texts and small tensors, never pickled. Used by the registry; seeds nothing.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

Now = tuple[tuple[Any, ...], Any, torch.Tensor, dict[str, torch.Tensor]]


def now() -> Now:
    """The states of the default streams, python's, numpy's, torch's and the accelerator's; nobody else has them."""
    return (
        random.getstate(),
        np.random.get_state(legacy=False),
        torch.get_rng_state(),
        _now_of_accelerator(),
    )


def _now_of_accelerator() -> dict[str, torch.Tensor]:
    """The state of the current device's stream, by the kind of device; none of one that this process has not used. Untested on a device: there is none here."""
    if not torch.accelerator.is_available():
        return {}
    module = torch.get_device_module()
    # To ask one that is not in use would take memory of it.
    is_used = getattr(module, "is_initialized", lambda: True)()
    return {_accelerator(): module.get_rng_state()} if is_used else {}


def _accelerator() -> str:
    return str(getattr(torch.accelerator.current_accelerator(), "type", ""))


def described(states: Now) -> dict[str, Any]:
    """As values."""
    python, numpy, torchs, accelerator = states
    found = {"python": state_of_python(python), "numpy": _plain(numpy), "torch": torchs}
    return found | ({"accelerator": accelerator} if accelerator else {})


class Process:
    """The default streams of this process, as something with a state_dict."""

    def state_dict(self) -> dict[str, Any]:
        """python, numpy, torch, and the accelerator's where one is used."""
        return described(now())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where the streams were."""
        if "python" in state:
            random.setstate(_python_state(state["python"]))
        if "numpy" in state:
            np.random.set_state(_rich(state["numpy"]))
        if "torch" in state:
            torch.set_rng_state(state["torch"])
        stored = state.get("accelerator", {})
        if stored and torch.accelerator.is_available() and _accelerator() in stored:
            torch.get_device_module().set_rng_state(stored[_accelerator()])


def state_of(generator: torch.Generator | np.random.Generator | random.Random) -> Any:
    """The state of one generator."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return _plain(generator.bit_generator.state)
    return state_of_python(generator.getstate())


def give_state(
    generator: torch.Generator | np.random.Generator | random.Random, state: Any
) -> None:
    """Let a generator go on from a state."""
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = _rich(state)
    else:
        generator.setstate(_python_state(state))


def state_of_python(state: tuple[Any, ...]) -> dict[str, Any]:
    """Its 625 words as a tensor; JSON would be ten times as long."""
    version, words, gauss = state
    return {"version": version, "words": np.array(words, dtype=np.int64), "gauss": gauss}


def _python_state(state: dict[str, Any]) -> tuple[Any, ...]:
    words = state["words"].tolist()
    return state["version"], tuple(words), state["gauss"]


def _plain(state: Any) -> Any:
    """numpy's states are dicts of arrays and numbers, of any size."""
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    if isinstance(state, np.ndarray):
        return (
            {"array": state.astype(np.int64), "dtype": str(state.dtype)}
            if state.dtype == np.uint32
            else state
        )
    return state.item() if isinstance(state, np.generic) else state


def _rich(state: Any) -> Any:
    if isinstance(state, dict):
        if set(state) == {"array", "dtype"}:
            return np.asarray(state["array"]).astype(state["dtype"])
        return {key: _rich(value) for key, value in state.items()}
    return state.numpy() if isinstance(state, torch.Tensor) else state
