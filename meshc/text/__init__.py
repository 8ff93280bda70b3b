"""A program as text: printed, parsed, and which operators it may name."""
