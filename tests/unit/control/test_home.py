import errno
import os
import stat
import subprocess
import sys

import pytest

from argosy.control import home
from argosy.errors import HomeError


def environment(tmp_path, **more):
    return {"ARGOSY_HOME": str(tmp_path / "home"), **more}


def test_a_new_home_is_private_and_carries_its_format(tmp_path):
    cluster = home.open_cluster(environment(tmp_path))
    assert stat.S_IMODE(os.stat(tmp_path / "home").st_mode) == 0o700
    assert (tmp_path / "home" / "VERSION").read_text() == f"{home.FORMAT}\n"
    assert stat.S_IMODE(os.stat(cluster.directory).st_mode) == 0o700
    assert stat.S_IMODE(os.stat(cluster.runtime).st_mode) == 0o700
    assert cluster.home == str(tmp_path / "home")
    os.rmdir(cluster.runtime)


def test_opening_twice_gives_the_same_cluster(tmp_path):
    first = home.open_cluster(environment(tmp_path))
    second = home.open_cluster(environment(tmp_path))
    assert (first.directory, first.runtime) == (second.directory, second.runtime)
    os.rmdir(first.runtime)


def test_an_open_mode_is_closed_again(tmp_path):
    (tmp_path / "home").mkdir(mode=0o755)
    home.find_home(environment(tmp_path))
    assert stat.S_IMODE(os.stat(tmp_path / "home").st_mode) == 0o700


def test_a_home_of_another_format_is_refused_and_left_alone(tmp_path):
    directory = tmp_path / "home"
    directory.mkdir()
    (directory / "VERSION").write_text("99\n")
    with pytest.raises(HomeError, match="'99'") as caught:
        home.open_cluster(environment(tmp_path))
    assert "ARGOSY_HOME" in caught.value.fix
    assert sorted(os.listdir(directory)) == ["VERSION"]


def test_a_home_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "home").write_text("mine")
    with pytest.raises(HomeError, match="not a directory"):
        home.find_home(environment(tmp_path))
    assert (tmp_path / "home").read_text() == "mine"


def test_a_home_below_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(HomeError, match="cannot be used"):
        home.find_home({"ARGOSY_HOME": str(tmp_path / "file" / "home")})


def test_an_unwritable_home_is_refused(tmp_path):
    with pytest.raises(HomeError, match="cannot be used") as caught:
        home.find_home({"ARGOSY_HOME": "/proc/argosy"})
    assert "writable" in caught.value.fix


def test_a_full_disk_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(home, "LEAST_FREE_BYTES", 1 << 62)
    with pytest.raises(HomeError, match="full"):
        home.find_home(environment(tmp_path))


def test_a_home_in_use_stays_within_reach_when_its_disk_is_full(tmp_path, monkeypatch):
    first = home.open_cluster(environment(tmp_path))
    monkeypatch.setattr(home, "LEAST_FREE_BYTES", 1 << 62)
    assert home.open_cluster(environment(tmp_path)).directory == first.directory
    with pytest.raises(HomeError, match="full"):
        home.check_space(first.home)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to give a directory away")
def test_a_directory_of_another_user_is_refused(tmp_path):
    (tmp_path / "home").mkdir()
    os.chown(tmp_path / "home", 12345, 12345)
    with pytest.raises(HomeError, match="belongs to user 12345"):
        home.find_home(environment(tmp_path))


def test_without_a_named_home_the_state_directory_is_taken(tmp_path):
    assert home.find_home({"XDG_STATE_HOME": str(tmp_path)}) == str(tmp_path / "argosy")


def test_the_runtime_directory_falls_back_to_tmp_when_the_path_is_too_long(tmp_path):
    deep = tmp_path / ("d" * 60) / ("e" * 60)
    deep.mkdir(parents=True)
    long = home.locate_cluster(str(tmp_path), {"XDG_RUNTIME_DIR": str(deep)})
    assert long.runtime.startswith("/tmp/argosy-")
    missing = home.locate_cluster(str(tmp_path), {"XDG_RUNTIME_DIR": str(tmp_path / "none")})
    assert missing.runtime == long.runtime
    assert len(os.fsencode(long.control_socket)) <= home.MOST_SOCKET_PATH_BYTES


def test_a_short_runtime_directory_of_the_user_is_used(tmp_path):
    short = home.locate_cluster("/x", {"XDG_RUNTIME_DIR": "/tmp"})
    assert short.runtime == f"/tmp/argosy-{short.key}"


def test_homes_have_clusters_of_their_own(tmp_path):
    assert home.cluster_key(str(tmp_path / "a")) != home.cluster_key(str(tmp_path / "b"))


def test_looking_finds_what_opening_would_and_makes_nothing(tmp_path):
    given = environment(tmp_path, XDG_RUNTIME_DIR=str(tmp_path))
    looked = home.look_at_cluster(given)
    assert os.listdir(tmp_path) == []
    opened = home.open_cluster(given)
    assert (looked.directory, looked.runtime) == (opened.directory, opened.runtime)
    os.chmod(opened.runtime, 0o755)
    assert home.look_at_cluster(given).runtime == opened.runtime
    assert stat.S_IMODE(os.stat(opened.runtime).st_mode) == 0o755
    unnamed = {"XDG_STATE_HOME": str(tmp_path / "deep" / "state")}
    assert home.look_at_cluster(unnamed).home == home.find_home(unnamed)


def test_looking_refuses_what_opening_would(tmp_path):
    (tmp_path / "file").write_text("mine")
    for path, match in (("file", "not a directory"), ("file/home", "cannot be used")):
        with pytest.raises(HomeError, match=match):
            home.look_at_cluster({"ARGOSY_HOME": str(tmp_path / path)})
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "VERSION").write_text("99\n")
    with pytest.raises(HomeError, match="'99'"):
        home.look_at_cluster(environment(tmp_path))


def test_looking_passes_over_what_opening_could_not_make(tmp_path, monkeypatch):
    """A quota or a lack of inodes shows only when something is made."""
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    monkeypatch.setattr(home, "_candidates", lambda environ: [first, second])
    made = os.mkdir

    def mkdir(path, *mode):
        if path == first or "/." in path:
            raise OSError(errno.EDQUOT, "Disk quota exceeded", path)
        made(path, *mode)

    assert home.look_at_cluster({}).home == first
    monkeypatch.setattr(os, "mkdir", mkdir)
    assert home.find_home({}) == second
    assert home.look_at_cluster({}).home == second
    monkeypatch.undo()
    monkeypatch.setattr(home, "_candidates", lambda environ: [first, second])
    assert home.look_at_cluster({}).home == first == home.find_home({})
    assert sorted(os.listdir(tmp_path)) == ["first", "second"]


def test_a_home_that_is_a_link_to_nothing_is_refused(tmp_path):
    (tmp_path / "home").symlink_to(tmp_path / "not mounted")
    for choose in (home.look_at_cluster, home.find_home):
        with pytest.raises(HomeError, match="cannot be used: No such file"):
            choose(environment(tmp_path))


def test_importing_it_stays_cheap():
    code = "import argosy.control.home, sys; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    heavy = {"asyncio", "msgspec", "dataclasses", "inspect", "subprocess", "json", "torch"}
    assert not heavy & set(loaded.split())
