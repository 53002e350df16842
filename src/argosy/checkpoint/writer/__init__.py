"""The writer process: sends staged snapshots to the disk, outside the ranks, and finishes what they have staged when they are dead.

`client` is the ranks' side. One process per host and store, started by the first save that needs it; it ends when nobody is connected and nothing is
left to write. No torch.
"""
