"""The verdict on the CPU's instructions, for every way in which the two probes can end."""

import pytest

from argosy.control.hostchecks import judge_lookup
from argosy.control.torchchecks import best_of, how_it_ended, judge_instructions, judge_kernels
from argosy.native import loader

DIES = "dies with SIGILL"


def judge(*, cap=None, own="", with_cap="80.5", without_cap="80.5"):
    return judge_instructions("AMX", cap=cap, own=own, with_cap=with_cap, without_cap=without_cap)


def test_a_cpu_that_needs_no_cap_is_ok():
    check = judge()
    assert (check.state, check.mend) == ("ok", "")


def test_a_slow_product_is_not_called_none():
    assert "bf16 at 80 GFLOPS" in judge(with_cap="80.4").detail
    assert "bf16 at 0.31 GFLOPS" in judge(with_cap="0.314").detail


def test_an_address_without_a_name_is_not_said_to_be_itself():
    assert "127.0.0.1 has no name, answered" in judge_lookup("::ffff:127.0.0.1", 0.01, "").detail
    assert "127.0.0.1 is localhost, answered" in judge_lookup("localhost", 0.01, "").detail
    assert judge_lookup("localhost", 60.0, "mend").state == "warning"


def test_advertised_amx_that_dies_is_mended_for_ranks_and_said():
    check = judge(cap="AVX512_CORE_FP16", without_cap=DIES)
    assert check.state == "warning"
    assert DIES in check.detail
    assert "ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16" in check.mend


def test_a_cap_that_torch_did_not_need_names_the_way_out():
    check = judge(cap="AVX512_CORE_FP16")
    assert check.state == "warning"
    assert "ONEDNN_MAX_CPU_ISA=DEFAULT" in check.mend


@pytest.mark.parametrize("cap", [None, "AVX512_CORE"])
def test_the_users_own_setting_is_respected_when_it_works(cap):
    check = judge(cap=cap, own="AVX2", without_cap=DIES)
    assert check.state == "ok"
    assert "AVX2" in check.detail


def test_the_users_own_setting_is_blamed_when_only_it_dies():
    check = judge(own="DEFAULT", with_cap=DIES)
    assert (check.state, check.mend) == ("broken", "unset ONEDNN_MAX_CPU_ISA")


def test_a_product_that_dies_in_spite_of_the_cap_is_broken():
    check = judge(cap="AVX512_CORE_FP16", with_cap=DIES, without_cap=DIES)
    assert check.state == "broken"
    assert check.mend


def test_the_end_of_a_child_is_told_in_words():
    assert how_it_ended(-4, "") == DIES
    assert "hangs" in how_it_ended(None, "")
    assert how_it_ended(1, "Traceback\nImportError: no torch\n") == "fails: ImportError: no torch"


def test_the_best_instructions_are_named_for_people():
    assert best_of(frozenset({"avx2", "avx512f", "amx_tile", "amx_bf16"})) == "AMX"
    assert best_of(frozenset({"avx512f", "avx512_bf16"})) == "AVX-512 with bf16"
    assert best_of(frozenset({"avx2"})) == "AVX2"


def test_native_kernels_are_named_with_their_path():
    check = judge_kernels(loader.State("avx2", "_kernels.so"))
    assert (check.state, check.detail) == ("ok", "native, avx2 (_kernels.so)")


def test_missing_kernels_are_a_warning_with_the_mend():
    check = judge_kernels(
        loader.State(loader.WITHOUT, "no native kernels were built", loader.REBUILD)
    )
    assert check.state == "warning"
    assert check.detail.startswith("torch operations (no native kernels were built)")
    assert "C compiler" in check.mend
