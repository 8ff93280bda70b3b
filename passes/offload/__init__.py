"""Offload to the host: parameters, optimizer state, and values of forward that backward reads."""
