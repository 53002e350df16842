"""Which instructions oneDNN may use on this host: found by running them, not by believing CPUID.

Some virtual machines advertise AMX and then kill the first process that uses it with SIGILL. `cap()` runs the real
instructions in a forked child and says what ONEDNN_MAX_CPU_ISA the ranks of this host need, if any. The agent calls it
once and `argosy doctor` shows it. It imports no torch, never touches the calling process's own AMX state, and never
overrides a value that the user has set.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import platform
import resource
import select
import signal
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

VARIABLE = "ONEDNN_MAX_CPU_ISA"

Outcome = Literal["works", "dies", "refused", "unknown"]

# oneDNN's names from the most able down, each with the kernel's flags that it needs.
_BELOW_AMX: tuple[tuple[str, frozenset[str]], ...] = (
    (
        "AVX512_CORE_FP16",
        frozenset(
            {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
            | {"avx512_vnni", "avx512_bf16", "avx512_fp16"}
        ),
    ),
    (
        "AVX512_CORE_BF16",
        frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq"} | {"avx512_vnni", "avx512_bf16"}),
    ),
    (
        "AVX512_CORE_VNNI",
        frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"}),
    ),
    ("AVX512_CORE", frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq"})),
    ("AVX2_VNNI", frozenset({"avx2", "avx_vnni"})),
    ("AVX2", frozenset({"avx2"})),
)

RETURN = bytes.fromhex("c3")
_LOAD_TILE_CONFIG = bytes.fromhex("c4e2784907")  # ldtilecfg [rdi]
_ZERO_TILES = bytes.fromhex("c4e27b49c0c4e27b49c8c4e27b49d0")  # tilezero tmm0, tmm1, tmm2
_MULTIPLY_BF16 = bytes.fromhex("c4e26a5cc1")  # tdpbf16ps tmm0, tmm1, tmm2
_MULTIPLY_INT8 = bytes.fromhex("c4e26b5ec1")  # tdpbssd tmm0, tmm1, tmm2
_RELEASE_TILES = bytes.fromhex("c4e27849c0")  # tilerelease

_SYS_ARCH_PRCTL = 158
_ARCH_REQ_XCOMP_PERM = 0x1023
_XFEATURE_XTILEDATA = 18
_EXIT_REFUSED = 3


@functools.cache
def cap() -> str | None:
    """Return the value of ONEDNN_MAX_CPU_ISA that ranks on this host need, or None when they need none."""
    flags = cpu_flags()
    return decide_cap(flags, probe_amx(flags) if is_amx_advertised(flags) else "unknown")


def environment(given: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to add for a rank whose environment is `given`; a user's own setting always wins."""
    wanted = None if VARIABLE in given or "DNNL_MAX_CPU_ISA" in given else cap()
    return {VARIABLE: wanted} if wanted else {}


def decide_cap(flags: frozenset[str], amx: Outcome) -> str | None:
    """Decide from what the CPU advertises and what became of a process that used AMX.

    `unknown` changes nothing: on a host that forbids executable pages oneDNN could not generate code either.
    """
    if not is_amx_advertised(flags) or amx in ("works", "unknown"):
        return None
    return next((name for name, needed in _BELOW_AMX if needed <= flags), "SSE41")


def is_amx_advertised(flags: frozenset[str]) -> bool:
    """Say whether oneDNN would choose its AMX kernels on a CPU with these flags."""
    return "amx_tile" in flags and bool(flags & {"amx_bf16", "amx_int8"})


def cpu_flags() -> frozenset[str]:
    """Read what the kernel says the first CPU can do; empty where it is not an x86-64."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return frozenset()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    found = next((line for line in lines if line.startswith("flags")), "")
    return frozenset(found.partition(":")[2].split())


def probe_amx(flags: frozenset[str]) -> Outcome:
    """Ask the kernel for the tile registers and multiply with them, in a child process."""
    code = _LOAD_TILE_CONFIG + _ZERO_TILES
    code += _MULTIPLY_BF16 if "amx_bf16" in flags else b""
    code += _MULTIPLY_INT8 if "amx_int8" in flags else b""
    return run_instructions(code + _RELEASE_TILES + RETURN, needs_tiles=True)


def run_instructions(
    code: bytes, *, needs_tiles: bool = False, timeout_seconds: float = 2.0
) -> Outcome:
    """Run machine code in a forked child (its first argument: a tile configuration) and say how that ended."""
    try:
        page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    except OSError:
        return "unknown"
    page.write(code)
    anchor = ctypes.c_char.from_buffer(page)
    call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(ctypes.addressof(anchor))
    tiles = ctypes.create_string_buffer(_tile_configuration(), 64)
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    child = os.fork()
    if child == 0:
        # Everything was made before the fork: the child only calls, so a lock held by another thread cannot stop it.
        status = 1
        try:
            _die_quietly()
            if needs_tiles and syscall(_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA):
                os._exit(_EXIT_REFUSED)
            call(tiles)
            status = 0
        finally:
            os._exit(status)
    outcome = _wait_outcome(child, timeout_seconds)
    del anchor, call
    page.close()
    return outcome


def _tile_configuration() -> bytes:
    """Palette 1; tiles 0 to 2 of 16 rows of 64 bytes."""
    columns = struct.pack("<16H", *([64] * 3 + [0] * 13))
    rows = struct.pack("16B", *([16] * 3 + [0] * 13))
    return struct.pack("<BB14x", 1, 0) + columns + rows


def _die_quietly() -> None:
    """No core file, no handler of the parent's: a signal just ends this child."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for number in (signal.SIGILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE):
        # The C handler may be faulthandler's, which Python's signal table does not know: always set, never ask first.
        signal.signal(number, signal.SIG_DFL)


def _wait_outcome(child: int, timeout_seconds: float) -> Outcome:
    descriptor = os.pidfd_open(child)
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        if not poll.poll(timeout_seconds * 1000):
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            os.waitpid(child, 0)
            return "unknown"
        _, status = os.waitpid(child, 0)
    except ChildProcessError:
        return "unknown"  # somebody else in this process reaps every child
    finally:
        os.close(descriptor)
    if os.WIFSIGNALED(status):
        return "dies"
    code = os.waitstatus_to_exitcode(status)
    if code == _EXIT_REFUSED:
        return "refused"
    return "works" if code == 0 else "unknown"
