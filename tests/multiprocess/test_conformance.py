"""A forked rank behaves as `python script.py`: one program run both ways, everything it can see compared."""

import json
import os
import resource
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "programs"
sys.path.insert(0, str(PROGRAMS))
from fake_keeper import FakeKeeper, script  # noqa: E402

pytestmark = pytest.mark.multiprocess

STACKS_SIGNAL = signal.SIGRTMIN + 8
ENVIRONMENT = {
    "PATH": os.environ["PATH"],
    "HOME": os.environ.get("HOME", "/"),
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": "relative/library:/somewhere/else",
    "TZ": "Asia/Tokyo",
    "ODD": "a=b \udcff\n",
}


@pytest.fixture(scope="module")
def keeper(tmp_path_factory):
    directory = tmp_path_factory.mktemp("keeper")
    with FakeKeeper(directory, preload=["torch", "torch.distributed"], env=ENVIRONMENT) as made:
        assert made.ready["type"] == "ready", made.ready
        yield made


class Both:
    """Runs a program plainly and as a forked rank, in the same surroundings."""

    def __init__(self, keeper, directory):
        self.keeper = keeper
        self.directory = directory

    def plain(self, command, *, env=ENVIRONMENT, limits=(), umask=0o027):
        stdout, stderr = self.directory / "plain.out", self.directory / "plain.err"

        def prepare():
            for name, soft, hard in limits:
                resource.setrlimit(getattr(resource, f"RLIMIT_{name.upper()}"), (soft, hard))

        with open(stdout, "ab") as out, open(stderr, "ab") as err:
            code = subprocess.run(
                [sys.executable, *command],
                env=env,
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                umask=umask,
                start_new_session=True,
                preexec_fn=prepare,
                timeout=60,
            ).returncode
        return code, stdout.read_text(), stderr.read_text()

    def forked(self, program, *, env=ENVIRONMENT, limits=(), umask=0o027):
        process = self.keeper.run(
            program,
            env=env,
            cwd=str(self.directory),
            umask=umask,
            limits={name: [soft, hard] for name, soft, hard in limits},
        )
        return process.wait(), process.stdout.read_text(), process.stderr.read_text()

    def compare(self, source, *args, name="program.py"):
        """Both ways of running this source: (code, stdout, stderr), asserted to be equal."""
        (self.directory / name).write_text(textwrap.dedent(source))
        plain = self.plain([name, *args])
        assert self.forked(script(name, *args)) == plain
        return plain


@pytest.fixture
def both(keeper, tmp_path):
    return Both(keeper, tmp_path)


def load(path):
    view = json.loads(path.read_text())
    armed = 1 << (STACKS_SIGNAL - 1)
    caught = int(view["signals"].pop("SigCgt"), 16)
    view["signals"]["caught"] = caught & ~armed
    # The first thing that differs between two runs of anything.
    view["argv"] = [argument.replace(path.name, "OUT") for argument in view["argv"]]
    view["orig_argv"] = [argument.replace(path.name, "OUT") for argument in view["orig_argv"]]
    for method in ("fork", "spawn"):
        view["children"][method][2] = []
    for target in view["descriptors"].values():
        target[0] = "a file" if target[0].endswith((".out", ".err", ".json")) else target[0]
    return view, bool(caught & armed)


def test_a_forked_script_sees_what_a_plain_one_sees(both, tmp_path):
    probe = (PROGRAMS / "probe.py").read_text()
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "probe.py").write_text(probe)
    limits = [("nofile", 321, 4000), ("core", 0, 0)]
    path = "./sub/../sub/probe.py"
    plain_run = both.plain([path, "plain.json", "--flag", "two words"], limits=limits)
    forked_run = both.forked(script(path, "forked.json", "--flag", "two words"), limits=limits)
    assert plain_run[0] == 0, plain_run
    assert forked_run == plain_run
    plain, _ = load(tmp_path / "plain.json")
    forked, is_armed = load(tmp_path / "forked.json")
    assert is_armed
    assert forked.pop("zygote_modules") == plain.pop("zygote_modules") == []
    assert forked == plain


def test_a_forked_module_sees_what_a_plain_one_sees(both, tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "probe.py").write_text((PROGRAMS / "probe.py").read_text())
    plain_run = both.plain(["-m", "package.probe", "plain.json"])
    module = {"kind": "module", "name": "package.probe", "args": ["forked.json"]}
    assert plain_run[0] == 0, plain_run
    assert both.forked(module) == plain_run
    plain, _ = load(tmp_path / "plain.json")
    forked, _ = load(tmp_path / "forked.json")
    assert forked == plain


@pytest.mark.parametrize(
    "ending",
    [
        "sys.exit()",
        "sys.exit(0)",
        "sys.exit(3)",
        "sys.exit(-1)",
        "sys.exit(300)",
        "sys.exit(10**30)",
        "sys.exit('a message')",
        "sys.exit(('a', 'tuple'))",
        "raise SystemExit",
        "1 / 0",
        "raise ValueError('two\\nlines')",
        "raise KeyboardInterrupt",
        "os.kill(os.getpid(), signal.SIGTERM)",
        "os.kill(os.getpid(), signal.SIGINT)",
        "os.abort()",
        "os._exit(9)",
        "exec('1 +')",
        "sys.excepthook = lambda *a: sys.exit(44); 1 / 0",
        "sys.excepthook = lambda *a: print('hooked', a[0].__name__, a[2].tb_lineno); 1 / 0",
        "sys.stdout.close()",
        "sys.stderr = None; sys.exit('nowhere to go')",
    ],
)
def test_every_way_to_end_gives_the_same_code_and_output(both, ending):
    both.compare(
        f"import atexit, os, signal, sys\natexit.register(print, 'at exit')\nprint('begun', flush=True)\n{ending}\n"
    )


def test_tracebacks_show_the_program_alone(both):
    source = """
        def inner():
            try:
                {}["missing"]
            except KeyError:
                raise RuntimeError("outer")
        def outer():
            inner()
        outer()
    """
    _, _, stderr = both.compare(source)
    assert "argosy" not in stderr
    assert "outer()" in stderr


def test_a_module_that_fails_has_the_interpreters_traceback(both, tmp_path):
    (tmp_path / "failing.py").write_text("raise ValueError('in a module')\n")
    for name in ("failing", "missing_module", "json"):
        assert both.forked({"kind": "module", "name": name, "args": []}) == both.plain(["-m", name])
        for file in tmp_path.glob("plain.*"):
            file.unlink()


@pytest.mark.parametrize("source", ["def broken(:\n", "x = 1\n  y = 2\n"])
def test_a_script_that_does_not_compile_is_reported_alike(both, source):
    assert both.compare(source)[0] == 1


@pytest.mark.parametrize("source", ["# coding: nonsense\n", "x = '\0'\n"])
def test_a_script_that_cannot_be_decoded_is_a_syntax_error(both, tmp_path, source):
    (tmp_path / "program.py").write_text(source)
    code, _, stderr = both.forked(script("program.py"))
    assert code == both.plain(["program.py"])[0] == 1
    assert stderr.splitlines()[-1].startswith("SyntaxError: ")


def test_source_encodings_are_honoured(both, tmp_path):
    (tmp_path / "latin.py").write_bytes("# coding: latin-1\nprint('caf\xe9')\n".encode("latin-1"))
    assert both.forked(script("latin.py")) == both.plain(["latin.py"])


def test_a_missing_script_is_reported_alike(both):
    assert both.forked(script("absent.py")) == both.plain(["absent.py"])
    assert both.forked(script("absent.py"))[0] == 2


def test_a_directory_with_a_main_runs(both, tmp_path):
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "__main__.py").write_text(
        "import sys, beside; print(sys.argv, sys.path[0], __name__)"
    )
    (tmp_path / "app" / "beside.py").write_text("")
    assert both.forked(script("app", "x")) == both.plain(["app", "x"])


def test_exit_runs_threads_then_atexit_then_destructors_and_flushes_files(both, tmp_path):
    source = """
        import atexit, gzip, sys, threading, time
        class Last:
            def __del__(self):
                print("destroyed")
        last = Last()
        cycle = Last(); cycle.itself = cycle
        kept = open("kept-" + sys.argv[1] + ".txt", "w"); kept.write("unflushed text")
        raw = open("kept-" + sys.argv[1] + ".bin", "wb"); raw.write(b"unflushed bytes")
        packed = gzip.open("kept-" + sys.argv[1] + ".gz", "wb"); packed.write(b"trailer needed")
        gate = threading.Event()
        def work():
            gate.wait(); print("thread done")
        threading.Thread(target=work).start()
        atexit.register(print, "first registered")
        atexit.register(lambda: 1 / 0)
        atexit.register(print, "last registered")
        gate.set()
        sys.stdout.write("no newline at the end|")
    """
    (tmp_path / "program.py").write_text(textwrap.dedent(source))
    plain, forked = both.plain(["program.py", "a"]), both.forked(script("program.py", "b"))

    def steady(text):
        return [line for line in text.splitlines() if " at 0x" not in line]

    assert (forked[0], forked[1]) == (plain[0], plain[1])
    assert steady(forked[2]) == steady(plain[2])
    for kind in ("txt", "bin"):
        assert (tmp_path / f"kept-b.{kind}").read_bytes() == (
            tmp_path / f"kept-a.{kind}"
        ).read_bytes()
    subprocess.run(["gzip", "-t", tmp_path / "kept-b.gz"], check=True)


def test_daemon_threads_do_not_hold_up_the_end(both):
    source = """
        import threading, time
        threading.Thread(target=lambda: time.sleep(3600), daemon=True).start()
        print("done")
    """
    both.compare(source)


def test_data_loader_workers_run_by_fork_and_by_spawn(both):
    source = """
        import torch
        from torch.utils.data import DataLoader, Dataset
        class Squares(Dataset):
            def __len__(self): return 8
            def __getitem__(self, i): return torch.tensor([i * i])
        if __name__ == "__main__":
            for method in ("fork", "spawn"):
                loader = DataLoader(Squares(), batch_size=2, num_workers=1, multiprocessing_context=method)
                print(method, [batch.flatten().tolist() for batch in loader])
    """
    code, stdout, _ = both.compare(source)
    assert code == 0
    assert stdout.count("[36, 49]") == 2


def test_a_program_that_forks_by_itself_ends_twice(both):
    source = """
        import atexit, os, sys
        atexit.register(lambda: print("exit of", "child" if child else "parent"))
        child = os.fork() == 0
        if not child:
            os.wait()
        sys.exit(5)
    """
    both.compare(source)


def test_breaking_pipes_and_full_devices_end_alike(both):
    both.compare("import os, sys; sys.stdout = open('/dev/full', 'w'); print('lost')")


@pytest.mark.parametrize(
    "variables",
    [
        {},  # no locale at all: the interpreter coerces one and puts it into its environment
        {"LC_ALL": "C.UTF-8", "PYTHONUNBUFFERED": "1"},
        {"LC_ALL": "POSIX", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
        {"PYTHONIOENCODING": "latin-1:replace", "PYTHONDONTWRITEBYTECODE": "1"},
        {"PYTHONSAFEPATH": "1", "PYTHONWARNINGS": "error::UserWarning"},
        {"PYTHONFAULTHANDLER": "1", "PYTHONOPTIMIZE": "1"},
    ],
    ids=lambda variables: ",".join(variables) or "bare",
)
def test_variables_of_the_interpreter_are_honoured(tmp_path, variables):
    env = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1", **variables}
    (tmp_path / "probe.py").write_text((PROGRAMS / "probe.py").read_text())
    with FakeKeeper(tmp_path, env=env) as keeper:
        both = Both(keeper, tmp_path)
        plain_run = both.plain(["probe.py", "plain.json"], env=env)
        assert plain_run[0] == 0, plain_run
        assert both.forked(script("probe.py", "forked.json"), env=env) == plain_run
    plain, _ = load(tmp_path / "plain.json")
    forked, _ = load(tmp_path / "forked.json")
    assert forked == plain
