"""The training loop: lanes, the step transaction, optimizers on shared state, recovery."""
