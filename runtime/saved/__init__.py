"""Saved states and programs, read and written."""
