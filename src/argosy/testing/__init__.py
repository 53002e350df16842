"""The public test kit: a virtual clock, a simulated network and a simulated cluster with faults."""
