"""Saved states and saved programs: reading, writing and running them."""
