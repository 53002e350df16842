"""Verbs: the table of everything the command line understands.

One table, with its second part in fileverbs.py, serves the parser (arguments.py), the help (help.py) and docs/reference/cli.md. It
holds text only, because every command pays for it.
"""

from __future__ import annotations

from argosy.cli.fileverbs import FILE_VERBS
from argosy.cli.grammar import JSON, Option, Verb

_ROLE = Option("--role ROLE", "only this role")

RUN_OPTIONS = (
    Option(
        "-n RANKS",
        "start this many ranks as one gang, the role `train`, with torchrun's environment; without it the role is `main`",
        kind="count",
    ),
    Option("-m MODULE", "run a Python module instead of a script, as `python -m` does"),
    Option("--threads T", "threads of each process (OMP_NUM_THREADS and torch)", kind="count"),
    Option("--spares K", "warm processes parked beside the gang", kind="number"),
    Option("--min M", "fewest ranks the gang goes on with", kind="count"),
    Option("--name NAME", "name of the run; default: the program's name"),
    Option(
        "--restart N",
        "restarts after failures of the program; default: 3 for gangs (1 after the same error twice), else 0; a service: always",
        kind="number",
    ),
    Option("--detach", "print the run's id and return"),
    Option("--tied", "stop the run when this command vanishes"),
    Option("--tty", "give the process a terminal (one process only); Ctrl-] detaches"),
    Option(
        "--service", "lives until it is stopped: started again whenever it ends; implies --detach"
    ),
    Option(
        "--set KEY=VALUE",
        "change one field of the script's config, or of the spec: roles.train.count=4",
        many=True,
    ),
    Option("--env K=V", "add a variable to the environment", many=True),
    Option(
        "--secret NAME=@FILE",
        "give a secret by descriptor; NAME alone takes it from the shell's environment",
        many=True,
    ),
    Option(
        "--preload MODULES",
        "what the warm parent imports, by commas; default: torch, torch.distributed and Argosy's trainer",
    ),
    Option("--no-warm", "start Python by exec, not by a warm fork"),
    Option("--queued", "wait in the queue for CPU and memory"),
    Option("--cpus C", "CPUs accounted to each process by the queue", kind="amount"),
    Option(
        "--memory BYTES", "memory accounted to each process by the queue, e.g. 4G", kind="bytes"
    ),
    Option("--priority P", "higher is admitted first", kind="integer"),
    Option("--on WHERE", "where to run; `local` in this release"),
    JSON,
)

_QUEUE_ADD_OPTIONS = (
    *(
        option
        for option in RUN_OPTIONS
        if option.name not in ("detach", "tied", "tty", "service", "queued")
    ),
    Option("--array N", "submit N like runs; each gets ARGOSY_ARRAY_INDEX", kind="count"),
    Option("--share NAME", "name for the queue's fair share; default: the run's name"),
)

_TARGET = "RUN is an id, the beginning of one, or a name (the newest run of that name); without it the newest run is meant."
_LIVING = "RUN is an id, the beginning of one, or a name; of several runs of that name, or without RUN, the newest that is alive is meant."

VERBS = (
    Verb(
        "run",
        "run [options] SCRIPT|SPEC.toml [options] [-- ARGUMENTS]",
        "start a script, a module, a command or a spec, and follow it",
        entry="argosy.cli.run:run",
        options=RUN_OPTIONS,
        details=(
            "Also: `argosy run [options] -m MODULE [-- ARGUMENTS]` and `argosy run [options] -- COMMAND...`.\n"
            "Paths are relative to the directory you are in, those in a SPEC.toml too.\n"
            "The cluster is started on demand. Output goes to the terminal as it comes; stdin is empty, except with --tty; what is piped in is not passed on.\n"
            "Which run it is and how it ended is said on stderr; of a single process to a terminal alone, so that a file has its bytes.\n"
            "Ctrl-C stops the run gracefully, a second one kills it. When this command is killed the run goes on, unless\n"
            "--tied was given. Environment, directory and limits are your shell's; a script runs under the Python that has argosy,\n"
            "another one is named by `-- PYTHON SCRIPT` or --set roles.ROLE.python=PYTHON.\n"
            "The exit code is the first cause's: 0 only when the run succeeded, 128+n for signal n."
        ),
        examples=(
            "argosy run train.py -n 4 --set steps=100",
            "argosy run old_train.py -n 4 -- --lr 0.1",
            "argosy run -n 2 -- python old_train.py",
            "argosy run job.toml --set roles.train.count=8",
        ),
    ),
    Verb(
        "up",
        "up",
        "start the local cluster and say where it is",
        entry="argosy.cli.cluster:up",
        options=(JSON,),
        examples=("argosy up",),
    ),
    Verb(
        "down",
        "down",
        "stop the local cluster; leaves nothing behind",
        entry="argosy.cli.cluster:down",
        options=(
            Option(
                "--force",
                "also when runs are alive: they are stopped, and killed if that takes over 30 s",
            ),
            JSON,
        ),
        examples=("argosy down --force",),
    ),
    Verb(
        "status",
        "status",
        "what the local cluster is doing",
        entry="argosy.cli.cluster:status",
        options=(JSON,),
        details="Exits 0 when a cluster is running, 3 when there is none.",
        examples=("argosy status --json",),
    ),
    Verb(
        "ps",
        "ps [RUN[/ROLE[/INDEX]]]",
        "processes of the runs that are alive, and why some wait",
        entry="argosy.cli.ps:ps",
        options=(Option("--all", "also runs that have ended"), JSON),
        details="RUN is an id, the beginning of one, or a name.",
        examples=("argosy ps --all",),
    ),
    Verb(
        "tree",
        "tree [RUN]",
        "cluster, runs, roles and processes as a tree",
        entry="argosy.cli.tree:tree",
        options=(Option("--all", "also runs that have ended"), JSON),
        examples=("argosy tree",),
    ),
    Verb(
        "logs",
        "logs [RUN[/ROLE[/INDEX]]]",
        "output of a run's processes, merged in order of time",
        entry="argosy.cli.logs:logs",
        options=(
            Option("-f", "follow until the run ends"),
            Option("--tail N", "only the last N lines", kind="number"),
            _ROLE,
            Option("--no-fold", "show equal lines of several ranks one by one"),
            Option("--timestamps", "begin each line with its time of arrival"),
            JSON,
        ),
        details=_TARGET,
        examples=("argosy logs -f train", "argosy logs 3f/train/2 --tail 20"),
    ),
    Verb(
        "events",
        "events [RUN]",
        "what happened, as sentences",
        entry="argosy.cli.events:events",
        options=(
            Option("-f", "follow until the run ends"),
            Option("--all", "of all runs and of the cluster"),
            Option("--tail N", "only the last N events", kind="number"),
            JSON,
        ),
        details=_TARGET,
        examples=("argosy events -f", "argosy events --all --json"),
    ),
    Verb(
        "stop",
        "stop [RUN[/ROLE[/INDEX]]]",
        "end a run gracefully: stop signal, grace, then its whole tree",
        entry="argosy.cli.stop:stop",
        options=(
            Option("--all", "every run that is alive"),
            Option("--no-wait", "return at once"),
            Option("--reason TEXT", "kept in the events"),
            JSON,
        ),
        details=_LIVING,
        examples=("argosy stop train", "argosy stop --all"),
    ),
    Verb(
        "kill",
        "kill [RUN[/ROLE[/INDEX]]]",
        "end a run at once, or send a signal to its processes",
        entry="argosy.cli.stop:kill",
        options=(
            Option(
                "--signal NAME",
                "send only this signal, e.g. SIGUSR1 or 10; the run is not ended by it",
            ),
            Option("--no-wait", "return at once"),
            Option("--reason TEXT", "kept in the events"),
            JSON,
        ),
        details=_LIVING,
        examples=("argosy kill train", "argosy kill train/train/2 --signal SIGKILL"),
    ),
    Verb(
        "scale",
        "scale RUN[/ROLE] N",
        "give a running gang N ranks; those it has go on",
        entry="argosy.cli.scale:scale",
        options=(
            Option(
                "--restart", "also when its program cannot re-form in place: all ranks start again"
            ),
            Option("--no-wait", "return at once"),
            JSON,
        ),
        details=(
            "New ranks are forked warm and enter a new generation; of too many ranks the highest are killed.\n"
            "Of several runs of that name the newest that is alive is meant.\n"
            "For programs with a trainer or `argosy.join()`; the room of ranks that left is kept for the run."
        ),
        examples=("argosy scale train 8",),
    ),
    Verb(
        "fault",
        "fault RUN[/ROLE]",
        "break something on purpose, at once or at a step",
        entry="argosy.cli.fault:fault",
        options=(
            Option("--kill WHO", "SIGKILL: rank=N, or keeper, agent, controller, zygote"),
            Option("--stop WHO", "SIGSTOP: rank=N hangs"),
            Option("--slow WHO", "rank=N is slower by --seconds"),
            Option("--nan WHO", "rank=N computes a gradient that is not finite"),
            Option("--raise WHO", "rank=N raises an exception"),
            Option("--at-step N", "when the rank is at this step; default: at once", kind="number"),
            Option("--point P", "lane, publish, vote, update, flip or refresh of that step"),
            Option("--seconds S", "how much slower", kind="amount"),
            Option("--random", "draw faults: the same for the same seed, size and steps"),
            Option("--seed N", "of --random; default: 0", kind="number"),
            Option("--count N", "of --random; default: 1", kind="count"),
            Option("--between A B", "steps of --random; default: the next 100", kind="pair"),
            Option("--kinds KINDS", "of --random, by commas; default: kill,stop,slow"),
            JSON,
        ),
        details=(
            "Without --at-step a rank of any program is killed or stopped at once. The rest is told to the rank, which breaks itself:\n"
            "its program must have a trainer. What a killed rank did not come to is told to its successor. Each fault is an event.\n"
            "Of several runs of that name the newest that is alive is meant."
        ),
        examples=(
            "argosy fault train --kill rank=2 --at-step 40 --point update",
            "argosy fault train --random --seed 7 --count 5 --between 10 60",
        ),
    ),
    Verb(
        "exec",
        "exec [RUN[/ROLE[/INDEX]]] -- COMMAND...",
        "run a command beside a process: same environment and directory",
        entry="argosy.cli.execute:execute",
        options=(
            Option("--tty", "with a terminal"),
            Option("--env K=V", "add a variable", many=True),
        ),
        details=_LIVING + " Without ROLE/INDEX: its first process.",
        examples=("argosy exec train/train/0 -- env",),
    ),
    Verb(
        "attach",
        "attach [RUN[/ROLE[/INDEX]]]",
        "connect the terminal to a process that has one; Ctrl-] detaches",
        entry="argosy.cli.attach:attach",
        details=_LIVING
        + "\nA process has a terminal when it was started with --tty; of others attach follows the output.",
        examples=("argosy attach train",),
    ),
    Verb(
        "stacks",
        "stacks [RUN[/ROLE[/INDEX]]]",
        "Python stacks of all ranks, grouped, odd ones first",
        entry="argosy.cli.stacks:stacks",
        options=(Option("--all", "all threads of all processes"), JSON),
        details=_LIVING,
        examples=("argosy stacks train",),
    ),
    Verb(
        "why",
        "why [RUN]",
        "the first cause of a failure, its evidence and what was done about it",
        entry="argosy.cli.why:why",
        options=(JSON,),
        details=_TARGET,
        examples=("argosy why",),
    ),
    Verb(
        "queue",
        "queue",
        "runs that wait for CPU and memory, and why; `queue add`, `queue cancel`",
        entry="argosy.cli.queue:show",
        options=(JSON,),
        examples=("argosy queue",),
    ),
    Verb(
        "queue ls",
        "queue ls",
        "runs that wait for CPU and memory, and why",
        entry="argosy.cli.queue:show",
        options=(JSON,),
        examples=("argosy queue ls --json",),
    ),
    Verb(
        "queue add",
        "queue add [options] SCRIPT|SPEC.toml [options] [-- ARGUMENTS]",
        "put a run into the queue and return",
        entry="argosy.cli.queue:add",
        options=_QUEUE_ADD_OPTIONS,
        details="Also -m MODULE and -- COMMAND..., as for `argosy run`.",
        examples=("argosy queue add --cpus 1 --array 20 -- ./experiment.sh",),
    ),
    Verb(
        "queue cancel",
        "queue cancel RUN",
        "take runs out of the queue; running ones are stopped",
        entry="argosy.cli.queue:cancel",
        options=(JSON,),
        details="RUN is an id or the beginning of one; or a name: then all runs of that name, arrays too, that have not ended.",
        examples=("argosy queue cancel experiment",),
    ),
    *FILE_VERBS,
    Verb(
        "doctor",
        "doctor",
        "is this machine fit to train, and how to mend it",
        entry="argosy.cli.doctor:main",
        options=(
            Option(
                "--transfer",
                "start a few processes and say which route each pair would use for data, why, and how fast it is",
            ),
            Option("-n N", "how many of them: 2 to 16; default: 4", kind="count"),
            JSON,
        ),
        details=(
            "Looks at interpreter, torch, CPU instructions, kernels, memory, disk, limits, clock, home, containment, stacks and name lookup.\n"
            "Each line is ok, a warning (works, but worse than it could) or broken, with the mend below it.\n"
            "Exits 0 when nothing is broken, else 1. Needs no running cluster and changes nothing."
        ),
        examples=("argosy doctor", "argosy doctor --transfer -n 3"),
    ),
    Verb(
        "demo",
        "demo",
        "train a GPT on all cores, kill a rank, and compare the bits with an undisturbed run",
        entry="argosy.cli.demo:demo",
        options=(
            Option("--quick", "fewer steps of a smaller model"),
            JSON,
        ),
        details=(
            "Trains on the sources of the Python standard library; nothing is downloaded. Takes about a minute on two cores.\n"
            "A cluster that it had to start is stopped again. The exit code is 0 only if everything that it shows has happened."
        ),
        examples=("argosy demo", "argosy demo --quick --json"),
    ),
    Verb(
        "version",
        "version",
        "the version",
        entry="argosy.cli.version:version",
        options=(JSON,),
        examples=("argosy version",),
    ),
    Verb(
        "help",
        "help [VERB...]",
        "this text, or that of a verb",
        entry="argosy.cli.help:help",
        examples=("argosy help run", "argosy help queue add"),
    ),
)
