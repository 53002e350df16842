"""The zygote: ranks belong to the keeper, wait at their gate, carry their mark, and differ in their random numbers."""

import contextlib
import json
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "programs"
sys.path.insert(0, str(PROGRAMS))
from fake_keeper import FakeKeeper, receive_frame, script, send_frame  # noqa: E402

pytestmark = pytest.mark.multiprocess

STACKS_SIGNAL = signal.SIGRTMIN + 8
SLEEPER = "import time\nprint('begun', flush=True)\ntime.sleep(600)\n"


@pytest.fixture(scope="module")
def torch_keeper(tmp_path_factory):
    with FakeKeeper(
        tmp_path_factory.mktemp("torch"), preload=["torch", "torch.distributed"]
    ) as keeper:
        yield keeper


@pytest.fixture(scope="module")
def keeper(tmp_path_factory):
    with FakeKeeper(tmp_path_factory.mktemp("bare"), preload=["json"]) as made:
        yield made


def write(tmp_path, source, name="program.py"):
    path = tmp_path / name
    path.write_text(textwrap.dedent(source))
    return path


def wait_until(condition, seconds=30):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        select.select([], [], [], 0.005)


def start(keeper, path, count=1, **attempt):
    reply, processes = keeper.fork([{"program": script(path), **attempt} for _ in range(count)])
    assert reply["type"] == "forked", reply
    return processes


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_ranks_are_children_of_the_keeper_and_wait_at_their_gates(keeper, tmp_path):
    path = write(tmp_path, "import os; print(os.getppid(), os.environ['ADDED'])")
    first, second = start(keeper, path, count=2)
    for process in (first, second):
        status = Path(f"/proc/{process.pid}/status")
        wait_until(lambda file=status: f"PPid:\t{os.getpid()}\n" in file.read_text())
    second.open_gate({"ADDED": "late"})
    assert second.wait() == 0
    assert second.stdout.read_text() == f"{os.getpid()} late\n"
    assert first.stdout.read_text() == ""
    first.close_gate()
    assert first.wait() == 0
    assert first.stdout.read_text() == ""


def test_ranks_outlive_their_zygote(tmp_path):
    with FakeKeeper(tmp_path) as keeper:
        (process,) = start(keeper, write(tmp_path, SLEEPER))
        process.open_gate()
        wait_until(lambda: process.stdout.read_text() == "begun\n")
        keeper.zygote.kill()
        keeper.zygote.wait()
        assert is_alive(process.pid)


def test_ranks_die_with_their_keeper(tmp_path):
    write(tmp_path, SLEEPER)
    source = f"""
        import sys
        sys.path.insert(0, {str(PROGRAMS)!r})
        from fake_keeper import *
        keeper = FakeKeeper({str(tmp_path)!r})
        reply, (at_gate, running) = keeper.fork([{{"program": script("program.py")}}] * 2)
        running.open_gate()
        print(keeper.zygote.pid, *reply["pids"], flush=True)
        sys.stdin.read()
    """
    holder = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(source)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    pids = [int(word) for word in holder.stdout.readline().split()]
    assert len(pids) == 3
    wait_until(lambda: (tmp_path / "1-1.out").read_text() == "begun\n")
    holder.kill()
    holder.communicate()
    wait_until(lambda: not any(is_alive(pid) for pid in pids))


def test_the_mark_and_the_command_line_show_in_proc(keeper, tmp_path):
    path = write(
        tmp_path, "import subprocess; print(subprocess.run(['true']).returncode)\n" + SLEEPER
    )
    before = Path(f"/proc/{keeper.zygote.pid}/environ").read_bytes()
    processes = start(keeper, path, count=2)
    for process in processes:
        process.open_gate()
        wait_until(lambda p=process: "begun" in p.stdout.read_text())
        entries = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
        assert f"ARGOSY_MARK={process.mark}".encode() in entries
        shown = Path(f"/proc/{process.pid}/cmdline").read_bytes().split(b"\0")
        assert shown[0] == sys.executable.encode()
        assert str(path).encode().startswith(shown[1])
    assert Path(f"/proc/{keeper.zygote.pid}/environ").read_bytes() == before


def test_a_mark_that_does_not_fit_is_refused(keeper, tmp_path):
    reply, _ = keeper.fork([{"program": script(write(tmp_path, "")), "mark": "m" * 500}])
    assert reply["type"] == "refused"
    assert "500 bytes" in reply["reason"]


def test_forked_ranks_draw_different_numbers(torch_keeper, tmp_path):
    source = """
        import random, numpy, torch, multiprocessing
        print(random.random(), numpy.random.rand(), torch.rand(1).item(), torch.initial_seed())
        print(bytes(multiprocessing.current_process().authkey).hex())
    """
    processes = start(torch_keeper, write(tmp_path, source), count=2)
    for process in processes:
        process.open_gate()
        assert process.wait() == 0, process.stderr.read_text()
    drawn = [process.stdout.read_text().split() for process in processes]
    assert len(drawn[0]) == len(drawn[1]) == 5
    assert all(one != other for one, other in zip(*drawn, strict=True))


def test_thread_counts_are_set_in_the_rank(torch_keeper, tmp_path):
    path = write(
        tmp_path,
        "import torch, os; print(torch.get_num_threads(), os.environ.get('OPENBLAS_NUM_THREADS'))",
    )
    for threads in (1, 3):
        process = torch_keeper.run(script(path), threads=threads)
        assert process.stdout.read_text() == f"{threads} None\n", process.stderr.read_text()
    cpu = min(os.sched_getaffinity(0))
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    pinned = torch_keeper.run(script(path), affinity=[cpu], env=env)
    if len(os.sched_getaffinity(0)) > 1:
        assert pinned.stdout.read_text() == "1 None\n"


def test_a_preload_that_starts_a_thread_is_named_and_nothing_is_forked(tmp_path):
    write(
        tmp_path,
        "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n",
        "restless.py",
    )
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with FakeKeeper(tmp_path, preload=["json", "restless"], env=env) as keeper:
        assert keeper.ready["threads"] == 2
        reply, _ = keeper.fork([{"program": script(write(tmp_path, SLEEPER))}])
        assert reply["type"] == "refused"
        assert "2 threads" in reply["reason"]
        assert "restless" in reply["reason"]
        assert "json" not in reply["reason"]


def test_a_preload_that_fails_is_named(tmp_path):
    write(tmp_path, "raise RuntimeError('not today')\n", "broken.py")
    with FakeKeeper(
        tmp_path, preload=["broken"], env={**os.environ, "PYTHONPATH": str(tmp_path)}
    ) as keeper:
        assert keeper.ready["type"] == "failed"
        assert keeper.ready["module"] == "broken"
        assert "not today" in keeper.ready["error"]
        assert keeper.zygote.wait(20) == 1


def test_a_file_that_shadows_a_preload_is_refused(keeper, tmp_path):
    path = write(tmp_path, "import json; print(json.mine)")
    write(tmp_path, "mine = 1", "json.py")
    reply, _ = keeper.fork([{"program": script(path)}])
    assert reply["type"] == "refused"
    assert "json.py" in reply["reason"]


def test_malformed_batches_are_refused_and_leave_the_zygote_well(keeper, tmp_path):
    for attempts in ([], [{"attempt": "a"}], [7], [{"attempt": "a", "program": {"kind": "exec"}}]):
        send_frame(keeper.socket, {"type": "fork", "id": 99, "keeper": 1, "attempts": attempts})
        assert keeper.receive_reply(keeper.socket)["type"] == "refused"
    assert keeper.run(script(write(tmp_path, "print('well')"))).stdout.read_text() == "well\n"


def test_garbage_from_the_keeper_ends_the_zygote_alone(tmp_path):
    with FakeKeeper(tmp_path) as keeper:
        (process,) = start(keeper, write(tmp_path, SLEEPER))
        process.open_gate()
        wait_until(lambda: process.stdout.read_text() == "begun\n")
        keeper.socket.sendall(b"\xff\xff\xff\xffgarbage")
        assert keeper.zygote.wait(20) == 1
        assert is_alive(process.pid)


def test_the_error_file_has_the_exception_in_torchelastics_form(keeper, tmp_path):
    process = keeper.run(
        script(write(tmp_path, "def f():\n    raise ValueError('bad value')\nf()\n"))
    )
    assert process.wait() == 1
    record = json.loads(process.error_file.read_text())
    assert record["message"]["message"] == "ValueError: bad value"
    assert record["message"]["extraInfo"]["py_callstack"] == process.stderr.read_text()
    assert abs(int(record["message"]["extraInfo"]["timestamp"]) - time.time()) < 600


@pytest.mark.parametrize("ending", ["", "import sys; sys.exit(3)", "raise KeyboardInterrupt"])
def test_an_end_that_is_no_exception_leaves_no_error_file(keeper, tmp_path, ending):
    assert not keeper.run(script(write(tmp_path, ending))).error_file.exists()


def test_an_error_file_of_the_program_is_kept(keeper, tmp_path):
    error_file = tmp_path / "own.json"
    source = f"open({str(error_file)!r}, 'w').write('own words'); raise ValueError"
    keeper.run(script(write(tmp_path, source)), error_file=str(error_file))
    assert error_file.read_text() == "own words"


def test_secrets_arrive_as_descriptors(keeper, tmp_path):
    secrets = {}
    for name in ("api_key", "OTHER"):
        secrets[name] = os.memfd_create(name)
        os.write(secrets[name], f"value of {name}".encode())
        os.lseek(secrets[name], 0, os.SEEK_SET)
    source = """
        import os
        for name in ("API_KEY", "OTHER"):
            print(os.read(int(os.environ[f"ARGOSY_SECRET_{name}_FD"]), 100).decode())
    """
    process = keeper.run(script(write(tmp_path, source)), secrets=secrets)
    for descriptor in secrets.values():
        os.close(descriptor)
    assert process.stdout.read_text() == "value of api_key\nvalue of OTHER\n", (
        process.stderr.read_text()
    )


def test_a_terminal_is_the_controlling_one_and_line_buffered(keeper, tmp_path):
    master, slave = pty.openpty()
    source = """
        import os, sys
        print(sys.stdin.isatty(), sys.stdout.isatty(), os.ttyname(0) == os.ttyname(2), flush=False)
        os.close(os.open("/dev/tty", os.O_RDWR))
        print("got", input())
    """
    process = start(keeper, write(tmp_path, source), streams=[slave, slave], tty=True)[0]
    os.close(slave)
    process.open_gate()
    shown = b""
    while b"\n" not in shown:
        shown += os.read(master, 1000)
    os.write(master, b"typed\n")
    with contextlib.suppress(OSError):  # a pty reads as an error once its last user is gone
        while chunk := os.read(master, 1000):
            shown += chunk
    os.close(master)
    assert process.wait() == 0
    assert b"True True True\r\n" in shown
    assert b"got typed\r\n" in shown


def test_a_rank_that_gets_the_stacks_signal_writes_its_stacks_and_goes_on(keeper, tmp_path):
    source = """
        import sys, time
        def waiting_here():
            print("begun", flush=True)
            while not sys.stdin.closed: time.sleep(0.01)
        waiting_here()
    """
    (process,) = start(keeper, write(tmp_path, source))
    process.open_gate()
    wait_until(lambda: process.stdout.read_text() == "begun\n")
    os.kill(process.pid, STACKS_SIGNAL)
    wait_until(lambda: "in waiting_here" in process.stderr.read_text())
    assert is_alive(process.pid)


def test_a_full_disk_under_the_log_does_not_end_a_rank(keeper, tmp_path):
    source = """
        import sys
        for number in range(2000):
            print("x" * 50)
            print("y" * 50, file=sys.stderr)
        open(sys.argv[1], "w").write("lived")
    """
    path = write(tmp_path, source)
    # A limit on file size fails a write like a full disk does, but with another errno: a small tmpfs has the real one.
    mounted = tmp_path / "small"
    mounted.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16k", "none", mounted], capture_output=True
    )
    if made.returncode != 0:
        pytest.skip("a tmpfs cannot be mounted here")
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        streams = [os.open(mounted / name, flags) for name in ("out", "err")]
        marker = tmp_path / "marker"
        process = keeper.run(script(path, marker), streams=streams)
        for descriptor in streams:
            os.close(descriptor)
        assert process.wait() == 0
        assert marker.read_text() == "lived"
    finally:
        subprocess.run(["umount", mounted], check=True)


def test_limits_priority_and_oom_score_are_the_attempts(keeper, tmp_path):
    source = """
        import os, resource
        print(resource.getrlimit(resource.RLIMIT_NOFILE), os.nice(0), open("/proc/self/oom_score_adj").read().strip(), oct(os.umask(0)))
    """
    process = keeper.run(
        script(write(tmp_path, source)),
        limits={"nofile": [100, 200], "unknown_one": [1, 1]},
        nice=5,
        oom_score_adj=321,
        umask=0o077,
    )
    assert process.stdout.read_text() == "(100, 200) 5 321 0o77\n", process.stderr.read_text()


@pytest.mark.parametrize(
    ("attempt", "words"),
    [
        ({"affinity": [9999]}, "cannot be set up"),
        ({"cwd": "/no/such/directory"}, "cannot enter the working directory"),
    ],
)
def test_what_cannot_be_set_up_is_said_and_ends_with_126(keeper, tmp_path, attempt, words):
    process = keeper.run(script(write(tmp_path, "print('never')")), **attempt)
    assert process.wait() == 126
    assert words in process.stderr.read_text()
    assert process.stdout.read_text() == ""


def test_a_store_is_hosted_on_the_given_socket(torch_keeper, tmp_path):
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    listening.listen()
    port = listening.getsockname()[1]
    helper = {"program": None, "helper": {"listen": True}, "listener": listening.fileno()}
    source = """
        import os, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        value = torch.ones(1); dist.all_reduce(value); print(value.item())
        dist.destroy_process_group()
    """
    base = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    program = script(write(tmp_path, source))
    ranks = [{"program": program, "env": {**base, "RANK": str(rank)}} for rank in range(2)]
    reply, (store, *members) = torch_keeper.fork([helper, *ranks])
    listening.close()
    assert reply["type"] == "forked"
    for process in (store, *members):
        process.open_gate()
    for member in members:
        assert member.wait() == 0, member.stderr.read_text()
        assert member.stdout.read_text() == "2.0\n"
    assert is_alive(store.pid)
    os.kill(store.pid, signal.SIGTERM)
    assert store.wait() == -signal.SIGTERM


def test_a_store_without_torch_is_refused(keeper):
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        reply, _ = keeper.fork([{"helper": {"listen": True}, "listener": listening.fileno()}])
    assert reply["type"] == "refused"
    assert "torch.distributed" in reply["reason"]


@pytest.mark.slow
@pytest.mark.timeout(500)  # a layer grows on what nobody else wants of the processors
def test_an_idle_zygote_grows_a_second_layer_that_forks_too(tmp_path):
    with FakeKeeper(tmp_path, preload=["torch"]) as keeper:
        message, (descriptor,) = receive_frame(keeper.socket, timeout=240)
        assert (message["type"], message["layer"]) == ("layer", 2)
        with socket.socket(fileno=descriptor) as second:
            ready, _ = receive_frame(second, timeout=240)
            assert (ready["type"], ready["layer"], ready["threads"]) == ("ready", 2, 1)
            assert f"PPid:\t{os.getpid()}\n" in Path(f"/proc/{message['pid']}/status").read_text()
            source = (
                "import sys, os; print('torch._dynamo' in sys.modules, os.sched_getscheduler(0))"
            )
            program = {"program": script(write(tmp_path, source))}
            _, (process,) = keeper.fork([program], sock=second)
            process.open_gate()
            assert process.wait() == 0
            assert process.stdout.read_text() == "True 0\n"
            keeper.zygote.kill()
            keeper.zygote.wait()
            _, (survivor,) = keeper.fork([program], sock=second)
            survivor.open_gate()
            assert survivor.wait() == 0
        wait_until(lambda: not is_alive(message["pid"]))


def test_who_may_not_lower_its_nice_level_grows_layers_and_forks_all_the_same(tmp_path):
    with FakeKeeper(tmp_path, preload=["json"], is_privileged=False) as keeper:
        send_frame(keeper.socket, {"type": "preload", "modules": ["decimal"], "layer": 2})
        ready, _ = receive_frame(keeper.socket)
        assert (ready["type"], ready["layer"]) == ("ready", 2)
        path = write(tmp_path, "import os; print(os.nice(0))")
        (plain,) = start(keeper, path)
        (asked,) = start(keeper, path, nice=-3)
        for process in (plain, asked):
            process.open_gate()
            assert process.wait() == 0
            assert process.stdout.read_text() == "5\n"
        assert plain.stderr.read_text() == ""
        assert asked.stderr.read_text() == "argosy: nice level -3 is not allowed here, it stays 5\n"


def test_a_large_batch_is_forked_at_once(keeper, tmp_path):
    processes = start(keeper, write(tmp_path, "print('one of many')"), count=40)
    assert len({process.pid for process in processes}) == 40
    for process in processes:
        process.open_gate()
    assert [process.wait() for process in processes] == [0] * 40
