"""Like stacks are shown once; the odd one comes first."""

from argosy.analyze.stackgroups import group_stacks

SITE = "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"


def stack(rank, *frames, error="", name="MainThread"):
    threads = [
        {
            "name": name,
            "active": True,
            "owns_gil": False,
            "frames": [{"function": f, "file": file, "line": line} for f, file, line in frames],
        }
    ]
    return {
        "role": "train",
        "index": rank,
        "rank": rank,
        "pid": rank,
        "threads": threads if frames else [],
        "error": error,
    }


WAITING = (("all_reduce", SITE, 10), ("step", "/work/train.py", 30))
LOADING = (("read", "/work/data.py", 5), ("step", "/work/train.py", 28))


def test_the_odd_rank_comes_first():
    groups = group_stacks([stack(r, *(LOADING if r == 2 else WAITING)) for r in range(4)])
    assert [group.label for group in groups] == ["[2]", "[0-1,3]"]


def test_a_group_says_where_it_stands_in_the_users_own_code():
    (group,) = group_stacks([stack(0, *WAITING)])
    assert group.place == (
        "in all_reduce (torch/distributed/distributed_c10d.py:10), called from step (/work/train.py:30)"
    )


def test_processes_without_a_stack_are_grouped_by_the_reason():
    groups = group_stacks(
        [
            stack(0, error="permission denied"),
            stack(1, error="permission denied"),
            stack(2, *WAITING),
        ]
    )
    assert [group.label for group in groups] == ["[2]", "[0-1]"]
    assert groups[1].place == "no stack: permission denied"


def test_other_threads_do_not_tell_ranks_apart():
    one, two = stack(0, *WAITING), stack(1, *WAITING)
    two["threads"].insert(0, {"name": "pin_memory", "frames": []})
    assert len(group_stacks([one, two])) == 1


def test_processes_outside_a_gang_are_named_by_role_and_index():
    lone = stack(0, *LOADING) | {"rank": None, "role": "web"}
    assert group_stacks([lone])[0].label == "[web/0]"


def test_the_frames_that_started_a_forked_program_are_left_out():
    zygote = ("run", "/x/argosy/control/zygote/program.py", 43)
    (group,) = group_stacks([stack(0, *WAITING, zygote, ("_run_code", "<frozen runpy>", 88))])
    assert [frame["function"] for frame in group.frames] == ["all_reduce", "step"]


def test_a_process_that_a_signal_has_stopped_is_odd_wherever_it_stands():
    stacks = [stack(rank, *WAITING) | {"state": "S (sleeping)"} for rank in range(3)]
    stacks.append(stack(3, *WAITING) | {"state": "T (stopped)"})
    stacks.append(stack(4, *LOADING) | {"state": "S (sleeping)"})
    groups = group_stacks(stacks)
    assert [group.label for group in groups] == ["[3]", "[4]", "[0-2]"]
    assert "stopped by a signal" in groups[0].halt
    assert not groups[1].halt
