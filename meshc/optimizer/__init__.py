"""Optimizer updates as operators, obtained by tracing or trying `Optimizer.step`."""
