"""Agreement of ranks: descriptions of what must be equal on all, their comparison, and broadcasts through the store."""
