"""Plan text for decided shardings: axis entries, pins and store lines."""
