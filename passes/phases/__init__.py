"""Data that passes map: the request, the three phases (traced, placed, lowered), factors and shardings; and the pass type."""
