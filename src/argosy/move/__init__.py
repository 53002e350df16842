"""Data movement: arenas, exchange, collectives, boxes and plans."""
