"""Inside one process of a run: its link to the keeper and its gang.

Works in any Python program under Argosy, forked or started by exec, and does nothing outside it. Never imports torch.
"""
