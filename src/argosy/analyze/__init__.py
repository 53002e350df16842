"""Questions asked of the evidence, one per file; pure functions over events, lines and stacks."""
