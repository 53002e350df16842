"""The zygote: a Python process that has imported its preloads and forks warm ranks into the keeper's care.

The keeper starts it as `python -m argosy.control.zygote --socket FD` and speaks the frames of
docs/reference/keeper-protocol.md. `parent` serves them, `rank` turns a fork into a user process, `program` runs the script
as `python script.py` would, `shutdown` ends it. Standard library alone; what it preloads is named by the keeper.
"""
