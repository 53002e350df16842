"""The cap on oneDNN's instructions: the decision for every combination, and the probe with real machine code."""

import faulthandler
import os
from itertools import product

import psutil
import pytest

from argosy.native import isa

CORE = frozenset({"avx2", "avx512f", "avx512bw", "avx512vl", "avx512dq"})
AMX = frozenset({"amx_tile", "amx_bf16", "amx_int8"})
FP16 = CORE | {"avx512_vnni", "avx512_bf16", "avx512_fp16"}
UNDEFINED_INSTRUCTION = bytes.fromhex("0f0b")
JUMP_TO_ITSELF = bytes.fromhex("ebfe")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (FP16, "AVX512_CORE_FP16"),
        (CORE | {"avx512_vnni", "avx512_bf16"}, "AVX512_CORE_BF16"),
        (CORE | {"avx512_vnni"}, "AVX512_CORE_VNNI"),
        (CORE | {"avx512_fp16"}, "AVX512_CORE"),
        (CORE, "AVX512_CORE"),
        (frozenset({"avx2", "avx_vnni"}), "AVX2_VNNI"),
        (frozenset({"avx2"}), "AVX2"),
        (frozenset(), "SSE41"),
    ],
)
@pytest.mark.parametrize("amx", ["dies", "refused"])
def test_amx_that_is_advertised_and_fails_is_capped_to_the_best_of_the_rest(flags, expected, amx):
    assert isa.decide_cap(flags | AMX, amx) == expected


def test_nothing_is_capped_when_amx_works_or_nothing_is_known():
    for flags, outcome in product((CORE, FP16, frozenset()), ("works", "unknown")):
        assert isa.decide_cap(flags | AMX, outcome) is None


def test_nothing_is_capped_when_amx_is_not_advertised():
    for flags, outcome in product(
        (CORE, FP16, frozenset(), frozenset({"amx_tile"}), frozenset({"amx_bf16"})),
        ("works", "dies", "refused", "unknown"),
    ):
        assert isa.decide_cap(flags, outcome) is None


def test_the_users_own_setting_wins(monkeypatch):
    monkeypatch.setattr(isa, "cap", lambda: "AVX512_CORE_FP16")
    assert isa.environment({}) == {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16"}
    assert isa.environment({"ONEDNN_MAX_CPU_ISA": "DEFAULT"}) == {}
    assert isa.environment({"DNNL_MAX_CPU_ISA": "AVX2"}) == {}


def test_a_host_without_need_gets_no_variable(monkeypatch):
    monkeypatch.setattr(isa, "cap", lambda: None)
    assert isa.environment({}) == {}


x86_only = pytest.mark.skipif(not isa.cpu_flags(), reason="x86-64 machine code")


@x86_only
def test_an_instruction_that_works_and_one_that_dies_are_told_apart(no_leaks):
    assert isa.run_instructions(isa.RETURN) == "works"
    assert isa.run_instructions(UNDEFINED_INSTRUCTION) == "dies"


@x86_only
def test_a_handler_of_the_parent_does_not_hide_the_death(no_leaks, capfd):
    faulthandler.enable()
    assert isa.run_instructions(UNDEFINED_INSTRUCTION) == "dies"
    assert "Illegal instruction" not in capfd.readouterr().err


@x86_only
def test_code_that_never_returns_is_killed_and_proves_nothing(no_leaks):
    assert isa.run_instructions(JUMP_TO_ITSELF, timeout_seconds=0.1) == "unknown"


@pytest.mark.skipif(
    not isa.cpu_flags() or isa.is_amx_advertised(isa.cpu_flags()), reason="a CPU without AMX"
)
def test_a_cpu_without_amx_refuses_the_tiles(no_leaks):
    assert isa.probe_amx(AMX) == "refused"


@pytest.fixture
def no_leaks():
    before = set(os.listdir("/proc/self/fd"))
    children = psutil.Process().children()
    yield
    assert set(os.listdir("/proc/self/fd")) <= before, "garbage of other tests may go meanwhile"
    assert psutil.Process().children() == children
