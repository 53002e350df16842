"""What a program may do wrong is refused or explained in two lines, once, and nothing is restarted for it."""

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(300)]

REFUSED = {
    # case and ranks: exit code, what happened, the fix
    "indivisible:2": (64, "batch_size = 30 is not divisible by lanes = 8", "use 24 or 32"),
    "no_batch_size:1": (64, "batch_size = 0, lanes = 8", r"run\.trainer\(batch_size=32"),
    "second_trainer:2": (64, "this run has a trainer already", "one trainer per run"),
    "lanes_as_text:1": (64, "lanes = '8' is not a whole number", "lanes=8"),
    "two_lanes:3": (64, "3 ranks for 2 lanes", "at most 2 ranks, or more lanes"),
    "misspelt:1": (64, "no argument 'batchsize'", "`batch_size`"),
    "made_optimizer:1": (64, "optimizer= is AdamW, not a function", "lambda params"),
    "no_module:1": (64, r"model= is function, not a torch\.nn\.Module", "give a module"),
    "loss_is_no_function:1": (64, "loss= is Tensor, not a function", r"\(sum, count\)"),
    "too_large:2": (
        71,
        r"needs [\d.]+ MiB of shared memory \(weights .*, state .*, gradients .*\), 2\.0 MiB can be had",
        r"about 0\.04 M of 0\.45 M parameters would fit",
    ),
    "complex_parameter:1": (64, r"parameter 'phase' is torch\.complex64", "two real ones"),
    "nothing_to_train:1": (64, "no parameter to train", "requires_grad"),
    "no_count:2": (64, r"returned Tensor for 'loss', not \(sum, count\)", r"labels\.numel\(\)"),
    "count_is_no_number:1": (64, "the count of 'loss' is None", "a number"),
    "not_summed:1": (64, "not a tensor with one element", 'reduction="sum"'),
    "detached:1": (64, "does not depend on any parameter", r"without \.detach\(\)"),
    "private_noise:1": (65, r"computed twice: '0\.weight' differs in 96 of 96", "generator of its"),
    "private_noise:2": (65, r"computed twice: '0\.weight' differs in 96 of 96", "generator of its"),
    "private_start:2": (65, r"'2\.weight' began with other values", "default generators"),
    "changed_outside:2": (64, r"'0\.weight' was changed outside a step", r"trainer\.edit\(\)"),
    "no_rate:2": (64, "the schedule gives nan for step 2", "for every step"),
    "cast:2": (64, r"'0\.weight' no longer lies in the trainer's memory", r"before run\.trainer"),
    "assigned:2": (64, r"has another parameter '0\.weight'", r"before run\.trainer\(\)"),
    "assigned_to_a_replica:1": (64, r"has another parameter '0\.weight'", "before"),
    "named_without_count:1": (64, r"returned Tensor for 'loss', not \(sum, count\)", "labels"),
    "late_buffer:2": (64, "buffer 'rows' was changed by the loss in step 2", "loss= that changes"),
    "many_optimizers:1": (64, "17 optimizers", "1 to 16"),
    "short_data:2": (64, "has 16 samples, fewer than one batch of 32", "batch_size ≤ 16"),
    "no_data_set:1": (64, "str is no data set", r'Tokens\("code\.bin"\)'),
    "wide_tokens:1": (65, r"wide\.bin does not look like uint16 but like uint32", 'dtype="uint32"'),
    "odd_bytes:1": (65, "801 bytes, no whole number of uint16 tokens", "cut short"),
    "no_dtype:1": (65, r"bare\.bin has no bare\.bin\.json", 'dtype="uint16"'),
    "tokens_change:2": (65, "has changed since the run began", "bring back the file"),
    "never_finite:2": (65, "step 0: loss nan, gradient norm nan, computed 2 times", "the batch"),
    "never_counted:2": (65, "step 0: the loss counts 0 on every lane", r"return \(sum, count\)"),
}
RESUMES = {
    "resumed_with_other_data:1": (
        65,
        r"trained with data = code\.bin of 4096 tokens, fingerprint \w{12} \(now other\.bin of 4096 tokens, fingerprint \w{12}\)$",
        r"resume with data = code\.bin of 4096 tokens, fingerprint \w{12}, or start a new run$",
    ),
    "resumed_with_changed_data:1": (
        65,
        r"trained with data = code\.bin of 4096 tokens, fingerprint \w{12} \(now code\.bin of 4096 tokens",
        "start a new run",
    ),
    "resumed_with_other_lanes:1": (
        65,
        r"trained with lanes = 4 \(now 8\)$",
        "resume with lanes = 4, or start a new run$",
    ),
    "resumed_with_other_batches:1": (
        65,
        r"trained with sequence_length = 16 \(now 8\), batch_size = 8 \(now 16\)$",
        "resume with sequence_length = 16, batch_size = 8, or start a new run$",
    ),
    "resumed_without_data:1": (
        65,
        r"trained with kind = tokens \(now fed\)$",
        "resume with kind = tokens, or start a new run$",
    ),
    "resumed_with_other_model:1": (
        65,
        r"saved by another model or optimizer: it was trained with 'table\.weight' of shape \(256, 8\) \(now of shape \(256, 4\)\), and 1 more$",
        "it was made with, or start a new run$",
    ),
    "resumed_with_other_optimizer:1": (
        65,
        r"it was trained with an optimizer that keeps 'exp_avg', 'exp_avg_sq', 'step' of 'table\.weight' \(now 'momentum_buffer'\)$",
        "it was made with",
    ),
    "resumed_with_frozen:1": (
        65,
        r"it was trained with 'table\.weight' trained \(now not\)$",
        "it was made with",
    ),
    "resumed_with_averages:1": (
        65,
        r"it was trained with no averages \(now with ema=\)$",
        "it was made with",
    ),
    "resumed_replicated:1": (
        65,
        r'it was trained with layout="shared" \(now layout="replicated"\)$',
        "it was made with",
    ),
    "resumed_elsewhere:1": (65, "capability: '.*' then, 'AVX1024' now", "--allow-drift"),
    "resumed_from_nothing:1": (64, "there is no checkpoint in", "stopped after its first step"),
    "resumed_from_damage:1": (65, "can be used; .* do not have their checksum", "from elsewhere"),
    "resumed_from_cut:1": (
        65,
        r"can be used; .*safetensors .* the manifest says",
        "from elsewhere",
    ),
    "resumed_from_no_record:1": (65, "can be used; .* checksum it was written with", "elsewhere"),
}


RAISING = ("raises_in_a_lane:3", "raises_on_one_rank:3", "changed_and_saved:2")
UNCOUNTED = ("uncounted_now_and_then:1", "uncounted_now_and_then:3", "always_uncounted:2")
GOOD = ("saved:2", "resumed:1", "resumed_elsewhere_with_consent:1")
SPARSE = ("sparse:1", "sparse:3", "dense:1")


@pytest.fixture(scope="module")
def found(run_cases_together):
    return run_cases_together(
        "bad_input_cases.py", *REFUSED, *GOOD, *RESUMES, *SPARSE, *RAISING, *UNCOUNTED
    )


SAVED_OR_SKIPPED = re.compile(
    r"^(argosy: step \d+ is saved in|step \d+ of \S+ cannot be used).*\n", re.MULTILINE
)


def assert_refused(found, expected):
    wrong = {}
    for case, (code, what, fix) in expected.items():
        lines = SAVED_OR_SKIPPED.sub("", found[case]["errors"]).splitlines()
        is_right = (
            found[case]["code"] == code
            and len(lines) == 2
            and re.search(rf"^argosy: .*{what}", lines[0])
            and re.search(rf"^  fix: .*{fix}", lines[1])
        )
        if not is_right:
            wrong[case] = (found[case]["code"], found[case]["errors"][-2000:])
    assert not wrong


def test_bad_input_is_said_in_two_lines_before_or_instead_of_work(found):
    assert_refused(found, REFUSED)


def test_a_resume_goes_on_only_with_what_was_saved(found):
    assert [found[case]["code"] for case in GOOD] == [0, 0, 0]
    assert len({found[case]["result"]["digest"] for case in GOOD}) == 1
    assert_refused(found, RESUMES)


def test_sparse_gradients_are_densified_to_the_same_bits_at_every_world_size(found):
    sparse, three, dense = (found[case]["result"] for case in SPARSE)
    assert sparse == three
    assert sparse["losses"] == pytest.approx(dense["losses"], rel=1e-5)


def test_a_batch_that_counts_nothing_is_left_out_and_too_many_of_them_end_the_run(found):
    one, three, always = (found[case] for case in UNCOUNTED)
    assert one["result"] == three["result"]
    assert one["result"]["is_left_as_it_was"]
    told = "step 2: the loss counts 0 on every lane, its sum is "
    assert three["errors"].count(told) == three["errors"].count("it is left out") == 1
    assert always["code"] == 65
    assert always["errors"].count("it is left out") == 10
    assert re.search(
        r"argosy: step 10: .*; 10 steps skipped lately\n  fix: .*\n$", always["errors"]
    )


def test_user_code_that_raises_again_ends_the_run_with_its_own_traceback_and_a_save(found):
    lane, rank, changed = (found[case] for case in RAISING)
    assert (lane["code"], rank["code"], changed["code"]) == (1, 1, 64)
    for one, cause in ((lane, "ValueError: label 11"), (rank, "FileNotFoundError: [Errno 2]")):
        assert one["errors"].count("Traceback (most recent call last)") == 1, one["errors"]
        assert cause in one["errors"].splitlines()[-1]
    assert lane["errors"].count("it is started again") == 1
    # The others may get on meanwhile, and that is progress: then all starts that a program's failures may cost are made.
    assert 1 <= rank["errors"].count("it is started again") <= 3
    assert "step 2, lane 5 raised on two ranks" in lane["errors"]
    assert lane["saves"] == ["step-000000002"], "the steps before are not lost"
    assert changed["saves"] == ["step-000000001"]


def test_launches_of_one_process_are_runs_of_their_own(tmp_path):
    program = tmp_path / "twice.py"
    program.write_text(
        textwrap.dedent(
            f"""
            import sys
            sys.path.insert(0, {str(Path(__file__).parent)!r})
            import argosy as ar
            from bad_input_cases import network, train

            def main(run):
                print(train(run, network())["digest"], run.directory.name)

            ar.launch(main)
            ar.launch(main)
            """
        )
    )
    done = subprocess.run(
        [sys.executable, str(program), "-n", "1"],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    first, second = (line.split() for line in done.stdout.splitlines())
    assert first[0] == second[0]
    assert first[1] != second[1]


def test_a_program_that_raises_at_import_says_so_once_and_starts_nothing(tmp_path):
    program = tmp_path / "broken.py"
    program.write_text(
        textwrap.dedent(
            """
            import argosy as ar
            import a_module_that_is_not_there

            def main(run):
                raise AssertionError("never reached")

            if __name__ == "__main__":
                ar.launch(main)
            """
        )
    )
    done = subprocess.run(
        [sys.executable, str(program), "-n", "3"],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1
    assert "No module named 'a_module_that_is_not_there'" in done.stderr.splitlines()[-1]
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix != "") == ["broken.py"]
    assert not (tmp_path / "runs").exists()
