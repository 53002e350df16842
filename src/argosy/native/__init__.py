"""C11 kernels and their loader; works without them, slower. Never reaches torch."""
