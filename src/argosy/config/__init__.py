"""What to run: the spec of a run and its roles, from TOML, the command line or Python."""
