"""Checkpoints in the memory of other hosts: a host that has lost its memory and its disk gets its part back from them.

A process of its own on each host holds the bytes; who holds what for whom is decided in custody.py. No torch.
"""
