"""All ranks in one process: simulation, and verification by it."""
