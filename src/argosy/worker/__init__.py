"""Inside one process of a run: its link to the keeper, its gang, its arenas.

Works in any Python program under Argosy, forked or started by exec, and does nothing outside it. Never imports torch.
"""
