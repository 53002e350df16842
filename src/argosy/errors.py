"""Every exception that Argosy raises on purpose; each says what happened, with values, and the fix.

The command line prints the two lines and exits with the class's `exit_code`; the traceback goes to the log.
Exit codes of the classes are documented in docs/reference/exit-codes.md.
"""

from __future__ import annotations


class ArgosyError(Exception):
    """Root of all errors for people: `what` happened, and the `fix`."""

    exit_code = 70

    def __init__(self, what: str, *, fix: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.what}\n  fix: {self.fix}" if self.fix else self.what


class ConfigError(ArgosyError):
    """The spec or the command line is wrong; nothing was started."""

    exit_code = 64


class DataError(ArgosyError):
    """A token file or a data set is not what it says it is: of another dtype, cut short, changed."""

    exit_code = 65


class CheckpointDamaged(DataError):
    """A checkpoint is not what it says it is: names the checkpoint, the file and the tensors in it."""


class NotFoundError(ArgosyError):
    """No such run, role or process."""

    exit_code = 66


class ForgottenError(NotFoundError):
    """The run has ended so long ago that only its directory is left."""


class ClusterError(ArgosyError):
    """The local cluster cannot be started or reached."""

    exit_code = 69


class HomeError(ArgosyError):
    """The home directory cannot be used: unwritable, full, or of another version."""

    exit_code = 73


class ProtocolError(ArgosyError):
    """The other side sent what this version cannot accept."""

    exit_code = 76


class RunFailed(ArgosyError):
    """The run ended without success; carries the first cause's exit code."""

    def __init__(self, what: str, *, fix: str = "", exit_code: int = 1) -> None:
        super().__init__(what, fix=fix)
        self.exit_code = exit_code


class GenerationChanged(ArgosyError):
    """A member left or joined the gang: call `rejoin()` to get the new generation."""

    exit_code = 75


class RoundOver(ArgosyError):
    """Others have finished the round that this process still worked for: go on from the committed version."""

    exit_code = 75


class StepStopped(ArgosyError):
    """A step's numbers are such that the guard stops the run."""

    exit_code = 65


class PeerLost(ArgosyError):
    """A process that this one waited for has ended; `rank` says which."""

    exit_code = 75

    def __init__(self, rank: int, what: str = "") -> None:
        text = f"peer lost: rank {rank} has ended" + (f" during {what}" if what else "")
        super().__init__(
            text,
            fix="see that rank's own output (in a run: `argosy why`); go on in a new group or generation",
        )
        self.rank = rank


class TimedOut(ArgosyError):
    """A bounded wait has reached its deadline; says for whom and for what."""

    exit_code = 75


class PeerAbsent(TimedOut):
    """Nobody answers for the memory that a host keeps for its peers."""


class MismatchError(ArgosyError):
    """Ranks called different things at the same place; names both ranks and call sites."""

    exit_code = 65


class NoRoom(ArgosyError):
    """An arena, a pool or the host has no memory left for what was asked."""

    exit_code = 71


class ArenaGone(ArgosyError):
    """The arena does not exist any more, or belongs to another run or layout."""

    exit_code = 66


class NoRoute(ArgosyError):
    """No route can move this tensor between these processes."""

    exit_code = 69


LEFT_CODE = 143
"""Exit code of a process that has saved and left because it was asked to: as of one that SIGTERM has ended, not done."""

REFUSALS = (ConfigError, DataError, MismatchError, NoRoom, StepStopped)
"""Another start of the same program would say the same: said once, in two lines, and nothing is restarted."""


class InvariantError(ArgosyError):
    """A bug of ours: a decider met an impossible transition; carries the story that led to it."""

    exit_code = 70

    def __init__(self, what: str, *, story: list[str] | None = None) -> None:
        lines = "".join(f"\n    {line}" for line in (story or []))
        super().__init__(
            f"{what}; the story:{lines}" if lines else what, fix="report this with the story above"
        )
        self.story = story or []
