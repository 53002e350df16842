"""Side-by-side measurements with peers: `python -m benchmarks launch|supervise --json`. See docs/reference/benchmarks.md."""
