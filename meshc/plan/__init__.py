"""The plan language: entries, files, recipes."""
