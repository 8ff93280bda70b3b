"""A plan as text for what has been decided: entries, pins and store lines that say it."""
