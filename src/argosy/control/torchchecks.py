"""Is this interpreter fit to train: its version, torch, the CPU's instructions as torch really uses them, and our native kernels.

Called by `argosy doctor`, after the checks of the host. torch is only ever imported in a child process, by command line, so a torch
that crashes or hangs costs one line of the report and nothing else.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import sys
from collections.abc import Callable

from argosy.control.hostchecks import Check, broken, ok, run_child, warning
from argosy.native import isa, loader

_TORCH_DEADLINE_SECONDS = 120.0

_TORCH_PROBE = """
import json, time
start = time.perf_counter()
import torch
import torch.distributed as dist
print(json.dumps({
    "version": torch.__version__,
    "seconds": time.perf_counter() - start,
    "has_gloo": dist.is_available() and dist.is_gloo_available(),
    "devices": torch.cuda.device_count(),
    "threads": torch.get_num_threads(),
}))
"""

# Sizes that oneDNN gives to its tile kernels; checked against float32, for a wrong result is as bad as a death.
_GEMM_PROBE = """
import time, torch
torch.set_num_threads(1)
torch.manual_seed(0)
a, b = torch.randn(512, 512), torch.randn(512, 512)
x, y = a.bfloat16(), b.bfloat16()
torch.mm(x, y)
start = time.perf_counter()
for _ in range(4):
    got = torch.mm(x, y)
seconds = (time.perf_counter() - start) / 4
worst = (got.float() - x.float() @ y.float()).abs().max().item()
assert worst < 1.0, f"bf16 product is off by {worst}"
print(2 * 512**3 / seconds / 1e9)
"""


def torch_checks() -> list[tuple[str, Callable[[], Check]]]:
    """All checks of this module in the order in which they are shown."""
    return [
        ("interpreter", check_interpreter),
        ("torch", check_torch),
        ("CPU instructions", check_instructions),
        ("kernels", check_kernels),
    ]


def check_interpreter() -> Check:
    """The Python that runs this, and that ranks run with by default."""
    version = platform.python_version()
    detail = f"{platform.python_implementation()} {version}, {sys.executable}"
    if sys.version_info < (3, 11) or platform.python_implementation() != "CPython":
        return broken("interpreter", detail, "use CPython 3.11 or newer")
    if sys.platform != "linux":
        return broken("interpreter", f"{detail} on {sys.platform}", "Argosy runs on Linux")
    return ok("interpreter", detail)


def check_torch() -> Check:
    """Whether it can be imported in a fresh process, and how long that takes."""
    code, output, error, _ = run_child(
        [sys.executable, "-c", _TORCH_PROBE], timeout_seconds=_TORCH_DEADLINE_SECONDS
    )
    if code != 0:
        return broken(
            "torch",
            f"`import torch` {how_it_ended(code, error)}",
            "pip install torch==2.13.0 into this interpreter's environment",
        )
    found = json.loads(output.strip().splitlines()[-1])
    detail = (
        f"{found['version']}, imported in {found['seconds']:.1f} s, {found['threads']} threads, "
        f"{found['devices']} accelerators"
    )
    if not found["has_gloo"]:
        return warning(
            "torch", f"{detail}; built without Gloo", "install a build of torch with Gloo"
        )
    return ok("torch", detail)


def check_instructions() -> Check:
    """What the CPU advertises, proven by a bf16 product by torch with the cap that the runtime sets and without one."""
    flags = isa.cpu_flags()
    own = os.environ.get(isa.VARIABLE, "")
    cap = isa.cap()
    bare = {name: value for name, value in os.environ.items() if name != isa.VARIABLE}
    chosen = own or cap
    effective = bare | ({isa.VARIABLE: chosen} if chosen else {})
    with_cap = _multiply(effective)
    without = _multiply(bare) if chosen else with_cap
    return judge_instructions(
        best_of(flags), cap=cap, own=own, with_cap=with_cap, without_cap=without
    )


def check_kernels() -> Check:
    """Whether sums and waits are done by native code, and by which instructions; results are the same without."""
    # In a child: an object of another compiler or CPU may die when it is opened.
    command = [
        sys.executable,
        "-c",
        "import json; from argosy.native import loader; print(json.dumps(loader.state()))",
    ]
    code, output, error, _ = run_child(command, timeout_seconds=20.0)
    if code != 0:
        return warning(
            "kernels",
            f"opening the native kernels {how_it_ended(code, error)}",
            f"{loader.OUTDATED}; until then export {loader.SWITCH}=0",
        )
    return judge_kernels(loader.State(*json.loads(output.strip().splitlines()[-1])))


def judge_kernels(found: loader.State) -> Check:
    """Decide from what the loader found."""
    if found.path == loader.WITHOUT:
        detail = (
            f"{found.path} ({found.detail}): the same results, collectives several times slower"
        )
        return warning("kernels", detail, found.mend)
    return ok("kernels", f"native, {found.path} ({found.detail})")


def judge_instructions(
    best: str, *, cap: str | None, own: str, with_cap: str, without_cap: str
) -> Check:
    """Decide from what two children did; `with_cap` and `without_cap` are GFLOPS as text, or how the child ended."""
    name = "CPU instructions"
    chosen = own or cap
    runs, runs_bare = is_number(with_cap), is_number(without_cap)
    if not runs:
        mend = f"unset {isa.VARIABLE}" if own and runs_bare else "export ONEDNN_MAX_CPU_ISA=AVX2"
        under = f" under {isa.VARIABLE}={chosen}" if chosen else ""
        return broken(name, f"{best}; a bf16 product{under} {with_cap}", mend)
    measured = float(with_cap)
    shown = f"{measured:.0f}" if measured >= 10 else f"{measured:.2g}"
    speed = f"bf16 at {shown} GFLOPS on one thread"
    if own:
        return ok(name, f"{best}; {isa.VARIABLE}={own} is your own setting; {speed}")
    if cap and not runs_bare:
        detail = f"AMX is advertised, but a bf16 product {without_cap}; ranks get {isa.VARIABLE}={cap}: {speed}"
        mend = f"nothing for runs of Argosy; for programs started otherwise: export {isa.VARIABLE}={cap}"
        return warning(name, detail, mend)
    if cap:
        detail = (
            f"AMX is advertised, but its instructions fail; ranks get {isa.VARIABLE}={cap}: {speed}"
        )
        return warning(name, detail, f"nothing; to use AMX anyway: export {isa.VARIABLE}=DEFAULT")
    return ok(name, f"{best}; {speed}")


def best_of(flags: frozenset[str]) -> str:
    """The widest vector instructions that the CPU advertises, for people."""
    if isa.is_amx_advertised(flags):
        return "AMX"
    if "avx512f" in flags:
        return "AVX-512" + (" with bf16" if "avx512_bf16" in flags else "")
    return "AVX2" if "avx2" in flags else platform.machine()


def is_number(text: str) -> bool:
    """Whether a child gave its GFLOPS."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def how_it_ended(code: int | None, error: str) -> str:
    """A sentence's end for a child that did not succeed."""
    if code is None:
        return f"hangs (no end after {_TORCH_DEADLINE_SECONDS:g} s)"
    if code < 0:
        return f"dies with {signal.Signals(-code).name}"
    last = error.strip().splitlines()[-1][:300] if error.strip() else "no message"
    return f"fails: {last}"


def _multiply(environment: dict[str, str]) -> str:
    code, output, error, _ = run_child(
        [sys.executable, "-c", _GEMM_PROBE],
        timeout_seconds=_TORCH_DEADLINE_SECONDS,
        environment=environment,
    )
    return output.strip() if code == 0 else how_it_ended(code, error)
