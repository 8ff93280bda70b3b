"""The head and loss in chunks of their tokens."""
