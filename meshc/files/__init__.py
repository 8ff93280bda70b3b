"""Files that are complete or not there, that carry hashes, and that only their owner can write."""
