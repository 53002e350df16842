"""Drivers of the peers; each runs in its own environment under .peers/, or (torchrun) in ours."""
