"""Microbatches: a step or an inference cut into stages that run once per microbatch."""
