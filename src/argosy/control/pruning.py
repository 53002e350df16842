"""Pruning: takes the events of forgotten runs out of the event log's database, a few rows at a time.

Called by the event log in its writer's thread. With the fact itself the runs are written down as doomed, in the same commit, so that a
log whose deletion was cut anywhere is read as if it were complete; the rest is finished later. It never touches an event above the mark.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable

from argosy.protocol.facts import Event, RunsForgotten

SCHEMA = """
create table doomed (run text primary key) without rowid;
create table retention (mark integer not null);
insert into retention values (0);
"""
"""`doomed`: forgotten runs that still have events below the mark. `mark`: the number of the newest RunsForgotten."""
KEPT = "(run not in (select run from doomed) or seq > (select mark from retention))"
"""Condition on the events that a reader should see."""
# Without `run != ''` SQLite does not see that the partial index by run has all it looks for.
_PIECE = """
delete from events where seq in (
    select seq from events where run = ? and run != '' and seq < (select mark from retention)
    order by seq limit ?
)
"""


def mark_of(connection: sqlite3.Connection) -> int:
    """Every number below it may be missing."""
    mark: int = connection.execute("select mark from retention").fetchone()[0]
    return mark


def num_doomed(connection: sqlite3.Connection) -> int:
    """Runs whose events are still to be deleted."""
    count: int = connection.execute("select count(*) from doomed").fetchone()[0]
    return count


def doom(connection: sqlite3.Connection, events: Iterable[Event]) -> None:
    """In the transaction that writes these events: note the runs that they forget."""
    for event in events:
        if not isinstance(event.fact, RunsForgotten):
            continue
        connection.executemany(
            "insert or ignore into doomed values (?)", [(run,) for run in event.fact.runs]
        )
        # A later one says all that an earlier one said beside its runs, and those are in the table.
        connection.execute("delete from events where seq = (select mark from retention)")
        connection.execute("update retention set mark = ?", (event.seq,))


def delete_some(connection: sqlite3.Connection, limit: int) -> int:
    """In a transaction: delete up to so many events of doomed runs; how many it were, runs that are through included."""
    count = 0
    for (run,) in connection.execute("select run from doomed limit ?", (limit,)).fetchall():
        if count >= limit:
            break
        deleted = connection.execute(_PIECE, (run, limit - count)).rowcount
        count += deleted + 1
        if count <= limit:
            connection.execute("delete from doomed where run = ?", (run,))
    return count
