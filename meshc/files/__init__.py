"""Atomic files with hashes, in folders that only their owner can write."""
