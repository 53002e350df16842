"""A run that does nothing."""
