"""`argosy tree`: whose child a process is."""

import os

from argosy.cli import tree


def test_a_child_that_is_dead_and_not_yet_waited_for_is_not_shown():
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert pid not in tree.read_children().get(os.getpid(), [])
    os.waitpid(pid, 0)


def test_what_has_left_its_parent_is_shown_below_the_process_whose_cgroup_it_is_in(monkeypatch):
    groups = {1: "keeper", 10: "a", 11: "b", 12: "a", 13: "keeper", 14: "c", 15: "a"}
    monkeypatch.setattr(tree, "group_of", lambda pid: groups.get(pid, ""))
    children = {1: [10, 11, 12, 13, 14], 10: [15]}
    tree.give_back(1, [10, 11], children)
    assert children == {1: [10, 11, 13, 14], 10: [15, 12]}


def test_without_a_cgroup_for_each_process_nobody_is_moved(monkeypatch):
    monkeypatch.setattr(tree, "group_of", lambda pid: "all")
    children = {1: [10, 11, 12]}
    tree.give_back(1, [10, 11], children)
    assert children == {1: [10, 11, 12]}
