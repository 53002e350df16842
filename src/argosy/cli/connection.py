"""Connection: this machine's controller, and which run a person means.

Called by every verb that asks the controller something. A read command never starts a cluster; it says how to.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from argosy.cli.arguments import is_whole_number
from argosy.control.asking import ControllerClient
from argosy.control.home import Cluster, look_at_cluster
from argosy.errors import ConfigError, ForgottenError, NotFoundError

MOST_LISTED = 10_000


class Target:
    """`RUN[/ROLE[/INDEX]]` taken apart."""

    __slots__ = ("index", "role", "run")

    def __init__(self, run: str, role: str | None, index: int | None) -> None:
        self.run = run
        self.role = role
        self.index = index

    def holds(self, process: dict[str, Any]) -> bool:
        """Is this process part of the target?"""
        return self.role in (None, process["role"]) and self.index in (None, process["index"])


class Controller:
    """The running controller of this machine; errors of the connection come as errors for people."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.client = ControllerClient(cluster)

    def get(self, target: str) -> Any:
        """GET."""
        return self.client.reach(lambda: self.client.get(target), is_reading=True)

    def post(self, target: str, body: Any) -> Any:
        """POST."""
        return self.client.reach(lambda: self.client.post(target, body))

    def run(self, word: str, *, to_act: bool = False) -> dict[str, Any]:
        """The run a person means: an id, the beginning of one, a name (newest), or nothing for the newest run.

        A verb that acts on processes (`to_act`) means the newest that is alive, and one that has ended only if there is none.
        """
        if not word:
            return self.newest(to_act=to_act)
        runs: list[dict[str, Any]] = self.get(
            f"/v1/runs?all=1&limit={MOST_LISTED}&name={quote(word)}"
        )["runs"]
        named = [run for run in runs if run["name"] == word]
        try:
            view: dict[str, Any] = self.get(f"/v1/runs/{quote(word, safe='')}")
            if view["run"] == word or not named:
                return view
        except NotFoundError as error:
            if not named:
                return self._by_prefix(word, error)
        return newest_of(named, to_act=to_act)

    def newest(self, *, to_act: bool = False) -> dict[str, Any]:
        """The run submitted last."""
        alive = self.get("/v1/runs?all=0&limit=100")["runs"] if to_act else []
        # One that only helps another must be named to be acted upon.
        runs = [run for run in alive if not run.get("helps")] or self.get(
            "/v1/runs?all=1&limit=100"
        )["runs"]
        if not runs:
            raise NotFoundError("there is no run yet", fix="start one: argosy run SCRIPT")
        return newest_of(runs, to_act=to_act)

    def all_named(self, word: str) -> list[dict[str, Any]]:
        """The run of this id; else all runs of this name and of the array of this name, oldest first; none when there are none."""
        runs: list[dict[str, Any]] = self.get(f"/v1/runs?all=1&limit={MOST_LISTED}")["runs"]
        if found := [run for run in runs if run["run"] == word]:
            return found
        return [run for run in reversed(runs) if run["name"] == word or is_member(run, word)]

    def _by_prefix(self, word: str, error: NotFoundError) -> dict[str, Any]:
        """The run whose id begins so; `error` is what the controller said of the whole word."""
        runs = self.get(f"/v1/runs?all=1&limit={MOST_LISTED}")["runs"]
        matching: list[dict[str, Any]] = [run for run in runs if run["run"].startswith(word)]
        if len(matching) == 1:
            return matching[0]
        if matching:
            some = ", ".join(run["run"] for run in matching[:5])
            raise NotFoundError(
                f"{len(matching)} runs begin with {word!r}", fix=f"say which: {some}"
            )
        if members := [run for run in runs if is_member(run, word)]:
            raise NotFoundError(
                f"{word!r} is an array of {len(members)} runs", fix=f"name one of them: '{word}[0]'"
            )
        if isinstance(error, ForgottenError):
            raise error  # the beginning of an id can look like a whole one of long ago: only now it is that
        from argosy.config.nearest import nearest

        names = {run["name"] for run in runs if run["name"]} | {run["run"] for run in runs}
        match = nearest(word, names)
        raise NotFoundError(
            f"there is no run {word!r}",
            fix=f"did you mean `{match}`?" if match else "`argosy ps --all` lists the runs",
        )

    def resolve(self, text: str, *, to_act: bool = False) -> tuple[Target, dict[str, Any]]:
        """A typed target and the run's view; the role and the process must exist."""
        target = parse_target(text)
        view = self.run(target.run, to_act=to_act)
        target.run = view["run"]
        roles = {role["role"]: role for role in view["roles"]}
        if target.role is not None and target.role not in roles:
            from argosy.config.nearest import did_you_mean

            fix = did_you_mean(target.role, roles)
            if target.role.isdecimal() and len(roles) == 1:
                fix = (
                    f"name the role too: {text.partition('/')[0]}/{next(iter(roles))}/{target.role}"
                )
            raise NotFoundError(f"run {view['run']} has no role {target.role!r}", fix=fix)
        if target.index is not None and target.role is not None:
            indexes = [p["index"] for p in roles[target.role]["processes"]]
            if indexes and target.index not in indexes:
                raise NotFoundError(
                    f"role {target.role} of run {view['run']} has no process {target.index}",
                    fix=f"it has {min(indexes)} to {max(indexes)}",
                )
        return target, view


def newest_of(runs: list[dict[str, Any]], *, to_act: bool) -> dict[str, Any]:
    """The run submitted last; to act upon it, the last of those that are alive if there are any. One that only helps another is meant last of all."""
    own = [run for run in runs if not run.get("helps")] or runs
    alive = [run for run in own if run["state"] != "ended"] if to_act else []
    return max(alive or own, key=lambda run: float(run["submitted_at"]))


def is_member(run: dict[str, Any], array: str) -> bool:
    """Is it one of the runs that `queue add --array` made under this name?"""
    name = str(run.get("name") or "")
    return name.endswith("]") and name.rpartition("[")[0] == array


def connect() -> Controller:
    """The controller of this machine's cluster; nothing is started or made. Whether it answers shows with the first question."""
    return Controller(look_at_cluster())


def parse_target(text: str) -> Target:
    """`RUN[/ROLE[/INDEX]]`."""
    parts = text.split("/")
    if len(parts) > 3 or (len(parts) > 1 and not all(parts)):
        raise ConfigError(f"{text!r} is not a target", fix="write RUN, RUN/ROLE or RUN/ROLE/INDEX")
    if len(parts) == 3 and not is_whole_number(parts[2]):
        raise ConfigError(
            f"{parts[2]!r} is not the index of a process", fix=f"example: {parts[0]}/{parts[1]}/0"
        )
    return Target(
        parts[0],
        parts[1] if len(parts) > 1 else None,
        int(parts[2]) if len(parts) == 3 else None,
    )


def processes_of(view: dict[str, Any], target: Target | None = None) -> list[dict[str, Any]]:
    """All processes of a run, or those of a target."""
    return [
        process
        for role in view["roles"]
        for process in role["processes"]
        if target is None or target.holds(process)
    ]


def describe_end(view: dict[str, Any]) -> str:
    """That a run has ended already, as a sentence."""
    was = "been " if view["outcome"] == "cancelled" else ""
    return f"run {view['run']} has already {was}{view['outcome'] or 'ended'}"
