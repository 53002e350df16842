"""Evidence out: a run's directory and the output of its processes."""
