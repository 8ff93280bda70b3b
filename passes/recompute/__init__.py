"""What backward keeps of forward, and what it recomputes."""
