"""Inside one process of a run: `launch` and `Run`, its gang; and the household, a run without a cluster.

Gang and link work in any Python program under Argosy, forked or started by exec. torch is imported by `launch` in ranks alone.
"""
