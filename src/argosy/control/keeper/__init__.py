"""The keeper: real parent and reaper of every user process on this host.

It uses the standard library alone, has one thread and one poll loop, and is driven by frames on `keeper.sock`
(docs/reference/keeper-protocol.md). It carries out; it never decides what should run.
"""
